# SPDX-License-Identifier: Apache-2.0
"""What a command says: tables and lines for people, one object for programs, warnings and errors beside them."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from bundler.cli import words
from bundler.errors import BundlerError, BundlerWarning
from bundler.format.bundle import BlobSource, Bundle

# Wide enough that nothing is cut where a program reads: the other end of a pipe has no width.
PIPED_COLUMNS = 1000
COLUMN_GAP = 3
REASONS_SHOWN = 12

Row = Sequence[str]


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        title: its heading.
        numeric: aligned right.
        needs: the terminal width from which on there is room for it.
        shrinks: whether its texts are cut where the terminal is too narrow; other columns keep their width.
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

    With `as_json` nothing but the object given to `finish` or `fail` goes to standard output; warnings and errors go
    to standard error either way.
    """

    as_json: bool = False
    out: Console = field(default_factory=lambda: _console(sys.stdout))
    err: Console = field(default_factory=lambda: _console(sys.stderr))
    warned: list[str] = field(default_factory=list)

    def line(self, text: str = "", style: str = "") -> None:
        """Print one line for people."""
        if not self.as_json:
            self.out.print(Text(words.plain(text), style=style), soft_wrap=True)

    def done(self, text: str) -> None:
        """Print the line that says what was achieved."""
        self.line(text, style="bold")

    def table(self, columns: Sequence[Column], rows: Iterable[Row]) -> None:
        """Print a table, without the columns for which the terminal is too narrow."""
        if self.as_json:
            return
        shown = [index for index, column in enumerate(columns) if column.needs <= self.out.width]
        cells = [[words.plain(row[index]) for index in shown] for row in rows]
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
        # Rich fills the last column with blanks, which a pipe need not carry.
        with self.out.capture() as capture:
            self.out.print(table)
        for text in capture.get().splitlines():
            self.out.file.write(text.rstrip() + "\n")
        self.out.file.flush()

    def _widths(self, columns: Sequence[Column], cells: Sequence[Row]) -> list[int]:
        """Return what each column needs; those that shrink or fold share what the others leave of the terminal."""
        needed = [max(map(cell_len, [column.title, *(row[i] for row in cells)])) for i, column in enumerate(columns)]
        flexible = [i for i, column in enumerate(columns) if column.shrinks or column.folds]
        fixed = sum(needed) - sum(needed[i] for i in flexible) + COLUMN_GAP * (len(columns) - 1)
        # The narrowest first: what it does not need is for the others.
        room = self.out.width - fixed
        for left, i in zip(range(len(flexible), 0, -1), sorted(flexible, key=needed.__getitem__), strict=True):
            needed[i] = max(1, min(needed[i], room // left))
            room -= needed[i]
        return needed

    def facts(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Print names and values, aligned."""
        known = [(name, value) for name, value in pairs if value]
        width = max((len(name) for name, _ in known), default=0)
        for name, value in known:
            self.line(f"{name:<{width}}  {value}")

    def reasons(self, title: str, reasons: Iterable[tuple[str, str]], names: dict[str, str] | None = None) -> None:
        """Print why things were left out, each reason once, with how many and an example."""
        rows = words.grouped(reasons, names)
        if not rows:
            return
        self.line(f"{title}: {sum(number for number, _, _ in rows):,}")
        for number, reason, examples in rows[:REASONS_SHOWN]:
            self.line(f"  {number:,} x {reason} ({examples})")
        if len(rows) > REASONS_SHOWN:
            self.line(f"  … and {len(rows) - REASONS_SHOWN} more reasons; --json lists all")

    def warn(self, message: str) -> None:
        """Print a warning on standard error, and keep it for `--json`."""
        self.warned.append(message)
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

    def _object(self, value: dict[str, Any]) -> None:
        self.out.file.write(words.to_json(value) + "\n")
        self.out.file.flush()

    def _tell(self, kind: str, message: str, style: str) -> None:
        text = Text(f"{kind}: ", style=style).append(
            words.plain(" ".join(message.splitlines())), style="not bold default"
        )
        self.err.print(text, soft_wrap=True)

    @contextlib.contextmanager
    def progress(self, what: str, total: int | None = None) -> Iterator[Bar]:
        """Show a bar while the block runs, if somebody watches; `total` is None when it is not known."""
        if not self.err.is_terminal or self.err.is_dumb_terminal:
            yield Bar(None)
            return
        columns = [TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()]
        columns.insert(2, MofNCompleteColumn() if total is not None else SpinnerColumn())
        with Progress(*columns, console=self.err, transient=True) as progress:
            yield Bar(progress, progress.add_task(what, total=total))


class Bar:
    """A progress bar, or nothing where nobody watches."""

    def __init__(self, progress: Progress | None, task: Any = None) -> None:
        self._progress = progress
        self._task = task

    def advance(self, what: str | None = None) -> None:
        """One more is done; safe from any thread."""
        if self._progress is not None:
            self._progress.update(self._task, advance=1, description=what)

    def watching(self, bundle: Bundle) -> Bundle:
        """Return the bundle such that each blob that is read advances the bar."""
        if self._progress is None:
            return bundle
        return Bundle(bundle.content, bundle.observed, _Counted(bundle.blobs, self), writable=bundle.writable,
                      variants_dropped=bundle.variants_dropped, left_out=bundle.left_out)  # fmt: skip


class _Counted:
    def __init__(self, blobs: BlobSource, bar: Bar) -> None:
        self._blobs = blobs
        self._bar = bar
        self.waits = blobs.waits

    def read_blob(self, digest: bytes) -> bytes:
        """Return the bytes of a blob; raises what the source raises."""
        self._bar.advance()
        return self._blobs.read_blob(digest)

    def prefetch(self, digests: Collection[bytes]) -> None:
        """Tell the source."""
        self._blobs.prefetch(digests)

    def close(self) -> None:
        """The source belongs to the bundle it came from."""


@contextlib.contextmanager
def warnings_on(screen: Screen) -> Iterator[None]:
    """Print this package's warnings on the screen while the block runs; others go where they would go."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", BundlerWarning)
        others = warnings.showwarning

        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if issubclass(category, BundlerWarning):
                screen.warn(str(message))
            else:
                others(message, category, filename, lineno, file, line)

        warnings.showwarning = show
        yield


def _console(file: TextIO) -> Console:
    console = Console(file=file, highlight=False, emoji=False, markup=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPED_COLUMNS
    return console
