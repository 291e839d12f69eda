# SPDX-License-Identifier: Apache-2.0
"""`Link` and `Cluster`: exchanges with one Redis server, or with those of a Redis Cluster; their
connections and time limits.

Of redis-py this uses connections (TLS, login, parsing, packing) and no more.  Its clients retry,
wait and redirect by rules of their own; here a call is one exchange, sent once, within one
allowance of time.

The keys of a cluster are 16,384 slots, and slots belong to masters.  Commands go to all masters at
once; a command carries keys of one slot.  Replicas are never asked: what was just written must be
found.

`RedisBackend` uses the `Link` that `opened` returns.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from redis.crc import key_slot
from redis.exceptions import (
    AskError,
    ClusterDownError,
    MovedError,
    NoScriptError,
    RedisError,
    ResponseError,
    TryAgainError,
)

from bundler.backends.backend_errors import BackendError, BackendUnavailable
from bundler.backends.batches import batches
from bundler.backends.redis.replies import (
    SLOTS,
    OverlongReply,
    Word,
    check_answer,
    errors_by_meaning,
    is_wrong_type,
    meaning,
)
from bundler.backends.redis.server_connections import (
    REPLY_BYTES,
    Connected,
    answer_of,
    opened_connection,
    packed,
)
from bundler.backends.redis.url_settings import RedisSettings
from bundler.backends.redis.value_parts import NAME_BYTES, SCAN_SHORT, SCRIPT_KEYS, Script

# What the protocol adds to a value.
FRAMING_BYTES = 64
# A connection unused for longer may be dead unnoticed: a new one costs less than a wait for an
# answer that never comes.
IDLE_S = 30.0
KEPT_CONNECTIONS = 8
SCAN_COUNT = 2000
# A server of ten million keys lists them in some ten seconds; one whose listing takes longer never
# ends it.
LISTING_S = 60.0
LISTED_NAMES = 10_000_000
_HARMLESS = {"EXISTS", "GETRANGE", "PEXPIRE", "STRLEN"}

#: The key by which a command finds its server, and its words.
Command: TypeAlias = tuple[str, tuple[Word, ...]]


class Node:
    """Connections to one server, as many as threads use at once; a forked child makes its own.

    There is no lock, which another thread could hold at the moment of a fork: single operations of
    a deque are atomic.
    """

    def __init__(self, settings: RedisSettings, address: tuple[str, int] | None) -> None:
        self.address, self._settings = address, settings
        self._idle: deque[tuple[Connected, float]] = deque()
        self._pid, self._closed = os.getpid(), False

    def take(self, *, logs_in_later: bool = False) -> Connected:
        """Return a connection that answers nothing but what is asked on it; a new one may have a
        `login` left to send.
        """
        if self._pid != os.getpid():
            self._idle, self._pid = deque(), os.getpid()
        while self._idle:
            try:
                connection, since_s = self._idle.pop()
            except IndexError:
                break  # another thread was quicker
            if time.monotonic() - since_s < IDLE_S and _is_quiet(connection):
                return connection
            connection.disconnect()
        connection = opened_connection(self._settings, self.address, logs_in_later=logs_in_later)
        connection.connect()
        return connection

    def give(self, connection: Connected) -> None:
        """Keep a connection on which everything asked was answered."""
        if self._closed or len(self._idle) >= KEPT_CONNECTIONS or connection.pid != os.getpid():
            connection.disconnect()
        else:
            self._idle.append((connection, time.monotonic()))
            if self._closed:  # by another thread, since we looked
                self.close()

    def close(self) -> None:
        """Close what is kept; from now on nothing is."""
        self._closed = True
        while self._idle:
            with contextlib.suppress(IndexError):
                self._idle.pop()[0].disconnect()


def _is_quiet(connection: Connected) -> bool:
    # Whatever can be read from an idle connection is its end, or an answer that nobody waits for
    # any more.
    connection.begin()
    try:
        return not connection.can_read()
    except (RedisError, OSError):
        return False


def run(
    work: Sequence[tuple[Node, Sequence[tuple[Word, ...]]]], most_bytes: int = REPLY_BYTES
) -> list[list[Any]]:
    """Send each node its commands, then read all answers; errors that a server answers are among
    them.

    Raises `OverlongReply` as soon as a node has sent more than `most_bytes`, and `WrongAnswer` for
    what is no answer to its command. After any other failure, or when we are interrupted,
    connections are dropped: an answer that comes late must never be taken for the answer to
    something else.
    """
    taken: list[Connected] = []
    try:
        for node, commands in work:
            taken.append(node.take(logs_in_later=_change_nothing(commands)))
            _send(taken[-1], [*taken[-1].login, *commands])
        answers = [
            _answers(connection, commands, most_bytes)
            for connection, (_, commands) in zip(taken, work, strict=True)
        ]
    except BaseException:
        for connection in taken:
            connection.disconnect()
        raise
    for (node, _), connection in zip(work, taken, strict=True):
        node.give(connection)
    return answers


def _change_nothing(commands: Sequence[tuple[Word, ...]]) -> bool:
    """Tell whether commands may be sent before it is known who we are to the server: to whomever it
    takes us for, they do no harm.
    """
    return {words[0] for words in commands} <= _HARMLESS


def _send(connection: Connected, commands: Sequence[tuple[Word, ...]]) -> None:
    connection.begin()
    connection.send_packed_command(packed(commands), check_health=False)


def _answers(
    connection: Connected, commands: Sequence[tuple[Word, ...]], most_bytes: int
) -> list[Any]:
    connection.begin(most_bytes)
    if not connection.is_known():
        connection.log_in()
        _send(connection, commands)
        connection.begin(most_bytes)
    answers = [answer_of(connection) for _ in commands]
    for words, answer in zip(commands, answers, strict=True):
        check_answer(words, answer)
    return answers


def _is_unknown(answer: Any) -> bool:
    return isinstance(answer, ResponseError) and "unknown command" in str(answer).lower()


class Link:
    """How a backend speaks to its server; `Cluster` is one to several."""

    def __init__(self, settings: RedisSettings) -> None:
        self.settings, self.shown = settings, settings.shown
        self._seeds = [Node(settings, address) for address in settings.hosts or (None,)]
        # A user who may only read may run scripts by EVALSHA_RO; servers before 7.0 do not have
        # that command.
        self._reading = "_RO"

    def groups(self, names: Iterable[str]) -> list[list[str]]:
        """Split names so that one command may carry each group."""
        return list(batches(names, SCRIPT_KEYS))

    def replies(self, commands: Sequence[Command], most_bytes: int = REPLY_BYTES) -> list[Any]:
        """Send commands and return the answers in order, errors that a server answered among them;
        see `run`.
        """
        if not commands:
            return []
        with errors_by_meaning(self.shown):
            return run([(self._seeds[0], [words for _, words in commands])], most_bytes)[0]

    def scan(self, pattern: str) -> Iterator[list[str]]:
        """Yield the names of all keys like `pattern`, in pages; one may come twice."""
        return scan_node(self._seeds[0], pattern, self.shown)

    def now_s(self) -> float:
        """Return the time of a server, on a cluster of any."""
        return time_of(self._seeds[0], self.shown)

    def close(self) -> None:
        """Close connections."""
        for node in self._seeds:
            node.close()

    def exchange(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands and return the answers; raises what the first error among them means."""
        return self.checked(self.replies(commands))

    def exchange_strings(
        self, commands: Sequence[Command], most_bytes: int = REPLY_BYTES
    ) -> list[Any]:
        """Do the same; the answer to a command whose key holds a list, a hash or the like
        is None.
        """
        answers = self.replies(commands, most_bytes)
        if not any(isinstance(answer, Exception) for answer in answers):
            return answers
        return self.checked([None if is_wrong_type(answer) else answer for answer in answers])

    def call(self, script: Script, groups: Sequence[Sequence[str]], *arguments: Any) -> list[Any]:
        """Run a script for each group of names; returns its answers in order."""
        calls = [(len(names), *names, *arguments) for names in groups]
        answers = self._run(script, "EVALSHA", script.sha, calls)
        if script.reads and any(_is_unknown(answer) for answer in answers):
            self._reading = ""
            answers = self._run(script, "EVALSHA", script.sha, calls)
        unknown = [
            number for number, answer in enumerate(answers) if isinstance(answer, NoScriptError)
        ]
        # The server was restarted, or has never seen the script.
        again = self._run(script, "EVAL", script.source, [calls[number] for number in unknown])
        for number, answer in zip(unknown, again, strict=True):
            answers[number] = answer
        return self.checked(answers)

    def _run(
        self, script: Script, command: str, what: str, calls: list[tuple[Any, ...]]
    ) -> list[Any]:
        word = command + (self._reading if script.reads else "")
        return self.replies([(call[1], (word, what, *call)) for call in calls])

    def checked(self, answers: list[Any]) -> list[Any]:
        """Return answers of which none is an error; raises what the first one means."""
        for answer in answers:
            if isinstance(answer, Exception):
                raise meaning(answer, self.shown) from answer
        return answers


def ask(node: Node, shown: str, *words: Any) -> Any:
    """Send one command to one server and return its answer; raises what an error means."""
    with errors_by_meaning(shown):
        ((answer,),) = run([(node, [words])])
    return _sound(answer, shown)


def _sound(answer: Any, shown: str) -> Any:
    if isinstance(answer, Exception):
        raise meaning(answer, shown) from answer
    return answer


def time_of(node: Node, shown: str) -> float:
    """Return a server's time, in whole milliseconds as its expiries are."""
    seconds, micros = ask(node, shown, "TIME")
    return int(seconds) + int(micros) // 1000 / 1000


def scan_node(node: Node, pattern: str, shown: str) -> Iterator[list[str]]:
    """Yield the names of the keys of one server, in pages.

    Raises `BackendUnavailable` for a listing without an end: a place that was given before, more
    names than `LISTED_NAMES`, or more than `LISTING_S` seconds in the server.
    """
    cursor: Any = b"0"
    seen: set[bytes] = set()
    asked_s, count = 0.0, 0
    while True:
        started = time.monotonic()
        try:
            cursor, names = ask(node, shown, "SCAN", cursor, "MATCH", pattern, "COUNT", SCAN_COUNT)
        except OverlongReply:
            # Somebody made names of megabytes.  The script leaves them out in the server, which
            # costs the server more than a plain page.
            cursor, names = _scan_short(node, pattern, shown, cursor)
        yield [name.decode("ascii", "replace") for name in names]
        if cursor == b"0":
            return
        asked_s += time.monotonic() - started
        count += len(names)
        if cursor in seen or asked_s > LISTING_S or count > LISTED_NAMES:
            raise BackendUnavailable(
                f"{shown}: its listing has no end: {len(seen) + 1} pages with {count} names in"
                f" {asked_s:.1f} s"
            )
        seen.add(cursor)


def _scan_short(node: Node, pattern: str, shown: str, cursor: Any) -> Any:
    words = (SCAN_SHORT, 0, cursor, pattern, SCAN_COUNT, NAME_BYTES)
    # Servers before 7.0 know only EVAL; since then a user who may only read may use only EVAL_RO.
    with errors_by_meaning(shown):
        ((answer,),) = run([(node, [("EVAL_RO", *words)])])
    return ask(node, shown, "EVAL", *words) if _is_unknown(answer) else _sound(answer, shown)


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
        self._known: dict[tuple[str, int], Node] = {}
        self._plan: _Plan | None = None

    def groups(self, names: Iterable[str]) -> list[list[str]]:
        """See `Link`; keys of one group are in one slot."""
        by_slot: dict[int, list[str]] = {}
        for name in names:
            by_slot.setdefault(key_slot(name.encode()), []).append(name)
        return [batch for found in by_slot.values() for batch in batches(found, SCRIPT_KEYS)]

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
        super().close()
        for node in self._known.values():
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


def opened(settings: RedisSettings) -> Link:
    """Return the link that settings ask for."""
    return Cluster(settings) if settings.cluster else Link(settings)
