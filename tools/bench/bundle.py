# SPDX-License-Identifier: Apache-2.0
"""Measures bundles beside what a user would take instead: torch's bundler, tar and zstd, and
writing the bare files.

    python -m tools.bench bundle [--check] [--kernels N] [--rounds N] [--quick] [--results DIR] [--keep DIR]

N real kernels are compiled for sm_90 once and kept in .build/bench/.  Then, in memory and on disk,
each piece of work runs in a process of its own, ours and the peer's in turn, and each ratio is the
median over the rounds.  All samples go to docs/results/, from which `python -m tools.bench page`
makes the page.  `--check` exits 1 when a target is missed, and names it.
"""

from __future__ import annotations

import os
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tools.bench import floors, jobs
from tools.bench.basics import basics
from tools.bench.fresh import FRESH_BUNDLE, first_restore
from tools.bench.jobs import tar_program
from tools.bench.memory import memory
from tools.bench.sides import Side, arguments, sides
from tools.bench.step_profiles import fresh_steps
from tools.shared import measurement
from tools.shared.kernel_variants import cache_of
from tools.shared.measurement import median, row, shown
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
_MANY_CORES = 8
_PUSH_AGAIN_TARGET_MS = 60.0
# Of the corpus, by file name: (everything, launch set), in MB.
_CORPUS_TARGETS_MB = {"inductor-transformer-h200": (0.95, 0.26)}


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
            *_bundle_rows(places, kernels),
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
            f"{line['work']:<96} {measurement.shown(line['figure'], line['unit']):>10} "
            f" {measurement.target(line):<18} {verdict}"
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
    """Copy a cache directory, and let its group files name the copy, as if the kernels had been
    compiled there.
    """
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
    """Return the seconds of each step, alone: of restores of everything and of the launch set, a
    collect, a push again.
    """
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
    """Return the seconds of each step that no restore can leave out, of everything and of the
    launch set, medians.
    """
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
        rows += _corpus_rows(into.name, top)
    return rows


def _bundle_rows(places: dict[str, Samples], kernels: int) -> list[dict[str, Any]]:
    """Return the rows of every place, then those of sizes.  What is in memory has targets; a disk's
    speed is its own.
    """
    rows = [
        line for place, samples in places.items() for line in _place_rows(place, samples, kernels)
    ]
    return rows + _size_rows(next(iter(places.values())), kernels)


def _place_rows(place: str, samples: Samples, kernels: int) -> list[dict[str, Any]]:
    targets = place == "tmpfs"

    def seconds(*names: str) -> list[float]:
        return [sum(each) for each in zip(*(samples[name] for name in names), strict=True)]

    def ratio(
        work: str, ours: list[float], theirs: list[float], name: str, **target: float
    ) -> dict[str, Any]:
        # How many times longer we take, or where more is better how many times longer the peer
        # takes.
        over, under = (theirs, ours) if "least" in target else (ours, theirs)
        figure = median([one / other for one, other in zip(over, under, strict=True)])
        return row(
            f"{place}: {work}",
            figure,
            "x",
            peer=f"{name}, {shown(median(theirs) * 1e3, 'ms')}",
            ours_ms=median(ours) * 1e3,
            peer_ms=median(theirs) * 1e3,
            kernels=kernels,
            **(target if targets else {}),
        )

    everything, launch = seconds("restore all: restore"), seconds("restore launch: restore")
    loaded = seconds("restore all: load", "restore all: restore")
    loaded_launch = seconds("restore launch: load", "restore launch: restore")
    torch = seconds("torch load: unpickle", "torch load: emit")
    saved = seconds("collect: collect", "collect: save")
    torch_saved = seconds("torch save: collect", "torch save: pickle", "torch save: write")
    return [
        ratio(
            "restore everything, digests verified",
            everything,
            seconds("write all: write"),
            "bare write loop of the same files",
            most=_restore_target(),
        ),
        ratio(
            "restore the launch set",
            launch,
            seconds("write launch: write"),
            "bare write loop of the same files",
            most=1.6,
        ),
        ratio(
            "load and restore everything: how much faster",
            loaded,
            torch,
            "torch's bundler unpickles and emits, unverified",
            least=2.0,
        ),
        ratio(
            "load and restore the launch set: how much faster",
            loaded_launch,
            torch,
            "torch's bundler unpickles and emits everything",
            least=5.0,
        ),
        ratio("collect and save", saved, seconds("tar: tar"), "tar and zstd -3", most=2.5),
        ratio(
            "push into an empty store in a directory",
            seconds("push: push"),
            seconds("tar: tar"),
            "tar and zstd -3",
        ),
        ratio(
            "pull and restore everything",
            seconds("pull all: pull and restore"),
            seconds("write all: write"),
            "bare write loop of the same files",
        ),
        ratio(
            "pull and restore the launch set",
            seconds("pull launch: pull and restore"),
            seconds("write launch: write"),
            "bare write loop of the same files",
        ),
        row(
            f"{place}: push again, when the store has everything",
            median(seconds("push: push again")) * 1e3,
            "ms",
            most=_PUSH_AGAIN_TARGET_MS if targets else None,
        ),
        _plain(
            f"{place}: collect and save, beside torch's bundler, which keeps everything"
            " uncompressed",
            saved,
            torch_saved,
        ),
    ]


def _restore_target() -> float:
    """Return how much longer than the bare loop a restore may take: the loop is one thread's work,
    a restore is not.
    """
    return 1.1 if len(os.sched_getaffinity(0)) >= _MANY_CORES else 1.7


def _plain(work: str, ours: list[float], theirs: list[float]) -> dict[str, Any]:
    figure = median([one / other for one, other in zip(ours, theirs, strict=True)])
    return row(
        work,
        figure,
        "x",
        peer=f"collect, pickle and write, {shown(median(theirs) * 1e3, 'ms')}",
        ours_ms=median(ours) * 1e3,
        peer_ms=median(theirs) * 1e3,
    )


def _size_rows(samples: Samples, kernels: int) -> list[dict[str, Any]]:
    ours, pickled, tar = (
        median(samples[f"{name}: bytes"]) for name in ("collect", "torch save", "tar")
    )
    torch = f"torch's pickle, {shown(pickled / 1e6, 'MB')}"
    return [
        row(
            f"bundle of {kernels:,} kernels, {shown(ours / 1e6, 'MB')}: how many times smaller",
            pickled / ours,
            "x",
            least=50.0,
            peer=torch,
            ours_bytes=ours,
            peer_bytes=pickled,
        ),
        row(
            f"bundle of {kernels:,} kernels: how many times smaller",
            tar / ours,
            "x",
            peer=f"tar and zstd -3, {shown(tar / 1e6, 'MB')}",
            ours_bytes=ours,
            peer_bytes=tar,
        ),
    ]


def _corpus_rows(name: str, cache: Path) -> list[dict[str, Any]]:
    """Return the sizes of the bundles of one real cache."""
    from bundler import pack

    bundle = pack(cache)
    raw = sum(size for _, size in bundle.content.blobs)
    targets = _CORPUS_TARGETS_MB.get(name, (None, None))
    kinds: list[tuple[str, Callable[[], bytes], float | None]] = [
        ("everything", bundle.to_bytes, targets[0]),
        ("the launch set", bundle.select(keep="launch").to_bytes, targets[1]),
    ]
    return [
        row(
            f"{name}: {what} ({len(bundle.kernels)} kernels, {shown(raw / 1e6, 'MB')} in all)",
            len(save()) / 1e6,
            "MB",
            most=most,
        )
        for what, save, most in kinds
    ]
