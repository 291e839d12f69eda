# SPDX-License-Identifier: Apache-2.0
"""Which worker takes a task: a free one, a new one, or one that still works and will begin with it right afterwards."""

from __future__ import annotations

from bundler.compile.crew import Crew, Worker
from bundler.compile.tasks import Task


def tasks_of(crew: Crew) -> list[Task]:
    """Return the tasks that workers have."""
    return [task for worker in list(crew.workers.values()) for task in of(worker)]


def of(worker: Worker) -> list[Task]:
    """Return what a worker works on, and what it was sent besides."""
    return [task for task in (worker.task, worker.next_task) if task is not None]


def next_worker(crew: Crew, size: int, generation: int) -> Worker | None:
    """Return the worker for the next task: a free one if there is, or one that works; None when all have enough."""
    return _free_worker(crew, size, generation) or _early_worker(crew, generation)


def _free_worker(crew: Crew, size: int, generation: int) -> Worker | None:
    """Return a worker without a task, forked now if there may be one more; those of an older generation are let go."""
    staying = [worker for worker in crew.workers.values() if not worker.leaving]
    for worker in staying:
        if worker.task is None and worker.generation == generation:
            return worker
        if worker.task is None:
            crew.dismiss(worker)
    return crew.fork(generation) if sum(not worker.leaving for worker in staying) < size else None


def _early_worker(crew: Crew, generation: int) -> Worker | None:
    """Return a worker that may be sent a task while it works, so that it need not wait for us in between."""
    for worker in crew.workers.values():
        task: Task | None = worker.task
        if task is None or worker.next_task is not None or worker.leaving or worker.generation != generation:
            continue
        if task.started_s is not None and not task.future.done():
            return worker
    return None


def _has_room(crew: Crew, size: int) -> bool:
    """Tell whether there is a worker without a task, or may be one more."""
    staying = [worker for worker in crew.workers.values() if not worker.leaving]
    return len(staying) < size or any(worker.task is None for worker in staying)


def take_back(crew: Crew, size: int) -> Task | None:
    """Return a task that some worker was sent and has not begun, where another one could; None when there is none."""
    if not _has_room(crew, size):
        return None
    for worker in crew.workers.values():
        task: Task | None = worker.next_task
        if task is not None and crew.retract(worker, task.number):
            worker.next_task = None
            return task
    return None


def adjust(crew: Crew, warm: int, generation: int, *, quiet: bool) -> None:
    """Fork what a warm-up asked for, and dismiss idle workers when it is to be quiet."""
    while sum(not worker.leaving for worker in crew.workers.values()) < warm:
        crew.fork(generation)
    for worker in crew.workers.values():
        if quiet and worker.task is None and not worker.leaving:
            crew.dismiss(worker)
