# SPDX-License-Identifier: Apache-2.0
"""`DelegatingCacheManager`: the one cache manager of ours, which Triton makes for each key.  Needs
Triton to import.

It stands in front of Triton's own manager, or of the one that the user configured, and asks and
tells its delegates: the session's in `BundlerCacheManager` (`bundler/integrations/triton.py`), the
recording's in `SpoolCacheManager` (`bundler/toolchain/recording/spool_manager.py`). Where both are wanted it
is one manager with two delegates.

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
from typing import Any

from triton import knobs
from triton.runtime.cache import CacheManager, FileCacheManager

from bundler.config import disabled, inner_manager
from bundler.format import names
from bundler.format.bundle_file import read_regular
from bundler.toolchain.driver_modules import driver_modules
from bundler.toolchain.recording.cache_delegate import CacheCall, CacheDelegate, DelegateSource
from bundler.toolchain.recording.manager_environment import (
    MANAGER_VARIABLE,
    named_manager,
    names_our_manager,
)

# A restore may move a half-written directory aside while Triton writes into it.
_PUT_ATTEMPTS = 3
# A group file names a dozen files; what is larger is none.
_GROUP_BYTES = 1 << 20
# Files that Triton keeps one by one, without a kernel around them.
SINGLE_FILES = (*names.LIBRARY_SUFFIXES, names.AUTOTUNE_SUFFIX)


class DelegatingCacheManager(CacheManager):  # type: ignore[misc]
    """A manager in front of another one (the next class), whose delegates hear of everything and
    may have what that one has not.

    Every result of the other manager is passed on, and every exception; managers of override and
    dump directories are the other's alone.

    Attributes:
        sources: say who the delegates are, the first one first.
    """

    sources: tuple[DelegateSource, ...] = ()

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        # Before the other's, which may ask where its directory is.
        self._lookup_key, self._delegating = key, not (override or dump)
        self._missed: tuple[list[CacheDelegate], CacheCall] | None = None
        self._writable_root = self._writable_for(knobs.cache.dir) if self._delegating else ""
        more = {"override": True} if override else {"dump": True} if dump else {}
        super().__init__(key, **more)

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Return a kernel's files: the other manager's, or a delegate's; None when it has to be
        compiled.
        """
        began_ns = time.monotonic_ns()
        group: dict[str, str] | None = super().get_group(filename)
        if not self._delegating:
            return group
        delegates = self._delegates()
        call = CacheCall(self._lookup_key, filename, self._writable_root, began_ns)
        if knobs.compilation.always_compile:
            for delegate in delegates:
                delegate.forced(call)
        elif group and filename in group:
            for delegate in delegates:
                delegate.found(call, group)
            return group
        else:
            for delegate in delegates:
                fetched = delegate.fetch(call)
                if fetched is not None:
                    for other in delegates:
                        if other is not delegate:
                            other.found(call, fetched)
                    return dict(fetched)
            group = None
        self._missed = delegates, call
        return group

    def put_group(self, filename: str, group: dict[str, str]) -> Any:
        """Complete a kernel as the other manager does, and tell the delegates."""
        result = super().put_group(filename, group)
        missed, self._missed = self._missed, None
        if missed is not None:
            delegates, call = missed
            if any(delegate.closed for delegate in delegates):
                # A session ended while Triton compiled: the one in force now can still publish.
                delegates = self._delegates()
            for delegate in delegates:
                delegate.compiled(call, group)
        return result

    def get_file(self, filename: str) -> str | None:
        """Return a file's path: the other manager's, or a delegate's when it is a file on its own;
        our own extension for `cuda_utils`.
        """
        path: str | None = driver_modules.path_for(filename) if self._delegating else None
        if path is not None:
            return path
        path = super().get_file(filename)
        if not self._delegating or not filename.endswith(SINGLE_FILES):
            return path
        if path is None:
            origin = _origin()
            fetched = (
                delegate.fetch_file(self._lookup_key, filename, origin)
                for delegate in self._delegates()
            )
            data = next((data for data in fetched if data is not None), None)
            if data is None:
                return None
            path = super().put(data, filename, binary=True)
        for delegate in self._delegates():
            delegate.found_file(path)
        return path

    def put(self, data: Any, filename: str, *args: Any, **kwargs: Any) -> str:
        """Store a file as the other manager does; a file on its own is complete with that, and the
        delegates told.
        """
        path: str = super().put(data, filename, *args, **kwargs)
        if self._delegating and filename.endswith(SINGLE_FILES):
            raw, origin = data if isinstance(data, bytes) else str(data).encode(), _origin()
            for delegate in self._delegates():
                delegate.made_file(self._lookup_key, path, raw, origin)
        return path

    def _delegates(self) -> list[CacheDelegate]:
        return [source.delegate or source.find() for source in self.sources]

    def _writable_for(self, root: str) -> str:
        """Return where to write what belongs into `root`; what is empty is Triton's to refuse."""
        roots = (delegate.writable(root) for delegate in self._delegates()) if root else ()
        return next((place for place in roots if place != root), root)

    def __del__(self) -> None:
        # A compile that failed: Triton tells nobody, but drops its manager.
        missed = self.__dict__.get("_missed")
        if missed is not None:
            delegates, call = missed
            for delegate in delegates:
                with contextlib.suppress(Exception):  # the interpreter may be half gone
                    delegate.abandoned(call)


class LazyFileManager(FileCacheManager):  # type: ignore[misc]
    """Triton's own manager behind ours, but one that makes no directory before it writes, and
    writes elsewhere where it may not.

    A kernel with a file missing or empty is a miss, on every release.
    """

    _writable_root: str

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        root = "" if override or dump else knobs.cache.dir
        self._places: tuple[str, ...] = ()
        if not root:
            super().__init__(key, override=override, dump=dump)
            return
        self.key, self.cache_dir = key, os.path.join(self._writable_root, key)
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
        for directory in self._places:
            group = read_group(directory, filename)
            if group is not None:
                return group
        return None

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        """Store a file and return its path."""
        for _ in range(_PUT_ATTEMPTS - 1):
            # Another process's restore may move the directory aside, as half-written, between any
            # two calls.
            with contextlib.suppress(FileNotFoundError):
                return self._put(data, filename, binary=binary)
        return self._put(data, filename, binary=binary)

    def _put(self, data: Any, filename: str, *, binary: bool) -> str:
        if self._places:
            os.makedirs(self.cache_dir, exist_ok=True)
        path: str = super().put(data, filename, binary=binary)
        return path


def read_group(directory: str, filename: str) -> dict[str, str] | None:
    """Return the files that a kernel's group file lists, by name; None unless all are there with
    something in them.
    """
    path = f"{directory}/{names.GROUP_PREFIX}{filename}"
    try:
        # Asked first: most keys are in only one of the places that are looked at, and a failed
        # `open` costs five times as much.
        if not os.path.exists(path):
            return None
        data = read_regular(path, _GROUP_BYTES)
        children = json.loads(data.decode("utf-8"))["child_paths"]
        group = {str(name): os.fspath(path) for name, path in children.items()}
        for member in group.values():
            if not os.stat(member).st_size:
                return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return group if filename in group else None


def _origin() -> str | None:
    from bundler.toolchain.helper_libraries import origin_here  # kernels do without

    return origin_here()


def manager_class(source: DelegateSource) -> type:
    """Return the class for Triton: in front of Triton's own manager, or of the one that was
    configured before.

    Switched off it is Triton's own.

    Args:
        source: says who the process's delegate is, for each key.

    Raises:
        What Triton raises for a manager that was configured before and cannot be imported.
    """
    if disabled():
        plain: type = FileCacheManager
        return plain
    inner = inner_manager()
    made = manager_before(source, LazyFileManager if inner is None else named_manager(inner))
    source.manager = (inner, made)
    return made


def asked_for(source: DelegateSource) -> bool:
    """Whether this process was told to use a session's manager: by the environment, or by the
    program in Python.
    """
    in_code = vars(knobs.cache).get("manager_class")
    return names_our_manager() or (in_code is not None and has_delegate(in_code, source))


def has_delegate(manager: type, source: DelegateSource) -> bool:
    """Whether a manager asks the delegate of this source already."""
    return issubclass(manager, DelegatingCacheManager) and source in manager.sources


def named_by_environment() -> type:
    """Return the manager that TRITON_CACHE_MANAGER names, or ours for none: in front of Triton's
    own it writes no needless directory.

    Raises:
        What Triton raises for a manager that cannot be imported.
    """
    name = os.environ.get(MANAGER_VARIABLE)
    return LazyFileManager if name is None else named_manager(name)


@functools.cache
def manager_before(source: DelegateSource, inner: Any, name: str = "BundlerCacheManager") -> type:
    """Return the class in front of another one: an instance is of both.  Where that one is ours
    already it gets another delegate.

    Args:
        source: says who the delegate is.
        inner: the other one.
        name: of the class.
    """
    sources: tuple[DelegateSource, ...] = (source,)
    if issubclass(inner, DelegatingCacheManager):
        sources, inner = (source, *inner.sources), inner.__bases__[1]
    body = {"__module__": __name__, "__doc__": DelegatingCacheManager.__doc__, "sources": sources}
    return type(name, (DelegatingCacheManager, inner), body)
