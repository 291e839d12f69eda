# SPDX-License-Identifier: Apache-2.0
"""Lets processes on two mounts of one directory use one store and one cache directory at once, on
file systems that misbehave.

    python -m tools.shared_fs race [--seconds S] [--kinds NAMES] [--processes N] [--seed N] [--results DIR]

For each kind of `network_layer.KINDS` a directory is mounted twice by FUSE, as two clients of a
server would, and N processes on each mount put, get, delete, list, count in a ref, push, restore,
look kernels up and remove them.  Nothing wrong may be read, no error may be none of ours, and no
count may be lost; what the server's disk holds afterwards is verified.  Beside it Triton's own
cache is filled, whose errors (its issue 11512) are counted.  Exits 1 when something was wrong.
Needs Linux, /dev/fuse and the right to mount.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.shared import example_kernels, measurement, programs
from tools.shared.processes import Helper
from tools.shared_fs.network_layer import KINDS
from tools.shared_fs.race_worker import COUNTER

RESULT = "shared-fs"
KERNELS = ("gelu", "softmax")
TARGET = "cuda:90"


def main() -> int:
    """Race on each kind, print and write what happened."""
    options = programs.arguments(
        __doc__,
        seconds=(20.0, "how long for each kind"),
        kinds=(",".join(KINDS), "which"),
        processes=(3, "on each mount"),
        seed=(1, "of what is random"),
        results=(measurement.RESULTS, "where the counts go"),
    )
    found = {}
    with tempfile.TemporaryDirectory(prefix="shared-fs.") as name:
        bundle = make_bundle(Path(name))
        for kind in options.kinds.split(","):
            found[kind] = race(kind, bundle, options.seconds, options.processes, options.seed)
            print(f"{kind}: {summary(found[kind])}", flush=True)
    result = {"seconds": options.seconds, "kinds": found}
    print(f"written to {measurement.save(RESULT, result, options.results)}")
    return 1 if any(one["wrong"] for one in found.values()) else 0


def make_bundle(folder: Path) -> Path:
    """Compile the kernels that are pushed and restored; returns the bundle file."""
    import bundler

    os.environ["TRITON_CACHE_DIR"] = str(folder / "compiled")
    with bundler.recording() as recording:
        for name in KERNELS:
            example_kernels.load().compile_one(name, TARGET)
    with recording.collect() as bundle:
        bundle.save(folder / "bundle")
    return folder / "bundle"


@contextlib.contextmanager
def clients(kind: str, folder: Path, seed: int) -> Iterator[list[Path]]:
    """Mount a directory twice; yields both places."""
    (folder / "server").mkdir()
    places = [folder / f"client{number}" for number in range(2)]
    started: list[Helper] = []
    try:
        for number, place in enumerate(places):
            place.mkdir()
            words = (str(folder / "server"), str(place), kind, str(seed + number))
            started.append(Helper("tools.shared_fs.network_layer", *words))
            try:
                started[-1].hear()
            except RuntimeError as error:
                needed = "this needs /dev/fuse and the right to mount"
                raise OSError(f"{place} cannot be mounted; {needed}") from error
        yield places
    finally:
        for layer in started:
            layer.process.communicate()


def race(kind: str, bundle: Path, seconds: float, processes: int, seed: int) -> dict[str, Any]:
    """Race on one kind of file system; returns what happened."""
    with tempfile.TemporaryDirectory(prefix="shared-fs.") as name:
        folder = Path(name)
        with clients(kind, folder, seed) as places:
            racers = [
                Helper("tools.shared_fs.race_worker", str(place), str(bundle), str(seconds), seeded)
                for number, place in enumerate(places * processes)
                for seeded in [str(seed + number)]
            ]
            answers = [racer.hear() for racer in racers]
            for racer in racers:
                racer.close()
        joined: dict[str, Counter[str]] = {what: Counter() for what in ("done", "typed", "peer")}
        for answer in answers:
            for what, counts in joined.items():
                counts.update(answer[what])
        wrong = [line for answer in answers for line in answer["wrong"]]
        counted = sum(answer["counted"] for answer in answers)
        lost = counted - _value(folder / "server")
        # Without hard links two that swap at the same instant may both succeed, as
        # docs/guarantees.md says.
        if lost and KINDS[kind].links:
            wrong.append(f"{counted} counts were acknowledged, and {lost} of them are lost")
        wrong += _after(folder / "server")
        return {**joined, "counted": counted, "lost": lost, "wrong": wrong}


def _value(server: Path) -> int:
    from bundler.backends.local import LocalBackend

    return int(LocalBackend(str(server / "objects")).read_ref(COUNTER) or b"0")


def _after(server: Path) -> Iterator[str]:
    """Yield what is wrong on the server's own disk, once all have ended."""
    import bundler

    with bundler.open_store(f"file://{server / 'store'}") as store:
        verdict = store.verify()
    if verdict.damaged:
        yield f"damaged on the server: {verdict.damaged}"


def summary(found: dict[str, Any]) -> str:
    """Return what happened in one line."""
    peer = {name: times for name, times in found["peer"].items() if name != "puts"}
    return (
        f"{sum(found['done'].values()):,} acts, {found['counted']:,} counts, {found['lost']} of"
        f" them lost, {len(found['wrong'])} wrong, {sum(found['typed'].values())} errors of ours;"
        f" Triton: {found['peer'].get('puts', 0)} puts, errors {peer}"
    )
