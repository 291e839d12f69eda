# SPDX-License-Identifier: Apache-2.0
"""`Screen`: what a command prints: tables and lines for people, one JSON object for programs,
warnings and errors on stderr.

`command.py` makes one `Screen` for each run of a command and hands it to the command.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TextIO

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Column as RichColumn
from rich.table import Table
from rich.text import Text

from bundler.cli import wording
from bundler.errors import BundlerError, BundlerWarning
from bundler.format.bundle import BlobSource, Bundle

# The width where a program reads: a pipe has none, so it is large enough that nothing is cut.
PIPED_COLUMNS = 1000
COLUMN_GAP = 3
# The width of a bar that has bytes, rate and time left beside it; and of everything but the
# description, in the widest case.
BAR_COLUMNS = 20
NUMBERS_COLUMNS = 60
REASONS_SHOWN = 12
# Rates below this have a decimal.
_FAST = 10

Row = Sequence[str]


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        title: its heading.
        numeric: aligned right.
        needs: in a narrower terminal it is left out, and named below the table, where not all
            columns fit.
        shrinks: whether its texts are cut where the terminal is too narrow; other columns keep
            their width.
        folds: the same, but what does not fit continues in the next line.
    """

    title: str
    numeric: bool = False
    needs: int = 0
    shrinks: bool = False
    folds: bool = False


@dataclass
class Screen:
    """Where one run of a command prints.

    With `as_json` nothing but the object given to `finish` or `fail` goes to standard output;
    warnings and errors go to standard error either way.  With `quiet` the text for people and the
    warnings are left out; without `bars` progress is.
    """

    as_json: bool = False
    quiet: bool = False
    bars: bool = True
    out: Console = field(default_factory=lambda: _console(sys.stdout))
    err: Console = field(default_factory=lambda: _console(sys.stderr))
    warned: list[str] = field(default_factory=list)

    def line(self, text: str = "", style: str = "") -> None:
        """Print one line for people."""
        if not (self.as_json or self.quiet):
            self.out.print(Text(wording.plain(text), style=style), soft_wrap=True)

    def done(self, text: str) -> None:
        """Print the line that says what was achieved."""
        self.line(text, style="bold")

    def table(self, columns: Sequence[Column], rows: Iterable[Row]) -> None:
        """Print a table; columns for which the terminal is too narrow are named below it."""
        if self.as_json or self.quiet:
            return
        everything = [[wording.plain(cell) for cell in row] for row in rows]
        shown = self._shown(columns, everything)
        cells = [[row[index] for index in shown] for row in everything]
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
        visible = [columns[index] for index in shown]
        for column, width in zip(visible, self._widths(visible, cells), strict=True):
            table.add_column(
                column.title,
                width=width,
                justify="right" if column.numeric else "left",
                no_wrap=not column.folds,
                overflow="fold" if column.folds else "ellipsis",
            )
        for row in cells:
            table.add_row(*map(Text, row))
        # Rich pads the last column with blanks, which are not printed.
        with self.out.capture() as capture:
            self.out.print(table)
        for text in capture.get().splitlines():
            self.out.file.write(text.rstrip() + "\n")
        self.out.file.flush()
        hidden = [column.title for index, column in enumerate(columns) if index not in shown]
        if hidden:
            self.line(
                f"{wording.count(len(hidden), 'column')} hidden: {', '.join(hidden)}; widen the"
                " terminal or use --json"
            )

    def listing(self, columns: Sequence[Column], rows: Sequence[Row]) -> None:
        """Print a table and an empty line below it; nothing where there are no rows."""
        if rows:
            self.table(columns, rows)
            self.line()

    def text(self, text: str) -> None:
        """Print a text of many lines as it is, but for what could command a terminal."""
        if not (self.as_json or self.quiet):
            lines = re.split(r"\r?\n", text.removesuffix("\n"))
            self.out.file.writelines(
                "\t".join(map(wording.plain, line.split("\t"))) + "\n" for line in lines
            )
            self.out.file.flush()

    def _shown(self, columns: Sequence[Column], cells: Sequence[Row]) -> list[int]:
        """Return the places of the columns that are shown: all where they fit, else without those
        that need most.
        """
        needed = _needed(columns, cells)
        shown = list(range(len(columns)))
        for index in sorted(shown, key=lambda place: -columns[place].needs):
            width = sum(needed[place] for place in shown) + COLUMN_GAP * (len(shown) - 1)
            if width <= self.out.width or columns[index].needs <= self.out.width:
                break
            shown.remove(index)
        return shown

    def _widths(self, columns: Sequence[Column], cells: Sequence[Row]) -> list[int]:
        """Return what each column needs; those that shrink or fold share what the others leave of
        the terminal.
        """
        needed = _needed(columns, cells)
        flexible = [i for i, column in enumerate(columns) if column.shrinks or column.folds]
        fixed = sum(needed) - sum(needed[i] for i in flexible) + COLUMN_GAP * (len(columns) - 1)
        # The narrowest first: the room that it does not need is shared by the others.
        room = self.out.width - fixed
        for left, i in zip(
            range(len(flexible), 0, -1), sorted(flexible, key=needed.__getitem__), strict=True
        ):
            needed[i] = max(1, min(needed[i], room // left))
            room -= needed[i]
        return needed

    def lines(self, texts: Sequence[str], most: int, noun: str = "more") -> None:
        """Print lines, of many the first, and how many more there are."""
        for text in texts[:most]:
            self.line(text)
        if len(texts) > most:
            number = len(texts) - most
            more = wording.count(number, noun) if noun != "more" else f"{number:,} more"
            indent = " " * (len(texts[0]) - len(texts[0].lstrip()))
            self.line(f"{indent}… and {more}; --json lists all")

    def facts(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Print names and values, aligned."""
        known = [(name, value) for name, value in pairs if value]
        width = max((len(name) for name, _ in known), default=0)
        for name, value in known:
            self.line(f"{name:<{width}}  {value}")

    def reasons(
        self, title: str, reasons: Iterable[tuple[str, str]], names: dict[str, str] | None = None
    ) -> None:
        """Print why things were left out, each reason once, with how many and an example."""
        rows = wording.grouped(reasons, names)
        if not rows:
            return
        self.line(f"{title}: {sum(number for number, _, _ in rows):,}")
        told = [f"  {number:,} x {reason} ({examples})" for number, reason, examples in rows]
        self.lines(told, REASONS_SHOWN, "more reason")

    def warn(self, message: str) -> None:
        """Print a warning on standard error, and keep it for `--json`."""
        self.warned.append(message)
        if not self.quiet:
            self._tell("warning", message, "yellow")

    def finish(self, result: dict[str, Any]) -> None:
        """Print the object of a command that ran to its end."""
        if self.as_json:
            self._object({**result, "warnings": self.warned} if self.warned else result)

    def fail(self, error: BundlerError) -> None:
        """Print an error: one line on standard error, and its facts in the object."""
        self.complain(error.message)
        if self.as_json:
            self._object({"error": {**error.facts, "code": error.code, "message": error.message}})

    def complain(self, message: str) -> None:
        """Print an error line on standard error."""
        self._tell("error", message, "bold red")

    def log(self, text: str) -> None:
        """Print what was logged on standard error."""
        for line in text.splitlines():
            self.err.print(Text(wording.plain(line)), soft_wrap=True)

    def _object(self, value: dict[str, Any]) -> None:
        self.out.file.write(wording.to_json(value) + "\n")
        self.out.file.flush()

    def _tell(self, kind: str, message: str, style: str) -> None:
        text = Text(f"{kind}: ", style=style).append(
            wording.plain(wording.in_command_words(" ".join(message.splitlines()))),
            style="not bold default",
        )
        self.err.print(text, soft_wrap=True)

    def progress(
        self, what: str, total: int | None = None, *, counted: bool = False
    ) -> AbstractContextManager[Bar]:
        """Show a bar while the block runs, on a terminal, with rate and time left unless `total` is
        None, which is not known.

        With `counted`, the total is known as soon as `Bar.reach` tells it.
        """
        if counted or total is not None:
            return self._bar(
                what, total, MofNCompleteColumn(), _RateColumn(), TimeRemainingColumn()
            )
        return self._bar(what, total, SpinnerColumn(), TimeElapsedColumn())

    def transfer(self, what: str, total_bytes: int) -> AbstractContextManager[Bar]:
        """Show a bar of bytes with rate and time left while the block runs, on a terminal."""
        columns = (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        return self._bar(what, total_bytes, *columns, of_bytes=True)

    @contextlib.contextmanager
    def _bar(
        self, what: str, total: int | None, *more: ProgressColumn, of_bytes: bool = False
    ) -> Iterator[Bar]:
        if not self.bars or not self.err.is_terminal or self.err.is_dumb_terminal:
            yield Bar(None)
            return
        # A long path is cut, so that there is room for the numbers.
        name = RichColumn(
            no_wrap=True, overflow="ellipsis", max_width=max(1, self.err.width - NUMBERS_COLUMNS)
        )
        described = TextColumn("{task.description}", table_column=name)
        bar = BarColumn(BAR_COLUMNS)
        with Progress(described, bar, *more, console=self.err, transient=True) as progress:
            yield Bar(progress, progress.add_task(what, total=total), of_bytes=of_bytes)


def _needed(columns: Sequence[Column], cells: Sequence[Row]) -> list[int]:
    """Return how wide each column is where nothing is cut or folded."""
    return [
        max(map(cell_len, [column.title, *(row[i] for row in cells)]))
        for i, column in enumerate(columns)
    ]


class _RateColumn(ProgressColumn):
    """How many are done in a second."""

    def render(self, task: Task) -> Text:
        """Return the rate; nothing before there is one."""
        if task.speed is None:
            return Text("")
        return Text(f"{task.speed:,.0f}/s" if task.speed >= _FAST else f"{task.speed:.1f}/s")


class Bar:
    """A progress bar; it shows nothing where there is no terminal."""

    def __init__(
        self, progress: Progress | None, task: Any = None, *, of_bytes: bool = False
    ) -> None:
        self._progress = progress
        self._task = task
        self._of_bytes = of_bytes

    def advance(self, what: str | None = None) -> None:
        """One more is done; safe from any thread."""
        if self._progress is not None:
            self._progress.update(self._task, advance=1, description=what)

    def reach(self, done: int, total: int) -> None:
        """So many of so many are done."""
        if self._progress is not None:
            self._progress.update(self._task, completed=done, total=total)

    def read(self, data: bytes | memoryview) -> None:
        """One more blob was read; safe from any thread."""
        if self._progress is not None:
            self._progress.update(self._task, advance=len(data) if self._of_bytes else 1)

    def watching(self, bundle: Bundle) -> Bundle:
        """Return the bundle such that each blob that is read advances the bar."""
        if self._progress is None:
            return bundle
        return Bundle(
            bundle.content,
            bundle.observed,
            _Counted(bundle.blobs, self),
            writable=bundle.writable,
            variants_dropped=bundle.variants_dropped,
            left_out=bundle.left_out,
            signed=bundle.signed,
        )


class _Counted(BlobSource):
    def __init__(self, blobs: BlobSource, bar: Bar) -> None:
        self._blobs = blobs
        self._bar = bar
        self.waits, self.verified = blobs.waits, blobs.verified

    def read_blob(self, digest: bytes) -> bytes:
        """Return the bytes of a blob; raises what the source raises."""
        return bytes(self.view_blob(digest))

    def view_blob(self, digest: bytes) -> bytes | memoryview:
        """Return the bytes of a blob; raises what the source raises."""
        data = self._blobs.view_blob(digest)
        self._bar.read(data)
        return data

    def prefetch(self, digests: Collection[bytes]) -> None:
        """Tell the source."""
        self._blobs.prefetch(digests)


@contextlib.contextmanager
def warnings_on(screen: Screen) -> Iterator[None]:
    """Print this package's warnings on the screen while the block runs; others go where they would
    go.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("always", BundlerWarning)
        others = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *more: Any, **named: Any) -> None:
            if issubclass(category, BundlerWarning):
                screen.warn(str(message))
            else:
                others(message, category, *more, **named)

        warnings.showwarning = show
        yield


@contextlib.contextmanager
def log_on(screen: Screen, *, wanted: bool) -> Iterator[None]:
    """Print what this package logs on the screen while the block runs, if that is wanted."""
    if not wanted:
        yield
        return
    logger, handler = logging.getLogger("bundler"), _LogLines(screen)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)


class _LogLines(logging.Handler):
    def __init__(self, screen: Screen) -> None:
        super().__init__()
        self._screen = screen
        self.setFormatter(logging.Formatter("%(name)s: %(levelname)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record."""
        self._screen.log(self.format(record))


def _console(file: TextIO) -> Console:
    console = Console(file=file, highlight=False, emoji=False, markup=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPED_COLUMNS
    return console
