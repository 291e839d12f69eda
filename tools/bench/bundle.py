# SPDX-License-Identifier: Apache-2.0
"""Measures bundles beside what a user would take instead: torch's bundler, tar and zstd, and writing the bare files.

    python -m tools.bench bundle [--check] [--kernels N] [--rounds N] [--quick] [--results DIR] [--keep DIR]

N real kernels are compiled for sm_90 once and kept in .build/bench/.  Then, in memory and on disk, each piece of work
runs in a process of its own, ours and the peer's in turn, and each ratio is the median over the rounds.  All samples go to
docs/results/, from which `python -m tools.bench page` makes the page.  `--check` exits 1 when a target is missed, and names it.
"""

from __future__ import annotations

import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tools.bench import floors, jobs
from tools.bench.basics import basics
from tools.bench.fresh import FRESH_BUNDLE, first_restore
from tools.bench.jobs import tar_program
from tools.bench.memory import memory
from tools.bench.rows import bundle_rows, corpus_rows
from tools.bench.sides import Side, arguments, sides
from tools.bench.step_profiles import fresh_steps
from tools.shared import measurement
from tools.shared.kernel_variants import cache_of
from tools.shared.processes import ROOT

KERNELS, ROUNDS, BASIC_ROUNDS, MEMORY_ROUNDS = 1000, 7, 15, 3
QUICK_KERNELS, QUICK_ROUNDS = 12, 1
PROFILES = 3
CORPUS = ROOT.parent / "shared" / "corpus"

# Side, job, what it is called, arguments after the cache and the folder of the round.
JOBS = (
    ("ours", "collect", "collect", ("bundle",)),
    ("plain", "tar_zstd", "tar", ("tar",)),
    ("torch", "torch_collect", "torch save", ("pickle",)),
    ("plain", "write_loop", "write all", ("out", "all")),
    ("ours", "restore", "restore all", ("bundle", "out", "all")),
    ("torch", "torch_restore", "torch load", ("pickle", "out")),
    ("plain", "write_loop", "write launch", ("out", "launch")),
    ("ours", "restore", "restore launch", ("bundle", "out", "launch")),
    ("ours", "push", "push", ("bundle", "store")),
    ("ours", "pull", "pull all", ("store", "out", "all")),
    ("ours", "pull", "pull launch", ("store", "out", "launch")),
)
FROM_CACHE = {"collect", "torch_collect", "tar_zstd", "write_loop"}

Samples = dict[str, list[float]]


def main() -> int:
    """Measure, print a table, write the samples."""
    options = arguments(__doc__, KERNELS, ROUNDS)
    kernels = options.kernels or (QUICK_KERNELS if options.quick else KERNELS)
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    cache = cache_of(kernels, options.keep.resolve())
    few = 2 if options.quick else None
    missed = finish("bench-basics", basics(few or BASIC_ROUNDS), options.results)

    places: dict[str, Samples] = {}
    profile: dict[str, dict[str, float]] = {}
    floor: dict[str, dict[str, float]] = {}
    for place, parent in directories(options.keep.resolve()):
        with (
            working_folder(parent) as work,
            sides(jobs.__name__, "ours", "torch", "plain") as serving,
        ):
            planted = plant(cache, work / "cache")
            places[place] = measure(planted, work, serving, rounds)
            if not profile:
                profile = profiles(planted, work, serving["ours"], 1 if options.quick else PROFILES)
                floor = bare_profile(work, serving["ours"], 1 if options.quick else PROFILES)
    with working_folder(measurement.fast_directory()) as work:
        fresh = first_restore(cache, work, kernels, few or BASIC_ROUNDS)
        profile["fresh"] = fresh_steps(work / FRESH_BUNDLE, work / "fresh", few or BASIC_ROUNDS)
        rows = [
            *bundle_rows(places, kernels),
            fresh,
            *corpus(work),
            *memory(cache, work, few or MEMORY_ROUNDS),
        ]
    result = {
        "kernels": kernels,
        "rounds": rounds,
        "tar": "the programs tar and zstd" if tar_program() else "Python's tarfile and zstandard",
        "places": places,
        "profile": profile,
        "floor": floor,
        "rows": rows,
    }
    missed += finish("bench-bundle", result, options.results)
    for line in missed:
        print(f"missed: {floors.missed(line, result)}")
    return 1 if options.check and missed else 0


def finish(name: str, result: dict[str, Any], directory: Path) -> list[dict[str, Any]]:
    """Print the rows, write the result, and return the rows that miss their target."""
    for line in result["rows"]:
        verdict = "" if not measurement.target(line) else "ok" if line["ok"] else "MISSED"
        print(
            f"{line['work']:<96} {measurement.shown(line['figure'], line['unit']):>10}  {measurement.target(line):<18} {verdict}"
        )
    print(f"written to {measurement.save(name, result, directory)}")
    return [line for line in result["rows"] if not line["ok"]]


def directories(keep: Path) -> Iterator[tuple[str, Path]]:
    """Yield the kinds of place to measure in, and where they are here."""
    fast = measurement.fast_directory()
    if fast is None:
        print(
            "skipped: there is no /dev/shm here, so nothing is measured in memory", file=sys.stderr
        )
    else:
        yield "tmpfs", Path(fast)
    yield "disk", keep


@contextmanager
def working_folder(parent: Path | str | None) -> Iterator[Path]:
    """Make a folder for the time of a measurement."""
    with tempfile.TemporaryDirectory(prefix="bench.", dir=parent) as name:
        yield Path(name)


def plant(cache: Path, where: Path) -> Path:
    """Copy a cache directory, and let its group files name the copy, as if the kernels had been compiled there."""
    shutil.copytree(cache, where)
    for group in where.glob("*/__grp__*.json"):
        group.write_bytes(group.read_bytes().replace(str(cache).encode(), str(where).encode()))
    return where


def measure(cache: Path, work: Path, serving: dict[str, Side], rounds: int) -> Samples:
    """Run every job `rounds` times; returns samples by what was done and by its step."""
    samples: Samples = {}
    for _ in range(rounds):
        for side, job, name, files in JOBS:
            first = (cache,) if job in FROM_CACHE else ()
            rest = [word if word in {"all", "launch"} else work / word for word in files]
            for step, figure in serving[side].do(job, *first, *rest).items():
                samples.setdefault(f"{name}: {step}", []).append(figure)
            shutil.rmtree(work / "out", ignore_errors=True)
            measurement.settle()
        shutil.rmtree(work / "store")
    return samples


def profiles(cache: Path, work: Path, side: Side, rounds: int) -> dict[str, dict[str, float]]:
    """Return the seconds of each step, alone: of restores of everything and of the launch set, a collect, a push again."""
    found: dict[str, list[dict[str, float]]] = {
        "restore": [],
        "restore launch": [],
        "collect": [],
        "push": [],
    }
    for _ in range(rounds):
        for name, keep in (("restore", "all"), ("restore launch", "launch")):
            found[name].append(side.do("restore_steps", work / "bundle", work / "out", keep))
            shutil.rmtree(work / "out")
        found["collect"].append(side.do("collect_steps", cache))
        found["push"].append(side.do("push_steps", work / "bundle", work / "store"))
        shutil.rmtree(work / "store")
    return {
        name: {step: measurement.median([one[step] for one in each]) for step in each[0]}
        for name, each in found.items()
    }


def bare_profile(work: Path, side: Side, rounds: int) -> dict[str, dict[str, float]]:
    """Return the seconds of each step that no restore can leave out, of everything and of the launch set, medians."""
    found: dict[str, list[dict[str, float]]] = {"all": [], "launch": []}
    for _ in range(rounds):
        for keep, samples in found.items():
            samples.append(side.do("bare_steps", work / "bundle", work / "out", keep))
            shutil.rmtree(work / "out")
    return {
        keep: {step: measurement.median([one[step] for one in samples]) for step in samples[0]}
        for keep, samples in found.items()
    }


def corpus(work: Path) -> list[dict[str, Any]]:
    """Return the sizes of bundles of real caches, where those are."""
    archives = sorted(CORPUS.glob("*.tar.xz"))
    if not archives:
        print("skipped: the corpus of real caches is not beside this checkout", file=sys.stderr)
    rows = []
    for archive in archives:
        into = work / archive.name.partition(".")[0]
        with tarfile.open(archive) as packed:
            packed.extractall(into, filter="data")
        (top,) = into.iterdir()
        rows += corpus_rows(into.name, top)
    return rows
