# SPDX-License-Identifier: Apache-2.0
"""`build`: a plan's jobs become one bundle; what a store has already is taken from there.  Called
by the `build` command.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from bundler.compile.build_plan import Failure, Plan
from bundler.compile.compile_job import Compiled, Job
from bundler.compile.service import CompileService, Once
from bundler.compile.service_arguments import memory_share, worker_count
from bundler.compile.service_progress import Progress, ServiceCounters
from bundler.compile.shared_compiles import SharedCompiles
from bundler.errors import BundlerError
from bundler.format.bundle import Bundle, MemoryBlobs
from bundler.format.bundle_file import cleaned_up, os_errors
from bundler.format.bundle_union import merge
from bundler.format.manifest import Content, Observed
from bundler.format.summary import Summarized
from bundler.lifecycle.bundle_builder import Builder, join
from bundler.lifecycle.machine_store import Store
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
        if executor is not None:
            urls = store.urls if store is not None else ()
            results = _compile_elsewhere(jobs, cache_dir, executor, urls, watch)
        else:
            once = _once(cache_dir, shared, compile_here)
            results = _compile(jobs, cache_dir, workers, once, watch)
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
    return BuildResult(
        fresh if held is None else merge([held.bundle, fresh]),
        tuple(sorted(made & there)),
        tuple(sorted(in_store | (there - made))),
        tuple(sorted(key for job, key in _keys(jobs, results) if job.source.kind == "ir")),
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
    jobs: Sequence[Job], cache_dir: str, workers: int | None, once: Once | None, watch: Watch | None
) -> list[Compiled | BundlerError]:
    if not jobs:
        return []
    # Some IR crashes the compiler and its process, so IR is never compiled in this one.
    isolate = workers is None or any(job.source.kind == "ir" for job in jobs)
    count = min(worker_count(workers), len(jobs))
    with CompileService(
        count,
        cache_dir=cache_dir,
        isolate=isolate,
        once=once,
        on_progress=watch,
        memory_bytes=memory_share(count) or None,
    ) as service:
        return service.compile_all(jobs)


def _compile_elsewhere(
    jobs: Sequence[Job],
    cache_dir: str,
    executor: Executor | Callable[[], Executor],
    urls: Sequence[str],
    watch: Watch | None,
) -> list[Compiled | BundlerError]:
    if not jobs:
        return []
    with CompileService(
        cache_dir=cache_dir, on_progress=watch, executor=executor, publish_to=urls
    ) as service:
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


def _keys(jobs: Sequence[Job], results: Sequence[Compiled | BundlerError]) -> list[tuple[Job, str]]:
    pairs = zip(jobs, results, strict=True)
    return [(job, result.key) for job, result in pairs if isinstance(result, Compiled)]


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
