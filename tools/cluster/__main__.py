# SPDX-License-Identifier: Apache-2.0
"""The entry point of this package: `python -m tools.cluster PROGRAM`; each program is the module of
its name.
"""

from __future__ import annotations

import sys

from tools.shared import programs

PROGRAMS = {
    "simulation": "many ranks that need the same kernels at once, on a real Redis server",
    "cloud-faults": (
        "what commands and the plug-in do when an object store fails, and how long it takes"
    ),
    "race": "processes that restore, push and prune at once on one store and one cache directory",
}

if __name__ == "__main__":
    sys.exit(programs.run("tools.cluster", PROGRAMS))
