# SPDX-License-Identifier: Apache-2.0
"""`launch_range`: a launch as a range in torch's profiler, with the facts that Inductor gives of
its own launches.

`AutotunedKernel` opens one around a launch while a profiler is active.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from bundler.runtime.launch.calls.argument_types import is_tensor
from bundler.runtime.tuning.tuner_plugins import TunedLaunch

_NOTHING: Mapping[str, float] = MappingProxyType({})


def facts_of(launch: TunedLaunch, known: Mapping[str, float]) -> dict[str, Any]:
    """Return what a range tells of a launch; names as Inductor's, and `grid`.

    Args:
        launch: the launch.
        known: further facts, such as `kernel_num_gb`.
    """
    config = launch.config
    return {
        "kernel_name": launch.kernel,
        "kernel_backend": "triton",
        "kernel_file": launch.file,
        "kernel_hash": launch.key,
        "grid": f"grid{launch.grid}",
        "stream": launch.stream,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "kernel_kwargs": ",".join(f"{name}={value}" for name, value in config.kwargs.items()),
        # torch 2.13 writes a whole float as `4.` into its trace, which no reader of JSON takes.
        **{
            name: int(value) if float(value).is_integer() else value
            for name, value in known.items()
        },
    }


@contextlib.contextmanager
def launch_range(launch: TunedLaunch, known: Mapping[str, float] = _NOTHING) -> Iterator[None]:
    """Mark what happens inside as one launch of a kernel; arguments as for `facts_of`."""
    fast: Any = getattr(getattr(sys.modules["torch"], "_C", None), "_profiler", None)
    make = getattr(fast, "_RecordFunctionFast", None)
    name = launch.kernel or "triton kernel"
    if make is None:
        with sys.modules["torch.autograd.profiler"].record_function(name):
            yield
        return
    tensors = [value for value in launch.arguments.values() if is_tensor(value)]
    with make(name, tensors, facts_of(launch, known)):
        yield
