# SPDX-License-Identifier: Apache-2.0
"""The command `build`: kernels for GPUs that need not be here, from modules, a build file, or a
recorded bundle.

It fills a `Plan` and hands that to `bundler/compile/bundle_build.py`.  On many machines there are an
engine's executor, shards and their collection, and a comparison with what was used.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, ExitStack, nullcontext, redirect_stdout
from dataclasses import asdict, dataclass
from typing import Any, cast

import click

from bundler.cli import wording
from bundler.cli.bundles.specializations import specialization_of, types
from bundler.cli.command import FINE, PROBLEM, command, flag, option, read_by, targets_option
from bundler.cli.pack import check_output, contents, save, show_contents
from bundler.cli.stores.store_options import (
    TIERS_HELP,
    existing_store,
    from_environment,
    open_stores,
    stores_option,
)
from bundler.cli.terminal import Bar, Screen
from bundler.compile import bundle_build, shards
from bundler.compile.build_plan import Failure, Plan, Retarget
from bundler.compile.bundle_build import BuildResult
from bundler.compile.compile_job import Job
from bundler.compile.completeness import compare_with_use
from bundler.compile.declarations import read_build_file
from bundler.compile.service_progress import Progress
from bundler.compile.shards import RecordedTimes, Shard
from bundler.config import without_registered_bundles
from bundler.errors import ConfigError, EmptyBundle, RecordingError
from bundler.format.bundle import Bundle
from bundler.format.entries import Kernel, Target
from bundler.lifecycle.machine_store import Store
from bundler.project import install
from bundler.toolchain import identity

# So many of the kernels that could not be built are named in one line.
_NAMED = 3
# So many kernels are named, one a line; --json has all.
_SHOWN = 20


@command(
    "Compile ahead of time, for GPUs that need not be here.",
    "build kernels.py --target cuda:90 --target hip:gfx942 -o fleet.tbundle",
    "build --spec build.toml -o fleet.tbundle --store file:///var/cache/kernels",
    "build --from recorded.tbundle kernels.py --target cuda:100 -o next.tbundle",
    "build kernels.py --target cuda:90 -o fleet.tbundle --executor my_cluster:executor",
    "build kernels.py --target cuda:90 --store s3://kernels/team --shard 3/64",
    "build kernels.py --target cuda:90 --store s3://kernels/team --collect -o fleet.tbundle",
)
@click.argument("modules", nargs=-1, metavar="[MODULE]...")
@option("--spec FILE", "A build file in TOML that lists kernels.")
@option(
    "--from BUNDLE",
    "recorded",
    "Every kernel of a recorded bundle; MODULEs say where the sources are.",
)
@targets_option()
@option("-o", "--output FILE", "The bundle to write.")
@option(
    "--jobs N",
    "Compile in N processes, 1: in this one; without it, one a core.",
    type=click.IntRange(1),
)
@option(
    "--executor MODULE:FUNCTION",
    "Compile on the workers of an engine: the function returns a concurrent.futures.Executor of"
    " Dask, MPI or Ray.",
)
@option(
    "--shard I/N",
    "Build part I of N, from 1, into the store; each machine finds the same parts.",
    callback=read_by(lambda text: None if text is None else Shard.parse(text)),
)
@option(
    "--times BUNDLE",
    "An earlier build, by whose compile times shards get equally much to do; the same for every"
    " shard.",
)
@flag(
    "--collect",
    "Make the bundle of what shards left in the store, say what is missing, and compile that.",
)
@option(
    "--complete BUNDLE",
    "A recording of a warm-up: fail, and name each kernel that was used and is not built.",
)
@flag("--exact", "With --complete, fail as well where something was built and never used.")
@flag(
    "--keep-going",
    "Write what can be built although some of it cannot; the exit status is 1 all the same.",
)
@flag("--check", "Compile nothing; exit status 1 when a kernel is not in the store.")
@stores_option("Kernels in it are reused, new ones sent. " + TIERS_HELP, from_environment)
@option("--tag T", "Also call the bundle T in the store; it is added to what T names.")
def build(screen: Screen, **given: Any) -> int:
    """Compile kernels for targets that need not be here, and write one bundle of all.

    MODULE is a file or a dotted name of a Python module, which is imported: it says what to build
    with bundler.prebuild, or in a list called PREBUILD. The kernels have the keys that Triton's JIT
    asks for on such a machine, with this Python and this Triton. Where something cannot be built it
    is listed, no bundle is written, no tag is set, and the exit status is 1; with --keep-going the
    rest is written. Of builds that use one store at the same time, each kernel is compiled by one.

    Many machines: --executor has an engine's workers compile; or each machine builds its --shard
    into a store, and one of them, or any other, makes the bundle with --collect.
    """
    request = _Request(**given)
    request.check_usage()
    if identity.triton_dir() is None:
        raise RecordingError(
            f"Triton is not installed, so nothing can be compiled: {install('triton')}"
        )
    if request.output is not None:
        check_output(request.output)
    with without_registered_bundles():
        with screen.progress("looking at what to build"), printing_aside(screen):
            plan = request.plan()
        if request.check:
            with existing_store(*request.urls, read_only=True) as store:
                return _check(screen, plan, store)
        if request.shard is not None:
            plan = _narrowed(screen, plan, request.shard, request.times)
        return _make(screen, plan, request)


def printing_aside(screen: Screen) -> AbstractContextManager[Any]:
    """Send what modules and compilers print to standard error, where standard output is for one
    JSON object.
    """
    return redirect_stdout(sys.stderr) if screen.as_json else nullcontext()


@dataclass(frozen=True)
class _Request:
    """What the command was given, under the names of its options."""

    modules: tuple[str, ...]
    spec: str | None
    recorded: str | None
    targets: tuple[Target, ...]
    output: str | None
    jobs: int | None
    executor: str | None
    shard: Shard | None
    times: str | None
    collect: bool
    complete: str | None
    exact: bool
    keep_going: bool
    check: bool
    urls: tuple[str, ...]
    tag: str | None

    @property
    def what(self) -> str:
        """What is made, for messages."""
        return self.output or f"shard {self.shard}"

    def allows(self, failures: Sequence[Failure], *, rest: bool) -> bool:
        """Whether there is something to write although these failed; `rest` says whether anything
        else there is.
        """
        return not failures or (self.keep_going and rest)

    def check_usage(self) -> None:
        """Refuse options that do not go together; raises `UsageError`."""
        parts = self.executor or self.shard or self.collect or self.complete
        for wrong, message in (
            (
                self.spec is not None and (self.recorded is not None or self.modules),
                "--spec names the modules; give neither --from nor MODULE with it",
            ),
            (
                not (self.modules or self.spec or self.recorded),
                "give a MODULE, --spec FILE or --from BUNDLE",
            ),
            (
                self.recorded is not None and not self.targets,
                (
                    "--from needs --target, such as --target cuda:100: the recording says what it"
                    " was made on"
                ),
            ),
            (self.check and not self.urls, "--check looks into a store: give --store"),
            (
                not (self.check or self.output is not None or self.shard),
                "give -o FILE, the bundle to write",
            ),
            (
                self.check and self.keep_going,
                (
                    "--keep-going is about what is written, and --check writes nothing: give one of"
                    " them"
                ),
            ),
            (
                self.tag is not None and (not self.urls or self.check),
                "--tag is for what is sent: give --store, and no --check",
            ),
            (
                self.executor and self.jobs,
                (
                    "--jobs says how many processes compile here, and --executor has an engine's"
                    " workers compile: give one"
                ),
            ),
            (
                self.shard and self.collect,
                "--shard builds a part, and --collect makes the bundle of all: give one of them",
            ),
            (
                (self.shard or self.collect) and not self.urls,
                "shards meet in a store: give --store",
            ),
            (self.shard and self.tag, "--tag is for the whole: give it with --collect"),
            (self.shard and self.complete, "--complete is about the whole: give it with --collect"),
            (self.times and not self.shard, "--times is for --shard"),
            (self.exact and not self.complete, "--exact is for --complete"),
            (self.check and parts, "--check compiles nothing and makes nothing: give it alone"),
        ):
            if wrong:
                raise click.UsageError(message)

    def plan(self) -> Plan:
        """Return what to build; raises what `Plan` and reading the files raise, and `EmptyBundle`
        for nothing.
        """
        plan = Plan()
        try:
            if self.recorded is not None:
                with Bundle.load(self.recorded) as bundle:
                    Retarget(plan, bundle, self.modules).add(self.targets)
            elif self.spec is not None:
                listed, targets = read_build_file(self.spec)
                plan.add_listed(listed, self.targets or targets)
            else:
                plan.add_modules(self.modules, self.targets)
        except ConfigError as error:
            if error.facts.get("untargeted"):
                raise click.UsageError(error.message) from error
            raise
        if not plan.jobs and not plan.failures:
            asked = ", ".join(map(str, self.targets)) or "the targets named"
            raise EmptyBundle(
                f"nothing to build: no kernel is declared for {asked}, so nothing was written"
            )
        return plan


def _make(screen: Screen, plan: Plan, request: _Request) -> int:
    """Compile and write; returns the exit status.  What cannot be planned is told before anything
    is compiled.
    """
    output, rest = request.output, bool(plan.jobs)
    if not request.allows(plan.failures, rest=rest):
        return _refuse(screen, BuildResult.nothing_of(plan), request, rest=rest)
    more: dict[str, Any] = {"shard": None if request.shard is None else str(request.shard)}
    with ExitStack() as stack:
        store = stack.enter_context(open_stores(*request.urls)) if request.urls else None
        if request.collect and store is not None:
            # What shards did not leave in the store is compiled here.
            missing = bundle_build.missing(plan, store.kernel_records())
            if missing:
                number = wording.count(len(missing), "kernel")
                screen.line(f"missing in {store.name}, compiled now: {number}")
                screen.lines(sorted(f"  {job.name} for {job.target}" for job in missing), _SHOWN)
            else:
                screen.line(f"nothing is missing in {store.name}")
            more["missing"] = _missing_rows(missing)
        with printing_aside(screen):
            built = _build(screen, plan, request, store)
        bundle, lacking = built.bundle, None
        if request.complete is not None:
            more["complete"], lacking = _compared_with_use(
                screen, bundle, request.complete, exact=request.exact
            )
        rest = bool(bundle.kernels)
        if not request.allows(built.failures, rest=rest) or not (
            lacking is None or request.keep_going
        ):
            return _refuse(screen, built, request, rest=rest, lacking=lacking, more=more)
        size = 0 if output is None else save(screen, bundle, output)
        pushed = None
        if store is not None and request.tag is not None:
            pushed = asdict(store.push(bundle, request.tag))
    _tell(screen, built, request, size, store, lacking)
    written = {"path": output, "size_bytes": size, **_facts(built), "pushed": pushed, **more}
    screen.finish(contents(bundle) | written)
    return PROBLEM if built.failures or built.unsent or lacking is not None else FINE


def _tell(
    screen: Screen,
    built: BuildResult,
    request: _Request,
    size_bytes: int,
    store: Store | None,
    lacking: str | None,
) -> None:
    _show(screen, built)
    if request.output is not None:
        screen.done(f"wrote {request.output}: {wording.size(size_bytes)}, {built.bundle.digest}")
    elif store is not None:
        number = wording.count(len(built.bundle.kernels), "kernel")
        screen.done(f"{request.what}: {number} in {store.name}")
    _show_failures(screen, built.failures)
    if built.failures:
        screen.complain(f"{request.what} lacks what could not be built: {_named(built.failures)}")
    if lacking is not None:
        screen.complain(f"{request.what} is not complete: {lacking}")
    if store is not None and built.unsent:
        number = wording.count(len(built.unsent), "kernel")
        screen.complain(f"{number} not sent to {store.name}; build again to send them")


def _missing_rows(missing: Sequence[Job]) -> list[dict[str, Any]]:
    return [
        {"key": job.key or None, "name": job.name, "target": str(job.target)} for job in missing
    ]


def _refuse(
    screen: Screen,
    built: BuildResult,
    request: _Request,
    *,
    rest: bool,
    lacking: str | None = None,
    more: dict[str, Any] | None = None,
) -> int:
    """Say what could not be built, and that therefore nothing was written; returns the exit
    status.
    """
    _show_failures(screen, built.failures)
    sent = len(built.compiled) - len(built.unsent) if request.urls else 0
    if sent:
        screen.line(
            f"{wording.count(sent, 'kernel')} that compiled: in the store under their keys, where"
            " the next build finds them"
        )
    not_set = f" and tag {request.tag} not set" if request.tag is not None else ""
    way_out = "; --keep-going writes the rest" if rest else ""
    reasons = [f"{_named(built.failures)} could not be built"] if built.failures else []
    reasons += [lacking] if lacking is not None else []
    outcome = "was not written" if request.output is not None else "was not built"
    screen.complain(f"{request.what} {outcome}{not_set}: {'; '.join(reasons)}{way_out}")
    nothing = contents(BuildResult.nothing_of(Plan()).bundle) | {"digest": None}
    written = {"path": None, "size_bytes": 0, **_facts(built), "pushed": None, **(more or {})}
    screen.finish(nothing | written)
    return PROBLEM


def _facts(built: BuildResult) -> dict[str, Any]:
    names = ("compiled", "reused", "static_only", "unsent", "failures", "notes", "seconds")
    return {name: getattr(built, name) for name in names}


def _named(failures: Sequence[Failure]) -> str:
    """Return what failed, by name and target; of many the first."""
    named = list(dict.fromkeys(f"{failure.name} for {failure.target}" for failure in failures))
    return wording.listed(named, _NAMED)


def _check(screen: Screen, plan: Plan, store: Store) -> int:
    missing = bundle_build.missing(plan, store.kernel_records())
    lines = [(job.key or job.name, f"{job.name} for {job.target}") for job in missing]
    screen.reasons("missing", lines)
    _show_failures(screen, plan.failures)
    total, fine = len(plan.jobs), not missing and not plan.failures
    screen.done(f"{total - len(missing):,} of {wording.count(total, 'kernel')} in {store.name}")
    screen.finish(
        {
            "ok": fine,
            "store": store.name,
            "kernels": total,
            "missing": _missing_rows(missing),
            "failures": plan.failures,
            "notes": plan.notes,
        }
    )
    return FINE if fine else PROBLEM


def _build(screen: Screen, plan: Plan, request: _Request, store: Store | None) -> BuildResult:
    with ExitStack() as stack:
        # Before the bar, which an engine that prints as it starts would tear.
        executor = None if request.executor is None else _executor_maker(request.executor, stack)
        bar = Bar(None)
        if plan.jobs:
            bar = stack.enter_context(screen.progress("compiling", len(plan.jobs)))
        return bundle_build.build(plan, request.jobs, store, _watching(bar), executor=executor)


def _show(screen: Screen, built: BuildResult) -> None:
    compiled = wording.count(len(built.compiled), "kernel")
    show_contents(screen, built.bundle)
    screen.facts(
        [
            ("compiled", f"{compiled} in {wording.duration(built.seconds)}"),
            ("reused", wording.some(len(built.reused), "kernel", " of the store")),
            ("static only", wording.some(len(built.static_only), "kernel", ", built from IR")),
        ]
    )
    notes = [(f"{name} for {target}", note) for name, target, note in built.notes]
    screen.reasons("to know", notes)


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


def _executor_maker(name: str, stack: ExitStack) -> Callable[[], Executor]:
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


def _narrowed(screen: Screen, plan: Plan, shard: Shard, times: str | None) -> Plan:
    """Return the part of a plan that is a shard's, and say how much it is."""
    known = None
    if times is not None:
        with Bundle.load(times) as bundle:
            known = RecordedTimes.of(bundle)
    mine = {shards.identity(job) for job in shard.part(plan.jobs.values(), known)}
    jobs = {name: job for name, job in plan.jobs.items() if shards.identity(job) in mine}
    screen.line(f"shard {shard}: {len(jobs):,} of {wording.count(len(plan.jobs), 'kernel')}")
    return Plan(jobs, plan.failures, plan.notes)


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


def _watching(bar: Bar) -> Callable[[Progress], None]:
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


def _compared_with_use(
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
        unbuilt, unused = _rows(recording, found.unbuilt), _rows(built, found.unused)
        for row in unbuilt[:_SHOWN]:
            screen.complain(f"used and not built: {row['specialization']}")
        if len(unbuilt) > _SHOWN:
            screen.complain(f"used and not built: {len(unbuilt) - _SHOWN:,} more; --json lists all")
        if unused:
            screen.line(f"built and never used: {wording.count(len(unused), 'kernel')}")
            screen.lines([f"  {row['specialization']}" for row in unused], _SHOWN)
        facts = {
            "recording": recording.digest,
            "used": found.used,
            "unbuilt": unbuilt,
            "unused": unused,
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
