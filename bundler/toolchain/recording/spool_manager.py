# SPDX-License-Identifier: Apache-2.0
"""`SpoolCacheManager`, which TRITON_CACHE_MANAGER names in a child of a recording process, and
`Spool`, its delegate.  Needs Triton.

Listeners do not reach a child process, but the environment does, and Triton takes its cache
manager's name from there.  Records are written as compiles happen, since torch's compile workers
run neither exit handlers nor finalizers.

Triton makes a manager for each kernel, so what must outlive one (which records exist, errors) lives
in one `Spool` a process.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from bundler.config import spool_settings
from bundler.fork_safety import after_fork
from bundler.package_loggers import logger
from bundler.toolchain.private_directory import is_ours
from bundler.toolchain.recording import spool_records
from bundler.toolchain.recording.cache_delegate import (
    CacheCall,
    CacheDelegate,
    DelegateSource,
    Group,
)
from bundler.toolchain.recording.cache_manager import manager_before
from bundler.toolchain.recording.manager_environment import named_manager
from bundler.toolchain.recording.spool_records import Record, SpooledEvent, SpooledFile

_LOG = logger("bundler.toolchain")
# A program that compiles in a loop repeats itself; what was written is remembered, but not without
# bound.
_REMEMBERED_RECORDS = 100_000
_TRITONS_OWN = "triton.runtime.cache:FileCacheManager"


class Spool(CacheDelegate):
    """Writes each record of this process once; safe from any thread, and in forked children.

    No failure leaves it: each is counted in `errors` by its cause and logged the first time.
    """

    def __init__(self) -> None:
        self.errors: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()
        self._seen: set[tuple[str, ...]] = set()
        self._numbers = itertools.count()

    def found(self, call: CacheCall, group: Group) -> None:
        """Record a hit."""
        with self.tolerating():
            self._record_kernel(call, group, cache_hit=True)

    def compiled(self, call: CacheCall, group: Group) -> None:
        """Record a compile."""
        with self.tolerating():
            self._record_kernel(call, group, cache_hit=False)

    def found_file(self, path: str) -> None:
        """Record a helper library or tuning file in use."""
        with self.tolerating():
            for directory in self.directories():
                if self.is_new(directory, path):
                    self.write(directory, SpooledFile(*os.path.split(path), os.getpid()))

    def made_file(self, key: str, path: str, data: bytes, origin: str | None) -> None:
        """Record a helper library or tuning file that was made."""
        self.found_file(path)

    def _record_kernel(self, call: CacheCall, group: Group, *, cache_hit: bool) -> None:
        place = os.path.dirname(group[call.filename])
        record: SpooledEvent | None = None
        for directory in self.directories():
            if self.is_new(directory, call.key, place, str(cache_hit)):
                if record is None:
                    record = call.record(cache_hit=cache_hit, group=group)
                self.write(directory, record)

    def directories(self) -> list[str]:
        """Return where to write: each spool in force, but for those of this process, which listens
        itself.

        Once a spool is gone its name is free for anybody.
        """
        not_to = {None, os.getpid()}
        spools = (spool_settings().directory or "").split(os.pathsep)
        return [one for one in spools if spool_records.owner(one) not in not_to and is_ours(one)]

    def is_new(self, *identity: str) -> bool:
        """Whether a record was not written yet; remembers it."""
        with self._lock:
            if identity in self._seen:
                return False
            if len(self._seen) < _REMEMBERED_RECORDS:
                self._seen.add(identity)
            return True

    def write(self, directory: str, record: Record) -> None:
        """Write one record; names sort by time and are unique among all processes of this
        machine.
        """
        name = f"{time.time_ns():020d}-{os.getpid()}-{next(self._numbers)}"
        spool_records.write(directory, name, record)

    @contextlib.contextmanager
    def tolerating(self) -> Iterator[None]:
        """Go on after a failure, which is counted and, the first time, logged."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  # the seam: no failure of ours may reach a program that only compiles
            cause = type(error).__name__
            with self._lock:
                self.errors[cause] += 1
                first = self.errors[cause] == 1
            if first:
                _LOG.warning(
                    "a compile was not recorded (%s: %s); the program goes on",
                    cause,
                    error,
                    exc_info=error,
                )

    def reset_after_fork(self) -> None:
        """Give the child a lock that no thread of the parent holds."""
        self._lock = threading.Lock()


spool = Spool()
after_fork(spool.reset_after_fork)
_source = DelegateSource(lambda: spool)

if TYPE_CHECKING:
    SpoolCacheManager: type[Any]
else:

    def __getattr__(name: str) -> Any:
        if name == "SpoolCacheManager":
            # The manager behind is the one that the environment names at the moment, with the
            # errors that Triton would give.
            behind = named_manager(spool_settings().inner or _TRITONS_OWN)
            return manager_before(_source, behind, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
