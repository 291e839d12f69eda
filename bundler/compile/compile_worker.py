# SPDX-License-Identifier: Apache-2.0
"""The processes that compile: a server that imports Triton once and forks, and the workers that it
forks.

::

    service ──starts──▶ server (one thread, no CUDA, imports Triton) ──forks──▶ worker, worker, …
       │                                                                           ▲
       └────────────────────────── a socket of its own ────────────────────────────┘

The server ends when the service's process does, however that ended: it watches the process itself,
not only the socket, which a forked child may still hold.  It then kills each worker's process
group, compilers that a worker started included.  The kernel kills the workers when the server dies.

`worker_processes.py` starts `main` in a new interpreter; `CompileService` names `compile_job` and
`import_triton` as what to run.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import resource
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import msgspec

from bundler.compile.compile_job import Job, perform
from bundler.compile.worker_messages import (
    PROTOCOL,
    FrameReader,
    JobEnvironment,
    as_failure,
    encode_error,
    failure,
    frame,
    read_printed,
    resolve,
    tail,
    with_printed,
)
from bundler.errors import WorkerDied
from bundler.format import wire
from bundler.project import VERSION
from bundler.toolchain.compile_call import warm

# A packet of the control socket: names and numbers only.
PACKET_BYTES = 1 << 16
# Where the parent's end cannot be watched (no pidfd), the server looks so often whether the parent
# is there.
PARENT_CHECK_S = 0.5
LONGEST_IMPORT_S = 180
# Between jobs the file that keeps a worker's output is emptied when it is larger.
OUTPUT_BYTES = 1 << 20
# When memory runs out, the system kills a worker before the program that asked for the compile.
_OOM_SCORE = b"500"
# A killed process ends at once, unless it waits for a device.
REAP_S = 2.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LIBC = ctypes.CDLL(None, use_errno=True)

Perform = Callable[[bytes, str], bytes]


def compile_job(payload: bytes, cache_dir: str) -> bytes:
    """Compile an encoded `Job` into `cache_dir`; returns an encoded `Compiled`."""
    return perform(Job.from_bytes(payload), cache_dir).to_bytes()


def import_triton() -> None:
    """Do in the server what each worker would do first: import Triton and hash its library for the
    keys.
    """
    warm()


def main() -> None:
    """Serve as the process that forks workers; arguments: control descriptor, the service's
    process.
    """
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    for number in (signal.SIGINT, signal.SIGHUP):
        # The terminal's signals are for the program, which gives this server its orders.
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=descriptor) as control:
        _Server(control, parent).run()


class _Server:
    """Forks, kills and reaps workers as the service orders."""

    def __init__(self, control: socket.socket, parent: int) -> None:
        self._control, self._parent = control, parent
        self._workers: dict[int, int] = {}
        self._perform: Perform
        self._cache_dir, self._memory_bytes = "", 0

    def run(self) -> None:
        """Serve until the service closes the socket or is gone."""
        woken, wake = socket.socketpair()
        woken.setblocking(False)
        wake.setblocking(False)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # What a dead worker had started becomes a child of this process, which reaps it.
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        poll = select.poll()
        of_parent = self._parent_descriptor()
        watched: list[socket.socket | int] = [self._control, woken, *of_parent]
        for one in watched:
            poll.register(one, select.POLLIN)
        try:
            while self._serve_once(poll, woken, None if of_parent else PARENT_CHECK_S * 1000):
                pass
        finally:
            self._kill_all()

    def _parent_descriptor(self) -> list[int]:
        with contextlib.suppress(
            OSError, AttributeError
        ):  # an old kernel: `_serve_once` looks every `PARENT_CHECK_S`
            return [os.pidfd_open(self._parent)]
        return []

    def _serve_once(
        self, poll: select.poll, woken: socket.socket, longest_ms: float | None
    ) -> bool:
        ready = {descriptor for descriptor, _ in poll.poll(longest_ms)}
        if os.getppid() != self._parent:
            return False
        if woken.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                woken.recv(PACKET_BYTES)
        self._reap()
        return self._control.fileno() not in ready or self._obey()

    def _obey(self) -> bool:
        data, descriptors, _, _ = socket.recv_fds(self._control, PACKET_BYTES, 2)
        if not data:
            return False
        what, *rest = wire.unpack(data, "order")
        if what == "begin":
            return self._begin(*rest)
        if what == "fork":
            self._fork(*rest, *descriptors)
        elif what == "kill":
            self._kill(*rest)
        return True

    def _begin(self, name: str, preload: str, cache_dir: bytes, memory_bytes: int) -> bool:
        # While an import hangs nothing reads orders, so an alarm ends this process.
        signal.alarm(LONGEST_IMPORT_S)
        try:
            self._perform = resolve(name)
            if preload:
                resolve(preload)()
            signal.alarm(0)
        except Exception as error:  # noqa: BLE001  # whatever the import raises, the service reports it
            traceback.print_exc()
            self._say("unready", tail(f"{type(error).__name__}: {error}"))
            return False
        self._cache_dir, self._memory_bytes = os.fsdecode(cache_dir), memory_bytes
        # Pages that forked workers share stay shared: frozen objects are not touched by the
        # collector.
        gc.collect()
        gc.freeze()
        self._say("ready", PROTOCOL, VERSION)
        return True

    def _fork(self, number: int, channel: int, words: int) -> None:
        server = os.getpid()
        child = os.fork()
        if child == 0:
            try:
                signal.set_wakeup_fd(-1)
                self._control.close()
                _become_worker(server, words, self._memory_bytes)
                with socket.socket(fileno=channel) as connection:
                    _work(connection, self._perform, self._cache_dir)
                sys.stdout.flush()
            finally:
                os._exit(0)
        # The worker does the same for itself.  Whichever runs first makes the group, so that the
        # group exists before this process may have to kill it, and before the worker starts a
        # compiler, which would otherwise be outside of it.
        with contextlib.suppress(OSError):
            os.setpgid(child, child)
        for descriptor in (channel, words):
            os.close(descriptor)
        self._workers[number] = child
        self._say("forked", number, child)

    def _kill(self, number: int) -> None:
        child = self._workers.get(number)
        if child is not None:
            _kill_group(child)

    def _kill_all(self) -> None:
        for child in self._workers.values():
            _kill_group(child)
        # Reaped here: in a container the first process often reaps nothing, and they would stay as
        # zombies.
        until_s = time.monotonic() + REAP_S
        with contextlib.suppress(ChildProcessError):
            while time.monotonic() < until_s:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    time.sleep(0.001)

    def _reap(self) -> None:
        numbers = {child: number for number, child in self._workers.items()}
        with contextlib.suppress(ChildProcessError):
            while (
                ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            ) is not None:
                child = ended.si_pid
                # A compiler that the worker started may still run.  Until the worker is reaped, its
                # number is not given to another process.
                if child in numbers:
                    _kill_group(child)
                _, status = os.waitpid(child, 0)
                if child in numbers:
                    del self._workers[numbers[child]]
                    self._say("died", numbers[child], status)

    def _say(self, *message: Any) -> None:
        with contextlib.suppress(
            BrokenPipeError, ConnectionResetError
        ):  # the service is gone, which the next poll shows
            self._control.send(wire.pack(list(message)))


def _kill_group(leader: int) -> None:
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(leader, signal.SIGKILL)


def _become_worker(server: int, words: int, memory_bytes: int) -> None:
    os.setpgid(0, 0)
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != server:  # it died before the line above
        os._exit(1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (words, 1), (words, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(words)
    # what it prints last is not left in a buffer
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "wb") as file:
        file.write(_OOM_SCORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if memory_bytes:
        # Not RLIMIT_AS: that counts mapped libraries too, of which torch's alone are several
        # gigabytes.
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))


def _work(connection: socket.socket, work: Perform, cache_dir: str) -> None:
    frames = FrameReader()
    while data := connection.recv(1 << 20):
        for name, payload, environment in frames.feed(data):
            if environment is not None:
                msgspec.convert(environment, JobEnvironment).apply()
            begin = _begin_output()
            connection.sendall(frame(["started", begin]))
            answer, usable = _answer(name, payload, work, cache_dir, begin)
            connection.sendall(answer)
            if not usable:
                return


def _begin_output() -> int:
    """Return where in this process's output file the output of a job begins; a long output of
    earlier jobs is thrown away.
    """
    sys.stdout.flush()
    if os.lseek(1, 0, os.SEEK_END) > OUTPUT_BYTES:
        os.ftruncate(1, 0)
    return os.lseek(1, 0, os.SEEK_END)


def _printed(begin: int) -> str:
    """Return what this process printed since a job began: LLVM and MLIR print what is in no
    exception.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    return read_printed(1, begin)


def _answer(
    name: str, payload: bytes, work: Perform, cache_dir: str, begin: int
) -> tuple[bytes, bool]:
    started = time.perf_counter()
    try:
        result = work(payload, cache_dir)
        return frame(["done", result, time.perf_counter() - started]), True
    except MemoryError:
        limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
        said = (
            f"compiling it needs more memory than a worker may have ({limit >> 20} MiB); give the"
            " service a larger memory_bytes, or the kernel smaller blocks"
        )
        error = failure(name, "out of memory", said, traceback.format_exc(), WorkerDied)
        return frame(["failed", encode_error(error)]), False
    except BaseException as error:  # noqa: BLE001  # also SystemExit: the job fails, not the worker
        told = with_printed(as_failure(name, error, traceback.format_exc()), _printed(begin))
        return frame(["failed", encode_error(told)]), True
