# SPDX-License-Identifier: Apache-2.0
"""Measures what recording and importing cost, beside the same work without us.

    python tools/bench_bundle.py [--rounds N] [--check] [--results DIR]

Pairs with and without us are interleaved and compared by medians, since timings drift.  The raw samples go to
docs/results/bench-basics.json; `--check` exits 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent)]

import measuring  # noqa: E402  # the programs here find each other by path

sys.path[:0] = [str(measuring.ROOT), str(measuring.ROOT / "examples")]

IMPORT_TARGET_MS = 60.0
RECORDING_TARGET_US = 200.0
ROUNDS = 15


def main() -> int:
    """Measure, print a table, write the samples."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="pairs a measurement")
    parser.add_argument("--check", action="store_true", help="exit 1 when a target is missed")
    parser.add_argument("--results", type=Path, default=measuring.RESULTS, help="where the samples go")
    options = parser.parse_args()
    rows = [import_cost(options.rounds), *recording_cost(options.rounds)]
    for row in rows:
        verdict = "ok" if row["ok"] else "MISSED"
        print(f"{row['work']:<48} {row['figure']:>9.1f} {row['unit']}  (target {row['target']:.0f})  {verdict}")
    path = measuring.save("bench-basics", {"rows": rows}, options.results)
    print(f"written to {path}")
    return 1 if options.check and not all(row["ok"] for row in rows) else 0


def import_cost(rounds: int) -> dict[str, Any]:
    """Time `import bundler` in fresh interpreters against an interpreter that imports nothing."""
    environment = {**os.environ, "PYTHONPATH": str(measuring.ROOT)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # users have compiled bytecode
    with tempfile.TemporaryDirectory(prefix="bench.") as folder:
        environment["PYTHONPYCACHEPREFIX"] = folder
        samples: dict[str, list[float]] = {"pass": [], "import bundler": []}
        for number in range(rounds + 1):
            for code, times in samples.items():
                started = time.perf_counter()
                subprocess.run([sys.executable, "-c", code], env=environment, check=True)
                if number:  # the first pair fills the bytecode cache
                    times.append((time.perf_counter() - started) * 1e3)
    figure = measuring.median([b - a for a, b in zip(samples["pass"], samples["import bundler"], strict=True)])
    return _row("import bundler, added to interpreter start", figure, "ms", IMPORT_TARGET_MS, samples)


def recording_cost(rounds: int) -> list[dict[str, Any]]:
    """Time cache hits of Triton with and without a recording, and the collect that follows."""
    with tempfile.TemporaryDirectory(prefix="bench.", dir=_fast_directory()) as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        import kernels

        import bundler

        targets = list(kernels.DEFAULT_TARGETS)
        count = len(kernels.compile_all(targets))
        samples: dict[str, list[float]] = {"without": [], "with": []}
        for _ in range(rounds):
            samples["without"].append(_timed(kernels.compile_all, targets) / count * 1e6)
            with bundler.recording():
                samples["with"].append(_timed(kernels.compile_all, targets) / count * 1e6)
    figure = measuring.median([b - a for a, b in zip(samples["without"], samples["with"], strict=True)])
    return [_row("recording, added to each compile call (here: a hit)", figure, "us", RECORDING_TARGET_US, samples)]


def _timed(work: Any, *arguments: Any) -> float:
    started = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - started


def _row(work: str, figure: float, unit: str, target: float, samples: dict[str, list[float]]) -> dict[str, Any]:
    return {"work": work, "figure": figure, "unit": unit, "target": target, "ok": figure <= target, "samples": samples}


def _fast_directory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108  # tmpfs, made private by tempfile


if __name__ == "__main__":
    sys.exit(main())
