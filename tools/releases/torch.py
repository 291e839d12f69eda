# SPDX-License-Identifier: Apache-2.0
"""Tries the bundles of torch.compile on the torch that is installed here, and writes
`docs/results/torch-<release>.json`.

    python3.11 -m venv torch215 && torch215/bin/pip install torch==2.15.0 '.[test,redis,cli]'
    torch215/bin/python -m tools.releases torch

No GPU is needed, so torch's CUDA build will do.  It looks up every name of torch's own that is
used, runs the tests of `save` and `load`, and carries a pair of files of torch.compiler.precompile
where this torch makes such.  Exit status 1 when something failed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import bundler
from bundler.toolchain import identity, inductor_caches
from tools.shared import measurement, processes, programs

TESTS = "tests/test_integrations/test_inductor.py"
_TIMEOUT_S = 3000
# Nothing here may depend on whether the machine has a GPU.
_NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
FOLDER, SOURCE, CACHE = "precompile", "model.py", "model.cache"
# torch 2.15 has it first.
_MODULE = "torch.compiler.precompile"
_KEY = "A" * 52


def main() -> int:
    """Try this torch, or do one step of it in this process."""
    if programs.run_step(STEPS):
        return 0
    options = programs.arguments(
        __doc__, results=(measurement.RESULTS, "where to write the result")
    )
    release = (identity.version_of("torch") or "none").partition("+")[0]
    found = {"names": _names(), "tests": _tests(), "precompile": _precompile()}
    path = measurement.save(f"torch-{release}", found, options.results)
    print(json.dumps(found, indent=1))
    print(f"wrote {path}")
    failed = (
        found["names"]["missing"] or found["tests"]["failed"] or found["precompile"].get("failed")
    )
    return 1 if failed else 0


def _names() -> dict[str, Any]:
    needed = sorted(
        {*inductor_caches.NEEDED, *inductor_caches.NEEDED_TO_KEEP, inductor_caches.COMPILER}
    )
    return {"looked_up": needed, "missing": list(inductor_caches.missing(needed))}


def _tests() -> dict[str, Any]:
    """Run the tests of `save` and `load`; returns the names of those that passed and failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        # Workers of the tests have limits of time that an idle machine keeps.
        subprocess.run(
            [sys.executable, "-P", "-m", "pytest", "-q", f"--junitxml={report}", TESTS],
            env={**os.environ, **_NO_GPU, "PYTHONPATH": processes.python_path()},
            cwd=processes.ROOT,
            check=False,
            timeout=_TIMEOUT_S,
        )
        # pytest wrote it just now
        cases = list(ET.parse(report).getroot().iter("testcase"))  # noqa: S314
    told = {
        word: sorted(case.get("name", "") for case in cases if case.find(word) is not None)
        for word in ("failure", "error", "skipped")
    }
    failed = told["failure"] + told["error"]
    passed = sorted({case.get("name", "") for case in cases} - {*failed, *told["skipped"]})
    return {"passed": passed, "failed": failed, "skipped": told["skipped"]}


def _precompile() -> dict[str, Any]:
    """Carry a pair of files of torch.compiler.precompile in a bundle, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            found: dict[str, Any] = processes.answer(
                "tools.releases", "torch", "--step", "carry", folder, environment=_NO_GPU
            )
        except RuntimeError as error:
            return {"failed": str(error).strip().splitlines()[-1]}
    return found


def _carry(place: str) -> dict[str, Any]:
    """Capture a pair below Inductor's cache directory, beside kernels; pack the directory, and
    restore it to another path, without trust and with it.  The restored pair is loaded in a new
    process, which has to compute the same.
    """
    if (
        importlib.util.find_spec("torch.compiler") is None
        or importlib.util.find_spec(_MODULE) is None
    ):
        return {"skipped": f"this torch has no {_MODULE}"}
    directory = Path(place)
    first, second, untrusted = (directory / name for name in ("first", "second", "untrusted"))
    captured = _step(first, "capture")
    # `pack` takes a directory for Inductor's that has a kernel directory of a device; this one
    # holds a tuning result alone.
    kernels = first / "triton" / "0" / _KEY
    kernels.mkdir(parents=True)
    (kernels / "k.autotune.json").write_text("{}")
    bundle = bundler.pack(first)
    bundler.restore(bundle, untrusted, devices=[0])
    bundler.restore(bundle, second, devices=[0], trust="code")
    names = (SOURCE, CACHE)
    first.rename(directory / "away")
    return {
        "files": {name: (second / FOLDER / name).stat().st_size for name in names},
        "restored_without_trust": [name for name in names if (untrusted / FOLDER / name).exists()],
        "equal_result": _step(second, "load") == captured,
    }


def _step(directory: Path, name: str) -> list[list[float]]:
    directory.mkdir(parents=True, exist_ok=True)
    answer: list[list[float]] = processes.answer(
        "tools.releases",
        "torch",
        "--step",
        name,
        os.fspath(directory),
        environment={"TORCHINDUCTOR_CACHE_DIR": os.fspath(directory)},
    )
    return answer


def _pair(directory: str) -> tuple[Path, Path]:
    folder = Path(directory, FOLDER)
    folder.mkdir(exist_ok=True)
    return folder / SOURCE, folder / CACHE


def _inputs() -> tuple[Any, Any]:
    import torch

    torch.manual_seed(0)
    return torch.randn(8, 8), torch.randn(8, 8)


def _capture(directory: str) -> Any:
    import torch
    from torch.compiler import precompile

    source, cache = _pair(directory)
    with precompile.capture(torch.matmul, artifact_path=source, cache_path=cache) as capture:
        return capture(*_inputs()).tolist()


def _load(directory: str) -> Any:
    from torch.compiler import precompile

    return precompile.load(*_pair(directory))(*_inputs()).tolist()


STEPS = {"carry": _carry, "capture": _capture, "load": _load}
