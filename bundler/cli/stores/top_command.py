# SPDX-License-Identifier: Apache-2.0
"""The command `top`: a live view of stores and of processes that show metrics.

`app.py` lists it; `live_sources.py` asks.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import click
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from bundler.cli import wording
from bundler.cli.command import FINE, PROBLEM, command, flag, option
from bundler.cli.interruption import asked_to_end
from bundler.cli.stores.live_sources import (
    MetricsSource,
    SourceStatus,
    StoreSource,
    kernel_of,
    open_source,
)
from bundler.cli.terminal import Screen

MOST_SOURCES = 64
LEAST_INTERVAL_S, INTERVAL_S = 0.5, 2.0
_AT_ONCE = 8
# Two columns of rates stand beside what they are the rate of.
_COUNTS = ("endpoint", "hits", "/s", "misses", "/s", "hit %")
_PROCESSES = (*_COUNTS, "compiles", "seconds", "saved", "fetched", "breakers")
_STORES = ("store", "size", "units", "records", "tags", "failures", "leases")
_LEASES = ("kernel", "compiled by", "left", "store")


@command(
    "Watch hits, misses, leases and store sizes.",
    "top http://127.0.0.1:9464/metrics file:///var/cache/kernels",
    "top --once redis://kernel-cache:6379",
)
@click.argument("urls", metavar="URL…", nargs=-1, required=True)
@option(
    "--interval SECONDS",
    "How often to look; what takes long is looked at less often.",
    type=click.FloatRange(LEAST_INTERVAL_S, 3600),
    default=INTERVAL_S,
)
@flag("--once", "Look once and end, as with --json and where no person watches.")
def top(screen: Screen, urls: tuple[str, ...], interval: float, once: bool) -> int:
    """Watch stores and processes until Ctrl-C: hits and misses, who compiles which kernel under a
    lease, what a store holds.

    URL is a store, or an endpoint of metrics: http://HOST:PORT, or what ends in /metrics. Nothing
    is changed anywhere. With --once, exit status 1 when a URL did not answer.
    """
    if len(urls) > MOST_SOURCES:
        raise click.UsageError(f"{len(urls)} URLs; {MOST_SOURCES} at most")
    live = not (once or screen.as_json or screen.quiet) and screen.out.is_terminal
    with _opened(urls) as look:
        if live:
            _watch(screen, look, interval)
            return FINE
        statuses = look()
    for status in statuses:
        for line in _lines(status):
            screen.line(line)
    fine = not any(status.error for status in statuses)
    screen.finish({"sources": [status.as_json() for status in statuses], "ok": fine})
    return FINE if fine else PROBLEM


@contextlib.contextmanager
def _opened(urls: Sequence[str]) -> Iterator[Callable[[], list[SourceStatus]]]:
    """Open the sources; yields what looks at all of them, several at a time."""
    with contextlib.ExitStack() as stack:
        sources: list[MetricsSource | StoreSource] = []
        for url in urls:
            sources.append(open_source(url))
            stack.callback(sources[-1].close)
        threads = stack.enter_context(ThreadPoolExecutor(_AT_ONCE))
        yield lambda: list(threads.map(lambda source: source.look(), sources))


def _watch(screen: Screen, look: Callable[[], list[SourceStatus]], interval: float) -> None:
    """Show what is seen until Ctrl-C, which is how a view ends."""
    with asked_to_end() as ending:
        before, before_s = look(), time.monotonic()
        with Live(_view(before, before, 0.0), console=screen.out, auto_refresh=False) as live:
            while not ending.wait(interval):
                now, now_s = look(), time.monotonic()
                live.update(_view(now, before, now_s - before_s), refresh=True)
                before, before_s = now, now_s


def _view(
    statuses: Sequence[SourceStatus], before: Sequence[SourceStatus], seconds: float
) -> Group:
    """Return what a terminal shows: processes, stores, leases, and what does not answer."""
    processes: list[list[str]] = []
    stores: list[list[str]] = []
    leases: list[list[str]] = []
    errors = []
    for status, last in zip(statuses, before, strict=True):
        if status.error:
            errors.append(Text(wording.plain(f"{status.url}: {status.error}"), style="red"))
        elif status.kind == "metrics":
            processes.append(_process_row(status, last, seconds))
        else:
            stores.append(_store_row(status))
            for lease in status.leases:
                left = wording.duration(lease.left_s) if lease.left_s is not None else ""
                leases.append([kernel_of(lease), lease.holder, left, status.url])
    tables = (
        _table("processes", _PROCESSES, processes),
        _table("stores", _STORES, stores),
        _table("leases", _LEASES, leases),
    )
    return Group(*(table for table in tables if table.row_count), *errors)


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title)
    for place, column in enumerate(columns):
        right = place > 0 and columns is not _LEASES
        table.add_column(
            column, justify="right" if right else "left", overflow="ellipsis", no_wrap=True
        )
    for row in rows:
        table.add_row(*(Text(wording.plain(cell)) for cell in row))
    return table


def _process_row(status: SourceStatus, last: SourceStatus, seconds: float) -> list[str]:
    numbers, earlier = status.numbers, last.numbers

    def rate(name: str) -> str:
        known = seconds > 0 and name in earlier
        return f"{max(0.0, numbers[name] - earlier[name]) / seconds:.1f}" if known else ""

    asked = numbers["hits"] + numbers["misses"]
    return [
        status.url,
        f"{numbers['hits']:,.0f}",
        rate("hits"),
        f"{numbers['misses']:,.0f}",
        rate("misses"),
        f"{100 * numbers['hits'] / asked:.1f}" if asked else "",
        f"{numbers['compiles']:,.0f}",
        wording.duration(numbers["compile_seconds"]),
        wording.duration(numbers["seconds_saved"]),
        wording.size(int(numbers["bytes_fetched"])),
        ", ".join(status.breakers),
    ]


def _store_row(status: SourceStatus) -> list[str]:
    counts = [f"{status.numbers[name]:,.0f}" for name in ("units", "records", "tags", "failures")]
    size = wording.size(int(status.numbers["bytes"]))
    return [status.url, size, *counts, str(len(status.leases))]


def _lines(status: SourceStatus) -> Iterator[str]:
    """Yield what is printed where nobody watches: one line for a source, one for each lease."""
    if status.error:
        yield f"{status.url}: error: {status.error}"
        return
    yield f"{status.url}: " + ", ".join(
        f"{name} {value:g}" for name, value in status.numbers.items()
    )
    for name in status.breakers:
        yield f"  breaker of {name} is not closed"
    for lease in status.leases:
        left = f", {lease.left_s:.0f} s left" if lease.left_s is not None else ""
        yield (
            f"  {kernel_of(lease) or 'a kernel'} is compiled by {lease.holder or 'somebody'}{left}"
        )
