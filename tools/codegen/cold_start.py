# SPDX-License-Identifier: Apache-2.0
"""`measured`: from nothing to the first results of all graphs: by torch.compile, and from bundles
that were built before; `bench` calls it.

Each side is a new process with empty cache directories, a cache manager of Triton that notes
compiles, and a ptxas that notes calls.  `process_s` is from the start of the process to its end,
`work_s` from the first graph to the last result, once imports are done and inputs are there.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from tools.gpu.torch_compile import counting_ptxas
from tools.shared.measurement import median
from tools.shared.processes import ROOT, command, python_path

ROUNDS = 3
Found = dict[str, Any]


def measured(bundles: Path, names: list[str]) -> Found:
    """Return what each side takes: torch.compile once, the bundles several times."""
    replays = {
        side: [
            _process("tools.codegen.cold_replay", side, str(bundles), *names) for _ in range(ROUNDS)
        ]
        for side in ("replay", "replay_torch")
    }
    graphs = replays["replay"][0].get("names", names)
    found = {side: _middle(samples) for side, samples in replays.items()}
    return {**found, "compile": _process("tools.codegen.cold_compile", *graphs)}


def _middle(samples: list[Found]) -> Found:
    """Return the first sample with the medians of the times of all."""
    if any("error" in sample for sample in samples):
        return next(sample for sample in samples if "error" in sample)
    times = {what: [sample[what] for sample in samples] for what in ("process_s", "work_s")}
    return samples[0] | {what: median(found) for what, found in times.items()} | {"samples": times}


def _process(program: str, *arguments: str) -> Found:
    with tempfile.TemporaryDirectory(prefix="cold.") as name:
        folder = Path(name)
        compiles, assembled = folder / "compiles", folder / "ptxas-calls"
        for path in (compiles, assembled):
            path.write_bytes(b"")
        clean = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("TRITON_", "TORCHINDUCTOR_"))
        }
        environment = {
            **clean,
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
            "TRITON_HOME": str(folder / "home"),
            "PYTHONPATH": python_path(),
            "TRITON_CACHE_DIR": str(folder / "triton"),
            "TRITON_CACHE_MANAGER": "tools.gpu.torch_counting:CountingCacheManager",
            "GPU_TORCH_COMPILES": str(compiles),
            "GPU_TORCH_PTXAS": str(assembled),
            **counting_ptxas(folder),
        }
        started = time.monotonic()
        done = subprocess.run(
            command(program, *arguments),
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        process_s = time.monotonic() - started
        if done.returncode:
            return {"error": done.stderr[-3000:], "process_s": process_s}
        return {
            **json.loads(done.stdout.splitlines()[-1]),
            "process_s": process_s,
            "compiles": len(compiles.read_text().splitlines()),
            "ptxas": len(assembled.read_text().splitlines()),
        }
