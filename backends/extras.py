# SPDX-License-Identifier: Apache-2.0
"""How to install an optional package: the one place that says where it is to be had."""

from __future__ import annotations


def install(extra: str) -> str:
    """Return the command that installs an extra: from a checkout, since the package is on no index yet."""
    return f"pip install '.[{extra}]' in a checkout (pip install 'triton-bundler[{extra}]' once it is on an index)"
