# SPDX-License-Identifier: Apache-2.0
"""Puts hostile values into a real Redis server under a store's keys; exit status 1 when a promise
did not hold.

    python -m tools.fuzz redis [--count N] [--seed S] [--jobs N] [--keep DIR] [--only NUMBER]

Each case fills a database of the server with two bundles, changes up to three keys of the first as
redis_values.py says, or adds some, and does what users do, in any order.  Promised: errors are ours
and can be printed; what is read has its digest; the bundle whose keys nobody touched is pulled
whole; after `verify --repair` the first can be pushed and read again; none of it takes a gigabyte
or ten seconds.
"""

from __future__ import annotations

import random
import resource
import tempfile
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import bundler
from bundler.errors import BundlerError, LimitExceeded
from tools.fuzz import workers
from tools.fuzz.judge import ACCEPTED, Finding, read_everything, typed
from tools.fuzz.redis_values import attack, sound, uses
from tools.shared import redis_server

MEMORY_BYTES = 1 << 30
PATIENT: dict[str, Any] = {"timeout_s": 5, "connect_timeout_s": 5}
DATABASES = 16
# A push, a read that finds what is forged, another push, and one to spare.
ATTEMPTS = 3
# An object over a limit is not damaged, and stays after a repair.
LIMITS = ("limit", "at most", "deeper than", "upgrade")


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
        errors = [
            type(outcome).__name__ for outcome in outcomes if isinstance(outcome, BundlerError)
        ]
        return errors[0] if errors else ACCEPTED

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
    # It takes ten seconds at the most, and as long again where other programs run.
    case_s = 20.0

    def __init__(self, seed: int, server: redis_server.Server) -> None:
        super().__init__(seed)
        self.urls = [server.url(db=number) for number in range(DATABASES)]
        self.address = server.address

    def ready(self, place: Path, job: int, made: Connection) -> None:
        """Fill the database, then limit memory."""
        self.case = Case(self.urls[job], redis_server.admin_of(self.address, db=job))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))

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
