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

import argparse
import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.shared import example_kernels, measurement
from tools.shared.processes import ROOT, command, python_path
from tools.shared_fs.network_layer import KINDS
from tools.shared_fs.race_worker import COUNTER

RESULT = "shared-fs"
KERNELS = ("gelu", "softmax")
TARGET = "cuda:90"
SECONDS, PROCESSES, SEED = 20.0, 3, 1
PATIENCE_S = 120.0


def main() -> int:
    """Race on each kind, print and write what happened."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=SECONDS,
        metavar="S",
        help=f"how long for each kind ({SECONDS:.0f})",
    )
    parser.add_argument(
        "--kinds", default=",".join(KINDS), metavar="NAMES", help=f"which ({','.join(KINDS)})"
    )
    parser.add_argument(
        "--processes", type=int, default=PROCESSES, metavar="N", help=f"on each mount ({PROCESSES})"
    )
    parser.add_argument(
        "--seed", type=int, default=SEED, metavar="N", help=f"of what is random ({SEED})"
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=measurement.RESULTS,
        metavar="DIR",
        help="where the counts go",
    )
    options = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory(prefix="shared-fs.") as name:
        bundle = make_bundle(Path(name))
        for kind in options.kinds.split(","):
            found[kind] = race(kind, bundle, options.seconds, options.processes, options.seed)
            print(f"{kind}: {summary(found[kind])}", flush=True)
    print(
        "written to"
        f" {measurement.save(RESULT, {'seconds': options.seconds, 'kinds': found}, options.results)}"
    )
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
    started, places = [], []
    try:
        for number in range(2):
            place = folder / f"client{number}"
            place.mkdir()
            line = command(
                "tools.shared_fs.network_layer",
                str(folder / "server"),
                str(place),
                kind,
                str(seed + number),
            )
            process = subprocess.Popen(
                line, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            started.append(process)
            assert process.stdout is not None
            if not process.stdout.readline():
                raise OSError(
                    f"{place} cannot be mounted; this needs /dev/fuse and the right to mount"
                )
            places.append(place)
        yield places
    finally:
        for process in started:
            process.communicate()


def race(kind: str, bundle: Path, seconds: float, processes: int, seed: int) -> dict[str, Any]:
    """Race on one kind of file system; returns what happened."""
    with tempfile.TemporaryDirectory(prefix="shared-fs.") as name:
        folder = Path(name)
        with clients(kind, folder, seed) as places:
            racers = [
                subprocess.Popen(
                    command(
                        "tools.shared_fs.race_worker",
                        str(place),
                        str(bundle),
                        str(seconds),
                        str(seed + number),
                    ),
                    cwd=ROOT,
                    env={**os.environ, "PYTHONPATH": python_path()},
                    stdout=subprocess.PIPE,
                    text=True,
                )
                for number, place in enumerate(places * processes)
            ]
            until_s = time.monotonic() + seconds + PATIENCE_S
            said = [
                racer.communicate(timeout=max(1.0, until_s - time.monotonic()))[0]
                for racer in racers
            ]
        answers = [json.loads(text) for text in said]
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
        return {
            **joined,
            "counted": counted,
            "lost": lost,
            "wrong": [*wrong, *_after(folder / "server")],
        }


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
