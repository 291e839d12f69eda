# SPDX-License-Identifier: Apache-2.0
"""The entry point of this package: `python -m tools.codegen PROGRAM`; each program is the module of its name."""

from __future__ import annotations

import sys

from tools.shared import programs

PROGRAMS = {"counts": "kernels of 40 graphs beside those that Inductor generates for the same graphs, without a GPU"}

if __name__ == "__main__":
    sys.exit(programs.run("tools.codegen", PROGRAMS))
