# SPDX-License-Identifier: Apache-2.0
"""Where kernels were seen during a recording, from four sources.

A `RecordedKernel` is one kernel directory, `RecordedKernels` all of them.  `recorder.py`,
`collection.py` and a session's `UsedKernels` fill and read them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from bundler.format.manifest import Observation
from bundler.lifecycle.bundle_builder import KnownFacts
from bundler.toolchain import directories
from bundler.toolchain.events import CompileEvent
from bundler.toolchain.recording.spool_records import SpooledEvent

LISTENER, CHILDREN, JIT_CACHE, DIRECTORIES = "listener", "children", "jit-cache", "directories"


@dataclass
class RecordedKernel:
    """One kernel directory, with everything that any source said about it."""

    directory: str
    source: str
    devices: set[int] = field(default_factory=set)
    hits: int = 0
    compiles: int = 0
    times_us: tuple[tuple[str, int], ...] = ()
    event: CompileEvent | None = None
    facts: KnownFacts | None = None

    @property
    def key(self) -> str:
        """The kernel key."""
        return os.path.basename(self.directory)

    @property
    def root(self) -> str:
        """The cache directory."""
        return os.path.dirname(self.directory)

    def count(self, cache_hit: bool) -> None:
        """Count one compile call."""
        self.hits += cache_hit
        self.compiles += not cache_hit

    @property
    def observation(self) -> Observation:
        """What goes into the observed part of the manifest."""
        layout = directories.inductor_layout(self.root)
        devices = self.devices if layout is None else {layout[1]}
        return Observation(
            tuple(sorted(devices)), ("triton" if layout is None else "inductor",), self.times_us
        )


class RecordedKernels:
    """All of them by directory; the source that names a directory first is its `source`, later ones
    add what they know.
    """

    def __init__(self) -> None:
        self._by_directory: dict[str, RecordedKernel] = {}

    def __iter__(self) -> Iterator[RecordedKernel]:
        return iter(sorted(self._by_directory.values(), key=lambda recorded: recorded.directory))

    def __contains__(self, directory: str) -> bool:
        return os.path.abspath(directory) in self._by_directory

    def add_event(self, event: CompileEvent, source: str) -> None:
        """Add what the listener, or the JIT's own cache, says."""
        recorded = self._at(event.directory, source)
        if event.device is not None:
            recorded.devices.add(event.device)
        if source == LISTENER:
            recorded.count(event.cache_hit)
        if event.stage_times_us and not event.cache_hit:
            recorded.times_us = event.stage_times_us
        if recorded.event is None or recorded.event.options is None:
            recorded.event = event

    def add_spooled(self, event: SpooledEvent) -> None:
        """Add what a child process wrote."""
        recorded = self._at(event.directory, CHILDREN)
        if event.device is not None:
            recorded.devices.add(event.device)
        recorded.count(event.cache_hit)
        recorded.times_us = recorded.times_us or event.stage_times_us
        if recorded.event is None and recorded.facts is None:
            recorded.facts = KnownFacts(event.toolchain, event.facts_bytes, event.parts_bytes)

    def add_directory(self, directory: str) -> None:
        """Add a directory that appeared without a word from Triton."""
        self._at(directory, DIRECTORIES)

    def _at(self, directory: str, source: str) -> RecordedKernel:
        path = os.path.abspath(directory)
        return self._by_directory.setdefault(path, RecordedKernel(path, source))
