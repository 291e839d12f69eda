# SPDX-License-Identifier: Apache-2.0
"""The table of `python -m tools.gpu torch-compile`: medians of its samples beside the targets, and the result file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tools.shared import measurement

Sample = dict[str, Any]
# Of the warm directory in default mode; seconds in max-autotune; times faster than the mega-cache there.
MOST_OF_WARM, MOST_S, LEAST_FASTER = 1.10, 10.0, 3.0
# Of the mega-cache's bytes.
MOST_BYTES = {"default": 1 / 5, "max-autotune": 1 / 10}


def read(folders: Iterable[Path]) -> list[Sample]:
    """Return the samples in folders, by mode, variant and round."""
    return [
        json.loads(path.read_text())
        for folder in folders
        for path in sorted(folder.glob("*.*.*.json"))
    ]


def line(sample: Sample) -> str:
    """Return one sample as a line."""
    name = f"{sample['mode']:<13} {sample['variant']:<13} {sample['round']}"
    if "error" in sample:
        return f"{name}  FAILED: {sample['error'].strip().splitlines()[-1] if sample['error'].strip() else 'no output'}"
    return (
        f"{name}  load {sample['load_s']:6.2f} s  first {sample['first_s']:7.2f} s  compiles {sample['compiles_in_parent']:4d} "
        f"+ {sample['compiles'] - sample['compiles_in_parent']:4d}  ptxas {sample['ptxas']:4d}  loss {sample['losses'][-1]}"
    )


def show(folders: Iterable[Path]) -> None:
    """Print the medians of what is there."""
    samples = read(folders)
    for mode, variant in sorted({(sample["mode"], sample["variant"]) for sample in samples}):
        found = _good(samples, mode, variant)
        if found:
            print(f"{mode:<13} {variant:<13} n={len(found)}  load {_median(found, 'load_s'):6.2f} s  "
                  f"first {_median(found, 'first_s'):7.2f} s  compiles at most {_most(found, 'compiles')}  "
                  f"ptxas at most {_most(found, 'ptxas')}")  # fmt: skip


def write(folders: Iterable[Path], results: Path) -> int:
    """Write the result with its rows; 1 when a target is missed."""
    samples = read(folders)
    rows = [row for mode in MOST_BYTES for row in _rows(samples, mode)]
    for row in rows:
        print(f"{'ok  ' if row['ok'] else 'MISS'}  {row['work']:<66} {measurement.shown(row['figure'], row['unit']):>12}  "
              f"{measurement.target(row)}  {row['peer']}")  # fmt: skip
    facts = {key: samples[0][key] for key in ("machine", "versions", "commit")} if samples else {}
    path = results / "gpu-torch-compile.json"
    results.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({**facts, "rows": rows, "samples": samples}, indent=1, sort_keys=True) + "\n"
    )
    print(f"\nwritten to {path}")
    return 0 if all(row["ok"] for row in rows) else 1


def _rows(samples: list[Sample], mode: str) -> Iterable[dict[str, Any]]:
    by_variant = {
        v: _good(samples, mode, v)
        for v in ("cold", "warm", "mega-cache", "moved", "ours", "ours-winners")
    }
    failed = [sample for sample in samples if sample["mode"] == mode and "error" in sample]
    yield measurement.row(f"{mode}: samples that failed", len(failed), "", most=0)
    for variant, found in by_variant.items():
        if found:
            yield measurement.row(f"{mode}, {variant}: load and first iteration", _median(found, "total_s"), "s",
                                samples={"total_s": [sample["total_s"] for sample in found]})  # fmt: skip
            yield measurement.row(f"{mode}, {variant}: Triton compiles, at most", _most(found, "compiles"), "",
                                most=0 if variant.startswith("ours") else None)  # fmt: skip
            yield measurement.row(f"{mode}, {variant}: ptxas calls, at most", _most(found, "ptxas"), "",
                                most=0 if variant.startswith("ours") else None)  # fmt: skip
    yield from _compared(by_variant, mode)


def _compared(by_variant: dict[str, list[Sample]], mode: str) -> Iterable[dict[str, Any]]:
    ours, warm, mega, cold = (by_variant[name] for name in ("ours", "warm", "mega-cache", "cold"))
    if ours and warm:
        ratio = _median(ours, "total_s") / _median(warm, "total_s")
        yield measurement.row(f"{mode}: ours, of the warm directory in place", ratio, "x",
                            most=MOST_OF_WARM if mode == "default" else None)  # fmt: skip
        different = sum(sample["losses"] != warm[0]["losses"] for sample in ours)
        yield measurement.row(
            f"{mode}: samples of ours whose losses differ from the warm run's",
            different,
            "",
            most=0,
        )
    if mode == "max-autotune" and ours:
        yield measurement.row(
            f"{mode}: ours, load and first iteration", _median(ours, "total_s"), "s", most=MOST_S
        )
    if mode == "max-autotune" and ours and mega:
        faster = _median(mega, "total_s") / _median(ours, "total_s")
        yield measurement.row(
            f"{mode}: ours, times faster than the mega-cache", faster, "x", least=LEAST_FASTER
        )
    saved = cold[0]["saved"] if cold else None
    if saved and "mega-cache" in saved:
        for name in ("ours", "ours-winners"):
            share = saved[name]["bytes"] / saved["mega-cache"]["bytes"]
            peer = f"{saved[name]['bytes'] / 1e6:.3g} MB of {saved['mega-cache']['bytes'] / 1e6:.3g} MB"
            yield measurement.row(
                f"{mode}, {name}: bundle, of the mega-cache",
                share,
                "x",
                most=MOST_BYTES[mode],
                peer=peer,
            )


def _good(samples: list[Sample], mode: str, variant: str) -> list[Sample]:
    return [s for s in samples if (s["mode"], s["variant"]) == (mode, variant) and "error" not in s]


def _over(found: list[Sample], name: str, of: Callable[[list[float]], float]) -> float:
    return of([float(sample[name]) for sample in found])


def _median(found: list[Sample], name: str) -> float:
    return _over(found, name, measurement.median)


def _most(found: list[Sample], name: str) -> float:
    return _over(found, name, max)
