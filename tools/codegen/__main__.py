# SPDX-License-Identifier: Apache-2.0
"""The entry point of this package: `python -m tools.codegen PROGRAM`; each program is the module of
its name.
"""

from __future__ import annotations

import sys

from tools.shared import programs

PROGRAMS = (
    "counts",
    "attentions",
    "bench",
    "graph-calls",
    "graph-keys",
    "judges",
    "memory-check",
    "mission",
    "models",
    "products",
    "random-graphs",
    "random-programs",
    "small-products",
    "suites",
    "without-torch",
)

if __name__ == "__main__":
    sys.exit(programs.run("tools.codegen", PROGRAMS))
