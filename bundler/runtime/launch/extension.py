# SPDX-License-Identifier: Apache-2.0
"""`EXTENSION`: the compiled half of the launch room, None where it was not built; each module that
has a part there asks it, and does the same in Python without.
"""

from __future__ import annotations

from typing import Any

EXTENSION: Any | None
try:
    from bundler.runtime.launch import _launch  # type: ignore[attr-defined, unused-ignore]
except ImportError:
    EXTENSION = None
else:
    EXTENSION = _launch
