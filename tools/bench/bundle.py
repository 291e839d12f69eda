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
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from tools.bench.fresh import first_restore, imports, signature_cost
from tools.bench.hits import hits
from tools.bench.jobs import tar_program
from tools.bench.memory import memory
from tools.bench.sides import Samples, Side, arguments, concluded, sides, working_folder
from tools.shared import example_kernels, measurement
from tools.shared.kernel_variants import cache_of
from tools.shared.measurement import differences, median, ratio_row, row, shown
from tools.shared.processes import ROOT

KERNELS, ROUNDS = (1000, 12), (7, 1)
BASIC_ROUNDS, MEMORY_ROUNDS = 15, 3
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
    ("ours", "push", "push", ("store", "bundle")),
    ("ours", "pull", "pull all", ("store", "out", "all")),
    ("ours", "pull", "pull launch", ("store", "out", "launch")),
)
FROM_CACHE = {"collect", "torch_collect", "tar_zstd", "write_loop"}

_MANY_CORES = 8
_PUSH_AGAIN_TARGET_MS = 60.0
_RECORDING_TARGET_US = 200.0
# Of the corpus, by file name: (everything, launch set), in MB.
_CORPUS_TARGETS_MB = {"inductor-transformer-h200": (0.95, 0.26)}


def main() -> int:
    """Measure, print a table, write the samples."""
    options = arguments(__doc__, KERNELS, ROUNDS)
    kernels, rounds, keep = options.kernels, options.rounds, options.keep
    cache = cache_of(kernels, keep)
    few = 2 if options.quick else None
    missed = concluded("bench-basics", {"rows": basics(few or BASIC_ROUNDS)}, options)

    places: dict[str, Samples] = {}
    for place, parent in directories(keep):
        with (
            working_folder(parent) as work,
            sides(
                ours=("bundler",), torch=("torch._inductor.triton_bundler",), plain=()
            ) as serving,
        ):
            places[place] = measure(plant(cache, work / "cache"), work, serving, rounds)
    with working_folder(measurement.fast_directory()) as work:
        rows = [
            *_bundle_rows(places, kernels),
            first_restore(cache, work, kernels, few or BASIC_ROUNDS),
            *(line for name, top in real_caches(work) for line in _corpus_rows(name, top)),
            *memory(cache, work, few or MEMORY_ROUNDS),
        ]
    result = {
        "kernels": kernels,
        "rounds": rounds,
        "tar": "the programs tar and zstd" if tar_program() else "Python's tarfile and zstandard",
        "places": places,
        "rows": rows,
    }
    return concluded("bench-bundle", result, options) or missed


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
            urls = {"store": f"file://{work}/store", "all": "all", "launch": "launch"}
            rest = [urls.get(word, work / word) for word in files]
            for step, figure in serving[side].do(job, *first, *rest).items():
                samples.setdefault(f"{name}: {step}", []).append(figure)
            shutil.rmtree(work / "out", ignore_errors=True)
            measurement.settle()
        shutil.rmtree(work / "store")
    return samples


def real_caches(into: Path) -> Iterator[tuple[str, Path]]:
    """Unpack real caches, where those are; yields the name and the directory of each."""
    archives = sorted(CORPUS.glob("*.tar.xz"))
    if not archives:
        print("skipped: the corpus of real caches is not beside this checkout", file=sys.stderr)
    for archive in archives:
        folder = into / archive.name.partition(".")[0]
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
        (top,) = folder.iterdir()
        yield folder.name, top
        shutil.rmtree(folder)


def _bundle_rows(places: dict[str, Samples], kernels: int) -> list[dict[str, Any]]:
    """Return the rows of every place, then those of sizes.  What is in memory has targets; a disk's
    speed is its own.
    """
    rows = [
        line for place, samples in places.items() for line in _place_rows(place, samples, kernels)
    ]
    return rows + _size_rows(next(iter(places.values())), kernels)


_ALL, _FASTER = "restore everything", ": how much faster"
_VERIFIED = f"{_ALL}, digests verified"
_LAUNCH_FASTER = f"load and restore the launch set{_FASTER}"
_LOOP = "bare write loop of the same files"
_TAR = "tar and zstd -3"


def _place_rows(place: str, samples: Samples, kernels: int) -> list[dict[str, Any]]:
    targets = place == "tmpfs"

    def seconds(*names: str) -> list[float]:
        return [sum(each) for each in zip(*(samples[name] for name in names), strict=True)]

    everything, launch = seconds("restore all: restore"), seconds("restore launch: restore")
    loaded = seconds("restore all: load", "restore all: restore")
    loaded_launch = seconds("restore launch: load", "restore launch: restore")
    pulled, pulled_launch = (
        seconds(f"pull {keep}: pull and restore") for keep in ("all", "launch")
    )
    written, written_launch = seconds("write all: write"), seconds("write launch: write")
    torch, tar = seconds("torch load: unpickle", "torch load: emit"), seconds("tar: tar")
    saved, pushed = seconds("collect: collect", "collect: save"), seconds("push: push")
    torch_saved = seconds("torch save: collect", "torch save: pickle", "torch save: write")
    unpickled = "torch's bundler unpickles and emits"
    # What was done, our time, the peer's, the peer, and the target: at most so many times its time,
    # or at least so many times faster.
    table: tuple[tuple[str, list[float], list[float], str, dict[str, float]], ...] = (
        (_VERIFIED, everything, written, _LOOP, {"most": _restore_target()}),
        ("restore the launch set", launch, written_launch, _LOOP, {"most": 1.6}),
        (f"load and {_ALL}{_FASTER}", loaded, torch, f"{unpickled}, unverified", {"least": 2.0}),
        (_LAUNCH_FASTER, loaded_launch, torch, f"{unpickled} everything", {"least": 5.0}),
        ("collect and save", saved, tar, _TAR, {"most": 2.5}),
        ("push into an empty store in a directory", pushed, tar, _TAR, {}),
        (f"pull and {_ALL}", pulled, written, _LOOP, {}),
        ("pull and restore the launch set", pulled_launch, written_launch, _LOOP, {}),
    )
    rows = [
        ratio_row(
            f"{place}: {work}",
            ours,
            theirs,
            peer,
            faster="least" in target,
            kernels=kernels,
            **(target if targets else {}),
        )
        for work, ours, theirs, peer, target in table
    ]
    again = f"{place}: push again, when the store has everything"
    most = _PUSH_AGAIN_TARGET_MS if targets else None
    beside = (
        f"{place}: collect and save, beside torch's bundler, which keeps everything uncompressed"
    )
    return [
        *rows,
        row(again, median(seconds("push: push again")) * 1e3, "ms", most=most),
        ratio_row(beside, saved, torch_saved, "collect, pickle and write"),
    ]


def _restore_target() -> float:
    """Return how much longer than the bare loop a restore may take: the loop is one thread's work,
    a restore is not.
    """
    return 1.1 if len(os.sched_getaffinity(0)) >= _MANY_CORES else 1.7


def _size_rows(samples: Samples, kernels: int) -> list[dict[str, Any]]:
    ours = median(samples["collect: bytes"])

    def smaller(work: str, name: str, peer: str, least: float | None = None) -> dict[str, Any]:
        theirs = median(samples[f"{name}: bytes"])
        sizes = {"ours_bytes": ours, "peer_bytes": theirs}
        peer = f"{peer}, {shown(theirs / 1e6, 'MB')}"
        work = f"{work}: how many times smaller"
        return row(work, theirs / ours, "x", least=least, peer=peer, **sizes)

    what = f"bundle of {kernels:,} kernels"
    return [
        smaller(f"{what}, {shown(ours / 1e6, 'MB')}", "torch save", "torch's pickle", 50.0),
        smaller(what, "tar", _TAR),
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
    size = f"({len(bundle.kernels)} kernels, {shown(raw / 1e6, 'MB')} in all)"
    return [
        row(f"{name}: {what} {size}", len(save()) / 1e6, "MB", most=most)
        for what, save, most in kinds
    ]


def basics(rounds: int) -> list[dict[str, Any]]:
    """Return what a process pays that has us."""
    with working_folder(measurement.fast_directory()) as folder:
        found = hits(folder, rounds)
    return [*imports(rounds), *found, recording_cost(rounds), *signature_cost(rounds)]


def recording_cost(rounds: int) -> dict[str, Any]:
    """Time cache hits of Triton with and without a recording."""
    with (
        working_folder(measurement.fast_directory()) as folder,
        mock.patch.dict(os.environ, TRITON_CACHE_DIR=str(folder)),
    ):
        import bundler

        kernels = example_kernels.load()
        targets = list(kernels.DEFAULT_TARGETS)
        count = len(kernels.compile_all(targets))
        samples: dict[str, list[float]] = {"without": [], "with": []}
        for _ in range(rounds):
            samples["without"].append(_seconds(kernels.compile_all, targets) / count * 1e6)
            with bundler.recording():
                samples["with"].append(_seconds(kernels.compile_all, targets) / count * 1e6)
    figure = median(differences(samples["with"], samples["without"]))
    work = "recording, added to each compile call (here: a hit)"
    return row(work, figure, "us", most=_RECORDING_TARGET_US, samples=samples)


def _seconds(work: Any, *arguments: Any) -> float:
    started = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - started
