# SPDX-License-Identifier: Apache-2.0
"""The command `build`: kernels for GPUs that need not be here, from modules, a build file, or a
recorded bundle.

It fills a `Plan` and hands that to `bundler/compile/bundle_build.py`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, redirect_stdout
from dataclasses import asdict, dataclass
from typing import Any

import click

from bundler.cli import wording
from bundler.cli.build_parts import (
    UseCheck,
    executor_maker,
    narrowed,
    parse_shard,
    tell_missing,
    watching,
)
from bundler.cli.command import FINE, PROBLEM, example, reports
from bundler.cli.pack import check_output, contents, save, show_contents
from bundler.cli.stores import (
    TIERS_HELP,
    existing_store,
    from_environment,
    open_stores,
    stores_option,
)
from bundler.cli.terminal import Bar, Screen
from bundler.compile import bundle_build
from bundler.compile.build_plan import Failure, Plan
from bundler.compile.bundle_build import BuildResult
from bundler.compile.compile_job import Job
from bundler.compile.declarations import read_build_file
from bundler.compile.retargeted_kernels import Retarget
from bundler.compile.shards import Shard
from bundler.config import without_registered_bundles
from bundler.errors import ConfigError, EmptyBundle, RecordingError
from bundler.format.bundle import Bundle
from bundler.format.entries import Target
from bundler.lifecycle.machine_store import Store
from bundler.project import install
from bundler.toolchain import identity

# So many of the kernels that could not be built are named in one line.
_NAMED = 3


def parse_targets(
    _context: click.Context, _option: click.Parameter, texts: tuple[str, ...]
) -> tuple[Target, ...]:
    """Read what `--target` was given, each once."""
    try:
        return tuple(dict.fromkeys(map(Target.parse, texts)))
    except ConfigError as error:
        raise click.BadParameter(error.message) from error


@click.command(
    short_help="Compile ahead of time, for GPUs that need not be here.",
    epilog=example(
        "build kernels.py --target cuda:90 --target hip:gfx942 -o fleet.tbundle",
        "build --spec build.toml -o fleet.tbundle --store file:///var/cache/kernels",
        "build --from recorded.tbundle kernels.py --target cuda:100 -o next.tbundle",
        "build kernels.py --target cuda:90 -o fleet.tbundle --executor my_cluster:executor",
        "build kernels.py --target cuda:90 --store s3://kernels/team --shard 3/64",
        "build kernels.py --target cuda:90 --store s3://kernels/team --collect -o fleet.tbundle",
    ),
)
@click.argument("modules", nargs=-1, metavar="[MODULE]...")
@click.option("--spec", "spec", metavar="FILE", help="A build file in TOML that lists kernels.")
@click.option(
    "--from",
    "recorded",
    metavar="BUNDLE",
    help="Every kernel of a recorded bundle; MODULEs say where the sources are.",
)
@click.option(
    "--target",
    "targets",
    multiple=True,
    metavar="T",
    callback=parse_targets,
    help="Compile for T, such as cuda:90 or hip:gfx942; repeat for several.",
)
@click.option("-o", "--output", metavar="FILE", help="The bundle to write.")
@click.option(
    "--jobs",
    type=click.IntRange(1),
    metavar="N",
    help="Compile in N processes, 1: in this one; without it, one a core.",
)
@click.option(
    "--executor",
    "executor",
    metavar="MODULE:FUNCTION",
    help=(
        "Compile on the workers of an engine: the function returns a concurrent.futures.Executor of"
        " Dask, MPI or Ray."
    ),
)
@click.option(
    "--shard",
    "shard",
    metavar="I/N",
    callback=parse_shard,
    help="Build part I of N, from 1, into the store; each machine finds the same parts.",
)
@click.option(
    "--times",
    "times",
    metavar="BUNDLE",
    help=(
        "An earlier build, by whose compile times shards get equally much to do; the same for every"
        " shard."
    ),
)
@click.option(
    "--collect",
    is_flag=True,
    help="Make the bundle of what shards left in the store, say what is missing, and compile that.",
)
@click.option(
    "--complete",
    "complete",
    metavar="BUNDLE",
    help="A recording of a warm-up: fail, and name each kernel that was used and is not built.",
)
@click.option(
    "--exact",
    is_flag=True,
    help="With --complete, fail as well where something was built and never used.",
)
@click.option(
    "--keep-going",
    is_flag=True,
    help="Write what can be built although some of it cannot; the exit status is 1 all the same.",
)
@click.option(
    "--check",
    is_flag=True,
    help="Compile nothing; exit status 1 when a kernel is not in the store.",
)
@stores_option("Kernels in it are reused, new ones sent. " + TIERS_HELP, from_environment)
@click.option(
    "--tag", metavar="T", help="Also call the bundle T in the store; it is added to what T names."
)
@reports
def build(
    screen: Screen,
    output: str | None,
    check: bool,
    jobs: int | None,
    urls: tuple[str, ...],
    tag: str | None,
    keep_going: bool,
    executor: str | None,
    shard: Shard | None,
    times: str | None,
    collect: bool,
    complete: str | None,
    exact: bool,
    **what: Any,
) -> int:
    """Compile kernels for targets that need not be here, and write one bundle of all.

    MODULE is a file or a dotted name of a Python module, which is imported: it says what to build
    with bundler.prebuild, or in a list called PREBUILD. The kernels have the keys that Triton's JIT
    asks for on such a machine, with this Python and this Triton. Where something cannot be built it
    is listed, no bundle is written, no tag is set, and the exit status is 1; with --keep-going the
    rest is written. Of builds that use one store at the same time, each kernel is compiled by one.

    Many machines: --executor has an engine's workers compile; or each machine builds its --shard
    into a store, and one of them, or any other, makes the bundle with --collect.
    """
    request = _PlanRequest(**what)
    _check_usage(
        request, output, urls, tag, check=check, keep_going=keep_going, shard=shard is not None
    )
    _check_parts(
        urls, tag, jobs, executor, shard, times, complete, check=check, collect=collect, exact=exact
    )
    if identity.triton_dir() is None:
        raise RecordingError(
            f"Triton is not installed, so nothing can be compiled: {install('triton')}"
        )
    if output is not None:
        check_output(output)
    with without_registered_bundles():
        with screen.progress("looking at what to build"), _printing_aside(screen):
            plan = _planned(request)
        if check:
            with existing_store(*urls, read_only=True) as store:
                return _check(screen, plan, store)
        if shard is not None:
            plan = narrowed(screen, plan, shard, times)
        use = None if complete is None else UseCheck(complete, exact)
        destination = _BuildDestination(output, urls, tag, keep_going, shard, collect, use)
        return _make(screen, plan, destination, _Compilers(jobs, executor))


@dataclass(frozen=True)
class _BuildDestination:
    """Where a build goes to, and whether a part of it is better than nothing."""

    output: str | None
    urls: tuple[str, ...]
    tag: str | None
    keep_going: bool
    shard: Shard | None = None
    collect: bool = False
    use: UseCheck | None = None

    @property
    def what(self) -> str:
        """What is made, for messages."""
        return self.output or f"shard {self.shard}"

    def allows(self, failures: Sequence[Failure], *, rest: bool) -> bool:
        """Whether there is something to write although these failed; `rest` says whether anything
        else there is.
        """
        return not failures or (self.keep_going and rest)


@dataclass(frozen=True)
class _Compilers:
    """Who compiles: so many processes here, or an engine."""

    jobs: int | None
    executor: str | None


def _make(screen: Screen, plan: Plan, destination: _BuildDestination, compilers: _Compilers) -> int:
    """Compile and write; returns the exit status.  What cannot be planned is told before anything
    is compiled.
    """
    if not destination.allows(plan.failures, rest=bool(plan.jobs)):
        return _refuse(screen, BuildResult.nothing_of(plan), destination, rest=bool(plan.jobs))
    more: dict[str, Any] = {"shard": None if destination.shard is None else str(destination.shard)}
    with ExitStack() as stack:
        store = stack.enter_context(open_stores(*destination.urls)) if destination.urls else None
        if destination.collect and store is not None:
            more["missing"] = _collected(screen, plan, store)
        with _printing_aside(screen):
            built = _build(screen, plan, compilers, store)
        used, lacking = (
            (None, None) if destination.use is None else destination.use.of(screen, built.bundle)
        )
        if used is not None:
            more["complete"] = used
        rest = bool(built.bundle.kernels)
        fine = destination.allows(built.failures, rest=rest) and (
            lacking is None or destination.keep_going
        )
        if not fine:
            return _refuse(screen, built, destination, rest=rest, lacking=lacking, more=more)
        size = 0 if destination.output is None else save(screen, built.bundle, destination.output)
        pushed = (
            store.push(built.bundle, destination.tag)
            if store is not None and destination.tag is not None
            else None
        )
    _show(screen, built)
    if destination.output is not None:
        screen.done(f"wrote {destination.output}: {wording.size(size)}, {built.bundle.digest}")
    elif store is not None:
        screen.done(
            f"{destination.what}: {wording.count(len(built.bundle.kernels), 'kernel')} in"
            f" {store.name}"
        )
    _show_failures(screen, built.failures)
    if built.failures:
        screen.complain(
            f"{destination.what} lacks what could not be built: {_named(built.failures)}"
        )
    if lacking is not None:
        screen.complain(f"{destination.what} is not complete: {lacking}")
    if store is not None and built.unsent:
        screen.complain(
            f"{wording.count(len(built.unsent), 'kernel')} not sent to {store.name}; build again to"
            " send them"
        )
    screen.finish(
        {
            **contents(built.bundle),
            "path": destination.output,
            "size_bytes": size,
            **_facts(built),
            "pushed": None if pushed is None else asdict(pushed),
            **more,
        }
    )
    return PROBLEM if built.failures or built.unsent or lacking is not None else FINE


def _collected(screen: Screen, plan: Plan, store: Store) -> list[dict[str, Any]]:
    """Say what shards did not leave in the store; returns it for `--json`."""
    missing = bundle_build.missing(plan, store.kernel_records())
    tell_missing(screen, missing, store.name)
    return _missing_rows(missing)


def _missing_rows(missing: Sequence[Job]) -> list[dict[str, Any]]:
    return [
        {"key": job.key or None, "name": job.name, "target": str(job.target)} for job in missing
    ]


def _refuse(
    screen: Screen,
    built: BuildResult,
    destination: _BuildDestination,
    *,
    rest: bool,
    lacking: str | None = None,
    more: Mapping[str, Any] | None = None,
) -> int:
    """Say what could not be built, and that therefore nothing was written; returns the exit
    status.
    """
    _show_failures(screen, built.failures)
    sent = len(built.compiled) - len(built.unsent) if destination.urls else 0
    if sent:
        screen.line(
            f"{wording.count(sent, 'kernel')} that compiled: in the store under their keys, where"
            " the next build finds them"
        )
    not_set = f" and tag {destination.tag} not set" if destination.tag is not None else ""
    way_out = "; --keep-going writes the rest" if rest else ""
    reasons = [f"{_named(built.failures)} could not be built"] if built.failures else []
    reasons += [lacking] if lacking is not None else []
    outcome = "was not written" if destination.output is not None else "was not built"
    screen.complain(f"{destination.what} {outcome}{not_set}: {'; '.join(reasons)}{way_out}")
    nothing = contents(BuildResult.nothing_of(Plan()).bundle) | {"digest": None}
    screen.finish(
        {**nothing, "path": None, "size_bytes": 0, **_facts(built), "pushed": None, **(more or {})}
    )
    return PROBLEM


def _facts(built: BuildResult) -> dict[str, Any]:
    return {
        "compiled": built.compiled,
        "reused": built.reused,
        "static_only": built.static_only,
        "unsent": built.unsent,
        "failures": built.failures,
        "notes": built.notes,
        "seconds": built.seconds,
    }


def _named(failures: Sequence[Failure]) -> str:
    """Return what failed, by name and target; of many the first."""
    named = list(dict.fromkeys(f"{failure.name} for {failure.target}" for failure in failures))
    more = f" and {len(named) - _NAMED:,} more" if len(named) > _NAMED else ""
    return ", ".join(named[:_NAMED]) + more


def _planned(request: _PlanRequest) -> Plan:
    try:
        plan = request.plan()
    except ConfigError as error:
        if error.facts.get("untargeted"):
            raise click.UsageError(error.message) from error
        raise
    if not plan.jobs and not plan.failures:
        asked = ", ".join(map(str, request.targets)) or "the targets named"
        raise EmptyBundle(
            f"nothing to build: no kernel is declared for {asked}, so nothing was written"
        )
    return plan


def _printing_aside(screen: Screen) -> AbstractContextManager[Any]:
    """Send what modules and compilers print to standard error, where standard output is for one
    JSON object.
    """
    return redirect_stdout(sys.stderr) if screen.as_json else nullcontext()


@dataclass(frozen=True)
class _PlanRequest:
    modules: tuple[str, ...]
    spec: str | None
    recorded: str | None
    targets: tuple[Target, ...]

    def plan(self) -> Plan:
        """Return what to build; raises what `Plan` and reading the files raise."""
        plan = Plan()
        if self.recorded is not None:
            with Bundle.load(self.recorded) as bundle:
                Retarget(plan, bundle, self.modules).add(self.targets)
        elif self.spec is not None:
            listed, targets = read_build_file(self.spec)
            plan.add_listed(listed, self.targets or targets)
        else:
            plan.add_modules(self.modules, self.targets)
        return plan


def _check_usage(
    request: _PlanRequest,
    output: str | None,
    urls: Sequence[str],
    tag: str | None,
    *,
    check: bool,
    keep_going: bool,
    shard: bool,
) -> None:
    if request.spec is not None and (request.recorded is not None or request.modules):
        raise click.UsageError("--spec names the modules; give neither --from nor MODULE with it")
    if not (request.modules or request.spec or request.recorded):
        raise click.UsageError("give a MODULE, --spec FILE or --from BUNDLE")
    if request.recorded is not None and not request.targets:
        raise click.UsageError(
            "--from needs --target, such as --target cuda:100: the recording says what it was"
            " made on"
        )
    if check and not urls:
        raise click.UsageError("--check looks into a store: give --store")
    if not check and output is None and not shard:
        raise click.UsageError("give -o FILE, the bundle to write")
    if check and keep_going:
        raise click.UsageError(
            "--keep-going is about what is written, and --check writes nothing: give one of them"
        )
    if tag is not None and (not urls or check):
        raise click.UsageError("--tag is for what is sent: give --store, and no --check")


def _check_parts(
    urls: Sequence[str],
    tag: str | None,
    jobs: int | None,
    executor: str | None,
    shard: Shard | None,
    times: str | None,
    complete: str | None,
    *,
    check: bool,
    collect: bool,
    exact: bool,
) -> None:
    """Refuse options of many machines that do not go together; raises `UsageError`."""
    rules = (
        (
            executor and jobs,
            (
                "--jobs says how many processes compile here, and --executor has an engine's"
                " workers compile: give one"
            ),
        ),
        (
            shard and collect,
            "--shard builds a part, and --collect makes the bundle of all: give one of them",
        ),
        ((shard or collect) and not urls, "shards meet in a store: give --store"),
        (shard and tag, "--tag is for the whole: give it with --collect"),
        (shard and complete, "--complete is about the whole: give it with --collect"),
        (times and not shard, "--times is for --shard"),
        (exact and not complete, "--exact is for --complete"),
        (
            check and (executor or shard or collect or complete),
            "--check compiles nothing and makes nothing: give it alone",
        ),
    )
    for wrong, message in rules:
        if wrong:
            raise click.UsageError(message)


def _check(screen: Screen, plan: Plan, store: Store) -> int:
    missing = bundle_build.missing(plan, store.kernel_records())
    screen.reasons(
        "missing", [(job.key or job.name, f"{job.name} for {job.target}") for job in missing]
    )
    _show_failures(screen, plan.failures)
    total = len(plan.jobs)
    screen.done(f"{total - len(missing):,} of {wording.count(total, 'kernel')} in {store.name}")
    screen.finish(
        {
            "ok": not missing and not plan.failures,
            "store": store.name,
            "kernels": total,
            "missing": _missing_rows(missing),
            "failures": plan.failures,
            "notes": plan.notes,
        }
    )
    return PROBLEM if missing or plan.failures else FINE


def _build(screen: Screen, plan: Plan, compilers: _Compilers, store: Store | None) -> BuildResult:
    with ExitStack() as stack:
        # Before the bar, which an engine that prints as it starts would tear.
        executor = None if compilers.executor is None else executor_maker(compilers.executor, stack)
        bar = (
            stack.enter_context(screen.progress("compiling", len(plan.jobs)))
            if plan.jobs
            else Bar(None)
        )
        return bundle_build.build(plan, compilers.jobs, store, watching(bar), executor=executor)


def _show(screen: Screen, built: BuildResult) -> None:
    show_contents(screen, built.bundle)
    screen.facts(
        [
            (
                "compiled",
                f"{wording.count(len(built.compiled), 'kernel')} in {wording.duration(built.seconds)}",
            ),
            (
                "reused",
                f"{wording.count(len(built.reused), 'kernel')} of the store"
                if built.reused
                else "",
            ),
            (
                "static only",
                (
                    f"{wording.count(len(built.static_only), 'kernel')}, built from IR"
                    if built.static_only
                    else ""
                ),
            ),
        ]
    )
    screen.reasons(
        "to know", [(f"{name} for {target}", note) for name, target, note in built.notes]
    )


def _show_failures(screen: Screen, failures: Sequence[Failure]) -> None:
    for failure in failures:
        place, reason = "", failure.reason
        if failure.line is not None and failure.file is not None:
            place = f"{os.path.relpath(failure.file)}:{failure.line}: "
            at = f"{failure.file}:{failure.line}"
            reason = reason.replace(f" ({at})", "", 1).removeprefix(f"{at} ")  # said once is enough
        screen.complain(
            f"{place}{failure.name} for {failure.target}:"
            f" {_shortened(reason.removeprefix(f'{failure.name} '))}"
        )


def _shortened(reason: str) -> str:
    """Return the beginning of a reason: a crash of the compiler comes with its stack."""
    first, *more = [line for line in reason.splitlines() if line.strip()] or [""]
    return " ".join([first, *more[:1]]) + (" … (--json tells all)" if len(more) > 1 else "")
