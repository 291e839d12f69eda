# SPDX-License-Identifier: Apache-2.0
"""What first launches and launches go into on a GPU, as tables, from the phases and steps in
gpu-check.json.

`page.py` puts `tables` below the rows of the check, and `why` behind a row whose target is missed.
"""

from __future__ import annotations

from typing import Any

from tools.shared.measurement import differences, median, medians, table

# The columns of the table of phases: name in the result -> heading.
PATHS = {"bare": "bare loop", "compiled": "ours, compiled", "ctypes": "ours, pure Python"}
# The ways whose steps are measured: name in the result -> words in the name of the row.
WAYS = {
    "handle": "ours by handle, compiled extension",
    "dispatcher": "ours by dispatcher, compiled extension",
}
# What comes first in the time of a process stands first.
ORDER = ("load", "choose", "read", "plan", "driver", "launch", "synchronize")
LIMIT = "C loop around cuLaunchKernel"
FIRST = "first launches of"


def tables(result: dict[str, Any]) -> str:
    """Return the tables that the figures of a check give; nothing where the parts of the check were
    left out.
    """
    figures = result.get("figures", {})
    first = _phases(figures["first"]["phases_us"]) if "first" in figures else ""
    return first + (_steps(figures["cost"]) if "steps_ns" in figures.get("cost", {}) else "")


def why(row: dict[str, Any], result: dict[str, Any]) -> str:
    """Return what the time of a missed row consists of, call by call."""
    figures = result.get("figures", {})
    if row["check"].startswith(FIRST) and "first" in figures:
        path = "compiled" if "compiled" in row["check"] else "ctypes"
        return _in_words("Microseconds a kernel", medians(figures["first"]["phases_us"][path]))
    for way, words in WAYS.items():
        if words in row["check"] and "steps_ns" in figures.get("cost", {}):
            above = _above_the_loop(figures["cost"], words)
            return _in_words(
                f"Of {above:.0f} ns above the C loop, alone", figures["cost"]["steps_ns"][way]
            )
    return ""


def _phases(phases: dict[str, list[dict[str, float]]]) -> str:
    found = {path: medians(runs) for path, runs in phases.items()}
    # The bare loop's phases are calls of the driver, but for reading.
    found["bare"] = {
        f"driver: {name}" if name.startswith("cu") else name: spent
        for name, spent in found["bare"].items()
    }
    names = sorted(
        {name for path in PATHS for name in found[path]},
        key=lambda name: (ORDER.index(name.partition(":")[0]), name),
    )
    rows = [[name, *(_shown(found[path].get(name)) for path in PATHS)] for name in names]
    rows.append(["**all**", *(f"**{sum(found[path].values()):.1f}**" for path in PATHS)])
    return (
        "\n### What first launches go into\n\nMicroseconds a kernel, by phase, under clocks, which"
        " cost some themselves. The calls of the driver are the floor of any first launch; ours"
        " makes cuLaunchKernel within `launch`.\n\n" + table(["phase", *PATHS.values()], rows)
    )


def _steps(cost: dict[str, Any]) -> str:
    text = (
        "\n### What a launch goes into\n\nNanoseconds of each step alone, in a loop that has the"
        " processor's caches to itself. In a launch the driver's code has just used them, so the"
        " rest, with packing and comparing, is larger than it would be alone.\n"
    )
    for way, words in WAYS.items():
        steps, above = cost["steps_ns"][way], _above_the_loop(cost, words)
        rows = [[step, f"{spent:.0f}"] for step, spent in steps.items()]
        rows += [
            ["the rest: packing, comparing, cold caches", f"{above - sum(steps.values()):.0f}"],
            ["**all, above the C loop**", f"**{above:.0f}**"],
            ["C loop around cuLaunchKernel", f"{median(cost['samples_us'][LIMIT]) * 1e3:.0f}"],
        ]
        text += f"\n{words}:\n\n" + table(["step", "ns"], rows)
    before = ", ".join(
        f"{step}: {spent:.0f} ns" for step, spent in cost["steps_ns"]["before"].items()
    )
    return text + f"\nBeside it, {before}.\n"


def _above_the_loop(cost: dict[str, Any], words: str) -> float:
    samples = cost["samples_us"]
    return median(differences(samples[words], samples[LIMIT])) * 1e3


def _in_words(head: str, spent: dict[str, float]) -> str:
    return f". {head}: " + ", ".join(f"{name} {figure:.0f}" for name, figure in spent.items()) + "."


def _shown(figure: float | None) -> str:
    return "" if figure is None else f"{figure:.1f}"
