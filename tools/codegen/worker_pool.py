# SPDX-License-Identifier: Apache-2.0
"""`WorkerPool`: processes that answer questions about tasks, all at once or one alone; a task stays
with the process that answered first.

`bench` compiles in all of them, then lets one at a time measure; `random_graphs` and `suites` only
compile and compare.  A process that dies takes its own tasks with it and no others; one whose GPU
is lost to a fault answers no further task.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

Answer = dict[str, Any]
Tell = Callable[[Any, Answer], None]
# Of an answer: the process is not to be asked again.
SPENT = "spent"


class WorkerPool:
    """Processes that have imported a module, and call its functions.

    Args:
        module: its functions take a task, and return JSON's types.
        count: of processes; a new one takes the place of one that died, was late or says that it
            is `SPENT`.
    """

    def __init__(self, module: str, count: int) -> None:
        self._module = module
        self._idle: list[Connection] = []
        self._owners: dict[Any, Connection] = {}
        self._processes: dict[Connection, Any] = {}
        for _ in range(count):
            self._start()

    def answers(
        self,
        question: str,
        tasks: Iterable[Any],
        seconds: float,
        tell: Tell,
        each_s: float | None = None,
    ) -> dict[Any, Answer]:
        """Ask about all tasks, each process one at a time; what is not answered in time is an
        error.

        Args:
            question: a function of the module.
            tasks: what it is asked about.
            seconds: begin nothing new after so long.
            tell: called with each answer as it comes.
            each_s: how long one task may take; its process is ended where it takes longer.
        """
        until, waiting = time.monotonic() + seconds, list(reversed(list(tasks)))
        found: dict[Any, Answer] = {}
        busy: dict[Connection, tuple[Any, float]] = {}

        def note(connection: Connection, answer: Answer) -> None:
            task, _ = busy.pop(connection)
            found[task] = answer
            tell(task, answer)

        while waiting or busy:
            while waiting and self._idle and time.monotonic() < until:
                connection, task = self._idle.pop(), waiting.pop()
                connection.send((question, task))
                busy[connection] = task, time.monotonic()
                self._owners[task] = connection
            # Who has a time of his own is waited for; all others until the end, and five seconds
            # more.
            rest = 1.0 if each_s else max(until - time.monotonic(), 0.0) + 5.0
            ready = wait(list(busy), timeout=rest) if busy else []
            for connection in [one for one in busy if one in ready]:
                note(connection, self._received(connection))
            now = time.monotonic()
            for connection in [
                c for c, (_, since) in busy.items() if each_s and now - since > each_s
            ]:
                self._end(connection)
                note(connection, {"error": f"no answer in {each_s:.0f} s"})
            goes_on = waiting and self._idle and time.monotonic() < until
            if not ready and not goes_on and not (busy and each_s):
                break
        late = {"error": "not done in the time that there was"}
        return found | dict.fromkeys((*(task for task, _ in busy.values()), *waiting), late)

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
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.join()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        mine, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(self._module, theirs), daemon=True)
        process.start()
        theirs.close()
        self._processes[mine] = process
        self._idle.append(mine)

    def _end(self, connection: Connection) -> int | None:
        """End a process, and return what it ended with, a negative number for a signal."""
        process = self._processes.pop(connection)
        process.join(1.0)  # it may be about to end by itself
        ended: int | None = process.exitcode
        process.kill()
        process.join()
        connection.close()
        self._start()
        return ended

    def _received(self, connection: Connection) -> Answer:
        try:
            answer: Answer = connection.recv()
        except (EOFError, OSError):
            return {"error": f"its process ended with {self._end(connection)}"}
        if answer.get(SPENT):
            self._end(connection)
        else:
            self._idle.append(connection)
        return answer


def answered(
    module: str,
    question: str,
    tasks: Sequence[Any],
    count: int,
    seconds: float,
    tell: Tell,
    each_s: float | None = None,
) -> dict[Any, Answer]:
    """Ask at most `count` new processes about all tasks, as `WorkerPool.answers` does, and end
    them.
    """
    with closing(WorkerPool(module, min(count, len(tasks)))) as pool:
        return pool.answers(question, tasks, seconds, tell, each_s)


def noted(journal: Path, name: str) -> dict[Any, Answer]:
    """Return the answers that a journal has, a line of JSON each, which names its task; a line that
    was not written whole is none.
    """
    lines = journal.read_text().splitlines() if journal.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("}")]
    tasks = [one.pop(name) for one in found]
    return {
        tuple(task) if isinstance(task, list) else task: one
        for task, one in zip(tasks, found, strict=True)
    }


def note(journal: Path, name: str, task: Any, answer: Answer) -> None:
    """Add an answer to a journal."""
    with journal.open("a") as file:
        file.write(json.dumps({name: task, **answer}) + "\n")


def _serve(module: str, connection: Connection) -> None:
    found = importlib.import_module(module)
    while True:
        question, task = connection.recv()
        try:
            answer = getattr(found, question)(task)
        # One task that fails must not take the others with it.
        except Exception as error:  # noqa: BLE001
            answer = {
                "error": f"{type(error).__name__}: {error}"[:2000],
                "where": traceback.format_exc()[-3000:],
            }
        if lost_device():
            answer[SPENT] = True
        connection.send(answer)
        if answer.get(SPENT):
            return


def lost_device() -> str:
    """Return what CUDA says when a kernel's fault has ended its use in this process; empty where it
    works, and where torch has not used it.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return ""
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return f"the device is lost: {error}"
    return ""
