# SPDX-License-Identifier: Apache-2.0
"""`WorkerProcesses`: starts the server, has it fork workers, sends them tasks, and hears what
becomes of them.

It decides nothing: the pool's thread calls it and gets events, `Answer`, `WorkerEnded` and
`ServerLost`.  Only `wake` may be called by any thread.

`Task`: one job on its way through a pool, with the errors that it may end in; `TaskOutcome`: what a
worker made of it.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from typing import IO, Any

from bundler.backends.port import Lease
from bundler.compile.job_futures import CompileFuture
from bundler.compile.worker_messages import (
    PROTOCOL,
    FrameReader,
    JobEnvironment,
    failure,
    frame,
    read_printed,
)
from bundler.errors import BundlerError, CompileTimeout, FormatError, WorkerDied
from bundler.format import wire
from bundler.project import VERSION
from bundler.toolchain.diagnostics import telling_line

# Of what a worker printed before it ended, so many characters go into the message; the error's
# `words` have all.
LAST_WORDS = 4096
# The pause before a lease that another process holds is asked for again; doubles up to the longest.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 0.5


@dataclass(frozen=True)
class TaskOutcome:
    """What a worker made of a task.

    Attributes:
        data: what `perform` returned.
        queued_s: from `submit` until a worker began.
        worker_s: in `perform`.
    """

    data: bytes
    queued_s: float
    worker_s: float


@dataclass(eq=False)
class Task:
    """One job on its way through the pool.

    Attributes:
        name: for messages.
        key: equal for equal jobs, so that a job that ended workers is refused when it comes again.
        lease_name: equal for equal jobs of all processes of the host.
        payload: for `perform`.
        environment: for the worker.
        timeout_s: how long `perform` may take; None for ever.
        future: gets the outcome.
        deaths: how many workers it has ended.
        misses: how many workers died before they began with it.
        submitted_s, started_s: on the monotonic clock.
        not_before_s: when to ask for its lease again.
        renew_s: when to renew the lease.
    """

    name: str
    key: str
    lease_name: str
    payload: bytes
    environment: JobEnvironment
    timeout_s: float | None
    future: CompileFuture[TaskOutcome] = field(init=False)
    deaths: int = 0
    misses: int = 0
    submitted_s: float = 0.0
    started_s: float | None = None
    not_before_s: float = 0.0
    pause_s: float = FIRST_PAUSE_S
    lease: Lease | None = None
    renew_s: float = math.inf

    def __post_init__(self) -> None:
        self.future = CompileFuture(self.name)

    @property
    def deadline_s(self) -> float:
        """When its time runs out."""
        started, allowed = self.started_s, self.timeout_s
        return math.inf if started is None or allowed is None else started + allowed

    def timed_out(self) -> BundlerError:
        """Return the error of a task that took too long."""
        said = (
            f"not compiled within {self.timeout_s:g} s, its worker was ended; give the service a"
            " larger timeout_s"
        )
        return failure(self.name, "timeout", said, kind=CompileTimeout, timeout_s=self.timeout_s)

    def killed_workers(self, how: str, words: str) -> BundlerError:
        """Return the error of a task that ended its workers; `how`: how the last one ended;
        `words`: what it printed.
        """
        line = telling_line(words)
        why = f": {line}" if line is not None else ""
        said = f"{why}; its last words:\n{words[-LAST_WORDS:]}" if words else "; it printed nothing"
        what = (
            f"compiling it ended {self.deaths} workers"
            if self.deaths > 1
            else f"{self.misses} workers died before they began"
        )
        return self._died(how, f"{what}, so it is not tried again: {how}{said}", words)

    def lost_by_engine(self, how: str) -> BundlerError:
        """Return the error of a task that an engine gave no answer to; `how`: what the engine says
        instead.
        """
        lost = f"its worker was lost {self.deaths} times, so it is not tried again"
        return self._died(how, f"{lost}; the engine says {how}")

    def without_workers(self, reason: str) -> BundlerError:
        """Return the error of a task when no worker can be started."""
        return self._died(reason, f"the compile processes cannot work: {reason}")

    def _died(self, how: str, said: str, words: str = "") -> BundlerError:
        return failure(self.name, how, said, words, WorkerDied)


_BOOT = (
    "import sys; sys.path[:] = sys.argv[3:]; from bundler.compile.compile_worker import main;"
    " main()"
)
# So much of the end of what the server printed goes into messages.
_WORDS_BYTES = 4096
_PACKET_BYTES = 1 << 16
_CHUNK_BYTES = 1 << 20
# The server does nothing but take orders, so it answers at once or not at all.
_CONTROL_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class WorkerPlan:
    """How to start the processes.

    Attributes:
        perform: `module:function`, called as `function(payload, cache_dir) -> bytes` for each job.
        preload: `module:function` that the server calls before it forks; empty for nothing.
        cache_dir: handed to `perform`.
        memory_bytes: how much private memory a worker may have; 0 for no limit.
    """

    perform: str
    preload: str
    cache_dir: str
    memory_bytes: int


@dataclass(eq=False)
class Worker:
    """One worker process, as the service sees it."""

    number: int
    generation: int
    channel: socket.socket
    output: IO[bytes]
    frames: FrameReader = field(default_factory=FrameReader)
    unsent: bytearray = field(default_factory=bytearray)
    environment: JobEnvironment | None = None
    pid: int | None = None
    said: int = 0
    leaving: bool = False
    task: Task | None = None

    def close(self) -> None:
        """Release its descriptors, once it has ended."""
        self.channel.close()
        self.output.close()

    def printed_since_start(self) -> str:
        """Return what it printed since its job began."""
        with contextlib.suppress(OSError):
            return read_printed(self.output.fileno(), self.said)
        return ""


@dataclass(frozen=True)
class Answer:
    """A worker says something about its job."""

    worker: Worker
    message: list[Any]


@dataclass(frozen=True)
class WorkerEnded:
    """A worker has ended; `status` as `os.wait` gives it."""

    worker: Worker
    status: int

    def how(self) -> str:
        """Return in words how the process ended."""
        code = os.waitstatus_to_exitcode(self.status)
        if code >= 0:
            return f"it exited with status {code}"
        name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
        hint = (
            ", which the system also sends when it has no memory left" if name == "SIGKILL" else ""
        )
        return f"it was ended by {name}{hint}"


@dataclass(frozen=True)
class ServerLost:
    """The server cannot start, or has ended, and every worker with it."""

    reason: str
    never_ready: bool


Event = Answer | WorkerEnded | ServerLost


class WorkerProcesses:
    """A server and its workers.

    Args:
        plan: what they are to do.
    """

    def __init__(self, plan: WorkerPlan) -> None:
        self.ready = False
        self.workers: dict[int, Worker] = {}
        self._count = 0
        self._lost: ServerLost | None = None
        self._events: list[Event] = []
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = socket.socketpair()
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        # lives as long as the server
        self._output: IO[bytes] = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(_CONTROL_TIMEOUT_S)
        self._selector.register(self._control, selectors.EVENT_READ)
        with theirs:
            try:
                self._server = _start(theirs.fileno(), self._output)
            except OSError:
                self._release()
                raise
        self._order(
            "begin", plan.perform, plan.preload, os.fsencode(plan.cache_dir), plan.memory_bytes
        )

    def wake(self) -> None:
        """Let `wait` return; from any thread."""
        with contextlib.suppress(
            OSError
        ):  # a full socket wakes the thread anyway; a closed one has no thread
            self._wake.send(b"\0")

    def fork(self, generation: int) -> Worker:
        """Have a worker started; jobs may be sent to it at once."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        output = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  # lives as long as the worker
        worker = Worker(self._count, generation, ours, output)
        self._count += 1
        self.workers[worker.number] = worker
        self._selector.register(ours, selectors.EVENT_READ, worker)
        with theirs:
            self._order("fork", worker.number, descriptors=[theirs.fileno(), output.fileno()])
        return worker

    def tasks(self) -> list[Task]:
        """Return the tasks that workers have."""
        return [worker.task for worker in self.workers.values() if worker.task is not None]

    def staying(self) -> list[Worker]:
        """Return the workers that may get tasks."""
        return [worker for worker in self.workers.values() if not worker.leaving]

    def send(self, worker: Worker, task: Task) -> None:
        """Send a task to a worker that has none, with its environment where that is not the same as
        before.

        Raises:
            FormatError: the task is larger than a message may be; nothing was sent.
        """
        changed = None if worker.environment == task.environment else task.environment
        worker.unsent += frame([task.name, task.payload, changed])
        worker.environment = task.environment
        worker.task = task
        self._flush(worker)

    def kill(self, worker: Worker) -> None:
        """End a worker and what it started; `WorkerEnded` follows."""
        worker.leaving = True
        self._order("kill", worker.number)

    def dismiss(self, worker: Worker) -> None:
        """Let an idle worker end by itself; `WorkerEnded` follows."""
        worker.leaving = True
        self._stop_listening(worker)

    def wait(self, timeout_s: float | None) -> list[Event]:
        """Return what happened, after at most so many seconds."""
        for key, mask in self._selector.select(timeout_s):
            if key.fileobj is self._woken:
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(_PACKET_BYTES)
            elif key.fileobj is self._control:
                self._read_server()
            elif mask & selectors.EVENT_WRITE:
                self._flush(key.data)
            else:
                self._read_worker(key.data)
        if self._lost is not None:
            if self._lost.never_ready:
                # A server of another release forks workers before this process has read its
                # version: what they answered does not count.
                self._events.clear()
            self._events.append(self._lost)
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """End all processes, at once."""
        with contextlib.suppress(OSError):
            # The server kills its workers and what they started when this socket closes; killing it
            # would leave compilers behind.
            self._control.shutdown(socket.SHUT_RDWR)
        if not self.ready:
            self._server.kill()  # it has forked nothing yet, and may hang
        try:
            self._server.wait(_CONTROL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        self._release()

    def abandon(self) -> None:
        """Forget everything in a forked child: the processes belong to the parent."""
        self._server.returncode = 0  # the parent waits for it; `Popen` must not warn here
        self._release()

    def _release(self) -> None:
        for worker in self.workers.values():
            worker.close()
        self.workers.clear()
        self._selector.close()
        for one in (self._control, self._woken, self._wake):
            one.close()
        self._output.close()

    def _order(self, *words: Any, descriptors: list[int] | None = None) -> None:
        try:
            socket.send_fds(self._control, [wire.pack(list(words))], descriptors or [])
        except OSError as error:
            self._fail(f"it does not take orders ({error})")

    def _fail(self, reason: str) -> None:
        if self._lost is None:
            said = self._output.fileno()
            begin = max(0, os.fstat(said).st_size - _WORDS_BYTES)
            output = os.pread(said, _WORDS_BYTES, begin)
            words = output.decode("utf-8", "replace").strip()
            self._lost = ServerLost(
                reason + (f"; it said last:\n{words}" if words else ""), never_ready=not self.ready
            )

    def _read_server(self) -> None:
        try:
            data = self._control.recv(_PACKET_BYTES)
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(self._control)
            try:
                status = self._server.wait(_CONTROL_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                status = None
            self._fail(f"it ended with {status}" if status is not None else "it closed its socket")
            return
        what, *rest = wire.unpack(data, "message of the compile server")
        if what == "ready":
            self._check(rest)
        elif what == "unready":
            (reason,) = wire.fields(rest, "unready", bytes)
            self._lost = ServerLost(reason.decode("utf-8", "replace"), never_ready=True)
        elif what == "forked":
            number, pid = wire.fields(rest, "forked", int, int)
            self.workers[number].pid = pid
        elif what == "died":
            number, status = wire.fields(rest, "died", int, int)
            self._worker_ended(self.workers.pop(number), status)

    def _check(self, said: list[Any]) -> None:
        self.ready = said == [PROTOCOL, VERSION]
        if not self.ready:
            self._fail(
                f"it is of another release: expected {VERSION} (protocol {PROTOCOL}), it says"
                f" {said}; the package was replaced while this program runs, start it again"
            )

    def _read_worker(self, worker: Worker) -> None:
        while True:
            try:
                data = worker.channel.recv(_CHUNK_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                # It is dead, or can no longer answer.  The server kills it to make sure, and then
                # reports its status.
                self._stop_listening(worker)
                self._order("kill", worker.number)
                return
            try:
                self._events += [Answer(worker, message) for message in worker.frames.feed(data)]
            except FormatError:
                # A job wrote into the worker's socket.
                self.kill(worker)
                return

    def _worker_ended(self, worker: Worker, status: int) -> None:
        if worker.channel in {key.fileobj for key in self._selector.get_map().values()}:
            self._read_worker(worker)  # it may have answered before it died
            self._stop_listening(worker)
        self._events.append(WorkerEnded(worker, status))

    def _stop_listening(self, worker: Worker) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(worker.channel)
        worker.channel.close()

    def _flush(self, worker: Worker) -> None:
        try:
            while worker.unsent:
                del worker.unsent[: worker.channel.send(worker.unsent)]
        except BlockingIOError:
            pass  # the rest goes when there is room
        except OSError:
            worker.unsent.clear()  # it is dead; `WorkerEnded` follows
            return
        both = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.unsent else 0)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.modify(worker.channel, both, worker)


def _start(control: int, output: IO[bytes]) -> subprocess.Popen[bytes]:
    path = [os.path.abspath(entry) for entry in sys.path]
    return subprocess.Popen(
        [sys.executable, "-P", "-c", _BOOT, str(control), str(os.getpid()), *path],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=[control],
        # The terminal's signals go to a process group; this one is ours to end.
        process_group=0,
    )
