# SPDX-License-Identifier: Apache-2.0
"""`Engine`: what one session does for Triton's cache managers: look up, place, publish, count.

`_process.py` makes one for each session and hands it to the managers
(`bundler/toolchain/recording/cache_manager.py`), who call it `CacheDelegate`.

What Triton compiled goes to its `Publisher` as jobs (`MadeKernel`, `MadeFile`, `EndedLease`), which
are sent from a thread within a moment, or at once where no thread may outlive the call.
`UsedKernels` keeps account of what the session's tag gets at the end.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from bundler import observers
from bundler.errors import AccessDenied, BundlerError
from bundler.format import names
from bundler.integrations.failure_policy import MANY_HITS, FailurePolicy, StrictMode, Tally
from bundler.integrations.kernel_lookup import (
    FoundKernel,
    KernelSources,
    RegisteredBundles,
    SessionOptions,
    find_moved,
)
from bundler.integrations.miss_notes import KEPT_SOURCES, MissNotes
from bundler.integrations.user_directories import LocalDirectory, UserDirectories
from bundler.toolchain import compile_frames, directories, identity, instances
from bundler.toolchain.recording.cache_delegate import CacheCall, CacheDelegate, Group

if TYPE_CHECKING:
    from bundler.format.bundle import Bundle, Keep
    from bundler.integrations.key_comparison import KeyedKernel
    from bundler.integrations.replayed_kernels import ReplayReport
    from bundler.lifecycle.bundle_builder import Builder
    from bundler.lifecycle.cache_directory import CacheDirectory
    from bundler.lifecycle.compiled_once import CompileLease
    from bundler.lifecycle.machine_store import Store
    from bundler.toolchain.recording.spool_records import SpooledEvent


# Kernels that are compiled within this time travel together; what is seen by nobody yet may wait as
# long.
GATHER_S = 0.05
THREAD = "bundler-publish"
_IDLE_S = 1.0
# Of the flags in /proc/self/stat: forked, and nothing executed since.
_PF_FORKNOEXEC = 0x40
_FLAGS_AFTER_NAME = 6
# Recorded kernels that are compared for "what is nearest": the newest ones.
MOST_COMPARED = 10_000
MOST_REMEMBERED = 1000


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


class _State:
    """What the thread and those who wait for it share; made anew in a forked child."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.queue: list[Job] = []
        self.sending = 0
        self.thread: threading.Thread | None = None


class Publisher:
    """Calls `send` with what was handed over, in order, in one thread.

    In a forked child, and in any child of `multiprocessing`, nothing runs at the end (torch's
    compile workers are such), so `send` is called before `hand_over` returns.

    Args:
        send: sends a batch; must not raise.
    """

    def __init__(self, send: Callable[[list[Job]], None]) -> None:
        self._send = send
        self._forked = was_forked()
        self._state = _State()

    def hand_over(self, job: Job) -> None:
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
        self._state = _State()

    def _run(self, state: _State) -> None:
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


def file_known_by(key: str, filename: str, origin: str | None) -> str:
    """Return what a single file is known by in a store.

    A helper library by what it is built of, since its key differs between machines and releases;
    anything else by its place.
    """
    return f"file {key}/{filename}" if origin is None else f"library {origin}/{filename}"


def bundle_of(kernels: Sequence[MadeKernel], keep: Keep) -> Bundle:
    """Return the compiled kernels as a bundle; `left_out` says which could not be read, and why."""
    # A process that only finds kernels imports none of this.
    from bundler.lifecycle.bundle_builder import Builder, KnownFacts, join, observation_of

    builders: dict[str, Builder] = {}
    for made in kernels:
        event = made.event
        root = os.path.dirname(os.path.abspath(event.directory))
        builder = builders.setdefault(root, Builder(root, keep))
        facts = KnownFacts(event.toolchain, event.facts_bytes, event.parts_bytes)
        devices = set() if event.device is None else {event.device}
        seen = observation_of(builder.root, devices, event.stage_times_us)
        builder.add_directory(event.key, seen, facts)
    return join(builders.values(), identity.environment())


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
        from bundler.lifecycle.recorder import JIT_CACHE, RecordedKernels, collect_recorded
        from bundler.toolchain import inductor_caches
        from bundler.toolchain.recording import compile_listener

        with self._lock:
            events = list(self._events.values())
        kernels = RecordedKernels()
        for event in events:
            kernels.add_spooled(event)
        # A forked child has its parent's caches, which the parent gathers.
        if self._pid == os.getpid():
            for found in compile_listener.loaded_kernels():
                kernels.add_event(found, JIT_CACHE)
            for directory in (*self._watch.appeared(), *inductor_caches.loaded_directories()):
                if directory not in kernels:
                    kernels.add_directory(directory)
        roots = {recorded.root for recorded in kernels}
        bundle, _ = collect_recorded(kernels, roots, keep)
        return bundle

    def reset_after_fork(self) -> None:
        """Leave to the parent what is its own; for the child only."""
        self._lock = threading.Lock()
        self._events = {}


class Engine(CacheDelegate):
    """The delegate of one session; its methods are called by any thread.

    Guarantees: no failure of a cache leaves it but in strict mode; what it places is verified and
    appears whole. A forked child goes on with it: it publishes for itself and counts from nought.

    Args:
        store: where kernels are shared; None for a session that only uses registered bundles.
        options: what the session was told.
        registered: bundles of libraries.
    """

    def __init__(
        self, store: Store | None, options: SessionOptions, registered: RegisteredBundles
    ) -> None:
        self.store, self.options = store, options
        self._reads = options.reads
        # A store that was opened for reading is as if the mode were `read`: it has no leases and
        # takes no tag.
        self._writes = options.writes and (store is None or store.writable)
        self.tally = Tally()
        self.failures = FailurePolicy(self.tally, lambda: self.strict_mode.mode)
        self.strict_mode = StrictMode(options.strict, self._recorded, self.failures.unexpected)
        self.publisher = Publisher(self._send)
        self._sources = KernelSources(store, registered, options.keep, self._on_failure)
        local = LocalDirectory(options.local, self.failures.unsafe)
        self._user_directories, self._notes = UserDirectories(local, self._moved), MissNotes(local)
        self._compiled: deque[SpooledEvent] = deque(maxlen=MOST_REMEMBERED)
        self._turns: dict[str, tuple[int, CompileLease]] = {}
        # By path.  A directory is listed, and swept, once a session, not for each kernel.
        self._directories: dict[str, CacheDirectory] = {}
        # Keys of the tag that are in the usual directory since the start.  A restore checks each
        # before it looks what is there.
        self._prefetched: frozenset[str] = frozenset()
        # Of those that only moved: the key under which each was recorded.
        self._moved_from: dict[str, str] = {}
        # Looked for when the first kernel is placed: Triton, which asks for kernels, does not move.
        self._triton_dir: str | None = None
        self.used: UsedKernels | None = None
        self.replayed: ReplayReport | None = None

    def start(self) -> None:
        """Fetch the tag, if there is one, and begin to keep account of what it will get."""
        instances.note_from_now_on()
        if self.options.tag is None:
            return
        if self._reads:
            with self.failures.tolerating(f"tag {self.options.tag} was not fetched"):
                self._fetch_tag(self.options.tag)
        else:
            with self.failures.tolerating("a tag was not looked for", can_raise=False):
                self._mention_missing(self.options.tag)
        if self._writes and self.options.push is not None:
            self.used = UsedKernels()

    def _fetch_tag(self, tag: str) -> None:
        root = directories.triton_cache_dir()
        place = self.writable(root)
        # Without a replay a function that moved is looked for when Triton asks for its kernel.
        moved = self.options.moved and self.options.replay
        report = self._sources.fetch_tag(
            tag, None if place == root else place, self.options.trust, moved=moved
        )
        if report is None:
            self._mention_missing(tag)
        else:
            self._prefetched = frozenset((*report.restored, *report.present, *report.repaired))
            self._moved_from = dict(report.moved)
            self.tally.add("bytes_fetched", report.bytes, told=True)
            if self.options.replay:
                with self.failures.tolerating(f"tag {tag} was not replayed"):
                    self._replay(dict.fromkeys((place, root)))

    def _replay(self, roots: Iterable[str]) -> None:
        from bundler.integrations.replayed_kernels import replay_restored

        if (tag := self._sources.tag) is not None:
            self.replayed, complaint = replay_restored(tag.bundle, roots, moved=self.options.moved)
            self.strict_mode.set_mode(self.options.serving or self.options.strict)
            if complaint:
                self.failures.warn(complaint)

    def _mention_missing(self, tag: str) -> None:
        """Say that a tag is not set, which is a first run, or a misspelled one."""
        near = self.store.near_tags(tag) if self.store is not None else ()
        if self.store is None or tag in near:  # the tag is set, and what it names is missing
            return
        from bundler.store.stored_manifests import did_you_mean

        makes = self._writes and self.options.push is not None
        then = "this session makes it at its end" if makes else "nothing is fetched"
        hint = f"; {did_you_mean(near)}" if near else ""
        self.failures.warn(f"tag {tag!r} is not in {self.store.name} yet: {then}{hint}")

    # ---------------------------------------------------------------------- What cache managers ask

    def writable(self, root: str) -> str:
        """Return where to write what belongs into `root`."""
        if root in self._user_directories.writable_roots:  # asked for each key
            return root
        return self._user_directories.writable(root)

    def found(self, call: CacheCall, group: Group) -> None:
        """Count a kernel that was in Triton's directory."""
        self._note()
        seconds = self._sources.tag_seconds(call.key)
        self._count_hit(
            call.key, "tag" if call.key in self._prefetched else "triton", seconds or 0.0, 0
        )
        if call.key in self._moved_from:
            self.tally.moved(call.key, self._moved_from[call.key])
        elif self.used is not None and seconds is None and call.key not in self.used:
            with self.failures.tolerating(f"{call.name} was not recorded"):
                self.used.add(call.record(cache_hit=True))

    def fetch(self, call: CacheCall) -> Group | None:
        """Place a kernel; None when it has to be compiled."""
        self._note()
        try:
            group = self._fetch(call)
        except Exception as error:  # noqa: BLE001  # as `tolerating`, without its cost for each kernel
            group = None
            self.failures.tolerate(error, f"looking up {call.name}")
        if group is not None:
            return group
        self.tally.add("misses")
        try:
            self._strictly(call)
        except BaseException:  # in strict mode no compile follows, so others must not wait for one
            self.abandoned(call)
            raise
        return None

    def _strictly(self, call: CacheCall, why: str = "") -> None:
        with self.failures.tolerating(f"strict mode cannot tell what {call.name} is"):
            self.strict_mode.miss(lambda: call.record(cache_hit=False), why)

    def _fetch(self, call: CacheCall) -> Group | None:
        if not self._reads:
            return None
        found = self._sources.find_in_tag(call.key)
        if found is None:
            answer = self._sources.find(
                call.key, turn=self._may_take_turn(call.key), moved=self._moved_finder(call)
            )
            if not isinstance(answer, FoundKernel):
                if answer is not None:
                    self._turns[call.key] = (threading.get_ident(), answer)
                return None
            found = answer
        return self._place(call, found)

    def _moved_finder(self, call: CacheCall) -> Callable[[], FoundKernel | None] | None:
        """Return what looks for a kernel that only moved; None where nobody asked for such."""
        frame = compile_frames.find_compile() if self.options.moved else None
        if frame is None:
            return None

        def find() -> FoundKernel | None:
            # Whatever fails here, the kernel is compiled as without it.
            with self.failures.tolerating(f"looking for {call.name} as moved"):
                return find_moved(call.key, frame, self._sources)
            return None

        return find

    def _may_take_turn(self, key: str) -> bool:
        held = self._turns.get(key)
        # Waiting for our own lease, after a compile of ours that failed, would be waiting for
        # nobody.
        mine = held is not None and held[0] == threading.get_ident()
        # In strict mode no compile follows, and a lease would make others wait for one.
        return self._writes and self.strict_mode.mode != "error" and not mine

    def _place(self, call: CacheCall, found: FoundKernel) -> Group | None:
        from bundler.lifecycle.cache_directory import place_kernel

        directory = self._directory(call.root)
        if self._triton_dir is None:
            self._triton_dir = identity.triton_dir()
        placed = place_kernel(
            found.source,
            found.kernel,
            directory,
            keep=self.options.keep,
            trust=self._sources.trust_in(found, self.options.trust),
            triton_dir=self._triton_dir,
            checked=found.place == "tag" and call.key in self._prefetched,
        )
        if not isinstance(placed, tuple):
            message = (
                f"{call.name} ({call.key}) of the {found.place} cannot be used: {placed.reason}"
            )
            self.failures.warn_once("rejected", message)
            if found.moved_from is None:
                self._sources.reject(found)
            return None
        outcome, placement = placed
        written = placement.size_bytes if outcome != "present" else 0
        self._count_hit(call.key, found.place, found.seconds, written)
        if found.moved_from is not None:  # which no bundle holds under this key
            self.tally.moved(call.key, found.moved_from)
        elif self.used is not None and found.place != "tag":
            self.used.add(_event_of(found, call))
        folder = f"{directory.path}/{call.key}"
        if outcome != "present":
            return {name: f"{folder}/{name}" for name in placement.names}
        # What lies there may be another build with other files.
        from bundler.toolchain.recording.cache_manager import read_group

        return read_group(folder, call.filename)

    def _count_hit(self, key: str, place: str, seconds: float, size_bytes: int) -> None:
        hits = self.tally.hits
        hits.append((place, seconds, size_bytes, key))
        if len(hits) >= MANY_HITS or observers.listeners:
            self.tally.fold()

    def _directory(self, root: str) -> CacheDirectory:
        path = (
            root if root in self._directories else os.path.abspath(root)
        )  # it may be relative to where we are now
        if path not in self._directories:
            from bundler.lifecycle.cache_directory import CacheDirectory

            self._directories[path] = CacheDirectory(path)
        return self._directories[path]

    def forced(self, call: CacheCall) -> None:
        """Hear that Triton was told to compile a kernel whether it is there or not."""
        self._note()
        self._strictly(call, "TRITON_ALWAYS_COMPILE is set")

    def compiled(self, call: CacheCall, group: Group) -> None:
        """Count a compile, and publish what it made."""
        record = None
        try:
            with self.failures.tolerating("a compile was not recorded"):
                record = call.record(cache_hit=False, group=group)
        finally:
            if record is None:
                self.abandoned(call)
        if record is None:
            return
        turn = self._turns.pop(call.key, (0, None))[1]
        self._compiled.append(record)
        self.tally.compiled(record.name, sum(us for _, us in record.stage_times_us) / 1e6, call.key)
        if self.used is not None:
            self.used.add(record)
        self.publisher.hand_over(MadeKernel(record, turn))

    def abandoned(self, call: CacheCall) -> None:
        """Let others compile a kernel that is not compiled here any more."""
        turn = self._turns.pop(call.key, (0, None))[1]
        if turn is not None:
            # This may be called by the garbage collector, in any thread and at any place.
            self.publisher.hand_over(EndedLease(turn))

    def fetch_file(self, key: str, filename: str, origin: str | None) -> bytes | None:
        """Return a tuning file, or with trust a helper library."""
        # A helper library is code that Triton loads into the process.
        library = filename.endswith(names.LIBRARY_SUFFIXES)
        if self.store is None or not self._reads or (library and self.options.trust != "code"):
            return None
        with self.failures.tolerating(f"looking up {filename}"):
            files = self.store.file_records("code" if library else "kernels")
            # A pushed bundle has a library by its place, and not what it was built of.
            known_by = (file_known_by(key, filename, origin), file_known_by(key, filename, None))
            found = files.look_up_all(dict.fromkeys(known_by))
            data = next((found[name] for name in known_by if name in found), None)
            self.tally.add("bytes_fetched", len(data or b""))
            return data
        return None

    def made_file(self, key: str, path: str, data: bytes, origin: str | None) -> None:
        """Publish a single file."""
        filename = os.path.basename(path)
        self.publisher.hand_over(MadeFile(file_known_by(key, filename, origin), filename, data))

    def fetch_records(self, names: Collection[str]) -> Mapping[str, bytes]:
        """Return tuning records of the store."""
        if self.store is None or not self._reads:
            return {}
        with self.failures.tolerating("looking up tuning records"):
            found = self.store.file_records().look_up_all(names)
            self.tally.add("bytes_fetched", sum(map(len, found.values())))
            return found
        return {}

    def fetch_program(self, name: str) -> bytes | None:
        """Return a generated program of the store, where its code is trusted."""
        if self.store is None or not self._reads or self.options.trust != "code":
            return None
        with self.failures.tolerating("looking up a program"):
            data = self.store.file_records("code").look_up(name)
            self.tally.add("bytes_fetched", len(data or b""))
            return data
        return None

    def made_record(self, name: str, filename: str, data: bytes) -> None:
        """Publish a tuning record, or a program."""
        self.publisher.hand_over(MadeFile(name, filename, data))

    # ----------------------------------------------------------------------------------- Publishing

    def _send(self, jobs: list[Job]) -> None:
        """Send what was made; never raises."""
        kernels = [job for job in jobs if isinstance(job, MadeKernel)]
        self._attempt(
            partial(self._notes.write, [made.event for made in kernels]),
            "a note of a miss was not written",
        )
        if kernels:
            many = f"{len(kernels):,} kernels were" if len(kernels) > 1 else "1 kernel was"
            self._attempt(partial(self._publish_kernels, kernels), f"{many} not published")
        for job in jobs:
            if isinstance(job, MadeFile):
                self._attempt(partial(self._publish_file, job), f"{job.filename} was not published")
            elif job.turn is not None:
                self._attempt(job.turn.close, "a lease was not given back")

    def _attempt(self, what: Callable[[], object], failing: str) -> None:
        with self.failures.tolerating(failing, can_raise=False):
            what()

    def _publish_kernels(self, kernels: list[MadeKernel]) -> None:
        records = self._sources.records
        if records is None or not self._writes:
            return
        with bundle_of(kernels, self.options.keep) as bundle:
            for name, reason in bundle.left_out:
                self.failures.warn_once("not-published", f"{name} was not published: {reason}")
            published = records.publish(bundle)
            self.tally.add("published", len(published.created))
            sent = [kernel for kernel in bundle.kernels if kernel.key in published.created]
            self.tally.add("bytes_sent", sum(kernel.size for kernel in sent))

    def _publish_file(self, made: MadeFile) -> None:
        if self.store is None or not self._writes:
            return
        if self.store.file_records().publish(made.known_by, made.filename, made.data):
            self.tally.add("published")
            self.tally.add("bytes_sent", len(made.data))

    def end_notes(self) -> None:
        """Note what this process found and compiled."""
        counters = self.tally.snapshot()
        self._attempt(
            partial(self._notes.end, counters.hits, counters.compiles, counters.misses),
            "a note of this process was not written",
        )

    def push_tag(self) -> None:
        """Give the tag what was used since the start, unless it has all of it."""
        store, tag, push = self.store, self.options.tag, self.options.push
        if store is None or tag is None or push is None or self.used is None:
            return
        with self.used.gather(self.options.keep) as bundle:
            held = self._sources.tag
            new = [kernel for kernel in bundle.kernels if held is None or kernel.key not in held]
            if new or bundle.tuning_files:
                report = store.push(bundle, tag, push)
                self.tally.add("bytes_sent", report.bytes_sent, told=True)

    def end_turns(self) -> None:
        """Let others compile what was begun here and not finished; a session that goes on publishes
        it, if there is one.
        """
        self.closed = True
        # Over a copy: other threads, and the garbage collector, may end a turn meanwhile.
        for key in list(self._turns):
            _, turn = self._turns.pop(key, (0, None))
            if turn is not None:
                turn.close()

    def reset_after_fork(self) -> None:
        """Leave to the parent what is its own; for the child only."""
        self._turns = {}
        self.tally.reset_after_fork()
        self.strict_mode.reset_after_fork()
        self._notes.reset_after_fork()
        self.publisher.reset_after_fork()
        if self.used is not None:
            self.used.reset_after_fork()

    def _note(self) -> None:
        """Note this process and the kernel's source, for who asks `explain`, and the instances of
        what was imported since.
        """
        if not sys.modules.keys().isdisjoint(instances.awaited):
            instances.note_from_now_on()
        if not self._notes.begun:
            self._attempt(self._notes.begin, "a note of this process was not written")
        try:
            source = compile_frames.find_source()
        except Exception as error:  # noqa: BLE001  # the source object may be of anybody's making
            self.failures.count(error, "the source of a kernel was not noted")
            return
        used = self._notes.used_sources
        if source is not None and len(used) < KEPT_SOURCES:
            used.add(source)

    # -------------------------------------------------------------------------------------- Telling

    def _recorded(self) -> Iterator[KeyedKernel]:
        from bundler.integrations.key_comparison import asked_of, keyed

        # What was compiled a moment ago may still be on its way to the store.
        yield from filter(None, map(asked_of, list(self._compiled)))
        yield from keyed(self._sources.recorded(MOST_COMPARED))

    def _on_failure(self, error: BundlerError, what: str) -> None:
        if self.strict_mode.mode == "error":
            raise error  # to the seam that asked
        self.failures.count(error, what)

    def _moved(self, path: str, place: str) -> None:
        error = AccessDenied(f"{path} cannot be written, kernels go to {place}", path=path)
        self.failures.warn_once("unwritable", error.message, lost=False)


def _event_of(found: FoundKernel, call: CacheCall) -> SpooledEvent:
    """Return what is known of a kernel that was fetched, as if a compile here had told it."""
    from bundler.toolchain.recording.spool_records import SpooledEvent

    kernel, seen = found.kernel, found.seen
    device = seen.devices[0] if seen is not None and seen.devices else None
    times = seen.times_us if seen is not None else ()
    return SpooledEvent(
        key=kernel.key,
        hash="",
        directory=f"{call.root}/{call.key}",
        name=kernel.name,
        device=device,
        stage_times_us=times,
        cache_hit=True,
        pid=0,
        target=kernel.target,
        facts_bytes=kernel.facts_bytes,
        parts_bytes=kernel.parts_bytes,
        toolchain=kernel.toolchain,
    )
