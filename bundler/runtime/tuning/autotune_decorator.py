# SPDX-License-Identifier: Apache-2.0
"""`autotune`: Triton's decorator of the same name, with results that travel and launches that need
no compiler.

Users call it.  It checks its arguments and returns an `AutotunedKernel`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from bundler.errors import ConfigError
from bundler.runtime.tuning.autotuned_kernel import AutotunedKernel
from bundler.runtime.tuning.benchmark import REP_MS, WARMUP_MS, CudaClock, GivenClock
from bundler.runtime.tuning.config_list import ListedConfigs, Pruning
from bundler.runtime.tuning.trial import ArgumentEffects
from bundler.runtime.tuning.tuner_options import TunerOptions
from bundler.toolchain import tuner_toolchain as toolchain
from bundler.user_warnings import warn


def autotune(
    configs: Sequence[Any],
    key: Sequence[str],
    prune_configs_by: dict[str, Any] | None = None,
    reset_to_zero: Sequence[str] | None = None,
    restore_value: Sequence[str] | None = None,
    pre_hook: Callable[..., Any] | None = None,
    post_hook: Callable[..., Any] | None = None,
    warmup: float | None = None,
    rep: float | None = None,
    use_cuda_graph: bool = False,
    do_bench: Callable[..., Any] | None = None,
    cache_results: bool = False,
    *,
    options: TunerOptions | None = None,
) -> Callable[[Any], AutotunedKernel]:
    """Return a decorator for a `triton.jit` kernel that chooses, for each tuning key, the fastest
    of some configs.

    ::

        @bundler.autotune(
            [triton.Config({"BLOCK": 128}), triton.Config({"BLOCK": 256}, num_warps=8)], key=["n"]
        )
        @triton.jit
        def add(x, y, out, n, BLOCK: tl.constexpr): ...

    Takes what `triton.autotune` takes.  What differs: the winner is remembered in a record that
    goes into bundles and stores, and comes back with a restore, so that the next process neither
    compiles nor measures; kernels are launched without Triton where that can be; a benchmark runs
    on clones of the tensors named in `reset_to_zero` and `restore_value`, made outside of what is
    timed, and never zeroes the caller's.

    Args:
        configs: `triton.Config` objects, or `bundler.runtime.Config`; the first of equal ones
            counts.
        key: names of arguments; another value of one of them, or another element type of a tensor,
            is tuned anew.
        prune_configs_by: `early_config_prune`, `perf_model` and `top_k`, as for Triton.
        reset_to_zero: tensors that the kernel adds to; zero before each measured launch.
        restore_value: tensors that the kernel changes; as the caller gave them before each measured
            launch.
        pre_hook, post_hook: called around each measured launch, in place of the two above, with
            `(arguments)` and `(arguments, exception)`; `pre_hook(arguments, reset_only=True)` once
            after the last one.
        warmup, rep: milliseconds to warm up, and to measure each config.
        use_cuda_graph: measure launches captured in a CUDA graph, by
            `triton.testing.do_bench_cudagraph`.
        do_bench: measures, in place of `CudaClock`: `do_bench(fn, quantiles)` returns milliseconds.
        cache_results: also read and write the result files of Triton's own tuner
            (`*.autotune.json`).
        options: what Triton's decorator has no parameter for.

    Raises:
        ConfigError: no config, a config with a `pre_hook` of its own, a name that is no argument,
            or something that is no config.
    """
    if (warmup is not None and not warmup >= 0) or (rep is not None and not rep > 0):
        raise ConfigError(
            f"warmup={warmup!r}, rep={rep!r}: expected milliseconds, the second more than 0"
        )
    clock = _clock(warmup, rep, do_bench, use_cuda_graph=use_cuda_graph)
    listed = ListedConfigs.of(configs)
    pruning = Pruning.of(prune_configs_by)
    chosen = options or TunerOptions()
    effects = ArgumentEffects(
        tuple(restore_value or ()), tuple(reset_to_zero or ()), pre_hook, post_hook
    )

    def decorate(function: Any) -> AutotunedKernel:
        return AutotunedKernel(
            function,
            listed,
            tuple(key),
            pruning,
            effects=effects,
            clock=clock,
            cache_results=cache_results,
            options=chosen,
        )

    return decorate


def _clock(
    warmup: float | None,
    rep: float | None,
    do_bench: Callable[..., Any] | None,
    *,
    use_cuda_graph: bool,
) -> Callable[[], Any] | None:
    """Return what makes the clock, None for the device's own."""
    if warmup is None and rep is None and not use_cuda_graph:
        return None if do_bench is None else functools.partial(GivenClock, do_bench)
    if do_bench is not None:
        warn("do_bench does not count where warmup, rep or use_cuda_graph are given, as in Triton")
    if use_cuda_graph:
        return lambda: GivenClock(toolchain.graph_benchmark(rep if rep is not None else REP_MS))
    return lambda: CudaClock(
        WARMUP_MS if warmup is None else warmup, REP_MS if rep is None else rep
    )
