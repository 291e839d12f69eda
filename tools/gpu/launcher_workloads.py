# SPDX-License-Identifier: Apache-2.0
"""What `python -m tools.gpu launcher` calls first: our examples, every case of the GPU check, Liger and FLA where they are installed.

Each workload imports what it needs when it is chosen, and returns what makes the calls: digests of the results by name.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from tools.gpu import cases, launches
from tools.shared import example_kernels

Calls = Callable[[], dict[str, Any]]


def _examples() -> Calls:
    kernels = example_kernels.load()
    return lambda: {
        name: kernels.checksum(tensor) for name, tensor in kernels.run_all("cuda").items()
    }


def _cases() -> Calls:
    import torch
    import triton
    from triton.tools.tensor_descriptor import TensorDescriptor

    kernels = launches.load_kernels()
    triton.set_allocator(
        lambda size, _align, _stream: torch.empty(size, device="cuda", dtype=torch.int8)
    )

    def calls() -> dict[str, Any]:
        return {case.row: launches.digest_of(torch, case, TensorDescriptor, getattr(kernels, case.kernel))
                for case in cases.cases(1)}  # fmt: skip

    return calls


def _liger() -> Calls:
    import torch

    cross_entropy = import_module("liger_kernel.ops.cross_entropy").LigerCrossEntropyFunction
    layer_norm = import_module("liger_kernel.ops.layer_norm").LigerLayerNormFunction
    rms_norm = import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction
    swiglu = import_module("liger_kernel.ops.swiglu").LigerSiLUMulFunction

    def calls() -> dict[str, Any]:
        torch.manual_seed(7)
        x, y = (torch.randn(64, 512, device="cuda", requires_grad=True) for _ in range(2))
        weight, bias = (torch.randn(512, device="cuda", requires_grad=True) for _ in range(2))
        target = torch.arange(64, device="cuda")
        results = {
            "rms_norm": rms_norm.apply(x, weight, 1e-6),
            "layer_norm": layer_norm.apply(x, weight, bias, 1e-6),
            "swiglu": swiglu.apply(x, y),
            "cross_entropy": cross_entropy.apply(x * 1, target, None)[0],
        }
        for result in results.values():
            result.sum().backward()
        return {name: _digest(result) for name, result in results.items()} | {
            "gradient": _digest(y.grad)
        }

    return calls


def _fla() -> Calls:
    import torch

    chunk_gla = import_module("fla.ops.gla").chunk_gla
    chunk_retention = import_module("fla.ops.retention").chunk_retention
    _keep_first_configs("fla.")

    def calls() -> dict[str, Any]:
        torch.manual_seed(7)
        q, k, v = (
            torch.randn(1, 256, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for _ in range(3)
        )
        gate = torch.nn.functional.logsigmoid(torch.randn(1, 256, 4, 64, device="cuda"))
        results = {"gla": chunk_gla(q, k, v, gate)[0], "retention": chunk_retention(q, k, v)[0]}
        for result in results.values():
            result.float().sum().backward()
        return {
            name: list(result.shape) for name, result in results.items()
        }  # its tuner may choose otherwise each time

    return calls


def _keep_first_configs(package: str, count: int = 2) -> None:
    """Leave the tuners of a package's modules their first configurations: all have the same signatures, so the same launchers."""
    from triton.runtime.autotuner import Autotuner

    modules = [module for name, module in sys.modules.items() if name.startswith(package)]
    for value in [value for module in modules for value in vars(module).values()]:
        wrapped = value
        while type(wrapped).__module__.startswith("triton.") and not isinstance(wrapped, Autotuner):
            wrapped = getattr(wrapped, "fn", None)
        if isinstance(wrapped, Autotuner):
            wrapped.configs = wrapped.configs[:count]


def _digest(tensor: Any) -> str:
    import torch

    return hashlib.sha256(
        tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    ).hexdigest()


WORKLOADS: dict[str, Callable[[], Calls]] = {
    "examples": _examples,
    "cases": _cases,
    "liger": _liger,
    "fla": _fla,
}
