# SPDX-License-Identifier: Apache-2.0
"""What the simulator's results say: tables, the plot (lines over logarithmic axes, as an SVG
picture), at how many ranks which limit of one server is met (one division each, from what a
measured rank needs), and the document that they stand in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from tools.cluster.ranks import PHASES
from tools.shared.measurement import shown, table
from tools.shared.processes import ROOT

WIDTH, HEIGHT, _MARGIN, _HEAD = 330, 300, 52, 40
_COLORS = ("#1f5fa8", "#c2571a", "#3a7d34", "#7a4a9c")
_HEADER = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="{w}" height="{h}" viewBox="0 0 {w} {h}"'
    ' font-family="sans-serif" font-size="11">\n<rect width="{w}" height="{h}" fill="white"/>\n'
)
PAGE = ROOT / "docs" / "scaling.md"
MANY = 10_000
# "In time" for a herd: a job of this size takes longer to start its processes.
HERD_S = 10.0
LINK_BYTES_PER_S = 1.25e9  # 10 GbE
POLLING_CORES = 0.5
#: How ranks restore, in the order of the figures of a `Limit`.
WAYS = ("plain", "`readonly=1`", "and near directory")
MB = 1e6
SHOWN = {"cold": "cold", "warm": "warm", "reading": "warm, `readonly=1`"}
Row = dict[str, Any]
# What a column of a table has, of a point and of what is told of it.
Column = Callable[[Row, Row], Any]
Columns = dict[str, Column]


@dataclass(frozen=True)
class Line:
    """A name and points, with x and y above zero where axes are logarithmic; `dashed` for one that
    was not measured.
    """

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """A diagram: its title, what the axis below it counts, and its lines; `linear` for axes that
    begin at 0, and lines without a mark at each point.
    """

    title: str
    below: str
    lines: Sequence[Line]
    linear: bool = False


def draw(panels: Sequence[Panel]) -> str:
    """Return a picture of panels side by side."""
    parts = [_HEADER.format(w=WIDTH * len(panels), h=HEIGHT)]
    for number, panel in enumerate(panels):
        parts += [f'<g transform="translate({WIDTH * number},0)">', *_panel(panel), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(panel: Panel) -> list[str]:
    points = [point for line in panel.lines for point in line.points]
    axis = _LinearAxis if panel.linear else _Axis
    across = axis([x for x, _ in points], _MARGIN, WIDTH - 24)
    up = axis([y for _, y in points], HEIGHT - _MARGIN, _HEAD + 16 * len(panel.lines))
    parts = [
        _text(_MARGIN, 18, panel.title, "start", "bold"),
        _text((_MARGIN + WIDTH) / 2, HEIGHT - 12, panel.below),
    ]
    for value in across.decades:
        x = across.place(value)
        parts += [_stroke(x, up.first, x, up.last, "#ddd"), _text(x, up.first + 16, f"{value:,g}")]
    for value in up.decades:
        y = up.place(value)
        parts += [
            _stroke(across.first, y, across.last, y, "#ddd"),
            _text(_MARGIN - 6, y + 4, f"{value:,g}", "end"),
        ]
    for number, line in enumerate(panel.lines):
        color = _COLORS[number % len(_COLORS)]
        dash = ' stroke-dasharray="5 4"' if line.dashed else ""
        places = [(across.place(x), up.place(y)) for x, y in sorted(line.points)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"{dash}/>'
        )
        if not line.dashed and not panel.linear:
            parts += [
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in places
            ]
        y = _HEAD - 4 + 15 * number
        parts += [
            _stroke(_MARGIN, y, _MARGIN + 18, y, color, dash),
            _text(_MARGIN + 24, y + 4, line.name, "start"),
        ]
    return parts


class _Axis:
    """Maps values to places, by whole decades."""

    def __init__(self, values: Sequence[float], first: float, last: float) -> None:
        self.first, self.last = first, last
        self._low = math.floor(math.log10(min(values)))
        self._high = max(math.ceil(math.log10(max(values))), self._low + 1)
        self.decades = [10.0**power for power in range(self._low, self._high + 1)]

    def place(self, value: float) -> float:
        share = (math.log10(value) - self._low) / (self._high - self._low)
        return self.first + share * (self.last - self.first)


class _LinearAxis(_Axis):
    """Maps values to places, evenly from 0 on."""

    def __init__(self, values: Sequence[float], first: float, last: float) -> None:
        self.first, self.last = first, last
        high = max(*values, 1e-9)
        step = 10.0 ** math.floor(math.log10(high))
        step /= 1 if high > 3 * step else 2 if high > 1.5 * step else 5
        self.decades = [step * count for count in range(math.ceil(high / step) + 1)]

    def place(self, value: float) -> float:
        return self.first + value / self.decades[-1] * (self.last - self.first)


def _stroke(x1: float, y1: float, x2: float, y2: float, color: str, more: str = "") -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}"{more}/>'


def _text(x: float, y: float, text: str, anchor: str = "middle", weight: str = "normal") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
        f' font-weight="{weight}">{escape(text)}</text>'
    )


def tables(result: Row) -> str:
    """Return everything measured as tables."""
    return "\n".join(f"### {title}\n\n{BLOCKS[name](result)}" for name, title in TITLES.items())


def filled(text: str, result: Row) -> str:
    """Return the document with its marked parts made from the result.

    Raises:
        ValueError: a mark is missing.
    """
    for name, make in BLOCKS.items():
        begin = f"<!-- {name}: python -m tools.cluster simulation --document -->\n"
        end = f"<!-- end of {name} -->\n"
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
    by_kernels, by_ranks = _most_common(growth, "kernels"), _most_common(growth, "ranks")
    warm = "seconds until all are warm"
    allowed = [needs_of(one).allowed_s(result["defaults"]) for one in writing]
    longest = [
        Line("restored by tag", [(one["ranks"], one["waits_s"]["max"]) for one in writing]),
        Line("with readonly=1", [(one["ranks"], one["waits_s"]["max"]) for one in reading]),
        Line(
            "default time-out",
            [(one["ranks"], most) for one, most in zip(writing, allowed, strict=True)],
            dashed=True,
        ),
    ]
    wait = f"longest wait in s, {writing[0]['kernels']} kernels, at once"
    return draw(
        [
            _grown("ranks", f"{warm}, {by_kernels[0]['kernels']} kernels", by_kernels),
            _grown("kernels", f"{warm}, {by_ranks[0]['ranks']} ranks", by_ranks),
            Panel(wait, "ranks", longest),
        ]
    )


def _most_common(points: Sequence[Row], field: str) -> list[Row]:
    """Return the points with the value of a field that most of them have."""
    values = [point[field] for point in points]
    return [point for point in points if point[field] == max(values, key=values.count)]


def _grown(field: str, title: str, points: Sequence[Row]) -> Panel:
    names = {"cold": "cold: everything is compiled", "warm": "warm: restored by tag"}
    lines = [
        Line(name, [(point[field], point[phase]["seconds"]) for point in points])
        for phase, name in names.items()
    ]
    return Panel(title, field, lines)


def _name(point: Row) -> str:
    return "real compiles" if point["real"] else point["name"]


def _columns(columns: Columns, rows: Iterable[tuple[Row, Any]]) -> str:
    """Return the table of points, each with what is told of it."""
    return table([*columns], [[value(*row) for value in columns.values()] for row in rows])


def _wait(name: str) -> Column:
    return lambda _, found: _short(found["waits_s"][name])


def _of_a_rank(name: str, factor: float = 1.0) -> Column:
    return lambda one, found: _short(found[name] / one["ranks"] * factor)


def _in_phases(result: Row, phases: Sequence[str]) -> Iterator[tuple[Row, Row]]:
    for one in result["points"]:
        for phase in phases:
            if phase in one:
                yield one, {"phase": phase, **one[phase]}


_COUNTS: Columns = {"ranks": lambda one, _: one["ranks"], "kernels": lambda one, _: one["kernels"]}
_WAITS: Columns = {name: _wait(name) for name in ("p90", "p99", "max")}
_COLD: Columns = {
    "": lambda one, _: _name(one),
    **_COUNTS,
    "compiles": lambda _, found: found["compiles"],
    "of these again": lambda _, found: found["duplicates"],
    "leases expired": lambda _, found: found["expired"],
    "all have all after, s": lambda _, found: _short(found["seconds"]),
    "wait p50, s": _wait("p50"),
    **_WAITS,
}
_WARM: Columns = {
    "": lambda one, found: f"{_name(one)}{', `readonly=1`' * (found['phase'] == 'reading')}",
    **_COUNTS,
    "all warm after, s": lambda _, found: _short(found["seconds"]),
    "restore p50, s": _wait("p50"),
    **_WAITS,
}
_COSTS: Columns = {
    "": lambda one, found: f"{_name(one)}, {SHOWN[found['phase']]}",
    **_COUNTS,
    "round trips a rank": _of_a_rank("round_trips"),
    "commands": _of_a_rank("commands"),
    "kB sent": _of_a_rank("received_bytes", 1e-3),
    "kB received": _of_a_rank("sent_bytes", 1e-3),
    "connections": _of_a_rank("connections"),
    "server CPU, ms": _of_a_rank("cpu_s", 1e3),
}
_HERDS: Columns = {
    **_COUNTS,
    "": lambda one, _: _settings(one),
    "all answered after, s": lambda one, _: _short(one["seconds"]),
    "longest wait of a rank: p50, s": _wait("p50"),
    "p99": _wait("p99"),
    "max": _wait("max"),
    "never answered": lambda one, _: one["failed"],
    "connects dropped": lambda one, _: f"{one['dropped']:,}",
    "server CPU of a rank, ms": _of_a_rank("cpu_s", 1e3),
    "of it marking as used": lambda one, _: f"{_share(one, 'evalsha'):.0%}",
    "memory of answers at most, MB": lambda one, _: _short(one["peak_bytes"] / MB),
    "evicted": lambda one, _: one["evicted"],
}


def _settings(one: Row) -> str:
    said = ["`readonly=1`"] if one["read_only"] else []
    return ", ".join(said + ([f"`tcp-backlog {one['backlog']}`"] if one["backlog"] else []))


@dataclass(frozen=True)
class Needs:
    """What one rank that restores by tag needs of the server: CPU, bytes in all and in one answer,
    connections.
    """

    cpu_s: float
    bytes: float
    longest_bytes: float
    connections: float

    def allowed_s(self, defaults: Row) -> float:
        """Return how long its longest answer may take by the default time-out."""
        return float(defaults["timeout_s"] + self.longest_bytes / defaults["bytes_per_s"])


@dataclass(frozen=True)
class Limit:
    """A limit of one server.

    Attributes:
        what: what ends.
        rule: the formula, with the figures of a plain rank.
        ranks: at how many ranks it is met, for each of `WAYS`.
        at_many: what `MANY` ranks need, for each of `WAYS`.
        answer: the settings.
    """

    what: str
    rule: str
    ranks: tuple[float, ...]
    at_many: tuple[str, ...]
    answer: str


def needs_of(herd: Row) -> Needs:
    """Return what a rank of a herd needed."""
    ranks = herd["ranks"]
    return Needs(
        herd["cpu_s"] / ranks,
        herd["sent_bytes"] / ranks,
        herd["longest_answer_bytes"],
        herd["connections"] / ranks,
    )


def all_limits(result: Row) -> list[Limit]:
    """Return the limits, the first to be met by plain ranks first."""
    return sorted(
        [*_restoring(_ways(result), result["defaults"]), _polling(result)],
        key=lambda limit: limit.ranks[0],
    )


def _ways(result: Row) -> list[Needs]:
    """Return the needs of a rank, for each of `WAYS`."""
    plain, reading = (
        needs_of(next(one for one in reversed(result["herds"]) if one["read_only"] == only))
        for only in (False, True)
    )
    hosts = next(point for point in result["points"] if "reading" in point)
    found, ranks = hosts["reading"], hosts["ranks"]
    near = Needs(
        found["cpu_s"] / ranks,
        found["sent_bytes"] / ranks,
        reading.longest_bytes,
        found["connections"] / ranks,
    )
    return [plain, reading, near]


def _restoring(ways: list[Needs], defaults: Row) -> list[Limit]:
    plain, memory, clients = ways[0], defaults["maxmemory_bytes"], defaults["maxclients"]

    def limit(
        what: str,
        rule: str,
        at: Callable[[Needs], float],
        many: Callable[[Needs], str],
        answer: str,
    ) -> Limit:
        return Limit(what, rule, tuple(map(at, ways)), tuple(map(many, ways)), answer)

    return [
        limit(
            "the default time-out, when all ask in one moment",
            f"allowance / server time of a rank = {plain.allowed_s(defaults):.2f} s /"
            f" {plain.cpu_s * 1e3:.2f} ms",
            lambda rank: rank.allowed_s(defaults) / rank.cpu_s,
            lambda rank: f"{shown(MANY * rank.cpu_s, 's')}",
            "`timeout_s`, `readonly=1`, shards",
        ),
        limit(
            "queue of new connections",
            f"`tcp-backlog` = {defaults['tcp_backlog']}, if none is accepted meanwhile",
            lambda _: defaults["tcp_backlog"],
            lambda rank: f"{MANY * rank.connections:,.0f}",
            "`tcp-backlog`, `net.core.somaxconn`, `connect_timeout_s`",
        ),
        limit(
            f"server CPU, all warm in {HERD_S:.0f} s",
            f"{HERD_S:.0f} s / server time of a rank = {HERD_S:.0f} s / {plain.cpu_s * 1e3:.2f} ms",
            lambda rank: HERD_S / rank.cpu_s,
            lambda rank: f"{shown(MANY * rank.cpu_s / HERD_S, 'cores')}",
            "`readonly=1`, shards, `io-threads`",
        ),
        limit(
            "connections",
            f"`maxclients` / connections of a rank = {clients:,} / {plain.connections:.0f}",
            lambda rank: clients / rank.connections,
            lambda rank: f"{MANY * rank.connections:,.0f}",
            "`maxclients`, open files of the server",
        ),
        limit(
            "memory, if all answers are made before any is read",
            f"`maxmemory` / answers to a rank = {memory / MB:,.0f} MB / {plain.bytes / MB:.3f} MB",
            lambda rank: memory / rank.bytes,
            lambda rank: shown(MANY * rank.bytes / MB, "MB"),
            "`maxmemory`, a near directory, shards",
        ),
        limit(
            f"bandwidth of 10 GbE, all warm in {HERD_S:.0f} s",
            f"{HERD_S:.0f} s x 1.25 GB/s / {plain.bytes / MB:.3f} MB",
            lambda rank: HERD_S * LINK_BYTES_PER_S / rank.bytes,
            lambda rank: shown(MANY * rank.bytes / HERD_S / LINK_BYTES_PER_S, "links"),
            "a near directory, shards",
        ),
    ]


def _polling(result: Row) -> Limit:
    """Return the limit of those who wait for a compile, which is the same for all who may
    compile.
    """
    waiting = next(point for point in result["points"] if point["name"] == "waiting")
    waited_s = waiting["ranks"] * waiting["cold"]["seconds"]
    polls, cpu_s = waiting["cold"]["calls"]["set"] / waited_s, waiting["cold"]["cpu_s"] / waited_s
    return Limit(
        f"polling for a lease, {POLLING_CORES:g} of a core",
        f"{POLLING_CORES:g} / {cpu_s * 1e6:.0f} us for each second that a rank waits ({polls:.1f}"
        " polls)",
        (POLLING_CORES / cpu_s,),
        (shown(MANY * cpu_s, "cores"),),
        "building ahead of time, shards",
    )


def limit_table(result: Row) -> str:
    """Where one server ends."""
    ways = " / ".join(WAYS)
    head = ["limit", "formula, for a plain rank", f"met at ranks: {ways}"]
    rows = [
        [
            one.what,
            one.rule,
            " / ".join(map(_about, one.ranks)),
            " / ".join(one.at_many),
            one.answer,
        ]
        for one in all_limits(result)
    ]
    return table([*head, f"{MANY:,} ranks need: {ways}", "answered by"], rows)


def _about(ranks: float) -> str:
    digits = 2 if ranks >= 1000 else 1 if ranks >= 100 else 0
    return f"{round(ranks, -digits):,.0f}"


def machine(result: Row) -> str:
    """Where it was measured."""
    found, versions = result["machine"], result["versions"]
    return (
        f"Measured on {found['processor']}, {found['cores']} cores (load {found['load'][0]} at the"
        f" end), with Redis {result['defaults']['redis']}, Python {versions['python']} and Triton"
        f" {versions.get('triton', 'none')}, in {result['seconds'] / 60:.0f} minutes, ranks as"
        f" threads of {result['points'][0]['processes']} processes; commit"
        f" {(result['commit'] or 'unknown')[:12]}; every figure is in"
        " [cluster-sim.json](results/cluster-sim.json).\n"
    )


def _share(one: Row, command: str) -> float:
    """Return which part of the time of all commands one took; commands inside scripts are in the
    time of those.
    """
    inner = {"getrange", "pexpire"} if "evalsha" in one["busy_s"] else set()
    total = sum(busy for name, busy in one["busy_s"].items() if name not in inner)
    return float(one["busy_s"].get(command, 0.0) / total) if total else 0.0


def _short(figure: float) -> str:
    """Return a figure to three digits."""
    if figure >= 100 or figure == int(figure):
        return f"{figure:,.0f}"
    return f"{figure:.3g}" if figure >= 0.001 else "0.001"


BLOCKS: dict[str, Callable[[Row], str]] = {
    "machine": machine,
    "cold": lambda result: _columns(_COLD, _in_phases(result, PHASES[:1])),
    "warm": lambda result: _columns(_WARM, _in_phases(result, PHASES[1:])),
    "costs": lambda result: _columns(_COSTS, _in_phases(result, PHASES)),
    "herds": lambda result: _columns(_HERDS, ((one, one) for one in result["herds"])),
    "limits": limit_table,
}
TITLES = {"cold": "Cold", "warm": "Warm", "costs": "What a rank costs"}
TITLES |= {"herds": "In one moment", "limits": "Limits"}
