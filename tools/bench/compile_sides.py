# SPDX-License-Identifier: Apache-2.0
"""The pieces of work that `compile` measures, each in a process of its own; prints its figures as
JSON.

python -m tools.bench.compile_sides serial|ours|torch|again COUNT CACHE_DIR [STORE JOBS]
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

STARTED = time.perf_counter()
# the imports are part of the time
from tools.shared.kernel_variants import TARGET, compile_variant, variants  # noqa: E402
from tools.shared.processes import ROOT  # noqa: E402  # as above

_SHAPES = "tools.shared.kernel_shapes"  # not imported: it imports Triton

WORKERS = 2
Figures = dict[str, Any]


def jobs(count: int) -> list[Any]:
    """Return the kernels as jobs of the service."""
    from bundler.compile.compile_job import Job, SourceRef
    from bundler.format.entries import Target
    from bundler.toolchain.encoding import encode_value

    made = []
    for name, types, constants, options in variants(count):
        names = [*types, *constants]
        made.append(
            Job(
                name,
                SourceRef(
                    "module",
                    name,
                    _SHAPES,
                    str(ROOT.joinpath(*_SHAPES.split("."))) + ".py",
                    str(ROOT),
                ),
                tuple((each, encode_value(types.get(each, "constexpr"))) for each in names),
                tuple(
                    ((names.index(each),), encode_value(value)) for each, value in constants.items()
                ),
                tuple(
                    ((place,), encode_value([["tt.divisibility", 16]]))
                    for place in range(len(types))
                ),
                tuple((each, encode_value(value)) for each, value in options.items()),
                Target(TARGET[0], str(TARGET[1]), TARGET[2]),
            )
        )
    return made


def compile_number(number: int) -> float:
    """Compile one kernel with Triton itself; returns the seconds.  Torch's workers are sent this
    function by its name.
    """
    started = time.perf_counter()
    # Which kernel has a number does not depend on how many there are.
    compile_variant(*next(islice(variants(number + 1), number, None)))
    return time.perf_counter() - started


def serial(count: int) -> Figures:
    """Compile one after the other in this process, as a program without us does."""
    from triton.runtime.cache import triton_key  # type: ignore[import-not-found, unused-ignore]

    began = time.perf_counter()
    triton_key()
    from tools.shared import kernel_shapes  # noqa: F401  # its import is not compiling

    warm = time.perf_counter()
    worked = [compile_number(number) for number in range(count)]
    ended = time.perf_counter()
    return {
        "start_s": warm - began,
        "compile_s": ended - warm,
        "worked_s": sum(worked),
        "whole_s": ended - STARTED,
    }


def ours(count: int, cache_dir: str, store: str, plan: str) -> Figures:
    """Compile with the service, and once more with a store in the same warm process, into another
    directory.
    """
    from bundler.compile.service import CompileService

    asked = jobs(count)
    with CompileService(WORKERS, cache_dir=cache_dir, isolate=True) as service:
        began = time.perf_counter()
        if not service.warm_up(120):
            raise RuntimeError("the workers did not start")
        warm = time.perf_counter()
        made = service.compile_all(asked)
        ended = time.perf_counter()
        worked = sum(timing.worker_s for timing in service.timings)
        failed = [str(one) for one in made if isinstance(one, Exception)]
        if failed or service.counters.compiled != count:
            raise RuntimeError(f"{service.counters}: {failed[:1]}")
        stages = _stages(service.timings)
        wake_s = _wake(service)
    figures = {
        "start_s": warm - began,
        "compile_s": ended - warm,
        "worked_s": worked,
        "overhead_s": (WORKERS * (ended - warm) - worked) / count,
        "wake_s": wake_s,
        "whole_s": ended - STARTED,
        "stages": stages,
    }
    _publish(asked, made, cache_dir, store, plan)
    with _shared(store, f"{cache_dir}-again") as (service, shared):
        service.warm_up(120)
        figures["again_s"] = _again(service, shared, _planned(plan))
    return figures


def _wake(service: Any) -> float:
    service.quiesce()
    while service.processes():
        time.sleep(0.001)
    began = time.perf_counter()
    service.warm_up(60)
    return time.perf_counter() - began


def _stages(timings: Any) -> dict[str, float]:
    found: dict[str, float] = {}
    for timing in timings:
        for stage, seconds in timing.stages:
            found[stage] = found.get(stage, 0.0) + seconds
    return found


def _publish(asked: list[Any], made: list[Any], cache_dir: str, store: str, plan: str) -> None:
    """Put the kernels into a store, and the jobs with their keys into a file, as a build plans
    them.
    """
    from dataclasses import replace

    from bundler import open_store
    from bundler.compile.compile_job import bundle_of
    from bundler.format import wire

    named = [(kernel, job.name) for job, kernel in zip(asked, made, strict=True)]
    with open_store(store) as opened, bundle_of(cache_dir, named) as bundle:
        opened.kernel_records().publish(bundle)
    known = [replace(job, key=kernel.key) for job, kernel in zip(asked, made, strict=True)]
    Path(plan).write_bytes(wire.pack([job.to_bytes() for job in known]))


def _planned(plan: str) -> list[Any]:
    from bundler.compile.compile_job import Job
    from bundler.format import wire

    return [Job.from_bytes(data) for data in wire.unpack(Path(plan).read_bytes(), "plan")]


@contextmanager
def _shared(store: str, cache_dir: str) -> Iterator[tuple[Any, Any]]:
    """Open a store, and a service that compiles through it."""
    from bundler import open_store
    from bundler.compile.bundle_build import SharedCompiles
    from bundler.compile.service import CompileService

    with open_store(store) as opened:
        shared = SharedCompiles(opened, cache_dir)
        with CompileService(WORKERS, cache_dir=cache_dir, isolate=True, once=shared) as service:
            yield service, shared


def _again(service: Any, shared: Any, planned: list[Any]) -> float:
    began = time.perf_counter()
    shared.fetch(planned)
    made = service.compile_all(planned)
    ended = time.perf_counter()
    if service.counters.hits != len(planned) or not all(
        os.path.isdir(one.directory) for one in made
    ):
        raise RuntimeError(f"the store did not have everything: {service.counters}")
    return ended - began


def again(count: int, cache_dir: str, store: str, plan: str) -> Figures:
    """A second run as a whole process: everything comes from the store."""
    with _shared(store, cache_dir) as (service, shared):
        planned = _planned(plan)
        if len(planned) != count:
            raise RuntimeError(f"{len(planned)} jobs in {plan}, expected {count}")
        seconds = _again(service, shared, planned)
    return {"again_s": seconds, "whole_s": time.perf_counter() - STARTED}


def torch(count: int) -> Figures:
    """Compile with the pool of torch's compiler."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(WORKERS)
    from torch._inductor.async_compile import AsyncCompile

    began = time.perf_counter()
    pool = AsyncCompile.process_pool()
    # Workers that have Triton and its key, as ours have.
    for done in [pool.submit(functools.partial(_warm, number)) for number in range(WORKERS)]:
        done.result()
    warm = time.perf_counter()
    worked = [
        done.result()
        for done in [pool.submit(functools.partial(compile_number, n)) for n in range(count)]
    ]
    ended = time.perf_counter()
    return {
        "start_s": warm - began,
        "compile_s": ended - warm,
        "worked_s": sum(worked),
        "overhead_s": (WORKERS * (ended - warm) - sum(worked)) / count,
        "whole_s": ended - STARTED,
    }


def _warm(_number: int) -> None:
    from triton.runtime.cache import triton_key

    triton_key()
    time.sleep(0.2)  # so that each worker gets one of these


def main() -> None:
    """Do one piece of work."""
    side, count, cache_dir, *rest = sys.argv[1:]
    os.environ["TRITON_CACHE_DIR"] = cache_dir
    sides: dict[str, Callable[[], Figures]] = {
        "serial": lambda: serial(int(count)),
        "ours": lambda: ours(int(count), cache_dir, *rest),
        "torch": lambda: torch(int(count)),
        "again": lambda: again(int(count), cache_dir, *rest),
    }
    figures = sides[side]()
    print(json.dumps(figures))


if __name__ == "__main__":
    # Torch's workers look the function up by the name of its module, which is not `__main__` there.
    importlib.import_module("tools.bench.compile_sides").main()
