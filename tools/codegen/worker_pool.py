# SPDX-License-Identifier: Apache-2.0
"""`WorkerPool`: processes that answer questions about tasks, all at once or one alone; a task stays with the process that answered first.

`bench` compiles in all of them, then lets one at a time measure; `random_graphs` only compiles and compares.  A process that dies takes its own
tasks with it and no others.
"""

from __future__ import annotations

import importlib
import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, wait
from typing import Any

Answer = dict[str, Any]
Tell = Callable[[Any, Answer], None]


class WorkerPool:
    """Processes that have imported a module, and call its functions.

    Args:
        module: its functions take a task, and return JSON's types.
        count: of processes.
    """

    def __init__(self, module: str, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._idle: list[Connection] = []
        self._owners: dict[Any, Connection] = {}
        self._processes = []
        for _ in range(count):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(module, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._idle.append(mine)

    def answers(self, question: str, tasks: Iterable[Any], seconds: float, tell: Tell) -> dict[Any, Answer]:
        """Ask about all tasks, each process one at a time; what is not answered in time is an error."""
        until, waiting = time.monotonic() + seconds, list(tasks)
        found: dict[Any, Answer] = {}
        busy: dict[Connection, Any] = {}
        while waiting or busy:
            while waiting and self._idle and time.monotonic() < until:
                connection, task = self._idle.pop(), waiting.pop(0)
                connection.send((question, task))
                busy[connection], self._owners[task] = task, connection
            ready = wait(list(busy), timeout=max(until - time.monotonic(), 0.0) + 5.0) if busy else []
            if not ready:
                break
            for connection in [one for one in busy if one in ready]:
                task = busy.pop(connection)
                found[task] = self._received(connection)
                tell(task, found[task])
        late = {"error": "not done in the time that there was"}
        return found | dict.fromkeys((*busy.values(), *waiting), late)

    def answer(self, question: str, task: Any, seconds: float) -> Answer:
        """Ask the process of a task, and wait."""
        connection = self._owners.get(task)
        if connection not in self._idle:
            return {"error": "its process ended"}
        assert connection is not None
        self._idle.remove(connection)
        connection.send((question, task))
        if not connection.poll(seconds):
            return {"error": f"no answer in {seconds:.0f} s"}
        return self._received(connection)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def _received(self, connection: Connection) -> Answer:
        try:
            answer: Answer = connection.recv()
        except (EOFError, OSError):
            return {"error": "its process ended"}
        self._idle.append(connection)
        return answer


def _serve(module: str, connection: Connection) -> None:
    found = importlib.import_module(module)
    while True:
        question, task = connection.recv()
        try:
            answer = getattr(found, question)(task)
        except Exception as error:  # noqa: BLE001  # one task that fails must not take the others with it
            answer = {"error": f"{type(error).__name__}: {error}"[:2000], "where": traceback.format_exc()[-3000:]}
        connection.send(answer)
