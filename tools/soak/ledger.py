# SPDX-License-Identifier: Apache-2.0
"""What must be in the stores, and with which bytes: known without asking the package.

A service notes a change of a tag before it makes it, and that it was acknowledged. One that was
never acknowledged may have happened or not, so a tag has possible contents.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

GROUP = "__grp__"
# A kernel: the place of the compiled one, and the number of the copy; 0 is the compiled one itself.
Item = tuple[int, int]
Content = frozenset[Item]
ABSENT: Content = frozenset()
# Store, tag, how it is changed (`replace`, `merge`, `at least`, `delete`, `copy`), and the items,
# or the store that it is copied from.
Change = tuple[str, str, str, Any]


class Ledger:
    """The possible contents of each tag of each store, as one service has changed them."""

    def __init__(self, data: Sequence[Any] = ()) -> None:
        self._tags = {
            (store, tag): {frozenset(map(_item, one)) for one in found}
            for store, tag, found in data
        }
        self._pending: dict[tuple[str, str], set[Content]] = {}

    def possible(self, store: str, tag: str) -> set[Content]:
        """Return what the tag may name."""
        return self._tags.get((store, tag), {ABSENT})

    def begin(self, changes: Iterable[Change]) -> None:
        """Note changes that are about to be made: from now on before and after are possible."""
        self._pending = {(one[0], one[1]): self._after(*one) for one in changes}
        for store, tag, how, _ in changes:
            # A tag that both services merge into holds at least what was there for certain.
            if how != "at least":
                self._tags[store, tag] = self.possible(store, tag) | self._pending[store, tag]

    def acknowledge(self) -> None:
        """Note that what was begun last was done."""
        self._tags |= self._pending
        self._pending = {}

    def _after(self, store: str, tag: str, how: str, value: Any) -> set[Content]:
        before = self.possible(store, tag)
        if how == "delete":
            return {ABSENT}
        if how == "copy":
            source = self.possible(value, tag)
            return (source - {ABSENT}) | (before if ABSENT in source else set())
        items = frozenset(map(_item, value))
        return {items} if how == "replace" else {old | items for old in before}

    def hear(self, line: dict[str, Any]) -> None:
        """Note a line of a journal."""
        if "changes" in line:
            self.begin(line["changes"])
        if "acknowledged" in line:
            self.acknowledge()

    def to_json(self) -> list[Any]:
        """Return all as JSON has it, for the next life of the service."""
        return [[*key, [sorted(one) for one in found]] for key, found in self._tags.items()]


def _item(pair: Sequence[int]) -> Item:
    return pair[0], pair[1]


class Right:
    """The right bytes of each kernel and of each copy, from the directory that Triton wrote."""

    def __init__(self, cache: Path) -> None:
        self.keys = sorted(path.parent.name for path in cache.glob(f"*/{GROUP}*"))
        self._files = [
            {path.name: path.read_bytes() for path in (cache / key).iterdir()} for key in self.keys
        ]

    def key(self, item: Item) -> str:
        """Return under which key an item is restored."""
        new = self._hashes(item)[1]
        return base64.b32encode(bytes.fromhex(new)).decode().rstrip("=")

    def wrong(self, cache: Path, items: Iterable[Item]) -> Iterator[str]:
        """Say what is wrong with what can be seen in a cache directory; kernels that are not there
        are not missed.
        """
        known = {self.key(item): item for item in items}
        for directory in sorted(cache.iterdir()) if cache.exists() else ():
            if directory.name not in known:
                yield f"{directory.name} is none of the kernels that were pushed"
            elif {path.name: path.read_bytes() for path in directory.iterdir()} != dict(
                self._expected(known[directory.name], directory)
            ):
                yield f"{directory.name} has wrong bytes, or lacks files"

    def _expected(self, item: Item, directory: Path) -> Iterator[tuple[str, bytes]]:
        place, number = item
        old, new = self._hashes(item)
        for name, data in self._files[place].items():
            if name.startswith(GROUP):
                children = json.loads(data)["child_paths"]
                there = {child: str(directory / child) for child in children}
                yield name, json.dumps({"child_paths": there}).encode()
            elif number and not name.endswith(".json"):
                yield name, data + f"//{number:6}\n".encode()
            else:
                yield name, data.replace(old.encode(), new.encode())

    def _hashes(self, item: Item) -> tuple[str, str]:
        place, number = item
        key = self.keys[place]
        old = base64.b32decode(key + "=" * (-len(key) % 8)).hex()
        return old, hashlib.sha256(f"{old} {number}".encode()).hexdigest() if number else old
