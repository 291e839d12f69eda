# SPDX-License-Identifier: Apache-2.0
"""What every measurement here needs: facts about the machine, result files, and a ptxas that
refuses to assemble.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shlex
import stat
import statistics
import subprocess
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.shared.processes import ROOT

RESULTS = ROOT / "docs" / "results"
PACKAGES = ("triton", "torch", "zstandard", "msgpack")


def facts() -> dict[str, Any]:
    """Return machine, versions and commit, to stand beside every figure."""
    versions = {name: found for name in PACKAGES if (found := _version(name)) is not None}
    return {
        "machine": {
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)),
            "system": f"{platform.system()} {platform.release()}",
            "load": [round(load, 2) for load in os.getloadavg()],
            "gpu": _gpu(),
            "extensions": extensions(),
        },
        "versions": {"python": platform.python_version(), **versions},
        "commit": _commit(),
    }


def extensions() -> dict[str, bool]:
    """Return the C extensions of the package by name, and whether each was built where it is
    imported from; without them it is slower.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    named = [module["name"] for module in project["tool"]["setuptools"]["ext-modules"]]
    return {name.rpartition(".")[2]: importlib.util.find_spec(name) is not None for name in named}


def without_extensions(machine: dict[str, Any]) -> str:
    """Return in words what of them was missing where a result was measured; empty where none was,
    or nobody noted it.
    """
    noted: dict[str, bool] = machine.get("extensions", {})
    missing = [name for name, built in sorted(noted.items()) if not built]
    if not missing:
        return ""
    return (
        "pure Python, no extension was built"
        if len(missing) == len(noted)
        else f"without the extensions {', '.join(missing)}"
    )


def save(name: str, result: dict[str, Any], directory: Path = RESULTS) -> Path:
    """Write a result beside the facts of this machine; returns the file."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{name}.json"
    path.write_text(json.dumps({**facts(), **result}, indent=1, sort_keys=True) + "\n")
    return path


def median(samples: Sequence[float]) -> float:
    """Return the median of the samples."""
    return statistics.median(samples)


def row(
    work: str,
    figure: float,
    unit: str,
    *,
    most: float | None = None,
    least: float | None = None,
    peer: str = "",
    samples: Any = None,
    **facts: Any,
) -> dict[str, Any]:
    """Return one line of a result.

    Args:
        work: what was measured.
        figure: the median, or the ratio of two.
        unit: of the figure; `x` for a ratio.
        most: the target, if the figure must not be above it.
        least: the target, if the figure must not be below it.
        peer: what stands on the other side of a ratio, in words with its own figure.
        samples: every sample, by name.
        facts: more to store beside it.
    """
    kept = (most is None or figure <= most) and (least is None or figure >= least)
    return {
        "work": work,
        "figure": figure,
        "unit": unit,
        "peer": peer,
        "most": most,
        "least": least,
        "ok": kept,
        "samples": samples,
        **facts,
    }


def target(line: dict[str, Any]) -> str:
    """Return the target of a row in words, empty when there is none."""
    for word, bound in (("at most", line["most"]), ("at least", line["least"])):
        if bound is not None:
            return f"{word} {shown(bound, line['unit'])}"
    return ""


def shown(figure: float, unit: str) -> str:
    """Return a figure with its unit, to three digits."""
    return f"{figure:,.0f} {unit}" if abs(figure) >= 100 else f"{figure:.3g} {unit}"


def fast_directory() -> str | None:
    """Return a directory in memory, if there is one."""
    # tmpfs, made private by tempfile
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108


def settle() -> None:
    """Let the disk write what is dirty, so that the next measurement does not wait for it."""
    os.sync()


def refusing_ptxas(directory: Path) -> tuple[dict[str, str], Path]:
    """Make wrappers for ptxas that answer `--version` like the real one, note anything else, and
    fail.

    Returns:
        Environment variables that make Triton use them, and the file with a line for each refused
        call.
    """
    log = directory / "ptxas-calls"
    environment = {}
    tools = Path(_triton_dir()) / "backends" / "nvidia" / "bin"
    for name, variable in (
        ("ptxas", "TRITON_PTXAS_PATH"),
        ("ptxas-blackwell", "TRITON_PTXAS_BLACKWELL_PATH"),
    ):
        real = os.environ.get(variable, str(tools / name))
        if not Path(real).exists():
            continue
        wrapper = directory / name
        wrapper.write_text(
            f'#!/bin/sh\nif [ "$1" = --version ]; then exec {shlex.quote(real)} --version; fi\n'
            f'echo {name} "$@" >> {shlex.quote(str(log))}\nexit 1\n'
        )
        wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
        environment[variable] = str(wrapper)
    return environment, log


def _triton_dir() -> str:
    found = importlib.metadata.distribution("triton").locate_file("triton")
    return str(found)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _gpu() -> str | None:
    try:
        answer = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=True,
            timeout=30,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.splitlines()[0] if answer.stdout else None


def _commit() -> str | None:
    try:
        answer = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()
