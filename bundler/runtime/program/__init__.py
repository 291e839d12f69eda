# SPDX-License-Identifier: Apache-2.0
"""How a generated program of a bundle runs without a compiler, and, where it calls no operator of
torch, without torch.

In the order of a replay: `program_plan` decodes a plan and refuses what no generator writes, `run`
launches its kernels and calls its operators step by step; `device_tensors` takes inputs of any
library. `docs/codegen.md` says more.
"""
