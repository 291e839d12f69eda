# SPDX-License-Identifier: Apache-2.0
"""`SharedCompiles`: each kernel is compiled once for everyone who uses a store.

`bundle_build`, or a program of the user's, gives one to a `CompileService` as `once`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable

from bundler.compile.compile_job import Compiled, Job
from bundler.compile.worker_messages import failure
from bundler.format.bundle import Bundle
from bundler.format.entries import Kernel
from bundler.lifecycle.bundle_builder import Builder, join
from bundler.lifecycle.compiled_once import compile_once
from bundler.lifecycle.machine_store import Store
from bundler.lifecycle.restoration import restore
from bundler.toolchain import identity


class SharedCompiles:
    """What a `CompileService` takes as `once`: each kernel comes from the store, or is compiled by
    one and published.

    ::

        shared = SharedCompiles(store, cache_dir)
        with CompileService(cache_dir=cache_dir, once=shared) as service:
            shared.fetch(jobs)  # what is there comes in one go
            service.compile_all(jobs)

    Guarantees and errors are those of `compile_once`: leases are renewed while a worker compiles, a
    failed compile is told to those who wait for it, and when the store fails this process compiles
    for itself.  Jobs without a known `key` are compiled here and not shared.  Thread-safe as the
    store.

    Args:
        store: where kernels are shared.
        cache_dir: where kernels go; the service's.
    """

    def __init__(self, store: Store, cache_dir: str | os.PathLike[str]) -> None:
        self._store, self._cache_dir = store, os.path.abspath(cache_dir)
        self._fetched: dict[str, Compiled] = {}
        self._in_store: set[str] = set()

    @property
    def in_store(self) -> frozenset[str]:
        """Keys of kernels that the store was seen to hold, or that were published there."""
        return frozenset(self._in_store)

    def fetch(self, jobs: Iterable[Job]) -> frozenset[str]:
        """Put what the store has of these jobs' kernels into the cache directory; returns their
        keys.

        Raises:
            StoreUnavailable, AccessDenied, StoreFull: the store cannot be read, or the directory
                not be written.
        """
        started = time.monotonic()
        wanted = [job.key for job in jobs if job.key]
        with self._store.kernel_records().look_up(wanted).bundle as found:
            placed = self._place(found)
        seconds = (time.monotonic() - started) / max(1, len(placed))
        self._in_store |= placed.keys()
        self._fetched |= {
            key: _as_compiled(kernel, self._cache_dir, seconds) for key, kernel in placed.items()
        }
        return frozenset(placed)

    def __call__(self, job: Job, compile_here: Callable[[], Compiled]) -> Compiled:
        """Return the kernel of a job from the store, or compile it here for all."""
        fetched = self._fetched.get(job.key)
        if fetched is not None and os.path.isdir(fetched.directory):
            return fetched
        if not job.key:
            return compile_here()
        started, made = time.monotonic(), list[Compiled]()

        def compile_kernel() -> Bundle:
            made.append(compile_here())
            return bundle_of(self._cache_dir, [(made[-1], job.name)])

        got = compile_once(self._store, job.key, compile_kernel)
        if got.published:
            self._in_store.add(job.key)
        if made and got.how == "compiled":
            return made[-1]
        kernel = self._place(got.bundle).get(job.key)
        if kernel is None:
            return compile_here()
        return _as_compiled(kernel, self._cache_dir, time.monotonic() - started)

    def _place(self, bundle: Bundle) -> dict[str, Kernel]:
        """Restore kernels; returns those that are in place, by key.  Their targets need not be this
        machine's.
        """
        if not bundle.kernels:
            return {}
        report = restore(bundle, self._cache_dir, only="all", trust=self._store.trust)
        there = {*report.restored, *report.present, *report.repaired}
        return {kernel.key: kernel for kernel in bundle.kernels if kernel.key in there}


def bundle_of(
    cache_dir: str,
    made: Iterable[tuple[Compiled, str]],
    environment: tuple[tuple[str, str], ...] | None = None,
) -> Bundle:
    """Return compiled kernels of a cache directory, each with the name of its job, as a bundle in
    memory; raises `CompileFailed` for one that no bundle can hold.

    `environment`: what `identity.environment` returned, from a caller that makes many bundles.
    """
    builder = Builder(cache_dir)
    for compiled, name in made:
        reason = compiled.add_to(builder)
        if reason is not None:
            raise failure(name, reason)
    return join([builder], identity.environment() if environment is None else environment)


def _as_compiled(kernel: Kernel, cache_dir: str, seconds: float) -> Compiled:
    directory = os.path.join(cache_dir, kernel.key)
    return Compiled(
        kernel.key,
        directory,
        seconds,
        (),
        hit=True,
        toolchain=kernel.toolchain,
        facts=kernel.facts_bytes,
        parts=kernel.parts_bytes,
    )
