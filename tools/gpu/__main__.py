# SPDX-License-Identifier: Apache-2.0
"""The entry point of this package: `python -m tools.gpu PROGRAM`; each program is the module of its
name.
"""

from __future__ import annotations

import sys

from tools.shared import programs

PROGRAMS = (
    "check",
    "slim",
    "autotune",
    "export",
    "launcher",
    "replay",
    "moved",
    "torch-compile",
)

if __name__ == "__main__":
    sys.exit(programs.run("tools.gpu", PROGRAMS))
