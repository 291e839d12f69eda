# SPDX-License-Identifier: Apache-2.0
"""What the simulator's results say: tables, the plot, and the document that they stand in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tools.cluster import limits
from tools.cluster.limits import MANY
from tools.cluster.plot import Line, Panel, draw
from tools.cluster.points import PHASES
from tools.shared.processes import ROOT

PAGE = ROOT / "docs" / "scaling.md"
MB = 1e6

SHOWN = {"cold": "cold", "warm": "warm", "reading": "warm, `readonly=1`"}

Row = dict[str, Any]


def tables(result: Row) -> str:
    """Return everything measured as tables."""
    return "\n".join(f"### {title}\n\n{make(result)}" for title, make in TABLES.items())


def filled(text: str, result: Row) -> str:
    """Return the document with its marked parts made from the result.

    Raises:
        ValueError: a mark is missing.
    """
    for name, make in BLOCKS.items():
        begin, end = (
            f"<!-- {name}: python -m tools.cluster simulation --document -->\n",
            f"<!-- end of {name} -->\n",
        )
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise ValueError(f"the document has no lines {begin.strip()!r} and {end.strip()!r}")
        text = f"{before}{begin}\n{make(result).strip()}\n\n{end}{after}"
    return text


def plot(result: Row) -> str:
    """Return the picture."""
    growth = [point for point in result["points"] if "warm" in point and not point["host_ranks"]]
    writing, reading = (
        list({one["ranks"]: one for one in result["herds"] if one["read_only"] == only}.values())
        for only in (False, True)
    )
    defaults = result["defaults"]
    by_kernels = _most_common(growth, "kernels")
    by_ranks = _most_common(growth, "ranks")
    return draw([
        _grown("ranks", f"seconds until all are warm, {by_kernels[0]['kernels']} kernels", by_kernels),
        _grown("kernels", f"seconds until all are warm, {by_ranks[0]['ranks']} ranks", by_ranks),
        Panel(f"longest wait in s, {writing[0]['kernels']} kernels, at once", "ranks", [
            Line("restored by tag", [(one["ranks"], one["waits_s"]["max"]) for one in writing]),
            Line("with readonly=1", [(one["ranks"], one["waits_s"]["max"]) for one in reading]),
            Line("default time-out", [(one["ranks"], limits.needs_of(one).allowed_s(defaults)) for one in writing], dashed=True),
        ]),
    ])  # fmt: skip


def _most_common(points: Sequence[Row], field: str) -> list[Row]:
    """Return the points with the value of a field that most of them have."""
    values = [point[field] for point in points]
    return [point for point in points if point[field] == max(values, key=values.count)]


def _grown(field: str, title: str, points: Sequence[Row]) -> Panel:
    return Panel(title, field, [
        Line("cold: everything is compiled", [(point[field], point["cold"]["seconds"]) for point in points]),
        Line("warm: restored by tag", [(point[field], point["warm"]["seconds"]) for point in points]),
    ])  # fmt: skip


def _name(point: Row) -> str:
    return "real compiles" if point["real"] else point["name"]


def cold(result: Row) -> str:
    """Cold starts: what was compiled and how long all waited."""
    return _table(
        ["", "ranks", "kernels", "compiles", "of these again", "leases expired", "all have all after, s", "wait p50, s", "p90", "p99", "max"],
        [
            [_name(one), one["ranks"], one["kernels"], found["compiles"], found["duplicates"], found["expired"],
             _short(found["seconds"]), *(_short(found["waits_s"][p]) for p in ("p50", "p90", "p99", "max"))]
            for one in result["points"] for found in [one["cold"]]
        ],
    )  # fmt: skip


def warm(result: Row) -> str:
    """Warm starts: how long a restore took."""
    return _table(
        ["", "ranks", "kernels", "all warm after, s", "restore p50, s", "p90", "p99", "max"],
        [
            [f"{_name(one)}{', `readonly=1`' * (phase == 'reading')}", one["ranks"], one["kernels"], _short(found["seconds"]),
             *(_short(found["waits_s"][p]) for p in ("p50", "p90", "p99", "max"))]
            for one in result["points"] for phase in PHASES[1:] if phase in one for found in [one[phase]]
        ],
    )  # fmt: skip


def costs(result: Row) -> str:
    """What a rank costs the server."""
    rows = []
    for one in result["points"]:
        for phase in PHASES:
            if phase in one:
                found, ranks = one[phase], one["ranks"]
                rows.append([
                    f"{_name(one)}, {SHOWN[phase]}", ranks, one["kernels"], _short(found["round_trips"] / ranks),
                    _short(found["commands"] / ranks), _short(found["received_bytes"] / ranks / 1e3),
                    _short(found["sent_bytes"] / ranks / 1e3), _short(found["connections"] / ranks),
                    _short(found["cpu_s"] / ranks * 1e3),
                ])  # fmt: skip
    return _table(
        ["", "ranks", "kernels", "round trips a rank", "commands", "kB sent", "kB received", "connections", "server CPU, ms"], rows
    )  # fmt: skip


def herds(result: Row) -> str:
    """Ranks that restore in one moment."""

    def settings(one: Row) -> str:
        said = [f"`tcp-backlog {one['backlog']}`"] if one["backlog"] else []
        return ", ".join([*(["`readonly=1`"] if one["read_only"] else []), *said])

    return _table(
        ["ranks", "kernels", "", "all answered after, s", "longest wait of a rank: p50, s", "p99", "max", "never answered",
         "connects dropped", "server CPU of a rank, ms", "of it marking as used", "memory of answers at most, MB", "evicted"],
        [
            [one["ranks"], one["kernels"], settings(one), _short(one["seconds"]),
             *(_short(one["waits_s"][p]) for p in ("p50", "p99", "max")), one["failed"], f"{one['dropped']:,}",
             _short(one["cpu_s"] / one["ranks"] * 1e3), f"{_share(one, 'evalsha'):.0%}",
             _short(one["peak_bytes"] / MB), one["evicted"]]
            for one in result["herds"]
        ],
    )  # fmt: skip


def limit_table(result: Row) -> str:
    """Where one server ends."""
    ways = " / ".join(limits.WAYS)
    return _table(
        ["limit", "formula, for a plain rank", f"met at ranks: {ways}", f"{MANY:,} ranks need: {ways}", "answered by"],
        [
            [one.what, one.rule, " / ".join(map(_about, one.ranks)), " / ".join(one.at_many), one.answer]
            for one in limits.limits(result)
        ],
    )  # fmt: skip


def _about(ranks: float) -> str:
    digits = 2 if ranks >= 1000 else 1 if ranks >= 100 else 0
    return f"{round(ranks, -digits):,.0f}"


def machine(result: Row) -> str:
    """Where it was measured."""
    found, versions = result["machine"], result["versions"]
    return (
        f"Measured on {found['processor']}, {found['cores']} cores (load {found['load'][0]} at the end), with Redis "
        f"{result['defaults']['redis']}, Python {versions['python']} and Triton {versions.get('triton', 'none')}, in "
        f"{result['seconds'] / 60:.0f} minutes, ranks as threads of {result['points'][0]['processes']} processes; commit "
        f"{(result['commit'] or 'unknown')[:12]}; every figure is in [cluster-sim.json](results/cluster-sim.json).\n"
    )


def _share(one: Row, command: str) -> float:
    """Return which part of the time of all commands one took; commands inside scripts are in the time of those."""
    inner = {"getrange", "pexpire"} if "evalsha" in one["busy_s"] else set()
    total = sum(busy for name, busy in one["busy_s"].items() if name not in inner)
    return float(one["busy_s"].get(command, 0.0) / total) if total else 0.0


def _short(figure: float) -> str:
    """Return a figure to three digits."""
    if figure >= 100 or figure == int(figure):
        return f"{figure:,.0f}"
    return f"{figure:.3g}" if figure >= 0.001 else "0.001"


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines) + "\n"


TABLES: dict[str, Callable[[Row], str]] = {
    "Cold": cold, "Warm": warm, "What a rank costs": costs, "In one moment": herds, "Limits": limit_table,
}  # fmt: skip
BLOCKS: dict[str, Callable[[Row], str]] = {
    "machine": machine, "cold": cold, "warm": warm, "costs": costs, "herds": herds, "limits": limit_table,
}  # fmt: skip
