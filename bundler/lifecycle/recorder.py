# SPDX-License-Identifier: Apache-2.0
"""`recording`, `begin_compile`, `collect`, `end_compile`: what this process and its children
compile, as a bundle.

Users call these functions; the launcher records with `recording` what a missing specialization
makes it compile (`bundler/runtime/launch/compile_fallback.py`).
"""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from bundler.errors import RecordingError
from bundler.fork_safety import after_fork
from bundler.format.bundle import Bundle, Keep
from bundler.format.candidate_timings import Tuning
from bundler.format.launch_spec import TuningRecord
from bundler.format.summary import count, facts_html
from bundler.lifecycle.collection import add_spool, collect_recorded, merge_reasons
from bundler.lifecycle.directory_watch import DirectoryWatch
from bundler.lifecycle.lifecycle_reports import RecordReport
from bundler.lifecycle.recorded_kernels import JIT_CACHE, LISTENER, RecordedKernels
from bundler.lifecycle.tuning.tuning_directory import tuning_listeners, with_tunings
from bundler.toolchain import inductor_caches, instances
from bundler.toolchain.events import CompileEvent
from bundler.toolchain.recording import compile_listener
from bundler.toolchain.recording.child_recording import ChildSpool
from bundler.toolchain.recording.compile_listener import listening

if TYPE_CHECKING:
    from bundler.format.binaries.source_stripping import Strip


class Recording:
    """Hears every Triton compile and hit of this process, from any thread, between `start` and
    `stop`.

    Recordings may overlap and nest; each hears everything that happens while it runs.  Besides the
    listener it looks for kernels that the JIT had loaded before, for complete kernel directories
    that appear without a listener call, and, with `children`, for what child processes compile.

    Not guaranteed: a kernel that was loaded before the recording, and whose directory was there
    before, is not seen where code keeps it to itself: outside the JIT's caches, or under a function
    that `toolchain.instances` does not know.  After a fork the child's copy hears nothing; with
    `children` the child reports through the spool like any other.

    Args:
        children: also record child processes that start while the recording runs.  It sets
            TRITON_CACHE_MANAGER for them, so torch's compile workers must start inside the
            recording.
    """

    def __init__(self, *, children: bool = False) -> None:
        self._spool = ChildSpool() if children else None
        self._lock = threading.Lock()
        self._events: list[CompileEvent] = []
        self._tunings: list[tuple[TuningRecord, Tuning | None]] = []
        self._watch: DirectoryWatch | None = None
        self._final: RecordedKernels | None = None
        self._pid = os.getpid()
        self._errors_before = 0
        self.report = RecordReport()

    @property
    def _state(self) -> str:
        return (
            "not started"
            if self._watch is None
            else "running"
            if self._final is None
            else "stopped"
        )

    def __repr__(self) -> str:
        hits = sum(event.cache_hit for event in self._events)
        heard = f"{count(len(self._events) - hits, 'compile')} and {count(hits, 'hit')} heard"
        return (
            f"<Recording {self._state},"
            f" {heard}{', with children' if self._spool is not None else ''}>"
        )

    def _repr_html_(self) -> str:
        hits = sum(event.cache_hit for event in self._events)
        heard = [
            ("compiles", f"{len(self._events) - hits:,}"),
            ("hits", f"{hits:,}"),
            ("children", "recorded, too" if self._spool is not None else "not recorded"),
        ]
        return facts_html(f"Recording, {self._state}", heard)

    def start(self) -> Self:
        """Begin to hear, once; raises `RecordingError` when Triton is not installed, or when this
        was called before.
        """
        if self._watch is not None:
            raise RecordingError(
                "this recording was started before; make another one with bundler.recording()"
            )
        self._pid, self._errors_before = os.getpid(), sum(listening.errors.values())
        listening.attach(self._hear)
        tuning_listeners.attach(self._hear_tuning)
        instances.note_from_now_on()
        try:
            if self._spool is not None:
                self._spool.__enter__()
            self._watch = DirectoryWatch()
        except BaseException:
            listening.detach(self._hear)
            tuning_listeners.detach(self._hear_tuning)
            if self._spool is not None:
                self._spool.close()
            raise
        return self

    def stop(self) -> None:
        """Hear no more; what was heard stays to be collected.  Stopping twice is fine."""
        if self._watch is None or self._final is not None:
            return
        if os.getpid() != self._pid:
            # A forked child leaves the block: what was attached, and the spool, are the parent's.
            self._final = RecordedKernels()
            return
        listening.detach(self._hear)
        tuning_listeners.detach(self._hear_tuning)
        if self._spool is not None:
            self._spool.close()  # reads what the last child wrote
        self._final = self._gather()

    def collect(self, keep: Keep = "all", strip: Strip | None = None) -> Bundle:
        """Return what was recorded so far as a bundle, and update `report`.

        A kernel is in the bundle with all its files, from one compile, or it is in
        `report.left_out` with the reason.

        Args:
            keep: `launch` takes device binaries, metadata and tuning files only.
            strip: `source` takes out what tells of where and from what kernels were compiled, as
                `strip_source` does.

        Raises:
            ConfigError: another value for `keep` or `strip`.
            RecordingError: the recording was never started.
        """
        bundle, report = collect_recorded(
            self._final or self._gather(), self._started().roots(), keep
        )
        left_out = merge_reasons(
            report.left_out, self._spool.problems if self._spool is not None else ()
        )
        self.report = replace(report, left_out=left_out, errors=self._errors())
        with self._lock:
            tunings = list(self._tunings)
        found = Bundle(
            bundle.content,
            bundle.observed,
            bundle.blobs,
            variants_dropped=bundle.variants_dropped,
            left_out=left_out,
        )
        whole = with_tunings(found, tunings)
        if strip is None:
            return whole
        # Who strips nothing needs none of it
        from bundler.format.binaries.source_stripping import (
            check_strip,
            strip_source,
        )

        check_strip(strip)
        return strip_source(whole)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_error: object) -> None:
        self.stop()

    def _started(self) -> DirectoryWatch:
        if self._watch is None:
            raise RecordingError(
                "this recording was never started; use it in a with statement or call start()"
            )
        return self._watch

    def _errors(self) -> int:
        return sum(listening.errors.values()) - self._errors_before

    def _hear(self, event: CompileEvent) -> None:
        instances.note_from_now_on()  # torch may have been imported since
        with self._lock:
            self._events.append(event)

    def _hear_tuning(self, record: TuningRecord, tuning: Tuning | None) -> None:
        with self._lock:
            self._tunings.append((record, tuning))

    def _gather(self) -> RecordedKernels:
        watch = self._started()
        with self._lock:
            events = list(self._events)
        kernels = RecordedKernels()
        for event in events:
            kernels.add_event(event, LISTENER)
        if self._spool is not None:
            add_spool(kernels, self._spool)
        for event in compile_listener.loaded_kernels():
            kernels.add_event(event, JIT_CACHE)
        for directory in (*watch.appeared(), *inductor_caches.loaded_directories()):
            if directory not in kernels:
                kernels.add_directory(directory)
        return kernels


class RecordingStack:
    """The recordings that `begin_compile` opened, innermost last.

    ::

        state            begin      collect           end
        idle             records    RecordingError    no effect
        recording        nests      Bundle, pops      discards, pops
        after collect    records    RecordingError    no effect (closes the pair)

    One stack a process, under a lock: Triton's asynchronous mode, Inductor's template pool and
    autograd all compile in threads of their own, so a stack for each thread would miss them.  Two
    threads that open pairs at the same time should use `recording` objects instead: here the
    innermost pair is whichever began last.  A forked child is idle.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        # None stands for a pair that was collected and not yet ended.
        self._pairs: list[Recording | None] = []

    def begin(self, *, children: bool = False) -> None:
        """Open a recording inside the innermost one."""
        with self._lock:
            if not any(self._pairs):
                self._pairs.clear()
            self._pairs.append(Recording(children=children).start())

    def collect(self, keep: Keep = "all", strip: Strip | None = None) -> Bundle:
        """Close the innermost recording and return its bundle."""
        with self._lock:
            for index, recording in reversed(list(enumerate(self._pairs))):
                if recording is not None:
                    recording.stop()
                    bundle = recording.collect(keep, strip)
                    self._pairs[index:] = [None]
                    return bundle
        raise RecordingError("nothing is being recorded; call begin_compile() first")

    def end(self) -> None:
        """Close the pair that was opened last; discards its recording if it was not collected."""
        with self._lock:
            recording = self._pairs.pop() if self._pairs else None
            if recording is not None:
                recording.stop()

    def reset_after_fork(self) -> None:
        """Forget the parent's pairs; for the child only, whose copy of the lock another thread may
        have held.
        """
        self._lock = threading.RLock()
        self._pairs = []


_stack = RecordingStack()
after_fork(_stack.reset_after_fork)


def recording(*, children: bool = False) -> Recording:
    """Return a recording to use in a `with` statement: `with bundler.recording() as rec: ...;
    rec.collect()`.

    Args:
        children: also record child processes that start inside the block.

    Raises:
        RecordingError: at the start of the block, when Triton is not installed.
    """
    return Recording(children=children)


def begin_compile(*, children: bool = False) -> None:
    """Start to record; nests.  See `RecordingStack` for what each call does in each state."""
    _stack.begin(children=children)


def collect(keep: Keep = "all", strip: Strip | None = None) -> Bundle:
    """Finish the innermost recording and return its bundle; raises `RecordingError` when there is
    none.
    """
    return _stack.collect(keep, strip)


def end_compile() -> None:
    """Discard the innermost recording unless it was collected; safe in a `finally` in every
    state.
    """
    _stack.end()
