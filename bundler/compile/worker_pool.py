# SPDX-License-Identifier: Apache-2.0
"""`WorkerPool`: queue, deadlines, leases, retries, idle shutdown and forks of the processes that
compile; used by the service.

One thread owns the processes, and exists while there is work or processes stand ready; other
threads only change the queue and wake it. A task goes to a free worker or to a new one
(`_next_worker`). Code of users, above all callbacks of futures, runs in that thread too, but never
under the pool's lock.

`TaskLeases`: of the processes of one host, one compiles a kernel, while the others go on with other
tasks; `shared_leases` is where the service gets leases from.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable

from bundler.backends.backend_errors import BackendError, BackendUnavailable
from bundler.backends.local import LocalBackend
from bundler.backends.port import Lease
from bundler.compile.job_futures import CompileFuture
from bundler.compile.worker_messages import decode_error
from bundler.compile.worker_processes import (
    LONGEST_PAUSE_S,
    Answer,
    Event,
    ServerLost,
    Task,
    TaskOutcome,
    Worker,
    WorkerEnded,
    WorkerPlan,
    WorkerProcesses,
)
from bundler.errors import BundlerError, ConfigError, FormatError
from bundler.fork_safety import after_fork
from bundler.format import wire
from bundler.package_loggers import logger
from bundler.toolchain.private_directory import TemporaryPlace
from bundler.user_warnings import show

# Beyond this, compiles of one program wait for memory and disk, not for cores.
MOST_WORKERS = 32
# Triton and one kernel take more than this.
LEAST_MEMORY_BYTES = 64 << 20
QUEUE_LIMIT = 10_000
# What a worker may have at least, where nothing else is said: an equal part of a small machine
# could be too little for a kernel.
LEAST_SHARE_BYTES = 4 << 30
IDLE_S = 60.0
TIMEOUT_S = 600.0
# Of a container: control groups of version 2 and 1.
_GROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
# A task that ended so many workers is not tried again: the first death may have been the system's,
# which had no memory left.
DEATHS = 2
# Nor is a task that so many workers were sent and died before they began it, as when no worker can
# start.
MISSES = 5
# Servers lost one after the other, without a task done between them, before the queue is given up.
SERVERS = 3
# A server that has not imported Triton by then never will.
START_TIMEOUT_S = 120.0
# Longer than a machine pauses; a holder that is killed delays the others by no more than this.
LEASE_S = 30.0
_ATTEMPTS = 3
_NAME = "triton-bundler"
_LOG = logger("bundler.compile")

TakeLease = Callable[[str, float], Lease | None]


class TaskLeases:
    """The leases of one pool's tasks; for efficiency alone: where leases fail, two processes may
    compile the same kernel.

    Args:
        take: asks for a lease by name and seconds; None while another process has it.
    """

    def __init__(self, take: TakeLease | None) -> None:
        self._take = take
        self._names: set[str] = set()

    def may_start(self, task: Task, now_s: float) -> bool:
        """Take a task's lease; when another process has it, say when to ask again, and return
        False.
        """
        # Equal jobs of a pool are one task, so another task of that name is another job: names are
        # few.
        if self._take is None or task.lease_name in self._names:
            return True
        try:
            task.lease = self._take(task.lease_name, LEASE_S)
        except BackendError as error:
            _LOG.warning("other processes of this host may compile the same kernels: %s", error)
            self._take = None
            return True
        if task.lease is not None:
            self._names.add(task.lease_name)
            task.renew_s = now_s + LEASE_S / 3
            return True
        # jitter, no secret
        task.not_before_s = now_s + task.pause_s * random.uniform(0.5, 1.0)  # noqa: S311
        task.pause_s = min(2 * task.pause_s, LONGEST_PAUSE_S)
        return False

    def renew(self, task: Task, now_s: float) -> None:
        """Prolong the lease of a task that runs, when it is time."""
        if now_s >= task.renew_s and task.lease is not None:
            task.renew_s = now_s + LEASE_S / 3
            with contextlib.suppress(
                BackendError
            ):  # a renewal may fail twice before the lease runs out
                task.lease.renew(LEASE_S)

    def release(self, task: Task) -> None:
        """Give a task's lease back, if it has one."""
        lease, task.lease, task.renew_s = task.lease, None, math.inf
        if lease is not None:
            self._names.discard(task.lease_name)
            with contextlib.suppress(BackendError):  # it expires by itself
                # The lease's file may be busy, and an unreleased lease delays others by all of its
                # time.
                any(lease.release() for _ in range(_ATTEMPTS))


class HostLeases:
    """Leases among the processes of this user on this host, in a directory that is looked at before
    each use.
    """

    def __init__(self) -> None:
        self._place = TemporaryPlace(_NAME, show)
        self._backend: LocalBackend | None = None

    def take(self, name: str, ttl_s: float) -> Lease | None:
        """Take a lease, None while another process has it.

        Raises:
            BackendError: leases cannot be had here.
        """
        try:
            root = self._place.made()
        except OSError as error:
            raise BackendUnavailable(f"no directory for leases can be made: {error}") from error
        if self._backend is None or self._backend.root != root:
            self._backend = LocalBackend(root)
        return self._backend.lease(name, ttl_s)


def shared_leases() -> TakeLease | None:
    """Return how to take a lease among the processes of this user on this host; None where users
    have no numbers.
    """
    return HostLeases().take if hasattr(os, "getuid") else None


def worker_count(workers: int | None) -> int:
    """Return how many workers there are: one a core for None; raises `ConfigError`."""
    if workers is None:
        return min(
            MOST_WORKERS,
            (
                len(os.sched_getaffinity(0))
                if hasattr(os, "sched_getaffinity")
                else os.cpu_count() or 1
            ),
        )
    if type(workers) is not int or workers < 1:
        raise ConfigError(
            f"workers={workers!r}: expected a number of processes, at least 1", got=workers
        )
    return workers


def memory_share(workers: int) -> int:
    """Return how much private memory each of so many workers may have: its part of the machine's,
    and at least `LEAST_SHARE_BYTES`.

    The machine's memory is what its control group may have, where there is one.  Returns 0, no
    limit, where nobody says how much there is.
    """
    whole = machine_memory_bytes()
    return max(LEAST_SHARE_BYTES, whole // workers) if whole else 0


def machine_memory_bytes() -> int:
    """Return how much memory this process may use, 0 where that is not known."""
    sizes = []
    with contextlib.suppress(ValueError, OSError, AttributeError):
        sizes.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for path in _GROUP_LIMITS:
        with contextlib.suppress(ValueError, OSError), open(path, encoding="ascii") as file:
            sizes.append(int(file.read()))  # "max" where there is none
    return min((size for size in sizes if size > 0), default=0)


def check_limits(
    timeout_s: float | None, memory_bytes: int | None, queue_limit: int, idle_s: float
) -> None:
    """Raise `ConfigError` for a limit that cannot be one."""
    for name, value in (("timeout_s", timeout_s), ("queue_limit", queue_limit), ("idle_s", idle_s)):
        if value is not None and not value > 0:
            raise ConfigError(f"{name}={value!r}: expected more than 0", got=value)
    if memory_bytes is not None and memory_bytes < LEAST_MEMORY_BYTES:
        raise ConfigError(
            f"memory_bytes={memory_bytes}: expected at least {LEAST_MEMORY_BYTES}, which Triton"
            " alone takes",
            got=memory_bytes,
        )


class WorkerPool:
    """Workers that do tasks.

    Guarantees: each task's future is settled, whatever happens to processes; a task that ends
    `DEATHS` workers fails, is not tried again, and takes no other task with it.  Processes exist
    from the first task or `warm_up` until the idle time, and never outlive this process.
    Thread-safe; a forked child has an empty pool of its own, and the futures it inherited have
    failed.

    Args:
        plan: what workers do.
        workers: how many at most.
        queue_limit: `submit` waits while so many tasks are queued.
        idle_s: without work for so long, all processes end.
        take_lease: asks for the right to do a task on this host; None while another process has it.
        on_start: called when a worker begins with a task.
        deaths: a task that ended so many workers is not tried again.
    """

    def __init__(
        self,
        plan: WorkerPlan,
        workers: int,
        queue_limit: int,
        idle_s: float,
        take_lease: TakeLease | None = None,
        on_start: Callable[[Task], None] = lambda _: None,
        deaths: int = DEATHS,
    ) -> None:
        self._plan, self._size, self._limit, self._idle_s = plan, workers, queue_limit, idle_s
        self._take_lease, self._on_start, self._deaths = take_lease, on_start, deaths
        self._poison: dict[str, BundlerError] = {}
        self._closing = ""
        #: How many tasks were tried again because their worker ended.
        self.retried = 0
        self._begin_anew()
        after_fork(self._reset_in_child)

    def _begin_anew(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._leases = TaskLeases(self._take_lease)
        self._queue: deque[Task] = deque()
        self._later: list[Task] = []
        self._thread: threading.Thread | None = None
        self._last_thread: threading.Thread | None = None
        self._processes: WorkerProcesses | None = None
        self._after: deque[Callable[[], None]] = deque()
        self._generation = self._warm = self._lost = 0
        self._quiet = False

    def submit(self, task: Task) -> CompileFuture[TaskOutcome]:
        """Queue a task; waits while the queue is full.

        Raises:
            ConfigError: the pool was closed.
        """
        task.future.on_cancel(lambda: self._drop(task))
        with self._changed:
            while self._is_full() and not self._closing:
                self._changed.wait()
            self._check_open()
            known = self._poison.get(task.key)
            if known is None:  # else it would end two more workers
                task.submitted_s = time.monotonic()
                self._queue.append(task)
                self._run_thread()
        if known is not None:
            task.future.settle(error=known)
        return task.future

    def warm_up(self, wait_s: float) -> bool:
        """Start all workers; returns whether they stood ready within so many seconds."""
        with self._changed:
            self._check_open()
            self._warm, self._quiet = self._size, False
            self._run_thread()
            thread = self._thread
            self._changed.wait_for(lambda: self._is_warm() or self._thread is not thread, wait_s)
            return self._is_warm()

    def quiesce(self) -> None:
        """Let workers go once they have nothing to do; the server, with its imports, stays until
        the idle time.
        """
        with self._changed:
            self._warm, self._quiet = 0, True
            self._wake()

    def renew(self) -> None:
        """Have every task from now on done by a worker that has imported nothing of the
        user's yet.
        """
        with self._changed:
            self._generation += 1
            self._wake()

    def processes(self) -> tuple[int, ...]:
        """Return the process numbers of the workers that exist now, sorted."""
        with self._changed:
            staying = self._processes.staying() if self._processes is not None else []
            return tuple(sorted(worker.pid for worker in staying if worker.pid is not None))

    def close(self, *, wait: bool) -> None:
        """End everything: when `wait` after what is queued, else at once, and what is not done is
        cancelled.  Twice is fine.
        """
        with self._changed:
            self._closing = "after the queue" if wait and self._closing != "now" else "now"
            self._wake()
            self._changed.notify_all()
            thread = self._last_thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _is_full(self) -> bool:
        # Callbacks run in the thread that empties the queue: if one submitted and waited here,
        # nobody would make room.
        return len(self._queue) >= self._limit and self._thread is not threading.current_thread()

    def _check_open(self) -> None:
        if self._closing:
            raise ConfigError("this compile service was closed; make another one")

    def _is_warm(self) -> bool:
        return (
            self._processes is not None
            and self._processes.ready
            and len(self.processes()) >= self._size
        )

    def _drop(self, task: Task) -> None:
        """Take a cancelled task out of the queue; one that runs loses its worker in the pool's
        thread.
        """
        with self._changed:
            with contextlib.suppress(ValueError):
                self._queue.remove(task)
                self._changed.notify_all()
            self._wake()

    def _wake(self) -> None:
        if self._processes is not None:
            self._processes.wake()

    def _run_thread(self) -> None:
        if self._thread is None:
            # A daemon thread: worker processes end with this process anyway, so an interpreter that
            # exits need not wait.
            self._thread = self._last_thread = threading.Thread(
                target=self._serve, name="bundler-compile", daemon=True
            )
            self._thread.start()
        self._wake()

    def _reset_in_child(self) -> None:
        """Begin anew in a forked child; locks may be held by threads that are not there."""
        processes = self._processes
        tasks = [*self._queue, *self._later, *(processes.tasks() if processes is not None else ())]
        self._begin_anew()
        if processes is not None:
            processes.abandon()
        for task in tasks:
            task.future.abandon()

    # What follows runs in the pool's thread alone.

    def _serve(self) -> None:
        try:
            again = True
            while again:
                processes = WorkerProcesses(self._plan)
                with self._changed:
                    self._processes = processes
                again = self._serve_with(processes)
        except OSError as error:
            self._give_up(f"they cannot be started: {error}")
        finally:
            self._run_after()

    def _serve_with(self, processes: WorkerProcesses) -> bool:
        """Work with these processes; True when the server was lost and another one is to
        take over.
        """
        begun_s = active_s = time.monotonic()
        try:
            while True:
                with self._changed:
                    now_s = time.monotonic()
                    self._expire(processes, now_s)
                    self._assign(processes, now_s)
                    # A start that takes longer than the idle time must not end itself: `warm_up`
                    # waits for it.
                    if self._is_busy(processes) or not processes.ready:
                        active_s = now_s
                    if self._is_over(processes, now_s - active_s):
                        return False
                    pause_s = self._pause_s(processes, active_s)
                self._run_after()
                if not processes.ready and now_s - begun_s > START_TIMEOUT_S:
                    return self._replace(
                        processes,
                        ServerLost(f"not started within {START_TIMEOUT_S:g} s", never_ready=True),
                    )
                for event in processes.wait(pause_s):
                    if isinstance(event, ServerLost):
                        return self._replace(processes, event)
                    with self._changed:
                        self._handle(event)
        except Exception as error:  # noqa: BLE001  # the seam: no future may be left waiting
            _LOG.exception("the compile service stopped")
            self._give_up(f"{type(error).__name__}: {error}", processes.tasks())
            return False
        finally:
            processes.close()

    def _is_over(self, processes: WorkerProcesses, idle_s: float) -> bool:
        """Whether this thread has to end; after that a task starts another one."""
        if self._closing != "now" and (
            self._is_busy(processes) or not (self._closing or idle_s >= self._idle_s)
        ):
            return False
        for task in self._stop(processes.tasks()):
            # what it returns is not needed
            self._after.append(task.future.cancel)  # type: ignore[arg-type]
        return True

    def _is_busy(self, processes: WorkerProcesses) -> bool:
        return bool(self._queue or self._later or processes.tasks())

    def _stop(self, sent: list[Task]) -> list[Task]:
        """Let the thread end; returns the tasks that are left, with those that workers were sent,
        and gives their leases back.
        """
        left = [*sent, *self._queue, *self._later]
        self._queue.clear()
        self._later.clear()
        for task in left:
            self._leases.release(task)
        self._processes = self._thread = None
        self._warm = 0
        self._changed.notify_all()
        return left

    def _give_up(self, reason: str, tasks: list[Task] | None = None) -> None:
        with self._changed:
            for task in self._stop(tasks or []):
                self._settle(task, error=task.without_workers(reason))

    def _replace(self, processes: WorkerProcesses, lost: ServerLost) -> bool:
        """Decide what follows a lost server: its workers are gone with it, so no task counts as
        having ended one.
        """
        tasks = processes.tasks()
        self._lost += 1
        if lost.never_ready or self._lost >= SERVERS:
            self._give_up(lost.reason, tasks)
            return False
        _LOG.warning("the compile server is started again: %s", lost.reason)
        with self._changed:
            for task in tasks:
                self._again(task)
        return True

    def _pause_s(self, processes: WorkerProcesses, active_s: float) -> float:
        """Return how long the thread may sleep unless an event wakes it."""
        moments = [task.not_before_s for task in self._later]
        for task in processes.tasks():
            moments += [task.deadline_s, task.renew_s]
        if not moments and not self._queue:
            moments = [active_s + self._idle_s]
        return min(max(0.0, min(moments, default=math.inf) - time.monotonic()), START_TIMEOUT_S)

    def _expire(self, processes: WorkerProcesses, now_s: float) -> None:
        for worker in list(processes.workers.values()):
            task = worker.task
            if task is None:
                continue
            if task.future.cancelled() or now_s >= task.deadline_s:
                self._finish(worker)
                processes.kill(worker)
                if not task.future.cancelled():
                    self._settle(task, error=task.timed_out())
            else:
                self._leases.renew(task, now_s)

    def _assign(self, processes: WorkerProcesses, now_s: float) -> None:
        due = [task for task in self._later if task.not_before_s <= now_s]
        self._later = [
            task for task in self._later if task.not_before_s > now_s and not task.future.done()
        ]
        self._queue.extendleft(reversed(due))  # tasks that waited for another process come first
        while self._queue:
            worker = _next_worker(processes, self._size, self._generation)
            if worker is None:
                break
            task = self._queue.popleft()
            if task.future.done():
                continue
            if not self._leases.may_start(task, now_s):
                self._later.append(task)
                continue
            self._give(processes, worker, task)
        _adjust(processes, self._warm, self._generation, quiet=self._quiet)
        self._quiet = self._quiet and self._is_busy(processes)
        self._changed.notify_all()

    def _give(self, processes: WorkerProcesses, worker: Worker, task: Task) -> None:
        task.started_s = None
        try:
            processes.send(worker, task)
        except FormatError as error:  # too large
            self._leases.release(task)
            self._settle(task, error=error)

    def _handle(self, event: Event) -> None:
        if isinstance(event, Answer):
            self._handle_answer(event)
        elif isinstance(event, WorkerEnded):
            worker = event.worker
            if worker.task is not None:
                self._worker_died(self._finish(worker), event, worker.printed_since_start())
            worker.close()
        self._changed.notify_all()

    def _handle_answer(self, answer: Answer) -> None:
        worker, (what, *rest) = answer.worker, answer.message
        task = worker.task
        if task is None:
            return  # the answer to a task that was cancelled or ran out of time: this worker ends
        if what == "started":
            (worker.said,) = wire.fields(rest, "start", int)
            task.started_s = time.monotonic()
            task.future.mark_started()
            self._after.append(lambda: self._on_start(task))
            return
        self._lost = 0  # a server that gets a task done is counted as sound again
        self._finish(worker)
        if what == "done":
            data, worker_s = wire.fields(rest, "answer", bytes, float)
            self._settle(
                task, TaskOutcome(data, (task.started_s or 0.0) - task.submitted_s, worker_s)
            )
        else:
            (error,) = wire.fields(rest, "failure", list)
            self._settle(task, error=decode_error(error))

    def _worker_died(self, task: Task, death: WorkerEnded, words: str) -> None:
        task.misses += task.started_s is None
        task.deaths += task.started_s is not None
        if task.deaths < self._deaths and task.misses < MISSES:
            self.retried += 1
            self._again(task)
            return
        self._poison[task.key] = error = task.killed_workers(death.how(), words)
        self._settle(task, error=error)

    def _again(self, task: Task) -> None:
        self._leases.release(task)
        self._queue.appendleft(task)

    def _finish(self, worker: Worker) -> Task:
        task = worker.task
        assert task is not None
        worker.task = None
        self._leases.release(task)
        return task

    def _settle(
        self, task: Task, outcome: TaskOutcome | None = None, error: BundlerError | None = None
    ) -> None:
        self._after.append(lambda: task.future.settle(outcome, error))

    def _run_after(self) -> None:
        # A thread that ends and the one that follows it may both be here, so the deque may be empty
        # by now.
        with contextlib.suppress(IndexError):
            while True:
                self._after.popleft()()


def _next_worker(processes: WorkerProcesses, size: int, generation: int) -> Worker | None:
    """Return the worker for the next task: a free one, or one that is forked now if there may be
    one more; None when there is neither.

    Idle workers of an older generation, which imported a module that has changed since, are
    dismissed.
    """
    for worker in processes.staying():
        if worker.task is None and worker.generation == generation:
            return worker
        if worker.task is None:
            processes.dismiss(worker)
    return processes.fork(generation) if len(processes.staying()) < size else None


def _adjust(processes: WorkerProcesses, warm: int, generation: int, *, quiet: bool) -> None:
    """Fork the workers that a warm-up asked for, and dismiss idle ones after `quiesce`."""
    while len(processes.staying()) < warm:
        processes.fork(generation)
    for worker in processes.staying():
        if quiet and worker.task is None:
            processes.dismiss(worker)
