# SPDX-License-Identifier: Apache-2.0
"""`CacheDelegate`: what our cache manager asks and tells for each key, and `CacheCall`, what it
knows of one.  Never imports Triton.

A session looks kernels up and publishes them (`bundler/integrations/lookup_engine.py`); the spool
writes down what a child of a recording process compiles (`bundler/toolchain/recording/spool_manager.py`).
`bundler/toolchain/recording/cache_manager.py` calls both.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from bundler.toolchain.recording.spool_records import SpooledEvent

# The paths of a kernel's files by their names.
Group = Mapping[str, str]


class CacheCall(NamedTuple):
    """One look-up of Triton's: the kernel's key, the name of its metadata file, the cache
    directory, and when it began.
    """

    key: str
    filename: str
    root: str
    began_ns: int

    @property
    def name(self) -> str:
        """The kernel's name, as far as its file name has it."""
        return self.filename.removesuffix(".json")

    def record(self, *, cache_hit: bool, group: Group | None = None) -> SpooledEvent:
        """Return everything known of the kernel, read from Triton's `compile` call: only while that
        runs.

        Args:
            cache_hit: whether it was found.
            group: its files by name, None where they are in `root`.
        """
        # Most hits are of known kernels and need no record.
        from bundler.toolchain.compile_frames import find_compile
        from bundler.toolchain.events import kernel_hash, target_of
        from bundler.toolchain.keytext import key_parts, launch_facts, toolchain_of
        from bundler.toolchain.recording.spool_records import SpooledEvent
        from bundler.toolchain.targets import current_device

        spent_us = (time.monotonic_ns() - self.began_ns) // 1000
        place = os.path.dirname(group[self.filename]) if group else f"{self.root}/{self.key}"
        record = SpooledEvent(
            key=self.key,
            hash=kernel_hash(self.key),
            directory=place,
            name=self.name,
            device=current_device(),
            stage_times_us=() if cache_hit else (("compile", spent_us),),
            cache_hit=cache_hit,
            pid=os.getpid(),
        )
        frame = find_compile()
        if frame is None:
            return record
        target = target_of(frame.backend.target)
        parts = key_parts(
            frame.src, frame.backend, frame.options, frame.env_vars, frame.hash, frame.stages_key
        )
        return record._replace(
            hash=frame.hash,
            name=(frame.metadata or {}).get("name", self.name),
            target=target,
            device=frame.device if frame.device is not None else record.device,
            facts_bytes=launch_facts(frame.src, frame.options).to_bytes(),
            parts_bytes=parts.to_bytes(),
            toolchain=toolchain_of(target.backend, target.arch),
        )


class CacheDelegate:
    """What a cache manager asks and tells: one serves all managers of a process, in any thread.
    This one has and does nothing.

    No method fails because of a cache, unless strict mode asks for that.
    """

    # Whether its session has ended.
    closed = False

    def writable(self, root: str) -> str:
        """Return where to write what belongs into `root`: that, or a directory of ours when it
        cannot be written.
        """
        return root

    def found(self, call: CacheCall, group: Group) -> None:
        """Hear of a kernel that was there."""

    def fetch(self, call: CacheCall) -> Group | None:
        """Put a kernel into `call.root`; None when it has to be compiled.  Raises what strict mode
        asks for.
        """

    def forced(self, call: CacheCall) -> None:
        """Hear of a kernel that Triton compiles whether it is there or not.  Raises what strict
        mode asks for.
        """

    def compiled(self, call: CacheCall, group: Group) -> None:
        """Hear of a kernel that Triton compiled and stored; called while its `compile` runs."""

    def abandoned(self, call: CacheCall) -> None:
        """Hear that a kernel that `fetch` did not have is not being compiled any more."""

    def found_file(self, path: str) -> None:
        """Hear of a tuning file or helper library that was there."""

    def fetch_file(self, key: str, filename: str, origin: str | None) -> bytes | None:
        """Return a tuning file, or a helper library of that origin."""

    def made_file(self, key: str, path: str, data: bytes, origin: str | None) -> None:
        """Hear of a tuning file or helper library that Triton made."""

    def fetch_records(self, names: Collection[str]) -> Mapping[str, bytes]:
        """Return those of these tuning records that a store has, by name; asked for in one round
        trip.
        """
        return {}

    def made_record(self, name: str, filename: str, data: bytes) -> None:
        """Hear of a tuning record that a tuner of ours made, or of a program of the generator."""

    def fetch_program(self, name: str) -> bytes | None:
        """Return a program that the generator kept on another machine; its text is code."""


class DelegateSource:
    """Says which delegate serves a process now; asked for each key, so it is an attribute while the
    answer stays the same.

    Attributes:
        delegate: set and cleared by who knows; None where `find` has to be asked.
        find: returns the delegate.
        manager: what was configured behind our manager, and the class that Triton was given then;
            cleared with the delegate.
    """

    def __init__(self, find: Callable[[], CacheDelegate]) -> None:
        self.delegate: CacheDelegate | None = None
        self.manager: tuple[str | None, type] | None = None
        self.find = find
