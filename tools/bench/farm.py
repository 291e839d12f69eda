# SPDX-License-Identifier: Apache-2.0
"""Kernels on 1, 2 and 4 workers of each engine beside the local pool: what an engine costs a job,
on one machine.

The kernels are compiled once.  After that a job takes its kernel's files in place of a compile, so
that what is measured is the way of a job and of its kernel: messages, processes, the bundle that a
worker sends back and its restore.

    python -m tools.bench farm [--quick] [--rounds N] [--engines processes,dask,mpi,ray] [--check]

An engine that is not installed is said and left out.  Each run is a process of its own with empty
directories, in memory where there is one; the local pool and the engines take turns, and the row of
each is the median over its rounds of what it takes more than the pool.  All samples go to
docs/results/bench-farm.json.  `--check` exits 1 when a target is missed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tools.bench.sides import concluded, working_folder
from tools.shared import measurement, programs
from tools.shared.processes import ROOT, captured, command

KERNELS, QUICK_KERNELS = 300, 24
WORKERS, QUICK_WORKERS = (1, 2, 4), (2,)
# What a job on an engine may cost above one of the local pool, on one machine.
MOST_MS = 5.0
ENGINES = {"processes": "", "dask": "distributed", "mpi": "mpi4py", "ray": "ray"}
_PAGE = ROOT / "docs" / "howto" / "many-machines.md"
_LIMIT_S = 1200
_BUILT = "FARM_BUILT"
# So many jobs a worker start its processes, and are not counted.
FIRST = 4


@contextmanager
def engine(name: str, workers: int) -> Iterator[Executor]:
    """Start an engine with so many workers, and end it."""
    with ExitStack() as stack:
        if name == "processes":
            import multiprocessing
            from concurrent.futures import ProcessPoolExecutor

            spawn = multiprocessing.get_context("spawn")
            yield stack.enter_context(ProcessPoolExecutor(workers, mp_context=spawn))
        elif name == "dask":
            distributed: Any = importlib.import_module("distributed")
            cluster = distributed.LocalCluster(
                n_workers=workers, threads_per_worker=1, dashboard_address=None
            )
            client = stack.enter_context(distributed.Client(stack.enter_context(cluster)))
            yield client.get_executor()
        elif name == "mpi":
            futures: Any = importlib.import_module("mpi4py.futures")
            yield stack.enter_context(futures.MPIPoolExecutor(workers))
        else:
            ray: Any = importlib.import_module("ray")
            stack.enter_context(ray.init(num_cpus=workers, include_dashboard=False))
            yield _ray_executor()


def _ray_executor() -> Executor:
    """Return the executor of the page that users copy."""
    from tools.docs_site.code_blocks import blocks

    (text,) = [block.text for block in blocks(_PAGE, ROOT) if block.title == "ray_cluster.py"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "ray_cluster.py")
        path.write_text(text, encoding="utf-8")
        spec = importlib.util.spec_from_file_location("ray_cluster", path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules["ray_cluster"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    made: Executor = module.RayExecutor()
    return made


def carry(payload: bytes, cache_dir: str) -> bytes:
    """Do a job without a compiler: take a kernel that was compiled before.  What is left is what a
    pool or an engine costs.
    """
    from bundler.compile.compile_job import Compiled, Job

    built = Path(os.environ[_BUILT])
    keys: dict[str, str] = json.loads((built / "keys.json").read_text(encoding="utf-8"))
    key = keys[Job.from_bytes(payload).digest]
    directory = Path(cache_dir, key)
    shutil.copytree(built / "cache" / key, directory)
    for group in directory.glob("__grp__*.json"):
        text = group.read_text(encoding="utf-8")
        group.write_text(text.replace(str(built / "cache"), cache_dir), encoding="utf-8")
    return Compiled(key, str(directory), 0.0, (), hit=False).to_bytes()


def compile_first(kernels: int, folder: Path) -> None:
    """Compile the kernels once, for all sides to carry."""
    from bundler.compile.service import CompileService
    from tools.bench.compile_sides import jobs

    asked = jobs(kernels)
    with CompileService(cache_dir=folder / "cache", isolate=True) as service:
        made = service.compile_all(asked)
    keys = {job.digest: one.key for job, one in zip(asked, _compiled(made), strict=True)}
    (folder / "keys.json").write_text(json.dumps(keys), encoding="utf-8")


def _compiled(made: list[Any]) -> list[Any]:
    """Return what the service made; raises where it failed."""
    failed = [str(one) for one in made if isinstance(one, Exception)]
    if failed:
        raise RuntimeError(failed[0])
    return made


def measure(side: str, count: str, kernels: str, cache_dir: str) -> dict[str, float]:
    """Have so many kernels carried by so many workers of one side, after a few that start its
    processes.
    """
    from bundler.compile.service import CompileService
    from tools.bench.compile_sides import jobs

    workers = int(count)
    asked = jobs(int(kernels) + FIRST * workers)
    first, rest = asked[: FIRST * workers], asked[FIRST * workers :]
    with ExitStack() as stack:
        executor = None if side == "local" else stack.enter_context(engine(side, workers))
        service = stack.enter_context(
            CompileService(
                workers,
                cache_dir=cache_dir,
                isolate=True,
                executor=executor,
                perform="tools.bench.farm:carry",
            )
        )
        service.compile_all(first)
        began_s = time.perf_counter()
        made = service.compile_all(rest)
        whole_s = time.perf_counter() - began_s
    _compiled(made)
    return {"whole_s": whole_s, "kernels": len(rest)}


def run_side(side: str, workers: int, kernels: int, built: Path) -> dict[str, float]:
    """Run `measure` in a process of its own; returns what it printed."""
    with working_folder(measurement.fast_directory()) as folder:
        words = ("--step", "measure", side, str(workers), str(kernels), str(folder / "cache"))
        line = command("tools.bench.farm", *words)
        if side == "mpi":
            launcher = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or "mpiexec"
            line = [launcher, "-n", str(workers + 1), *line[:3], "-m", "mpi4py.futures", *line[3:]]
        places = {"TMPDIR": str(folder), "HOME": str(folder), _BUILT: str(built)}
        environment = os.environ | places | {"RAY_AUTH_MODE": "disabled"}
        done = captured(*line, env=environment, cwd=ROOT, timeout=_LIMIT_S)
    if done.returncode:
        raise RuntimeError(f"{side}: {done.stderr[-2000:]}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def compare(
    engines: list[str], workers: tuple[int, ...], kernels: int, rounds: int
) -> list[dict[str, Any]]:
    """Measure each engine beside the local pool, in turns; returns a row for each."""
    rows = []
    with working_folder(measurement.fast_directory()) as built:
        compile_first(kernels + FIRST * max(workers), built)
        for count in workers:
            samples: dict[str, list[float]] = {name: [] for name in ("local", *engines)}
            for _ in range(rounds):
                for name, found in samples.items():
                    figures = run_side(name, count, kernels, built)
                    found.append(1000 * figures["whole_s"] / figures["kernels"])
            rows += [_row(name, count, samples) for name in engines]
    return rows


def _row(name: str, workers: int, samples: dict[str, list[float]]) -> dict[str, Any]:
    local, ours = samples["local"], samples[name]
    return measurement.row(
        f"{name}, {workers} workers: a job, more than with the local pool",
        measurement.median(measurement.differences(ours, local)),
        "ms",
        most=MOST_MS,
        peer=f"the local pool, {measurement.shown(measurement.median(local), 'ms')}",
        samples={"engine": ours, "local pool": local},
    )


def main() -> int:
    """Compare each engine that is installed."""
    options = programs.arguments(
        __doc__,
        quick=(False, f"{QUICK_KERNELS} kernels on two workers"),
        rounds=(3, "how often each is measured"),
        engines=(",".join(ENGINES), "which, with commas"),
        check=(False, "exit 1 when a target is missed"),
        results=(measurement.RESULTS, "where the samples go"),
    )
    asked = options.engines.split(",")
    engines = [
        name for name in asked if not ENGINES[name] or importlib.util.find_spec(ENGINES[name])
    ]
    for name in asked:
        if name not in engines:
            print(f"{name}: not installed, left out: pip install {ENGINES[name]}")
    kernels, workers = (QUICK_KERNELS, QUICK_WORKERS) if options.quick else (KERNELS, WORKERS)
    rounds = 1 if options.quick else options.rounds
    rows = compare(engines, workers, kernels, rounds)
    return concluded("bench-farm", {"kernels": kernels, "rounds": rounds, "rows": rows}, options)


if __name__ == "__main__":
    programs.run_step({"measure": measure})
