# SPDX-License-Identifier: Apache-2.0
"""The entry point of this package: `python -m tools.fuzz PROGRAM`; each program is the module of
its name.
"""

from __future__ import annotations

import sys

from tools.shared import programs

PROGRAMS = {
    "bundle": "damaged and hostile bundles",
    "directory": "stores and cache directories that hold pipes, links, devices and damaged files",
    "operators": "operators of torch that a plan may call, with hostile arguments",
    "redis": "hostile values in a real Redis server",
    "replies": "a server that answers commands of Redis with anything",
}

if __name__ == "__main__":
    sys.exit(programs.run("tools.fuzz", PROGRAMS))
