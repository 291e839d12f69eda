# SPDX-License-Identifier: Apache-2.0
"""`ExecutorPool`: tasks are done by the workers of an engine, through its
`concurrent.futures.Executor`; in place of a `WorkerPool`.

The engine has workers, queue and placement; here is what a service promises beyond that: a task
whose worker is lost is tried again once, an executor that broke is made anew where there is a
function for it, and nothing is left waiting.  One thread handles what comes back, as callbacks of
an engine's futures run in the engine's own threads, which must not be kept busy nor submit.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import queue
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future
from dataclasses import dataclass, replace
from typing import Any

from bundler.compile.compile_job import Compiled, Job
from bundler.compile.engine_messages import (
    CLIENT_DIRECTORY,
    Compiler,
    EngineJob,
    WaitingClient,
    compiler_variables,
    host_of,
    new_number,
)
from bundler.compile.engine_worker import run_job
from bundler.compile.job_futures import CompileFuture
from bundler.compile.pool_tasks import Task, TaskOutcome
from bundler.compile.worker_messages import as_failure, decode_error
from bundler.errors import BundlerError, ConfigError, ToolchainMismatch
from bundler.fork_safety import after_fork
from bundler.format import wire
from bundler.format.bundle import Bundle
from bundler.format.entries import Target
from bundler.lifecycle.restoration import restore
from bundler.package_loggers import logger

# A task is tried so often: its worker may have been lost for reasons of its own, or another worker
# may have the right compiler.
TRIES = 2
# Executors that broke one after the other, without a task done between them, before everything is
# given up.
EXECUTORS = 3
_LOG = logger("bundler.compile")

MakeExecutor = Callable[[], Executor]


@dataclass(frozen=True)
class EnginePlan:
    """What the workers of an engine are to do.

    Attributes:
        perform, preload: `module:function`.
        cache_dir: where kernels go that workers send back.
        memory_bytes: private memory of a process that compiles; 0 for its part of its machine's.
        stores: URLs of a store that workers publish into; empty to send kernels back.
    """

    perform: str
    preload: str
    cache_dir: str
    memory_bytes: int
    stores: tuple[str, ...] = ()


@dataclass(eq=False)
class _Try:
    """One try of a task: its number, the engine's future, and the executor it was given to."""

    task: Task
    number: str
    executor: Executor
    future: Future[bytes] | None = None


class ExecutorPool:
    """Has tasks done by an engine.

    Guarantees: each task's future is settled.  A task whose worker is lost, or that ends the
    process that compiles it, is tried again once, and then fails with its name.  A worker of
    another compiler refuses a task before it compiles; so does a second one, and then the task
    fails with the name of both.  `close` without waiting takes back what no worker has begun, and
    ends what runs on this machine. Does not guarantee: that a compile on another machine ends
    before it is done or its time is up, since an engine cannot be told. Thread-safe; in a forked
    child the futures of its parent have failed, and nothing can be submitted.

    Args:
        executor: what does the tasks; or a function that makes it, which is called again after it
            broke, and what it made is shut down at the end.
        plan: what workers do.
        queue_limit: `submit` waits while so many tasks are under way.
        source_of: returns path and digest of the module's file of a task's job.
        on_worker: is told the name of the worker that answered.
    """

    def __init__(
        self,
        executor: Executor | MakeExecutor,
        plan: EnginePlan,
        queue_limit: int,
        source_of: Callable[[Job], tuple[str, str]],
        on_worker: Callable[[str], None] = lambda _: None,
    ) -> None:
        _check(executor)
        self._plan, self._limit, self._source_of = plan, queue_limit, source_of
        self._make = None if isinstance(executor, Executor) else executor
        self._executor = executor if isinstance(executor, Executor) else None
        self._on_worker = on_worker
        #: How many tasks were tried again because their worker ended.
        self.retried = 0
        self._broken = 0
        self._closing = False
        self._compilers: dict[Target, Compiler] = {}
        self._directory = tempfile.mkdtemp(prefix=CLIENT_DIRECTORY)
        self._client = WaitingClient.of(self._directory)
        self._cut = weakref.finalize(self, shutil.rmtree, self._directory, ignore_errors=True)
        self._begin_anew()
        after_fork(self._reset_in_child)

    def _begin_anew(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._tries: dict[Task, _Try] = {}
        self._under_way: set[Task] = set()
        self._thread: threading.Thread | None = None
        self._refusals: dict[Task, list[str]] = {}

    def submit(self, task: Task) -> CompileFuture[TaskOutcome]:
        """Hand a task to the engine; waits while too many are under way.

        Raises:
            ConfigError: the pool was closed, or the function made no executor.
            Whatever the function raises that makes the executor.
        """
        with self._changed:
            while self._is_full() and not self._closing:
                self._changed.wait()
            self._check_open()
            # in the user's thread: what an engine opens may have to be closed where it was opened
            self._engine()
            self._under_way.add(task)
            if self._thread is None:
                # A daemon thread: an engine that never answers must not keep the interpreter from
                # ending.
                self._thread = threading.Thread(
                    target=self._serve, name="bundler-executor", daemon=True
                )
                self._thread.start()
        task.submitted_s = time.monotonic()
        task.future.on_cancel(lambda: self._events.put(lambda: self._withdraw(task)))
        self._events.put(lambda: self._give(task))
        return task.future

    def warm_up(self, wait_s: float) -> bool:  # as a pool of processes
        """Make the executor, where that is ours to do; the engine starts its workers as it
        likes.
        """
        with self._changed:
            self._check_open()
            self._engine()
        return True

    def quiesce(self) -> None:
        """Nothing: workers are the engine's, and processes that compile end by themselves after a
        minute without work.
        """

    def renew(self) -> None:
        """Nothing: workers compare the file of a module with what they have imported."""

    def processes(self) -> tuple[int, ...]:
        """Return nothing: the processes are the engine's."""
        return ()

    def close(self, *, wait: bool) -> None:
        """End everything: when `wait` after what is under way, else at once, and what is not done
        is cancelled.  Twice is fine.
        """
        with self._changed:
            if not wait:
                self._closing = True
                self._cut()  # before anything else: workers on this machine look at it
            while wait and self._under_way and not self._closing:
                self._changed.wait()
            self._closing = True
            self._changed.notify_all()
            thread, self._thread = self._thread, None
            executor, self._executor = self._executor, None
            left = [tried.future for tried in self._tries.values() if tried.future is not None]
        if not wait:
            for future in left:
                future.cancel()
        self._events.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        if executor is not None and self._make is not None:
            shut_down(executor, wait=wait)
        self._cut()

    def _is_full(self) -> bool:
        # Callbacks run in the thread that makes room: if one submitted and waited here, nobody
        # would.
        return (
            len(self._under_way) >= self._limit and self._thread is not threading.current_thread()
        )

    def _check_open(self) -> None:
        if self._closing:
            raise ConfigError("this compile service was closed; make another one")

    def _reset_in_child(self) -> None:
        """Begin anew in a forked child: connections and threads of the engine are the parent's."""
        tasks = list(self._under_way)
        self._begin_anew()
        self._cut.detach()
        self._closing, self._executor = True, None
        for task in tasks:
            task.future.abandon()

    # What follows runs in the pool's thread alone.

    def _serve(self) -> None:
        while (event := self._events.get()) is not None:
            try:
                event()
            except Exception:  # noqa: BLE001  # the seam: no other future may be left waiting
                _LOG.exception("the compile service could not handle an answer")
        for task in list(self._under_way):
            task.future.cancel()
            self._forget(task)

    def _engine(self) -> Executor:
        with self._changed:
            if self._executor is None:
                if self._make is None:
                    raise ConfigError("this compile service was closed; make another one")
                made = self._make()
                _check_made(made)
                self._executor = made
            return self._executor

    def _give(self, task: Task) -> None:
        if task.future.done():
            self._forget(task)
            return
        number = new_number()
        try:
            executor = self._engine()
        except Exception as error:  # noqa: BLE001  # the user's function may raise anything
            self._settle(task, error=as_failure(task.name, error, ""))
            return
        tried = self._tries[task] = _Try(task, number, executor)
        try:
            future = executor.submit(run_job, self._message(task, number))
        except BundlerError as error:  # too large, or a module that is gone
            self._settle(task, error=error)
        except Exception as error:  # noqa: BLE001  # engines raise what they like when they are gone
            self._lost(tried, error)
        else:
            tried.future = future
            future.add_done_callback(
                lambda done: self._events.put(lambda: self._handle(tried, done))
            )

    def _message(self, task: Task, number: str) -> bytes:
        job, plan = Job.from_bytes(task.payload), self._plan
        compiler = self._compilers.get(job.target)
        if compiler is None:
            compiler = self._compilers[job.target] = Compiler.here(job.target)
        return EngineJob(
            task.name,
            number,
            task.payload,
            job.target,
            compiler,
            self._source_of(job),
            compiler_variables(task.environment.environment),
            task.environment.path,
            task.timeout_s or 0.0,
            plan.memory_bytes,
            plan.perform,
            plan.preload,
            plan.stores,
            job.key,
            self._client,
        ).to_bytes()

    def _handle(self, tried: _Try, done: Future[bytes]) -> None:
        # The engine keeps a result on its worker as long as there is a reference to its future, and
        # the future refers to this try.
        task, tried.future = tried.task, None
        if self._tries.get(task) is not tried:
            return  # cancelled meanwhile, or an answer to an earlier try
        if task.future.done():
            self._forget(task)
            return
        try:
            answer = done.result()
        except (
            Exception,  # noqa: BLE001
            CancelledError,
        ) as error:  # each engine has errors of its own for a lost worker
            self._lost(tried, error)
            return
        self._broken = 0  # an executor that gets a task done is counted as sound again
        try:
            what, worker, *rest = wire.unpack(answer, "answer of an engine's worker")
            self._on_worker(worker)
            self._handle_answer(task, what, worker, rest)
        except BundlerError as error:
            self._settle(task, error=error)

    def _handle_answer(self, task: Task, what: str, worker: str, rest: list[Any]) -> None:
        if what == "done":
            data, bundle, worker_s = wire.fields(rest, "answer", bytes, bytes, float)
            queued_s = max(0.0, time.monotonic() - task.submitted_s - worker_s)
            self._settle(task, TaskOutcome(self._placed(data, bundle), queued_s, worker_s))
        elif what == "failed":
            (error,) = wire.fields(rest, "failure", list)
            self._settle(task, error=decode_error(error))
        elif what == "died":
            how, words = (
                text.decode("utf-8", "replace") for text in wire.fields(rest, "death", bytes, bytes)
            )
            self._try_again(task, f"{how} (a worker of {host_of(worker)})", words)
        else:
            (texts,) = wire.fields(rest, "refusal", list)
            self._refused(task, worker, [text.decode("utf-8", "replace") for text in texts])

    def _placed(self, data: bytes, bundle: bytes) -> bytes:
        """Put a kernel that a worker sent into the cache directory; returns the result with that
        directory.
        """
        compiled, root = Compiled.from_bytes(data), self._plan.cache_dir
        directory = os.path.join(root, compiled.key)
        if bundle:
            with Bundle.from_bytes(bundle) as sent:
                restore(sent, root, only="all")
        return replace(compiled, directory=directory).to_bytes()

    def _lost(self, tried: _Try, error: BaseException) -> None:
        """Handle what an engine says instead of an answer: its worker, its scheduler or the
        executor is gone.
        """
        how = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        if not isinstance(error, BrokenExecutor):
            self._try_again(tried.task, how, "", lost=True)
            return
        # An executor that broke took every task with it, so no task counts as having ended a
        # worker.
        with self._changed:
            if self._executor is tried.executor and self._make is not None:
                self._broken += 1
                _LOG.warning("the executor is made again: %s", how)
                self._executor = None
                shut_down(tried.executor, wait=False)
        if self._make is None:
            reason = (
                f"the executor broke: {how}; give a function that makes one, and it is called again"
            )
            self._settle(tried.task, error=tried.task.without_workers(reason))
        elif self._broken >= EXECUTORS:
            reason = f"{EXECUTORS} executors broke one after the other: {how}"
            self._settle(tried.task, error=tried.task.without_workers(reason))
        else:
            self._give(tried.task)

    def _try_again(self, task: Task, how: str, words: str, *, lost: bool = False) -> None:
        task.deaths += 1
        if task.deaths < TRIES:
            self.retried += 1
            self._give(task)
        elif lost:
            self._settle(task, error=task.lost_by_engine(how))
        else:
            self._settle(task, error=task.killed_workers(how, words))

    def _refused(self, task: Task, worker: str, differences: list[str]) -> None:
        refusals = self._refusals.setdefault(task, [])
        refusals.append(f"{worker} has {'; '.join(differences)}")
        if len(refusals) < TRIES:
            self._give(task)
            return
        told = " and ".join(dict.fromkeys(refusals))
        self._settle(
            task,
            error=ToolchainMismatch(
                f"{task.name}: not compiled, since its workers are not like this process: {told};"
                " install the same there, or leave such workers out of the engine",
                name=task.name,
                worker=worker,
                got=told,
            ),
        )

    def _withdraw(self, task: Task) -> None:
        """Give a cancelled task up: at the engine, and, where it runs on this machine, in its
        worker.
        """
        tried = self._tries.get(task)
        self._forget(task)
        if tried is None or self._closing:
            return
        with contextlib.suppress(OSError), open(os.path.join(self._directory, tried.number), "xb"):
            pass
        if tried.future is not None:
            tried.future.cancel()

    def _settle(
        self, task: Task, outcome: TaskOutcome | None = None, error: BundlerError | None = None
    ) -> None:
        self._forget(task)
        task.future.settle(outcome, error)

    def _forget(self, task: Task) -> None:
        self._refusals.pop(task, None)
        self._tries.pop(task, None)
        with self._changed:
            self._under_way.discard(task)
            self._changed.notify_all()


def shut_down(executor: Executor, *, wait: bool) -> None:
    """Shut an executor down that is ours; what it has not begun is cancelled."""
    known = inspect.signature(executor.shutdown).parameters
    more = {"cancel_futures": True} if "cancel_futures" in known else {}
    try:
        executor.shutdown(wait=wait, **more)
    except Exception:  # noqa: BLE001  # an engine that is gone has nothing left to shut down
        _LOG.warning("the executor could not be shut down", exc_info=True)


def _check(executor: object) -> None:
    if not (isinstance(executor, Executor) or callable(executor)):
        raise ConfigError(
            f"executor={executor!r:.80}: expected a concurrent.futures.Executor, such as"
            " Client.get_executor() of Dask, or a function that makes one",
            got=repr(executor)[:80],
        )


def _check_made(executor: object) -> None:
    if not isinstance(executor, Executor):
        raise ConfigError(
            f"the function that makes the executor returned {executor!r:.80}; expected a"
            " concurrent.futures.Executor",
            got=repr(executor)[:80],
        )
