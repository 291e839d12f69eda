# SPDX-License-Identifier: Apache-2.0
"""`explain`: why kernels were compiled although others were recorded."""

from __future__ import annotations

import dataclasses

import click

from bundler.cli import words
from bundler.cli.command import FINE, example, reports
from bundler.cli.screen import Screen
from bundler.toolchain.inductor import expected_compiler


@click.command(
    short_help="Say why a kernel was compiled although others were recorded.",
    epilog=example("explain --last", "explain --name 'matmul*'", "explain GYVP3J7R"),
)
@click.argument("key", required=False, metavar="[KEY]")
@click.option("--last", is_flag=True, help="All that the latest process compiled.")
@click.option("--name", metavar="GLOB", help="Kernels of this name.")
@click.option(
    "--store", "urls", multiple=True, metavar="URL", help="Where kernels were recorded; else TRITON_BUNDLER_STORE."
)
@reports
def explain(screen: Screen, key: str | None, name: str | None, urls: tuple[str, ...], *, last: bool) -> int:
    """Say what differs between a kernel that was compiled here and the nearest that was recorded before.

    Looks at the notes that the cache manager left on this host, and at the store. KEY is a kernel key or its beginning.
    """
    from contextlib import ExitStack

    from bundler.integrations.explaining import explain as explain_kernels
    from bundler.lifecycle.storing import open_store

    if [key is not None, name is not None, last].count(True) != 1:
        raise click.UsageError("give a KEY, --name GLOB or --last")
    with ExitStack() as opened:
        store = opened.enter_context(open_store(*urls, read_only=True)) if urls else None
        found = explain_kernels(key, name=name, last=last, store=store)
    for explanation in found:
        screen.line(f"{words.short_key(explanation.key)}  {words.plain(explanation.sentence)}")
    differing = sum(explanation.status == "differs" for explanation in found)
    screen.line()
    compiler = expected_compiler()
    if compiler is not None:
        screen.line(
            f"torch.compile's graph entries have keys of their own, which hold $CXX (here {compiler}) and the device index"
        )
    screen.done(f"{words.count(len(found), 'kernel')}, of which {differing} had a recorded neighbour that differs")
    rows = [{**dataclasses.asdict(e), "sentence": e.sentence} for e in found]
    screen.finish({"kernels": rows, "graph_compiler": compiler})
    return FINE
