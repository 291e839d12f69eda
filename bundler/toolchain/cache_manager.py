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
import importlib
import json
import os
import time
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

from triton import knobs
from triton.runtime.cache import CacheManager, FileCacheManager

from bundler.config import disabled, inner_manager
from bundler.format import names
from bundler.toolchain.libraries import LIBRARY_SUFFIXES, origin_here
from bundler.toolchain.records import SpooledEvent
from bundler.toolchain.spooling import kernel_record

_SINGLE_FILES = (*LIBRARY_SUFFIXES, names.AUTOTUNE_SUFFIX)
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

    def record(self, *, cache_hit: bool, place: str | None = None) -> SpooledEvent:
        """Return everything known of the kernel, read from Triton's `compile` call: only while that runs."""
        spent_us = (time.monotonic_ns() - self.began_ns) // 1000
        directory = place or os.path.join(self.root, self.key)
        return kernel_record(self.key, self.filename, directory, spent_us, cache_hit=cache_hit)


class Keeper(Protocol):
    """What a process does for all its managers; none of it fails because of a cache, unless strict mode asks for that."""

    def home(self, root: str) -> str:
        """Return where to write what belongs into `root`: that, or a directory of ours when it cannot be written."""

    def found(self, call: CacheCall) -> None:
        """Hear of a kernel that was in Triton's directory."""

    def fetch(self, call: CacheCall) -> bool:
        """Put a kernel into `call.root`; False when it has to be compiled.  Raises what strict mode asks for."""

    def forced(self, call: CacheCall) -> None:
        """Hear of a kernel that Triton compiles whether it is there or not.  Raises what strict mode asks for."""

    def compiled(self, call: CacheCall, record: SpooledEvent) -> None:
        """Hear of a kernel that Triton compiled and stored."""

    def abandoned(self, call: CacheCall) -> None:
        """Hear that a kernel that `fetch` did not have is not being compiled any more."""

    def fetch_file(self, key: str, filename: str, origin: str | None) -> bytes | None:
        """Return a tuning file, or a helper library of that origin."""

    def made_file(self, key: str, filename: str, data: bytes, origin: str | None) -> None:
        """Hear of a tuning file or helper library that Triton made."""

    def failed(self, error: Exception) -> None:
        """Hear of a failure of ours that must not reach the program; raises it where strict mode asks for that."""


class KeptCacheManager(CacheManager):  # type: ignore[misc]
    """A manager in front of another one (the next class), which asks the process's keeper for what that has not.

    Every result of the other manager is passed on, and every exception; managers of override and dump directories are the
    other's alone.
    """

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        # Before the other's: that may ask for the home of its directory.
        self._kept_key, self._kept, self._missed = key, not (override or dump), cast("CacheCall | None", None)
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
            self._missed = call
            return group
        if group and filename in group:
            keeper.found(call)
            return group
        if keeper.fetch(call):
            group = read_group(os.path.join(call.root, call.key), filename)
            if group is not None:
                return group
        self._missed = call
        return None

    def put_group(self, filename: str, group: dict[str, str]) -> Any:
        """Complete a kernel as the other manager does, and tell the keeper."""
        result = super().put_group(filename, group)
        call, self._missed = self._missed, None
        if call is not None:
            keeper = self._keeper()
            try:
                record = call.record(cache_hit=False, place=os.path.dirname(group[filename]))
            except Exception as error:  # noqa: BLE001  # the seam: no failure of ours may reach a program that only compiles
                keeper.failed(error)
                keeper.abandoned(call)
            else:
                keeper.compiled(call, record)
        return result

    def get_file(self, filename: str) -> str | None:
        """Return a file's path: the other manager's, or fetched from the keeper when it is a file on its own."""
        path: str | None = super().get_file(filename)
        if path is None and self._kept and filename.endswith(_SINGLE_FILES):
            data = self._keeper().fetch_file(self._kept_key, filename, origin_here())
            if data is not None:
                path = super().put(data, filename, binary=True)
        return path

    def put(self, data: Any, filename: str, *args: Any, **kwargs: Any) -> str:
        """Store a file as the other manager does; a file on its own is complete with that, and the keeper told."""
        path: str = super().put(data, filename, *args, **kwargs)
        if self._kept and filename.endswith(_SINGLE_FILES):
            raw = data if isinstance(data, bytes) else str(data).encode()
            self._keeper().made_file(self._kept_key, filename, raw, origin_here())
        return path

    def __del__(self) -> None:
        # A compile that failed: Triton tells nobody, but drops its manager.
        call = self.__dict__.get("_missed")
        if call is not None:
            with contextlib.suppress(Exception):  # the interpreter may be half gone
                self._keeper().abandoned(call)


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
        return next(filter(os.path.exists, paths), None)

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
        with open(os.path.join(directory, names.GROUP_PREFIX + filename), encoding="utf-8") as file:
            children = json.load(file)["child_paths"]
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


def manager_set_in_code() -> type | None:
    """Return the manager that the program set as `triton.knobs.cache.manager_class`, which the environment does not change."""
    found: type | None = vars(knobs.cache).get("manager_class")
    return found


def set_manager_in_code(manager: type | None) -> None:
    """Set the manager as the program did; None for what the environment says."""
    if manager is None:
        vars(knobs.cache).pop("manager_class", None)
        return
    knobs.cache.manager_class = manager


@functools.cache
def manager_before(keeper: Callable[[], Keeper], inner: type) -> type:
    """Return the class in front of another manager."""
    namespace = {"_keeper": staticmethod(keeper), "__module__": __name__, "__doc__": KeptCacheManager.__doc__}
    return type("BundlerCacheManager", (KeptCacheManager, inner), namespace)


@functools.cache
def _combined(keeper: Callable[[], Keeper], inner: str | None) -> type:
    if inner is None:
        return manager_before(keeper, LazyFileManager)
    module, _, attribute = inner.partition(":")
    return manager_before(keeper, getattr(importlib.import_module(module), attribute))
