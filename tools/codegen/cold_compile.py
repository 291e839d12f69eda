# SPDX-License-Identifier: Apache-2.0
"""Runs graphs once by torch.compile, from nothing: a process of `bench --cold`.

    python -m tools.codegen.cold_compile [NAME ...]

Prints JSON.  Inputs are zeros, as those of `cold_replay`.
"""

from __future__ import annotations

import json
import sys
import time

import torch

from tools.codegen.compared_graphs import GRAPHS


def main() -> int:
    """Compile and run each graph, and print what it took."""
    torch.cuda.synchronize()
    seconds: dict[str, float] = {}
    started = time.monotonic()
    for name in sys.argv[1:] or list(GRAPHS):
        began = time.monotonic()
        function, make = GRAPHS[name]
        given = [torch.zeros(one.shape, dtype=one.dtype, device="cuda") for one in make()]
        with torch.no_grad():
            torch.compile(function, dynamic=False)(*given)
        torch.cuda.synchronize()
        seconds[name] = time.monotonic() - began
    print(
        json.dumps(
            {"work_s": time.monotonic() - started, "graph_s": seconds, "graphs": len(seconds)}
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
