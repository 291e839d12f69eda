# SPDX-License-Identifier: Apache-2.0
"""The entry point of this package: `python -m tools.fuzz PROGRAM`; each program is the module of its name."""

from __future__ import annotations

import sys

from tools.shared import programs

PROGRAMS = {
    "bundle": "damaged and hostile bundles",
    "directory": "stores and cache directories that hold pipes, links, devices and damaged files",
    "redis": "hostile values in a real Redis server",
}

if __name__ == "__main__":
    sys.exit(programs.run("tools.fuzz", PROGRAMS))
