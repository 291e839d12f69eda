# SPDX-License-Identifier: Apache-2.0
"""`section`: whole models of others beside Inductor, as `models --time` measured them, for
docs/benchmarks.md; `rows`: their targets.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from tools.codegen.models import fallbacks
from tools.shared import measurement
from tools.shared.measurement import table

Found = dict[str, Any]
_KINDS = {
    "device": "device time",
    "generated": "of generated kernels",
    "wall": "wall time",
    "host": "host time",
    "first_s": "first call",
    "peak": "peak memory",
}
# Of each kind the geometric mean, and of each model.
_MOST = {
    "device": (1.0, 1.05),
    "generated": (0.97, None),
    "first_s": (0.85, None),
    "peak": (None, 1.05),
}
# A call keeps the GPU busy for more than so much of Inductor's time, and may take so much of it; or
# for less than so much, and takes so much of it in the geometric mean.
_BUSY, _MOST_OF_BUSY = 0.9, 1.02
_IDLE, _MOST_OF_IDLE = 0.5, 0.80
#: Names of the ratios of starts: the start, and what of it each compares.
START_RATIOS = {
    "first start": ("first", "whole_s"),
    "first start's rest": ("first", "rest_s"),
    "second start": ("second", "whole_s"),
    "second start's rest": ("second", "rest_s"),
}
# Of each the geometric mean.
_MOST_OF_STARTS = {
    "first start": 0.85,
    "first start's rest": 0.7,
    "second start": 0.8,
    "second start's rest": 0.5,
}
_ABOUT_STARTS = """`models --time --starts`: the first call in a new process, with empty caches and
with those that the first start left, both sides on as many cores; the rest is what neither Dynamo
nor AOTAutograd takes. Three or four models start side by side and share the GPU.
"""
_ABOUT = """`python -m tools.codegen models --time --kind dashboard`. Models of TorchInductor's
dashboard in their own sizes and a quarter of its batches, inference in bfloat16 and training, ours
beside Inductor's by default settings. Nine to sixteen processes share the GPU, and all others stand
still while one is timed; a first call has one core. Device time is the sum over the kernels of a
call; that of generated kernels, of neither libraries nor templates, was not noted in the first
runs. The raw result says of which commit each line is.
"""


def rows(times: Mapping[str, Found]) -> list[Found]:
    """Return what is asked for of all models, and of the worst; of some there are starts alone."""
    found = _rows_of_starts(times)
    times = {name: one for name, one in times.items() if "ours" in one}
    for kind, (mean, most) in _MOST.items():
        ratios = {name: _ratio(one, kind) for name, one in times.items() if _has(one, kind)}
        if not ratios:
            continue
        if mean is not None:
            words = f"{_KINDS[kind]}, geometric mean of {len(ratios)}"
            found.append(_row(words, statistics.geometric_mean(ratios.values()), mean, "Inductor"))
        if most is not None:
            worst = max(ratios, key=lambda name: ratios[name])
            found.append(_row(f"{_KINDS[kind]}, the worst model", ratios[worst], most, worst))
    busy = [one for one in times.values() if _share(one) > _BUSY]
    if busy:
        slowest = max(_ratio(one, "wall") for one in busy)
        words = f"wall time, the worst of {len(busy)} models that keep the GPU busy"
        found.append(_row(words, slowest, _MOST_OF_BUSY, "Inductor"))
    idle = [_ratio(one, "wall") for one in times.values() if _share(one) < _IDLE]
    if idle:
        words = f"wall time, geometric mean of {len(idle)} models that leave the GPU idle"
        found.append(_row(words, statistics.geometric_mean(idle), _MOST_OF_IDLE, "Inductor"))
    noted = {name: one for name, one in times.items() if "fallbacks" in one["ours"]}
    if noted:
        names = sorted(name for name, one in noted.items() if fallbacks(one))
        words = f"models of {len(noted)} with a graph that runs as torch has it"
        found.append(measurement.row(words, len(names), "", names=names, most=0))
    return found


def _rows_of_starts(times: Mapping[str, Found]) -> list[Found]:
    found = []
    for kind, most in _MOST_OF_STARTS.items():
        ratios = [ratio for one in times.values() if (ratio := start_ratio(one, kind)) is not None]
        if ratios:
            words = f"{kind}, geometric mean of {len(ratios)}"
            found.append(_row(words, statistics.geometric_mean(ratios), most, "Inductor"))
    return found


def start_ratio(one: Found, kind: str) -> float | None:
    """Return how long a start of ours takes beside Inductor's, None where one was not timed."""
    start, what = START_RATIOS[kind]
    sides = one.get(start, {})
    theirs = sides.get("inductor", {}).get(what)
    return float(sides["ours"][what] / theirs) if theirs else None


def section(result: Found) -> str:
    """Return the section of the page: the targets, and a line for each model."""
    times = {name: one for name, one in result["times"].items() if "ours" in one}
    asked = [
        [row["work"], measurement.verdict(row), row["peer"], measurement.target(row)]
        for row in result["rows"]
    ]
    each = [
        [
            name,
            *(f"{_ratio(one, kind):.2f}" if _has(one, kind) else "" for kind in _KINDS),
            _kernels(one),
        ]
        for name, one in sorted(times.items())
    ]
    head = ["model", *_KINDS.values(), "kernels: ours, Inductor's"]
    parts = [_ABOUT, table(["what", "figure", "beside", "target"], asked), table(head, each)]
    started = sorted(name for name, one in result["times"].items() if "second" in one)
    if started:
        parts += [_ABOUT_STARTS, _starts({name: result["times"][name] for name in started})]
    return "## Whole models beside Inductor\n\n" + "\n".join(parts)


def _starts(times: Mapping[str, Found]) -> str:
    """Return a line for each model: cores, and seconds of ours, Inductor's, and how many times."""
    lines = []
    for name, one in times.items():
        cells = []
        for kind, (start, what) in START_RATIOS.items():
            ratio, sides = start_ratio(one, kind), one.get(start, {})
            if ratio is None:
                cells.append("")
                continue
            ours, theirs = (sides[side][what] for side in ("ours", "inductor"))
            cells.append(f"{ours:.2f}, {theirs:.2f} ({ratio:.2f})")
        lines.append([name, str(one["second"]["ours"]["cores"]), *cells])
    return table(["model", "cores", *START_RATIOS], lines)


def _row(words: str, figure: float, most: float, peer: str) -> Found:
    return measurement.row(words, figure, "x", most=most, peer=peer)


def _has(one: Found, kind: str) -> bool:
    return bool(one["inductor"].get(kind))


def _ratio(one: Found, kind: str) -> float:
    return float(one["ours"][kind] / one["inductor"][kind])


def _share(one: Found) -> float:
    return float(one["inductor"]["device"] / one["inductor"]["wall"])


def _kernels(one: Found) -> str:
    return ", ".join(f"{one[side]['kernels']:.0f}" for side in ("ours", "inductor"))
