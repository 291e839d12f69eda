# SPDX-License-Identifier: Apache-2.0
"""`install`: the command that installs an optional package, kept in one place.

Messages about a package that is missing use it: of the Redis store, of the tests of the contract,
and, through `bundler/project.py`, of all rooms.
"""

from __future__ import annotations


def install(extra: str) -> str:
    """Return the command that installs an extra: from a checkout, since the package is on no index
    yet.
    """
    return (
        f"pip install '.[{extra}]' in a checkout (pip install 'triton-bundler[{extra}]' once it is"
        " on an index)"
    )
