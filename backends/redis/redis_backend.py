# SPDX-License-Identifier: Apache-2.0
"""`RedisBackend`: a byte store in Redis or Valkey, one server or a cluster.

Reading and writing use GETRANGE, STRLEN, SET NX PX, PEXPIRE, UNLINK and the scripts of
value_parts.py, each with all its keys declared.  Listings, which are for maintenance, use SCAN: the
keys that are there are the only index that eviction, expiry, a restart and a crash between two
commands cannot make wrong.  An index of our own would be one more key that the server may evict,
and a prune that believed it would remove what a tag needs.

`bundler/store/store_urls.py` opens it by its URL.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Self

from bundler.backends.backend_errors import BackendDenied, BackendFull
from bundler.backends.batches import batches
from bundler.backends.keys import check_key, check_keys, check_prefix, is_key
from bundler.backends.port import (
    BEGINNING_BYTES,
    OBJECT_LIMIT,
    Backend,
    HeldLease,
    Lease,
    Stat,
    Unread,
    held_lease,
    in_prefix,
    new_token,
)
from bundler.backends.redis import value_parts as values
from bundler.backends.redis.replies import LATEST_S, is_wrong_type
from bundler.backends.redis.server_exchange import FRAMING_BYTES, Command, opened
from bundler.backends.redis.url_settings import RedisSettings, parse
from bundler.backends.redis.value_parts import Head

# A server touches so many in some milliseconds, and hardly answers.
TOUCHED_KEYS = 4 * values.BATCH_KEYS


class RedisBackend(Backend):
    """Objects, refs and leases in Redis, shared by processes of any number of hosts.

    Nothing is sent before the first call.  Each exchange is sent once, and takes no longer than
    `timeout_s` and the time of its bytes at `server_connections.BYTES_PER_S`, and where a
    connection is made, `connect_timeout_s` for each address of the host. A batch is as many
    exchanges as its size asks for.  Thread-safe without locks; may be used on both sides of a fork.

    Everything expires: records (manifests) and refs `ttl_s` after their last use, the objects that
    records name later.  Reading a ref and `touch` are uses, unless our user may not write.  What
    was evicted or has expired is absent. An object of which a part is missing counts as absent, and
    may be put again; so may one whose key holds a list, a hash, or more bytes than any object has
    here.  Whatever somebody stored, no more of an answer is read than was asked for. Does not
    guarantee: that what was put stays, or survives a restart; on a cluster, that times of different
    masters agree better than their clocks.

    Args:
        settings: how to reach it; see `from_url`.
    """

    reads_are_cheap = False

    def __init__(self, settings: RedisSettings) -> None:
        self._settings, self._link = settings, opened(settings)
        self._may_touch = True

    @classmethod
    def from_url(cls, url: str, **options: Any) -> Self:
        """Return the store that a URL names; the settings of `RedisSettings` may stand in its query
        or be given as options.

        Raises:
            BadSettings: not such a URL, an unknown setting, or a value that cannot be used; the
                message holds no secret.
        """
        return cls(parse(url, options))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._settings.shown} {self._settings.namespace}>"

    def get(self, keys: Collection[str]) -> dict[str, bytes]:
        return self.get_within(dict.fromkeys(keys, OBJECT_LIMIT))

    def get_within(self, max_bytes: Mapping[str, int]) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        over: dict[str, bytes] = {}
        large: list[Head] = []
        for batch in batches(_unique(max_bytes.keys()), values.BATCH_KEYS):
            # At least the beginning of each comes, which tells what a larger one is.
            most = {
                key: min(max(max_bytes[key], BEGINNING_BYTES), values.WHOLE_BYTES) for key in batch
            }
            for key, stored in self._stored("o", most).items():
                value = values.payload(stored)
                head = None if value is not stored else values.read_head(key, stored)
                if head is not None:
                    large.append(head)
                elif not stored:
                    found[key] = Unread(b"", f"{key} holds no plain value")
                elif len(value) > min(max_bytes[key], values.WHOLE_BYTES):
                    over[key] = value
                else:
                    found[key] = value
        wanted = [head for head in large if head.size_bytes <= max_bytes[head.key]]
        others = [head for head in large if head.size_bytes > max_bytes[head.key]]
        found |= self._too_large(over, max_bytes)
        return found | self._joined(wanted) | self._beginnings(others, max_bytes)

    def _too_large(
        self, over: Mapping[str, bytes], max_bytes: Mapping[str, int]
    ) -> dict[str, bytes]:
        """Return what stands for values of which more came than they may have, by their beginnings;
        asks how large they are.
        """
        if not over:
            return {}
        sizes = self._lengths([self._name("o", key) for key in over])
        return {
            key: Unread.too_large(
                value,
                key,
                sizes.get(self._name("o", key), 0) - values.HEADER_BYTES,
                min(max_bytes[key], values.WHOLE_BYTES),
            )
            for key, value in over.items()
        }

    def _beginnings(self, heads: Sequence[Head], max_bytes: Mapping[str, int]) -> dict[str, bytes]:
        """Return the beginnings of values in parts that are larger than they may be."""
        if not heads:
            return {}
        first = {head.parts[0][0]: head for head in heads}
        stored = self._stored("p", dict.fromkeys(first, BEGINNING_BYTES))
        return {
            head.key: Unread.too_large(
                stored.get(name, b"")[values.HEADER_BYTES :],
                head.key,
                head.size_bytes,
                max_bytes[head.key],
            )
            for name, head in first.items()
        }

    def put(self, items: Mapping[str, bytes]) -> frozenset[str]:
        ready: dict[str, tuple[bytes, int]] = {}
        for key in map(check_key, items):
            if len(items[key]) > values.MAX_BYTES:
                raise BackendFull(
                    f"{key} has {len(items[key])} bytes, and a value at most {values.MAX_BYTES}"
                )
        for key, value in items.items():
            ready[key] = self._prepared(key, value)
        # NX lets the first writer win; where it refuses, the value that stands there is checked to
        # be an object at all.
        created = self._set("o", ready)
        refused = ready.keys() - created
        # Such a key may hold a list, or the head of parts of which some were evicted; left there,
        # nobody could ever put the object.
        broken = refused - self.exists(refused) if refused else set()
        if broken:
            self._drop(broken)
            for key in broken:
                self._prepared(key, items[key])
            created |= self._set("o", {key: ready[key] for key in broken})
        return frozenset(created)

    def exists(self, keys: Collection[str]) -> frozenset[str]:
        return self._whole(self._heads(values.HEADS, _unique(keys)))

    def delete(
        self, keys: Collection[str], unmodified_since_s: float | None = None
    ) -> frozenset[str]:
        # Times are whole milliseconds, and a float of seconds may fall just short of one.
        since_ms = "" if unmodified_since_s is None else int(unmodified_since_s * 1000 + 0.001)
        # The head is removed first: a reader in between finds no object, instead of one without
        # parts.
        gone = self._heads(values.DELETE, _unique(keys), since_ms)
        parts = [self._part(name) for head in _split(gone) for name, _ in head.parts]
        for batch in batches(parts, values.BATCH_KEYS):
            self._link.exchange([(name, ("UNLINK", name)) for name in batch])
        return frozenset(gone)

    def touch(self, keys: Collection[str]) -> None:
        self._touched(_unique(keys), self._heads_of_parts)

    def claim(self, keys: Collection[str]) -> frozenset[str]:
        wanted = _unique(keys)
        heads = self._touched(wanted, partial(self._heads, values.CLAIM))
        return self.exists(wanted) if heads is None else self._whole(heads)

    def _heads_of_parts(self, keys: Collection[str]) -> dict[str, bytes]:
        """Touch objects; returns the heads of those that have parts."""
        found: dict[str, bytes] = {}
        for batch in batches(keys, TOUCHED_KEYS):
            groups = self._link.groups([self._name("o", key) for key in batch])
            for told in self._link.call(values.TOUCH, groups, self._ttl_ms()):
                names = (self._key(name.decode()) for name in told[::2])
                found |= zip(names, told[1::2], strict=True)
        return found

    def _touched(
        self, wanted: list[str], touch: Callable[[list[str]], dict[str, bytes]]
    ) -> dict[str, bytes] | None:
        """Touch objects, and the parts of those whose heads `touch` returns; returns these, None
        when we may not touch.
        """
        if not self._may_touch:
            return None
        try:
            heads = touch(wanted)
            parts = [
                (self._part(name), head.ttl_ms) for head in _split(heads) for name, _ in head.parts
            ]
            for batch in batches(parts, values.BATCH_KEYS):
                self._link.exchange([(name, ("PEXPIRE", name, ttl_ms)) for name, ttl_ms in batch])
        except BackendDenied:
            self._may_touch = False  # once is enough: a server notes each refusal
            return None
        return heads

    def list(self, prefix: str = "") -> Iterator[Stat]:
        check_prefix(prefix)
        for keys in self._scanned("o", prefix):
            groups = self._link.groups([self._name("o", key) for key in keys])
            answers = self._link.call(values.DESCRIBE, groups, self._ttl_ms())
            for names, found in zip(groups, answers, strict=True):
                for name, (head, stored_bytes, modified_ms) in zip(names, found, strict=True):
                    if head:  # else it was removed meanwhile
                        key = self._key(name)
                        # Anybody who may write may let a key expire in a million years.
                        modified_s = min(modified_ms / 1000, LATEST_S)
                        yield Stat(key, values.size_of(key, head, stored_bytes), modified_s)

    def read_ref(self, key: str) -> bytes | None:
        name = self._name("r", check_key(key))
        asked: list[Command] = [
            (name, ("GETRANGE", name, 0, values.REF_BYTES)),
            (name, ("EXISTS", name)),
            (name, ("PEXPIRE", name, self._ttl_ms())),
        ]
        value, there, *touched = self._link.replies(asked if self._may_touch else asked[:2])
        if value == b"" and there == 1:
            # An empty value, or one that was set between the two commands.
            (value,) = self._link.replies([(name, ("GET", name))])
        elif value == b"" and there == 0:
            value = None
        found: bytes | None
        (found,) = self._link.checked([b"" if is_wrong_type(value) else value])
        try:
            self._link.checked([there, *touched])
        except BackendDenied:
            self._may_touch = False
        return found

    def swap_ref(self, key: str, expected: bytes | None, value: bytes | None) -> bool:
        """Change a ref; one that is too large, or a list or hash, has the value that `read_ref`
        gives.  See `Backend`.
        """
        name = self._name("r", check_key(key))
        if value is not None and len(value) > values.REF_BYTES:
            raise BackendFull(f"{key} has {len(value)} bytes, and a ref at most {values.REF_BYTES}")
        given = [word for one in (expected, value) for word in (int(one is not None), one or b"")]
        return bool(self._link.call(values.SWAP, [[name]], *given, self._ttl_ms())[0])

    def list_refs(self, prefix: str = "") -> Iterator[str]:
        check_prefix(prefix)
        for keys in self._scanned("r", prefix):
            yield from keys

    def now_s(self) -> float:
        return self._link.now_s()

    def lease(self, key: str, ttl_s: float) -> Lease | None:
        """Take a lease; see `Backend`."""
        name, token = self._name("l", check_key(key)), new_token()
        (granted,) = self._link.exchange([(name, ("SET", name, token, "NX", "PX", _ms(ttl_s)))])
        return None if granted is None else Lease(partial(self._change_lease, name, token))

    def _change_lease(self, name: str, token: str, ttl_s: float | None) -> bool:
        """Prolong a lease or give it back; the server's clock decides when it is over."""
        if ttl_s is not None:
            return bool(self._link.call(values.RENEW, [[name]], token, _ms(ttl_s))[0])
        return bool(self._link.call(values.SWAP, [[name]], 1, token, 0, b"", 0)[0])

    def leases(self) -> Iterator[HeldLease]:
        for keys in self._scanned("l", ""):
            names = [self._name("l", key) for key in keys]
            told = self._link.exchange_strings(
                [(name, (word, name)) for word in ("GET", "PTTL") for name in names]
            )
            for key, token, left_ms in zip(keys, told, told[len(keys) :], strict=False):
                if token is not None and int(left_ms or 0) > 0:
                    yield held_lease(
                        bytes(token).decode("ascii", "replace"), int(left_ms or 0) / 1000, key
                    )

    def close(self) -> None:
        """Close connections; a call after that makes one for itself."""
        self._link.close()

    def _stored(self, kind: str, most: Mapping[str, int]) -> dict[str, bytes]:
        """Return what is stored under keys of a kind, header and all; empty what is no string, and
        of what is larger than `most` says one byte more than that.

        GETRANGE for each, and not MGET for all: the server copies no more than the limit, however
        large a value is, and an exchange of 300 values takes about 1 ms longer.
        """
        begin = self._name(kind, "")
        sizes = [
            (f"{begin}{key}", most_bytes + values.HEADER_BYTES) for key, most_bytes in most.items()
        ]
        answers = self._link.exchange_strings(
            [(name, ("GETRANGE", name, 0, size)) for name, size in sizes],
            sum([size for _, size in sizes]) + FRAMING_BYTES * len(sizes),
        )
        # Of what is not there the answer is empty, of what is no string None.
        return {
            key: stored or b"" for key, stored in zip(most, answers, strict=True) if stored != b""
        }

    def _lengths(self, names: Sequence[str]) -> dict[str, int]:
        """Return how many bytes each key of the server has; of one that holds no string nothing."""
        answers = self._link.exchange_strings([(name, ("STRLEN", name)) for name in names])
        return {
            name: int(length)
            for name, length in zip(names, answers, strict=True)
            if length is not None
        }

    def _joined(self, heads: Sequence[Head]) -> dict[str, bytes]:
        """Return large values; one whose parts are not all there, each of the right size, is not
        there.
        """
        parts: dict[str, memoryview] = {}
        wanted = (part for head in heads for part in head.parts)
        for batch in batches(wanted, values.BATCH_KEYS, values.BATCH_BYTES, lambda part: part[1]):
            for name, stored in self._stored("p", dict(batch)).items():
                parts[name] = memoryview(stored)[values.HEADER_BYTES :]
        return {
            head.key: b"".join(parts.pop(name) for name, _ in head.parts)
            for head in heads
            if all(name in parts and len(parts[name]) == size for name, size in head.parts)
        }

    def _prepared(self, key: str, value: bytes) -> tuple[bytes, int]:
        """Return what is to be stored under a key; the parts of a large value are stored here,
        before it is named.
        """
        ttl_ms = values.object_ttl_ms(key, self._settings.ttl_s)
        if len(value) <= values.WHOLE_BYTES:
            return values.whole(value, ttl_ms), ttl_ms
        head, parts = values.split(key, value, ttl_ms)
        self._set("p", {name: (stored, ttl_ms) for name, stored in parts.items()})
        # Parts that another writer had stored already may be about to expire, or may not be parts
        # at all.
        names = [self._part(name) for name in parts]
        prolong: list[Command] = [(name, ("PEXPIRE", name, ttl_ms)) for name in names]
        lengths = self._link.exchange_strings(
            [*prolong, *((name, ("STRLEN", name)) for name in names)]
        )[len(names) :]
        wrong = {
            name: stored
            for (name, stored), length in zip(parts.items(), lengths, strict=True)
            if length != len(stored)
        }
        self._link.exchange([(name, ("UNLINK", name)) for name in map(self._part, wrong)])
        self._set("p", {name: (stored, ttl_ms) for name, stored in wrong.items()})
        return head.encode(), ttl_ms

    def _set(self, kind: str, items: Mapping[str, tuple[bytes, int]]) -> set[str]:
        """Create what is not there, each with its time to live; returns the keys that were
        created.
        """
        created: set[str] = set()
        for batch in batches(
            items, values.BATCH_KEYS, values.BATCH_BYTES, lambda key: len(items[key][0])
        ):
            names = [self._name(kind, key) for key in batch]
            commands: list[Command] = [
                (name, ("SET", name, items[key][0], "NX", "PX", items[key][1]))
                for name, key in zip(names, batch, strict=True)
            ]
            answers = zip(batch, self._link.exchange(commands), strict=True)
            created |= {key for key, answer in answers if answer is not None}
        return created

    def _drop(self, keys: Collection[str]) -> None:
        """Remove values that are no objects, and heads of which a part is missing, unless somebody
        has replaced them since.
        """
        heads = self._heads(values.CLEAR, keys)
        for key in heads.keys() - self._whole(heads) - _none_of_ours(heads):
            # A head is all that is stored under its key, so its first bytes are the value.
            self._link.call(values.SWAP, [[self._name("o", key)]], 1, heads[key], 0, b"", 0)

    def _heads(
        self, script: values.Script, keys: Collection[str], *arguments: Any
    ) -> dict[str, bytes]:
        """Run a script that returns the first bytes of objects; return those whose keys are there,
        whatever they hold.
        """
        found: dict[str, bytes] = {}
        for batch in batches(keys, values.BATCH_KEYS):
            groups = self._link.groups([self._name("o", key) for key in batch])
            answers = self._link.call(script, groups, self._ttl_ms(), *arguments)
            for names, answer in zip(groups, answers, strict=True):
                found |= {
                    self._key(name): head for name, head in zip(names, answer, strict=True) if head
                }
        return found

    def _whole(self, heads: Mapping[str, bytes]) -> frozenset[str]:
        """Return the keys of objects that are there, whole or with all their parts, by their first
        bytes.
        """
        large = _split(heads)
        lacking = self._lacking(large)
        incomplete = {head.key for head in large if any(name in lacking for name, _ in head.parts)}
        return frozenset(heads.keys() - incomplete - _none_of_ours(heads))

    def _lacking(self, heads: Iterable[Head]) -> set[str]:
        """Return the names of parts that are not there, or not of the right size."""
        sizes = {
            self._part(name): size + values.HEADER_BYTES
            for head in heads
            for name, size in head.parts
        }
        lacking: set[str] = set()
        for batch in batches(sizes, values.BATCH_KEYS):
            lengths = self._lengths(batch)
            lacking |= {self._key(name) for name in batch if lengths.get(name) != sizes[name]}
        return lacking

    def _scanned(self, kind: str, prefix: str) -> Iterator[Sequence[str]]:
        seen: set[str] = set()
        for names in self._link.scan(self._name(kind, f"{prefix}*")):
            keys = {
                key for key in map(self._key, names) if is_key(key) and in_prefix(key, prefix)
            } - seen
            seen |= keys
            yield from batches(sorted(keys), values.BATCH_KEYS)

    def _name(self, kind: str, key: str) -> str:
        return f"{self._settings.namespace}:{kind}:{key}"

    def _part(self, name: str) -> str:
        return self._name("p", name)

    def _key(self, name: str) -> str:
        return name[len(self._settings.namespace) + 3 :]

    def _ttl_ms(self) -> int:
        return _ms(self._settings.ttl_s)


def _ms(seconds: float) -> int:
    return max(1, int(seconds * 1000))


def _unique(keys: Collection[str]) -> list[str]:
    return list(dict.fromkeys(check_keys(keys)))


def _none_of_ours(heads: Mapping[str, bytes]) -> set[str]:
    return {key for key, head in heads.items() if head == values.NONE_OF_OURS}


def _split(heads: Mapping[str, bytes]) -> list[Head]:
    found = (values.read_head(key, stored) for key, stored in heads.items())
    return [head for head in found if head is not None]
