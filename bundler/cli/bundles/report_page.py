# SPDX-License-Identifier: Apache-2.0
"""The command `report`: an HTML file that shows a bundle, or two beside one another.

`report_page` makes the HTML with everything that it shows in it: `figures_of` says what is known of
a kernel, `TextArchive` keeps the texts of thousands in little space. `app.py` lists the command;
`page/` has the page's script and style.

Sizes are areas of rectangles that are as square as can
be (`squarified`), after M. Bruls, K. Huizing, J. van Wijk, "Squarified Treemaps" (2000): a row
takes the next amount as long as that makes the worst side ratio in the row no worse. What a bundle
holds is hostile: it stands in the page as JSON and as packed texts alone, which the page's script
puts into it as text, and the page's policy lets no other script run and nothing be fetched.
"""

from __future__ import annotations

import array
import base64
import dataclasses
import hashlib
import html
import json
import os
import re
import sys
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import click
import msgspec
from msgspec import Meta, Struct

import bundler
from bundler.cli import wording
from bundler.cli.bundles.comparison import changed_entries, count_entries
from bundler.cli.bundles.specializations import specialization_of
from bundler.cli.command import command, flag, option, repeated, to_bytes
from bundler.cli.pack import check_output, memory_words
from bundler.cli.stores.store_options import TIERS_HELP, from_environment, open_named, stores_option
from bundler.cli.terminal import Screen
from bundler.errors import BundlerError, FormatError, NotFound
from bundler.format.bundle import Bundle
from bundler.format.bundle_file import open_regular, os_errors, replace_content
from bundler.format.candidate_timings import id_of, time_of
from bundler.format.entries import Kernel, entry_artifacts, entry_kind
from bundler.format.launch_spec import Named
from bundler.format.summary import printable
from bundler.lifecycle.binary_resources import read_resources
from bundler.runtime.program.program_summary import programs_of
from bundler.runtime.tuning.occupancy import block_occupancy

# In the order of the compile.  `python` is the file of the function, where it was given.
TEXT_KINDS = ("python", "source", "ttir", "ttgir", "llir", "ptx", "amdgcn")
_LOCATION = re.compile(rb'loc\("([^"\n]+\.py)":(\d+)')
_MOST_SOURCE_BYTES = 4_000_000


class SourceFolder:
    """Python files in which kernels may be defined, found by name; nothing outside of the folder is
    read.

    Args:
        folder: the folder; links that lead out of it are not followed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self._known: dict[tuple[str, str], str | None] = {}

    def text_of(self, path: str, function: str) -> str | None:
        """Return the text of the file of this base name that defines the function, None where there
        is none.
        """
        wanted = path.replace("\\", "/").rpartition("/")[2], function
        if wanted not in self._known:
            self._known[wanted] = self._search(*wanted)
        return self._known[wanted]

    def _search(self, name: str, function: str) -> str | None:
        defined = re.compile(rf"^\s*def {re.escape(function)}\b", re.MULTILINE)
        for path in sorted(self._folder.rglob("*.py")):
            inside = path.name == name and path.resolve().is_relative_to(self._folder)
            if inside and path.is_file() and path.stat().st_size <= _MOST_SOURCE_BYTES:
                text = path.read_text(encoding="utf-8", errors="replace")
                if defined.search(text):
                    return text
        return None


def figures_of(
    bundle: Bundle,
    kernel: Kernel,
    archive: TextArchive | None,
    sources: SourceFolder | None,
    hits_of: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Gather what is known of a kernel; what of it is damaged is said as its `problem`, not raised.

    Args:
        bundle, kernel: whose figures.
        archive: gets its texts; None leaves them out. `texts` says where in it each begins, and how
            many runs it has.
        sources: where the files of Python are looked for.
        hits_of: how often each kernel was found, by key; None where nobody tells.
    """
    known, error = specialization_of(bundle, kernel)
    problem = error.message if error is not None else None
    resources, occupancy = None, None
    try:
        resources = read_resources(bundle.read(kernel.binary), kernel.spec.entry)
        occupancy = block_occupancy(
            kernel.target,
            kernel.spec.num_warps,
            resources.allocated_registers or resources.registers,
            resources.shared_bytes,
            kernel.spec.shared_bytes,
        )
    except BundlerError as unreadable:
        problem = unreadable.message
    seen = bundle.observed.kernels.get(kernel.key)
    stages_us = dict(seen.times_us) if seen is not None else {}
    return {
        **wording.kernel_facts(kernel),
        "warps": kernel.spec.num_warps,
        "blocks_of_cluster": kernel.spec.num_ctas,
        "stages": known.stages,
        # What it was compiled for; None where nobody recorded it.
        "constants": _json_safe(known.constants),
        "signature": _json_safe(known.signature),
        "options": _json_safe(known.options),
        "registers": getattr(resources, "registers", None),
        "spills": getattr(resources, "spilled_registers", None),
        "stack_bytes": getattr(resources, "stack_bytes", None),
        "static_shared_bytes": getattr(resources, "shared_bytes", None),
        "dynamic_shared_bytes": kernel.spec.shared_bytes,
        # Warps that its target's multiprocessor holds, 0 to 1 of the most, and what keeps it from
        # more.
        "occupancy": occupancy.share if occupancy is not None else None,
        "occupancy_limit": occupancy.limit if occupancy is not None else None,
        "binary_bytes": kernel.binary.size,
        # Empty when only hits were seen.
        "stages_us": stages_us,
        "compile_us": sum(stages_us.values()) if stages_us else None,
        "devices": seen.devices if seen is not None else (),
        "hits": hits_of.get(kernel.key, 0) if hits_of is not None else None,
        "files": [(artifact.kind, artifact.size) for artifact in kernel.artifacts],
        "texts": {} if archive is None else _texts_of(bundle, kernel, archive, sources),
        "problem": problem,
    }


def _texts_of(
    bundle: Bundle, kernel: Kernel, archive: TextArchive, sources: SourceFolder | None
) -> dict[str, tuple[int, int]]:
    texts: dict[str, tuple[int, int]] = {}
    path = ""
    for artifact in kernel.artifacts:
        if artifact.kind not in TEXT_KINDS:
            continue
        try:
            data = bytes(bundle.read(artifact))
        except BundlerError:  # verify tells; the page says that the kernel has no such text
            continue
        texts[artifact.kind] = archive.add(data.decode("utf-8", "backslashreplace"))
        if not path and (found := _LOCATION.search(data)) is not None:
            path = found[1].decode("utf-8", "replace")
    text = sources.text_of(path, kernel.name) if sources is not None and path else None
    if text is not None:
        texts["python"] = archive.add(text)
    return texts


def _json_safe(values: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return values that any JSON decoder takes; bytes and the like become text."""
    found: Mapping[str, Any] | None = json.loads(json.dumps(values, default=str))
    return found


_LEVEL = 9


class TextArchive:
    """Texts, added one by one; those of one kernel after another's compress best."""

    def __init__(self) -> None:
        self._lines: dict[str, int] = {}
        self._runs = array.array("I")

    def add(self, text: str) -> tuple[int, int]:
        """Add a text, and return where its runs begin and how many there are."""
        begin = len(self._runs) // 2
        first = last = -2
        for line in text.split("\n"):
            number = self._lines.setdefault(line, len(self._lines))
            if number == last + 1:
                last = number
                continue
            if last >= 0:
                self._runs.extend((first, last - first + 1))
            first = last = number
        self._runs.extend((first, last - first + 1))
        return begin, len(self._runs) // 2 - begin

    def pack(self) -> tuple[str, str]:
        """Return everything that was added, as the page holds it: in base64 the deflated lines,
        each ended by a newline, and the deflated runs, little-endian 32-bit pairs of first line and
        number of lines.
        """
        runs = self._runs[:]
        if sys.byteorder == "big":
            runs.byteswap()
        lines = "".join(f"{line}\n" for line in self._lines)
        # A lone surrogate has no UTF-8; texts of kernels are decoded such that they hold none.
        return _packed(lines.encode()), _packed(runs.tobytes())


def _packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, _LEVEL)).decode()


#: A page larger than this opens slowly, and mails refuse it.
LIMIT_BYTES = 3_000_000
# Of each kind the largest kernels have areas of their own.
_LARGEST = 12
_MARK = re.compile(r"\{\{([a-z-]+)\}\}")
_NO_TEXTS = ("", "")


class Box(NamedTuple):
    """A rectangle: left, top, width and height, in the units of the area that was given."""

    x: float
    y: float
    width: float
    height: float


_AREA = Box(0.0, 0.0, 960.0, 360.0)


class ReportPage(Struct, frozen=True):
    """A page, and what of the bundle is in it.

    Attributes:
        text: the HTML.
        kernels: how many it shows.
        with_texts: of how many it has source and stages; the others had no room, those that took
            longest to compile come first.
    """

    text: str
    kernels: int
    with_texts: int


def report_page(
    first: tuple[str, Bundle],
    second: tuple[str, Bundle] | None = None,
    sources: SourceFolder | None = None,
    misses: Sequence[dict[str, Any]] | None = None,
    hits_of: Mapping[str, int] | None = None,
    *,
    limit_bytes: int = LIMIT_BYTES,
) -> ReportPage:
    """Make the page of a bundle.

    Args:
        first: what the bundle is called, and the bundle.
        second: another one, which the page compares it with.
        sources: where the Python files of kernels are looked for.
        misses: why kernels were compiled here, as `explain --json` tells it; None where nobody
            asked.
        hits_of: how often each kernel was found, by key; None where nobody tells.
        limit_bytes: texts of kernels are left out where the page would be larger.
    """
    # A name of a file may hold anything, also what is no text.
    name, bundle = printable(first[0]), first[1]
    second = (printable(second[0]), second[1]) if second is not None else None
    order = sorted(bundle.kernels, key=lambda kernel: (kernel.name, str(kernel.target), kernel.key))
    told: dict[str, Any] = {
        "version": bundler.__version__,
        "name": name,
        "overview": _overview(bundle),
        "tunings": _tunings(bundle),
        "diff": _diff((name, bundle), second) if second is not None else None,
        "programs": [
            {
                **dataclasses.asdict(one),
                "memory": memory_words(one),
                "inputs": list(map(str, one.inputs)),
                "results": list(map(str, one.results)),
            }
            for one in programs_of(bundle)
        ],
        "misses": misses,
    }
    chosen = {kernel.key for kernel in order}
    while True:
        archive = TextArchive()
        figures = [
            figures_of(bundle, k, archive if k.key in chosen else None, sources, hits_of)
            for k in order
        ]
        page = _page(
            told | {"kernels": figures, "treemap": _treemap(figures)},
            archive.pack() if chosen else _NO_TEXTS,
            name,
        )
        if len(page) <= limit_bytes or not chosen:
            return ReportPage(page, len(order), len(chosen))
        without = len(_page(told | {"kernels": figures}, _NO_TEXTS, name))
        # The share that there is room for, and a little less: those that took longest to compile.
        share = (limit_bytes - without) / max(1, len(page) - without)
        number = int(len(chosen) * max(0.0, min(share, 1.0)) * 0.9)
        longest = sorted(
            (one for one in figures if one["key"] in chosen),
            key=lambda one: (-(one["compile_us"] or 0), one["key"]),
        )
        chosen = {one["key"] for one in longest[:number]}


def _page(told: dict[str, Any], texts: tuple[str, str], name: str) -> str:
    parts = files(__package__) / "page"
    script = (parts / "report.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # In a script element only a "<" could end it; JSON has an escape for it.
    facts = msgspec.json.encode(told).decode().replace("<", "\\u003c")
    page = (parts / "report.html").read_text(encoding="utf-8")
    parts_by_mark = {
        "title": html.escape(f"{name}: kernels"),
        "script-digest": f"sha256-{digest}",
        "style": (parts / "report.css").read_text(encoding="utf-8"),
        "lines": texts[0],
        "runs": texts[1],
        "script": script,
        "facts": facts,
    }
    # In one pass over the page: a name or a text of a bundle may look like a mark.
    return _MARK.sub(lambda mark: parts_by_mark[mark[1]], page)


def _overview(bundle: Bundle) -> dict[str, Any]:
    content = bundle.content
    sizes = dict(content.blobs)
    by_kind: Counter[str] = Counter()
    used: Counter[str] = Counter()
    for entry in content.entries:
        for artifact in entry_artifacts(entry):
            by_kind[artifact.kind] += artifact.size
            used[artifact.digest] += 1
    targets = Counter(str(kernel.target) for kernel in bundle.kernels)
    times = [sum(time for _, time in seen.times_us) for seen in bundle.observed.kernels.values()]
    binaries = {(str(kernel.target), kernel.binary.digest) for kernel in bundle.kernels}
    return {
        "digest": bundle.digest,
        "kernels": len(bundle.kernels),
        "names": len({kernel.name for kernel in bundle.kernels}),
        "targets": dict(sorted(targets.items())),
        "bytes_by_kind": dict(by_kind.most_common()),
        "stored_bytes": sum(sizes.values()),
        "shared_files": sum(number - 1 for number in used.values()),
        "compile_us": sum(times),
        "timed_kernels": sum(1 for time in times if time),
        "tuning_records": len(bundle.tuning_records),
        "others": dict(
            Counter(entry_kind(entry) for entry in content.entries if not isinstance(entry, Kernel))
        ),
        "same_binaries": len(bundle.kernels) - len(binaries),
        "variants_dropped": bundle.variants_dropped,
        "environments": [dict(pairs) for pairs in bundle.observed.environments],
    }


def _treemap(figures: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rectangles: one for each kind of file, and in it one for each of the largest kernels
    and one for the others.
    """
    amounts: dict[str, Counter[str]] = {}
    for one in figures:
        for kind, size in one["files"]:
            amounts.setdefault(kind, Counter())[one["key"]] += size
    kinds = sorted(
        ((sum(sizes.values()), kind) for kind, sizes in amounts.items() if sum(sizes.values())),
        reverse=True,
    )
    boxes = []
    for (total, kind), area in zip(
        kinds, squarified([total for total, _ in kinds], _AREA), strict=True
    ):
        largest = [(key, size) for key, size in amounts[kind].most_common(_LARGEST) if size]
        rest = total - sum(size for _, size in largest)
        inner = sorted([*largest, *([("", rest)] if rest else [])], key=lambda pair: -pair[1])
        cells = squarified([size for _, size in inner], area)
        boxes.append(
            {
                "kind": kind,
                "bytes": total,
                "box": area,
                "cells": [
                    {"key": key, "bytes": size, "box": box}
                    for (key, size), box in zip(inner, cells, strict=True)
                ],
            }
        )
    return boxes


def _tunings(bundle: Bundle) -> list[dict[str, Any]]:
    found = {tuning.record: tuning for tuning in bundle.observed.tunings}
    rows = []
    for record in bundle.tuning_records:
        tuning = found.get(id_of(record))
        timings = tuning.timings if tuning is not None else ()
        rows.append(
            {
                "kernel": record.kernel,
                "found_by": record.found_by,
                "config": _plain(record.config),
                "time_ns": time_of(record, tuning),
                "device": dict(record.parts).get("device"),
                "timings": [dataclasses.asdict(t) | {"config": _plain(t.config)} for t in timings],
            }
        )
    return rows


def _plain(config: Named) -> dict[str, Any]:
    return {name: value.plain() for name, value in config}


def _diff(first: tuple[str, Bundle], second: tuple[str, Bundle]) -> dict[str, Any]:
    (_, one), (name, two) = first, second
    listed: dict[str, list[dict[str, Any]]] = {"added": [], "removed": [], "changed": []}
    words = dict(zip("+-~", listed, strict=True))
    for sign, entry, changes in changed_entries(one, two):
        told = {
            "name": entry.name if isinstance(entry, Kernel) else entry.path,
            "target": str(entry.target) if isinstance(entry, Kernel) else entry_kind(entry),
            "key": entry.key if isinstance(entry, Kernel) else "",
            "changes": changes,
        }
        listed[words[sign]].append(told)
    for rows in listed.values():
        rows.sort(key=lambda row: (row["name"], row["target"], row["key"]))
    same = count_entries(one) - len(listed["removed"]) - len(listed["changed"])
    return {"name": name, "digest": two.digest, **listed, "same": same}


def squarified(amounts: Sequence[float], area: Box) -> list[Box]:
    """Return a rectangle for each amount, in the order given.

    Args:
        amounts: more than 0, the largest first.
        area: what they fill together.
    """
    boxes: list[Box] = []
    left = area
    rest = [amount * area.width * area.height / sum(amounts) for amount in amounts]
    while rest:
        side = min(left.width, left.height)
        number = 1
        while number < len(rest) and _worst(rest[: number + 1], side) <= _worst(
            rest[:number], side
        ):
            number += 1
        row, rest = rest[:number], rest[number:]
        placed, left = _row(row, left)
        boxes += placed
    return boxes


def _worst(row: Sequence[float], side: float) -> float:
    if side <= 0:
        return 0.0
    total = sum(row)
    return max(side * side * max(row) / (total * total), total * total / (side * side * min(row)))


def _row(row: Sequence[float], left: Box) -> tuple[list[Box], Box]:
    """Lay a row along the shorter side of what is left; returns its rectangles, and what is left
    then.
    """
    total, boxes, at = sum(row), [], 0.0
    if left.width < left.height:  # the same, with the axes exchanged
        turned, rest = _row(row, _turned(left))
        return list(map(_turned, turned)), _turned(rest)
    width = total / left.height
    for amount in row:
        boxes.append(Box(left.x, left.y + at, width, amount / width))
        at += amount / width
    return boxes, Box(left.x + width, left.y, max(0.0, left.width - width), left.height)


def _turned(box: Box) -> Box:
    return Box(box.y, box.x, box.height, box.width)


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
    if output is None:  # a file of its own in the current directory, for a tag too
        stem = _base(first).removesuffix(".tbundle")
        output = "".join(c if c.isalnum() or c in "._-" else "-" for c in stem) + "-report.html"
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
