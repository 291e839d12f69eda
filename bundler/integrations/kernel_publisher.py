# SPDX-License-Identifier: Apache-2.0
"""Sends what Triton compiled to the store: from a thread within a moment, or at once where no
thread may outlive the call.

`Publisher` knows nothing of kernels: it hands batches of jobs (`MadeKernel`, `MadeFile`,
`EndedLease`) to a function.  Each lookup engine (`lookup_engine.py`) has one; it calls `bundle_of`
to send kernels, and `file_known_by` to name files.  It tells `UsedKernels` of each kernel, whose
`gather` makes the bundle that a session's tag gets at the end.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from bundler.format.bundle import Bundle, Keep
    from bundler.format.manifest import Observation
    from bundler.lifecycle.bundle_builder import Builder
    from bundler.lifecycle.compiled_once import CompileLease
    from bundler.toolchain.recording.spool_records import SpooledEvent


T = TypeVar("T")
# Kernels that are compiled within this time travel together; what is seen by nobody yet may wait as
# long.
GATHER_S = 0.05
THREAD = "bundler-publish"
_IDLE_S = 1.0
# Of the flags in /proc/self/stat: forked, and nothing executed since.
_PF_FORKNOEXEC = 0x40
_FLAGS_AFTER_NAME = 6


class _State(Generic[T]):
    """What the thread and those who wait for it share; made anew in a forked child."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.queue: list[T] = []
        self.sending = 0
        self.thread: threading.Thread | None = None


class Publisher(Generic[T]):
    """Calls `send` with what was handed over, in order, in one thread.

    In a forked child, and in any child of `multiprocessing`, nothing runs at the end (torch's
    compile workers are such), so `send` is called before `hand_over` returns.

    Args:
        send: sends a batch; must not raise.
    """

    def __init__(self, send: Callable[[list[T]], None]) -> None:
        self._send = send
        self._forked = was_forked()
        self._state = _State[T]()

    def hand_over(self, job: T) -> None:
        """Send a job soon, or at once in a child process."""
        if self._forked or _started_by_multiprocessing():
            self._send([job])
            return
        state = self._state
        with state.changed:
            state.queue.append(job)
            if state.thread is None:
                state.thread = threading.Thread(
                    target=self._run, args=(state,), name=THREAD, daemon=True
                )
                state.thread.start()
            state.changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything that was handed over is sent; False when the time was too short."""
        state, until = self._state, time.monotonic() + timeout_s
        with state.changed:
            while state.queue or state.sending:
                left_s = until - time.monotonic()
                if left_s <= 0:
                    return False
                state.changed.wait(left_s)
        return True

    def reset_after_fork(self) -> None:
        """Leave to the parent what is its to send; for the child only."""
        self._forked = True
        self._state = _State[T]()

    def _run(self, state: _State[T]) -> None:
        while True:
            with state.changed:
                if not state.changed.wait_for(lambda: bool(state.queue), timeout=_IDLE_S):
                    state.thread = None  # the next job starts another
                    return
            time.sleep(GATHER_S)
            with state.changed:
                batch, state.queue, state.sending = state.queue, [], len(state.queue)
            try:
                self._send(batch)
            finally:
                with state.changed:
                    state.sending = 0
                    state.changed.notify_all()


def _started_by_multiprocessing() -> bool:
    process: Any = sys.modules.get(
        "multiprocessing.process"
    )  # which its children import before anything of ours
    return process is not None and process.parent_process() is not None


def was_forked() -> bool:
    """Tell whether this process is a fork of another Python; its end may run nothing, also where we
    were imported after the fork.
    """
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        return bool(int(fields[_FLAGS_AFTER_NAME]) & _PF_FORKNOEXEC)
    except (OSError, ValueError, IndexError):
        return False


class MadeKernel(NamedTuple):
    """A kernel that was compiled, and the turn that others may wait for."""

    event: SpooledEvent
    turn: CompileLease | None


class MadeFile(NamedTuple):
    """A tuning file or helper library that was made: what it is known by in the store, its name and
    its bytes.
    """

    known_by: str
    filename: str
    data: bytes


class EndedLease(NamedTuple):
    """A turn that ended without a kernel."""

    turn: CompileLease


Job = MadeKernel | MadeFile | EndedLease


def file_known_by(key: str, filename: str, origin: str | None) -> str:
    """Return what a single file is known by in a store.

    A helper library by what it is built of, since its key differs between machines and releases;
    anything else by its place.
    """
    return f"file {key}/{filename}" if origin is None else f"library {origin}/{filename}"


def bundle_of(kernels: Sequence[MadeKernel], keep: Keep) -> Bundle:
    """Return the compiled kernels as a bundle; `left_out` says which could not be read, and why."""
    # A process that only finds kernels imports none of this.
    from bundler.lifecycle.bundle_builder import Builder, KnownFacts, join
    from bundler.toolchain import identity

    builders: dict[str, Builder] = {}
    for made in kernels:
        event = made.event
        root = os.path.dirname(os.path.abspath(event.directory))
        builder = builders.setdefault(root, Builder(root, keep))
        facts = KnownFacts(event.toolchain, event.facts_bytes, event.parts_bytes)
        builder.add_directory(event.key, _observation(event), facts)
    return join(builders.values(), identity.environment())


def _observation(event: SpooledEvent) -> Observation:
    from bundler.lifecycle.recorded_kernels import RecordedKernel

    devices = set() if event.device is None else {event.device}
    return RecordedKernel(event.directory, "", devices, times_us=event.stage_times_us).observation


class UsedKernels:
    """The kernels that one process compiled or found, until they are gathered.

    Besides what the cache manager was asked for it takes what the JIT has loaded, and complete
    kernel directories that appeared in this process's caches: torch's workers and its static
    launcher ask no manager of this process.
    """

    def __init__(self) -> None:
        # Only a session that gives a tag what it used needs it.
        from bundler.lifecycle.directory_watch import DirectoryWatch

        self._lock = threading.Lock()
        self._events: dict[str, SpooledEvent] = {}
        self._watch = DirectoryWatch()
        self._pid = os.getpid()

    def __contains__(self, key: str) -> bool:
        return key in self._events

    def add(self, event: SpooledEvent) -> None:
        """Add a kernel."""
        with self._lock:
            self._events[event.key] = event

    def gather(self, keep: Keep) -> Bundle:
        """Return everything as a bundle; what could not be read is left out."""
        # At the end of the session, when nobody waits for a kernel.
        from bundler.lifecycle.collection import collect_recorded
        from bundler.lifecycle.recorded_kernels import JIT_CACHE, RecordedKernels
        from bundler.toolchain.inductor import inductor_tuners
        from bundler.toolchain.recording import loaded_kernels

        with self._lock:
            events = list(self._events.values())
        kernels = RecordedKernels()
        for event in events:
            kernels.add_spooled(event)
        # A forked child has its parent's caches, which the parent gathers.
        if self._pid == os.getpid():
            for found in loaded_kernels.loaded_kernels():
                kernels.add_event(found, JIT_CACHE)
            for directory in (*self._watch.appeared(), *inductor_tuners.loaded_directories()):
                if directory not in kernels:
                    kernels.add_directory(directory)
        roots = {recorded.root for recorded in kernels}
        bundle, _ = collect_recorded(kernels, roots, keep)
        return bundle

    def reset_after_fork(self) -> None:
        """Leave to the parent what is its own; for the child only."""
        self._lock = threading.Lock()
        self._events = {}
