# SPDX-License-Identifier: Apache-2.0
"""How much memory, and how much more time, a restore of more kernels takes.

Each restore runs in an interpreter of its own: the peak of a process never goes down again.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.shared import kernel_copies, programs
from tools.shared.measurement import median, ratios, row
from tools.shared.processes import answer, output

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
        made = str(work / f"{times}.tbundle")
        output(__name__, "--step", "make", str(cache), made, str(times), environment={})
    for _ in range(rounds):
        for times, found in samples.items():
            words = (str(work / f"{times}.tbundle"), str(work / "out"))
            found.append(answer(__name__, "--step", "measure", *words, environment={}))
            shutil.rmtree(work / "out")
    many = TIMES[-1]
    grown = {
        name: ratios((s[name] for s in samples[many]), (s[name] for s in samples[TIMES[0]]))
        for name in ("peak_bytes", "seconds")
    }
    peaks, each = grown["peak_bytes"], [ratio / many for ratio in grown["seconds"]]
    name = f"restore {many} times the kernels"
    return [
        *map(_peak_row, samples.values()),
        row(f"{name}: peak memory", median(peaks), "x", most=FLAT_TARGET, samples=peaks),
        row(f"{name}: time of each", median(each), "x", most=LINEAR_TARGET, samples=each),
    ]


def _peak_row(found: list[dict[str, float]]) -> dict[str, Any]:
    kernels, size = int(found[0]["kernels"]), found[0]["bytes"]
    peak = median(sample["peak_bytes"] for sample in found) / 1e6
    what = f"restore {kernels:,} kernels, {size / 1e6:,.0f} MB"
    work = f"{what}: peak memory above a bare interpreter"
    return row(work, peak, "MB", most=PEAK_TARGET_MB, samples=found)


def multiply(one: Bundle, file: str, copies: int) -> None:
    """Save a bundle of so many different copies of every kernel, the first of which is itself."""
    from bundler.format.digest import sha256

    blobs = {sha256(data): data for data in (one.read(a) for k in one.kernels for a in k.artifacts)}
    more = [
        kernel_copies.copy_of(one, kernel, number, blobs)
        for number in range(1, copies)
        for kernel in one.kernels
    ]
    kernel_copies.save([*one.kernels, *more], blobs, file)


def make(cache: str, file: str, copies: str) -> None:
    """Save a bundle with so many different copies of every kernel of a cache directory."""
    from bundler import pack

    multiply(pack(cache), file, int(copies))


def measure(file: str, into: str) -> dict[str, float]:
    """Restore everything; returns what it took."""
    before = peak_bytes()
    from bundler import restore

    started = time.perf_counter()
    report = restore(file, into)
    seconds = time.perf_counter() - started
    found = {"peak_bytes": peak_bytes() - before, "seconds": seconds, "bytes": report.bytes}
    return {**found, "kernels": len(report.restored)}


def peak_bytes() -> int:
    """Return the most memory that this process ever had, in bytes."""
    # Not getrusage: its figure begins with the peak of the process that started this one.
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM: this needs Linux")


if __name__ == "__main__":
    programs.run_step({"make": make, "measure": measure})
