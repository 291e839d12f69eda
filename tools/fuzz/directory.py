# SPDX-License-Identifier: Apache-2.0
"""Puts what is no object into directory stores and caches, and uses them; exit status 1 when a
promise did not hold.

    python -m tools.fuzz directory [--count N] [--seed S] [--jobs N]

Each case is a copy of one store and one cache directory in which a few files, directories and names
were replaced: by named pipes, sockets, links, devices, directories, files of many gigabytes, other
objects and damaged ones.  Then everything is done with them that a user could do, in any order.
Promised: each call returns or raises an error of ours, in time and in little memory; what comes out
of a store has the bytes that went in; nothing that a link leads to is changed.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import bundler
from bundler.errors import BundlerError
from bundler.format.bundle import Bundle
from bundler.lifecycle.machine_store import Store
from tools.fuzz import workers
from tools.fuzz.container import draft, kernel
from tools.fuzz.judge import Finding
from tools.fuzz.mutations import flip

HUGE_BYTES = 40 << 30
TAG = "team/t"
_NUMBERS = ("7", "\u0663\u0663", "00000000001", "9" * 250, "9" * 15, "0000000099", "-1")
ODD_NAMES = (*_NUMBERS, "x\n", "\udcff", "+gen", "tmp")


# ---------------------------------------------------------------- What is put in place of something


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _socket(path: Path) -> None:
    # The name of a socket is short; its directory is reached by a descriptor.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(f"/proc/self/fd/{folder}/{path.name[:40]}")
        os.rename(path.parent / path.name[:40], path)
    finally:
        os.close(folder)


def _sparse(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(HUGE_BYTES)


def _full_directory(path: Path) -> None:
    path.mkdir()
    (path / "0000000009").write_bytes(b"in the way")


#: What can stand in place of a file, by name; each is given a path at which nothing is.
HOSTILE: dict[str, Callable[[Path], Any]] = {
    "named pipe": os.mkfifo,
    "socket": _socket,
    "sparse file": _sparse,
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "directory": lambda path: path.mkdir(),
    "full directory": _full_directory,
    "empty file": lambda path: path.write_bytes(b""),
}


def replace(path: Path, kind: str) -> None:
    """Put something hostile in place of what is at a path."""
    _remove(path)
    HOSTILE[kind](path)


def grow(path: Path) -> None:
    """Make a file larger than any object, and leave its beginning as it is."""
    os.truncate(path, HUGE_BYTES)


# -------------------------------------------------------------------------------------------- Cases


class Template:
    """A sound store and a sound cache directory, to be copied for each case."""

    def __init__(self, place: Path) -> None:
        self.store, self.cache = place / "template" / "store", place / "template" / "cache"
        made = draft()
        made.kernels.append(kernel("three"))
        self.bundle = Bundle.from_bytes(made.join())
        self.single = Bundle.from_bytes(draft().join())
        self.contents = contents(self.bundle)
        self.keys = [found.key for found in self.bundle.kernels]
        with bundler.open_store(f"file://{self.store}") as store:
            store.push(self.single, TAG)
            store.push(self.bundle, TAG)
            store.push(self.single, "other")
            store.kernel_records().publish(self.bundle)
            store.file_records().publish("name", "k.autotune.json", b"{}")
            store.kernel_records().tell_failure(self.keys[0], "it did not compile")
            store.kernel_records().lease(self.keys[0], 600)
        bundler.restore(self.bundle, str(self.cache), only="all")


def contents(bundle: Bundle) -> dict[tuple[str, str], bytes]:
    """Return the bytes of every file of every kernel."""
    return {(k.key, a.filename): bundle.read(a) for k in bundle.kernels for a in k.artifacts}


class Case:
    """One damaged copy, and what is done with it."""

    def __init__(
        self, template: Template, place: Path, chance: random.Random, done: list[str]
    ) -> None:
        self.template, self.chance, self.done = template, chance, done
        self.root, self.cache = place / "store", place / "cache"
        self.outside = place / "outside"
        for folder in (self.root, self.cache):
            shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(template.store, self.root)
        shutil.copytree(template.cache, self.cache)
        self.outside.write_bytes(b"untouched")

    def damage(self) -> None:
        """Put something hostile in a few places."""
        for top in (self.root, self.cache):
            counts = [0, 1, 1, 2, 4] if top == self.cache else [1, 1, 2, 5]
            for _ in range(self.chance.choice(counts)):
                # Files are what is read, and there are more of them; a directory takes all in it
                # along.
                found = sorted(
                    path
                    for path in top.rglob("*")
                    if path.parent != top or self.chance.random() < 0.2
                )
                if found:
                    self._damage_one(self.chance.choice(found))

    def _damage_one(self, path: Path) -> None:
        chance = self.chance
        kind = chance.choice(
            [*HOSTILE, *HOSTILE, "grown", "flipped", "other", "cut", "name", "link to outside"]
        )
        self.done.append(f"{kind}: {path.relative_to(self.root.parent)}")
        plain = path.is_file() and not path.is_symlink() and path.stat().st_size < HUGE_BYTES
        if kind in HOSTILE:
            replace(path, kind)
        elif kind == "link to outside":
            _remove(path)
            path.symlink_to(self.outside)
        elif kind == "name":
            odd = path.with_name(chance.choice(ODD_NAMES))
            with contextlib.suppress(OSError):
                if chance.random() < 0.3:
                    odd.symlink_to("nowhere")
                else:
                    odd.write_bytes(b"odd")
        elif plain and kind == "grown":
            grow(path)
        elif plain and kind == "cut":
            os.truncate(path, chance.randrange(path.stat().st_size + 1))
        elif plain and kind == "flipped":
            path.write_bytes(flip(chance, path.read_bytes()))
        elif plain:
            others = [
                other
                for other in path.parent.parent.rglob("*")
                if other.is_file() and not other.is_symlink() and other.stat().st_size < HUGE_BYTES
            ]
            path.write_bytes(chance.choice(others).read_bytes() if others else b"")

    def operations(self, store: Store) -> Iterator[tuple[str, Callable[[], Any]]]:
        """Yield what a user could do, in some order, then what should mend it."""
        made, cache, records = self.template, str(self.cache), store.kernel_records()
        files, chance, digest = store.file_records(), self.chance, self.template.bundle.digest

        def prune() -> None:
            store.prune(grace_s=chance.choice([0, 3600]), dry_run=chance.random() < 0.8)

        calls: list[tuple[str, Callable[[], Any]]] = [
            ("restore", lambda: store.restore(TAG, cache_dir=cache, only="all")),
            ("restore digest", lambda: store.restore(digest, cache_dir=cache, only="all")),
            ("pull", lambda: self._right(store.pull(TAG))),
            ("pull read-only", lambda: self._right(store.pull("other", read_only=True))),
            ("tags", store.tags),
            ("stats", store.stats),
            ("verify", store.verify),
            ("prune", prune),
            ("push", lambda: store.push(made.bundle, TAG)),
            ("push another", lambda: store.push(made.single, "third")),
            ("look up", lambda: self._right(records.look_up(made.keys).bundle)),
            ("publish", lambda: self._right(records.publish(made.bundle).bundle)),
            ("recorded", lambda: list(records.recorded(9))),
            ("failure", lambda: records.failure(made.keys[0])),
            ("tell failure", lambda: records.tell_failure(made.keys[0], "again")),
            ("lease", lambda: records.lease(made.keys[0], 1)),
            ("file", lambda: (files.look_up("name"), files.publish("name", "k.so", b"x"))),
            ("delete tag", lambda: store.delete_tag("other")),
            ("check", lambda: bundler.check(made.bundle, cache, only="all")),
            ("pack", lambda: bundler.pack(cache)),
            ("restore all", lambda: bundler.restore(made.bundle, cache, only="all", trust="code")),
        ]
        self.chance.shuffle(calls)
        yield from calls[: self.chance.choice([4, 10, len(calls)])]
        yield "repair", lambda: store.verify(repair=True)
        yield "replace", lambda: store.push(made.bundle, TAG, mode="replace")
        yield "mended", lambda: self._mended(store)

    def _right(self, found: Bundle) -> None:
        with found:
            for key in [k.key for k in found.kernels]:
                with contextlib.suppress(BundlerError):  # said, and not wrong
                    whole = contents(found.select())
                    self._check({at: data for at, data in whole.items() if at[0] == key})

    def _check(self, got: dict[tuple[str, str], bytes]) -> None:
        wrong = [at for at, data in got.items() if self.template.contents.get(at) != data]
        if wrong:
            raise Finding(f"other bytes came out: {wrong[0]}")

    def _mended(self, store: Store) -> None:
        with store.pull(TAG) as found:
            self._check(contents(found))
            if contents(found) != self.template.contents:
                raise Finding("a push that raised nothing left something out")

    def run(self) -> Counter[str]:
        """Do everything; returns how often each came out well or with which error."""
        outcomes: Counter[str] = Counter()
        self.damage()
        replaced = False
        try:
            with bundler.open_store(f"file://{self.root}") as store:
                for name, call in self.operations(store):
                    if name == "mended" and not replaced:
                        continue
                    try:
                        call()
                        outcomes["fine"] += 1
                        replaced = replaced or name == "replace"
                    except BundlerError as error:
                        outcomes[type(error).__name__] += 1
                        if name == "mended":
                            said = f"a push that raised nothing cannot be pulled: {error}"
                            raise Finding(said) from error
                        str(error).encode("utf-8", "surrogateescape")
        except BundlerError as error:
            outcomes[type(error).__name__] += 1
        if self.outside.read_bytes() != b"untouched":
            raise Finding("what a link leads to was changed")
        return outcomes


class Directories(workers.Fuzzer):
    """Copies of one store and one cache directory, each damaged in another way."""

    name = "directory"
    memory_bytes = 1 << 30  # the libraries take the most of it
    case_s = 20.0
    accepts = "fine"

    def ready(self, place: Path, job: int, made: Connection) -> None:
        """Make what is copied."""
        self.place, self.template = place, Template(place)

    def judge(self, number: int, begin: Callable[[], None], done: list[str]) -> Counter[str]:
        """Damage a copy, and use it."""
        begin()
        chance = random.Random(f"{self.seed}/{number}")
        return Case(self.template, self.place, chance, done).run()


def main() -> int:
    """Fuzz and print the table."""
    options = workers.parser(__doc__, 2000).parse_args()
    return workers.run(Directories(options.seed), options)
