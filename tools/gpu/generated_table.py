# SPDX-License-Identifier: Apache-2.0
"""The rows of `python -m tools.gpu generated`, with their targets, and the section of docs/benchmarks.md that shows them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import Any

from tools.shared import measurement

# Of Inductor's launch of the same module.
MOST = 1.03
CORPUS_KERNELS, LEAST_KINDS = 42, 30
Found = dict[str, Any]


def rows(found: Found) -> list[Found]:
    """Return the rows: counts of both sections, then a module a row."""
    modules = [*_corpus_modules(found["corpus"]), *map(_kind_module, found["kinds"])]
    lines = []
    for section, least in (("corpus", CORPUS_KERNELS), ("kinds", LEAST_KINDS)):
        mine = [module for module in modules if module["section"] == section]
        if not mine:
            continue
        lines += _counts(section, max(least, len(mine)), mine)
    return lines + [
        _line(module, what)
        for module in modules
        for what in ("gpu", "host")
        if module[what] is not None
    ]


def _counts(section: str, least: int, modules: list[Found]) -> list[Found]:
    unit = f"of {len(modules)}"
    made = [
        measurement.row(f"{section}: {words}", sum(module[what] for module in modules), unit, least=least, section=section,
                        wrong=[module["name"] for module in modules if not module[what]])
        for what, words in (
            ("loaded", "loaded by load_generated, and launched"),
            ("bits", "same bits as Inductor's launch"),
            ("eager", "numbers equal to torch eager"),
        )
    ]  # fmt: skip
    for what, words in (("gpu", "time of the GPU"), ("host", "time of the host for a call")):
        ratios = [module[what] for module in modules if module[what] is not None]
        if ratios:
            made.append(measurement.row(
                f"{section}: {words}, all modules (geometric mean)", geometric(ratios), "x", most=MOST, section=section,
                peer=f"Inductor's launch; from {min(ratios):.3f} to {max(ratios):.3f}, {len(ratios)} modules",
            ))  # fmt: skip
    return made


def _line(module: Found, what: str) -> Found:
    words = {"gpu": "GPU", "host": "host"}[what]
    ours, theirs = (statistics.median(side) for side in module[f"{what}_us"])
    return measurement.row(
        f"{module['section']}: {module['name']}: {words}", round(module[what], 4), "x", most=MOST, section=module["section"],
        peer=f"{ours:.2f} us, Inductor {theirs:.2f} us; {', '.join(module['heuristics'])}", module=module["name"],
    )  # fmt: skip


def geometric(ratios: Iterable[float]) -> float:
    """Return the geometric mean."""
    logs = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(logs) / len(logs))


def _corpus_modules(wrappers: list[Found]) -> list[Found]:
    """Return each kernel of the recorded wrappers as a module, which it is in the recorded cache, too."""
    found = []
    for wrapper in wrappers:
        for kernel in wrapper.get("kernels", ()):
            times = _timed(wrapper).get(kernel["kernel"])
            found.append(_module("corpus", kernel["kernel"], [kernel], [times] if times else []) | {
                "eager": kernel.get("eager") == "compared" and kernel["written"] > 0 and kernel["off"] <= kernel["loose"],
            })  # fmt: skip
    return found


def _kind_module(kind: Found) -> Found:
    kernels = kind.get("kernels", [])
    made = _module("kinds", kind["kind"], kernels, list(_timed(kind).values()))
    return made | {
        "eager": bool(kind.get("close")),
        "loaded": made["loaded"] and not kind.get("faults", ["?"]),
    }


def _timed(found: Found) -> Found:
    times = found.get("times", {})
    return {} if "error" in times else times


def _module(section: str, name: str, kernels: list[Found], times: list[Found]) -> Found:
    launched = [kernel for kernel in kernels if "unequal" in kernel]
    made: Found = {
        "section": section, "name": name, "loaded": bool(launched) and (section == "kinds" or len(launched) == len(kernels)),
        # Floats that are added atomically differ between two launches of Inductor's, too.
        "bits": bool(launched) and all(set(k["unequal"]) <= set(k["unequal_inductor"]) for k in launched),
        "heuristics": sorted({name for kernel in kernels for name in kernel["heuristics"]}),
    }  # fmt: skip
    for what in ("gpu", "host"):
        made[what] = geometric(time[f"{what}_ratio"] for time in times) if times else None
        # A module's time is that of all its kernels.
        made[f"{what}_us"] = [
            [sum(parts) for parts in zip(*(time[f"{what}_us"][side] for time in times), strict=True)]
            for side in ("ours", "inductor")
        ] if times else None  # fmt: skip
    return made


def show(result: Found) -> int:
    """Print the rows; 1 when a target is missed, or there is nothing."""
    for line in result["rows"]:
        print(f"{'ok  ' if line['ok'] else 'MISS'}  {line['work']:<76} {measurement.shown(line['figure'], line['unit']):>10}  "
              f"{measurement.target(line)}  {line['peer']}  {', '.join(line.get('wrong', []))}")  # fmt: skip
    return 0 if result["rows"] and all(line["ok"] for line in result["rows"]) else 1
