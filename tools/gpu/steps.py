# SPDX-License-Identifier: Apache-2.0
"""What the programs of this package share: steps in processes of their own, and rows that are
printed and written as they come.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tools.shared import measurement, programs
from tools.shared.processes import ROOT, answer, captured, python_path

Row = dict[str, Any]
Step = Callable[..., dict[str, Any]]
# Of each process.
TIMEOUT_S = 500


class Listener:
    """Counts what Triton's own listener hears from now on: kernels that were found, and compiled."""

    def __init__(self) -> None:
        from triton import knobs

        self.hits = self.compiles = 0
        knobs.compilation.listener = self._hear

    def _hear(self, *, cache_hit: bool, **_: Any) -> None:
        self.hits += cache_hit
        self.compiles += not cache_hit


def step(
    program: str, folder: Path, name: str, *words: str, cache: Path, refuse_ptxas: bool = False
) -> dict[str, Any]:
    """Run one step of a program in a process of its own, with `cache` as Triton's directory.

    Args:
        program: of this package; its command line has `--step`.
        folder: for a ptxas that refuses to assemble.
        name, words: the step and its arguments.
        cache: Triton's cache directory.
        refuse_ptxas: put that ptxas in place of the real one, and count its calls.
    """
    refusing, log = measurement.refusing_ptxas(folder) if refuse_ptxas else ({}, folder / "absent")
    log.unlink(missing_ok=True)
    environment = {**refusing, "TRITON_CACHE_DIR": str(cache)}
    line = (program, "--step", name, *words)
    result: dict[str, Any] = answer("tools.gpu", *line, environment=environment)
    if refuse_ptxas:
        result["ptxas_calls"] = len(log.read_text().splitlines()) if log.exists() else 0
    return result


def process(module: str, *words: str, environment: dict[str, str]) -> dict[str, Any]:
    """Run a module in a process of its own; returns the JSON that it printed last, or what it said
    before it failed, as `error`.

    Args:
        module: its full name.
        words: its arguments.
        environment: further variables.
    """
    variables = {**os.environ, "PYTHONPATH": python_path(), **environment}
    line = (sys.executable, "-m", module, *words)
    done = captured(*line, env=variables, timeout=TIMEOUT_S, cwd=ROOT)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"error": (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def bundler_command(
    *words: object, check: bool = True, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run our command line where no GPU is to be seen; options are those of `subprocess.run`."""
    line = [sys.executable, "-m", "bundler", *map(str, words)]
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "PYTHONPATH": python_path()}
    return subprocess.run(
        line, env={**os.environ, **hidden}, cwd=ROOT, text=True, check=check, **options
    )


def told(name: str, rows: Iterable[Row], results: Path) -> list[Row]:
    """Print rows as they come, and write the result after each: a machine that is taken away leaves
    what was found.
    """
    found: list[Row] = []
    for row in rows:
        found.append(row)
        print(measurement.line_of(row), flush=True)
        measurement.save(name, {"rows": found}, results)
    print(f"\nwritten to {results / name}.json")
    return found


def run(name: str, description: str | None, rows: Callable[[Path], Iterable[Row]]) -> int:
    """Run a program that has no options, in a folder of its own; 1 when any row is wrong."""
    about = f"where {name}.json goes"
    options = programs.arguments(description, results=(measurement.RESULTS, about))
    with tempfile.TemporaryDirectory(prefix=f"{name}.") as folder:
        found = told(name, rows(Path(folder)), options.results)
    return 0 if all(row["ok"] for row in found) else 1
