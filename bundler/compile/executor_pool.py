# SPDX-License-Identifier: Apache-2.0
"""`ExecutorPool`: tasks are done by the workers of an engine, through its
`concurrent.futures.Executor`; in place of a `WorkerPool`.  `JobGroups` decides what goes when.

The engine has workers, queue and placement; here is what a service promises beyond that: a task
whose worker is lost is tried again once, an executor that broke is made anew where there is a
function for it, and nothing is left waiting.  One thread handles what comes back, as callbacks of
an engine's futures run in the engine's own threads, which must not be kept busy nor submit.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import os
import queue
import secrets
import shutil
import statistics
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from bundler.compile.compile_job import Compiled, Job
from bundler.compile.engine_worker import (
    CLIENT_DIRECTORY,
    Compiler,
    Died,
    Done,
    EngineJob,
    EngineMessage,
    Failed,
    Outcomes,
    Refusal,
    WaitingClient,
    compiler_variables,
    host_of,
    read_answer,
    run_job,
)
from bundler.compile.job_futures import CompileFuture
from bundler.compile.worker_messages import as_failure, decode_error, failure
from bundler.compile.worker_processes import Task, TaskOutcome, WorkerPlan
from bundler.errors import BundlerError, ConfigError, FormatError, ToolchainMismatch
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


T = TypeVar("T")

# Jobs are short where the middle one of the last so many took less.
_LAST, _SHORT_S = 32, 0.1
# A message has so many jobs at most, and work for about so long.
_MOST, _GROUP_S = 16, 0.25
# So many messages are out for each worker that has answered, and at least so many.
_AHEAD, _LEAST = 4, 8
# Without an answer for so long twice as many may go out: there may be workers that have nothing to
# do and so were not heard of.
PATIENCE_S = 0.5


class JobGroups(Generic[T]):
    """Jobs that wait to be sent: which go to an engine next, and how many in one message; not
    thread-safe.

    A message costs an engine milliseconds, however little there is to do for it.  Kernels that take
    long go one by one and all at once, so that the engine sees how much there is and places each
    where it likes.  Short ones go several in one message, and no more messages are out than keep
    the workers busy.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[T, Hashable]] = deque()
        self._seconds: deque[float] = deque(maxlen=_LAST)
        self._workers: set[str] = set()
        self._least, self._moved_s = _LEAST, 0.0

    def add(self, job: T, kind: Hashable) -> None:
        """Take a job; those of one kind may go together."""
        if not self._waiting:
            self._moved_s = time.monotonic()
        self._waiting.append((job, kind))

    def note(self, worker: str, seconds: list[float]) -> None:
        """Take note of an answer: the worker's name, and how long each of its jobs took."""
        self._workers.add(worker)
        self._seconds.extend(seconds)
        self._moved_s = time.monotonic()

    def pause_s(self) -> float | None:
        """Return after how many seconds without an answer to `take` again; None where nothing
        waits.
        """
        rest_s = self._moved_s + PATIENCE_S - time.monotonic()
        return max(0.0, rest_s) if self._waiting else None

    def take(self, out: int) -> list[T]:
        """Return the jobs of the next message while so many messages are out; empty where nothing
        waits, or an answer is to be waited for.
        """
        if not self._waiting:
            return []
        if self._seconds and statistics.median(self._seconds) >= _SHORT_S:
            return [self._waiting.popleft()[0]]
        if self.pause_s() == 0.0:
            self._least, self._moved_s = 2 * max(out, self._least), time.monotonic()
        if out >= max(self._least, _AHEAD * len(self._workers)):
            return []
        return self._group()

    def _group(self) -> list[T]:
        # Of the mean, unlike the middle one: a few long ones among short ones are not grouped much.
        mean_s = statistics.fmean(self._seconds) if self._seconds else _GROUP_S
        size = math.ceil(_GROUP_S / max(mean_s, 0.001))
        # Towards the end fewer go together, so that all workers have something to do.
        share = math.ceil(len(self._waiting) / (2 * max(1, len(self._workers))))
        first, kind = self._waiting.popleft()
        group, size = [first], min(size, share, _MOST)
        while len(group) < size and self._waiting and self._waiting[0][1] == kind:
            group.append(self._waiting.popleft()[0])
        return group


@dataclass(eq=False)
class _Try:
    """Tasks that went to an engine in one message: its number, the executor that it was given to,
    and the engine's future.
    """

    tasks: list[Task]
    number: str
    executor: Executor
    future: Future[bytes] | None = None


class ExecutorPool:
    """Has tasks done by an engine.

    Guarantees: each task's future is settled.  A task whose worker is lost, or that ends the
    process that compiles it, is tried again once, and then fails with its name; of tasks that went
    to a lost worker together each is tried alone first, which does not count.  A worker of
    another compiler refuses a task before it compiles; so does a second one, and then the task
    fails with the name of both.  `close` without waiting takes back what no worker has begun, and
    ends what runs on this machine. Does not guarantee: that a compile on another machine ends
    before it is done or its time is up, since an engine cannot be told. Thread-safe; in a forked
    child the futures of its parent have failed, and nothing can be submitted.

    Args:
        executor: what does the tasks; or a function that makes it, which is called again after it
            broke, and what it made is shut down at the end.
        plan: what workers do, and where kernels go that they send back; without a bound of memory
            a process that compiles has its part of its machine's.
        queue_limit: `submit` waits while so many tasks are under way.
        source_of: returns path and digest of the module's file of a task's job.
        on_worker: is told the name of the worker that answered.
        stores: URLs of a store that workers publish into; empty to send kernels back.
    """

    def __init__(
        self,
        executor: Executor | MakeExecutor,
        plan: WorkerPlan,
        queue_limit: int,
        source_of: Callable[[Job], tuple[str, str]],
        on_worker: Callable[[str], None] = lambda _: None,
        stores: tuple[str, ...] = (),
    ) -> None:
        if not (isinstance(executor, Executor) or callable(executor)):
            raise ConfigError(
                f"executor={executor!r:.80}: expected a concurrent.futures.Executor, such as"
                " Client.get_executor() of Dask, or a function that makes one",
                got=repr(executor)[:80],
            )
        self._plan, self._limit, self._source_of = plan, queue_limit, source_of
        self._stores = stores
        self._make = None if isinstance(executor, Executor) else executor
        self._executor = always_ending(executor) if isinstance(executor, Executor) else None
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
        self._waiting: JobGroups[Task] = JobGroups()
        self._tries: dict[Task, _Try] = {}
        self._sent: set[_Try] = set()
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
            left = [tried.future for tried in list(self._sent) if tried.future]
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
        while (event := self._next_event()) is not None:
            try:
                event()
                while tasks := self._waiting.take(len(self._sent)):
                    self._send(tasks)
            except Exception:  # noqa: BLE001  # the seam: no other future may be left waiting
                _LOG.exception("the compile service could not handle an answer")
        for task in list(self._under_way):
            task.future.cancel()
            self._forget(task)

    def _next_event(self) -> Callable[[], None] | None:
        try:
            return self._events.get(timeout=self._waiting.pause_s())
        except queue.Empty:
            return lambda: None  # more may be sent without an answer

    def _engine(self) -> Executor:
        with self._changed:
            if self._executor is None:
                if self._make is None:
                    raise ConfigError("this compile service was closed; make another one")
                made = self._make()
                if not isinstance(made, Executor):
                    raise ConfigError(
                        f"the function that makes the executor returned {made!r:.80}; expected a"
                        " concurrent.futures.Executor",
                        got=repr(made)[:80],
                    )
                self._executor = always_ending(made)
            return self._executor

    def _give(self, task: Task) -> None:
        try:
            job = Job.from_bytes(task.payload)
            kind = (job.target, self._source_of(job), task.timeout_s, task.environment)
        except BundlerError as error:  # a module that is gone
            self._settle(task, error=error)
        else:
            self._waiting.add(task, kind)

    def _send(self, tasks: list[Task]) -> None:
        """Send tasks of one kind in one message, without those that nobody waits for any more."""
        tasks = self._waited_for(tasks)
        if not tasks:
            return
        try:
            executor = self._engine()
        except Exception as error:  # noqa: BLE001  # the user's function may raise anything
            for task in tasks:
                self._settle(task, error=as_failure(task.name, error, ""))
            return
        tried = _Try(tasks, secrets.token_hex(12), executor)
        self._tries.update(dict.fromkeys(tasks, tried))
        try:
            future = executor.submit(run_job, self._message(tasks, tried.number))
        except BundlerError as error:  # the message cannot be made, which may be for one of them
            if len(tasks) == 1:
                self._settle(tasks[0], error=error)
            else:
                self._send_each(tasks)
        except Exception as error:  # noqa: BLE001  # engines raise what they like when they are gone
            self._lost(tried, error)
        else:
            tried.future = future
            self._sent.add(tried)
            future.add_done_callback(
                lambda done: self._events.put(lambda: self._handle(tried, done))
            )

    def _send_each(self, tasks: list[Task]) -> None:
        for task in tasks:
            self._send([task])

    def _message(self, tasks: list[Task], number: str) -> bytes:
        jobs, plan, first = [Job.from_bytes(task.payload) for task in tasks], self._plan, tasks[0]
        target = jobs[0].target
        if target not in self._compilers:
            self._compilers[target] = Compiler.here(target)
        path, digest = self._source_of(jobs[0])
        message = EngineMessage(
            number=number,
            jobs=tuple(
                EngineJob(task.name, task.payload, job.key)
                for task, job in zip(tasks, jobs, strict=True)
            ),
            target=(target.backend, target.arch, target.warp_size),
            compiler=self._compilers[target],
            source=(os.fsencode(path), digest),
            environment=compiler_variables(first.environment.environment),
            path=first.environment.path,
            timeout_s=first.timeout_s or 0.0,
            memory_bytes=plan.memory_bytes,
            perform=plan.perform,
            preload=plan.preload,
            stores=self._stores,
            client=self._client,
        )
        return wire.pack(message)

    def _handle(self, tried: _Try, done: Future[bytes]) -> None:
        # The engine keeps a result on its worker as long as there is a reference to its future, and
        # the future refers to this try.
        tried.future = None
        self._sent.discard(tried)
        if not self._tasks_of(tried):
            return  # cancelled meanwhile
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
            self._handle_answer(tried, read_answer(answer))
        except Exception as error:  # noqa: BLE001  # whatever it is, none may be left waiting
            for task in self._tasks_of(tried):
                self._settle(task, error=as_failure(task.name, error, ""))

    def _handle_answer(self, tried: _Try, answer: Outcomes | Refusal) -> None:
        self._on_worker(answer.worker)
        if isinstance(answer, Refusal):
            for task in self._tasks_of(tried):
                self._refused(task, answer)
            return
        if len(answer.jobs) != len(tried.tasks):
            raise FormatError(
                f"answer of {answer.worker}: expected the outcomes of {len(tried.tasks)} jobs, got"
                f" {len(answer.jobs)}",
                got=len(answer.jobs),
            )
        done = [outcome for outcome in answer.jobs if isinstance(outcome, Done)]
        self._waiting.note(answer.worker, [one.seconds for one in done])
        # All of them before any future is settled: one bundle may hold the kernels of several.
        unplaced = dict[str, str]()
        for one in done:
            if one.bundle:
                with Bundle.from_bytes(one.bundle) as sent:
                    unplaced |= restore(sent, self._plan.cache_dir, only="all").skipped
        for task, outcome in zip(tried.tasks, answer.jobs, strict=True):
            if self._tries.get(task) is tried:
                self._handle_outcome(task, answer.worker, outcome, unplaced)

    def _handle_outcome(
        self, task: Task, worker: str, outcome: Done | Failed | Died, unplaced: dict[str, str]
    ) -> None:
        if isinstance(outcome, Failed):
            self._settle(task, error=decode_error(outcome.error))
        elif isinstance(outcome, Died):
            how, words = (part.decode("utf-8", "replace") for part in (outcome.how, outcome.words))
            self._try_again(task, f"{how} (a worker of {host_of(worker)})", words)
        else:
            compiled = Compiled.from_bytes(outcome.result)
            if compiled.key in unplaced:
                why = f"what {worker} sent cannot be placed: {unplaced[compiled.key]}"
                self._settle(task, error=failure(task.name, why))
                return
            directory = os.path.join(self._plan.cache_dir, compiled.key)
            queued_s = max(0.0, time.monotonic() - task.submitted_s - outcome.seconds)
            data = replace(compiled, directory=directory).to_bytes()
            self._settle(task, TaskOutcome(data, queued_s, outcome.seconds))

    def _waited_for(self, tasks: list[Task]) -> list[Task]:
        """Return the tasks that somebody waits for; the others are forgotten."""
        for task in tasks:
            if task.future.done():
                self._forget(task)
        return [task for task in tasks if task in self._under_way]

    def _tasks_of(self, tried: _Try) -> list[Task]:
        """Return the tasks that wait for the answer to this try and to no other one."""
        return self._waited_for([task for task in tried.tasks if self._tries.get(task) is tried])

    def _lost(self, tried: _Try, error: BaseException) -> None:
        """Handle what an engine says instead of an answer: its worker, its scheduler or the
        executor is gone.
        """
        how = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        tasks = self._tasks_of(tried)
        if not isinstance(error, BrokenExecutor):
            if len(tried.tasks) == 1:
                self._try_again(tried.tasks[0], how, "", lost=True)
            else:  # any of them may have ended the worker
                self.retried += len(tasks)
                self._send_each(tasks)
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
        elif self._broken >= EXECUTORS:
            reason = f"{EXECUTORS} executors broke one after the other: {how}"
        else:
            self._send_each(tasks)
            return
        for task in tasks:
            self._settle(task, error=task.without_workers(reason))

    def _try_again(self, task: Task, how: str, words: str, *, lost: bool = False) -> None:
        task.deaths += 1
        if task.deaths < TRIES:
            self.retried += 1
            self._send([task])
        elif lost:
            self._settle(task, error=task.lost_by_engine(how))
        else:
            self._settle(task, error=task.killed_workers(how, words))

    def _refused(self, task: Task, refusal: Refusal) -> None:
        differences = "; ".join(part.decode("utf-8", "replace") for part in refusal.differences)
        refusals = self._refusals.setdefault(task, [])
        refusals.append(f"{refusal.worker} has {differences}")
        if len(refusals) < TRIES:
            self._send([task])
            return
        told = " and ".join(dict.fromkeys(refusals))
        self._settle(
            task,
            error=ToolchainMismatch(
                f"{task.name}: not compiled, since its workers are not like this process: {told};"
                " install the same there, or leave such workers out of the engine",
                name=task.name,
                worker=refusal.worker,
                got=told,
            ),
        )

    def _withdraw(self, task: Task) -> None:
        """Give a cancelled task up: at the engine, and, where it runs on this machine, in its
        worker.
        """
        tried = self._tries.get(task)
        self._forget(task)
        if tried is None or self._closing or self._tasks_of(tried):
            return  # other jobs of its message are still waited for
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


# A client that is none of these takes tasks and drops them.
_TAKES_TASKS = {"connecting", "running"}


def always_ending(executor: Executor) -> Executor:
    """Return an executor of Dask with futures of its client instead, which all end; any other as it
    is.

    `distributed`'s own executor (2026.8) has futures that nothing ends: one whose result was on its
    way when the scheduler was lost, and one of a task that was given to a client while it closed.
    A build would wait for them.
    """
    known = type(executor).__module__.partition(".")[0] == "distributed"
    if known and hasattr(executor, "_client") and hasattr(executor, "_kwargs"):
        return _DaskExecutor(executor)
    return executor


class _DaskExecutor(Executor):
    """Has tasks done by the client of an executor of Dask, with that one's options.

    Shutting it down does nothing: its pool waits for each future or cancels it, and Dask gives up
    what nobody refers to.
    """

    def __init__(self, executor: Any) -> None:
        self._client, self._options = executor._client, executor._kwargs  # noqa: SLF001

    def submit(self, function: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
        task = self._client.submit(function, *given, **self._options, **named)
        loop = self._client.loop.asyncio_loop
        return asyncio.run_coroutine_threadsafe(self._result(task), loop)

    async def _result(self, task: Any) -> Any:
        # In the client's own thread, in which it also closes: it ends what it was given before.
        if self._client.status not in _TAKES_TASKS:
            raise ConnectionError("Dask's client was closed")
        return await task
