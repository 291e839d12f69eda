# SPDX-License-Identifier: Apache-2.0
"""Checks that what was captured without a GPU is what a process on a GPU asks for, and prints a
table.

    python -m tools.gpu capture [--only liger,fla,varlen,wide] [--results DIR] [--check]

Two processes, one after another, run `library_calls.py`: the first under `triton-bundler capture`,
without a GPU; the second on the GPU, from an empty cache directory into which the captured bundle
was restored.  Triton's listener counts the keys that the second asks for, and whether each was
there.  Of each miss the nearest captured kernel and the parts of the key that differ are named.
The libraries (fla-core with einops, liger-kernel) come from PYTHONPATH; one that is not there is
left out, and named. With `--check` the exit status is 1 when fewer than 95 % of the keys were
captured.  The result goes to docs/results/gpu-capture.json.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.gpu.steps import bundler_command
from tools.shared import measurement, programs
from tools.shared.processes import ROOT, answer

if TYPE_CHECKING:
    from bundler.integrations.key_comparison import KeyedKernel

WORKLOAD = ROOT / "tools" / "gpu" / "library_calls.py"
LIBRARIES = ("torch", "triton", "fla-core", "liger-kernel", "einops")
# Of the keys that are asked for, so many must have been captured.
LEAST_PERCENT = 95.0
_TIMEOUT_S = 3600
_DIFFERS = "differs from the nearest captured"
_TOLD = ("target", "device", "launches", "functions", "guesses", "unanswered", "failures")


def main() -> int:
    """Capture, run on the GPU, compare."""
    options = programs.arguments(
        __doc__,
        only=("liger,fla,varlen", "groups of operators: liger, fla, varlen, wide"),
        keep=(Path, "directory that keeps the captured bundle, and has it used again"),
        results=(measurement.RESULTS, "where gpu-capture.json goes"),
        check=(False, f"exit status 1 below {LEAST_PERCENT} %%"),
    )
    with tempfile.TemporaryDirectory(prefix="gpu-capture.") as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        result = compare(folder, options.only)
    for check, found in _lines(result):
        print(f"{check:<40}  {found}")
    print(f"\nwritten to {measurement.save('gpu-capture', result, options.results)}")
    return 1 if options.check and result["percent"] < LEAST_PERCENT else 0


def compare(folder: Path, only: str) -> dict[str, Any]:
    """Run both processes; returns the result."""
    captured = _captured(folder, only)
    asked = _asked(folder, only)
    keys = {item["key"]: item for item in asked["asked"]}
    hits = sum(item["hit"] for item in keys.values())
    return {
        "libraries": {name: measurement.version_of(name) for name in LIBRARIES},
        "python": sys.version.split()[0],
        "only": only,
        "captured": captured,
        "device": asked["device"],
        "asked": len(keys),
        "hits": hits,
        "percent": round(100 * hits / len(keys), 2) if keys else 0.0,
        "restored": asked["restored"],
        "first_seconds": asked["seconds"],
        "kernels_asked": dict(sorted(Counter(item["name"] for item in keys.values()).items())),
        "misses": asked["misses"],
        "operators": asked["operators"],
    }


def _captured(folder: Path, only: str) -> dict[str, Any]:
    """Capture without a GPU, unless the folder has the bundle already; returns what the command
    reported.
    """
    bundle, report = folder / "captured.tbundle", folder / "capture.json"
    if not (bundle.is_file() and report.is_file()):
        started = time.perf_counter()
        operators = folder / "captured-operators.json"
        program = (sys.executable, WORKLOAD, "--only", only, "--seen", operators)
        words = ("-o", bundle, "--target", "cuda:90", "--json", "--", *program)
        done = bundler_command(
            "capture", *words, stdout=subprocess.PIPE, check=False, timeout=_TIMEOUT_S
        )
        if not bundle.is_file():
            raise SystemExit(
                "nothing was captured; the command ended with"
                f" {done.returncode}:\n{done.stdout[-4000:]}"
            )
        said = json.loads(done.stdout)
        said["seconds"] = time.perf_counter() - started
        report.write_text(json.dumps(said))
    said = json.loads(report.read_text())
    one, seen = said["captures"][0], folder / "captured-operators.json"
    return {
        "kernels": said["counts"]["kernels"],
        "seconds": round(said["seconds"], 1),
        "size_bytes": said["size_bytes"],
        "status": said["status"],
        **{name: one[name] for name in _TOLD},
        "operators": json.loads(seen.read_text()),
    }


def _asked(folder: Path, only: str) -> dict[str, Any]:
    """Run the workload really, in a fresh process with a cache directory that has the captured
    kernels alone.
    """
    with tempfile.TemporaryDirectory(prefix="gpu-capture-cache.") as cache:
        words = ("tools.gpu.capture", str(folder), only)
        variables = {"TRITON_CACHE_DIR": cache}
        found: dict[str, Any] = answer(*words, environment=variables, timeout_s=_TIMEOUT_S)
    return found


def run_really(folder: Path, only: str) -> dict[str, Any]:
    """Restore, run the workload on the GPU, and return which keys were asked for."""
    import torch
    from triton import knobs

    import bundler
    from bundler.integrations.key_comparison import keyed
    from bundler.toolchain.events import kernel_key
    from tools.gpu import library_calls

    asked: list[dict[str, Any]] = []
    captured = bundler.Bundle.load(folder / "captured.tbundle")
    report = bundler.restore(captured)

    def hear(*, src: Any, metadata: dict[str, Any], cache_hit: bool, **_: Any) -> None:
        asked.append(
            {"key": kernel_key(metadata["hash"]), "name": src.name, "hit": bool(cache_hit)}
        )

    knobs.compilation.listener = hear
    started = time.perf_counter()
    operators = folder / "asked-operators.json"
    with bundler.recording() as recording:
        library_calls.main(["--only", only, "--seen", str(operators)])
    seconds = time.perf_counter() - started
    with captured, recording.collect("launch") as recorded:
        missed = {item["key"] for item in asked if not item["hit"]}
        known = [*keyed(captured.kernels)]
        misses = [
            _explained(kernel, known) for kernel in keyed(recorded.kernels) if kernel.key in missed
        ]
    return {
        "device": torch.cuda.get_device_name(0),
        "asked": asked,
        "restored": len(report.restored),
        "seconds": round(seconds, 1),
        "misses": misses,
        "operators": json.loads(operators.read_text()),
    }


def _explained(kernel: KeyedKernel, captured: list[KeyedKernel]) -> dict[str, Any]:
    """Say in what a key that was not captured differs from that of the nearest kernel of the same
    function that was.
    """
    from bundler.integrations.key_comparison import nearest

    found = nearest(kernel, captured)
    return {
        "key": kernel.key,
        "name": kernel.name,
        _DIFFERS: [str(difference) for difference in found[1]] if found is not None else None,
    }


def _lines(result: dict[str, Any]) -> list[tuple[str, str]]:
    captured, operators = result["captured"], result["operators"]
    left_out = {name: said for name, said in operators.items() if said != "fine"}
    kernels = "{kernels} kernels of {functions} functions, {launches} launches, {seconds} s"
    called = f"{len(operators) - len(left_out)} of {len(operators)}"
    return [
        ("captured without a GPU", kernels.format_map(captured)),
        ("lines that depend on data", str(len(captured["guesses"]))),
        ("not compiled", str(len(captured["failures"]))),
        ("asked for on " + result["device"], f"{result['asked']} keys"),
        ("of these captured", f"{result['hits']} ({result['percent']} %)"),
        ("operators called", called),
        *((f"left out: {name}", said[:100]) for name, said in left_out.items()),
        *((f"miss: {miss['name']}", str(miss[_DIFFERS])[:200]) for miss in result["misses"]),
    ]


if __name__ == "__main__":
    print(json.dumps(run_really(Path(sys.argv[1]), sys.argv[2])))
