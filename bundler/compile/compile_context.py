# SPDX-License-Identifier: Apache-2.0
"""`Context`: what a result depends on besides its job: compiler, environment, the state of the
source file.

The service asks for the `JobContext` of each job that is submitted: the keys under which its result
is remembered and leased, and the environment that its worker gets.
"""

from __future__ import annotations

import hashlib
import os
import threading
from dataclasses import dataclass

from bundler.compile.compile_job import Job
from bundler.compile.worker_messages import JobEnvironment
from bundler.format.bundle_file import open_regular
from bundler.format.entries import Target
from bundler.toolchain.identity import installed_triton
from bundler.toolchain.ptxas import ptxas_version

# A lease leaves an empty file behind, so leases share slots; jobs of two processes in one slot only
# wait for each other.
SLOTS = 4096


@dataclass(frozen=True)
class JobContext:
    """What a job needs and depends on besides its own data.

    Attributes:
        environment: for the worker.
        key: a result that is remembered under an equal key is the answer.
        lease_name: equal in every process of this host that would compile the same.
        stale: the file of its module is not what workers have imported.
    """

    environment: JobEnvironment
    key: str
    lease_name: str
    stale: bool


class Context:
    """Keys of jobs in the memory of results and among the leases of this host.

    A memory key counts everything: the job, Triton's release and binary, ptxas, the bytes of a
    module's file, and the whole environment, since which variables matter differs by release; a
    change costs one look into the cache directory.

    Args:
        cache_dir: where kernels go.
        perform: what is done with jobs.
        reload: whether a module's file is looked at again for each job; False where jobs run in
            this process, which imports a module once.
    """

    def __init__(self, cache_dir: str, perform: str, *, reload: bool) -> None:
        self._fixed, self._reload = f"{os.path.realpath(cache_dir)}\n{perform}", reload
        self._lock = threading.Lock()
        self._last = JobEnvironment((), ())
        self._environment = ""
        self._files: dict[str, tuple[tuple[int, int], str]] = {}
        self._toolchains: dict[Target, str] = {}

    def of(self, job: Job, *, look: bool = True) -> JobContext:
        """Return the context of a job now; without `look`, the environment is that of the job
        before.
        """
        with self._lock:
            if look:
                self._refresh_environment()
            # The path of a text is only its name.
            source, stale = self._source(job.source.path if job.source.kind == "module" else "")
            parts = (job.digest, source, self._toolchain(job.target), self._fixed)
            slot = int(_digest(*parts)[:16], 16) % SLOTS
            return JobContext(
                self._last, _digest(*parts, self._environment), f"compile/{slot:03x}", stale
            )

    def source_of(self, job: Job) -> tuple[str, str]:
        """Return path and SHA-256 of the file of a job's module, as it is now; empty texts where
        the job has its source with it.
        """
        path = job.source.path if job.source.kind == "module" else ""
        with self._lock:
            return path, self._source(path)[0]

    def _refresh_environment(self) -> None:
        now = JobEnvironment.now()
        if now != self._last:
            self._last = now
            self._environment = _digest(repr(now.to_wire()))
            self._toolchains.clear()

    def _source(self, path: str) -> tuple[str, bool]:
        """Return the digest of a module's file, and whether it was another one before."""
        if not path:
            return "", False
        before = self._files.get(path)
        if before is not None and not self._reload:
            return before[1], False
        try:
            found = os.stat(path)
            state = (found.st_mtime_ns, found.st_size)
            if before is None or before[0] != state:
                with open(open_regular(path), "rb") as file:
                    self._files[path] = (state, hashlib.file_digest(file, "sha256").hexdigest())
        except OSError:
            return "unreadable", False  # the compile says what is wrong
        digest = self._files[path][1]
        return digest, before is not None and before[1] != digest

    def _toolchain(self, target: Target) -> str:
        if target not in self._toolchains:
            installed = installed_triton()
            ptxas = (
                ptxas_version(int(target.arch))
                if target.backend == "cuda" and target.arch.isdecimal()
                else None
            )
            self._toolchains[target] = repr((installed, ptxas))
        return self._toolchains[target]


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogateescape")).hexdigest()
