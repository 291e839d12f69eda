# SPDX-License-Identifier: Apache-2.0
"""`ForkedCompiles`: compiles kernels whose functions exist in this process alone, each in a forked child of this process.

A worker of the service imports a kernel's module again.  A captured program's kernels may not be there then: they are in a script whose
import would run it, inside a function, or depend on what the program set.  A forked child has the very objects, and a crash of the
compiler ends only the child.  `program_capture.py` gives one to `bundle_build`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping

from bundler.compile import compile_job
from bundler.compile.compile_job import Compiled, Job
from bundler.compile.service_arguments import TIMEOUT_S
from bundler.compile.worker_messages import (
    as_failure,
    decode_error,
    encode_error,
    read_printed,
    with_printed,
)
from bundler.errors import BundlerError, CompileTimeout, WorkerDied
from bundler.fork_safety import ForkSafeLock
from bundler.format import wire
from bundler.toolchain import compile_call
from bundler.toolchain.jit_specialization import CompileRequest

_CHUNK_BYTES = 1 << 20
# How often a thread that waits for its child looks at the clock, in milliseconds.
_LOOK_MS = 500
_FORKS = ForkSafeLock()


class ForkedCompiles:
    """Compiles jobs in forked children, so many at a time; called by several threads.

    Guarantees: a child that crashes, hangs or is killed fails its job alone; none is left when the call ends.
    Does not guarantee: that a child works whose parent forked while another thread held a lock of a library; it runs into the time-out then.

    Args:
        requests: what the JIT was about to compile, by the key of the job.
        workers: how many children at a time.
        timeout_s: how long one compile may take, in seconds.
    """

    def __init__(
        self, requests: Mapping[str, CompileRequest], workers: int, timeout_s: float = TIMEOUT_S
    ) -> None:
        self._requests, self._timeout_s = requests, timeout_s
        self._turns = threading.Semaphore(workers)

    def __call__(self, job: Job, cache_dir: str) -> Compiled:
        """Compile a job into a cache directory; raises `CompileFailed` (`WorkerDied`, `CompileTimeout`)."""
        request = self._requests[job.key]

        def compile_kernel() -> Compiled:
            started_s = time.monotonic()
            event = compile_call.compile_request(
                request, job.target, cache_dir, helpers_first=job.helpers_first
            )
            return compile_job.finished(job, event, started_s)

        with self._turns:
            return _in_child(job.name, compile_kernel, self._timeout_s)


def _in_child(name: str, compile_kernel: Callable[[], Compiled], timeout_s: float) -> Compiled:
    with tempfile.TemporaryFile(prefix="triton-bundler-compile-") as printed:
        # A child forked meanwhile would hold the pipe's end too, and its own end would be waited for.
        with _FORKS.lock:
            reading, writing = os.pipe()
            child = _fork()
            if child == 0:
                os.close(reading)
                _work(name, compile_kernel, writing, printed.fileno())
            os.close(writing)
        try:
            answer, in_time = _read(reading, time.monotonic() + timeout_s)
        finally:
            os.close(reading)
            with contextlib.suppress(ProcessLookupError):
                os.kill(
                    child, signal.SIGKILL
                )  # it has answered, or its time is over, or we are interrupted
            _, status = os.waitpid(child, 0)
        if not in_time:
            raise CompileTimeout(
                f"{name}: not compiled within {timeout_s:g} s",
                name=name,
                reason="timeout",
                line=None,
                words="",
            )
        if not answer:
            raise with_printed(_died(name, status), read_printed(printed.fileno(), 0))
    kind, data = wire.unpack(answer, "answer of a forked compile")
    if kind == "done":
        return Compiled.from_bytes(data)
    raise decode_error(data)


def _fork() -> int:
    with warnings.catch_warnings():
        # Python warns of a fork beside threads; the child compiles, and leaves what other threads were at alone.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _work(name: str, compile_kernel: Callable[[], Compiled], writing: int, printed: int) -> None:
    """Compile in the child, answer, and end; never returns."""
    try:
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        answer = wire.pack(["done", compile_kernel().to_bytes()])
    except BaseException as error:  # noqa: BLE001  # also SystemExit: whatever happens is told, and ends here
        answer = wire.pack(
            ["failed", encode_error(as_failure(name, error, traceback.format_exc()))]
        )
    try:
        with open(writing, "wb") as pipe:
            pipe.write(answer)
    finally:
        os._exit(0)


def _read(reading: int, until_s: float) -> tuple[bytes, bool]:
    """Return what a child says, and whether it came to an end in time."""
    parts: list[bytes] = []
    poll = select.poll()
    poll.register(reading, select.POLLIN | select.POLLHUP)
    while time.monotonic() < until_s:
        if not poll.poll(_LOOK_MS):
            continue
        part = os.read(reading, _CHUNK_BYTES)
        if not part:
            return b"".join(parts), True
        parts.append(part)
    return b"", False


def _died(name: str, status: int) -> BundlerError:
    how = (
        f"signal {os.WTERMSIG(status)}"
        if os.WIFSIGNALED(status)
        else f"status {os.WEXITSTATUS(status)}"
    )
    return WorkerDied(
        f"{name}: the process that compiled it ended with {how}",
        name=name,
        reason=how,
        line=None,
        words="",
    )
