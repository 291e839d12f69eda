# SPDX-License-Identifier: Apache-2.0
"""The command `report`: an HTML file that shows a bundle, or two beside one another.

`app.py` lists the command.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import click
import msgspec
from msgspec import Meta, Struct

from bundler.cli import wording
from bundler.cli.command import command, flag, option, repeated, to_bytes
from bundler.cli.pack import check_output
from bundler.cli.report.kernel_figures import SourceFolder
from bundler.cli.report.report_page import LIMIT_BYTES, report_page
from bundler.cli.stores.store_options import TIERS_HELP, from_environment, open_named, stores_option
from bundler.cli.terminal import Screen
from bundler.errors import FormatError, NotFound
from bundler.format.bundle import Bundle
from bundler.format.bundle_file import open_regular, os_errors, replace_content

_MOST_USAGE_BYTES = 32_000_000


class _Usage(Struct, frozen=True):
    """What is read of the report of a process."""

    hits_of: dict[str, Annotated[int, Meta(ge=0)]]


@command(
    "Write a page that shows a bundle.",
    "report model.tbundle",
    "report llama3/h200 --store file:///var/cache/kernels -o report.html",
    "report old.tbundle new.tbundle --sources . -o report.html",
)
@click.argument("first")
@click.argument("second", required=False)
@option(
    "-o",
    "--output FILE",
    "The HTML file to write; without it FIRST-report.html, in the current directory.",
)
@option("--sources DIR", "Where the Python files of the kernels are; they become part of the page.")
@repeated(
    "--usage FILE",
    "What TRITON_BUNDLER_REPORT made processes write: how often each kernel was found. Repeat it.",
)
@flag(
    "--misses",
    "with_misses",
    "Also say what the latest process here compiled although it was recorded in FIRST, or"
    " nearly, and why.",
)
@option(
    "--max-bytes SIZE",
    "Leave out texts of kernels where the page would be larger.",
    callback=to_bytes,
    default=str(LIMIT_BYTES),
)
@stores_option("Where FIRST or SECOND may be a tag. " + TIERS_HELP, from_environment)
def report(
    screen: Screen,
    first: str,
    second: str | None,
    output: str | None,
    sources: str | None,
    max_bytes: int,
    usage: tuple[str, ...],
    urls: tuple[str, ...],
    *,
    with_misses: bool,
) -> None:
    """Write one HTML file that shows the bundle FIRST: sizes, a table of kernels, a page for each
    with its stages side by side.

    It opens from disk and fetches nothing. With SECOND it also shows what that has, lacks and has
    otherwise. Either may be a bundle, a Triton cache directory, or with --store a tag.
    """
    output = output if output is not None else _default_output(first)
    check_output(output)
    if sources is not None and not os.path.isdir(sources):
        raise NotFound(f"--sources {sources}: there is no such directory", path=sources)
    folder = SourceFolder(Path(sources)) if sources is not None else None
    hits_of = _hits_of(usage) if usage else None
    with ExitStack() as stack:
        one = stack.enter_context(open_named(first, urls))
        two = stack.enter_context(open_named(second, urls)) if second is not None else None
        misses = _misses(one) if with_misses else None
        with screen.progress(f"reading {first}"):
            other = (_base(second), two) if second is not None and two is not None else None
            page = report_page(
                (_base(first), one), other, folder, misses, hits_of, limit_bytes=max_bytes
            )
    data = page.text.encode()
    replace_content(output, data)
    if page.with_texts < page.kernels:
        screen.warn(
            f"{output} has the texts of {page.with_texts:,} of"
            f" {wording.count(page.kernels, 'kernel')}, those that took longest to compile;"
            f" --max-bytes {wording.size(max_bytes)} leaves no room for more"
        )
    number = wording.count(page.kernels, "kernel")
    screen.done(f"wrote {output}: {number}, {wording.size(len(data))}; open it in a browser")
    figures = {"kernels": page.kernels, "with_texts": page.with_texts}
    screen.finish({"path": output, "size_bytes": len(data), **figures})


def _base(source: str) -> str:
    """Return what the page calls a bundle: the name of its file or directory, or all of a tag."""
    path = source.rstrip("/")
    return os.path.basename(path) if os.path.lexists(path) else source


def _default_output(source: str) -> str:
    """Return where the page of a bundle goes: a file of its own in the current directory, for a tag
    too.
    """
    stem = _base(source).removesuffix(".tbundle")
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in stem) + "-report.html"


def _hits_of(paths: tuple[str, ...]) -> dict[str, int]:
    """Sum up how often kernels were found, by key; raises `NotFound`, `AccessDenied`,
    `FormatError`.
    """
    found: Counter[str] = Counter()
    for path in paths:
        with os_errors(path, "read"), open(open_regular(path), "rb") as file:
            content = file.read(_MOST_USAGE_BYTES)
        try:
            found.update(msgspec.json.decode(content, type=_Usage).hits_of)
        except msgspec.MsgspecError as error:
            raise FormatError(
                f"{path}: expected the report of a process, as TRITON_BUNDLER_REPORT names it:"
                f" {error}",
                path=path,
            ) from error
    return dict(found)


def _misses(recorded: Bundle) -> list[dict[str, Any]]:
    """Return what was compiled here beside what a bundle has; it needs no store."""
    from bundler.integrations.explanations import explain

    found = explain(last=True, bundles=[recorded])
    return [{**dataclasses.asdict(one), "sentence": one.sentence} for one in found]
