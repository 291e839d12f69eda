# SPDX-License-Identifier: Apache-2.0
"""The entry point of this package: `python -m tools.hip PROGRAM`; each program is the module of its
name.
"""

from __future__ import annotations

import sys

from tools.shared import programs

PROGRAMS = {
    "headers": (
        "compares our numbers, structures and prototypes of the HIP runtime with AMD's headers of"
        " five releases"
    )
}

if __name__ == "__main__":
    sys.exit(programs.run("tools.hip", PROGRAMS))
