# SPDX-License-Identifier: Apache-2.0
"""What the samples of the benchmark say: rows with figure, peer and target."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.shared.measurement import median, row, shown

Samples = dict[str, list[float]]
MANY_CORES = 8
PUSH_AGAIN_TARGET_MS = 60.0

# Of the corpus, by file name: (everything, launch set), in MB.
CORPUS_TARGETS_MB = {"inductor-transformer-h200": (0.95, 0.26)}


def bundle_rows(places: dict[str, Samples], kernels: int) -> list[dict[str, Any]]:
    """Return the rows of every place, then those of sizes.  What is in memory has targets; a disk's speed is its own."""
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
        # How many times longer we take, or where more is better how many times longer the peer takes.
        over, under = (theirs, ours) if "least" in target else (ours, theirs)
        figure = median([one / other for one, other in zip(over, under, strict=True)])
        return row(
            f"{place}: {work}", figure, "x", peer=f"{name}, {shown(median(theirs) * 1e3, 'ms')}",
            ours_ms=median(ours) * 1e3, peer_ms=median(theirs) * 1e3, kernels=kernels, **(target if targets else {}),
        )  # fmt: skip

    everything, launch = seconds("restore all: restore"), seconds("restore launch: restore")
    loaded = seconds("restore all: load", "restore all: restore")
    loaded_launch = seconds("restore launch: load", "restore launch: restore")
    torch = seconds("torch load: unpickle", "torch load: emit")
    saved = seconds("collect: collect", "collect: save")
    torch_saved = seconds("torch save: collect", "torch save: pickle", "torch save: write")
    return [
        ratio("restore everything, digests verified", everything, seconds("write all: write"),
              "bare write loop of the same files", most=_restore_target()),
        ratio("restore the launch set", launch, seconds("write launch: write"),
              "bare write loop of the same files", most=1.6),
        ratio("load and restore everything: how much faster", loaded, torch,
              "torch's bundler unpickles and emits, unverified", least=2.0),
        ratio("load and restore the launch set: how much faster", loaded_launch, torch,
              "torch's bundler unpickles and emits everything", least=5.0),
        ratio("collect and save", saved, seconds("tar: tar"), "tar and zstd -3", most=2.5),
        ratio("push into an empty store in a directory", seconds("push: push"), seconds("tar: tar"), "tar and zstd -3"),
        ratio("pull and restore everything", seconds("pull all: pull and restore"), seconds("write all: write"),
              "bare write loop of the same files"),
        ratio("pull and restore the launch set", seconds("pull launch: pull and restore"), seconds("write launch: write"),
              "bare write loop of the same files"),
        row(f"{place}: push again, when the store has everything", median(seconds("push: push again")) * 1e3, "ms",
            most=PUSH_AGAIN_TARGET_MS if targets else None),
        _plain(f"{place}: collect and save, beside torch's bundler, which keeps everything uncompressed", saved, torch_saved),
    ]  # fmt: skip


def _restore_target() -> float:
    """Return how much longer than the bare loop a restore may take: the loop is one thread's work, a restore is not."""
    return 1.1 if len(os.sched_getaffinity(0)) >= MANY_CORES else 1.7


def _plain(work: str, ours: list[float], theirs: list[float]) -> dict[str, Any]:
    figure = median([one / other for one, other in zip(ours, theirs, strict=True)])
    return row(work, figure, "x", peer=f"collect, pickle and write, {shown(median(theirs) * 1e3, 'ms')}",
               ours_ms=median(ours) * 1e3, peer_ms=median(theirs) * 1e3)  # fmt: skip


def _size_rows(samples: Samples, kernels: int) -> list[dict[str, Any]]:
    ours, pickled, tar = (
        median(samples[f"{name}: bytes"]) for name in ("collect", "torch save", "tar")
    )
    torch = f"torch's pickle, {shown(pickled / 1e6, 'MB')}"
    return [
        row(f"bundle of {kernels:,} kernels, {shown(ours / 1e6, 'MB')}: how many times smaller", pickled / ours, "x",
            least=50.0, peer=torch, ours_bytes=ours, peer_bytes=pickled),
        row(f"bundle of {kernels:,} kernels: how many times smaller", tar / ours, "x",
            peer=f"tar and zstd -3, {shown(tar / 1e6, 'MB')}", ours_bytes=ours, peer_bytes=tar),
    ]  # fmt: skip


def corpus_rows(name: str, cache: Path) -> list[dict[str, Any]]:
    """Return the sizes of the bundles of one real cache."""
    from bundler import pack

    bundle = pack(cache)
    raw = sum(size for _, size in bundle.content.blobs)
    targets = CORPUS_TARGETS_MB.get(name, (None, None))
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
