# SPDX-License-Identifier: Apache-2.0
"""Judges the samples of a soak: what grows over the second half of it, and what it looks like."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from tools.cluster.report import Line, Panel, draw
from tools.shared.measurement import row

# What may be added over the second half, by the line that fits the samples: a part of the mean, and
# an amount. Sizes of stores go up and down with what is drawn and pruned. The append-only file of
# the server is drawn and not judged: it holds what was written since the server last rewrote it,
# which is as much as the machine had time for between two kills.
LIMITS = {
    "memory_mib": (0.03, 4.0),
    "descriptors": (0.0, 2.0),
    "threads": (0.0, 1.0),
    "store_files": (0.15, 20.0),
    "temporary_files": (0.0, 3.0),
    "other_files": (0.0, 3.0),
    "redis_keys": (0.15, 20.0),
    "redis_mib": (0.15, 0.5),
    "redis_clients": (0.0, 2.0),
}
# What a prune leaves for its grace is as much as was written meanwhile, which goes up and down with
# what else the machine does: growth of these is what the amount of work does not explain.
BY_WORK = frozenset({"store_files", "redis_keys", "redis_mib"})
UNITS = {"memory_mib": "MiB", "redis_mib": "MiB"}
ALIKE = 0.99
# A shorter half is all start: nothing was pruned yet.
LEAST_HALF_S = 120.0
Samples = Sequence[dict[str, Any]]


def slope(points: Sequence[tuple[float, float]], work: Sequence[float] = ()) -> float:
    """Return how steep the line is that fits points best.

    Args:
        points: x and y.
        work: of each point; the part of y that is proportional to it is no slope.
    """
    times, values = (list(part) for part in zip(*points, strict=True))
    # Work that grows with time alone cannot be told from time.
    if len(set(work)) > 1 and abs(statistics.correlation(times, work)) < ALIKE:
        # The line through what of each is not explained by the work (Frisch and Waugh, 1933).
        times, values = (_unexplained(part, work) for part in (times, values))
    return statistics.linear_regression(times, values).slope


def _unexplained(values: Sequence[float], work: Sequence[float]) -> list[float]:
    line = statistics.linear_regression(work, values)
    return [
        value - line.slope * one - line.intercept for value, one in zip(values, work, strict=True)
    ]


def growth_rows(samples: Samples) -> list[dict[str, Any]]:
    """Return a row for each thing that must not grow."""
    half = samples[len(samples) // 2 :]
    span_s = half[-1]["time_s"] - half[0]["time_s"] if half else 0.0
    found = []
    for name, (share, amount) in LIMITS.items():
        known = [one for one in half if one[name] is not None]
        points = [(one["time_s"], one[name]) for one in known]
        if len(points) < 3:  # no line fits
            continue
        per_s = slope(points, [one["changes"] for one in known] if name in BY_WORK else ())
        most = share * statistics.fmean(value for _, value in points) + amount
        unit = UNITS.get(name, "")
        found.append(
            row(
                f"{name}: growth over the second half",
                per_s * span_s,
                unit,
                most=most if span_s >= LEAST_HALF_S else None,
                peer=f"{per_s * 3600:+.3g} {unit}".strip() + " an hour",
            )
        )
    return found


def plot(samples: Samples) -> str:
    """Return a picture of all samples over minutes."""

    def lines(names: Iterable[str]) -> list[Line]:
        found = {name: [(s["time_s"] / 60, s[name]) for s in samples] for name in names}
        known = {name: [p for p in points if p[1] is not None] for name, points in found.items()}
        return [Line(name, points) for name, points in known.items() if points]

    times = sorted({name for one in samples for name in one["latencies"]})
    panels = [
        Panel("MiB", "minutes", lines(["memory_mib", "redis_mib", "redis_file_mib"]), True),
        Panel("files and keys", "minutes", lines(["store_files", "redis_keys"]), True),
        Panel(
            "descriptors, threads, leftovers",
            "minutes",
            lines(["descriptors", "threads", "temporary_files", "other_files"]),
            True,
        ),
    ]
    for part in (times[:4], times[4:8], times[8:12], times[12:]):
        of_part = [
            Line(
                f"{name}, {which}",
                [
                    (one["time_s"] / 60, one["latencies"][name][which] * 1e3)
                    for one in samples
                    if name in one["latencies"]
                ],
            )
            for name in part
            for which in ("median", "p99")
        ]
        if of_part:
            panels.append(Panel("latency in ms", "minutes", of_part, True))
    return draw(panels)
