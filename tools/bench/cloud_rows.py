# SPDX-License-Identifier: Apache-2.0
"""What the samples of the benchmark of object stores say: rows with figure, peer and target, and
their section of the page.
"""

from __future__ import annotations

from typing import Any

from tools.bench.cloud_jobs import AT_ONCE, AWS_AT_ONCE
from tools.shared.measurement import median, row, shown, target

# How many times faster than files fetched as `aws s3 sync` does, by how late each answer comes.
FASTER_TARGETS = {"20 ms": 10.0}
SECTION = """`python -m tools.bench cloud`. {kernels:,} kernels, compiled by Triton for sm_90 and recorded, {files:,} files, in a bucket of a stand-in for S3 on
this host that gives each answer so much later; everything goes into an empty directory, on {place}. {rounds} rounds, the sides in turn, each
piece of work in a process of its own, forked from one that has done its imports. obstore {client}; load of the machine by other work
before the run: {load_before}. The stand-in is a process of Python that answers some thousand requests a second, and takes part of the
processors from both sides; without a delay it is what the many requests of the peer wait for.

* *ours*: `open_store`, `Store.restore` by tag, `close`. Every digest is checked.
* *gets*: obstore itself fetches and writes every file of the cache, whose names are known, so many at once, and verifies nothing.
  `aws s3 sync` has ten at once unless it is configured otherwise, so the target is set beside ten. The other numbers show how far
  obstore comes when it is given more, until the two processors are busy: beside the fastest of them there is no target.
* *aws s3 sync*: the program {aws}, where it is installed, one run.
"""


def rows_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of every delay."""
    rows = []
    for delay, samples in result["delays"].items():
        best = min(AT_ONCE, key=lambda count: median(samples[_gets(count)]))
        least = FASTER_TARGETS.get(delay)
        rows += [
            _row(
                f"{delay}: restore everything: how much faster",
                samples,
                "ours all",
                _gets(AWS_AT_ONCE),
                least,
            ),
            _row(
                f"{delay}: restore everything: how much faster than the fastest number",
                samples,
                "ours all",
                _gets(best),
            ),
            _row(
                f"{delay}: restore the launch set: how much faster",
                samples,
                "ours launch",
                _gets(AWS_AT_ONCE),
            ),
        ]
        if "aws s3 sync" in samples:
            rows.append(
                _row(
                    f"{delay}: restore everything: how much faster than aws",
                    samples,
                    "ours all",
                    "aws s3 sync",
                )
            )
    return rows


def _gets(count: int) -> str:
    return f"gets, {count} at once"


def _row(
    work: str, samples: dict[str, list[float]], ours: str, peer: str, least: float | None = None
) -> dict[str, Any]:
    # The program `aws` runs fewer times than the others.
    figure = median(
        [theirs / mine for mine, theirs in zip(samples[ours], samples[peer], strict=False)]
    )
    return row(
        work,
        figure,
        "x",
        least=least,
        peer=f"{peer}, {shown(median(samples[peer]) * 1e3, 'ms')}",
        ours_ms=median(samples[ours]) * 1e3,
        peer_ms=median(samples[peer]) * 1e3,
    )


def section(result: dict[str, Any]) -> str:
    """Return the section of the page."""
    delays = result["delays"]
    names = [
        "push",
        "ours all",
        "ours launch",
        *map(_gets, AT_ONCE),
        *(["aws s3 sync"] if result["aws"] else []),
    ]
    steps = [
        [name, *(shown(median(samples[name]) * 1e3, "ms") for samples in delays.values())]
        for name in names
    ]
    return "\n".join(
        [
            "## A start from S3",
            "",
            SECTION.format(**{**result, "aws": result["aws"] or "`aws`"}),
            _table(
                ["each answer late by: work", "ours", "peer", "ratio", "target"],
                [
                    [
                        line["work"],
                        shown(line["ours_ms"], "ms"),
                        line["peer"],
                        _verdict(line),
                        target(line),
                    ]
                    for line in result["rows"]
                ],
            ),
            _table(["step", *delays], steps),
        ]
    )


def _verdict(line: dict[str, Any]) -> str:
    figure = shown(line["figure"], line["unit"])
    return figure if line["ok"] else f"**{figure}**"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"
