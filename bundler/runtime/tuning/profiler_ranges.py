# SPDX-License-Identifier: Apache-2.0
"""`launch_range`: a launch as a range in torch's profiler, with the facts that Inductor gives of its own launches.

`AutotunedKernel` opens one around a launch while a profiler is active.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from bundler.runtime.configs import Config
from bundler.runtime.launch.argument_types import is_tensor


def active() -> bool:
    """Whether torch's profiler is recording in this process; never imports torch."""
    profiler: Any = sys.modules.get("torch.autograd.profiler")
    return profiler is not None and bool(getattr(profiler, "_is_profiler_enabled", False))


def facts_of(kernel: str, config: Config) -> dict[str, Any]:
    """Return what a range tells of a launch; names as Inductor's."""
    return {
        "kernel_name": kernel,
        "kernel_backend": "triton",
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "kernel_kwargs": ",".join(f"{name}={value}" for name, value in config.kwargs.items()),
    }


@contextlib.contextmanager
def launch_range(kernel: str, args: Sequence[Any], config: Config) -> Iterator[None]:
    """Mark what happens inside as one launch of a kernel."""
    fast: Any = getattr(getattr(sys.modules["torch"], "_C", None), "_profiler", None)
    make = getattr(fast, "_RecordFunctionFast", None)
    name = kernel or "triton kernel"
    if make is None:
        with sys.modules["torch.autograd.profiler"].record_function(name):
            yield
        return
    with make(name, [value for value in args if is_tensor(value)], facts_of(kernel, config)):
        yield
