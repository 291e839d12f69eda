# SPDX-License-Identifier: Apache-2.0
"""The command `report`: an HTML file that shows a bundle, or two beside one another.

`app.py` lists the command.
"""

from __future__ import annotations

import dataclasses
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from bundler.cli import wording
from bundler.cli.command import FINE, example, reports
from bundler.cli.pack import check_output
from bundler.cli.quantities import to_bytes
from bundler.cli.report.kernel_figures import SourceFolder
from bundler.cli.report.report_page import LIMIT_BYTES, report_page
from bundler.cli.terminal import Screen
from bundler.errors import NotFound
from bundler.format.bundle import Bundle
from bundler.format.bundle_file import replace_content


@click.command(
    short_help="Write a page that shows a bundle.",
    epilog=example("report model.tbundle -o report.html", "report old.tbundle new.tbundle --sources . -o report.html"),
)
@click.argument("first")
@click.argument("second", required=False)
@click.option("-o", "--output", required=True, metavar="FILE", help="The HTML file to write.")
@click.option(
    "--sources", metavar="DIR", help="Where the Python files of the kernels are; they become part of the page."
)
@click.option("--misses", "with_misses", is_flag=True, help="Also say what the latest process here compiled, and why.")
@click.option("--max-bytes", callback=to_bytes, metavar="SIZE", default=str(LIMIT_BYTES), show_default=True,
              help="Leave out texts of kernels where the page would be larger.")  # fmt: skip
@reports
def report(
    screen: Screen,
    first: str,
    second: str | None,
    output: str,
    sources: str | None,
    max_bytes: int,
    *,
    with_misses: bool,
) -> int:
    """Write one HTML file that shows the bundle FIRST: sizes, a table of kernels, a page for each with its stages side by side.

    It opens from disk and fetches nothing. With SECOND it also shows what that has, lacks and has otherwise.
    """
    check_output(output)
    if sources is not None and not os.path.isdir(sources):
        raise NotFound(f"--sources {sources}: there is no such directory", path=sources)
    folder = SourceFolder(Path(sources)) if sources is not None else None
    misses = _misses() if with_misses else []
    with ExitStack() as stack:
        one = stack.enter_context(Bundle.load(first))
        two = stack.enter_context(Bundle.load(second)) if second is not None else None
        with screen.progress(f"reading {first}"):
            other = (os.path.basename(second), two) if second is not None and two is not None else None
            page = report_page(
                (os.path.basename(first), one), other, sources=folder, misses=misses, limit_bytes=max_bytes
            )
    data = page.text.encode()
    replace_content(output, data)
    if page.with_texts < page.kernels:
        screen.warn(f"{output} has the texts of {page.with_texts:,} of {wording.count(page.kernels, 'kernel')}, those that took "
                    f"longest to compile; --max-bytes {wording.size(max_bytes)} leaves no room for more")  # fmt: skip
    screen.done(
        f"wrote {output}: {wording.count(page.kernels, 'kernel')}, {wording.size(len(data))}; open it in a browser"
    )
    screen.finish({"path": output, "size_bytes": len(data), "kernels": page.kernels, "with_texts": page.with_texts})
    return FINE


def _misses() -> list[dict[str, Any]]:
    from bundler.integrations.explanations import explain

    return [{**dataclasses.asdict(one), "sentence": one.sentence} for one in explain(last=True)]
