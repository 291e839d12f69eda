# SPDX-License-Identifier: Apache-2.0
"""Measures torch.compile of a 6-layer transformer on a GPU: cold, with torch's mega-cache, and with
ours.

    python -m tools.gpu torch-compile [--phase default max-autotune] [--rounds 3] [--work DIR] [--results DIR]

Each sample is a new process with its own cache directory: `cold` (empty, once), `warm` (the
directory that the cold run made, in place), then, with that directory renamed away: `mega-cache`,
`moved` (a copy elsewhere, group files rewritten), `ours` and `ours-winners`
(bundler.integrations.inductor).  The cold run feeds all others.  Compiles are counted by Triton's
put_group and by a wrapper for ptxas, in the process and in torch's workers.  Each sample is a JSON
file in --work as soon as it is there: a run that was stopped goes on there.  The table has medians
beside targets; exit status 1 when one is missed.  The raw result goes to
docs/results/gpu-torch-compile.json.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tools.shared import measurement, programs
from tools.shared.processes import ROOT, command, python_path

VARIANTS = ("cold", "warm", "mega-cache", "moved", "ours", "ours-winners")
MODES = ("default", "max-autotune")
_Sample = dict[str, Any]
# Of the warm directory in default mode; seconds in max-autotune; times faster than the mega-cache
# there.
_MOST_OF_WARM, _MOST_S, _LEAST_FASTER = 1.10, 10.0, 3.0
# Of the mega-cache's bytes.
_MOST_BYTES = {"default": 1 / 5, "max-autotune": 1 / 10}


def main() -> int:
    """Take the samples that are missing, print the table, write the result."""
    parser = programs.parser(
        __doc__,
        rounds=(3, "samples of each variant but cold"),
        # named, to go on with
        work=(Path("/tmp/gpu-torch-compile"), "where samples and bundles are kept"),  # noqa: S108
        device=("cuda", "of the model"),
        small=(False, "a small model, to try this program without a GPU"),
        results=(measurement.RESULTS, "where the result goes"),
    )
    about = "torch.compile's modes"
    parser.add_argument("--phase", nargs="+", choices=MODES, default=[*MODES], help=about)
    options = parser.parse_args()
    for mode in options.phase:
        Phase(options, mode).run()
    return write(options.work / "samples", options.results)


class Phase:
    """The samples of one mode."""

    def __init__(self, options: argparse.Namespace, mode: str) -> None:
        self.options, self.mode = options, mode
        self.folder: Path = options.work / self.mode
        self.samples: Path = options.work / "samples"
        self.facts = measurement.facts()
        for folder in (self.folder, self.samples, options.work / "bin"):
            folder.mkdir(parents=True, exist_ok=True)

    # The directory that the cold run makes; it has this name only while a warm sample runs.
    @property
    def made(self) -> Path:
        """Where the cold run keeps its cache."""
        return self.folder / "made"

    @property
    def kept(self) -> Path:
        """Where that directory is renamed to afterwards."""
        return self.folder / "renamed-away"

    def run(self) -> None:
        """Take what samples are missing."""
        rounds = range(self.options.rounds)
        wanted = [(variant, number) for number in rounds for variant in VARIANTS[1:]]
        for variant, number in [("cold", 0), *wanted]:
            path = self.samples / f"{self.mode}.{variant}.{number}.json"
            if not path.exists():
                self._sample(variant, number, path)

    def _sample(self, variant: str, number: int, path: Path) -> None:
        cache = self._cache(variant, number)
        sample = {
            "mode": self.mode,
            "variant": variant,
            "round": number,
            **self._process(cache, variant, number),
        }
        sample |= {"cache": contents(cache), **self.facts}
        if variant == "cold" and "error" not in sample:
            os.rename(cache, self.kept)
        else:
            shutil.rmtree(cache, ignore_errors=True)
        path.with_suffix(".tmp").write_text(json.dumps(sample, indent=1) + "\n")
        path.with_suffix(".tmp").rename(path)
        print(line(sample), flush=True)

    def _cache(self, variant: str, number: int) -> Path:
        """Return the cache directory for a sample, prepared."""
        if variant in ("cold", "warm"):
            cache = self.made
        else:
            cache = self.folder / f"{variant}-{number}"
            # The variants must not find the directory of the cold run where it was.
            shutil.rmtree(self.made, ignore_errors=True)
        shutil.rmtree(cache, ignore_errors=True)
        if variant in ("warm", "moved"):
            shutil.copytree(self.kept, cache, symlinks=True)
        else:
            cache.mkdir()
        if variant == "moved":
            rewrite_groups(cache, str(self.made), str(cache))
        return cache

    def _process(self, cache: Path, variant: str, number: int) -> dict[str, Any]:
        log = self.folder / f"compiles-{variant}-{number}"
        ptxas = self.folder / f"ptxas-{variant}-{number}"
        for path in (log, ptxas):
            path.write_bytes(b"")
        arguments = command(
            "tools.gpu.torch_model", "--mode", self.mode, "--device", self.options.device
        )
        arguments += ["--small"] if self.options.small else []
        arguments += {
            "mega-cache": ["--load-torch", str(self.folder / "mega-cache.bin")],
            "ours": ["--load-ours", str(self.folder / "ours.tbundle")],
            "ours-winners": ["--load-ours", str(self.folder / "ours-winners.tbundle")],
        }.get(variant, [])
        arguments += ["--save", str(self.folder)] if variant == "cold" else []
        started = time.monotonic()
        process = subprocess.Popen(
            arguments,
            env=self._environment(cache, log, ptxas),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        output, errors = process.communicate()
        process_s = time.monotonic() - started
        if process.returncode:
            return {"error": errors[-4000:], "process_s": process_s}
        parent = [
            line for line in log.read_text().splitlines() if line.split()[0] == str(process.pid)
        ]
        return {
            **json.loads(output.splitlines()[-1]),
            "process_s": process_s,
            "ptxas": len(ptxas.read_text().splitlines()),
            "compiles": len(log.read_text().splitlines()),
            "compiles_in_parent": len(parent),
            "stderr": errors[-2000:],
        }

    def _environment(self, cache: Path, log: Path, ptxas: Path) -> dict[str, str]:
        clean = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("TRITON_", "TORCHINDUCTOR_"))
        }
        home = self.folder / "home"
        shutil.rmtree(home, ignore_errors=True)
        return {
            **clean,
            "TORCHINDUCTOR_CACHE_DIR": str(cache),
            "TRITON_HOME": str(home),
            "PYTHONPATH": python_path(),
            "TRITON_CACHE_MANAGER": "tools.gpu.torch_counting:CountingCacheManager",
            "GPU_TORCH_COMPILES": str(log),
            "GPU_TORCH_PTXAS": str(ptxas),
            **counting_ptxas(self.options.work / "bin"),
        }


def counting_ptxas(folder: Path) -> dict[str, str]:
    """Make a wrapper that notes each assembly and runs the real ptxas, the one that torch would
    choose.
    """
    real = next((path for path in ptxas_paths() if path.exists()), None)
    if real is None:
        return {}
    wrapper = folder / "ptxas"
    wrapper.write_text(
        '#!/bin/sh\nif [ "$1" != --version ]; then echo $PPID >> "$GPU_TORCH_PTXAS"; fi\nexec'
        f' {shlex.quote(str(real))} "$@"\n'
    )
    wrapper.chmod(0o755)
    return {"TRITON_PTXAS_PATH": str(wrapper)}


def ptxas_paths() -> tuple[Path, ...]:
    """Return where torch, and then Triton, would look for ptxas."""
    found = (importlib.util.find_spec(name) for name in ("torch", "triton"))
    folders = [
        Path(spec.origin).parent for spec in found if spec is not None and spec.origin is not None
    ]
    inside = ("bin", "backends/nvidia/bin")
    return tuple(folder / where / "ptxas" for folder in folders for where in inside)


def rewrite_groups(cache: Path, old: str, new: str) -> None:
    """Do what somebody would who copies a cache directory: put the new path into Triton's group
    files.
    """
    for path in cache.rglob("__grp__*.json"):
        path.write_text(path.read_text().replace(old, new))


def contents(cache: Path) -> dict[str, int]:
    """Return what a cache directory holds."""
    files = [path for path in cache.rglob("*") if path.is_file()]
    return {
        "files": len(files),
        "bytes": sum(path.stat().st_size for path in files),
        "cubins": sum(path.suffix == ".cubin" for path in files),
        "best_configs": sum(path.suffix == ".best_config" for path in files),
    }


def line(sample: _Sample) -> str:
    """Return one sample as a line."""
    name = f"{sample['mode']:<13} {sample['variant']:<13} {sample['round']}"
    if "error" in sample:
        return f"{name}  FAILED: {(sample['error'].strip().splitlines() or ['no output'])[-1]}"
    return (
        f"{name}  load {sample['load_s']:6.2f} s  first {sample['first_s']:7.2f} s "
        f" {sample['compiles']} compiles, {sample['compiles_in_parent']} of them in the process "
        f" ptxas {sample['ptxas']}  loss {sample['losses'][-1]}"
    )


def write(folder: Path, results: Path) -> int:
    """Print the table of the samples in a folder, and write the result; 1 when a target is
    missed.
    """
    samples = [json.loads(path.read_text()) for path in sorted(folder.glob("*.*.*.json"))]
    rows = [row for mode in MODES for row in _rows(samples, mode)]
    facts = {key: samples[0][key] for key in ("machine", "versions", "commit")} if samples else {}
    result = {**facts, "rows": rows, "samples": samples}
    return 1 if measurement.report("gpu-torch-compile", result, results) else 0


def _rows(samples: list[_Sample], mode: str) -> Iterable[dict[str, Any]]:
    by_variant = {variant: _good(samples, mode, variant) for variant in VARIANTS}
    failed = [sample for sample in samples if sample["mode"] == mode and "error" in sample]
    yield measurement.row(f"{mode}: samples that failed", len(failed), "", most=0)
    for variant, found in by_variant.items():
        if found:
            yield measurement.row(
                f"{mode}, {variant}: load and first iteration",
                _median(found, "total_s"),
                "s",
                samples={"total_s": [sample["total_s"] for sample in found]},
            )
            yield measurement.row(
                f"{mode}, {variant}: Triton compiles, at most",
                _most(found, "compiles"),
                "",
                most=0 if variant.startswith("ours") else None,
            )
            yield measurement.row(
                f"{mode}, {variant}: ptxas calls, at most",
                _most(found, "ptxas"),
                "",
                most=0 if variant.startswith("ours") else None,
            )
    yield from _compared(by_variant, mode)


def _compared(by_variant: dict[str, list[_Sample]], mode: str) -> Iterable[dict[str, Any]]:
    ours, warm, mega, cold = (by_variant[name] for name in ("ours", "warm", "mega-cache", "cold"))
    if ours and warm:
        ratio = _median(ours, "total_s") / _median(warm, "total_s")
        yield measurement.row(
            f"{mode}: ours, of the warm directory in place",
            ratio,
            "x",
            most=_MOST_OF_WARM if mode == "default" else None,
        )
        different = sum(sample["losses"] != warm[0]["losses"] for sample in ours)
        yield measurement.row(
            f"{mode}: samples of ours whose losses differ from the warm run's",
            different,
            "",
            most=0,
        )
    if mode == "max-autotune" and ours:
        yield measurement.row(
            f"{mode}: ours, load and first iteration", _median(ours, "total_s"), "s", most=_MOST_S
        )
    if mode == "max-autotune" and ours and mega:
        faster = _median(mega, "total_s") / _median(ours, "total_s")
        yield measurement.row(
            f"{mode}: ours, times faster than the mega-cache", faster, "x", least=_LEAST_FASTER
        )
    saved = cold[0]["saved"] if cold else None
    if saved and "mega-cache" in saved:
        for name in ("ours", "ours-winners"):
            share = saved[name]["bytes"] / saved["mega-cache"]["bytes"]
            peer = (
                f"{saved[name]['bytes'] / 1e6:.3g} MB of"
                f" {saved['mega-cache']['bytes'] / 1e6:.3g} MB"
            )
            yield measurement.row(
                f"{mode}, {name}: bundle, of the mega-cache",
                share,
                "x",
                most=_MOST_BYTES[mode],
                peer=peer,
            )


def _good(samples: list[_Sample], mode: str, variant: str) -> list[_Sample]:
    return [s for s in samples if (s["mode"], s["variant"]) == (mode, variant) and "error" not in s]


def _median(found: list[_Sample], name: str) -> float:
    return measurement.median(float(sample[name]) for sample in found)


def _most(found: list[_Sample], name: str) -> float:
    return max(float(sample[name]) for sample in found)
