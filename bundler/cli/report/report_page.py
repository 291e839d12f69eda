# SPDX-License-Identifier: Apache-2.0
"""`report_page`: the HTML of a report, with everything that it shows in it.

`report_command.py` writes what it returns. Sizes are areas of rectangles that are as square as can
be (`squarified`), after M. Bruls, K. Huizing, J. van Wijk, "Squarified Treemaps" (2000): a row
takes the next amount as long as that makes the worst side ratio in the row no worse. What a bundle
holds is hostile: it stands in the page as JSON and as packed texts alone, which the page's script
puts into it as text, and the page's policy lets no other script run and nothing be fetched.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import html
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

import bundler
from bundler.cli.bundles.comparison import changed_entries, count_entries
from bundler.cli.bundles.program_facts import memory_words
from bundler.cli.report.kernel_figures import SourceFolder, figures_of
from bundler.cli.report.text_archive import PackedTexts, TextArchive
from bundler.format.bundle import Bundle
from bundler.format.candidate_timings import id_of, time_of
from bundler.format.entries import Kernel, entry_artifacts, entry_kind
from bundler.format.launch_spec import Named
from bundler.format.summary import printable
from bundler.runtime.program.program_summary import programs_of

#: A page larger than this opens slowly, and mails refuse it.
LIMIT_BYTES = 3_000_000
# Of each kind the largest kernels have areas of their own.
_LARGEST = 12
_MARK = re.compile(r"\{\{([a-z-]+)\}\}")
_NO_TEXTS = PackedTexts("", "")


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
        chosen = _fewer(figures, chosen, (limit_bytes - without) / max(1, len(page) - without))


def _fewer(figures: Sequence[dict[str, Any]], chosen: set[str], share: float) -> set[str]:
    """Return this share of what was chosen, and a little less: those that took longest to
    compile.
    """
    number = int(len(chosen) * max(0.0, min(share, 1.0)) * 0.9)
    longest = sorted(
        (one for one in figures if one["key"] in chosen),
        key=lambda one: (-(one["compile_us"] or 0), one["key"]),
    )
    return {one["key"] for one in longest[:number]}


def _page(told: dict[str, Any], texts: PackedTexts, name: str) -> str:
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
        "lines": texts.lines,
        "runs": texts.runs,
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
