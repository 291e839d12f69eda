# SPDX-License-Identifier: Apache-2.0
"""A cache manager that writes down what Triton compiles in a child of a recording process.  Needs Triton to import.

Listeners do not reach a child process, but the environment does, and Triton takes its cache manager's name from there.  Records
are written as compiles happen, since torch's compile workers run neither exit handlers nor finalizers.

Triton makes a manager for each kernel, so what must outlive one (which records exist, errors) lives in one `Spool` a process.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import logging
import os
import threading
import time
from collections.abc import Iterator
from typing import Any, Self, cast

from triton import knobs
from triton.runtime.cache import CacheManager, FileCacheManager

from bundler.config import spool_settings
from bundler.fork_safety import after_fork
from bundler.format import names
from bundler.format.entries import Toolchain
from bundler.toolchain import compile_frames, spool_records
from bundler.toolchain.capture import key_parts, launch_facts, toolchain_of
from bundler.toolchain.events import kernel_hash, target_of
from bundler.toolchain.helper_libraries import LIBRARY_SUFFIXES
from bundler.toolchain.manager_environment import named_manager
from bundler.toolchain.private_directory import is_ours
from bundler.toolchain.spool_records import Record, SpooledEvent, SpooledFile
from bundler.toolchain.targets import current_device

_LOG = logging.getLogger("bundler.toolchain")
# Files that Triton keeps one by one, without a kernel around them.
SINGLE_FILES = (*LIBRARY_SUFFIXES, names.AUTOTUNE_SUFFIX)
# A program that compiles in a loop repeats itself; what was written is remembered, but not without bound.
_REMEMBERED_RECORDS = 100_000


class Spool:
    """Writes each record of this process once; safe from any thread, and in forked children.

    No failure leaves it: each is counted in `errors` by its cause and logged the first time.
    """

    def __init__(self) -> None:
        self.errors: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()
        self._seen: set[tuple[str, ...]] = set()
        self._numbers = itertools.count()

    def directories(self) -> list[str]:
        """Return where to write: each spool in force, but for those of this process, which listens itself.

        Once a spool is gone its name is free for anybody.
        """
        spools = (spool_settings().directory or "").split(os.pathsep)
        return [spool for spool in spools if spool_records.owner(spool) not in {None, os.getpid()} and is_ours(spool)]

    def is_new(self, *identity: str) -> bool:
        """Whether a record was not written yet; remembers it."""
        with self._lock:
            if identity in self._seen:
                return False
            if len(self._seen) < _REMEMBERED_RECORDS:
                self._seen.add(identity)
            return True

    def write(self, directory: str, record: Record) -> None:
        """Write one record; names sort by time and are unique among all processes of this machine."""
        spool_records.write(directory, f"{time.time_ns():020d}-{os.getpid()}-{next(self._numbers)}", record)

    @contextlib.contextmanager
    def excused(self) -> Iterator[None]:
        """Go on after a failure, which is counted and, the first time, logged."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  # the seam: no failure of ours may reach a program that only compiles
            cause = type(error).__name__
            with self._lock:
                self.errors[cause] += 1
                first = self.errors[cause] == 1
            if first:
                _LOG.warning("a compile was not recorded (%s: %s); the program goes on", cause, error, exc_info=error)

    def reset_after_fork(self) -> None:
        """Give the child a lock that no thread of the parent holds."""
        self._lock = threading.Lock()


spool = Spool()
after_fork(spool.reset_after_fork)


class SpoolCacheManager(CacheManager):  # type: ignore[misc]
    """The user's cache manager, or Triton's own, with a record of each kernel and helper file.

    Every result is the inner manager's, and so is every exception.  The inner class is the one that
    TRITON_BUNDLER_SPOOL_INNER names at the moment: an instance is of that class too.
    """

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Self:
        """Make an instance of both this class and the inner one."""
        combined: Self = object.__new__(_before(cast(Any, cls), _inner_class()))
        return combined

    def __init__(self, key: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(key, *args, **kwargs)
        self._bundler_key = key
        # Triton makes the manager just before it compiles, and times stages only for a listener, which is not here.
        self._bundler_began_ns = time.monotonic_ns()
        # Managers of dump and override directories hold copies for people to look at.
        self._bundler_spools = not any([*args, *kwargs.values()])

    def get_file(self, filename: str) -> str | None:
        """Return a file's path as the inner manager does; a helper library or tuning file in use is recorded."""
        path: str | None = super().get_file(filename)
        if path is not None:
            self._spool_file(filename, path)
        return path

    def put(self, data: Any, filename: str, *args: Any, **kwargs: Any) -> str:
        """Store a file as the inner manager does; a helper library or tuning file is recorded."""
        path: str = super().put(data, filename, *args, **kwargs)
        self._spool_file(filename, path)
        return path

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Return a kernel's files as the inner manager does; a hit is recorded."""
        group: dict[str, str] | None = super().get_group(filename)
        if group and filename in group and not knobs.compilation.always_compile:
            self._spool_kernel(filename, group, cache_hit=True)
        return group

    def put_group(self, filename: str, group: dict[str, str]) -> Any:
        """Complete a kernel as the inner manager does; then the kernel is recorded."""
        result = super().put_group(filename, group)
        self._spool_kernel(filename, group, cache_hit=False)
        return result

    def _spool_file(self, filename: str, path: str) -> None:
        if not filename.endswith(SINGLE_FILES):
            return
        with spool.excused():
            for directory in spool.directories() if self._bundler_spools else ():
                if spool.is_new(directory, path):
                    spool.write(directory, SpooledFile(os.path.dirname(path), filename, os.getpid()))

    def _spool_kernel(self, filename: str, group: dict[str, str], *, cache_hit: bool) -> None:
        with spool.excused():
            spent_us = (time.monotonic_ns() - self._bundler_began_ns) // 1000
            place = os.path.dirname(group[filename])
            record: SpooledEvent | None = None
            for directory in spool.directories() if self._bundler_spools else ():
                if spool.is_new(directory, self._bundler_key, place, str(cache_hit)):
                    if record is None:
                        record = kernel_record(self._bundler_key, filename, place, spent_us, cache_hit=cache_hit)
                    spool.write(directory, record)


@functools.cache
def _before(outer: Any, inner: Any) -> type:
    return in_front_of(outer, inner, outer.__name__)


def in_front_of(outer: Any, inner: Any, name: str, **attributes: Any) -> type:
    """Return the class of a manager of ours in front of another one: an instance is of both, and `super()` is the other."""
    return type(name, (outer, inner), {"__module__": outer.__module__, "__doc__": outer.__doc__, **attributes})


def _inner_class() -> type:
    """Return the user's manager class; errors are those that Triton would give for the same setting."""
    name = spool_settings().inner
    if name is None:
        file_manager: type = FileCacheManager
        return file_manager
    return named_manager(name)


def kernel_record(key: str, filename: str, place: str, spent_us: int, *, cache_hit: bool) -> SpooledEvent:
    """Return what is known of a kernel, for a cache manager that Triton's `compile` calls at this moment.

    Args:
        key: the kernel's key.
        filename: name of its metadata file.
        place: the kernel's directory.
        spent_us: microseconds since the compile began; counts for a compile only.
        cache_hit: whether it was found.
    """
    times = () if cache_hit else (("compile", spent_us),)
    frame = compile_frames.find_compile()
    name = filename.removesuffix(".json")
    if frame is None:
        return SpooledEvent(
            key,
            kernel_hash(key),
            place,
            name,
            None,
            current_device(),
            times,
            cache_hit,
            None,
            None,
            Toolchain(),
            os.getpid(),
        )
    target = target_of(frame.backend.target)
    device = frame.device if frame.device is not None else current_device()
    parts = key_parts(frame.src, frame.backend, frame.options, frame.env_vars, frame.hash, frame.stages_key)
    return SpooledEvent(
        key=key,
        hash=frame.hash,
        directory=place,
        name=(frame.metadata or {}).get("name", name),
        target=target,
        device=device,
        stage_times_us=times,
        cache_hit=cache_hit,
        facts_bytes=launch_facts(frame.src, frame.options).to_bytes(),
        parts_bytes=parts.to_bytes(),
        toolchain=toolchain_of(target.backend, target.arch),
        pid=os.getpid(),
    )
