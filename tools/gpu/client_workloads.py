# SPDX-License-Identifier: Apache-2.0
"""Workloads of real clients, each an object as examples/kernels.py is one: `run_all(device)` calls
every kernel, `checksum` tells results apart.

`monitor.py` and `launcher.py` run them; a loader raises `ModuleNotFoundError` where the package is
not installed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tools.gpu.steps import bundler_command
from tools.shared import example_kernels

_SEED = 5
_ROWS, _COLUMNS = 64, 1024
_HEADS, _STEPS, _WIDTH = 4, 256, 64

Calls = Callable[[str], Mapping[str, Any]]


class Workload:
    """Functions of a client's package, forward and backward.

    Args:
        calls: returns results by name, for a device.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def run_all(self, device: str) -> Mapping[str, Any]:
        """Call everything once, with the same inputs each time."""
        import torch

        torch.manual_seed(_SEED)
        return self._calls(device)

    @staticmethod
    def checksum(tensor: Any) -> str:
        """Return the digest of a tensor's bytes."""
        return hashlib.sha256(tensor.detach().float().cpu().numpy().tobytes()).hexdigest()


def capture(bundle: Path, module: str, *words: object) -> None:
    """Compile what a module launches on all cores, without the GPU: a recording would compile FLA's
    many configurations one by one.

    A bundle that is there already, from a program before this one, is used as it is.
    """
    if bundle.is_file():
        return
    bundle.parent.mkdir(parents=True, exist_ok=True)
    program = ("--", sys.executable, "-m", module, *map(str, words))
    line = ("capture", "-o", bundle, "--target", "cuda:90", "--quiet", *program)
    bundler_command(*line, check=False, stdout=subprocess.DEVNULL)


def _backward(results: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the results and the gradients of the inputs."""
    total: Any = sum(result.float().sum() for result in results.values())
    total.backward()
    return {
        **results,
        **{f"d{name}": tensor.grad for name, tensor in inputs.items() if tensor.grad is not None},
    }


def _liger() -> Workload:
    from liger_kernel.ops import geglu, layer_norm, rms_norm, softmax, swiglu  # type: ignore[import-not-found]

    def calls(device: str) -> Mapping[str, Any]:
        import torch

        shapes = {
            "x": (_ROWS, _COLUMNS),
            "gate": (_ROWS, _COLUMNS),
            "weight": (_COLUMNS,),
            "bias": (_COLUMNS,),
        }
        inputs = {
            name: torch.randn(shape, device=device, requires_grad=True)
            for name, shape in shapes.items()
        }
        x, gate, weight, bias = inputs.values()
        return _backward(
            {
                "rms_norm": rms_norm.LigerRMSNormFunction.apply(
                    x, weight, 1e-6, 0.0, "llama", False
                ),
                # Their backward passes write into what was given.
                "swiglu": swiglu.LigerSiLUMulFunction.apply(gate.clone(), x.clone()),
                "geglu": geglu.LigerGELUMulFunction.apply(gate.clone(), x.clone()),
                "layer_norm": layer_norm.LigerLayerNormFunction.apply(x, weight, bias, 1e-5),
                "softmax": softmax.LigerSoftmaxFunction.apply(x),
            },
            inputs,
        )

    return Workload(calls)


def _fla() -> Workload:
    from fla.ops.gla import chunk_gla  # type: ignore[import-not-found]
    from fla.ops.retention import chunk_retention  # type: ignore[import-not-found]

    def calls(device: str) -> Mapping[str, Any]:
        import torch

        def tensor(*shape: int) -> Any:
            return torch.randn(1, _STEPS, _HEADS, *shape, device=device, dtype=torch.bfloat16)

        inputs = {name: tensor(_WIDTH).requires_grad_() for name in ("q", "k", "v")}
        gates = torch.nn.functional.logsigmoid(tensor(_WIDTH).float())
        return _backward(
            {"gla": chunk_gla(**inputs, g=gates)[0], "retention": chunk_retention(**inputs)[0]},
            inputs,
        )

    return Workload(calls)


LOADERS: dict[str, Callable[[], Any]] = {
    "examples": example_kernels.load,
    "liger": _liger,
    "fla": _fla,
}
_PACKAGES = {"examples": "triton", "liger": "liger_kernel", "fla": "fla"}


def available() -> list[str]:
    """Return the names of workloads whose package is installed."""
    return [name for name in LOADERS if importlib.util.find_spec(_PACKAGES[name]) is not None]
