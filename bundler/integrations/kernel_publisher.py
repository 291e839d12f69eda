# SPDX-License-Identifier: Apache-2.0
"""Sends what Triton compiled to the store: from a thread within a moment, or at once where no
thread may outlive the call.

`Publisher` knows nothing of kernels: it hands batches of jobs (`MadeKernel`, `MadeFile`,
`EndedLease`) to a function.  Each lookup engine (`lookup_engine.py`) has one; it calls `bundle_of`
to send kernels, and `file_known_by` to name files.
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
    from bundler.lifecycle.bundle_builder import observation_of

    root = os.path.dirname(os.path.abspath(event.directory))
    devices = set() if event.device is None else {event.device}
    return observation_of(root, devices, event.stage_times_us)
