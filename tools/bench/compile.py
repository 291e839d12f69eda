# SPDX-License-Identifier: Apache-2.0
"""Measures the compile service beside serial Triton and the pool of torch's compiler, and a second
run with a store.

    python -m tools.bench compile [--check] [--kernels N] [--rounds N] [--quick] [--results DIR]

N real kernels are compiled for sm_90 into an empty directory, in memory where there is one, by each
side in turn, each in a process of its own; each ratio is the median over the rounds.  All samples
go to docs/results/bench-compile.json.  `--check` exits 1 when a target is missed, and names it.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from tools.bench import compile_sides
from tools.bench.compile_sides import WORKERS
from tools.bench.sides import arguments, concluded, working_folder
from tools.shared import measurement
from tools.shared.measurement import median, medians, ratios, row, shown
from tools.shared.processes import answer

KERNELS, ROUNDS = (300, 6), (3, 1)
_JOB = "a job: what it costs beside the compile"

Rounds = list[dict[str, dict[str, Any]]]


def main() -> int:
    """Measure, print a table, write the samples."""
    options = arguments(__doc__, KERNELS, ROUNDS)
    rounds = [measure(options.kernels) for _ in range(options.rounds)]
    result = {
        "kernels": options.kernels,
        "rounds": options.rounds,
        "workers": WORKERS,
        "samples": rounds,
        "stages": medians([one["ours"]["stages"] for one in rounds]),
        "rows": rows(options.kernels, rounds),
    }
    return concluded("bench-compile", result, options)


def measure(kernels: int) -> dict[str, dict[str, Any]]:
    """Run each side once, each into an empty directory."""
    with working_folder(measurement.fast_directory()) as work:
        places = (f"file://{work / 'store'}", str(work / "plan"))
        return {
            "serial": run("serial", kernels, work),
            "ours": run("ours", kernels, work, *places),
            "torch": run("torch", kernels, work),
            "again": run("again", kernels, work, *places),
        }


def run(side: str, kernels: int, work: Path, *more: str) -> dict[str, Any]:
    """Run one side; its wall time, interpreter and all, is `process_s`."""
    began = time.perf_counter()
    environment = {
        "TMPDIR": str(work),
        "TORCHINDUCTOR_CACHE_DIR": str(work / "inductor"),
        "PYTHONWARNINGS": "ignore",
    }
    words = (side, str(kernels), str(work / side), *more)
    figures: dict[str, Any] = answer(
        compile_sides.__name__, *words, environment=environment, timeout_s=3600
    )
    figures["process_s"] = time.perf_counter() - began
    print(f"{side}: {figures['process_s']:.2f} s", file=sys.stderr, flush=True)
    return figures


def rows(kernels: int, rounds: Rounds) -> list[dict[str, Any]]:
    """Return the figures, the medians of the rounds, and their targets."""

    def samples(side: str, step: str) -> list[float]:
        return [one[side][step] for one in rounds]

    def ratio(
        work: str, theirs: str, mine: str, peer: str, least: float | None = None
    ) -> dict[str, Any]:
        # Each is the name of a side and of a step.
        theirs_s, mine_s = (samples(*each.split(" ")) for each in (theirs, mine))
        ours_s, peer_s = median(mine_s), median(theirs_s)
        peer = f"{peer}, {shown(peer_s, 's')}"
        figure = median(ratios(theirs_s, mine_s))
        found = {"ours_s": mine_s, "peer_s": theirs_s}
        times = {"ours_s": ours_s, "peer_s": peer_s}
        return row(work, figure, "x", least=least, peer=peer, samples=found, **times)

    def plain(work: str, step: str, unit: str, peer: str = "", most: float | None = None) -> Any:
        scale = 1e3 if unit == "ms" else 1.0
        found = [scale * one for one in samples("ours", step)]
        return row(work, median(found), unit, most=most, peer=peer, samples=found)

    warm, every = f"{kernels} kernels, {WORKERS} warm workers", f"{kernels} kernels"
    torch_ms = shown(1e3 * median(samples("torch", "overhead_s")), "ms")
    torch_s = shown(median(samples("torch", "start_s")), "s")
    triton, whole = "Triton, one after the other, warm", "Triton's whole process"
    pool, stored = f"torch's pool, {WORKERS} warm workers", f"{every} from a store"
    faster, start = ": how much faster", "start of a warm pool, Triton imported and hashed"
    return [
        ratio(f"{warm}{faster}", "serial compile_s", "ours compile_s", triton, 1.8),
        ratio(f"{warm}{faster} than torch's pool", "torch compile_s", "ours compile_s", pool),
        ratio(f"{every}, the whole process{faster}", "serial process_s", "ours whole_s", whole),
        plain(_JOB, "overhead_s", "ms", f"torch's pool, {torch_ms}", 3.0),
        plain(start, "start_s", "s", f"torch's pool, {torch_s}"),
        plain("a quiesced pool: awake again", "wake_s", "ms"),
        ratio(f"{stored}, warm service{faster}", "serial compile_s", "ours again_s", triton, 100.0),
        ratio(
            f"{stored}, the whole process{faster}",
            "serial process_s",
            "again process_s",
            whole,
            10.0,
        ),
    ]
