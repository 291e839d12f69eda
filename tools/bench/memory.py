# SPDX-License-Identifier: Apache-2.0
"""How much memory, and how much more time, a restore of more kernels takes.

    python -m tools.bench.memory make CACHE FILE COPIES     a bundle with COPIES different copies of every kernel
    python -m tools.bench.memory measure FILE INTO          restore it; prints bytes and seconds as JSON

Each runs in an interpreter of its own: the peak of a process never goes down again.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tools.shared import measurement
from tools.shared.measurement import row
from tools.shared.processes import output

if TYPE_CHECKING:
    from bundler import Bundle

TIMES = (1, 2, 4)
PEAK_TARGET_MB = 150.0
# Four times the kernels may take a quarter more: the list of kernels has to be somewhere.
FLAT_TARGET = 1.25
LINEAR_TARGET = 1.25


def memory(cache: Path, work: Path, rounds: int) -> list[dict[str, Any]]:
    """Return the rows: peaks, how flat they are, and how linear the time is."""
    samples: dict[int, list[dict[str, float]]] = {times: [] for times in TIMES}
    for times in TIMES:
        output(
            __name__, "make", str(cache), str(work / f"{times}.tbundle"), str(times), environment={}
        )
    for _ in range(rounds):
        for times, found in samples.items():
            answer = output(
                __name__,
                "measure",
                str(work / f"{times}.tbundle"),
                str(work / "out"),
                environment={},
            )
            found.append(json.loads(answer))
            shutil.rmtree(work / "out")
    rows = [_peak_row(found) for found in samples.values()]
    peaks, seconds = (
        [[s[name] for s in samples[times]] for times in TIMES] for name in ("peak_bytes", "seconds")
    )
    ratios = [
        [many / few for few, many in zip(each[0], each[-1], strict=True)]
        for each in (peaks, seconds)
    ]
    work_of = f"restore {TIMES[-1]} times the kernels: "
    return [
        *rows,
        row(
            work_of + "peak memory",
            measurement.median(ratios[0]),
            "x",
            most=FLAT_TARGET,
            samples=ratios[0],
        ),
        row(
            work_of + "time of each",
            measurement.median(ratios[1]) / TIMES[-1],
            "x",
            most=LINEAR_TARGET,
            samples=[ratio / TIMES[-1] for ratio in ratios[1]],
        ),
    ]


def _peak_row(found: list[dict[str, float]]) -> dict[str, Any]:
    kernels, size = int(found[0]["kernels"]), found[0]["bytes"]
    peak = measurement.median([sample["peak_bytes"] for sample in found]) / 1e6
    work = (
        f"restore {kernels:,} kernels, {size / 1e6:,.0f} MB: peak memory above a bare interpreter"
    )
    return row(work, peak, "MB", most=PEAK_TARGET_MB, samples=found)


def multiply(one: Bundle, file: str, copies: int) -> None:
    """Save a bundle of every kernel, and of further copies under keys of their own whose files all
    differ.
    """
    from bundler import Bundle
    from bundler.format.bundle import MemoryBlobs
    from bundler.format.digest import digest_text, sha256
    from bundler.format.manifest import Content, Observed

    kernels, blobs = [], {}
    for number in range(copies):
        for kernel in one.kernels:
            hashed = _hash_of(kernel.key, number)
            artifacts = []
            for artifact in kernel.artifacts:
                data = one.read(artifact)
                if number:
                    # Of the same length, so that what the bundle knows of the file stays true; JSON
                    # may end in spaces.
                    data = data.replace(
                        _hash_of(kernel.key, 0).hex().encode(), hashed.hex().encode()
                    )
                    data += (
                        b" " * number
                        if artifact.kind == "json"
                        else f"\n// copy {number}\n".encode()
                    )
                blobs[sha256(data)] = data
                artifacts.append(
                    msgspec.structs.replace(
                        artifact, digest=digest_text(sha256(data)), size=len(data)
                    )
                )
            key = base64.b32encode(hashed).decode().rstrip("=")
            kernels.append(replace(kernel, key=key, artifacts=tuple(artifacts)))
    Bundle(Content.of(kernels), Observed(), MemoryBlobs(blobs)).save(file)


def _hash_of(key: str, number: int) -> bytes:
    own = base64.b32decode(key + "=" * (-len(key) % 8))
    return hashlib.sha256(own + bytes([number])).digest() if number else own


def measure(file: str, into: str) -> None:
    """Restore everything and print what it took."""
    before = peak_bytes()
    from bundler import restore

    started = time.perf_counter()
    report = restore(file, into)
    seconds = time.perf_counter() - started
    found = {"peak_bytes": peak_bytes() - before, "seconds": seconds, "bytes": report.bytes}
    print(json.dumps({**found, "kernels": len(report.restored)}))


def peak_bytes() -> int:
    """Return the most memory that this process ever had, in bytes."""
    # Not getrusage: its figure begins with the peak of the process that started this one.
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM: this needs Linux")


if __name__ == "__main__":
    if sys.argv[1] == "make":
        from bundler import pack

        multiply(pack(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    else:
        measure(sys.argv[2], sys.argv[3])
