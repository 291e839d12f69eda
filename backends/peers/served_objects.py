# SPDX-License-Identifier: Apache-2.0
"""`ServedObjects`: what a server may hand on of a byte store, read once for all who ask for it at a
time.

`PeerServer` asks it.  Only keys that `ServedKeys` admits are ever looked up.  `ServingTally` is the
only place where a server counts; `PeerServer` and its requests add to it too, `GET /metrics` shows
it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from bundler.backends.backend_errors import BackendError, BackendUnavailable
from bundler.backends.batches import batches
from bundler.backends.peers.object_frames import ANSWER_BYTES
from bundler.backends.port import OBJECT_LIMIT, Backend, Stat, Unread

_PREFIX = "triton_bundler_serve_"
_Labels = tuple[tuple[str, str], ...]
#: What is counted, and what is the case now, each with what it means.
METRICS = {
    "requests_total": ("counter", "Requests that were answered, by route and status."),
    "objects_total": (
        "counter",
        "Objects that were asked for, by result: sent, absent, or damaged in the source.",
    ),
    "sent_bytes_total": ("counter", "Bytes of objects, tags and lists that were sent."),
    "source_reads_total": (
        "counter",
        "Objects that were read from the source; others came from memory, or with another's read.",
    ),
    "source_errors_total": ("counter", "Reads that failed in the source."),
    "connections_total": (
        "counter",
        "Connections, by result: accepted, refused since there were too many, cut for being slow.",
    ),
    "connections": ("gauge", "Connections that are open."),
    "memory_bytes": ("gauge", "Bytes of objects that are kept in memory."),
}


class ServingTally:
    """Counts; safe under threads.

    Args:
        more: gives metrics of others, in the text format of Prometheus, which `text` shows too.
    """

    def __init__(self, more: Callable[[], str] = str) -> None:
        self._lock, self._more = threading.Lock(), more
        self._values: Counter[tuple[str, _Labels]] = Counter()

    def add(self, name: str, number: int = 1, **labels: str) -> None:
        """Count something of `METRICS`; for what is the case now the number may be negative."""
        with self._lock:
            self._values[name, tuple(sorted(labels.items()))] += number

    def total(self, name: str, **labels: str) -> int:
        """Return a number, of all labels that agree with these."""
        with self._lock:
            values = dict(self._values)
        return sum(
            value
            for (of, held), value in values.items()
            if of == name and labels.items() <= dict(held).items()
        )

    def text(self) -> str:
        """Return all numbers in the text format of Prometheus."""
        with self._lock:
            values = sorted(self._values.items())
        lines = []
        for name, (kind, meaning) in METRICS.items():
            lines += [f"# HELP {_PREFIX}{name} {meaning}", f"# TYPE {_PREFIX}{name} {kind}"]
            found = [(labels, value) for (of, labels), value in values if of == name]
            for labels, value in found or [((), 0)]:
                held = ",".join(f'{label}="{text}"' for label, text in labels)
                lines.append(f"{_PREFIX}{name}{f'{{{held}}}' if held else ''} {value}")
        return "\n".join([*lines, ""]) + self._more()


# What one read of the source may bring, together, or one object.
_READ_BYTES = 16 * 1024 * 1024
_READ_KEYS = 64
# So large may each be at least, whatever the first who asks for it takes: others wait for the same
# read.
_LEAST_MOST = _READ_BYTES // _READ_KEYS


@dataclass(frozen=True)
class ServedKeys:
    """Which keys of a byte store are for everybody, which a byte store does not know by itself.

    Attributes:
        is_object, is_ref: whether a key may be read, as an object or as a ref.
        prefixes: what a listing is restricted to: one of these, or what begins with one and a `/`.
        ref_prefix: the one of these that refs are under.
        is_sound: whether bytes are those that were stored under a key; others are not handed on.
    """

    is_object: Callable[[str], bool]
    is_ref: Callable[[str], bool]
    prefixes: Collection[str]
    ref_prefix: str
    is_sound: Callable[[str, bytes], bool]

    def may_list(self, prefix: str) -> bool:
        """Whether the keys with this prefix are for everybody."""
        return any(prefix == p or prefix.startswith(f"{p}/") for p in self.prefixes)


@dataclass(frozen=True)
class ServingBounds:
    """How much a server does at once, and how long it waits.

    Attributes:
        connections: open ones; more are refused with 503.
        reads: requests that read from the source at once; others wait for their turn.
        idle_s: how long a connection may ask for nothing.
        request_s: from the first byte of a request to the last of its answer, without the time of
            the answer's bytes.
        memory_bytes: how much is kept of what was read last.
    """

    connections: int = 256
    reads: int = 8
    idle_s: float = 30.0
    request_s: float = 10.0
    memory_bytes: int = 128 * 1024 * 1024


class ServedObjects:
    """A byte store, as others may read it.  Safe under threads.

    Guarantees: of those who ask for an object at one time one reads it from the source; no more
    than `bounds.reads` read there together; no damaged object is handed on.

    Args:
        source: the byte store; it stays open.
        keys: what of it is for everybody.
        tally: counts.
        bounds: how much is done at once, and kept.
    """

    def __init__(
        self,
        source: Backend,
        keys: ServedKeys,
        tally: ServingTally,
        bounds: ServingBounds,
    ) -> None:
        self.keys, self.tally, self.bounds, self._source = keys, tally, bounds, source
        self._turns = threading.BoundedSemaphore(bounds.reads)
        self._lock = threading.Lock()
        # Reads that others may wait for.
        self._under_way: dict[str, Future[dict[str, bytes]]] = {}
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._most_bytes, self._kept_bytes = bounds.memory_bytes, 0

    def get(
        self, max_bytes: Mapping[str, int], until_s: float
    ) -> Iterator[tuple[str, bytes | None]]:
        """Yield objects with their keys, None for what is not there, as many as an answer holds;
        what is left out is for the next answer.

        Raises:
            BackendError: the source failed, or had no time before `until_s`, a time of
                `time.monotonic`.
        """
        wanted = {
            key: min(max(most, _LEAST_MOST), OBJECT_LIMIT)
            for key, most in max_bytes.items()
            if self.keys.is_object(key)
        }
        for key in max_bytes.keys() - wanted.keys():
            yield key, None
        size = 0
        for batch in batches(wanted.items(), _READ_KEYS, _READ_BYTES, lambda item: item[1]):
            if size >= ANSWER_BYTES:
                return
            found = self._shared(dict(batch), until_s)
            for key, _ in batch:
                value = found.get(key)
                size += len(value or b"")
                yield key, value

    def _shared(self, wanted: dict[str, int], until_s: float) -> dict[str, bytes]:
        """Return what is kept, what others are reading, and what is read here."""
        mine: Future[dict[str, bytes]] = Future()
        with self._lock:
            found = {key: self._kept[key] for key in wanted if key in self._kept}
            for key in found:
                self._kept.move_to_end(key)
            waits = {
                key: self._under_way[key]
                for key in wanted
                if key in self._under_way and key not in found
            }
            reading = [key for key in wanted if key not in found and key not in waits]
            self._under_way |= dict.fromkeys(reading, mine)
        if reading:
            found |= self._read(mine, {key: wanted[key] for key in reading}, until_s)
        for key, read in waits.items():
            try:
                values = read.result(max(0.0, until_s - time.monotonic()))
            except TimeoutError:
                raise BackendUnavailable("the source did not answer in time") from None
            if key in values:
                found[key] = values[key]
        return found

    def _read(
        self, mine: Future[dict[str, bytes]], keys: Mapping[str, int], until_s: float
    ) -> dict[str, bytes]:
        values: dict[str, bytes] = {}
        try:
            with self._turn(until_s):
                got = self._source.get_within(keys)
            values = {key: value for key, value in got.items() if self._is_whole(key, value)}
            self.tally.add("source_reads_total", len(keys))
            self._keep(values)
        except BackendError as error:
            mine.set_exception(error)
            self.tally.add("source_errors_total")
            raise
        finally:
            with self._lock:
                for key in keys:
                    self._under_way.pop(key, None)
            if not mine.done():
                mine.set_result(values)
        return values

    def _is_whole(self, key: str, value: bytes) -> bool:
        if isinstance(value, Unread):
            return False
        sound = self.keys.is_sound(key, value)
        if not sound:
            self.tally.add("objects_total", result="damaged")
        return sound

    def _keep(self, values: Mapping[str, bytes]) -> None:
        with self._lock:
            before = self._kept_bytes
            for key, value in values.items():
                if len(value) <= self._most_bytes and key not in self._kept:
                    self._kept[key] = value
                    self._kept_bytes += len(value)
            while self._kept_bytes > self._most_bytes:
                self._kept_bytes -= len(self._kept.popitem(last=False)[1])
            after = self._kept_bytes
        self.tally.add("memory_bytes", after - before)

    def present(self, keys: Sequence[str], until_s: float) -> frozenset[str]:
        """Return which of these objects are there; raises as `get`."""
        with self._turn(until_s):
            return self._source.exists([key for key in keys if self.keys.is_object(key)])

    def read_ref(self, key: str, until_s: float) -> bytes | None:
        """Return the value of a ref; raises as `get`."""
        with self._turn(until_s):
            return self._source.read_ref(key)

    def listing(self, prefix: str, until_s: float) -> list[Stat]:
        """Return what there is for everybody under a prefix; raises as `get`."""
        with self._turn(until_s):
            if not prefix:
                return [stat for kind in self.keys.prefixes for stat in self._under(kind)]
            return self._under(prefix)

    def _under(self, prefix: str) -> list[Stat]:
        refs = self.keys.ref_prefix
        if not self.keys.may_list(prefix):
            return []
        if prefix == refs or prefix.startswith(f"{refs}/"):
            return [
                Stat(key, 0, 0.0) for key in self._source.list_refs(prefix) if self.keys.is_ref(key)
            ]
        return [stat for stat in self._source.list(prefix) if self.keys.is_object(stat.key)]

    @contextlib.contextmanager
    def _turn(self, until_s: float) -> Iterator[None]:
        if not self._turns.acquire(timeout=max(0.0, until_s - time.monotonic())):
            raise BackendUnavailable("too many read at once; try again")
        try:
            yield
        finally:
            self._turns.release()
