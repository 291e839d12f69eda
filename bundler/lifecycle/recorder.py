# SPDX-License-Identifier: Apache-2.0
"""`recording`, `begin_compile`, `collect`, `end_compile`: what this process and its children
compile, as a bundle.

A `RecordedKernel` is what four sources said of one kernel directory, `RecordedKernels` has all of
them; `collect_recorded` turns them into a bundle and a report, for sessions too.
Users call these functions; the launcher records with `recording` what a missing specialization
makes it compile (`bundler/runtime/launch/compile_fallback.py`).
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

from bundler.errors import RecordingError
from bundler.fork_safety import after_fork
from bundler.format import names
from bundler.format.bundle import Bundle, Keep, check_keep, with_parts
from bundler.format.bundle_union import merge
from bundler.format.candidate_timings import Tuning
from bundler.format.entries import Kernel
from bundler.format.launch_spec import TuningRecord
from bundler.format.summary import Reported, count, facts_html
from bundler.lifecycle.bundle_builder import Builder, KnownFacts, join, known_facts, observation_of
from bundler.lifecycle.directory_pack import add_found, tuning_results
from bundler.lifecycle.directory_watch import DirectoryWatch
from bundler.lifecycle.kernel_directory import KernelFiles, Rejected, read_kernels
from bundler.lifecycle.lifecycle_reports import Reasons
from bundler.lifecycle.listeners import program_listeners, tuning_listeners
from bundler.lifecycle.tuning_directory import winners_in, with_tunings
from bundler.toolchain import identity, inductor_caches, instances
from bundler.toolchain.events import CompileEvent
from bundler.toolchain.recording import compile_listener
from bundler.toolchain.recording.child_recording import ChildSpool
from bundler.toolchain.recording.compile_listener import listening
from bundler.toolchain.recording.spool_records import SpooledEvent

if TYPE_CHECKING:
    from bundler.format.source_stripping import Strip

LISTENER, CHILDREN, JIT_CACHE, DIRECTORIES = "listener", "children", "jit-cache", "directories"


@dataclass(frozen=True, repr=False)
class RecordReport(Reported):
    """What a recording saw.

    Attributes:
        sources: how many kernels were found by `listener`, `children`, `jit-cache` and
            `directories`; a kernel counts for the first of these that reported it.
        hits: compiles that Triton answered from its cache.
        compiles: real compiles, with `compile_seconds` spent in them, in all processes.
        left_out: (kernel key or file, reason) of everything seen that is not in the bundle.
        not_portable: (kernel key, argument) of constants that have no encoding: the kernel restores
            as usual, but cannot be compiled again from the bundle alone.
        without_facts: keys of kernels whose argument types are not known.
        errors: how often our own listener failed; details are in the log.
    """

    sources: Mapping[str, int] = field(default_factory=dict)
    hits: int = 0
    compiles: int = 0
    compile_seconds: float = 0.0
    left_out: Reasons = ()
    not_portable: Reasons = ()
    without_facts: tuple[str, ...] = ()
    errors: int = 0


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


def collect_recorded(
    kernels: RecordedKernels,
    roots: Iterable[str],
    keep: Keep,
    environment: tuple[tuple[str, str], ...] | None = None,
) -> tuple[Bundle, RecordReport]:
    """Read every directory that was seen.

    Args:
        kernels: what was seen, and by whom.
        roots: cache directories to search for results of Triton's tuner for the kernels found.
        keep: `all`, or `launch` for device binaries, metadata and tuning files only.
        environment: names and versions of the host that compiled; None for this process.

    Returns:
        The bundle, and a report that names whatever is not in it.
    """
    check_keep(keep)
    builders: dict[str, Builder] = {}
    seen = list(kernels)
    for recorded, found in zip(
        seen, read_kernels([recorded.directory for recorded in seen]), strict=True
    ):
        _take(recorded, found, builders.setdefault(recorded.root, Builder(recorded.root, keep)))
    roots = list(roots)
    _add_tuning_files(builders, roots, keep)
    bundle = join(builders.values(), environment or identity.environment())
    bundle = with_tunings(bundle, winners_in({*roots, *builders}, bundle))
    return bundle, _reported(kernels, bundle)


def collect_spool(spool: ChildSpool, keep: Keep = "all") -> tuple[Bundle, RecordReport]:
    """Return what the processes that wrote to a spool compiled."""
    kernels = RecordedKernels()
    add_spool(kernels, spool)
    roots = {recorded.root for recorded in kernels}
    # The children may run another Python than this process; what their records say of Triton is
    # what is known.
    releases = {
        ("triton", event.toolchain.release) for event in spool.events() if event.toolchain.release
    }
    host = tuple(
        pair for pair in identity.environment() if pair[0] in {"platform", "gpu", "driver"}
    )
    bundle, report = collect_recorded(kernels, roots, keep, (*host, *sorted(releases)))
    return bundle, replace(report, left_out=merge_reasons(report.left_out, spool.problems))


def add_spool(kernels: RecordedKernels, spool: ChildSpool) -> None:
    """Add everything that child processes wrote down."""
    for event in spool.events():
        kernels.add_spooled(event)
    for file in spool.files():
        if file.directory not in kernels:
            kernels.add_directory(file.directory)


def merge_reasons(*reasons: Iterable[tuple[str, str]]) -> Reasons:
    """Return all reasons once, in order."""
    return tuple(sorted({pair for group in reasons for pair in group}))


def _take(recorded: RecordedKernel, found: KernelFiles | Rejected, builder: Builder) -> None:
    facts = recorded.facts
    seen = observation_of(recorded.root, recorded.devices, recorded.times_us)
    if facts is None and recorded.event is not None:
        facts = known_facts(recorded.event, builder.left_out)
    add_found(builder, recorded.key, found, seen, facts)


def _add_tuning_files(builders: dict[str, Builder], roots: Iterable[str], keep: Keep) -> None:
    """Take results of Triton's tuner for the kernels we have, also those that were there before."""
    wanted = {kernel.name for builder in builders.values() for kernel in builder.kernels}
    for root in roots:
        for key, name in tuning_results(root):
            if name.removesuffix(names.AUTOTUNE_SUFFIX) in wanted:
                builders.setdefault(root, Builder(root, keep)).add_single(key, name)


def _reported(kernels: RecordedKernels, bundle: Bundle) -> RecordReport:
    taken = {kernel.key for kernel in bundle.kernels}
    sources = Counter({s.key: s.source for s in kernels if s.key in taken}.values())
    return RecordReport(
        sources=dict(sorted(sources.items())),
        hits=sum(recorded.hits for recorded in kernels),
        compiles=sum(recorded.compiles for recorded in kernels),
        compile_seconds=sum(us for recorded in kernels for _, us in recorded.times_us) / 1e6,
        left_out=bundle.left_out,
        not_portable=tuple((k.key, name) for k in bundle.kernels for name in _unportable(k)),
        without_facts=tuple(k.key for k in bundle.kernels if k.facts_bytes is None),
    )


def _unportable(kernel: Kernel) -> tuple[str, ...]:
    facts = kernel.launch.facts
    return () if facts is None else facts.unportable


# -------------------------------------------------------------------------------------- Recordings


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
        programs: also take what the generator made of this process's graphs for torch.compile, or
            found where it keeps such programs.  Their texts are run, so the bundle is code then:
            who restores it has to trust that.
    """

    def __init__(self, *, children: bool = False, programs: bool = False) -> None:
        self._spool = ChildSpool() if children else None
        self._lock = threading.Lock()
        self._events: list[CompileEvent] = []
        self._tunings: list[tuple[TuningRecord, Tuning | None]] = []
        self._takes_programs, self._programs = programs, set[str]()
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
        if self._takes_programs:
            program_listeners.attach(self._hear_program)
        instances.note_from_now_on()
        try:
            if self._spool is not None:
                self._spool.__enter__()
            self._watch = DirectoryWatch()
        except BaseException:
            self._detach()
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
        self._detach()
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
        with self._lock:
            tunings, programs = list(self._tunings), sorted(self._programs)
        if programs:
            from bundler.lifecycle.family_pack import pack_programs  # few recordings have any

            packed = pack_programs(programs, keep)
            left_out = merge_reasons(left_out, packed.left_out)
            bundle = merge([bundle, packed])
        self.report = replace(report, left_out=left_out, errors=self._errors())
        bundle = with_parts(bundle, bundle.content, bundle.observed, left_out=left_out)
        whole = with_tunings(bundle, tunings)
        if strip is None:
            return whole
        # Who strips nothing needs none of it
        from bundler.format.source_stripping import (
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

    def _detach(self) -> None:
        listening.detach(self._hear)
        tuning_listeners.detach(self._hear_tuning)
        program_listeners.detach(self._hear_program)

    def _hear_program(self, path: str) -> None:
        with self._lock:
            self._programs.add(path)

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

    def begin(self, *, children: bool = False, programs: bool = False) -> None:
        """Open a recording inside the innermost one."""
        with self._lock:
            if not any(self._pairs):
                self._pairs.clear()
            self._pairs.append(Recording(children=children, programs=programs).start())

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


def recording(*, children: bool = False, programs: bool = False) -> Recording:
    """Return a recording to use in a `with` statement: `with bundler.recording() as rec: ...;
    rec.collect()`.

    Args:
        children: also record child processes that start inside the block.
        programs: also take generated programs of torch.compile's graphs, which are code.

    Raises:
        RecordingError: at the start of the block, when Triton is not installed.
    """
    return Recording(children=children, programs=programs)


def begin_compile(*, children: bool = False, programs: bool = False) -> None:
    """Start to record; nests.  See `RecordingStack` for what each call does in each state."""
    _stack.begin(children=children, programs=programs)


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
