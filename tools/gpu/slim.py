# SPDX-License-Identifier: Apache-2.0
"""Checks on a machine with a GPU that a process without any compiler launches kernels, and prints a
table.

    python -m tools.gpu slim [--results DIR]

It needs torch, Triton, a GPU and gcc, and runs from the checkout.  examples/kernels.py runs once as
it is, then with empty cache directories, no compiler on PATH and a ptxas that refuses: with the
cache manager, from a bundle, and, to show that the check can fail, without trust.  Exit status 1
when any row is wrong.  The raw result goes to docs/results/gpu-slim.json.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.gpu import steps
from tools.gpu.steps import Row
from tools.shared import example_kernels, measurement
from tools.shared.measurement import check
from tools.shared.processes import captured, python_path

MANAGER = "bundler.integrations.triton:BundlerCacheManager"
_RESTORE = (
    "import bundler, sys; print(len(bundler.restore(sys.argv[1], sys.argv[2],"
    " trust='code').companions))"
)
_RECORD = """
import runpy, sys
import bundler
bundle, sys.argv = sys.argv[1], sys.argv[2:]
with bundler.recording() as recording:
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        assert not end.code, end
recording.collect().save(bundle)
"""


def main() -> int:
    """Run every row, print the table, write the result."""
    return steps.run("gpu-slim", __doc__, check_all)


def check_all(folder: Path) -> Iterator[Row]:
    """Run the program cold with a compiler, then in four ways without one."""
    ours = {"TRITON_CACHE_MANAGER": MANAGER, "TRITON_BUNDLER_STORE": f"file://{folder}/store"}
    managed = {**ours, "TRITON_BUNDLER_LAUNCHER": "triton"}
    cold = run(folder, "cold", managed)
    yield _row("cold, with a compiler", cold, _well(cold) and cold["report"]["compiles"] > 0)
    bundle = folder / "recorded.tbundle"
    recorded = run(folder, "recorded", {}, record=bundle)
    yield _row("recorded, with a compiler", recorded, _well(recorded))
    slim = without_compilers(folder)
    found = run(folder, "trusting", {**managed, **slim, "TRITON_BUNDLER_TRUST": "code"})
    same = _same(found, cold) and not found["report"]["compiles"]
    yield _row("no compiler, cache manager, trust='code'", found, same)
    python("-c", _RESTORE, str(bundle), str(folder / "cache-restored"), env={})
    # On 3.6 the keys of launchers hold what the program `file` says, and their source is in no
    # bundle.
    found = run(folder, "restored", without_compilers(folder, "file"))
    yield _row("no compiler, restored with trust='code'", found, _same(found, cold))
    found = run(folder, "launched", {**ours, **slim})
    yield _row("no compiler, without trust, our launcher", found, _same(found, cold))
    found = run(folder, "distrusting", {**managed, **slim})
    asked = "no compiler, without trust, Triton's launcher: it asks for one"
    yield _row(asked, found, "C compiler" in found["error"])


def run(
    folder: Path, name: str, variables: dict[str, str], *, record: Path | None = None
) -> dict[str, Any]:
    """Run the example in a new process with a cache of its own; returns its status, numbers, report
    and last words.
    """
    numbers, report = folder / f"{name}.json", folder / f"{name}.report"
    env = {
        "TRITON_CACHE_DIR": str(folder / f"cache-{name}"),
        "TRITON_BUNDLER_REPORT": str(report),
        **variables,
    }
    program = [str(example_kernels.PATH), "--json", str(numbers)]
    done = python(*(["-c", _RECORD, str(record)] if record is not None else []), *program, env=env)
    # The last line of ours is the summary that a report brings.
    lines = [
        line
        for line in done.stderr.strip().splitlines()
        if not line.startswith("triton-bundler: hits ")
    ]
    return {
        "status": done.returncode,
        "error": lines[-1] if lines else "",
        "numbers": json.loads(numbers.read_text()) if numbers.exists() else None,
        "report": json.loads(report.read_text()) if report.exists() else {},
    }


def python(*words: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run Python with these words and further variables."""
    inherited = {name: value for name, value in os.environ.items() if name not in {"CC", "CXX"}}
    whole = {**inherited, "PYTHONPATH": python_path(), **env}
    return captured(sys.executable, *words, env=whole, timeout=steps.TIMEOUT_S)


def without_compilers(folder: Path, *programs: str) -> dict[str, str]:
    """Return variables with which nothing on PATH can be run but these programs, and ptxas does not
    work.
    """
    path = folder / "-".join(["bin", *programs])
    path.mkdir()
    refusing, _ = measurement.refusing_ptxas(path)
    for program in programs:
        found = shutil.which(program)
        if found is not None:
            (path / program).symlink_to(found)
    return {**refusing, "PATH": str(path)}


def _well(found: dict[str, Any]) -> bool:
    return bool(found["status"] == 0)


def _same(found: dict[str, Any], cold: dict[str, Any]) -> bool:
    numbers = found["numbers"]
    return _well(found) and numbers is not None and bool(numbers == cold["numbers"])


def _row(what: str, found: dict[str, Any], ok: bool) -> Row:
    report = found["report"]
    counts = f"{report['compiles']} compiles, {report['hits']} hits, " if report else ""
    said = f"{counts}status {found['status']} {found['error'][:80]}".strip()
    return check(what, ok, said, **found)
