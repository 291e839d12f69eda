# SPDX-License-Identifier: Apache-2.0
"""One process of the service: it does what a seed draws until it is told to end, or killed, and
writes to a journal what it begins and what was acknowledged.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.shared import kernel_copies, kernel_variants
from tools.soak.ledger import ABSENT, Change, Item, Ledger, Right

if TYPE_CHECKING:
    from bundler import Bundle, Recording, Store

# Both services merge into the first tag; the others are of one service each.
ALL = "team/all"
TAGS_EACH = 5
MOST_KERNELS = 10
MOST_NUMBER = 999_999
STORES = ("directory", "redis")
# A server that was killed while a tag was restored has all again once it has read its file.
AGAIN_S, ATTEMPTS = 0.5, 30
FILL_PUSHES = 200


class Service:
    """What one process does; everything that it finds wrong is a line of text.

    Args:
        settings: folder, number (of the service), seed, life, journal, urls (of `STORES`), cache
            and kernels (a directory that Triton wrote, and how many it has), grace_s, full (a small
            file system, or None), and the ledger of the lives before.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        import bundler

        self.number, self.grace_s = settings["number"], settings["grace_s"]
        self.own = Path(settings["folder"], f"service{self.number}")
        self.full = Path(settings["full"], str(self.number)) if settings["full"] else None
        for place in filter(None, (self.own, self.full)):
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
        self.cache = Path(settings["cache"])
        self.right = Right(self.cache)
        self.problems: list[str] = []
        self.times: dict[str, float] = {}
        self.variants: dict[str, Any] = {}
        self.bundle = self._recorded(settings["kernels"])
        self.by_key = {kernel.key: kernel for kernel in self.bundle.kernels}
        self.stores: dict[str, Store] = {
            name: bundler.open_store(url) for name, url in settings["urls"].items()
        }
        self.ledger = Ledger(settings["ledger"])
        self.chance = random.Random(f"{settings['seed']}/{self.number}/{settings['life']}")
        self.journal = os.open(settings["journal"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.acts: dict[str, tuple[int, Callable[[], str]]] = {
            "record": (3, self._record),
            "push": (8, self._push),
            "pull": (4, self._pull),
            "restore": (8, self._restore),
            "delete": (1, self._delete),
            "prune": (2, self._prune),
            "sync": (2, self._sync),
            **({"fill": (1, self._fill)} if self.full else {}),
        }

    def act(self, name: str | None = None) -> None:
        """Do one thing, and write how it ended."""
        from bundler import BundlerError, StoreUnavailable

        weights = [weight for weight, _ in self.acts.values()]
        name = name or self.chance.choices([*self.acts], weights)[0]
        self.problems, self.times, error = [], {}, None
        self._write({"begin": name})
        began = time.monotonic()
        try:
            where = self.acts[name][1]()
            self.times.setdefault(f"{name} {where}".strip(), time.monotonic() - began)
        except BundlerError as caught:
            error = type(caught).__name__
            if not (isinstance(caught, StoreUnavailable) and "redis://" in str(caught)):
                self.problems.append(f"{name}: {traceback.format_exc()}")
        except Exception:  # noqa: BLE001  # any exception is what the soak looks for
            error = "untyped"
            self.problems.append(f"{name}: not typed: {traceback.format_exc()}")
        self._write({"end": name, "error": error, "s": self.times, "problems": self.problems})

    def _write(self, line: dict[str, Any]) -> None:
        os.write(self.journal, (json.dumps(line) + "\n").encode())

    @contextlib.contextmanager
    def _changing(self, *changes: Change) -> Iterator[None]:
        self._write({"changes": changes})
        self.ledger.begin(changes)
        yield
        self.ledger.acknowledge()
        self._write({"acknowledged": True})

    def _store_and_tag(self) -> tuple[str, str]:
        store = self.chance.choice([*self.stores])
        return store, f"w{self.number}/{self.chance.randrange(TAGS_EACH)}"

    def _places(self) -> list[int]:
        known = len(self.right.keys)
        return self.chance.sample(range(known), self.chance.randint(1, min(3, known)))

    def _record(self) -> str:
        store, places = self.chance.choice([*self.stores]), self._places()
        with self._looked_up(self.cache, places).collect() as bundle:
            if {one.key for one in bundle.kernels} != {self.right.keys[place] for place in places}:
                self.problems.append(f"a recording of {len(places)} has {len(bundle)} kernels")
            items = [(place, 0) for place in places]
            with self._changing((store, ALL, "at least", items)):
                self.stores[store].push(bundle, ALL)
        return store

    def _push(self) -> str:
        store, tag = self._store_and_tag()
        items = [(place, 0) for place in self._places()]
        items += [(place, self.chance.randint(1, MOST_NUMBER)) for place in self._places()]
        merged = max(map(len, self.ledger.possible(store, tag))) < MOST_KERNELS
        if merged and self.chance.random() < 0.5:
            with self._changing((store, tag, "merge", items)):
                self.stores[store].push(self._bundle_of(items), tag)
        else:
            with self._changing((store, tag, "replace", items)):
                self.stores[store].push(self._bundle_of(items), tag, "replace")
        return store

    def _pull(self) -> str:
        from bundler import NotFound

        store, tag = self._store_and_tag()
        try:
            with self.stores[store].pull(tag) as bundle:
                found = {kernel.key for kernel in bundle.kernels}
        except NotFound:
            found = set()
        self._compare(f"pull of {tag} from {store}", store, tag, found)
        return store

    def _compare(self, what: str, store: str, tag: str, found: set[str]) -> None:
        wanted = [set(map(self.right.key, one)) for one in self.ledger.possible(store, tag)]
        if not any(one <= found if tag == ALL else one == found for one in wanted):
            sizes = " or ".join(str(len(one)) for one in wanted)
            self.problems.append(f"{what}: lost: {len(found)} kernels, expected {sizes}")

    def _restore(self) -> str:
        store, tag = self._store_and_tag()
        self.restore_tag(store, self.chance.choice([ALL, tag, tag]))
        return store

    def restore_tag(self, store: str, tag: str) -> None:
        """Restore a tag into a new directory, look at every byte, and use what is there."""
        there = self.own / "cache"
        for attempt in range(ATTEMPTS if store == "redis" else 1):
            shutil.rmtree(there, ignore_errors=True)
            time.sleep(AGAIN_S * bool(attempt))
            began = time.monotonic()
            report = self.stores[store].restore(tag, True, cache_dir=there, only="all")
            self.times[f"restore {store}"] = time.monotonic() - began
            if not report.skipped:
                break
        found = {path.name for path in there.iterdir()} if there.exists() else set()
        possible: set[Item] = set().union(*self.ledger.possible(store, tag))
        if tag == ALL:
            possible |= {(place, 0) for place in range(len(self.right.keys))}
        self._compare(f"restore of {tag} from {store}", store, tag, found)
        self.problems += [f"{tag} of {store}: {line}" for line in self.right.wrong(there, possible)]
        self._replay(there, [n for n, key in enumerate(self.right.keys) if key in found][:3])
        shutil.rmtree(there, ignore_errors=True)

    def _replay(self, cache: Path, places: list[int]) -> None:
        """Let Triton find kernels, and launch what it found on a driver without a GPU."""
        import bundler
        from bundler.runtime.launch.drivers.dry_driver import DryDriver

        began, driver = time.monotonic(), DryDriver()
        if not places:
            return
        with self._looked_up(cache, places).collect() as bundle:
            self.times["lookup"] = time.monotonic() - began
            began = time.monotonic()
            with bundler.load(bundle, driver=driver) as kernels:
                for kernel in bundle.kernels:
                    handle = kernels[kernel.name].handle_of(kernel.key)
                    handle.launch(1, 1, 1, 0, *[0] * len(handle.plan.arguments))
            self.times["replay"] = time.monotonic() - began
        if len(driver.launches) != len(places):
            self.problems.append(f"{len(driver.launches)} launches of {len(places)} kernels")

    def _looked_up(self, cache: Path, places: list[int]) -> Recording:
        """Record what Triton finds in a directory; that it compiles something is a problem."""
        import bundler

        os.environ["TRITON_CACHE_DIR"] = str(cache)
        with bundler.recording() as recording:
            for place in places:
                kernel_variants.compile_variant(*self.variants[self.right.keys[place]])
        recording.collect().close()
        if recording.report.compiles or recording.report.errors:
            self.problems.append(f"Triton compiled what is in {cache}: {recording.report}")
        return recording

    def _recorded(self, count: int) -> Bundle:
        """Record all kernels, which tells which variant has which key."""
        import bundler

        os.environ["TRITON_CACHE_DIR"] = str(self.cache)
        found = []
        for variant in kernel_variants.variants(count):
            with bundler.recording() as recording:
                kernel_variants.compile_variant(*variant)
            found.append(recording.collect())
            self.variants[found[-1].kernels[0].key] = variant
        return bundler.merge(found)

    def _delete(self) -> str:
        store, tag = self._store_and_tag()
        with self._changing((store, tag, "delete", None)):
            self.stores[store].delete_tag(tag)
        return store

    def _prune(self) -> str:
        store = self.chance.choice([*self.stores])
        report = self.stores[store].prune(grace_s=self.grace_s)
        self.problems += [f"prune of {store}: {tag}: {why}" for tag, why in report.unfollowed]
        return store

    def _sync(self) -> str:
        from bundler import NotFound

        source, target = self.chance.sample([*self.stores], 2)
        tags = [f"w{self.number}/{number}" for number in range(TAGS_EACH)]
        maybe_none = all(ABSENT in self.ledger.possible(source, tag) for tag in tags)
        with (
            contextlib.suppress(*[NotFound] * maybe_none),
            self._changing(*((target, tag, "copy", source) for tag in tags)),
        ):
            report = self.stores[source].sync_to(self.stores[target], [f"w{self.number}/*"])
            self.problems += [f"sync to {target}: {tag}: {why}" for tag, why in report.failed]
        return f"to {target}"

    def _fill(self) -> str:
        """Push and restore until the disk is full: what was acknowledged is there, and whole."""
        import bundler

        assert self.full is not None
        pushed: dict[str, list[Item]] = {}
        with bundler.open_store(f"file://{self.full}/store") as store:
            with contextlib.suppress(bundler.StoreFull):
                for number in range(FILL_PUSHES):
                    place = number % len(self.right.keys)
                    items = [(place, self.chance.randint(1, MOST_NUMBER))]
                    store.push(self._bundle_of(items), f"t{number}")
                    pushed[f"t{number}"] = items
                self.problems.append("the small disk was never full")
            with contextlib.suppress(bundler.StoreFull):
                store.restore("t0", True, cache_dir=self.full / "cache", only="all")
            left = [*self.full.glob("store/tmp/*"), *self.full.glob("cache/tmp.*")]
            self.problems += [f"the full disk: left over: {path}" for path in left]
            self._check_full(self.full, store, pushed)
        shutil.rmtree(self.full)
        self.full.mkdir()
        return ""

    def _check_full(self, full: Path, store: Store, pushed: dict[str, list[Item]]) -> None:
        for tag, items in pushed.items():
            store.restore(tag, cache_dir=self.own / "full", only="all")
            if not (self.own / "full" / self.right.key(items[0])).is_dir():
                self.problems.append(f"the full disk: {tag} is lost")
        restored = [items[0] for items in pushed.values()]
        for place in (self.own / "full", full / "cache"):
            found = self.right.wrong(place, restored)
            self.problems += [f"the full disk: {line}" for line in found]
        shutil.rmtree(self.own / "full", ignore_errors=True)

    def _bundle_of(self, items: list[Item]) -> Bundle:
        from bundler import Bundle
        from bundler.format.bundle import MemoryBlobs
        from bundler.format.digest import sha256
        from bundler.format.manifest import Content, Observed

        blobs: dict[bytes, bytes] = {}
        kernels = []
        for place, number in items:
            kernel = self.by_key[self.right.keys[place]]
            if number:
                kernel = kernel_copies.copy_of(self.bundle, kernel, number, blobs)
            else:
                blobs |= {sha256(data): data for data in map(self.bundle.read, kernel.artifacts)}
            kernels.append(kernel)
        return Bundle(Content.of(kernels), Observed(), MemoryBlobs(blobs))

    def close(self) -> None:
        """Close what is open."""
        for store in self.stores.values():
            store.close()
        self.bundle.close()
        os.close(self.journal)


def main() -> int:
    """Act until SIGTERM."""
    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: stopping.append(number))
    service = Service(json.loads(sys.stdin.readline()))
    while not stopping:
        service.act()
    service.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
