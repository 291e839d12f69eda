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
from functools import partial
from pathlib import Path
from typing import Any

from tools.gpu.steps import bundler_command
from tools.shared import example_kernels

_SEED = 5
# Of each client the groups of cases in `library_calls.py`, and which of them are called.
_LIGER = ("rms_norm", "swiglu", "geglu", "layer_norm", "softmax")
_CASES = {
    "liger": (("liger",), [f"liger.{name}.float32" for name in _LIGER]),
    "fla": (("fla", "wide"), ["fla.chunk_gla", "fla.chunk_retention"]),
}


class Workload:
    """Operators of a client's package, forward and backward.

    Args:
        client: whose; raises `ModuleNotFoundError` where it is not installed.
    """

    def __init__(self, client: str) -> None:
        from tools.gpu import library_calls

        groups, names = _CASES[client]
        made = {name: call for group in groups for name, call in library_calls.GROUPS[group]()}
        self._calls = {name: made[name] for name in names}

    def run_all(self, _device: str) -> Mapping[str, Any]:
        """Call everything once, with the same inputs each time; returns results and gradients."""
        import torch

        from tools.gpu import library_calls

        found: dict[str, Any] = {}
        for name, call in self._calls.items():
            torch.manual_seed(_SEED)
            result, given = call()
            found[name] = library_calls.backward(result)
            for number, value in enumerate(given):
                if getattr(value, "grad", None) is not None:
                    found[f"{name}, gradient {number}"] = value.grad
        return found

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


LOADERS: dict[str, Callable[[], Any]] = {
    "examples": example_kernels.load,
    **{name: partial(Workload, name) for name in _CASES},
}
_PACKAGES = {"examples": "triton", "liger": "liger_kernel", "fla": "fla"}


def available() -> list[str]:
    """Return the names of workloads whose package is installed."""
    return [name for name in LOADERS if importlib.util.find_spec(_PACKAGES[name]) is not None]
