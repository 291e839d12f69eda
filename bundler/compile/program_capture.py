# SPDX-License-Identifier: Apache-2.0
"""`capturing`: run a program's own warm-up without a GPU, hear what it would compile, and compile
that for the target.

::

    with bundler.capturing("cuda:90") as capture:
        model(torch.randn(8, 1024, device="cuda")).sum().backward()
    capture.build().save("warm.tbundle")

No tensor has memory, no kernel runs, and no GPU is asked. `toolchain/program_imitation.py` has the
stand-ins; what was heard becomes jobs of the compile service, or of a forked child of this process
(`ForkedCompiles`): a worker imports the module of a kernel again, and a captured program may have
its kernels in a script whose import would run it, or inside a function. A child has the very
objects, and a crash of the compiler ends only the child. The command `capture` uses it through
`captured_program.py`.
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
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from bundler.compile import bundle_build, compile_job
from bundler.compile.build_plan import Failure, Plan, jobs_of
from bundler.compile.compile_job import Compiled, Job, SourceRef
from bundler.compile.worker_messages import (
    as_failure,
    decode_error,
    encode_error,
    failure,
    read_printed,
    with_printed,
)
from bundler.compile.worker_pool import TIMEOUT_S, worker_count
from bundler.errors import BundlerError, CompileTimeout, ConfigError, WorkerDied
from bundler.fork_safety import ForkSafeLock
from bundler.format import wire
from bundler.format.bundle import Bundle
from bundler.format.entries import Target
from bundler.format.summary import Reported
from bundler.lifecycle.lifecycle_reports import Reasons
from bundler.lifecycle.machine_store import Store
from bundler.toolchain import compile_call
from bundler.toolchain.jit_specialization import CompileRequest, Specialized
from bundler.toolchain.program_imitation import ProgramImitation

_TWO_KEYS = (
    "is built under two keys: before Triton 3.9 its key depends on what a program hashed before it"
)
_CHUNK_BYTES = 1 << 20
# How often a thread that waits for its child looks at the clock, in milliseconds.
_LOOK_MS = 500
_FORKS = ForkSafeLock()


@dataclass(frozen=True)
class Guess:
    """A place where the program depends on data, which no captured tensor has.

    Attributes:
        file, line: of the program, or of the library that it calls; never torch's or Triton's.
        called_from: `file:line` of the program's own script that led there; empty where it is that
            line.
        what: the operation, such as `item`.
        taken: what the program was given instead.
        times: how often.
    """

    file: str
    line: int
    called_from: str
    what: str
    taken: str
    times: int

    def __str__(self) -> str:
        origin = f", called from {self.called_from}" if self.called_from else ""
        return f"{self.file}:{self.line}: {self.what} depends on data; taken: {self.taken}{origin}"


@dataclass(frozen=True, repr=False)
class CaptureReport(Reported):
    """What a capture heard, and what became of it.

    Attributes:
        target: what it was for.
        device: the name of the GPU that the program was told of.
        launches: how many launches the program made.
        functions: how many JIT functions these were.
        kernels: how many kernels they lead to, by key.
        guesses: where the program depends on data.
        unanswered: what the program asked Triton's driver for and got no answer.
        assumed: what was assumed, and of what.
        compiled, reused: keys of what `build` compiled, and found in the store.
        failures: (kernel, why) for each that could not be captured or compiled.
        crash: the traceback of the program where it ended by an error.
    """

    target: str
    device: str
    launches: int = 0
    functions: int = 0
    kernels: int = 0
    guesses: tuple[Guess, ...] = ()
    unanswered: tuple[str, ...] = ()
    assumed: Reasons = ()
    compiled: tuple[str, ...] = ()
    reused: tuple[str, ...] = ()
    failures: Reasons = ()
    crash: str | None = None


class Capture:
    """What a program would compile on the target; a context manager, made by `capturing`.

    Guarantees: what was heard stays, also when the program ends by an error; kernels that cannot be
    compiled are in the report, with the reason; after the block torch and Triton are as before.
    Does not guarantee: that a program which decides by data decides as it would with real data
    (`CaptureReport.guesses`), and what other threads or processes launch.  One block at a time in a
    process.

    Args:
        target: what to capture for.
        properties: of the GPU, where they differ from the table's (`CaptureReport.device`).
    """

    def __init__(self, target: Target, properties: Mapping[str, Any] | None = None) -> None:
        self.target = target
        self._imitation = ProgramImitation(target, properties, self._heard, self._refused)
        self._plan = Plan()
        self._requests: dict[str, CompileRequest] = {}
        self._functions: set[int] = set()
        self._built: bundle_build.BuildResult | None = None
        self._crash: str | None = None
        self._over = False

    @property
    def report(self) -> CaptureReport:
        """What was heard so far, and what became of it."""
        imitation, plan, built = self._imitation, self._plan, self._built
        device = f"{self.target}"
        assumed = [(device, imitation.assumed)] if imitation.assumed is not None else []
        failures = built.failures if built is not None else plan.failures
        return CaptureReport(
            device,
            imitation.device.name,
            imitation.launches,
            len(self._functions),
            len(plan.jobs),
            tuple(
                Guess(place.file, place.line, place.called_from, what, taken, times)
                for (place, what, taken), times in imitation.guesses.items()
            ),
            imitation.asked_in_vain,
            (*assumed, *((name, note) for name, _, note in plan.notes)),
            built.compiled if built is not None else (),
            built.reused if built is not None else (),
            tuple((failure.name, failure.reason) for failure in failures),
            self._crash,
        )

    def build(self, workers: int | None = None, store: Store | None = None) -> Bundle:
        """Compile what was heard, each kernel in a forked child of this process; returns the
        bundle.

        What cannot be compiled is left out and in `report.failures`.  Called after the block.

        Args:
            workers: how many at a time; None for one a core.
            store: kernels that it holds are not compiled, and what is compiled is published there.

        Raises:
            ConfigError: the block is not over; or the number of workers.
            StoreUnavailable, AccessDenied, StoreFull: the store, or the temporary directory.
        """
        if not self._over:
            raise ConfigError(
                "the program is still captured; call build() after the block of capturing()"
            )
        count = worker_count(workers)
        here = ForkedCompiles(self._requests, count)
        self._built = bundle_build.build(self._plan, workers, store, compile_here=here)
        return self._built.bundle

    def __enter__(self) -> Self:
        self._imitation.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._imitation.__exit__(kind, error, trace)
        self._over = True
        if error is not None:
            self._crash = "".join(traceback.format_exception(kind, error, trace))

    def _heard(self, function: Any, request: CompileRequest, found: Specialized) -> None:
        self._functions.add(id(function))
        source = SourceRef(
            "module", function.__qualname__, str(function.__module__), _file_of(function)
        )
        for job in jobs_of(function.__name__, source, found, self.target):
            self._plan.jobs.setdefault(job.key, job)
            self._requests.setdefault(job.key, request)
        if len(found.keys) > 1:
            self._plan.note(function.__name__, self.target, _TWO_KEYS)

    def _refused(self, function: Any, why: str) -> None:
        failure = Failure(function.__name__, str(self.target), why)
        if failure not in self._plan.failures:
            self._plan.failures.append(failure)


def _file_of(function: Any) -> str:
    file = str(function.fn.__code__.co_filename)
    return file if os.path.isfile(file) else ""


def capturing(target: str | Target, *, properties: Mapping[str, Any] | None = None) -> Capture:
    """Return a capture to use in a `with` statement; the block runs without a GPU, as on a machine
    with the target's.

    Args:
        target: such as `cuda:90`.
        properties: of the GPU, where they differ from what is sold for servers:
            `{"multi_processor_count": 114}`.

    Raises:
        ConfigError: no such target or property.
        RecordingError: at the start of the block, when torch or Triton is not installed.
    """
    return Capture(Target.parse(target) if isinstance(target, str) else target, properties)


class ForkedCompiles:
    """Compiles jobs in forked children, so many at a time; called by several threads.

    Guarantees: a child that crashes, hangs or is killed fails its job alone; none is left when the
    call ends. Does not guarantee: that a child works whose parent forked while another thread held
    a lock of a library; it runs into the time-out then.

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
        """Compile a job into a cache directory; raises `CompileFailed` (`WorkerDied`,
        `CompileTimeout`).
        """
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
        # A child forked meanwhile would hold the pipe's end too, and its own end would be waited
        # for.
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
            said = f"not compiled within {timeout_s:g} s"
            raise failure(name, "timeout", said, kind=CompileTimeout)
        if not answer:
            raise with_printed(_died(name, status), read_printed(printed.fileno(), 0))
    kind, data = wire.unpack(answer, "answer of a forked compile")
    if kind == "done":
        return Compiled.from_bytes(data)
    raise decode_error(data)


def _fork() -> int:
    with warnings.catch_warnings():
        # Python warns of a fork beside threads; the child compiles, and leaves what other threads
        # were at alone.
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
    said = f"the process that compiled it ended with {how}"
    return failure(name, how, said, kind=WorkerDied)
