# SPDX-License-Identifier: Apache-2.0
"""The command `explain`: why kernels were compiled although others were recorded.

It prints what `bundler.explain` finds; `app.py` lists it.
"""

from __future__ import annotations

import dataclasses
import os
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import click

from bundler.cli import wording
from bundler.cli.command import command, flag, option, repeated
from bundler.cli.pack import fact_option, family_file_option, tree_options
from bundler.cli.stores.store_options import (
    TIERS_HELP,
    from_environment,
    open_stores,
    stores_option,
)
from bundler.cli.terminal import Screen
from bundler.images.bundle_sources import open_bundle
from bundler.lifecycle.tree_comparison import counted, explain_trees
from bundler.toolchain.inductor_caches import expected_compiler

if TYPE_CHECKING:
    from bundler.integrations.explanations import Explanation, Run
    from bundler.lifecycle.lifecycle_reports import TreeOptions

_TAB = 4
# Of the lines of a source's difference.
_STYLES = {"+": "green", "-": "red", "@": "cyan"}
# How names of the kernels begin that torch.compile generates.
_OF_INDUCTOR = "triton_"
# Trees there, and trees here.
_SIDES = 2


@command(
    "Say why a kernel was compiled although others were recorded.",
    "explain --last",
    "explain --name 'matmul*'",
    "explain GYVP3J7R",
    "explain --last --bundle model.tbundle",
    "explain --tree server.tbundle",
    "explain --tree server.tbundle --tree vllm=~/.cache/vllm",
)
@click.argument("key", required=False, metavar="[KEY]")
@flag("--last", "All that the latest process compiled, with its forks and what it started.")
@option("--name GLOB", "Kernels of this name.")
@repeated(
    "--tree BUNDLE|NAME=DIR",
    "sources",
    "Trees of servers' caches, beside this machine; given twice, those of the second beside"
    " those of the first.",
)
@repeated(
    "--bundle BUNDLE|DIR",
    "bundles",
    "Compare with this bundle, or Triton cache directory, too; repeat for several. It needs no"
    " store.",
)
@fact_option
@family_file_option
@stores_option("Where kernels were recorded. " + TIERS_HELP, from_environment)
def explain(
    screen: Screen,
    key: str | None,
    name: str | None,
    urls: tuple[str, ...],
    sources: tuple[str, ...],
    bundles: tuple[str, ...],
    facts: tuple[str, ...],
    family_files: tuple[str, ...],
    *,
    last: bool,
) -> None:
    """Say what differs between a kernel that was compiled here and the nearest that was recorded
    before.

    Looks at the notes that the cache manager left on this host, and at the store, or at --bundle.
    KEY is a kernel key or its beginning. What Triton compiled without our cache manager has no
    note: with --bundle, kernels of Triton's directory are compared. Where the source differs, and
    both texts were used on this host, the difference is shown.

    With --tree it says why a server finds nothing in a tree: what of its fingerprint differs here,
    and which of the factors that vLLM's hash is made of differ between two.
    """
    if sources:
        if key is not None or name is not None or last or urls or bundles or len(sources) > _SIDES:
            raise click.UsageError(
                "--tree is a question of its own, of one or two bundles or directories"
            )
        _explain_trees(screen, sources, tree_options(facts, family_files))
        return
    from bundler.integrations.explanations import explain as explain_kernels
    from bundler.integrations.explanations import explain_run, latest_run

    if [key is not None, name is not None, last].count(True) != 1:
        raise click.UsageError("give a KEY, --name GLOB or --last")
    run = latest_run() if last else None
    with ExitStack() as stack:
        store = stack.enter_context(open_stores(*urls, read_only=True)) if urls else None
        opened = [
            path if os.path.isdir(path) else stack.enter_context(open_bundle(path))
            for path in map(os.path.expanduser, bundles)
        ]
        if last:
            found = explain_run(run, store, opened)
        else:
            found = explain_kernels(key, name=name, store=store, bundles=opened)
    if run is not None:
        screen.line(_told(run))
        if not run.misses:
            screen.line("what earlier processes compiled: triton-bundler explain --name '*'")
    for explanation in found:
        _show(screen, explanation, with_process=run is None)
    differing = sum(explanation.status == "differs" for explanation in found)
    compiler = expected_compiler()
    if found:
        screen.line()
        if compiler is not None and any(one.name.startswith(_OF_INDUCTOR) for one in found):
            screen.line(
                "torch.compile's graph entries have keys of their own, which hold $CXX (here"
                f" {compiler}) and the device index"
            )
        screen.done(
            f"{wording.count(len(found), 'kernel')}, of which {differing} had a recorded neighbor"
            " that differs"
        )
    rows = [
        {
            **dataclasses.asdict(e),
            "sentence": e.sentence,
            "differences": [{**dataclasses.asdict(d), "part": d.part} for d in e.differences],
        }
        for e in found
    ]
    more = {"run": _facts(run)} if run is not None else {}
    screen.finish({"kernels": rows, "graph_compiler": compiler, **more})


def _explain_trees(screen: Screen, sources: tuple[str, ...], options: TreeOptions) -> None:
    found = explain_trees(*map(os.path.expanduser, sources), trees=options)
    for one in found:
        screen.line(wording.plain(one.sentence))
        if one.unknown:
            screen.line(f"  not known: {wording.plain(', '.join(one.unknown))}")
    screen.done(counted(found))
    rows = [{**dataclasses.asdict(one), "sentence": one.sentence} for one in found]
    screen.finish({"trees": rows})


def _show(screen: Screen, explanation: Explanation, *, with_process: bool) -> None:
    screen.line(f"{wording.short_key(explanation.key)}  {wording.plain(explanation.sentence)}")
    for line in (explanation.source_diff or "").splitlines():
        screen.line(f"  {line.expandtabs(_TAB)}", _STYLES.get(line[:1], ""))
    if with_process and explanation.missed_at_s is not None:
        screen.line(f"  compiled {_when(explanation.missed_at_s)} by process {explanation.pid}")


def _told(run: Run) -> str:
    """Return who the latest run was, and that it compiled nothing where that is so."""
    first, *others = run.processes
    who = f"process {first.pid}" + (f" and {len(others)} more" if others else "")
    hits = "" if run.hits is None else f"{wording.count(run.hits, 'hit')}, "
    what = wording.count(len(run.misses), "compile") if run.misses else "nothing was compiled"
    failed = (
        f"; {wording.count(run.failed, 'kernel')} not found, and not compiled either: what the"
        " program warned of, or raised, says why"
        if run.failed
        else ""
    )
    return f"{who}, started {_when(first.began_s)}: {hits}{what}{failed}"


def _when(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s))


def _facts(run: Run) -> dict[str, Any]:
    first = run.processes[0]
    return {
        "pid": first.pid,
        "pids": [process.pid for process in run.processes],
        "started_at_s": first.began_s,
        "hits": run.hits,
        "compiles": len(run.misses),
        "failed": run.failed,
    }
