# SPDX-License-Identifier: Apache-2.0
"""The entry point of this package: `python -m tools.crash PROGRAM`; each program is the module of
its name.
"""

from __future__ import annotations

import sys

from tools.shared import programs

PROGRAMS = ("matrix",)

if __name__ == "__main__":
    sys.exit(programs.run("tools.crash", PROGRAMS))
