# SPDX-License-Identifier: Apache-2.0
"""The cases of the store: put, push, tag and prune on a local directory.

The judge knows the layout of the directory (backends/local.py) and of refs, and nothing else: which
objects there must be in the end, with which bytes, is what the same work leaves where nothing
disturbs it; that this restores to the bytes that Triton compiled is checked through a cache
directory, with the judge of restore.
"""

# ruff: noqa: D102  # the base class says what each method is for

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.crash.cases import Case, Files, Materials, Problem, Restore, Tree, tree

if TYPE_CHECKING:
    from bundler.lifecycle.machine_store import Store
    from bundler.store.bundle_store import PushMode

TAG = "team/demo"
DAY_S = 24 * 3600
_OBJECT = re.compile(r"store/data/(.+)/\+[0-9a-f]{2}/([^/]+)")
_REF = re.compile(r"store/refs/(.+)/\+gen/(\d{10})")
_TEMPORARY = re.compile(r"store/tmp/\d+\.[0-9a-f]{16}")
# Hints, which may lead nowhere or be missing: by them a kernel is found without its tag.
_INDEXES = ("v1/b/", "v1/l/")


def objects(found: Tree) -> Files:
    """Return the objects of a store by key."""
    paths = {path: match for path in found if (match := _OBJECT.fullmatch(path)) is not None}
    return {
        f"{match[1]}/{match[2]}": data
        for path, match in paths.items()
        if (data := found[path]) is not None
    }


def refs(found: Tree) -> Files:
    """Return the values of the refs that are set: of each the highest number counts."""
    latest: dict[str, tuple[int, bytes]] = {}
    for path, data in found.items():
        match = _REF.fullmatch(path)
        if match is not None and data is not None:
            latest[match[1]] = max(latest.get(match[1], (0, b"")), (int(match[2]), data))
    values = {}
    for key, (_, data) in latest.items():
        tokens, is_set = struct.unpack_from("<H?", data)
        if is_set:
            values[key] = data[3 + 8 * tokens :]
    return values


def modes(root: Path) -> dict[str, int]:
    """Return the permissions of every directory of a store."""
    store = root / "store"
    folders = [Path(folder) for folder, _, _ in os.walk(store)]
    return {
        os.path.relpath(folder, root): stat.S_IMODE(folder.stat().st_mode) for folder in folders
    }


class Stored(Case):
    """Work on a store directory; `before` makes the starting state, both are told the
    store's root.
    """

    def __init__(
        self,
        entry: str,
        state: str,
        before: Callable[[Path], None],
        work: Callable[[Path], None],
        *,
        damaged: bool = False,
    ) -> None:
        super().__init__(entry, state)
        self._make, self._work, self._damaged = before, work, damaged
        self._objects: Files = {}
        self._refs: Files = {}
        self._modes: dict[str, int] = {}

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        from bundler import BundlerError
        from bundler.backends.backend_errors import BackendError

        return (BackendError,) if self.entry == "put" else (BundlerError,)

    def prepare(self, root: Path) -> None:
        self._make(root)
        undisturbed = root.with_name("undisturbed")
        shutil.copytree(root, undisturbed)
        self.work(undisturbed)
        after = tree(undisturbed)
        self._objects, self._refs, self._modes = objects(after), refs(after), modes(undisturbed)
        shutil.rmtree(undisturbed)

    def work(self, root: Path) -> None:
        self._work(root)

    def wrong_now(self, root: Path, before: Tree) -> Iterator[Problem]:
        now = tree(root)
        found, old = objects(now), objects(before)
        for key, data in found.items():
            allowed = {old.get(key), self._objects.get(key)} - {None}
            if data not in allowed:
                partial = any(whole is not None and whole.startswith(data) for whole in allowed)
                yield Problem(
                    "partial" if partial else "wrong bytes",
                    f"{key}: {len(data)} bytes that nobody wrote",
                )
        yield from self._dangling(now, before)
        for path, content in now.items():
            known = (
                _OBJECT.fullmatch(path)
                or _REF.fullmatch(path)
                or path in before
                or path.startswith("cache")
            )
            if content is not None and not known and not self.is_temporary(path):
                yield Problem("leftover", f"{path} is none of ours")
        if not self._damaged and self.entry != "put" and (root / "store").exists():
            report = _opened(root, lambda store: store.verify())
            if not report.sound:
                yield Problem("partial", f"verify finds {[*report.damaged, *report.dangling][0]}")

    def _dangling(self, now: Tree, before: Tree) -> Iterator[Problem]:
        """A ref has the old or the new value, and what the value, or a new manifest, reaches is
        there.
        """
        found, values = objects(now), refs(now)
        if values not in (refs(before), self._refs):
            yield Problem("wrong bytes", f"refs are {values}")
        if self._damaged:
            # between removing a damaged object and sending it again the tag lacks it; readers skip
            # that kernel
            return
        moved = values == self._refs != refs(before)
        new_manifest = any(key.startswith("v1/m/") and key not in objects(before) for key in found)
        complete = self._objects if moved or new_manifest or self.entry == "prune" else {}
        named = {key for key in complete if not key.startswith(_INDEXES)}
        for key in sorted(named - set(found)):
            yield Problem("partial", f"{key} is named and not there")
        if self.entry != "prune":
            for key in sorted(set(objects(before)) - set(found)):
                yield Problem("partial", f"{key} was there before and is gone")

    def wrong_when_done(self, root: Path, before: Tree) -> Iterator[Problem]:
        now = tree(root)
        if objects(now) != self._objects:
            differing = {
                k
                for k in {*objects(now), *self._objects}
                if objects(now).get(k) != self._objects.get(k)
            }
            yield Problem(
                "unfinished",
                f"objects differ from those of an undisturbed run: {sorted(differing)[:3]}",
            )
        if refs(now) != self._refs:
            yield Problem("unfinished", f"refs are {refs(now)}, expected {self._refs}")
        for folder, mode in modes(root).items():
            if mode != self._modes.get(folder, mode):
                yield Problem(
                    "unfinished", f"{folder} has mode {mode:o}, expected {self._modes[folder]:o}"
                )

    def is_temporary(self, path: str) -> bool:
        return _TEMPORARY.fullmatch(path) is not None


class Pushed(Stored):
    """Work on a store of bundles whose tag can be restored, and shown to Triton."""

    def __init__(
        self,
        materials: Materials,
        entry: str,
        state: str,
        before: Callable[[Path], None],
        work: Callable[[Path], None],
    ) -> None:
        super().__init__(entry, state, before, work, damaged=state == "damaged")
        self._restored = Restore("from the store", materials, lambda _, __: None)

    def sweep(self, root: Path) -> None:
        # A push that has nothing to send writes nothing, and then does not look at temporary files
        # either.
        if self.entry == "prune":
            self.work(root)
        else:
            _opened(root, lambda store: store.prune())

    def reveal(self, root: Path) -> Iterator[Problem]:
        from bundler import BundlerError

        shutil.rmtree(root / "cache", ignore_errors=True)
        (root / "cache").mkdir()
        try:
            _opened(
                root,
                lambda store: store.restore(
                    TAG, True, cache_dir=root / "cache", only="all", trust="code"
                ),
            )
        except BundlerError as error:
            if not self._damaged:
                yield Problem("unfinished", f"restoring the tag: {error}")
        yield from (
            problem for problem in self._restored.wrong_now(root, {}) if problem.kind != "leftover"
        )

    def triton_caches(self) -> list[str]:
        return ["cache"]


def _opened(root: Path, act: Callable[[Store], Any]) -> Any:
    import bundler

    with bundler.open_store(f"file://{root}/store") as store:
        return act(store)


def _nothing(root: Path) -> None:
    del root


def _in_turn(*steps: Callable[[Path], None]) -> Callable[[Path], None]:
    def all_of_them(root: Path) -> None:
        for step in steps:
            step(root)

    return all_of_them


def _leave_stale(root: Path) -> None:
    """What three writers left that were killed long ago."""
    for number in range(3):
        path = root / "store" / "tmp" / f"1.{number:016x}"
        path.write_bytes(b"half an object")
        os.utime(path, (0, 0))


def _age_objects(root: Path) -> None:
    """Nobody touched what is there for two days."""
    then = time.time() - 2 * DAY_S
    for path in (root / "store" / "data").rglob("*"):
        if path.is_file():
            os.utime(path, (then, then))


def _flip_a_bit(root: Path) -> None:
    unit = min((root / "store" / "data" / "v1" / "u").rglob("*/*"))
    data = bytearray(unit.read_bytes())
    data[len(data) // 2] ^= 1
    unit.write_bytes(data)


def puts() -> list[Case]:
    """Return the cases of put: eight objects of growing size."""
    contents = [f"object {number}\n".encode() * (40 << number) for number in range(8)]
    items = {f"v1/u/{hashlib.sha256(data).hexdigest()}": data for data in contents}

    def put(count: int, *, group: bool = False) -> Callable[[Path], None]:
        def work(root: Path) -> None:
            from bundler.backends.file_steps import GROUP, PRIVATE
            from bundler.backends.local import LocalBackend

            with LocalBackend(str(root / "store"), GROUP if group else PRIVATE) as backend:
                backend.put(dict(list(items.items())[:count]))

        return work

    return [
        Stored("put", "absent", _nothing, put(8)),
        Stored("put", "half", put(4), put(8)),
        Stored("put", "of a group", _nothing, put(8, group=True)),
        Stored("put", "leftovers", _in_turn(put(1), _leave_stale), put(8)),
    ]


def pushes(materials: Materials) -> list[Case]:
    """Return the cases of push, tag and prune; `part` and `rest` are the halves of `small`."""

    def push(
        bundle: str, tag: str | None = TAG, mode: PushMode = "merge"
    ) -> Callable[[Path], None]:
        def work(root: Path) -> None:
            import bundler

            with bundler.Bundle.load(materials.folder / f"{bundle}.tbundle") as opened:
                _opened(root, lambda store: store.push(opened, tag, mode))

        return work

    def prune(root: Path) -> None:
        _opened(root, lambda store: store.prune())

    def set_limit(root: Path) -> None:
        """So that about half of what is loose has to go."""
        found = _opened(root, lambda store: store.stats())
        loose_bytes = found.unit_bytes + found.manifest_bytes - found.tagged_bytes
        (root / "limit").write_text(str(found.tagged_bytes + loose_bytes // 2))

    def prune_to_limit(root: Path) -> None:
        _opened(root, lambda store: store.prune(max_bytes=int((root / "limit").read_text())))

    def untag(root: Path) -> None:
        _opened(root, lambda store: store.delete_tag(TAG))

    replace = push("small", mode="replace")
    # More generations of the tag than are kept, so that the next swap cleans.
    often = _in_turn(*[push(bundle, mode="replace") for bundle in ("part", "rest") * 5])
    loose = _in_turn(push("rest", None), push("inductor", None), push("part"), _age_objects)
    listed = [
        ("push", "damaged", _in_turn(push("small"), _flip_a_bit), push("small")),
        ("push", "absent", _nothing, push("small")),
        ("push", "merge", push("part"), push("rest")),
        ("push", "replace", push("part"), replace),
        ("push", "untagged", push("part"), push("small", None)),
        ("push", "leftovers", _in_turn(push("part"), _leave_stale), push("small")),
        ("tag", "set", push("small", None), push("small")),
        ("tag", "moved", _in_turn(push("small", None), push("part")), replace),
        ("tag", "moved often", _in_turn(push("small", None), often), replace),
        ("tag", "deleted", push("small"), untag),
        ("tag", "leftovers", _in_turn(push("small", None), _leave_stale), push("small")),
        ("prune", "loose bundles", loose, prune),
        ("prune", "to a limit", _in_turn(loose, set_limit), prune_to_limit),
        ("prune", "leftovers", _in_turn(loose, _leave_stale), prune),
    ]
    return [Pushed(materials, *one) for one in listed]


class Pulling(Restore):
    """A restore from a store that lies elsewhere."""

    def work(self, root: Path) -> None:
        _opened(
            self.materials.folder,
            lambda store: store.restore(TAG, cache_dir=root / "cache", only="all", trust="code"),
        )
