# SPDX-License-Identifier: Apache-2.0
"""`Cluster`: exchanges with a Redis Cluster: which server has which key, and what to do when keys
move.

Keys are 16,384 slots, and slots belong to masters.  Commands go to all masters at once; a command
carries keys of one slot. Replicas are never asked: what was just written must be found.

`RedisBackend` uses it for `redis+cluster://` URLs, and `Single` of `server_exchange.py` for the
others.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from redis.crc import key_slot
from redis.exceptions import AskError, ClusterDownError, MovedError, TryAgainError

from bundler.backends.backend_errors import BackendError, BackendUnavailable
from bundler.backends.batches import batches
from bundler.backends.redis.lua_scripts import SCRIPT_KEYS
from bundler.backends.redis.reply_errors import errors_by_meaning
from bundler.backends.redis.server_connections import REPLY_BYTES
from bundler.backends.redis.server_exchange import Command, Link, Node, ask, run, scan_node, time_of
from bundler.backends.redis.url_settings import RedisSettings

SLOTS = 16384
# A key that moves on more often than this within one call is not found by following it.
REDIRECTS = 5
PAUSE_S = 0.02
MOST_PORT = 65536
_HOST = re.compile(r"[A-Za-z0-9_.:%-]{1,255}")


@dataclass(frozen=True)
class _Plan:
    """Which master has each slot; replaced whole, never changed."""

    masters: tuple[Node, ...]
    slots: tuple[Node | None, ...]


# The node that a command goes to, and whether it is sent there for this one time, while the slot
# moves (ASKING).
_Destination: TypeAlias = tuple[Node, bool]


class Cluster(Link):
    """A link to a cluster, found through any of its nodes."""

    def __init__(self, settings: RedisSettings) -> None:
        super().__init__(settings)
        self._seeds = [Node(settings, address) for address in settings.hosts]
        self._known: dict[tuple[str, int], Node] = {}
        self._plan: _Plan | None = None

    def groups(self, names: Iterable[str], size: int = SCRIPT_KEYS) -> list[list[str]]:
        """See `Link`; keys of one group are in one slot."""
        by_slot: dict[int, list[str]] = {}
        for name in names:
            by_slot.setdefault(key_slot(name.encode()), []).append(name)
        return [batch for found in by_slot.values() for batch in batches(found, size)]

    def replies(self, commands: Sequence[Command], most_bytes: int = REPLY_BYTES) -> list[Any]:
        """See `Link`."""
        answers: dict[int, Any] = {}
        waiting: dict[int, _Destination | None] = dict.fromkeys(range(len(commands)))
        # Only commands that were redirected go again; each answer to the others is final.
        for attempt in range(REDIRECTS + 1):
            if not waiting:
                break
            wanted = [
                (told or (self._node_of(commands[number][0]), False), commands[number][1])
                for number, told in waiting.items()
            ]
            found = dict(zip(waiting, self._asked(wanted, most_bytes), strict=True))
            answers |= found
            waiting = self._redirected(found, attempt)
        return [answers[number] for number in range(len(commands))]

    def scan(self, pattern: str) -> Iterator[list[str]]:
        """See `Link`; a key that moves from one master to another meanwhile may be missed or come
        twice.
        """
        for master in self._current().masters:
            yield from scan_node(master, pattern, self.shown)

    def now_s(self) -> float:
        """See `Link`."""
        return time_of(self._current().masters[0], self.shown)

    def close(self) -> None:
        """See `Link`."""
        for node in (*self._seeds, *self._known.values()):
            node.close()

    def _asked(
        self, wanted: list[tuple[_Destination, tuple[Any, ...]]], most_bytes: int
    ) -> list[Any]:
        """Send each command to its node; returns the answers in order."""
        work: dict[Node, list[tuple[Any, ...]]] = {}
        places: list[tuple[Node, int]] = []
        for (node, asking), words in wanted:
            commands = work.setdefault(node, [])
            if asking:
                commands.append(("ASKING",))
            places.append((node, len(commands)))
            commands.append(words)
        try:
            with errors_by_meaning(self.shown):
                found = dict(zip(work, run(list(work.items()), most_bytes), strict=True))
        except BackendError:
            self._plan = None  # a master may have failed, and another taken its place
            raise
        return [found[node][place] for node, place in places]

    def _redirected(self, answers: dict[int, Any], attempt: int) -> dict[int, _Destination | None]:
        """Return which commands are to be sent again, and where to if a server said so."""
        again: dict[int, _Destination | None] = {}
        pause_s = 0.0
        for number, answer in answers.items():
            if isinstance(answer, AskError):
                # Follow the answer, not a newly learnt plan: the node that gives the plan may not
                # know of the move yet.
                moved = isinstance(answer, MovedError)
                again[number] = (self._node((answer.host, answer.port)), not moved)
                self._plan = None if moved else self._plan
            elif isinstance(answer, TryAgainError | ClusterDownError):
                self._plan, again[number] = None, None
                pause_s = PAUSE_S * (attempt + 1)
        time.sleep(pause_s)
        return again

    def _node_of(self, name: str) -> Node:
        node = self._current().slots[key_slot(name.encode())]
        if node is None:
            self._plan = None
            raise BackendUnavailable(
                f"{self.shown}: no master has the slot of {name}; the cluster is not complete"
            )
        return node

    def _current(self) -> _Plan:
        plan = self._plan
        if plan is None:
            self._plan = plan = self._learn()
        return plan

    def _learn(self) -> _Plan:
        """Ask the nodes, one after the other, until one knows a master for each slot; one that has
        just come may know of a part.
        """
        failure: BackendError | None = None
        partial: _Plan | None = None
        for node in (*self._known.values(), *self._seeds):
            try:
                plan = self._planned(ask(node, self.shown, "CLUSTER", "SLOTS"), node)
            except BackendError as error:
                failure = error
                continue
            if None not in plan.slots:
                return self._followed(plan)
            partial = partial or plan
        if partial is None:
            raise failure or BackendUnavailable(f"{self.shown}: no node to ask")
        return self._followed(partial)

    def _followed(self, plan: _Plan) -> _Plan:
        # A failover leaves connections to a server that is a master no longer.
        for address, node in list(self._known.items()):
            if node not in plan.masters:
                self._known.pop(address).close()
        return plan

    def _planned(self, ranges: list[Any], asked: Node) -> _Plan:
        slots: list[Node | None] = [None] * SLOTS
        masters: dict[tuple[str, int], Node] = {}
        for first, last, (host, port, *_), *_ in ranges:
            # A node that does not know its own name leaves it out: its address is the one that we
            # asked.
            name = host.decode("utf-8", "replace") if host else (asked.address or ("", 0))[0]
            address = (name, int(port))
            masters[address] = self._node(address)
            slots[first : last + 1] = [masters[address]] * (last + 1 - first)
        if not masters:
            raise BackendUnavailable(
                f"{self.shown}: no master has any slot; the cluster is not complete"
            )
        return _Plan(tuple(masters.values()), tuple(slots))

    def _node(self, address: tuple[str, int]) -> Node:
        host, port = address
        if not 0 < port < MOST_PORT or not _HOST.fullmatch(host):
            raise BackendUnavailable(f"{self.shown}: {host!r:.80}:{port} is no address of a node")
        return self._known.setdefault(address, Node(self.settings, address))
