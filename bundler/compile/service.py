# SPDX-License-Identifier: Apache-2.0
"""`CompileService`: jobs in, futures of compiled kernels out; each job is compiled once, whatever
its worker does.

Builds and tuners use it, and programs that compile their own kernels; it gives the work to a
`WorkerPool`. `InflightJob` is a job that is under way, with the futures of those who wait for it.
`Context`: what a result depends on besides its job: compiler, environment, the state of the source
file.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

from bundler import observers
from bundler.compile.compile_job import Compiled, Job, source_job
from bundler.compile.engine_worker import host_of
from bundler.compile.executor_pool import ExecutorPool
from bundler.compile.job_futures import (
    CompileFuture,
    JoinedFuture,
    ScopeProgress,
    outcome_of,
    resolve_scope,
)
from bundler.compile.other_languages import OtherLanguages
from bundler.compile.service_progress import JobTiming, Progress, ProgressCounter, ServiceCounters
from bundler.compile.worker_messages import JobEnvironment, as_failure, resolve
from bundler.compile.worker_pool import (
    IDLE_S,
    QUEUE_LIMIT,
    TIMEOUT_S,
    WorkerPool,
    check_limits,
    shared_leases,
    worker_count,
)
from bundler.compile.worker_processes import Task, TaskOutcome, WorkerPlan
from bundler.errors import BundlerError, ConfigError
from bundler.fork_safety import after_fork
from bundler.format.bundle_file import open_regular
from bundler.format.entries import Target
from bundler.toolchain.directories import triton_cache_dir
from bundler.toolchain.identity import installed_triton
from bundler.toolchain.ptxas import ptxas_for

PERFORM, PRELOAD = (
    "bundler.compile.compile_worker:compile_job",
    "bundler.compile.compile_worker:import_triton",
)
# Results answered from memory, the least recently used dropped first.
REMEMBERED = 10_000

# A lease leaves an empty file behind, so leases share slots; jobs of two processes in one slot only
# wait for each other.
SLOTS = 4096
Once = Callable[[Job, Callable[[], Compiled]], Compiled]


class CompileService(OtherLanguages):
    """Compiles kernels on all cores, and survives whatever a compile does to its process.

    ::

        with CompileService(workers=8) as service:
            futures = [service.submit(job) for job in jobs]
            kernels = [future.result() for future in futures]

    Guarantees: every future is settled.  A job that crashes, is killed, takes too long or too much
    memory fails alone, with the kernel's name and the end of what its worker printed; one that
    ended two workers is not tried again.  Equal jobs are compiled once in this process and, but for
    a process that was stopped for half a minute, once on this host.  No process of ours outlives
    this one, and none exists while there is nothing to do.  Thread-safe; a forked child has an
    empty service, and the futures it inherited have failed. With one worker (and not `isolate`)
    jobs run in this process, within `submit`: without time-out or memory limit, and a crash of the
    compiler ends this process; futures are done when `submit` returns. Does not guarantee: that
    settings made in Python at `triton.knobs` reach the workers (environment variables do), or that
    a change of a module that a kernel's module imports is seen; a change of the kernel's module
    itself is.

    Args:
        workers: how many; None for one a core, at most 32.
        cache_dir: where kernels go; None for where this process's Triton looks now.
        timeout_s: how long one job may take, in seconds; None for ever.
        memory_bytes: private memory that a worker, and each program that it starts, may have; None
            for no limit.
        queue_limit: `submit` waits while so many jobs are queued.
        idle_s: without work for so many seconds, all processes end; the next job starts them again.
        isolate: use a worker process even when there is one.
        once: wraps each compile, `once(job, compile_here) -> Compiled`, in a thread of its own:
            `SharedCompiles` compiles once in a cluster.
        on_progress: called with a `Progress` for everything that happens, in a thread of the
            service, one at a time; must be quick, and not submit.
        perform, preload: `module:function` for workers and for the process that forks them.
        executor: an engine's `concurrent.futures.Executor` (Dask, MPI, Ray, loky), whose workers
            compile in place of this machine's; or a function that makes one, called again after it
            broke and shut down by `close`.  Workers have this package, the same Python, Triton and
            ptxas, and the modules of kernels under the same paths.  `workers` then bounds how many
            calls of `once` wait at a time, `memory_bytes` is by default a part of the worker's
            machine, and `idle_s` is the engine's.
        publish_to: URLs of a store, as workers reach it, with `executor` alone: workers take
            kernels from there and publish them, and `directory` is where `SharedCompiles.fetch`
            would put one; empty for kernels to be sent back into `cache_dir`.

    Raises:
        ConfigError: an argument has a value that cannot be used.
    """

    def __init__(
        self,
        workers: int | None = None,
        *,
        cache_dir: str | os.PathLike[str] | None = None,
        timeout_s: float | None = TIMEOUT_S,
        memory_bytes: int | None = None,
        queue_limit: int = QUEUE_LIMIT,
        idle_s: float = IDLE_S,
        isolate: bool = False,
        once: Once | None = None,
        on_progress: Callable[[Progress], None] | None = None,
        perform: str = PERFORM,
        preload: str = PRELOAD,
        executor: Executor | Callable[[], Executor] | None = None,
        publish_to: Sequence[str] = (),
    ) -> None:
        self.workers = worker_count(workers)
        check_limits(timeout_s, memory_bytes, queue_limit, idle_s)
        self.cache_dir = os.path.abspath(triton_cache_dir() if cache_dir is None else cache_dir)
        self.in_process = executor is None and self.workers == 1 and not isolate
        self._timeout_s, self._once, self._on_progress, self._perform = (
            timeout_s,
            once,
            on_progress,
            perform,
        )
        self._engine, self._publishes = executor is not None, bool(publish_to)
        self._pool: WorkerPool | ExecutorPool
        plan = WorkerPlan(perform, preload, self.cache_dir, memory_bytes or 0)
        if executor is not None:
            self._pool = ExecutorPool(
                executor, plan, queue_limit, self._source_of, self._answered, tuple(publish_to)
            )
        else:
            self._pool = WorkerPool(
                plan, self.workers, queue_limit, idle_s, shared_leases(), self._began
            )
        self._closed = False
        self._begin_anew()
        # A child has neither the pool's thread nor its processes, and locks in a state that nobody
        # will change.
        after_fork(self._reset_in_child)
        self._at_exit = weakref.finalize(self, self._pool.close, wait=False)

    def _begin_anew(self) -> None:
        self._lock = threading.RLock()
        self._inflight: dict[str, InflightJob] = {}
        self._results: OrderedDict[str, Compiled] = OrderedDict()
        self._progress = ProgressCounter(0 if self._engine else self.workers, self._on_progress)
        self._context = Context(self.cache_dir, self._perform, reload=not self.in_process)
        self._threads: ThreadPoolExecutor | None = None

    @property
    def counters(self) -> ServiceCounters:
        """What was done so far."""
        return replace(self._progress.counters, retried=self._pool.retried)

    @property
    def timings(self) -> tuple[JobTiming, ...]:
        """Where the time of each job went, in the order in which they ended; the last 10,000."""
        return self._progress.timings

    def processes(self) -> tuple[int, ...]:
        """Return the process numbers of the workers that exist now."""
        return self._pool.processes()

    def submit(self, job: Job) -> CompileFuture[Compiled]:
        """Compile a job; waits while the queue is full.

        Returns:
            A future of its own for each call.  It raises `CompileFailed` (`WorkerDied`,
            `CompileTimeout`) or what `once` raised. Cancelling it stops the job when nobody else
            waits for an equal one.

        Raises:
            ConfigError: the service was closed.
            LimitExceeded: the job is larger than a message may be.
        """
        return self._submit(job, look=True)

    def _submit(self, job: Job, *, look: bool) -> CompileFuture[Compiled]:
        if self._closed:
            raise ConfigError("this compile service was closed; make another one")
        context = self._context.of(job, look=look)
        if context.stale:  # workers have imported the module as it was before its file changed
            self._pool.renew()
        future: CompileFuture[Compiled] = CompileFuture(job.name)
        # Joining and counting are two steps: the listener is called without the lock that jobs are
        # joined under.
        known, inflight, first = self._join(job, context.key, future)
        self._progress.tell(job.name, "submitted", submitted=1)
        if known is not None:
            future.settle(known)
            self._progress.tell(job.name, "remembered", remembered=1)
        elif inflight is not None:
            # Set before the job starts, which may settle the future at once.
            future.on_cancel(lambda: self._withdraw(inflight, future))
            if first:
                self._start(inflight, context)
        return future

    def compile_all(self, jobs: Iterable[Job]) -> list[Compiled | BundlerError]:
        """Compile jobs in the current environment; returns for each, in order, the kernel or why
        there is none.
        """
        # Looking at the environment for each would cost more than all the rest where everything is
        # there already.
        futures = [self._submit(job, look=number == 0) for number, job in enumerate(list(jobs))]
        return [outcome_of(future) for future in futures]

    def source(
        self,
        name: str,
        text: str,
        meta: Mapping[str, Any],
        *,
        finish: Callable[[Compiled], Any] | None = None,
    ) -> CompileFuture[Any]:
        """Compile a kernel of a module that is given as text; only a worker imports the text, which
        is code.

        Args:
            name, text: of the kernel and its function; a Python module.
            meta: `signature` (every parameter in order -> Triton's type) and `target`; perhaps
                `constants`, `attributes` (what an address or number can be divided by, or Triton's
                own list), `options` of the compiler, `function` where its name is another.
            finish: makes the future's result of what was compiled, once, in the thread that asks
                for it first; None for `Compiled`.

        Returns:
            A future as `submit` returns it.

        Raises:
            ConfigError: `meta` is not like that; and as `submit`.
        """
        compiled = self.submit(source_job(name, text, meta))
        return (
            compiled
            if finish is None
            else JoinedFuture(name, [compiled], lambda made: finish(_raised(made[0])))
        )

    def wait(
        self,
        scope: MutableMapping[str, Any],
        *,
        timeout_s: float | None = None,
        on_progress: Callable[[ScopeProgress], None] | None = None,
    ) -> None:
        """Wait for every future of a namespace, such as `globals()`, and put its result in its
        place; other values stay.

        Args:
            scope: names and values; futures of this or any other service.
            timeout_s: how long to wait for all of them together; None for ever.
            on_progress: called in this thread for each that is done.

        Raises:
            CompileFailed: of the first that failed, with the kernel's name; the others stay as they
                are, done or not.
            CompileTimeout: names those that are not done.
        """
        resolve_scope(scope, timeout_s, on_progress)

    def warm_up(self, wait_s: float = 0.0) -> bool:
        """Start the workers now; returns whether they stood ready within so many seconds.

        Also wakes them after `quiesce`.  In process it imports Triton at once.
        """
        if self.in_process:
            resolve(PRELOAD)()
            return True
        return self._pool.warm_up(wait_s)

    def quiesce(self) -> None:
        """End the workers as soon as they have nothing to do; the server stays, which forks new
        ones in milliseconds.
        """
        self._pool.quiesce()

    def forget(self) -> None:
        """Empty the memory of results; kernels on disk stay."""
        with self._lock:
            self._results.clear()

    def close(self, *, cancel: bool = False) -> None:
        """End the service: after everything submitted, or with `cancel` at once.  Twice is fine."""
        self._closed = True
        if cancel:
            with self._lock:
                waiting = [
                    future for inflight in self._inflight.values() for future in inflight.waiting
                ]
            for future in waiting:
                future.cancel()
        with self._lock:
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=not cancel, cancel_futures=cancel)
        self._pool.close(wait=not cancel)
        self._at_exit.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(cancel=error is not None)

    def _join(
        self, job: Job, key: str, future: CompileFuture[Compiled]
    ) -> tuple[Compiled | None, InflightJob | None, bool]:
        """Return a remembered result, or the job under way that the future joined and whether that
        job is yet to be started.
        """
        with self._lock:
            known = self._results.get(key)
            # A result is remembered with its directory, which a user may have deleted since.
            if known is not None and (self._publishes or os.path.isdir(known.directory)):
                self._results.move_to_end(key)
                return known, None, False
            self._results.pop(key, None)
            inflight = self._inflight.get(key)
            if inflight is not None:
                inflight.waiting.append(future)
                return None, inflight, False
            inflight = self._inflight[key] = InflightJob(job, key, time.monotonic(), [future])
            return None, inflight, True

    def _start(self, inflight: InflightJob, context: JobContext) -> None:
        once, job = self._once, inflight.job

        def compiled(outcome: TaskOutcome) -> Compiled:
            inflight.outcome = outcome
            return Compiled.from_bytes(outcome.data)

        def compile_here() -> Compiled:
            if self.in_process:
                return compiled(self._do_here(inflight))
            return compiled(self._to_pool(inflight, context).result())

        def finish(work: Callable[[], Compiled]) -> None:
            self._finish(inflight, _attempt(job, work))

        try:
            if once is None and not self.in_process:
                self._to_pool(inflight, context).add_done_callback(
                    lambda done: finish(lambda: compiled(done.result()))
                )
                return
            work = compile_here if once is None else lambda: once(job, compile_here)
            if self.in_process:  # within `submit`: without a worker there is nobody else to do it
                finish(work)
            else:
                self._executor().submit(finish, work)
        except (
            BaseException
        ) as error:  # such as a full message or Ctrl-C: others may wait for the same job
            self._finish(inflight, as_failure(job.name, error, ""))
            raise

    def _executor(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._threads is None:
                # More threads than workers: some wait for other hosts meanwhile.
                self._threads = ThreadPoolExecutor(
                    4 * self.workers, thread_name_prefix="bundler-once"
                )
            return self._threads

    def _to_pool(self, inflight: InflightJob, context: JobContext) -> CompileFuture[TaskOutcome]:
        job = inflight.job
        task = Task(
            job.name,
            inflight.key,
            context.lease_name,
            job.to_bytes(),
            context.environment,
            self._timeout_s,
        )
        with self._lock:
            inflight.inner = task.future
            # Between `submit` and here the last one who waited may have cancelled: `_withdraw`
            # found no inner future to cancel.
            if inflight.given_up:
                task.future.cancel()
                return task.future
        return self._pool.submit(task)

    def _do_here(self, inflight: InflightJob) -> TaskOutcome:
        begun_s = time.monotonic()
        data = resolve(self._perform)(inflight.job.to_bytes(), self.cache_dir)
        return TaskOutcome(data, begun_s - inflight.submitted_s, time.monotonic() - begun_s)

    def _source_of(self, job: Job) -> tuple[str, str]:
        return self._context.source_of(job)

    def _answered(self, worker: str) -> None:
        self._progress.saw(host_of(worker))

    def _began(self, task: Task) -> None:
        with self._lock:
            inflight = self._inflight.get(task.key)
            waiting = list(inflight.waiting) if inflight is not None else []
        for future in waiting:
            future.mark_started()
        self._progress.began(task.key, task.name)

    def _finish(self, inflight: InflightJob, result: Compiled | BundlerError | None) -> None:
        """Settle every future that waits; None: the job was cancelled."""
        now_s = time.monotonic()
        with self._lock:
            # An equal job may have been submitted since this one was given up, and has its own
            # entry.
            if self._inflight.get(inflight.key) is inflight:
                del self._inflight[inflight.key]
            waiting, inflight.waiting = inflight.waiting, []
            if isinstance(result, Compiled):
                self._results[inflight.key] = result
                while len(self._results) > REMEMBERED:
                    self._results.popitem(last=False)
        self._progress.ended(
            inflight.key, None if result is None else _timing(inflight, result, now_s)
        )
        # What is compiled in this process its session tells of, if there is one.
        if isinstance(result, Compiled) and not result.hit and not self.in_process:
            observers.ended("compile", result.seconds, kernel=inflight.job.name, key=result.key)
        # Outside the lock: callbacks of futures run here, and may submit again.
        for future in waiting:
            if result is None:
                future.cancel()
            elif isinstance(result, Compiled):
                future.settle(result)
            else:
                future.settle(error=result)
        if result is not None and waiting:
            self._tell_end(inflight.job.name, result, len(waiting) - 1)

    def _tell_end(self, name: str, result: Compiled | BundlerError, joined: int) -> None:
        if isinstance(result, BundlerError):
            self._progress.tell(name, "failed", error=str(result), failed=1, joined=joined)
        elif result.hit:
            self._progress.tell(name, "hit", hits=1, joined=joined)
        else:
            self._progress.tell(name, "compiled", compiled=1, joined=joined)

    def _withdraw(self, inflight: InflightJob, future: CompileFuture[Compiled]) -> None:
        """Remove a cancelled future from those that wait; when it was the last one, cancel
        the job.
        """
        with self._lock:
            if future in inflight.waiting:
                inflight.waiting.remove(future)
            inflight.given_up = not inflight.waiting
            if inflight.given_up and self._inflight.get(inflight.key) is inflight:
                del self._inflight[inflight.key]
            inner = inflight.inner if inflight.given_up else None
        if inner is not None:
            inner.cancel()  # the pool kills the worker, if one has begun
        self._progress.tell(future.name, "cancelled", cancelled=1)

    def _reset_in_child(self) -> None:
        inflight_jobs = list(self._inflight.values())
        self._begin_anew()
        for inflight in inflight_jobs:
            for future in inflight.waiting:
                future.abandon()


@dataclass(eq=False)
class InflightJob:
    """A job that is under way, and the futures that wait for it.

    Attributes:
        job: the job.
        key: equal for equal jobs.
        submitted_s: when its first future was made.
        waiting: the futures that get its result.
        inner: the pool's future, once it has one.
        outcome: what a worker said.
        given_up: every future was cancelled.
    """

    job: Job
    key: str
    submitted_s: float
    waiting: list[CompileFuture[Compiled]] = field(default_factory=list)
    inner: Future[Any] | None = None
    outcome: TaskOutcome | None = None
    given_up: bool = False


def _attempt(job: Job, function: Callable[[], Compiled]) -> Compiled | BundlerError | None:
    """Return what a compile gives or why it gives nothing; None when it was cancelled."""
    try:
        return function()
    except CancelledError:
        return None
    except (
        Exception,  # noqa: BLE001
        SystemExit,
    ) as error:  # the future raises whatever the compiler or `once` raised
        return as_failure(job.name, error, "")


def _raised(outcome: Compiled | BundlerError) -> Compiled:
    """Return a compiled kernel; raises why there is none."""
    if isinstance(outcome, BundlerError):
        raise outcome
    return outcome


def _timing(inflight: InflightJob, result: Compiled | BundlerError, now_s: float) -> JobTiming:
    """Return where the time of a job went that ends now."""
    outcome = inflight.outcome
    compiled = isinstance(result, Compiled)
    return JobTiming(
        inflight.job.name,
        "failed" if not compiled else "hit" if result.hit else "compiled",
        outcome.queued_s if outcome is not None else 0.0,
        outcome.worker_s if outcome is not None else 0.0,
        now_s - inflight.submitted_s,
        result.stages if compiled else (),
    )


@dataclass(frozen=True)
class JobContext:
    """What a job needs and depends on besides its own data.

    Attributes:
        environment: for the worker.
        key: a result that is remembered under an equal key is the answer.
        lease_name: equal in every process of this host that would compile the same.
        stale: the file of its module is not what workers have imported.
    """

    environment: JobEnvironment
    key: str
    lease_name: str
    stale: bool


class Context:
    """Keys of jobs in the memory of results and among the leases of this host.

    A memory key counts everything: the job, Triton's release and binary, ptxas, the bytes of a
    module's file, and the whole environment, since which variables matter differs by release; a
    change costs one look into the cache directory.

    Args:
        cache_dir: where kernels go.
        perform: what is done with jobs.
        reload: whether a module's file is looked at again for each job; False where jobs run in
            this process, which imports a module once.
    """

    def __init__(self, cache_dir: str, perform: str, *, reload: bool) -> None:
        self._fixed, self._reload = f"{os.path.realpath(cache_dir)}\n{perform}", reload
        self._lock = threading.Lock()
        self._last = JobEnvironment((), ())
        self._environment = ""
        self._files: dict[str, tuple[tuple[int, int], str]] = {}
        self._toolchains: dict[Target, str] = {}

    def of(self, job: Job, *, look: bool = True) -> JobContext:
        """Return the context of a job now; without `look`, the environment is that of the job
        before.
        """
        with self._lock:
            if look:
                self._refresh_environment()
            # The path of a text is only its name.
            source, stale = self._source(job.source.path if job.source.kind == "module" else "")
            parts = (job.digest, source, self._toolchain(job.target), self._fixed)
            slot = int(_digest(*parts)[:16], 16) % SLOTS
            return JobContext(
                self._last, _digest(*parts, self._environment), f"compile/{slot:03x}", stale
            )

    def source_of(self, job: Job) -> tuple[str, str]:
        """Return path and SHA-256 of the file of a job's module, as it is now; empty texts where
        the job has its source with it.
        """
        path = job.source.path if job.source.kind == "module" else ""
        with self._lock:
            return path, self._source(path)[0]

    def _refresh_environment(self) -> None:
        now = JobEnvironment.now()
        if now != self._last:
            self._last = now
            self._environment = _digest(repr(now))
            self._toolchains.clear()

    def _source(self, path: str) -> tuple[str, bool]:
        """Return the digest of a module's file, and whether it was another one before."""
        if not path:
            return "", False
        before = self._files.get(path)
        if before is not None and not self._reload:
            return before[1], False
        try:
            found = os.stat(path)
            state = (found.st_mtime_ns, found.st_size)
            if before is None or before[0] != state:
                with open(open_regular(path), "rb") as file:
                    self._files[path] = (state, hashlib.file_digest(file, "sha256").hexdigest())
        except OSError:
            return "unreadable", False  # the compile says what is wrong
        digest = self._files[path][1]
        return digest, before is not None and before[1] != digest

    def _toolchain(self, target: Target) -> str:
        if target not in self._toolchains:
            self._toolchains[target] = repr((installed_triton(), ptxas_for(target)))
        return self._toolchains[target]


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogateescape")).hexdigest()
