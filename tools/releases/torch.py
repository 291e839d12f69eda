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

import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

from bundler.toolchain import identity, inductor_caches
from tools.shared import measurement, processes, programs

TESTS = "tests/test_integrations/test_inductor.py"
_TIMEOUT_S = 3000
# Nothing here may depend on whether the machine has a GPU.
_NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def main() -> int:
    """Try this torch."""
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
    with tempfile.TemporaryDirectory() as folder:
        try:
            found: dict[str, Any] = processes.answer(
                "tools.releases", "torch-precompile", folder, environment=_NO_GPU
            )
        except RuntimeError as error:
            return {"failed": str(error).strip().splitlines()[-1]}
    return found
