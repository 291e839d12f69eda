# SPDX-License-Identifier: Apache-2.0
"""The cache manager that Triton makes for each key, and what it asks of the process-wide keeper.  Needs Triton to import.

Calls for one key, on every supported release::

    kernel    __init__, get_group ──hit──▶ done
                           └─miss─▶ put for each file, put_group
    one file  __init__, get_file ──hit──▶ done
                           └─miss─▶ put
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from triton import knobs
from triton.runtime.cache import CacheManager, FileCacheManager

from bundler.config import disabled, inner_manager
from bundler.format import names
from bundler.format.bundle_file import read_regular
from bundler.format.metadata import METADATA_BYTES
from bundler.toolchain import compile_frames
from bundler.toolchain.helper_libraries import origin_here
from bundler.toolchain.keytext import source_text
from bundler.toolchain.manager_environment import MANAGER_VARIABLE, named_manager, names_our_manager
from bundler.toolchain.spool_manager import SINGLE_FILES, in_front_of, kernel_record
from bundler.toolchain.spool_records import SpooledEvent

# A restore may move a half-written directory aside while Triton writes into it.
_PUT_ATTEMPTS = 3


@dataclass(frozen=True)
class CacheCall:
    """One look-up of Triton's: the kernel's key, the name of its metadata file, the cache directory, and when it began."""

    key: str
    filename: str
    root: str
    began_ns: int

    @property
    def name(self) -> str:
        """The kernel's name, as far as its file name has it."""
        return self.filename.removesuffix(".json")

    def source(self) -> str | None:
        """Return the text whose digest is a part of the key, read from Triton's `compile` call; None when that is not known."""
        frame = compile_frames.find_compile()
        return source_text(frame.src) if frame is not None else None

    def record(self, *, cache_hit: bool, group: Mapping[str, str] | None = None) -> SpooledEvent:
        """Return everything known of the kernel, read from Triton's `compile` call: only while that runs.

        Args:
            cache_hit: whether it was found.
            group: its files by name, None where they are in `root`.
        """
        spent_us = (time.monotonic_ns() - self.began_ns) // 1000
        directory = os.path.dirname(group[self.filename]) if group else os.path.join(self.root, self.key)
        return kernel_record(self.key, self.filename, directory, spent_us, cache_hit=cache_hit)


class Keeper(Protocol):
    """What a process does for all its managers; none of it fails because of a cache, unless strict mode asks for that."""

    @property
    def closed(self) -> bool:
        """Whether its session has ended."""

    def home(self, root: str) -> str:
        """Return where to write what belongs into `root`: that, or a directory of ours when it cannot be written."""

    def found(self, call: CacheCall) -> None:
        """Hear of a kernel that was in Triton's directory."""

    def fetch(self, call: CacheCall) -> bool:
        """Put a kernel into `call.root`; False when it has to be compiled.  Raises what strict mode asks for."""

    def forced(self, call: CacheCall) -> None:
        """Hear of a kernel that Triton compiles whether it is there or not.  Raises what strict mode asks for."""

    def compiled(self, call: CacheCall, group: Mapping[str, str]) -> None:
        """Hear of a kernel that Triton compiled and stored, with the paths of its files by name; called while `compile` runs."""

    def abandoned(self, call: CacheCall) -> None:
        """Hear that a kernel that `fetch` did not have is not being compiled any more."""

    def fetch_file(self, key: str, filename: str, origin: str | None) -> bytes | None:
        """Return a tuning file, or a helper library of that origin."""

    def made_file(self, key: str, filename: str, data: bytes, origin: str | None) -> None:
        """Hear of a tuning file or helper library that Triton made."""


class KeptCacheManager(CacheManager):  # type: ignore[misc]
    """A manager in front of another one (the next class), which asks the process's keeper for what that has not.

    Every result of the other manager is passed on, and every exception; managers of override and dump directories are the
    other's alone.
    """

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        # Before the other's: that may ask for the home of its directory.
        self._kept_key, self._kept = key, not (override or dump)
        self._missed: tuple[Keeper, CacheCall] | None = None
        more = {"override": True} if override else {"dump": True} if dump else {}
        super().__init__(key, **more)

    @staticmethod
    @abstractmethod
    def _keeper() -> Keeper:
        """Return the process's keeper."""

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Return a kernel's files: the other manager's, or fetched from the keeper; None when it has to be compiled."""
        began_ns = time.monotonic_ns()
        group: dict[str, str] | None = super().get_group(filename)
        if not self._kept:
            return group
        keeper = self._keeper()
        call = CacheCall(self._kept_key, filename, keeper.home(knobs.cache.dir), began_ns)
        if knobs.compilation.always_compile:
            keeper.forced(call)
            self._missed = keeper, call
            return group
        if group and filename in group:
            keeper.found(call)
            return group
        if keeper.fetch(call):
            group = read_group(os.path.join(call.root, call.key), filename)
            if group is not None:
                return group
        self._missed = keeper, call
        return None

    def put_group(self, filename: str, group: dict[str, str]) -> Any:
        """Complete a kernel as the other manager does, and tell the keeper."""
        result = super().put_group(filename, group)
        missed, self._missed = self._missed, None
        if missed is not None:
            keeper, call = missed
            if keeper.closed:
                # Its session ended while Triton compiled: the one in force now can still publish.
                keeper = self._keeper()
            keeper.compiled(call, group)
        return result

    def get_file(self, filename: str) -> str | None:
        """Return a file's path: the other manager's, or fetched from the keeper when it is a file on its own."""
        path: str | None = super().get_file(filename)
        if path is None and self._kept and filename.endswith(SINGLE_FILES):
            data = self._keeper().fetch_file(self._kept_key, filename, origin_here())
            if data is not None:
                path = super().put(data, filename, binary=True)
        return path

    def put(self, data: Any, filename: str, *args: Any, **kwargs: Any) -> str:
        """Store a file as the other manager does; a file on its own is complete with that, and the keeper told."""
        path: str = super().put(data, filename, *args, **kwargs)
        if self._kept and filename.endswith(SINGLE_FILES):
            raw = data if isinstance(data, bytes) else str(data).encode()
            self._keeper().made_file(self._kept_key, filename, raw, origin_here())
        return path

    def __del__(self) -> None:
        # A compile that failed: Triton tells nobody, but drops its manager.
        missed = self.__dict__.get("_missed")
        if missed is not None:
            keeper, call = missed
            with contextlib.suppress(Exception):  # the interpreter may be half gone
                keeper.abandoned(call)


class LazyFileManager(FileCacheManager):  # type: ignore[misc]
    """Triton's own manager, but one that makes no directory before it writes, and writes elsewhere where it may not.

    A kernel with a file missing or empty is a miss, on every release.
    """

    @staticmethod
    @abstractmethod
    def _keeper() -> Keeper:
        """Return the process's keeper."""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        root = "" if override or dump else knobs.cache.dir
        self._places: tuple[str, ...] = ()
        if not root:
            super().__init__(key, override=override, dump=dump)
            return
        home = self._keeper().home(root)
        self.key, self.cache_dir = key, os.path.join(home, key)
        self.lock_path = os.path.join(self.cache_dir, "lock")
        # A directory that may not be written may have been filled before.
        self._places = tuple(dict.fromkeys((self.cache_dir, os.path.join(root, key))))

    def get_file(self, filename: str) -> str | None:
        """Return a file's path, None when there is none."""
        if not self._places:
            found: str | None = super().get_file(filename)
            return found
        paths = (os.path.join(directory, filename) for directory in self._places)
        # Triton would wait for whoever writes to a named pipe.
        return next(filter(os.path.isfile, paths), None)

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Return a kernel's files by name when all are there."""
        if not self._places:
            found: dict[str, str] | None = super().get_group(filename)
            return found
        groups = (read_group(directory, filename) for directory in self._places)
        return next(filter(None, groups), None)

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        """Store a file and return its path."""
        for _ in range(_PUT_ATTEMPTS - 1):
            # Another process's restore may move the directory aside, as half-written, between any two calls.
            with contextlib.suppress(FileNotFoundError):
                return self._put(data, filename, binary=binary)
        return self._put(data, filename, binary=binary)

    def _put(self, data: Any, filename: str, *, binary: bool) -> str:
        if self._places:
            os.makedirs(self.cache_dir, exist_ok=True)
        path: str = super().put(data, filename, binary=binary)
        return path


def read_group(directory: str, filename: str) -> dict[str, str] | None:
    """Return the files that a kernel's group file lists, by name; None unless all are there with something in them."""
    try:
        data = read_regular(os.path.join(directory, names.GROUP_PREFIX + filename), METADATA_BYTES)
        children = json.loads(data.decode("utf-8"))["child_paths"]
        group = {str(name): os.fspath(path) for name, path in children.items()}
        whole = all(os.stat(path).st_size for path in group.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return group if whole and filename in group else None


def manager_class(keeper: Callable[[], Keeper]) -> type:
    """Return the class for Triton: in front of Triton's own manager, or of the one that was configured before.

    Switched off it is Triton's own.

    Args:
        keeper: returns the process's keeper; called for each key.

    Raises:
        What Triton raises for a manager that was configured before and cannot be imported.
    """
    if disabled():
        plain: type = FileCacheManager
        return plain
    return _combined(keeper, inner_manager())


def asked_for() -> bool:
    """Whether this process was told to use a session's manager: by the environment, or by the program in Python."""
    in_code = vars(knobs.cache).get("manager_class")
    return names_our_manager() or (in_code is not None and issubclass(in_code, KeptCacheManager))


def named_by_environment() -> type:
    """Return the manager that TRITON_CACHE_MANAGER names, or ours for none: in front of Triton's own it writes no needless directory.

    Raises:
        What Triton raises for a manager that cannot be imported.
    """
    name = os.environ.get(MANAGER_VARIABLE)
    return LazyFileManager if name is None else named_manager(name)


@functools.cache
def manager_before(keeper: Callable[[], Keeper], inner: type) -> type:
    """Return the class in front of another manager."""
    return in_front_of(KeptCacheManager, inner, "BundlerCacheManager", _keeper=staticmethod(keeper))


@functools.cache
def _combined(keeper: Callable[[], Keeper], inner: str | None) -> type:
    if inner is None:
        return manager_before(keeper, LazyFileManager)
    return manager_before(keeper, named_manager(inner))
