# SPDX-License-Identifier: Apache-2.0
"""Measures the compile service beside serial Triton and the pool of torch's compiler, and a second
run with a store.

    python -m tools.bench compile [--check] [--kernels N] [--rounds N] [--quick] [--results DIR]

N real kernels are compiled for sm_90 into an empty directory, in memory where there is one, by each
side in turn, each in a process of its own; each ratio is the median over the rounds.  All samples
go to docs/results/bench-compile.json.  `--check` exits 1 when a target is missed, and names it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tools.bench import compile_sides
from tools.bench.compile_sides import WORKERS
from tools.shared import measurement
from tools.shared.measurement import median, row, shown
from tools.shared.processes import output

KERNELS, ROUNDS = 300, 3
QUICK_KERNELS, QUICK_ROUNDS = 6, 1

Rounds = list[dict[str, dict[str, Any]]]


def main() -> int:
    """Measure, print a table, write the samples."""
    options = arguments()
    kernels = options.kernels or (QUICK_KERNELS if options.quick else KERNELS)
    count = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    rounds = [measure(kernels) for _ in range(count)]
    result = {
        "kernels": kernels,
        "rounds": count,
        "workers": WORKERS,
        "samples": rounds,
        "stages": {
            stage: median([one["ours"]["stages"][stage] for one in rounds])
            for stage in rounds[0]["ours"]["stages"]
        },
        "rows": rows(kernels, rounds),
    }
    missed = finish(result, options.results)
    for line in missed:
        print(
            f"missed: {line['work']}: {shown(line['figure'], line['unit'])},"
            f" {measurement.target(line)}"
        )
    return 1 if options.check and missed else 0


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="exit 1 when a target is missed")
    parser.add_argument("--kernels", type=int, metavar="N", help=f"how many kernels ({KERNELS})")
    parser.add_argument("--rounds", type=int, metavar="N", help=f"how many rounds ({ROUNDS})")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="few kernels, one round: shows that it runs, not how fast",
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=measurement.RESULTS,
        metavar="DIR",
        help="where the samples go",
    )
    return parser.parse_args()


def measure(kernels: int) -> dict[str, dict[str, Any]]:
    """Run each side once, each into an empty directory."""
    with tempfile.TemporaryDirectory(prefix="bench.", dir=measurement.fast_directory()) as name:
        work = Path(name)
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
    figures: dict[str, Any] = json.loads(
        output(
            compile_sides.__name__,
            side,
            str(kernels),
            str(work / side),
            *more,
            environment=environment,
            timeout_s=3600,
        ).splitlines()[-1]
    )
    figures["process_s"] = time.perf_counter() - began
    print(f"{side}: {figures['process_s']:.2f} s", file=sys.stderr, flush=True)
    return figures


def rows(kernels: int, rounds: Rounds) -> list[dict[str, Any]]:
    """Return the figures, the medians of the rounds, and their targets."""

    def samples(side: str, step: str) -> list[float]:
        return [one[side][step] for one in rounds]

    def ratio(
        work: str, theirs: list[float], mine: list[float], peer: str, least: float | None = None
    ) -> dict[str, Any]:
        ratios = [one / other for one, other in zip(theirs, mine, strict=True)]
        return row(
            work,
            median(ratios),
            "x",
            least=least,
            peer=f"{peer}, {shown(median(theirs), 's')}",
            samples={"ours_s": mine, "peer_s": theirs},
            ours_s=median(mine),
            peer_s=median(theirs),
        )

    def plain(
        work: str, side: str, step: str, unit: str = "s", most: float | None = None, peer: str = ""
    ) -> dict[str, Any]:
        scale = 1e3 if unit == "ms" else 1.0
        found = [scale * one for one in samples(side, step)]
        return row(work, median(found), unit, most=most, peer=peer, samples=found)

    compiled = f"{kernels} kernels, {WORKERS} warm workers"
    torch_ms = shown(1e3 * median(samples("torch", "overhead_s")), "ms")
    return [
        ratio(
            f"{compiled}: how much faster",
            samples("serial", "compile_s"),
            samples("ours", "compile_s"),
            "Triton, one after the other, warm",
            least=1.8,
        ),
        ratio(
            f"{compiled}: how much faster than torch's pool",
            samples("torch", "compile_s"),
            samples("ours", "compile_s"),
            f"torch's pool, {WORKERS} warm workers",
        ),
        ratio(
            f"{kernels} kernels, the whole process: how much faster",
            samples("serial", "process_s"),
            samples("ours", "whole_s"),
            "Triton's whole process",
        ),
        plain(
            "a job: what it costs beside the compile",
            "ours",
            "overhead_s",
            "ms",
            most=3.0,
            peer=f"torch's pool, {torch_ms}",
        ),
        plain(
            "start of a warm pool, Triton imported and hashed",
            "ours",
            "start_s",
            peer=f"torch's pool, {shown(median(samples('torch', 'start_s')), 's')}",
        ),
        plain("a quiesced pool: awake again", "ours", "wake_s", "ms"),
        ratio(
            f"{kernels} kernels from a store, warm service: how much faster",
            samples("serial", "compile_s"),
            samples("ours", "again_s"),
            "Triton, one after the other, warm",
            least=100.0,
        ),
        ratio(
            f"{kernels} kernels from a store, the whole process: how much faster",
            samples("serial", "process_s"),
            samples("again", "process_s"),
            "Triton's whole process",
            least=10.0,
        ),
    ]


def finish(result: dict[str, Any], directory: Path) -> list[dict[str, Any]]:
    """Print the rows, write the result, and return the rows that miss their target."""
    for line in result["rows"]:
        verdict = "" if not measurement.target(line) else "ok" if line["ok"] else "MISSED"
        print(
            f"{line['work']:<80} {shown(line['figure'], line['unit']):>10} "
            f" {measurement.target(line):<16} {verdict}"
        )
    print(f"written to {measurement.save('bench-compile', result, directory)}")
    return [line for line in result["rows"] if not line["ok"]]
