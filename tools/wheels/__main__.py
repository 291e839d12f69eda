# SPDX-License-Identifier: Apache-2.0
"""The entry point of this package: `python -m tools.wheels PROGRAM`; each program is the module of
its name.
"""

from __future__ import annotations

import sys

from tools.shared import programs

PROGRAMS = ("release", "trial", "texts", "bill", "constraints")

if __name__ == "__main__":
    sys.exit(programs.run("tools.wheels", PROGRAMS))
