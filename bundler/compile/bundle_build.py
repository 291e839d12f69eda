# SPDX-License-Identifier: Apache-2.0
"""`build`: a plan's jobs become one bundle; what a store has already is taken from there.  Called
by the `build` command.

`SharedCompiles`: each kernel is compiled once for everyone who uses a store; a program of the
user's may give one to a `CompileService` as `once`, too.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from bundler.compile.build_plan import Failure, Plan
from bundler.compile.compile_job import Compiled, Job, bundle_of
from bundler.compile.service import CompileService, Once
from bundler.compile.service_progress import Progress, ServiceCounters
from bundler.compile.worker_pool import memory_share, worker_count
from bundler.errors import BundlerError
from bundler.format.bundle import Bundle, MemoryBlobs
from bundler.format.bundle_file import cleaned_up, os_errors
from bundler.format.bundle_union import merge
from bundler.format.entries import Kernel
from bundler.format.manifest import Content, Observed
from bundler.format.summary import Summarized
from bundler.lifecycle.bundle_builder import Builder, join
from bundler.lifecycle.compiled_once import compile_once
from bundler.lifecycle.machine_store import Store
from bundler.lifecycle.restoration import restore
from bundler.store.kernel_records import KernelRecords
from bundler.toolchain import identity

Watch = Callable[[Progress], None]
# Compiles a job into a cache directory.
CompileHere = Callable[[Job, str], Compiled]
_Collected = tuple[Bundle, list[Failure], dict[str, Job]]


@dataclass(frozen=True, repr=False)
class BuildResult(Summarized):
    """What a build made.

    Attributes:
        bundle: every kernel that could be built, or was in the store.
        compiled, reused: keys of kernels compiled here, and of those that the store had or another
            build put there meanwhile.
        static_only: keys of kernels that were built from IR.
        unsent: keys of kernels that were compiled and could not be sent to the store.
        failures: what could not be built.
        notes: (kernel, target, what was assumed).
        seconds: wall time.
    """

    bundle: Bundle
    compiled: tuple[str, ...]
    reused: tuple[str, ...]
    static_only: tuple[str, ...]
    unsent: tuple[str, ...]
    failures: tuple[Failure, ...]
    notes: tuple[tuple[str, str, str], ...]
    seconds: float

    @staticmethod
    def nothing_of(plan: Plan) -> BuildResult:
        """Return what is known of a build that was not begun."""
        empty = Bundle(Content(), Observed(), MemoryBlobs({}))
        return BuildResult(empty, (), (), (), (), tuple(plan.failures), tuple(plan.notes), 0.0)


def missing(plan: Plan, records: KernelRecords) -> tuple[Job, ...]:
    """Return the jobs whose kernels a store does not hold; compiles nothing.

    A kernel that would be built from IR has no key before it is compiled, and counts as missing.
    """
    absent = {
        *records.look_up([job.key for job in plan.jobs.values() if job.key], keep="launch").missing
    }
    return tuple(job for job in plan.jobs.values() if not job.key or job.key in absent)


def build(
    plan: Plan,
    workers: int | None = None,
    store: Store | None = None,
    watch: Watch | None = None,
    compile_here: CompileHere | None = None,
    executor: Executor | Callable[[], Executor] | None = None,
) -> BuildResult:
    """Compile a plan's jobs, on all cores, into a bundle.

    Of builds with one store at the same time, each kernel is compiled by one.

    Args:
        plan: what to build; its failures are passed on.
        workers: processes that compile; None for one a core; 1 compiles in this process, which a
            crash of the compiler then ends; what is built from IR gets a process of its own all the
            same.
        store: kernels that it holds are not compiled, and what is compiled is published there.
        watch: told of each job's progress.
        compile_here: what compiles a job instead of a worker of the service; called in threads of
            the service.
        executor: an engine's executor, or a function that makes one, as of `CompileService`: its
            workers compile, and publish into the store by the URLs that it was opened by; what they
            cannot publish, and everything without a store, they send back.

    Raises:
        StoreUnavailable, AccessDenied: the store cannot be read.
        StoreFull, AccessDenied: the temporary directory cannot be written.
        ConfigError: the number of workers.

    Warns:
        BundlerWarning: the store failed while we compiled; what it lacks is in `unsent`.
    """
    started = time.monotonic()
    held = (
        None
        if store is None
        else store.kernel_records().look_up([job.key for job in plan.jobs.values() if job.key])
    )
    in_store = (
        frozenset(kernel.key for kernel in held.bundle.kernels) if held is not None else frozenset()
    )
    jobs = [job for job in plan.jobs.values() if job.key not in in_store]
    if watch is not None:
        for number, key in enumerate(sorted(in_store), 1):
            watch(
                Progress(plan.jobs[key].name, "hit", ServiceCounters(number, hits=number), (), None)
            )
    folder = os.path.join(tempfile.gettempdir(), f"triton-bundler-build-{secrets.token_hex(8)}")
    cache_dir = os.path.join(folder, "cache")
    shared = None if store is None else SharedCompiles(store, cache_dir)

    def compile_and_collect() -> tuple[list[Compiled | BundlerError], _Collected]:
        with os_errors(folder, "make"):
            os.mkdir(folder, 0o700)
        once = _once(cache_dir, shared, compile_here)
        urls = store.urls if store is not None else ()
        results = _compile(jobs, cache_dir, workers, once, executor, urls, watch)
        return results, _collect(jobs, results, cache_dir)

    results, (fresh, failures, elsewhere) = cleaned_up(
        compile_and_collect, lambda: shutil.rmtree(folder, ignore_errors=True)
    )
    unsent: frozenset[str] = frozenset()
    if store is not None and shared is not None:
        fresh, unsent = _send(store.kernel_records(), fresh, shared.in_store)
        fresh, lost = _with_published(store.kernel_records(), fresh, elsewhere)
        failures += lost
    made = {result.key for result in results if isinstance(result, Compiled) and not result.hit}
    there = {kernel.key for kernel in fresh.kernels}
    from_ir = [
        result.key
        for job, result in zip(jobs, results, strict=True)
        if isinstance(result, Compiled) and job.source.kind == "ir"
    ]
    return BuildResult(
        fresh if held is None else merge([held.bundle, fresh]),
        tuple(sorted(made & there)),
        tuple(sorted(in_store | (there - made))),
        tuple(sorted(from_ir)),
        tuple(sorted(unsent)),
        (*plan.failures, *failures),
        tuple(plan.notes),
        time.monotonic() - started,
    )


def _once(
    cache_dir: str, shared: SharedCompiles | None, compile_here: CompileHere | None
) -> Once | None:
    """Return what the service wraps each compile in: the store around whoever compiles."""
    if compile_here is None:
        return shared

    def compile_once_here(job: Job, _by_worker: Callable[[], Compiled]) -> Compiled:
        if shared is None:
            return compile_here(job, cache_dir)
        return shared(job, lambda: compile_here(job, cache_dir))

    return compile_once_here


def _compile(
    jobs: Sequence[Job],
    cache_dir: str,
    workers: int | None,
    once: Once | None,
    executor: Executor | Callable[[], Executor] | None,
    urls: Sequence[str],
    watch: Watch | None,
) -> list[Compiled | BundlerError]:
    if not jobs:
        return []
    if executor is not None:
        service = CompileService(
            cache_dir=cache_dir, on_progress=watch, executor=executor, publish_to=urls
        )
    else:
        count = min(worker_count(workers), len(jobs))
        service = CompileService(
            count,
            cache_dir=cache_dir,
            # Some IR crashes the compiler and its process, so IR is never compiled in this one.
            isolate=workers is None or any(job.source.kind == "ir" for job in jobs),
            once=once,
            on_progress=watch,
            memory_bytes=memory_share(count) or None,
        )
    with service:
        return service.compile_all(jobs)


def _with_published(
    records: KernelRecords, fresh: Bundle, elsewhere: Mapping[str, Job]
) -> tuple[Bundle, list[Failure]]:
    """Add the kernels that workers elsewhere left in the store alone; returns what is not there any
    more as failures.
    """
    if not elsewhere:
        return fresh, []
    found = records.look_up(list(elsewhere))
    gone = f"published by a worker, and not in {records.name} any more; build again"
    lost = [Failure(elsewhere[key].name, str(elsewhere[key].target), gone) for key in found.missing]
    return merge([fresh, found.bundle]), lost


def _send(
    records: KernelRecords, fresh: Bundle, known: frozenset[str]
) -> tuple[Bundle, frozenset[str]]:
    """Publish what the store still lacks; returns the builds that are in the store now, and the
    keys that could not be sent.
    """
    absent = [kernel for kernel in fresh.kernels if kernel.key not in known]
    if not absent:
        return fresh, frozenset()
    seen = fresh.observed.kernels
    part = Bundle(
        Content.of(absent),
        Observed({kernel.key: seen[kernel.key] for kernel in absent}),
        fresh.blobs,
    )
    try:
        published = records.publish(part)
    except BundlerError as error:
        records.report_failure(error)  # the compiled kernels still go into the bundle
        return fresh, frozenset(kernel.key for kernel in absent)
    others = [kernel for kernel in fresh.kernels if kernel.key in known]
    return merge(
        [published.bundle, Bundle(Content.of(others), fresh.observed, fresh.blobs)]
    ), frozenset()


def _collect(
    jobs: Sequence[Job], results: Sequence[Compiled | BundlerError], cache_dir: str
) -> _Collected:
    """Return the compiled kernels as a bundle in memory, what went wrong, and what a worker
    elsewhere left in the store alone.
    """
    builder = Builder(cache_dir)
    failures = []
    elsewhere: dict[str, Job] = {}
    for job, result in zip(jobs, results, strict=True):
        if isinstance(result, BundlerError):
            failures.append(Failure.of(job.name, job.target, result))
            continue
        if not os.path.isdir(result.directory):
            elsewhere[result.key] = job  # all of them are taken from the store together
            continue
        reason = result.add_to(builder)
        if reason is not None:
            failures.append(Failure(job.name, str(job.target), reason))
    return join([builder], identity.environment()), failures, elsewhere


class SharedCompiles:
    """What a `CompileService` takes as `once`: each kernel comes from the store, or is compiled by
    one and published.

    ::

        shared = SharedCompiles(store, cache_dir)
        with CompileService(cache_dir=cache_dir, once=shared) as service:
            shared.fetch(jobs)  # what is there comes in one go
            service.compile_all(jobs)

    Guarantees and errors are those of `compile_once`: leases are renewed while a worker compiles, a
    failed compile is told to those who wait for it, and when the store fails this process compiles
    for itself.  Jobs without a known `key` are compiled here and not shared.  Thread-safe as the
    store.

    Args:
        store: where kernels are shared.
        cache_dir: where kernels go; the service's.
    """

    def __init__(self, store: Store, cache_dir: str | os.PathLike[str]) -> None:
        self._store, self._cache_dir = store, os.path.abspath(cache_dir)
        self._fetched: dict[str, Compiled] = {}
        self._in_store: set[str] = set()

    @property
    def in_store(self) -> frozenset[str]:
        """Keys of kernels that the store was seen to hold, or that were published there."""
        return frozenset(self._in_store)

    def fetch(self, jobs: Iterable[Job]) -> frozenset[str]:
        """Put what the store has of these jobs' kernels into the cache directory; returns their
        keys.

        Raises:
            StoreUnavailable, AccessDenied, StoreFull: the store cannot be read, or the directory
                not be written.
        """
        started = time.monotonic()
        wanted = [job.key for job in jobs if job.key]
        with self._store.kernel_records().look_up(wanted).bundle as found:
            placed = self._place(found)
        seconds = (time.monotonic() - started) / max(1, len(placed))
        self._in_store |= placed.keys()
        self._fetched |= {
            key: _as_compiled(kernel, self._cache_dir, seconds) for key, kernel in placed.items()
        }
        return frozenset(placed)

    def __call__(self, job: Job, compile_here: Callable[[], Compiled]) -> Compiled:
        """Return the kernel of a job from the store, or compile it here for all."""
        fetched = self._fetched.get(job.key)
        if fetched is not None and os.path.isdir(fetched.directory):
            return fetched
        if not job.key:
            return compile_here()
        started, made = time.monotonic(), list[Compiled]()

        def compile_kernel() -> Bundle:
            made.append(compile_here())
            return bundle_of(self._cache_dir, [(made[-1], job.name)])

        got = compile_once(self._store, job.key, compile_kernel)
        if got.published:
            self._in_store.add(job.key)
        if made and got.how == "compiled":
            return made[-1]
        kernel = self._place(got.bundle).get(job.key)
        if kernel is None:
            return compile_here()
        return _as_compiled(kernel, self._cache_dir, time.monotonic() - started)

    def _place(self, bundle: Bundle) -> dict[str, Kernel]:
        """Restore kernels; returns those that are in place, by key.  Their targets need not be this
        machine's.
        """
        if not bundle.kernels:
            return {}
        report = restore(bundle, self._cache_dir, only="all", trust=self._store.trust)
        there = {*report.restored, *report.present, *report.repaired}
        return {kernel.key: kernel for kernel in bundle.kernels if kernel.key in there}


def _as_compiled(kernel: Kernel, cache_dir: str, seconds: float) -> Compiled:
    directory = os.path.join(cache_dir, kernel.key)
    return Compiled(
        kernel.key,
        directory,
        seconds,
        (),
        hit=True,
        toolchain=kernel.toolchain,
        facts=kernel.facts_bytes,
        parts=kernel.parts_bytes,
    )
