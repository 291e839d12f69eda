# SPDX-License-Identifier: Apache-2.0
"""Which worker takes a task: a free one, a new one, or a busy one that will begin with it right after its own.

`next_worker`, `take_back` and `adjust` are called by the thread of `WorkerPool` alone; they choose, `WorkerProcesses` acts.
"""

from __future__ import annotations

from bundler.compile.pool_tasks import Task
from bundler.compile.worker_processes import Worker, WorkerProcesses


def next_worker(processes: WorkerProcesses, size: int, generation: int) -> Worker | None:
    """Return the worker for the next task: a free one, else a busy one that can be sent a task ahead; None when there is neither."""
    return _free_worker(processes, size, generation) or _early_worker(processes, generation)


def _free_worker(processes: WorkerProcesses, size: int, generation: int) -> Worker | None:
    """Return a worker without a task, forked now if there may be one more; idle ones of an older generation are dismissed."""
    # An older generation has imported a module that has changed since.
    staying = [worker for worker in processes.workers.values() if not worker.leaving]
    for worker in staying:
        if worker.task is None and worker.generation == generation:
            return worker
        if worker.task is None:
            processes.dismiss(worker)
    return (
        processes.fork(generation) if sum(not worker.leaving for worker in staying) < size else None
    )


def _early_worker(processes: WorkerProcesses, generation: int) -> Worker | None:
    """Return a busy worker that can be sent its next task already, so that it does not wait for a message in between."""
    for worker in processes.workers.values():
        task = worker.task
        if (
            task is None
            or worker.next_task is not None
            or worker.leaving
            or worker.generation != generation
        ):
            continue
        # A worker that has begun with a task is up; one that is still starting may never get to a second task.
        if task.started_s is not None and not task.future.done():
            return worker
    return None


def _has_room(processes: WorkerProcesses, size: int) -> bool:
    """Tell whether there is a worker without a task, or may be one more."""
    staying = [worker for worker in processes.workers.values() if not worker.leaving]
    return len(staying) < size or any(worker.task is None for worker in staying)


def take_back(processes: WorkerProcesses, size: int) -> Task | None:
    """Return a task that some worker was sent and has not begun, where another one could; None when there is none."""
    if not _has_room(processes, size):
        return None
    # Sent ahead to save a round trip, a task must not wait for a slow one while another worker is free.
    for worker in processes.workers.values():
        task = processes.retract(worker)
        if task is not None:
            return task
    return None


def adjust(processes: WorkerProcesses, warm: int, generation: int, *, quiet: bool) -> None:
    """Fork the workers that a warm-up asked for, and dismiss idle ones after `quiesce`."""
    while sum(not worker.leaving for worker in processes.workers.values()) < warm:
        processes.fork(generation)
    for worker in processes.workers.values():
        if quiet and worker.task is None and not worker.leaving:
            processes.dismiss(worker)
