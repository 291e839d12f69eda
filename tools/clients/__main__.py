# SPDX-License-Identifier: Apache-2.0
"""The entry point of this package: `python -m tools.clients PROGRAM`; each program is the module of
its name.
"""

from __future__ import annotations

import sys

from tools.shared import programs

PROGRAMS = {
    "check": (
        "compiles, records and restores the kernels of all clients, and writes"
        " docs/results/clients.json"
    ),
    "compile": "the kernels of one client for one target; the program above starts it",
    "restore": (
        "a bundle of one client in another process at another path; the program above starts it"
    ),
}

if __name__ == "__main__":
    sys.exit(programs.run("tools.clients", PROGRAMS))
