# SPDX-License-Identifier: Apache-2.0
"""`run_job`: what an engine (Dask, MPI, Ray) calls in its workers, with the bytes of one message;
returns the bytes of its answer.  One message and one answer a try, of one job or of several short
ones, in msgpack.

::

    message   [protocol, version, number, jobs, target, compiler, source, environment, path, timeout,
               memory, perform, preload, stores, client]
    job       [name, payload, key]
    answer    ["outcomes", worker, [outcome of each job]] | ["refused", worker, differences]
    outcome   ["done", result, bundle, seconds] | ["failed", error] | ["died", how, printed]

An engine pickles a reference to `run_job` and these bytes; nothing else travels.  The first two
items are read before the rest: a worker of another release cannot know what the rest means.

The compile is done by processes of the service's kind that the engine's worker starts and keeps, so
a crash of the compiler, a time-out or too much memory ends none of the engine's workers.  Those
processes end with the worker, however it ends.  `executor_pool.py` sends the jobs.  The one object
of this process is here, `_WORKER`, since an engine can only call a function.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, wait
from typing import Annotated, Any

import msgspec
from msgspec import Struct
from msgspec.structs import astuple

from bundler.compile.compile_job import Compiled, bundle_of
from bundler.compile.worker_messages import JobEnvironment, as_failure, encode_error, resolve, tail
from bundler.compile.worker_pool import IDLE_S, QUEUE_LIMIT, WorkerPool, memory_share, worker_count
from bundler.compile.worker_processes import Task, WorkerPlan
from bundler.errors import BundlerError, CompileFailed
from bundler.fork_safety import after_fork
from bundler.format import wire
from bundler.format.bundle import Bundle
from bundler.format.bundle_file import open_regular
from bundler.format.entries import Target
from bundler.format.limits import DEFAULT_LIMITS
from bundler.lifecycle.compiled_once import compile_once
from bundler.lifecycle.machine_store import Store, open_store
from bundler.package_loggers import logger
from bundler.project import VERSION
from bundler.toolchain import identity
from bundler.toolchain.identity import installed_triton
from bundler.toolchain.ptxas import ptxas_for

PROTOCOL = 3
# What a message may have in one member.
Text = Annotated[str, msgspec.Meta(max_length=DEFAULT_LIMITS.string_bytes)]
Data = Annotated[bytes, msgspec.Meta(max_length=DEFAULT_LIMITS.manifest_bytes)]
# What `Compiler.differences` calls the parts of a compiler.
_PARTS = ("Python", "Triton", "Triton's library", "ptxas")
# What the name of a program's directory begins with.
CLIENT_DIRECTORY = "triton-bundler-client-"
# What begins so decides what Triton, LLVM, MLIR and ptxas make, so a worker has it as the program
# that sends the job has it.
_COMPILER_VARIABLES = (
    "AMDGCN_",
    "DISABLE_LLVM",
    "DISABLE_MMA",
    "DISABLE_PTXAS",
    "LLVM_",
    "MLIR_",
    "NVPTX_",
    "PTXAS_",
    "STORE_TMEM_",
    "SWAP_XOR_",
    "TRITON_",
    "USE_IR_LOC",
    "USE_TTGIR_LOC",
)
# Places and helpers on one machine say nothing about another one, and each machine has its own
# settings of ours.
_OF_THE_MACHINE = (
    "TRITON_BUNDLER_",
    "TRITON_CACHE_",
    "TRITON_HOME",
    "TRITON_DUMP_DIR",
    "TRITON_OVERRIDE_DIR",
    "TRITON_PTXAS_",
    "TRITON_CUOBJDUMP_",
    "TRITON_NVDISASM_",
    "TRITON_LIB",
    "TRITON_CUDART",
    "TRITON_CUDACRT",
    "TRITON_CUPTI",
    "TRITON_CUDA",
    "TRITON_REMOTE_",
    "TRITON_REDIS_",
)
_BOOT, _NAMESPACE = "/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"


def worker_name() -> str:
    """Return what this process is called in messages: its host and its number."""
    return f"{socket.gethostname()}:{os.getpid()}"


def host_of(worker: str) -> str:
    """Return the host in the name of a worker."""
    return worker.rpartition(":")[0]


class Compiler(Struct, array_like=True, frozen=True):
    """What decides about a kernel's key and bytes on a machine beside our release, which is compared
    before: Python, Triton, its library and ptxas.
    """

    python: Text
    triton: Text
    library: Text
    ptxas: Text

    @staticmethod
    def here(target: Target) -> Compiler:
        """Return what this process has for a target."""
        installed = installed_triton()
        return Compiler(
            f"{sys.implementation.name} {sys.version_info.major}.{sys.version_info.minor}",
            (installed.release if installed is not None else None) or "none",
            (installed.binary if installed is not None else None) or "none",
            ptxas_for(target) or "none",
        )

    def differences(self, here: Compiler) -> list[str]:
        """Return what `here` has otherwise than this one asks for, each as `what got, expected
        expected`.
        """
        parts = zip(_PARTS, astuple(self), astuple(here), strict=True)
        return [f"{what} {got}, expected {wanted}" for what, wanted, got in parts if wanted != got]


class WaitingClient(Struct, array_like=True, frozen=True):
    """How a worker on the same machine sees that nobody waits any more: the program's process, and
    a directory of its own.

    The directory goes when the program has done with its service, and has a file for each job that
    was given up before.
    """

    boot: Text
    namespace: Text
    process: int
    directory: Data

    @staticmethod
    def of(directory: str) -> WaitingClient:
        """Return one for this process."""
        return WaitingClient(*_machine(), os.getpid(), os.fsencode(directory))

    def gave_up(self, number: str) -> bool:
        """Whether the program or the job is given up; False where that cannot be seen from here."""
        if (self.boot, self.namespace) != _machine() or not self.boot:
            return False
        if not os.path.exists(f"/proc/{self.process}"):
            # Nobody else removes it.  A name of ours alone: whoever sends jobs may be wrong about
            # the rest.
            if os.path.basename(self.directory).startswith(CLIENT_DIRECTORY.encode()):
                shutil.rmtree(self.directory, ignore_errors=True)
            return True
        return not os.path.isdir(self.directory) or os.path.exists(
            os.path.join(self.directory, os.fsencode(number))
        )


def _machine() -> tuple[str, str]:
    try:
        with open(_BOOT, encoding="ascii") as file:
            return file.read().strip(), os.readlink(_NAMESPACE)
    except OSError:  # not Linux: nothing is known of the other process
        return "", ""


class EngineJob(Struct, array_like=True, frozen=True):
    """A job in a message: the kernel's name, what `perform` gets, and the kernel's key, where that
    is known.
    """

    name: Text
    payload: Data
    key: Text


class EngineMessage(Struct, array_like=True, frozen=True, kw_only=True):
    """One try of one job, or of several of one kind, as a worker of an engine gets it.

    Attributes:
        protocol, version: of the sender.
        number: tells this try from every other one; engines take equal calls for one.
        jobs: what to do, one after the other.
        target: what they are for: backend, architecture, warp size.
        compiler: what the worker has to have.
        source: path and SHA-256 of the module's file, which the worker has to have under that path;
            empty where the jobs have their source.
        environment: what the worker has to set of the compiler's variables.
        path: the program's import path, for what the module imports.
        timeout_s: how long a job may take; 0 for ever.
        memory_bytes: private memory that its process may have; 0 for as much as a worker has by
            default.
        perform, preload: `module:function`, as for the service's own workers.
        stores: URLs of the store that it takes kernels from, or publishes them into; empty to send
            them back.
        client: how to see that nobody waits any more.
    """

    protocol: int = PROTOCOL
    version: Text = VERSION
    number: Text
    jobs: tuple[EngineJob, ...]
    target: tuple[Text, Text, int]
    compiler: Compiler
    source: tuple[Data, Text]
    environment: tuple[tuple[Data, Data], ...]
    path: tuple[Data, ...]
    timeout_s: float
    memory_bytes: int
    perform: Text
    preload: Text
    stores: tuple[Text, ...]
    client: WaitingClient

    @staticmethod
    def from_bytes(data: bytes) -> EngineMessage | str:
        """Decode a message; returns the release that wrote it where that is another one.

        Raises:
            FormatError: it is no message.
        """
        head = wire.decode(data, _HEADS, "message to an engine")
        if (head.protocol, head.version) != (PROTOCOL, VERSION):
            return f"{head.version} (messages of kind {head.protocol})"
        return wire.decode(data, _MESSAGES, "message to an engine", walked=True)

    def environment_here(self) -> JobEnvironment:
        """Return this process's environment and import path, with what the program has of the
        compiler's variables and modules.
        """
        own = {name: value for name, value in os.environb.items() if not _decides(name)}
        path = [os.fsencode(os.path.abspath(entry)) for entry in sys.path]
        more = [entry for entry in self.path if entry not in path]
        return JobEnvironment(
            tuple(sorted({**own, **dict(self.environment)}.items())), (*path, *more)
        )


def compiler_variables(
    environment: Sequence[tuple[bytes, bytes]] | Mapping[bytes, bytes],
) -> tuple[tuple[bytes, bytes], ...]:
    """Return those variables that decide what a compiler makes, on any machine."""
    pairs = environment.items() if isinstance(environment, Mapping) else environment
    return tuple((name, value) for name, value in pairs if _decides(name))


def _decides(name: bytes) -> bool:
    text = os.fsdecode(name)
    return text.startswith(_COMPILER_VARIABLES) and not text.startswith(_OF_THE_MACHINE)


class Done(Struct, array_like=True, frozen=True, tag="done"):
    """A job's kernel, what `perform` said of it and how long it took; the bundle may be empty, or
    hold the kernels of the outcomes after it too.
    """

    result: Data
    bundle: Data
    seconds: float


class Failed(Struct, array_like=True, frozen=True, tag="failed"):
    """The error of a job, as `encode_error` writes it."""

    error: list[Any]


class Died(Struct, array_like=True, frozen=True, tag="died"):
    """How the process ended that did a job, and what it printed last."""

    how: Data
    words: Data


class Outcomes(Struct, array_like=True, frozen=True, tag="outcomes"):
    """A worker's answer: the outcome of each job, in order."""

    worker: Text
    jobs: list[Done | Failed | Died]


class Refusal(Struct, array_like=True, frozen=True, tag="refused"):
    """A worker's answer: what it has otherwise than a job needs it."""

    worker: Text
    differences: list[Data]


class _Head(Struct, array_like=True):
    protocol: Any
    version: Any


_HEADS = msgspec.msgpack.Decoder(_Head)
_MESSAGES = msgspec.msgpack.Decoder(EngineMessage)
_ANSWERS: msgspec.msgpack.Decoder[Outcomes | Refusal] = msgspec.msgpack.Decoder(Outcomes | Refusal)


def read_answer(data: bytes) -> Outcomes | Refusal:
    """Decode what a worker answered; raises `FormatError` for anything else."""
    return wire.decode(data, _ANSWERS, "answer of an engine's worker")


# How often a worker looks whether the program that sent a job is still there.
LOOK_S = 0.25
# Of a kernel's way through a network: what is written at the end is compressed anew.
_LEVEL = 1
_PERFORM = "bundler.compile.engine_worker:compile_apart"
_FOLDER = "triton-bundler-engine-"
# What a worker that was killed left behind is removed by a later one.
_STALE_S = 24 * 3600.0
_LOG = logger("bundler.compile")


def run_job(message: bytes) -> bytes:
    """Do what a service sent, in a worker of an engine; for `CompileService(executor=...)`, which
    makes the message.

    Never raises for what happens to a kernel: the answer says it.

    Raises:
        FormatError: the message is none.
    """
    asked = EngineMessage.from_bytes(message)
    if isinstance(asked, str):
        return _refused([f"triton-bundler {VERSION}, expected {asked}"])
    here = Compiler.here(Target(*asked.target))
    differences = asked.compiler.differences(here) + _source_differs(asked)
    if differences:
        return _refused(differences)
    return wire.pack(Outcomes(worker_name(), _WORKER.run(asked)))


def compile_apart(payload: bytes, cache_dir: str) -> bytes:
    """Compile in a directory of the jobs' own; returns what came out of each and how long it took,
    and a bundle of all kernels.

    Runs in a process that the engine's worker started; `run_job` names it.
    """
    perform, folder, jobs = wire.fields(wire.unpack(payload, "jobs"), "jobs", str, str, list)
    own = os.path.join(cache_dir, folder)
    made, results = [], []
    for name, job in (wire.fields(one, "job", str, bytes) for one in jobs):
        began_s = time.monotonic()
        data: bytes = resolve(perform)(job, own)
        results.append([data, time.monotonic() - began_s])
        compiled = Compiled.from_bytes(data)
        if compiled.key and os.path.isdir(os.path.join(own, compiled.key)):
            made.append((compiled, name))
    if not made:
        return wire.pack([results, b""])
    with bundle_of(own, made, _environment()) as bundle:
        return wire.pack([results, bundle.to_bytes(level=_LEVEL)])


@functools.cache
def _environment() -> tuple[tuple[str, str], ...]:
    """Return the names and versions of this machine, which stay as they are while a process that
    compiles lives.
    """
    return identity.environment()


class _EngineWorker:
    """The processes that compile for one worker of an engine, and the stores that it publishes
    into; several threads may call it.
    """

    def __init__(self) -> None:
        self._begin_anew()
        after_fork(self._begin_anew)

    def _begin_anew(self) -> None:
        # In a forked child: pools begin anew by themselves, but the directory is the parent's.
        self._lock = threading.Lock()
        self._pools: dict[tuple[str, int], WorkerPool] = {}
        self._stores: dict[tuple[str, ...], Store] = {}
        self._sources: dict[bytes, str] = {}
        self._root: str | None = None

    def run(self, asked: EngineMessage) -> list[Done | Failed | Died]:
        """Do jobs whose compiler is the one that this machine has; returns the outcome of each."""
        if len(asked.jobs) > 1 and not asked.stores:
            try:
                return [*self._compile(asked, asked.jobs, asked.number)]
            except Exception as error:  # noqa: BLE001  # each alone shows whose it is
                _LOG.debug("%d jobs are done one by one: %s", len(asked.jobs), error)
        return [self._one(asked, job, number) for number, job in enumerate(asked.jobs)]

    def _one(self, asked: EngineMessage, job: EngineJob, number: int) -> Done | Failed | Died:
        # A pool refuses a task whose name has ended a process.
        name = f"{asked.number}-{number}"
        try:
            if asked.stores and job.key:
                return self._through_store(asked, job, name)
            return self._compile(asked, (job,), name)[0]
        except _ProcessEnded as death:
            return Died(tail(death.how), tail(death.words))
        except Exception as error:  # noqa: BLE001  # whatever happens is the answer
            return Failed(encode_error(as_failure(job.name, error, "")))

    def _through_store(self, asked: EngineMessage, job: EngineJob, name: str) -> Done:
        """Take the kernel from the store, or compile it, once for all who use that store, and
        publish it.
        """
        began_s, made = time.monotonic(), list[Done]()

        def compile_kernel() -> Bundle:
            made.extend(self._compile(asked, (job,), name))
            return Bundle.from_bytes(made[-1].bundle)

        got = compile_once(self._store(asked.stores), job.key, compile_kernel)
        seconds = time.monotonic() - began_s
        # What the store did not take goes back to the program, which sends it later or says that it
        # is not there.
        unsent = b"" if got.published else got.bundle.to_bytes()
        if made and got.how in {"compiled", "late"}:
            return Done(made[-1].result, unsent, seconds)
        return Done(Compiled(job.key, "", seconds, (), hit=True).to_bytes(), unsent, seconds)

    def _compile(self, asked: EngineMessage, jobs: tuple[EngineJob, ...], name: str) -> list[Done]:
        """Have a process compile; raises `_ProcessEnded` when that ended it, and what the compile
        raised.
        """
        if asked.client.gave_up(asked.number):
            raise CancelledError
        with self._lock:
            pool, root = self._pool(asked)
        payload = wire.pack([asked.perform, name, [[job.name, job.payload] for job in jobs]])
        environment = asked.environment_here()
        task = Task(jobs[0].name, name, "", payload, environment, asked.timeout_s or None)
        try:
            pool.submit(task)
            while not wait([task.future], LOOK_S).done:
                if asked.client.gave_up(asked.number):
                    task.future.cancel()
            made = wire.unpack(task.future.result().data, "results")
        except CompileFailed as error:
            if task.deaths or task.misses:
                raise _ProcessEnded(error.facts["reason"], error.facts["words"]) from error
            raise
        finally:
            shutil.rmtree(os.path.join(root, name), ignore_errors=True)
        results, bundle = wire.fields(made, "results", list, bytes)
        pairs = [wire.fields(result, "result", bytes, float) for result in results]
        return [
            Done(data, b"" if number else bundle, seconds)
            for number, (data, seconds) in enumerate(pairs)
        ]

    def _pool(self, asked: EngineMessage) -> tuple[WorkerPool, str]:
        if self._root is None:
            _sweep()
            self._root = tempfile.mkdtemp(prefix=_FOLDER)
            atexit.register(shutil.rmtree, self._root, ignore_errors=True)
        workers = worker_count(None)
        memory_bytes = asked.memory_bytes or memory_share(workers)
        pool = self._pools.get((asked.preload, memory_bytes))
        if pool is None:
            plan = WorkerPlan(_PERFORM, asked.preload, self._root, memory_bytes)
            # Tried once: the second try is the program's, and goes to another worker of the engine
            # where there is one.
            pool = WorkerPool(plan, workers, QUEUE_LIMIT, IDLE_S, deaths=1)
            self._pools[asked.preload, memory_bytes] = pool
            atexit.register(pool.close, wait=False)
        path, digest = asked.source
        if path and self._sources.setdefault(path, digest) != digest:
            self._sources[path] = digest
            pool.renew()  # its processes have imported the module as it was before
        return pool, self._root

    def _store(self, urls: tuple[str, ...]) -> Store:
        with self._lock:
            if urls not in self._stores:
                self._stores[urls] = open_store(*urls)
            return self._stores[urls]


class _ProcessEnded(Exception):
    """A process that compiled was ended by its job."""

    def __init__(self, how: str, words: str) -> None:
        super().__init__(how)
        self.how, self.words = how, words


def _refused(differences: list[str]) -> bytes:
    return wire.pack(Refusal(worker_name(), [*map(tail, differences)]))


def _source_differs(asked: EngineMessage) -> list[str]:
    """Return what is wrong with the module's file here, in a list that is empty when nothing is."""
    path, expected = os.fsdecode(asked.source[0]), asked.source[1]
    if not path:
        return []
    try:
        with open(open_regular(path), "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, BundlerError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        return [f"no file {path} ({reason}), expected the module that the build was planned with"]
    return [] if digest == expected else [f"another {path} than the build was planned with"]


def _sweep() -> None:
    """Remove directories of workers that were killed; by age, since a worker of another container
    has no number here.
    """
    place = tempfile.gettempdir()
    with contextlib.suppress(OSError):
        for name in os.listdir(place):
            path = os.path.join(place, name)
            if name.startswith(_FOLDER) and os.stat(path).st_mtime < time.time() - _STALE_S:
                shutil.rmtree(path, ignore_errors=True)


_WORKER = _EngineWorker()
