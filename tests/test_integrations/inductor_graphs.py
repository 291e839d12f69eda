# SPDX-License-Identifier: Apache-2.0
"""A process that compiles a small function for the CPU with torch.compile: `inductor_graphs.py
save|load CACHE BUNDLE`.

The function is one product of matrices, so that no C++ has to be compiled.  It prints one JSON.
"""

import json
import os
import sys
import warnings

COMMAND, CACHE, BUNDLE = sys.argv[1:4]
os.environ |= {"TORCHINDUCTOR_CACHE_DIR": CACHE, "TORCHINDUCTOR_COMPILE_THREADS": "1"}

import torch  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402

import bundler  # noqa: E402
from bundler.integrations import inductor  # noqa: E402


def load():
    """Load the bundle; returns what is warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", bundler.BundlerWarning)
        inductor.load(BUNDLE, trust="code")
    return [str(warning.message) for warning in caught]


def main():
    """Do the command."""
    found = {}
    if COMMAND == "load":
        try:
            inductor.save(BUNDLE + ".nothing")
        except bundler.BundlerError as error:
            found = {"error": type(error).__name__, "text": str(error)}
        found["warnings"] = load()
    torch.manual_seed(0)
    x = torch.randn(8, 8, requires_grad=True)
    out = torch.compile(torch.matmul)(x, torch.randn(8, 8))
    out.backward(torch.ones(8, 8))
    if COMMAND == "save":
        inductor.save(BUNDLE)
    graphs = {
        name: count
        for name, count in counters["inductor"].items()
        if name.startswith("fxgraph_cache")
    }
    found |= {
        "loss": [out.sum().item(), x.grad.sum().item()],
        "counters": graphs,
        "autograd": counters["aot_autograd"]["autograd_cache_hit"],
    }
    if COMMAND == "load":
        torch._inductor.config.cpp.cxx = (None, "no-such-c++")
        found["other_compiler"] = load()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
