# SPDX-License-Identifier: Apache-2.0
"""Puts hostile values into a real Redis server under a store's keys; exit status 1 when a promise
did not hold.

    python -m tools.fuzz redis [--count N] [--seed S] [--jobs N] [--keep DIR] [--only NUMBER]

Each case fills a database of the server with two bundles, changes up to three keys of the first, or
adds some: wrong types, sizes, headers, frames, and manifests that lead to such.  Then it does what
users do, in any order.  Promised: errors are ours and can be printed; what is read has its digest;
the bundle whose keys nobody touched is pulled whole; after `verify --repair` the first can be pushed
and read again; none of it takes a gigabyte or ten seconds.
"""

from __future__ import annotations

import random
import struct
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import zstandard

import bundler
from bundler.errors import BundlerError, LimitExceeded
from tools.fuzz import workers
from tools.fuzz.container import (
    CONTENT,
    OBSERVED,
    Draft,
    DraftKernel,
    compressed,
    draft,
    kernel,
    nested,
    noise,
    pack,
    sha256,
)
from tools.fuzz.hostile import families
from tools.fuzz.judge import Finding, first_error, read_everything, typed
from tools.fuzz.mutations import ODD, flip
from tools.shared import redis_server

PATIENT: dict[str, Any] = {"timeout_s": 5, "connect_timeout_s": 5}
DATABASES = 16
# A push, a read that finds what is forged, another push, and one to spare.
ATTEMPTS = 3
# An object over a limit is not damaged, and stays after a repair.
LIMITS = ("limit", "at most", "deeper than", "upgrade")

KIB, MIB = 1 << 10, 1 << 20
WHOLE_BYTES = 256 * KIB
# One in so many is a value of 512 MB, which takes the server a second.
HUGE_EVERY = 200
# What a manifest, a tag or a record never names, and a person may have made by hand.
_OBJECTS = (
    *("d/zz", "d", "d/" + "A" * 64, "d/" + "0" * 63, "m", "m/x", "m/" + "0" * 64, "u", "u/zz"),
    *("m/" + "0" * 64 + "/x", "u/../u", "k", "k/x", "k/" + "a" * 64, "s", "s/x"),
    *("u/" + "x" * 390, "u/" + "x" * 100_000),
)
_REFS = ("t", "t/a/b/c/d/e/f", "t/..", "t/t/x", "t/\n", "f", "f/x", "t/" + "y" * 100_000)
STRANGE = [
    *(f"o:v1/{name}" for name in _OBJECTS),
    *(f"r:v1/{name}" for name in _REFS),
    *("o:", "o:v2/u/a", "o:\xff", "p:v1/u/a:0:0", "l:v1/c/x"),
]
# Names of a store by the server, and their values.
Stored = Mapping[bytes, bytes]
Change = Callable[[Any], object]
Make = Callable[[random.Random], bytes]


def uses(store: Any, bundle: Any) -> dict[str, Callable[[], object]]:
    """Return what users do with a store that may have a bundle under the tag `t`, by name."""
    keys = [kernel.key for kernel in bundle.kernels]
    records, files = store.kernel_records(), store.file_records()
    return {
        "push": lambda: store.push(bundle, "t"),
        "tags": store.tags,
        "stats": store.stats,
        "repair": lambda: store.verify(repair=True),
        "prune to nothing": lambda: store.prune(max_bytes=0, older_than_s=1),
        "delete": lambda: store.delete_tag("t"),
        "look up": lambda: records.look_up(keys),
        "publish": lambda: records.publish(bundle),
        "recorded": lambda: list(records.recorded(100)),
        "failure": lambda: records.failure(keys[0]),
        "tell failure": lambda: records.tell_failure(keys[0], "again"),
        "file": lambda: files.look_up("name"),
        "publish file": lambda: files.publish("name", "k.json", b"{}"),
    }


def attack(chance: random.Random, stored: Stored) -> tuple[str, Change]:
    """Return what is done and how: a function of a client that may do everything."""
    if chance.random() < 0.2:
        return _bundle(chance)
    names = sorted(stored)
    strange = b"tb:" + chance.choice(STRANGE).encode("utf-8", "surrogateescape")
    name = chance.choice(names) if chance.random() < 0.75 else strange
    if chance.random() < 0.3:
        kind, change = _typed(chance, name)
    else:
        kind, value = _value(chance, name, stored)
        kind = f"{kind} of {len(value)} bytes"
        change = partial(_set, chance, name=name, value=value)
    return f"{name[:90]!r}: {kind}", change


def _set(chance: random.Random, admin: Any, *, name: bytes, value: bytes) -> None:
    admin.delete(name)
    admin.set(name, value, px=chance.choice([None, None, 60_000, 3_600_000]))


def _typed(chance: random.Random, name: bytes) -> tuple[str, Change]:
    """Return what is no string, or one that is too large."""
    kinds: dict[str, Change] = {
        "list": lambda admin: admin.rpush(name, b"x"),
        "hash": lambda admin: admin.hset(name, "x", "y"),
        "set": lambda admin: admin.sadd(name, "x"),
        "sorted set": lambda admin: admin.zadd(name, {"x": 1}),
        "stream": lambda admin: admin.xadd(name, {"x": "y"}),
        "nothing": lambda admin: admin.delete(name),
        "20 MB": lambda admin: admin.setrange(name, 20_000_000, b"x"),
    }
    kind = "512 MB" if chance.randrange(HUGE_EVERY) == 0 else chance.choice(sorted(kinds))
    kinds["512 MB"] = lambda admin: admin.setrange(name, 512 * MIB - 1, b"x")

    def change(admin: Any) -> None:
        admin.delete(name)
        kinds[kind](admin)

    return kind, change


def _value(chance: random.Random, name: bytes, stored: Stored) -> tuple[str, bytes]:
    old = stored.get(name, b"")
    if name.startswith(b"tb:r:"):
        return _ref(chance, old, stored)
    match chance.randrange(8):
        case 0:
            return "another's", stored[chance.choice(sorted(stored))]
        case 1:
            return "flipped", flip(chance, old or b"TBw")
        case 2:
            return "cut", old[: chance.randrange(len(old) + 1)]
        case 3:
            return "head", _head(chance)
        case 4:
            heads = [b"", b"TB", b"TBw", b"TBp%013d", b"TBw" + b"9" * 13, b"\0" * 16]
            return "header", chance.choice(heads) + old[16:]
        case 5:
            return "empty or short", b"x" * chance.choice([0, 0, 1, 3, 15, 16, 17, 48, 49])
        case 6:
            size = chance.choice([WHOLE_BYTES, WHOLE_BYTES + 1, MIB])
            return "too large", b"TBw%013d" % 60_000 + bytes(size)
    return "sealed", b"TBw%013d" % 3_600_000 + _sealed(chance, old)


def _head(chance: random.Random) -> bytes:
    sizes = [0, 1, WHOLE_BYTES, WHOLE_BYTES + 1, MIB, 64 * MIB, 256 * MIB]
    size = chance.choice([*sizes, 1 << 30, (1 << 30) + 1, 10**15])
    digest = sha256(b"head").hex()[:16].encode()
    return b"TBs%013d%016d%s" % (chance.choice([0, 60_000, 10**12]), size, digest)


def _sealed(chance: random.Random, old: bytes) -> bytes:
    """Return a value with the right digest around a frame that is none of ours."""
    make: Make = chance.choice([*_FRAMES, lambda _: old[52:]])
    frame = make(chance)
    if chance.random() < 0.25:
        rest = chance.choice([bytes(32), sha256(b"none"), old[20:52], chance.randbytes(31)]) + frame
        return b"TBD1" + sha256(rest) + rest
    return chance.choice([b"TBV1", b"TBV1", b"TBV1", b"TBV2"]) + sha256(frame) + frame


def _odd(chance: random.Random) -> bytes:
    return pack([1, chance.choice(ODD), chance.choice(ODD)])


def _honest(chance: random.Random) -> bytes:
    return compressed(_payload(chance))


def _bomb(chance: random.Random) -> bytes:
    return _zeros(chance.choice([MIB, MIB + 1, 16 * MIB, 16 * MIB + 1, 64 * MIB]))


def _zeros(size: int) -> bytes:
    wide = {"write_content_size": True, "window_log": 27}
    parameters = zstandard.ZstdCompressionParameters.from_level(1, **wide)
    return zstandard.ZstdCompressor(compression_params=parameters).compress(bytes(size))


def _liar(chance: random.Random) -> bytes:
    """Return a frame that declares what it does not hold."""
    frame = bytearray(compressed(bytes(100_000)))
    declared = chance.choice([0, 1, 99_999, 1 << 30, (1 << 32) - 1])
    frame[4:] = bytes([frame[4] | 0xC0 | 0x20]) + struct.pack("<Q", declared) + frame[9:]
    return bytes(frame)


def _silent(chance: random.Random) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=False).compress(_payload(chance))


def _twice(chance: random.Random) -> bytes:
    return _honest(chance) * 2


def _skippable(chance: random.Random) -> bytes:
    return b"\x50\x2a\x4d\x18\x04\0\0\0abcd" + _honest(chance)


def _payload(chance: random.Random) -> bytes:
    return _odd(chance) if chance.random() < 0.3 else chance.choice(_PAYLOADS)


_PAYLOADS = (
    pack([1, b"x", b"y"]),
    pack([2**63, b"", b""]),
    pack(["1", 2, 3]),
    pack({"a": 1}),
    pack([1, "name", "k.json", b"x" * 99]),
    nested(10_000),
    b"\xdd" + struct.pack(">I", 200_000) + b"\x90" * 200_000,
    b"\xdd\xff\xff\xff\xff",
    noise("payload", 300),
    b"",
)
_ODD_FRAMES: tuple[Make, ...] = (lambda _: b"", lambda c: c.randbytes(50))
_FRAMES = (_honest, _bomb, _liar, _silent, _twice, _skippable, *_ODD_FRAMES)


def _ref(chance: random.Random, old: bytes, stored: Stored) -> tuple[str, bytes]:
    manifests = [name[5:].decode() for name in stored if name.startswith(b"tb:o:v1/m/")]
    absent = "v1/m/" + "0" * 64 + "/" + "0" * 16
    manifest: Any = chance.choice([*manifests, absent, "v1/u/x", "..", 1, b""])
    match chance.randrange(7):
        case 0:
            return "flipped", flip(chance, old or b"x")
        case 1:
            return "another's", stored[chance.choice(sorted(stored))]
        case 2:
            long = ["f" * 4000, sha256(b"hint")]
            hint = chance.choice([["cuda:90/launch", bytes(32)], ["", b"x"], [1, 2], "x", long])
            return "hints", pack([1, manifest, [hint] * chance.choice([0, 1, 16, 17, 5000])])
        case 3:
            many = b"\x90" * chance.choice([900_000, 10_000_000])
            return "arrays", b"\x93\x01\xa1x\xdd" + struct.pack(">I", 900_000) + many
        case 4:
            return "failure", pack([1, chance.choice(ODD), chance.choice(ODD)])
        case 5:
            sizes = [0, 1, 128 * KIB, 256 * KIB, 256 * KIB + 1, 10_000_000]
            return "large", bytes(chance.choice(sizes))
    return "tag", pack([chance.choice([0, 1, 2, -1, "1"]), manifest])


def _bundle(chance: random.Random) -> tuple[str, Change]:
    """Return a tag that leads to a hostile manifest, all of whose names and digests are right, and
    to its units.
    """
    family = families()[chance.choice(sorted(families()))]
    chosen = chance.choice([one for one in family if not one.heavy] or [family[0]])
    made = draft()
    chosen.change(made)
    parts = made.parts()
    content, observed = (_raw(parts.find(kind)) for kind in (CONTENT, OBSERVED))
    manifest = f"v1/m/{sha256(content).hex()}/{sha256(observed).hex()[:16]}"
    frame = compressed(pack([1, content, observed]))
    values = {f"tb:o:{manifest}": b"TBV1" + sha256(frame) + frame}
    for unit in _units(made):
        blobs = {sha256(data): data for data in unit}
        key = sha256(b"".join(sorted(blobs))).hex()
        frame = compressed(b"".join(blobs[digest] for digest in sorted(blobs)))
        values[f"tb:o:v1/u/{key}"] = b"TBV1" + sha256(frame) + frame

    def change(admin: Any) -> None:
        for name, value in values.items():
            if len(value) <= WHOLE_BYTES:
                admin.set(name, b"TBw%013d" % 3_600_000 + value, px=3_600_000)
        admin.set("tb:r:v1/t/t", pack([1, manifest]), px=3_600_000)

    return f"bundle {chosen.name}", change


def _raw(part: Any) -> bytes:
    limit = 17 * MIB
    if not part.codec:
        return bytes(part.data[:limit])
    try:
        if zstandard.get_frame_parameters(part.data).content_size > limit:
            return b"\x90"
        return zstandard.ZstdDecompressor().decompress(part.data, max_output_size=limit)
    except zstandard.ZstdError:
        return bytes(part.data)


def _units(made: Draft) -> list[list[bytes]]:
    launch = ("json", "cubin")
    found = [
        [file.data for file in one.files if file.name.endswith(launch) == is_launch]
        for is_launch in (True, False)
        for one in made.kernels
    ]
    return [*found, *([file.data] for _, file in (*made.tuning, *made.helpers, *made.opaque))]


def sound(*seeds: str, extra_bytes: int = 0) -> bytes:
    """Return a bundle of kernels that resemble each other, so that a push makes a dictionary, and
    one that is large.
    """
    made = Draft([_alike(seed, extra_bytes) for seed in seeds])
    return made.join()


def _alike(seed: str, extra_bytes: int) -> DraftKernel:
    one = kernel(seed)
    one.file("ttir").data += noise("alike", 20_000) + noise(seed, extra_bytes)
    return one


class Case:
    """The two bundles, and one store of them after the other.

    Args:
        url: of an empty database.
        admin: a client of it that may do everything.
    """

    def __init__(self, url: str, admin: Any) -> None:
        self.url, self.admin = url, admin
        self.first = bundler.Bundle.from_bytes(
            sound(*(f"{n}" for n in range(6)), extra_bytes=50_000)
        )
        self.large = bundler.Bundle.from_bytes(sound("large", extra_bytes=300_000))
        self.other = bundler.Bundle.from_bytes(sound("x", "y"))
        admin.flushdb()
        with bundler.open_store(url, **PATIENT) as store:
            for bundle in (self.first, self.large):
                store.push(bundle, "t")
            store.kernel_records().publish(self.first)
            store.kernel_records().tell_failure(self.first.kernels[0].key, "it failed")
            store.file_records().publish("name", "k.json", b"{}")
            self.stored = {name: admin.get(name) for name in admin.keys("*")}
            store.push(self.other, "u")
        self.everything = {name: admin.get(name) for name in admin.keys("*")}

    def judge(self, chance: random.Random, done: list[str]) -> str:
        """Return the class of the first error, or `accepted`, and add what was done; raises
        `Finding`.
        """
        self.admin.flushdb()
        with self.admin.pipeline(transaction=False) as pipeline:
            for name, value in self.everything.items():
                pipeline.set(name, value, px=3_600_000)
            pipeline.execute()
        for _ in range(chance.choice([1, 1, 2, 3])):
            label, change = attack(chance, self.stored)
            change(self.admin)
            done.append(label)
        with (
            bundler.open_store(self.url, **PATIENT) as store,
            tempfile.TemporaryDirectory() as cache,
        ):
            acts = self._acts(store, cache)
            outcomes = []
            for name in chance.sample(sorted(acts), 5):
                done.append(name)
                outcomes.append(typed(acts[name]))
            self._look_after(store)
        return first_error(outcomes)

    def _acts(self, store: Any, cache: str) -> dict[str, Callable[[], object]]:
        return uses(store, self.first) | {
            "replace": lambda: store.push(self.first, "t", "replace"),
            "create": lambda: store.push(self.first, "t", "create"),
            "pull": lambda: self._pull(store, "t"),
            "pull by digest": lambda: self._pull(store, self.first.digest),
            "restore": lambda: store.restore("t", cache_dir=cache, only="all"),
            "verify": store.verify,
            "prune": store.prune,
        }

    @staticmethod
    def _pull(store: Any, name: str) -> None:
        with store.pull(name) as bundle:
            bundle.blobs.prefetch([digest for digest, _ in bundle.content.blobs])
            read_everything(bundle)

    def _look_after(self, store: Any) -> None:
        """The other bundle is whole before anything is repaired, and the first afterwards."""
        _whole(store, "u", self.other)
        repaired = typed(lambda: store.verify(repair=True))
        if isinstance(repaired, BundlerError):
            raise Finding(f"cannot be repaired: {repaired!r}")
        self._push_whole(store)
        _whole(store, "u", self.other)
        left = typed(store.verify)
        if isinstance(left, BundlerError):
            raise Finding(f"cannot be verified after a repair: {left!r}")
        bad = [entry for entry in left.damaged if not any(word in entry[1] for word in LIMITS)]
        if bad:
            raise Finding(f"still damaged after a repair: {bad[:3]}")

    def _push_whole(self, store: Any) -> None:
        """Push until the bundle can be read: what nobody named before is found to be forged when it
        is read, and removed.
        """
        read: object = None
        for _ in range(ATTEMPTS):
            pushed = typed(lambda: store.push(self.first, "t", "replace"))
            if isinstance(pushed, BundlerError):
                raise Finding(f"cannot be pushed after a repair: {pushed!r}")
            read = typed(lambda: self._pull(store, "t"))
            if not isinstance(read, BundlerError) or isinstance(read, LimitExceeded):
                return
        raise Finding(f"not whole after {ATTEMPTS} pushes: {read!r}")


def _whole(store: Any, tag: str, bundle: Any) -> None:
    def read() -> object:
        with store.pull(tag) as pulled:
            read_everything(pulled)
            return pulled.digest

    digest = typed(read)
    if digest != bundle.digest:
        raise Finding(f"tag {tag} gives {digest!r}, expected {bundle.digest}")


class Values(workers.Fuzzer):
    """Hostile values; each process has a database of its own."""

    name = "redis"
    memory_bytes = 1 << 30
    # It takes ten seconds at the most, and as long again where other programs run.
    case_s = 20.0

    def __init__(self, seed: int, server: redis_server.Server) -> None:
        super().__init__(seed)
        self.urls = [server.url(db=number) for number in range(DATABASES)]
        self.address = server.address

    def ready(self, place: Path, job: int, made: Connection) -> None:
        """Fill the database."""
        self.case = Case(self.urls[job], redis_server.admin_of(self.address, db=job))

    def judge(self, number: int, begin: Callable[[], None], done: list[str]) -> Counter[str]:
        """Change some keys, and use the store."""
        begin()
        return Counter({self.case.judge(random.Random(f"{self.seed}/{number}"), done): 1})


def main() -> int:
    """Fuzz and print the table."""
    options = workers.parser(__doc__, 2000).parse_args()
    options.jobs = min(DATABASES, options.jobs)
    # Without eviction: what is missing here is to be missing because of an attack.
    with redis_server.running("--maxmemory", "0") as server:
        return workers.run(Values(options.seed, server), options)
