# SPDX-License-Identifier: Apache-2.0
"""`compile_candidates`: every candidate of a kernel in the workers of a compile service, before the first call and beside other kernels.

`HeuristicKernel.compile_in` calls it, and through it Inductor's generated kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from bundler.compile.build_plan import jobs_of
from bundler.compile.compile_job import Compiled, Job, SourceRef
from bundler.compile.joined_futures import JoinedFuture
from bundler.compile.service import CompileService
from bundler.errors import CompileFailed, ConfigError
from bundler.format.entries import Target
from bundler.runtime.configs import Config
from bundler.runtime.tuning.candidate_compiler import asked_for, importable
from bundler.runtime.tuning.config_list import effective_on, keywords_on
from bundler.toolchain import jit_specialization
from bundler.toolchain import tuner_toolchain as toolchain
from bundler.toolchain.imagined_arguments import Spec

K = TypeVar("K")


def compile_candidates(
    kernel: K,
    function: Any,
    configs: Sequence[Config],
    call: Mapping[str, Any],
    arguments: Mapping[str, Spec],
    service: CompileService,
    target: Target,
    source: SourceRef | None = None,
) -> JoinedFuture[K]:
    """Submit a job for each config; returns a future of the kernel, which is done when all of them are.

    Args:
        kernel: what the future's result is.
        function: its JIT function.
        configs: its candidates.
        call: constants and options that every candidate gets.
        arguments: name -> spec, of the arguments of a call.
        service: where; its `cache_dir` has to be Triton's.
        target: what for.
        source: where a worker finds the function; None where it can be imported.

    Raises:
        ConfigError: no other process can import the function, or the arguments do not fit it.
    """
    name = toolchain.innermost(function).__name__
    found = source or importable(toolchain.innermost(function))
    if found is None:
        raise ConfigError(
            f"{name}: no other process can import it; define it in a module file, or make one of its text with source_module",
            name=name,
        )
    # Two configs that count the same on this target are one kernel.
    counted = {effective_on(config, target): config for config in reversed(configs)}
    jobs = [
        job
        for config in reversed(counted.values())
        for job in _jobs(
            function, found, arguments, {**call, **keywords_on(config, target)}, target
        )
    ]
    return JoinedFuture(
        name, [service.submit(job) for job in jobs], lambda outcomes: _checked(kernel, outcomes)
    )


def _jobs(
    function: Any,
    source: SourceRef,
    arguments: Mapping[str, Spec],
    keywords: Mapping[str, Any],
    target: Target,
) -> Iterator[Job]:
    name = toolchain.innermost(function).__name__
    for specialized in jit_specialization.specialize(function, arguments, keywords, target):
        yield asked_for(jobs_of(name, source, specialized, target))


def _checked(kernel: K, outcomes: Sequence[Any]) -> K:
    """Return the kernel unless it does not compile: a candidate that is only too large is one candidate less."""
    failures = [outcome for outcome in outcomes if not isinstance(outcome, Compiled)]
    for failure in failures:
        if not (isinstance(failure, CompileFailed) and toolchain.tolerated(failure)) or len(
            failures
        ) == len(outcomes):
            raise failure
    return kernel
