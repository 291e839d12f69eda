# SPDX-License-Identifier: Apache-2.0
"""At how many ranks which limit of one server is met: one division each, from what a measured rank
needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tools.shared.measurement import shown

MANY = 10_000
# "In time" for a herd: a job of this size takes longer to start its processes.
HERD_S = 10.0
LINK_BYTES_PER_S = 1.25e9  # 10 GbE
POLLING_CORES = 0.5
MB = 1e6
#: How ranks restore, in the order of the figures of a `Limit`.
WAYS = ("plain", "`readonly=1`", "and near directory")

Row = dict[str, Any]


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


def limits(result: Row) -> list[Limit]:
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
