# SPDX-License-Identifier: Apache-2.0
"""The entry point of this package: `python -m tools.codegen PROGRAM`; each program is the module of
its name.
"""

from __future__ import annotations

import sys

from tools.shared import programs

PROGRAMS = {
    "counts": (
        "kernels of 47 graphs beside those that Inductor generates for the same graphs, without"
        " a GPU"
    ),
    "bench": (
        "run time, kernels and generation of the same graphs beside Inductor's, and cold starts, on"
        " a GPU"
    ),
    "graph-calls": "what a call costs that is one CUDA graph, beside Inductor's",
    "graph-keys": "whether the key of a graph, by which a second process finds its program, says all",
    "judges": "models, random programs and suites on all GPUs of a machine, and a result of each",
    "memory-check": "memory of a GPU without torch: 10,000 calls, other libraries, no leak, weights",
    "mission": "the same graphs built without a GPU, and launched on one without torch and Triton",
    "models": "whole models of transformers and timm on a GPU, beside eager mode and Inductor",
    "products": "products of matrices as kernels on a GPU, beside cuBLAS",
    "random-graphs": "random functions at real sizes on a GPU, beside torch",
    "random-programs": (
        "random programs through torch.compile, forward and backward, on a GPU or in the"
        " interpreter, beside eager torch"
    ),
    "suites": "torch's own lists of operators and modules, on the CPU or a GPU, beside torch",
}

if __name__ == "__main__":
    sys.exit(programs.run("tools.codegen", PROGRAMS))
