# SPDX-License-Identifier: Apache-2.0
"""`build`: kernels for GPUs that need not be here, from modules, a build file, or a recorded bundle."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import click

import bundler
from bundler.cli import words
from bundler.cli.command import FINE, PROBLEM, example, reports
from bundler.cli.move import check_output, contents, save, show_contents
from bundler.cli.screen import Bar, Screen
from bundler.cli.share import STORE_METAVAR, TIERS_HELP, existing_store
from bundler.compile import building, specfile
from bundler.compile.building import Built
from bundler.compile.planning import Failure, Plan
from bundler.compile.progress import Progress
from bundler.compile.retargeting import Retarget
from bundler.errors import ConfigError, RecordingError
from bundler.format.bundle import Bundle
from bundler.format.entries import Target
from bundler.lifecycle.storing import Store
from bundler.toolchain import identity


def _targets(_context: click.Context, _option: click.Parameter, texts: tuple[str, ...]) -> tuple[Target, ...]:
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
    ),
)
@click.argument("modules", nargs=-1, metavar="[MODULE]...")
@click.option("--spec", "spec", metavar="FILE", help="A build file in TOML that lists kernels.")
@click.option("--from", "recorded", metavar="BUNDLE",
              help="Every kernel of a recorded bundle; MODULEs say where the sources are.")  # fmt: skip
@click.option("--target", "targets", multiple=True, metavar="T", callback=_targets,
              help="Compile for T, such as cuda:90 or hip:gfx942; repeat for several.")  # fmt: skip
@click.option("-o", "--output", metavar="FILE", help="The bundle to write.")
@click.option(
    "--jobs",
    type=click.IntRange(1),
    metavar="N",
    help="Compile in N processes, 1: in this one; without it, one a core.",
)
@click.option("--check", is_flag=True, help="Compile nothing; exit status 1 when a kernel is not in the store.")
@click.option("--store", "urls", multiple=True, metavar=STORE_METAVAR,
              help="Kernels in it are reused, new ones sent. " + TIERS_HELP)  # fmt: skip
@click.option("--tag", metavar="T", help="Also call the bundle T in the store; it is added to what T names.")
@reports
def build(screen: Screen, output: str | None, check: bool, jobs: int | None, urls: tuple[str, ...],
          tag: str | None, **what: Any) -> int:  # fmt: skip
    """Compile kernels for targets that need not be here, and write one bundle of all.

    MODULE is a file or a dotted name of a Python module, which is imported: it says what to build with bundler.prebuild, or in a
    list called PREBUILD. The kernels have the keys that Triton's JIT asks for on such a machine, with this Python and this Triton.
    Kernels that do not compile are listed at the end; the rest is written, and the exit status is 1. Of builds that use one store
    at the same time, each kernel is compiled by one.
    """
    wanted = _Wanted(**what)
    _check_usage(wanted, output, urls, tag, check=check)
    if identity.triton_dir() is None:
        raise RecordingError(
            "Triton is not installed, so nothing can be compiled: pip install 'triton-bundler[triton]'"
        )
    if output is not None:
        check_output(output)
    with screen.progress("looking at what to build"):
        plan = wanted.plan()
    with ExitStack() as stack:
        if check:
            return _check(screen, plan, stack.enter_context(existing_store(*urls, read_only=True)))
        assert output is not None
        store = stack.enter_context(bundler.open_store(*urls)) if urls else None
        built = _build(screen, plan, jobs, store)
        size = save(screen, built.bundle, output)
        pushed = store.push(built.bundle, tag) if store is not None and tag is not None else None
    _show(screen, built)
    screen.done(f"wrote {output}: {words.size(size)}, {built.bundle.digest}")
    _show_failures(screen, built.failures)
    if store is not None and built.unsent:
        screen.complain(
            f"{words.count(len(built.unsent), 'kernel')} not sent to {store.name}; build again to send them"
        )
    screen.finish({
        **contents(built.bundle), "path": output, "size_bytes": size, "compiled": built.compiled, "reused": built.reused,
        "static_only": built.static_only, "unsent": built.unsent, "failures": built.failures, "notes": built.notes,
        "seconds": built.seconds, "pushed": None if pushed is None else asdict(pushed),
    })  # fmt: skip
    return PROBLEM if built.failures or built.unsent else FINE


@dataclass(frozen=True)
class _Wanted:
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
            listed, targets = specfile.read(self.spec)
            plan.add_listed(listed, self.targets or targets)
        else:
            plan.add_modules(self.modules, self.targets)
        return plan


def _check_usage(wanted: _Wanted, output: str | None, urls: Sequence[str], tag: str | None, *, check: bool) -> None:
    if wanted.spec is not None and (wanted.recorded is not None or wanted.modules):
        raise click.UsageError("--spec names the modules; give neither --from nor MODULE with it")
    if not (wanted.modules or wanted.spec or wanted.recorded):
        raise click.UsageError("give a MODULE, --spec FILE or --from BUNDLE")
    if check and not urls:
        raise click.UsageError("--check looks into a store: give --store")
    if not check and output is None:
        raise click.UsageError("give -o FILE, the bundle to write")
    if tag is not None and (not urls or check):
        raise click.UsageError("--tag is for what is sent: give --store, and no --check")


def _check(screen: Screen, plan: Plan, store: Store) -> int:
    missing = building.missing(plan, store.kernel_records())
    screen.reasons("missing", [(job.key or job.name, f"{job.name} for {job.target}") for job in missing])
    _show_failures(screen, plan.failures)
    total = len(plan.jobs)
    screen.done(f"{total - len(missing):,} of {words.count(total, 'kernel')} in {store.name}")
    screen.finish({
        "ok": not missing and not plan.failures, "store": store.name, "kernels": total,
        "missing": [{"key": job.key or None, "name": job.name, "target": str(job.target)} for job in missing],
        "failures": plan.failures, "notes": plan.notes,
    })  # fmt: skip
    return PROBLEM if missing or plan.failures else FINE


def _build(screen: Screen, plan: Plan, jobs: int | None, store: Store | None) -> Built:
    with screen.progress("compiling", len(plan.jobs)) if plan.jobs else nullcontext(Bar(None)) as bar:

        def watch(progress: Progress) -> None:
            if progress.happened in {"compiled", "hit", "failed"}:
                found = f", {progress.counters.hits:,} of the store" if progress.counters.hits else ""
                left = "" if progress.left_s is None else f", about {words.duration(progress.left_s)} left"
                bar.advance(f"{progress.name}{found}{left}")

        return building.build(plan, jobs, store, watch)


def _show(screen: Screen, built: Built) -> None:
    show_contents(screen, built.bundle)
    screen.facts([
        ("compiled", f"{words.count(len(built.compiled), 'kernel')} in {words.duration(built.seconds)}"),
        ("reused", f"{words.count(len(built.reused), 'kernel')} of the store" if built.reused else ""),
        ("static only", f"{words.count(len(built.static_only), 'kernel')}, built from IR" if built.static_only else ""),
    ])  # fmt: skip
    screen.reasons("to know", [(f"{name} for {target}", note) for name, target, note in built.notes])


def _show_failures(screen: Screen, failures: Sequence[Failure]) -> None:
    for failure in failures:
        place, reason = "", failure.reason
        if failure.line is not None and failure.file is not None:
            place = f"{os.path.relpath(failure.file)}:{failure.line}: "
            at = f"{failure.file}:{failure.line}"
            reason = reason.replace(f" ({at})", "", 1).removeprefix(f"{at} ")  # said once is enough
        screen.complain(
            f"{place}{failure.name} for {failure.target}: {_shortened(reason.removeprefix(f'{failure.name} '))}"
        )


def _shortened(reason: str) -> str:
    """Return the beginning of a reason: a crash of the compiler comes with its stack."""
    first, *more = [line for line in reason.splitlines() if line.strip()] or [""]
    return " ".join([first, *more[:1]]) + (" … (--json tells all)" if len(more) > 1 else "")
