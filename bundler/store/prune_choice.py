# SPDX-License-Identifier: Apache-2.0
"""Which objects a prune removes, and why each of the others stays.

`choose` decides by the facts that `Maintenance.prune` collects; it reads and removes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from bundler.backends.port import Stat
from bundler.errors import ConfigError
from bundler.store.store_reports import Held

# For so long nothing is removed: another process may have found an object present, and be about to
# name it in a manifest.
GRACE_S = 24 * 3600.0
TAGS, UNREAD_TAGS, GRACE, AGE, ROOM, USE = (
    "tags",
    "unread tags",
    "grace",
    "older_than",
    "max_bytes",
    "use",
)


@dataclass(frozen=True)
class PruneRequest:
    """What a prune was asked for; see `Store.prune`."""

    max_bytes: int | None = None
    older_than_s: float | None = None
    grace_s: float = GRACE_S

    def __post_init__(self) -> None:
        if not 0 <= self.grace_s < math.inf:
            raise ConfigError(
                f"grace_s={self.grace_s!r}: expected seconds, 0 or more", got=self.grace_s
            )


@dataclass(frozen=True)
class PruneChoice:
    """What a prune is going to remove, oldest first, and by what each of the others is held."""

    removed: tuple[Stat, ...]
    held: tuple[tuple[str, Sequence[Stat]], ...]

    def told(self, gone: Collection[str]) -> tuple[Held, ...]:
        """Return what holds each object that stayed; an object that was to go and is still there
        was used while the prune ran.
        """
        used = [stat for stat in self.removed if stat.key not in gone]
        groups = [*self.held, (USE, used)]
        return tuple(
            Held(by, len(stats), sum(s.size_bytes for s in stats)) for by, stats in groups if stats
        )


def choose(
    reached: Sequence[Stat],
    loose: Sequence[Stat],
    used_s: Mapping[str, float],
    now_s: float,
    request: PruneRequest,
    *,
    blind: bool,
) -> PruneChoice:
    """Return what is to be removed.

    Args:
        reached: objects that tags reach.
        loose: the others, in the order in which they are to be removed.
        used_s: when each of these was used last.
        now_s: the time, on the same clock.
        request: what was asked for.
        blind: a tag cannot be read, so no object is known to be unreached.
    """
    if blind:
        return PruneChoice((), ((TAGS, reached), (UNREAD_TAGS, loose)))
    before_s = now_s - request.grace_s
    young = [stat for stat in loose if used_s[stat.key] > before_s]
    old = [stat for stat in loose if used_s[stat.key] <= before_s]
    least_s = now_s - (request.older_than_s or 0.0)
    aged = (
        len(old)
        if request.older_than_s is None
        else sum(used_s[stat.key] < least_s for stat in old)
    )
    removed: list[Stat] = []
    kept_bytes = sum(stat.size_bytes for stat in (*reached, *loose))
    for stat in old[:aged]:
        if request.max_bytes is not None and kept_bytes <= request.max_bytes:
            break
        removed.append(stat)
        kept_bytes -= stat.size_bytes
    return PruneChoice(
        tuple(removed),
        ((TAGS, reached), (GRACE, young), (AGE, old[aged:]), (ROOM, old[len(removed) : aged])),
    )
