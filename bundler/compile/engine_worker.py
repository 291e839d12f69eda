# SPDX-License-Identifier: Apache-2.0
"""`run_job`: what an engine (Dask, MPI, Ray) calls in its workers, with the bytes of one job;
returns the bytes of its answer.

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
import tempfile
import threading
import time
from concurrent.futures import CancelledError, wait

from bundler.compile.compile_job import Compiled, Job
from bundler.compile.engine_messages import Compiler, EngineJob, worker_name
from bundler.compile.pool_tasks import Task, TaskOutcome
from bundler.compile.service_arguments import IDLE_S, QUEUE_LIMIT, memory_share, worker_count
from bundler.compile.shared_compiles import bundle_of
from bundler.compile.worker_messages import as_failure, encode_error, resolve, tail
from bundler.compile.worker_pool import WorkerPool
from bundler.compile.worker_processes import WorkerPlan
from bundler.errors import BundlerError, CompileFailed
from bundler.fork_safety import after_fork
from bundler.format import wire
from bundler.format.bundle import Bundle
from bundler.format.bundle_file import open_regular
from bundler.lifecycle.compiled_once import compile_once
from bundler.lifecycle.machine_store import Store, open_store
from bundler.project import VERSION
from bundler.toolchain import identity

# How often a worker looks whether the program that sent a job is still there.
LOOK_S = 0.25
# Of a kernel's way through a network: what is written at the end is compressed anew.
_LEVEL = 1
_PERFORM = "bundler.compile.engine_worker:compile_apart"
_FOLDER = "triton-bundler-engine-"
# What a worker that was killed left behind is removed by a later one.
_STALE_S = 24 * 3600.0


def run_job(message: bytes) -> bytes:
    """Do a job that a service sent, in a worker of an engine; for `CompileService(executor=...)`,
    which makes the message.

    Never raises for what happens to a kernel: the answer says it.

    Raises:
        FormatError: the message is none.
    """
    asked = EngineJob.from_bytes(message)
    if isinstance(asked, str):
        return _refused([f"triton-bundler {VERSION}, expected {asked}"])
    differences = asked.compiler.differences(Compiler.here(asked.target)) + _source_differs(asked)
    return _refused(differences) if differences else _WORKER.run(asked)


def compile_apart(payload: bytes, cache_dir: str) -> bytes:
    """Compile in a directory of the job's own, and return what came out together with its files, as
    a bundle.

    Runs in a process that the engine's worker started; `run_job` names it.
    """
    perform, folder, job = wire.fields(wire.unpack(payload, "job"), "job", str, str, bytes)
    own = os.path.join(cache_dir, folder)
    data: bytes = resolve(perform)(job, own)
    compiled = Compiled.from_bytes(data)
    if not compiled.key or not os.path.isdir(os.path.join(own, compiled.key)):
        return wire.pack([data, b""])
    with bundle_of(compiled, Job.from_bytes(job), _environment()) as bundle:
        return wire.pack([data, bundle.to_bytes(level=_LEVEL)])


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
        self._sources: dict[str, str] = {}
        self._root: str | None = None

    def run(self, asked: EngineJob) -> bytes:
        """Do a job whose compiler is the one that this machine has."""
        try:
            if asked.stores and asked.key:
                return self._through_store(asked)
            outcome = self._compile(asked)
        except _Died as death:
            return wire.pack(["died", worker_name(), tail(death.how), tail(death.words)])
        except (
            Exception,  # noqa: BLE001
            CancelledError,
        ) as error:  # whatever happens is the answer
            failure = as_failure(asked.name, error, "")
            return wire.pack(["failed", worker_name(), encode_error(failure)])
        data, bundle = wire.fields(wire.unpack(outcome.data, "result"), "result", bytes, bytes)
        return _done(data, bundle, outcome.worker_s)

    def _through_store(self, asked: EngineJob) -> bytes:
        """Take the kernel from the store, or compile it, once for all who use that store, and
        publish it.
        """
        began_s, made = time.monotonic(), list[tuple[bytes, bytes]]()

        def compile_kernel() -> Bundle:
            outcome = self._compile(asked)
            data, bundle = wire.fields(wire.unpack(outcome.data, "result"), "result", bytes, bytes)
            made.append((data, bundle))
            return Bundle.from_bytes(bundle)

        got = compile_once(self._store(asked.stores), asked.key, compile_kernel)
        seconds = time.monotonic() - began_s
        # What the store did not take goes back to the program, which sends it later or says that it
        # is not there.
        unsent = b"" if got.published else got.bundle.to_bytes()
        if made and got.how in {"compiled", "late"}:
            return _done(made[-1][0], unsent, seconds)
        found = Compiled(asked.key, "", seconds, (), hit=True)
        return _done(found.to_bytes(), unsent, seconds)

    def _compile(self, asked: EngineJob) -> TaskOutcome:
        """Have a process compile; raises `_Died` when that ended it, and what the compile
        raised.
        """
        with self._lock:
            pool, root = self._pool(asked)
        payload = wire.pack([asked.perform, asked.number, asked.payload])
        environment = asked.environment_here()
        task = Task(asked.name, asked.number, "", payload, environment, asked.timeout_s or None)
        try:
            pool.submit(task)
            while not wait([task.future], LOOK_S).done:
                if asked.client.gave_up(asked.number):
                    task.future.cancel()
            return task.future.result()
        except CompileFailed as error:
            if task.deaths or task.misses:
                raise _Died(str(error.facts["reason"]), str(error.facts["words"])) from error
            raise
        finally:
            shutil.rmtree(os.path.join(root, asked.number), ignore_errors=True)

    def _pool(self, asked: EngineJob) -> tuple[WorkerPool, str]:
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


class _Died(Exception):
    """A process that compiled was ended by its job."""

    def __init__(self, how: str, words: str) -> None:
        super().__init__(how)
        self.how, self.words = how, words


def _done(data: bytes, bundle: bytes, seconds: float) -> bytes:
    return wire.pack(["done", worker_name(), data, bundle, seconds])


def _refused(differences: list[str]) -> bytes:
    return wire.pack(["refused", worker_name(), [tail(text) for text in differences]])


def _source_differs(asked: EngineJob) -> list[str]:
    """Return what is wrong with the module's file here, in a list that is empty when nothing is."""
    path, expected = asked.source
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
