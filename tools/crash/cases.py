# SPDX-License-Identifier: Apache-2.0
"""What the crash matrix stops: `Case`, an entry point in a starting state with its judge; those of
restore and save, and of put, push, tag and prune in a store that is a directory.

To add an entry point: subclass `Case`, say what its process does (`work`), how the place looks
before (`prepare`), what must hold at every instant (`wrong_now`) and after success
(`wrong_when_done`) and which names are temporary, and append its instances to `every_case`.  `work` runs in a process without Triton; everything it writes lies below the `root` it
is given.  Judges share no code with the package.

The judge of a store knows the layout of the directory (backends/local.py) and of refs, and nothing
else: which objects there must be in the end, with which bytes, is what the same work leaves where
nothing disturbs it; that this restores to the bytes that Triton compiled is checked through a cache
directory, with the judge of restore.
"""

# ruff: noqa: D102  # the base class says what each method is for

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import shutil
import stat
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

if TYPE_CHECKING:
    from bundler.lifecycle.machine_store import Store
    from bundler.store.bundle_store import PushMode

Kind = Literal["partial", "wrong bytes", "untyped error", "unfinished", "leftover", "shim"]
Tree = dict[str, bytes | None]
Files = dict[str, bytes]

KINDS: tuple[Kind, ...] = get_args(Kind)
GROUP = "__grp__"
LAUNCH_SUFFIXES = (".cubin", ".hsaco", ".json")
_KEY = re.compile(r"[A-Z2-7]{52}")
TAG = "team/demo"
DAY_S = 24 * 3600
_OBJECT = re.compile(r"store/data/(.+)/\+[0-9a-f]{2}/([^/]+)")
_REF = re.compile(r"store/refs/(.+)/\+gen/(\d{10})")
_TEMPORARY = re.compile(r"store/tmp/\d+\.[0-9a-f]{16}")
# Hints, which may lead nowhere or be missing: by them a kernel is found without its tag.
_INDEXES = ("v1/b/", "v1/l/")


@dataclass(frozen=True)
class Problem:
    """A promise that did not hold."""

    kind: Kind
    text: str


def tree(root: Path) -> Tree:
    """Return relative path -> bytes of everything below a directory; None for a directory."""
    found: Tree = {}
    for folder, folders, names in os.walk(root):
        inside = os.path.relpath(folder, root)
        for name in folders + names:
            path = os.path.join(folder, name)
            relative = name if inside == "." else f"{inside}/{name}"
            if os.path.islink(path):
                found[relative] = b"-> " + os.fsencode(os.readlink(path))
            else:
                found[relative] = None if name in folders else Path(path).read_bytes()
    return found


def below(found: Tree, folder: str) -> Tree:
    """Return what lies in one folder of a tree."""
    return {
        path[len(folder) + 1 :]: data
        for path, data in found.items()
        if path.startswith(f"{folder}/")
    }


def shorten(constants: Mapping[str, float]) -> None:
    """Set constants of modules in this process: full dotted name -> value."""
    for name, value in constants.items():
        module, _, attribute = name.rpartition(".")
        setattr(importlib.import_module(module), attribute, value)


class Case(ABC):
    """One entry point in one starting state."""

    #: Constants that are shortened for the run that sweeps: a directory's ctime cannot be set back,
    #: as its mtime can.
    shortened: ClassVar[Mapping[str, float]] = {}

    def __init__(self, entry: str, state: str) -> None:
        self.entry, self.state = entry, state

    @property
    def name(self) -> str:
        """What the table and the command line call it."""
        return f"{self.entry}/{self.state}"

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """Errors that `work` may end with when the file system refuses."""
        from bundler import BundlerError

        return (BundlerError,)

    @abstractmethod
    def prepare(self, root: Path) -> None:
        """Make the starting state in an empty directory; what needs a path must use this one."""

    @abstractmethod
    def work(self, root: Path) -> None:
        """Do it, once."""

    @abstractmethod
    def wrong_now(self, root: Path, before: Tree) -> Iterator[Problem]:
        """Yield what a reader would see that is neither the old nor the new state."""

    @abstractmethod
    def wrong_when_done(self, root: Path, before: Tree) -> Iterator[Problem]:
        """Yield what is missing after success."""

    @abstractmethod
    def is_temporary(self, path: str) -> bool:
        """Tell whether a relative path is one of our temporary names, or lies below one."""

    def sweep(self, root: Path) -> None:
        """Do something that is to remove stale leftovers; the work itself unless there is
        better.
        """
        self.work(root)

    def reveal(self, root: Path) -> Iterator[Problem]:
        """Put what programs would use where Triton can look; called for the runs that it sees."""
        del root
        return iter(())

    def triton_caches(self) -> list[str]:
        """Return the directories below root that Triton may be asked to look kernels up in."""
        return []


# ------------------------------------------------------------------------------------------ restore


@dataclass(frozen=True)
class Materials:
    """What `triton_process.py make` left: two builds of the same kernels and bundles of the
    first.
    """

    folder: Path

    def build(self, whose: str, key: str, root: str) -> Files:
        """Return the files of a kernel of the cache `ours` or `theirs`, as Triton would have
        written them below `root`.
        """
        place, found = self.folder / whose, {}
        for path in sorted((place / key).iterdir()):
            if not path.name.startswith(GROUP):
                found[path.name] = path.read_bytes().replace(os.fsencode(place), os.fsencode(root))
        return found

    @property
    def keys(self) -> list[str]:
        """The kernels, sorted."""
        return sorted(path.parent.name for path in (self.folder / "ours").glob(f"*/{GROUP}*.json"))

    def singles(self, bundle: str) -> Files:
        """Return relative path -> bytes of what a bundle holds beside kernels."""
        listed: dict[str, str] = json.loads((self.folder / "singles.json").read_text())[bundle]
        return {path: text.encode() for path, text in listed.items()}

    def placed(self, bundle: str) -> dict[str, str]:
        """Return relative kernel directory -> key for a restore of a bundle."""
        found: dict[str, str] = json.loads((self.folder / "placed.json").read_text())[bundle]
        return found


def plant(directory: Path, files: Files) -> None:
    """Write a kernel directory as Triton does, with its group file."""
    directory.mkdir(parents=True)
    for name, data in files.items():
        (directory / name).write_bytes(data)
    metadata = next(name for name in files if name.endswith(".json"))
    children = {name: str(directory / name) for name in files}
    (directory / f"{GROUP}{metadata}").write_text(json.dumps({"child_paths": children}))


def not_whole(directory: Path, files: Files) -> Problem | None:
    """Say why a kernel directory is not exactly these files and a group file that names them: an
    independent reader.
    """

    def partial(text: str) -> Problem:
        return Problem("partial", f"{directory.name}: {text}")

    there = sorted(os.listdir(directory))
    groups = [name for name in there if name.startswith(GROUP)]
    if len(groups) != 1:
        return partial(f"{len(groups)} group files")
    try:
        children = json.loads((directory / groups[0]).read_bytes())["child_paths"]
    except (ValueError, KeyError) as error:
        return partial(f"group file cannot be read: {error!r}")
    if children != {name: str(directory / name) for name in files}:
        return partial(f"the group file lists {sorted(children)}, expected {sorted(files)}")
    if there != sorted([*files, *groups]):
        return partial(f"holds {there}, expected {sorted(files)} and the group file")
    for name, data in files.items():
        found = (directory / name).read_bytes()
        if hashlib.sha256(found).digest() != hashlib.sha256(data).digest():
            kind: Kind = "partial" if data.startswith(found) else "wrong bytes"
            text = f"{len(found)} bytes that are not the expected {len(data)}"
            return Problem(kind, f"{directory.name}/{name}: {text}")
    return None


class Restore(Case):
    """`bundler.restore` of one bundle into one cache directory."""

    shortened: ClassVar[Mapping[str, float]] = {
        "bundler.lifecycle.cache_directory.STALE_AFTER_S": -1
    }

    def __init__(
        self,
        state: str,
        materials: Materials,
        prepared: Callable[[Restore, Path], None],
        bundle: str = "small",
        keep: Literal["all", "launch"] = "all",
    ) -> None:
        super().__init__("restore", state)
        self.materials, self.bundle, self.keep = materials, bundle, keep
        self._prepared = prepared

    def prepare(self, root: Path) -> None:
        self._prepared(self, root / "cache")

    def work(self, root: Path) -> None:
        import bundler

        bundler.restore(
            self.materials.folder / f"{self.bundle}.tbundle",
            root / "cache",
            keep=self.keep,
            only="all",
            trust="code",
        )

    def files(self, root: Path, place: str) -> Files:
        """Return what a kernel directory of ours must hold."""
        key = self.materials.placed(self.bundle)[place]
        whole = self.materials.build("ours", key, str((root / "cache" / place).parent))
        return {
            n: data
            for n, data in whole.items()
            if self.keep == "all" or n.endswith(LAUNCH_SUFFIXES)
        }

    def wrong_now(self, root: Path, before: Tree) -> Iterator[Problem]:
        now, cache = tree(root), root / "cache"
        allowed = {"cache"}
        for place in self.materials.placed(self.bundle):
            allowed |= _and_parents(f"cache/{place}")
            if (cache / place).is_dir() and below(now, f"cache/{place}") != below(
                before, f"cache/{place}"
            ):
                problem = not_whole(cache / place, self.files(root, place))
                if problem is not None:
                    yield problem
        for name, data in self.materials.singles(self.bundle).items():
            allowed |= _and_parents(f"cache/{name}")
            found = now.get(f"cache/{name}")
            if found is not None and found != data and found != before.get(f"cache/{name}"):
                yield Problem(
                    "partial" if data.startswith(found) else "wrong bytes",
                    f"{name}: {len(found)} bytes",
                )
        for path in sorted(set(now) - set(before)):
            if (
                path not in allowed
                and _kernel_of(path) not in allowed
                and not self.is_temporary(path)
            ):
                yield Problem("leftover", f"{path} is none of ours")

    def wrong_when_done(self, root: Path, before: Tree) -> Iterator[Problem]:
        now, cache = tree(root), root / "cache"
        for place, key in self.materials.placed(self.bundle).items():
            if not (cache / place).is_dir():
                yield Problem("unfinished", f"{place} is not there")
                continue
            problem, earlier = not_whole(cache / place, self.files(root, place)), f"cache/{place}"
            if problem and not self._kept(root, place, key, below(before, earlier), now):
                yield Problem("unfinished", problem.text)
        for name, data in self.materials.singles(self.bundle).items():
            if now.get(f"cache/{name}") != data:
                yield Problem("unfinished", f"{name} is not there")

    def _kept(self, root: Path, place: str, key: str, before: Tree, now: Tree) -> bool:
        """A complete build that was there before stays as it was."""
        parent = str((root / "cache" / place).parent)
        builds = [self.materials.build(whose, key, parent) for whose in ("ours", "theirs")]
        return below(now, f"cache/{place}") == before and any(
            not_whole(root / "cache" / place, b) is None for b in builds
        )

    def is_temporary(self, path: str) -> bool:
        return re.search(r"(^|/)tmp\.bundler\.(old\.)?\d+\.[0-9a-f]{16,}(/|$)", path) is not None

    def triton_caches(self) -> list[str]:
        return sorted(
            {os.path.dirname(f"cache/{place}") for place in self.materials.placed(self.bundle)}
        )


def _and_parents(path: str) -> set[str]:
    parts = path.split("/")
    return {"/".join(parts[:length]) for length in range(1, len(parts) + 1)}


def _kernel_of(path: str) -> str:
    """Return the kernel directory that a path lies in, else the path."""
    parts = path.split("/")
    return next(
        ("/".join(parts[: i + 1]) for i, part in enumerate(parts) if _KEY.fullmatch(part)), path
    )


def _absent(case: Restore, cache: Path) -> None:
    del case
    assert not cache.exists()


def empty(case: Restore, cache: Path) -> None:
    """An empty cache directory."""
    del case
    cache.mkdir()


def _older(case: Restore, cache: Path) -> None:
    """Half of the kernels in a complete build from another checkout, the rest absent."""
    cache.mkdir()
    for key in case.materials.keys[::2]:
        plant(cache / key, case.materials.build("theirs", key, str(cache)))


def _broken(case: Restore, cache: Path) -> None:
    """Each kernel directory broken in another way; the first of the build of another checkout."""
    keys = case.materials.keys
    for position, key in enumerate(keys):
        plant(cache / key, case.materials.build("ours" if position else "theirs", key, str(cache)))
    binaries = [
        next(p for p in (cache / k).iterdir() if p.suffix in {".cubin", ".hsaco"}) for k in keys
    ]
    binaries[0].write_bytes(binaries[0].read_bytes()[:100])
    next((cache / keys[1]).glob(f"{GROUP}*")).unlink()
    binaries[2].unlink()
    shutil.rmtree(cache / keys[3])
    (cache / keys[3]).mkdir()  # as Triton leaves it before its first file


def _leftovers(case: Restore, cache: Path) -> None:
    """What three killed runs left, and a kernel of ours."""
    first, second = case.materials.keys[:2]
    plant(cache / first, case.materials.build("ours", first, str(cache)))
    shutil.copytree(cache / first, cache / f"tmp.bundler.1.{'a' * 16}")
    shutil.copytree(cache / first, cache / f"tmp.bundler.old.1.{'b' * 16}")
    (cache / f"tmp.bundler.1.{'c' * 16}").write_bytes(b"half a file")
    plant(cache / second, case.materials.build("theirs", second, str(cache)))


class Sweeping(Restore):
    """A restore for which every leftover is old enough to be swept."""

    def work(self, root: Path) -> None:
        shorten(self.shortened)
        super().work(root)


# --------------------------------------------------------------------------------------------- save


class Save(Case):
    """`Bundle.save` over nothing, or over an older bundle."""

    FILE = "kernels.tbundle"

    def __init__(
        self, state: str, materials: Materials, bundle: str, over: str | None, stale: int = 0
    ) -> None:
        super().__init__("save", state)
        self.new = materials.folder / f"{bundle}.tbundle"
        self.old = materials.folder / f"{over}.tbundle" if over else None
        self._stale = stale

    def prepare(self, root: Path) -> None:
        if self.old is not None:
            shutil.copy(self.old, root / self.FILE)
        for number in range(self._stale):
            path = root / f".{self.FILE}.{number:016x}.tmp"
            path.write_bytes(b"half a bundle")
            os.utime(path, (0, 0))

    def work(self, root: Path) -> None:
        import bundler

        with bundler.Bundle.load(self.new) as bundle:
            bundle.save(root / self.FILE)

    def wrong_now(self, root: Path, before: Tree) -> Iterator[Problem]:
        for path, data in tree(root).items():
            if path == self.FILE and data not in {self.new.read_bytes(), before.get(path)}:
                whole = self.new.read_bytes()
                kind: Kind = (
                    "partial" if data is not None and len(data) < len(whole) else "wrong bytes"
                )
                yield Problem(kind, f"{path}: neither the old nor the new bundle")
            elif path != self.FILE and path not in before and not self.is_temporary(path):
                yield Problem("leftover", f"{path} is none of ours")
        if self.old is not None and not (root / self.FILE).exists():
            yield Problem("partial", "the old bundle is gone")

    def wrong_when_done(self, root: Path, before: Tree) -> Iterator[Problem]:
        if tree(root).get(self.FILE) != self.new.read_bytes():
            yield Problem("unfinished", f"{self.FILE} is not the new bundle")

    def is_temporary(self, path: str) -> bool:
        return re.fullmatch(rf"\.{re.escape(self.FILE)}\.[0-9a-f]{{16}}\.tmp", path) is not None


def restores(materials: Materials) -> list[Case]:
    """Return the cases of restore."""
    return [
        Restore("absent", materials, _absent),
        Restore("empty, launch set", materials, empty, keep="launch"),
        Restore("older build", materials, _older),
        Restore("broken", materials, _broken),
        Sweeping("leftovers", materials, _leftovers),
        Restore("inductor", materials, empty, bundle="inductor"),
    ]


def saves(materials: Materials) -> list[Case]:
    """Return the cases of save."""
    return [
        Save("absent", materials, "small", None),
        Save("older bundle", materials, "small", "inductor"),
        Save("same bundle", materials, "inductor", "inductor"),
        Save("leftovers", materials, "inductor", "small", stale=3),
    ]


# -------------------------------------------------------------------------------------------- store


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


def every_case(materials: Materials) -> dict[str, Case]:
    """Return every case by name."""
    listed = [
        *restores(materials),
        Pulling("from a store", materials, empty),
        *saves(materials),
        *puts(),
        *pushes(materials),
    ]
    return {case.name: case for case in listed}
