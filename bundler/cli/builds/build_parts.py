# SPDX-License-Identifier: Apache-2.0
"""What the command `build` does on many machines: an engine's executor, shards, their collection,
and comparison with what was used.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from typing import Any, cast

import click

from bundler.cli import wording
from bundler.cli.bundles.specializations import specialization_of, types
from bundler.cli.terminal import Bar, Screen
from bundler.compile.build_plan import Plan
from bundler.compile.compile_job import Job
from bundler.compile.completeness import Completeness, compare_with_use
from bundler.compile.service_progress import Progress
from bundler.compile.shards import RecordedTimes, Shard, identity
from bundler.errors import ConfigError
from bundler.format.bundle import Bundle
from bundler.format.entries import Kernel

# So many kernels are named, one a line; --json has all.
_NAMED = 20


def parse_shard(
    _context: click.Context, _option: click.Parameter, text: str | None
) -> Shard | None:
    """Read what `--shard` was given."""
    try:
        return None if text is None else Shard.parse(text)
    except ConfigError as error:
        raise click.BadParameter(error.message) from error


def executor_maker(name: str, stack: ExitStack) -> Callable[[], Executor]:
    """Return what makes the executor that a function of the user's gives.

    Args:
        name: `module:function`; the module is looked for in the working directory too.  The
            function returns an executor, or a context manager that gives one.
        stack: ends such context managers.

    Raises:
        ConfigError: there is no such module or function.
    """
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise ConfigError(f"--executor {name!r}: expected module:function", got=name)
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)  # as `python -m` has it; a command installed by pip has not
    try:
        make: Any = importlib.import_module(module)
        for part in function.split("."):
            make = getattr(make, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--executor {name}: {error}", got=name) from error
    if not callable(make):
        raise ConfigError(f"--executor {name}: {function} is not a function", got=name)

    def executor() -> Executor:
        try:
            made = make()
            if not isinstance(made, Executor) and hasattr(made, "__enter__"):
                made = stack.enter_context(made)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            raise ConfigError(
                f"--executor {name}: the function failed: {said}", got=name
            ) from error
        return cast(Executor, made)  # the service says so where it is none

    return executor


def narrowed(screen: Screen, plan: Plan, shard: Shard, times: str | None) -> Plan:
    """Return the part of a plan that is a shard's, and say how much it is."""
    known = None
    if times is not None:
        with Bundle.load(times) as bundle:
            known = RecordedTimes.of(bundle)
    mine = {identity(job) for job in shard.part(plan.jobs.values(), known)}
    jobs = {name: job for name, job in plan.jobs.items() if identity(job) in mine}
    screen.line(f"shard {shard}: {len(jobs):,} of {wording.count(len(plan.jobs), 'kernel')}")
    return Plan(jobs, plan.failures, plan.notes)


def tell_missing(screen: Screen, missing: Sequence[Job], store: str) -> None:
    """Say which kernels shards did not leave in the store."""
    if not missing:
        screen.line(f"nothing is missing in {store}")
        return
    screen.line(f"missing in {store}, compiled now: {wording.count(len(missing), 'kernel')}")
    screen.lines(sorted(f"  {job.name} for {job.target}" for job in missing), _NAMED)


def _tell_completeness(
    screen: Screen, found: Completeness, recording: Bundle, built: Bundle
) -> None:
    """Say what was used and not built, as errors, and what was built and never used."""
    for kernel in found.unbuilt[:_NAMED]:
        screen.complain(f"used and not built: {_described(recording, kernel)}")
    if len(found.unbuilt) > _NAMED:
        screen.complain(
            f"used and not built: {len(found.unbuilt) - _NAMED:,} more; --json lists all"
        )
    if found.unused:
        screen.line(f"built and never used: {wording.count(len(found.unused), 'kernel')}")
        told = [f"  {_described(built, kernel)}" for kernel in found.unused]
        screen.lines(told, _NAMED)


def _described(bundle: Bundle, kernel: Kernel) -> str:
    """Return a kernel's specialization in a line: name, target, types, constants, warps and
    stages.
    """
    one, _ = specialization_of(bundle, kernel)
    kinds = ", ".join(f"{name}: {kind}" for name, kind in types(one).items())
    constants = ", ".join(f"{name}={value}" for name, value in (one.constants or {}).items())
    counted = [f"num_warps={kernel.spec.num_warps}"]
    if one.stages is not None:
        counted.append(f"num_stages={one.stages}")
    inner = "; ".join(part for part in (kinds, constants, ", ".join(counted)) if part)
    return f"{kernel.name} for {kernel.target} ({inner}), key {kernel.key}"


def _rows(bundle: Bundle, kernels: Sequence[Kernel]) -> list[dict[str, Any]]:
    """Return kernels for `--json`."""
    return [
        wording.kernel_facts(kernel) | {"specialization": _described(bundle, kernel)}
        for kernel in kernels
    ]


def watching(bar: Bar) -> Callable[[Progress], None]:
    """Return what advances a bar, with what a user wants to know of many machines: how many there
    are, what failed, how long it takes.
    """

    def watch(progress: Progress) -> None:
        if progress.happened not in {"compiled", "hit", "failed"}:
            return
        counters = progress.counters
        words = [progress.name]
        if counters.hits:
            words.append(f"{counters.hits:,} of the store")
        if progress.machines > 1:
            words.append(f"{progress.machines:,} machines")
        if counters.failed:
            words.append(f"{counters.failed:,} failed")
        if progress.left_s is not None:
            words.append(f"about {wording.duration(progress.left_s)} left")
        bar.advance(", ".join(words))

    return watch


def compared_with_use(
    screen: Screen, built: Bundle, path: str, *, exact: bool
) -> tuple[dict[str, Any], str | None]:
    """Tell how a build fits a recording; returns that for `--json`, and why the build fails, None
    where it does not.

    Args:
        screen: where it is told.
        built: what was built.
        path: the file of the recording.
        exact: whether what was built and never used is a failure too.
    """
    with Bundle.load(path) as recording:
        found = compare_with_use(built, recording)
        _tell_completeness(screen, found, recording, built)
        facts = {
            "recording": recording.digest,
            "used": found.used,
            "unbuilt": _rows(recording, found.unbuilt),
            "unused": _rows(built, found.unused),
        }
    problems, number = [], len(found.unbuilt)
    if number:
        problems.append(
            f"{number:,} of {wording.count(found.used, 'kernel')} that {path} used"
            f" {wording.plural(number, 'is')} not built"
        )
    if found.unused and exact:
        problems.append(f"{wording.count(len(found.unused), 'kernel')} built and never used")
    return facts, "; ".join(problems) or None
