# SPDX-License-Identifier: Apache-2.0
"""`random_arguments`, `candidate_times`, `report`: what the benchmark at the end of a generated
module calls; it is there with `benchmark_harness=True`.

    python bundler_source_<digest>.py        prints milliseconds, gigabytes, and gigabytes a second

Importing the module needs no torch; running it as a program does, and a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from bundler.codegen.module_decorators import ModuleKernel, current_device
from bundler.runtime.tuning.benchmark import Clock, CudaClock
from bundler.toolchain.descriptor_arguments import with_descriptors
from bundler.toolchain.torch_memory import provide_scratch, random_tensor

# A tensor's dtype, sizes and strides; or a plain number.
Example = tuple[str, tuple[int, ...], tuple[int, ...]] | int
_REP_MS = 40.0
_S_OF_MS = 1e-3


def random_arguments(examples: Sequence[Example], device: str = "cuda") -> tuple[Any, ...]:
    """Return arguments of a launch: random floats, and zeros for integers, which may be indices.

    Args:
        examples: one for each parameter.
        device: as torch names it.
    """
    return tuple(
        item if isinstance(item, int) else random_tensor(*item, device=device) for item in examples
    )


def candidate_times(
    kernel: ModuleKernel, args: Sequence[Any], clock: Clock | None = None
) -> dict[str, float]:
    """Return how long each candidate on this device takes, in milliseconds.

    Args:
        kernel: of the module.
        args: of a launch; what the kernel changes is changed.
        clock: None for the GPU's own.
    """
    clock = clock or CudaClock(rep_ms=_REP_MS)
    return {
        name: clock.sample(launch, _nothing).median_ms
        for name, launch in candidate_launches(kernel, args).items()
    }


def candidate_launches(kernel: ModuleKernel, args: Sequence[Any]) -> dict[str, Callable[[], Any]]:
    """Return what launches each candidate on this device, the one that is chosen without a
    measurement first; arguments as `candidate_times` has them.
    """
    made = kernel.on(current_device())
    if kernel.facts.tma_min_blocks:
        provide_scratch()
    bound = made.bind(*args)
    found: dict[str, Callable[[], Any]] = {}
    for config in made.configs:
        grid = made.grid_of(config, bound)
        call = {**bound, **config.all_kwargs(), **made.constants, **made.compile_options}
        found[str(config)] = partial(made.fn[grid], **with_descriptors(made.fn, call))
    return found


def report(
    call: Callable[[Sequence[Any]], None],
    args: Sequence[Any],
    gigabytes: float,
    clock: Clock | None = None,
) -> None:
    """Print how long a launch takes, and how much memory it moves in that time.

    Args:
        call: launches.
        args: of the launch.
        gigabytes: that are read and written.
        clock: None for the GPU's own.
    """
    taken = (clock or CudaClock(rep_ms=_REP_MS)).sample(partial(call, args), _nothing).median_ms
    # a program's output
    rate = gigabytes / (taken * _S_OF_MS)
    print(f"{taken:.3f} ms    {gigabytes:.3f} GB    {rate:.2f} GB/s")  # noqa: T201


def _nothing() -> None:
    """Reset nothing between launches."""
