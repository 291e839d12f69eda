# SPDX-License-Identifier: Apache-2.0
"""What the first call through torch.compile imports and sets up, once for all programs that a
`PreparedProcess` runs: 0.5 s of a processor each, 1 s where they train.

No gradient is computed: torch computes none in a fork of a process that has done so.
"""

import importlib

import torch

from bundler.codegen import torch_backend

# AOTAutograd imports them for a graph with gradients.
for name in ("torch._inductor.lowering", "torch._inductor.pattern_matcher"):
    importlib.import_module(name)
options = {"keep": False, "workers": 1}
softmax = torch.compile(
    lambda x: torch.softmax(x * 2, -1), backend=torch_backend.triton_bundler, options=options
)
softmax(torch.zeros(4, 8))
torch._dynamo.reset()
