# SPDX-License-Identifier: Apache-2.0
"""The entry point of this package: `python -m tools.wheels PROGRAM`; each program is the module of its name."""

from __future__ import annotations

import sys

from tools.shared import programs

PROGRAMS = {
    "release": "a wheel that is built twice and is the same both times, its bill of materials, and their digests",
    "bill": "the bill of materials of a wheel, as CycloneDX",
}

if __name__ == "__main__":
    sys.exit(programs.run("tools.wheels", PROGRAMS))
