# SPDX-License-Identifier: Apache-2.0
"""A byte store in Redis or Valkey, one server or a cluster.

Reading and writing use GET, MGET, SET NX PX, PEXPIRE, UNLINK and the scripts of redis_scripts.py, each with all its keys
declared.  Listings, which are for maintenance, use SCAN: the keys that are there are the only index that eviction, expiry, a
restart and a crash between two commands cannot make wrong.  An index of our own would be one more key that the server may
evict, and a prune that believed it would remove what a tag needs.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar

from bundler.backends import redis_scripts as scripts
from bundler.backends import redis_values as values
from bundler.backends.base import Backend, Stat, in_prefix
from bundler.backends.errors import BackendDenied, BackendFull
from bundler.backends.keys import check_key, check_prefix, is_key
from bundler.backends.redis_cluster import Cluster
from bundler.backends.redis_link import Command, Link, opened
from bundler.backends.redis_url import Settings, parse
from bundler.backends.redis_values import Head

T = TypeVar("T")


class RedisBackend(Backend):
    """Objects, refs and leases in Redis, shared by processes of any number of hosts.

    Nothing is sent before the first call.  Each exchange is sent once, and takes no longer than `timeout_s` and the time of
    its bytes at `redis_link.BYTES_PER_S`, and where a connection is made, `connect_timeout_s` for each address of the host.
    A batch is as many exchanges as its size asks for.  Thread-safe without locks; may be used on both sides of a fork.

    Everything expires: records (manifests) and refs `ttl_s` after their last use, what records name later.  Reading a ref
    and `touch` are uses; where our user may not write, they are not.  What was evicted or expired is not there.
    An object whose parts are not all there is not there either, and may be put again.
    Does not guarantee: that what was put stays, or survives a restart; on a cluster, that times of different masters agree
    better than their clocks.

    Args:
        settings: how to reach it; see `from_url`.
    """

    reads_are_cheap = False

    def __init__(self, settings: Settings) -> None:
        self._settings, self._link = settings, opened(settings, Cluster)
        self._may_touch = True

    @classmethod
    def from_url(cls, url: str, **options: Any) -> Self:
        """Return the store that a URL names; the settings of `Settings` may stand in its query or be given as options.

        Raises:
            BadSettings: not such a URL, an unknown setting, or a value that cannot be used; the message holds no secret.
        """
        return cls(parse(url, options))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._settings.shown} {self._settings.namespace}>"

    def get(self, keys: Collection[str]) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        heads: list[Head] = []
        for batch in _batches(_unique(keys)):
            for key, stored in self._stored("o", batch).items():
                head = values.read_head(key, stored)
                if head is None:
                    found[key] = values.payload(stored)
                else:
                    heads.append(head)
        return found | self._joined(heads)

    def put(self, items: Mapping[str, bytes]) -> frozenset[str]:
        ready: dict[str, tuple[bytes, int]] = {}
        for key in map(check_key, items):
            if len(items[key]) > values.MAX_BYTES:
                raise BackendFull(f"{key} has {len(items[key])} bytes, and a value at most {values.MAX_BYTES}")
        for key, value in items.items():
            ready[key] = self._prepared(key, value)
        created = self._set("o", ready)
        refused = ready.keys() - created
        # What refused us may be the head of parts of which some were evicted, and would stand in everybody's way.
        broken = refused - self.exists(refused) if refused else set()
        if broken:
            self._drop(broken)
            for key in broken:
                self._prepared(key, items[key])
            created |= self._set("o", {key: ready[key] for key in broken})
        return frozenset(created)

    def exists(self, keys: Collection[str]) -> frozenset[str]:
        heads = self._heads(scripts.HEADS, _unique(keys))
        return frozenset(heads.keys() - self._incomplete(heads))

    def delete(self, keys: Collection[str], unmodified_since_s: float | None = None) -> frozenset[str]:
        # Times are whole milliseconds, and a float of seconds may fall just short of one.
        since_ms = "" if unmodified_since_s is None else int(unmodified_since_s * 1000 + 0.001)
        gone = self._heads(scripts.DELETE, _unique(keys), since_ms)
        parts = [self._part(name) for head in _split(gone) for name, _ in head.parts]
        for batch in _batches(parts):
            self._link.exchange([(name, ("UNLINK", name)) for name in batch])
        return frozenset(gone)

    def touch(self, keys: Collection[str]) -> None:
        self._touched(_unique(keys))

    def claim(self, keys: Collection[str]) -> frozenset[str]:
        wanted = _unique(keys)
        heads = self._touched(wanted)
        return self.exists(wanted) if heads is None else frozenset(heads.keys() - self._incomplete(heads))

    def _touched(self, wanted: list[str]) -> Mapping[str, bytes] | None:
        """Touch objects; returns the first bytes of those that are there, None when we may not touch."""
        if not self._may_touch:
            return None
        try:
            heads = self._heads(scripts.TOUCH, wanted)
            parts = [(self._part(name), head.ttl_ms) for head in _split(heads) for name, _ in head.parts]
            for batch in _batches(parts):
                self._link.exchange([(name, ("PEXPIRE", name, ttl_ms)) for name, ttl_ms in batch])
        except BackendDenied:
            self._may_touch = False  # once is enough: a server notes each refusal
            return None
        return heads

    def list(self, prefix: str = "") -> Iterator[Stat]:
        check_prefix(prefix)
        for keys in self._scanned("o", prefix):
            groups = self._link.groups([self._name("o", key) for key in keys])
            answers = self._link.call(scripts.DESCRIBE, groups, values.HEAD_BYTES - 1, self._ttl_ms())
            for names, found in zip(groups, answers, strict=True):
                for name, (head, stored_bytes, modified_ms) in zip(names, found, strict=True):
                    if head:  # else it went since
                        key = self._key(name)
                        yield Stat(key, values.size_of(key, head, stored_bytes), modified_ms / 1000)

    def read_ref(self, key: str) -> bytes | None:
        name = self._name("r", check_key(key))
        commands: list[Command] = [(name, ("GET", name))]
        if self._may_touch:
            commands.append((name, ("PEXPIRE", name, self._ttl_ms())))
        value, *touched = self._link.replies(commands)
        self._link.checked([value])
        try:
            self._link.checked(touched)
        except BackendDenied:
            self._may_touch = False
        return None if value is None else bytes(value)

    def swap_ref(self, key: str, expected: bytes | None, value: bytes | None) -> bool:
        name = self._name("r", check_key(key))
        given = [word for one in (expected, value) for word in (int(one is not None), one or b"")]
        return bool(self._link.call(scripts.SWAP, [[name]], *given, self._ttl_ms())[0])

    def list_refs(self, prefix: str = "") -> Iterator[str]:
        check_prefix(prefix)
        for keys in self._scanned("r", prefix):
            yield from keys

    def now_s(self) -> float:
        return self._link.now_s()

    def lease(self, key: str, ttl_s: float) -> RedisLease | None:
        """Take a lease; see `Leasing`."""
        name, token = self._name("l", check_key(key)), secrets.token_hex(16)
        (granted,) = self._link.exchange([(name, ("SET", name, token, "NX", "PX", _ms(ttl_s)))])
        return None if granted is None else RedisLease(self._link, name, token)

    def close(self) -> None:
        """Close connections; a call after that makes one for itself."""
        self._link.close()

    def _stored(self, kind: str, keys: Iterable[str]) -> dict[str, bytes]:
        """Return what is stored under keys of a kind, header and all."""
        groups = self._link.groups([self._name(kind, key) for key in keys], values.MGET_KEYS)
        answers = self._link.exchange([(names[0], ("MGET", *names)) for names in groups])
        return {
            self._key(name): stored
            for names, answer in zip(groups, answers, strict=True)
            for name, stored in zip(names, answer, strict=True)
            if stored is not None
        }

    def _joined(self, heads: Sequence[Head]) -> dict[str, bytes]:
        """Return large values; one that lacks a part is not there."""
        parts: dict[str, bytes] = {}
        for batch in _batches([part for head in heads for part in head.parts], size=lambda part: part[1]):
            parts |= self._stored("p", [name for name, _ in batch])
        return {
            head.key: b"".join(values.payload(parts[name]) for name, _ in head.parts)
            for head in heads
            if all(name in parts for name, _ in head.parts)
        }

    def _prepared(self, key: str, value: bytes) -> tuple[bytes, int]:
        """Return what is to be stored under a key; the parts of a large value are stored here, before it is named."""
        ttl_ms = values.object_ttl_ms(key, self._settings.ttl_s)
        if len(value) <= values.WHOLE_BYTES:
            return values.whole(value, ttl_ms), ttl_ms
        head, parts = values.split(key, value, ttl_ms)
        self._set("p", {name: (stored, ttl_ms) for name, stored in parts.items()})
        # Parts that were there already, as another writer's, may be about to expire.
        self._link.exchange([(name, ("PEXPIRE", name, ttl_ms)) for name in map(self._part, parts)])
        return head.encode(), ttl_ms

    def _set(self, kind: str, items: Mapping[str, tuple[bytes, int]]) -> set[str]:
        """Create what is not there, each with its time to live; returns the keys that were created."""
        created: set[str] = set()
        for batch in _batches(list(items), size=lambda key: len(items[key][0])):
            names = [self._name(kind, key) for key in batch]
            answers = self._link.exchange(
                [
                    (name, ("SET", name, items[key][0], "NX", "PX", items[key][1]))
                    for name, key in zip(names, batch, strict=True)
                ]
            )
            created |= {key for key, answer in zip(batch, answers, strict=True) if answer is not None}
        return created

    def _drop(self, keys: Collection[str]) -> None:
        """Remove heads whose parts are not all there, unless somebody has replaced them since."""
        for key, stored in self._stored("o", keys).items():
            head = values.read_head(key, stored)
            if head is not None and self._incomplete({key: stored}):
                self._link.call(scripts.SWAP, [[self._name("o", key)]], 1, stored, 0, b"", 0)

    def _heads(self, script: scripts.Script, keys: Collection[str], *arguments: Any) -> dict[str, bytes]:
        """Run a script that returns the first bytes of objects; return those that are there."""
        found: dict[str, bytes] = {}
        for batch in _batches(list(keys)):
            groups = self._link.groups([self._name("o", key) for key in batch])
            answers = self._link.call(script, groups, values.HEAD_BYTES - 1, self._ttl_ms(), *arguments)
            for names, answer in zip(groups, answers, strict=True):
                found |= {self._key(name): head for name, head in zip(names, answer, strict=True) if head}
        return found

    def _incomplete(self, heads: Mapping[str, bytes]) -> set[str]:
        """Return the keys of large values that lack a part."""
        parts = {self._part(name): head.key for head in _split(heads) for name, _ in head.parts}
        lacking: set[str] = set()
        for batch in _batches(list(parts)):
            answers = self._link.exchange([(name, ("EXISTS", name)) for name in batch])
            lacking |= {parts[name] for name, answer in zip(batch, answers, strict=True) if not answer}
        return lacking

    def _scanned(self, kind: str, prefix: str) -> Iterator[Sequence[str]]:
        seen: set[str] = set()
        for names in self._link.scan(self._name(kind, f"{prefix}*")):
            keys = {key for key in map(self._key, names) if is_key(key) and in_prefix(key, prefix)} - seen
            seen |= keys
            yield from _batches(sorted(keys))

    def _name(self, kind: str, key: str) -> str:
        return f"{self._settings.namespace}:{kind}:{key}"

    def _part(self, name: str) -> str:
        return self._name("p", name)

    def _key(self, name: str) -> str:
        return name[len(self._settings.namespace) + 3 :]

    def _ttl_ms(self) -> int:
        return _ms(self._settings.ttl_s)


class RedisLease:
    """A lease of `RedisBackend`; the server's clock decides when it is over."""

    def __init__(self, link: Link, name: str, token: str) -> None:
        self._link, self._name, self._token = link, name, token

    def renew(self, ttl_s: float) -> bool:
        """Prolong the lease; False when it was lost."""
        return bool(self._link.call(scripts.RENEW, [[self._name]], self._token, _ms(ttl_s))[0])

    def release(self) -> bool:
        """Give the lease back; False when it was lost before."""
        return bool(self._link.call(scripts.SWAP, [[self._name]], 1, self._token, 0, b"", 0)[0])


def _ms(seconds: float) -> int:
    return max(1, int(seconds * 1000))


def _unique(keys: Collection[str]) -> list[str]:
    return list(dict.fromkeys(map(check_key, keys)))


def _split(heads: Mapping[str, bytes]) -> list[Head]:
    found = (values.read_head(key, stored) for key, stored in heads.items())
    return [head for head in found if head is not None]


def _batches(items: Sequence[T], size: Callable[[T], int] = lambda _: 0) -> Iterator[list[T]]:
    """Split what is to be sent or fetched into exchanges of `BATCH_KEYS` and `BATCH_BYTES` at most."""
    batch: list[T] = []
    total = 0
    for item in items:
        if batch and (len(batch) == values.BATCH_KEYS or total + size(item) > values.BATCH_BYTES):
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size(item)
    if batch:
        yield batch
