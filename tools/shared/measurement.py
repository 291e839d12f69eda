# SPDX-License-Identifier: Apache-2.0
"""What every measurement here needs: facts about the machine, rows and tables, result files, and a
ptxas that refuses to assemble.
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
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.shared.processes import ROOT, said

RESULTS = ROOT / "docs" / "results"
PACKAGES = ("triton", "torch", "zstandard", "msgpack")


def facts() -> dict[str, Any]:
    """Return machine, versions and commit, to stand beside every figure."""
    versions = {name: found for name in PACKAGES if (found := version_of(name)) is not None}
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
        "commit": said("git", "rev-parse", "HEAD", cwd=ROOT),
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
    """Write a result beside the facts of this machine, whole or not at all; returns the file."""
    directory.mkdir(parents=True, exist_ok=True)
    path, whole = directory / f"{name}.json", {**facts(), **result}
    path.with_suffix(".tmp").write_text(json.dumps(whole, indent=1, sort_keys=True) + "\n")
    return path.with_suffix(".tmp").rename(path)


def median(samples: Iterable[float]) -> float:
    """Return the median of the samples."""
    return statistics.median(samples)


def medians(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each member of some samples."""
    return {name: median(one[name] for one in found) for name in found[0]}


def ratios(over: Iterable[float], under: Iterable[float]) -> list[float]:
    """Return how many times one sample of each pair is the other."""
    return [one / other for one, other in zip(over, under, strict=True)]


def differences(more: Iterable[float], less: Iterable[float]) -> list[float]:
    """Return by how much the first sample of each pair is larger."""
    return [one - other for one, other in zip(more, less, strict=True)]


def in_turns(ways: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Take a sample of each way in each round."""
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            samples[name].append(way())
    return samples


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


def ratio_row(
    work: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    peer: str,
    *,
    faster: bool = False,
    **more: Any,
) -> dict[str, Any]:
    """Return a row of the median ratio of pairs of samples in seconds.

    Args:
        work: what was measured.
        ours, theirs: the samples.
        peer: the other side; its own median is put behind it.
        faster: say how many times faster we are, not how many times longer we take.
        more: as for `row`.
    """
    over, under = (theirs, ours) if faster else (ours, theirs)
    ours_ms, peer_ms = median(ours) * 1e3, median(theirs) * 1e3
    words, figure = f"{peer}, {shown(peer_ms, 'ms')}", median(ratios(over, under))
    return row(work, figure, "x", peer=words, ours_ms=ours_ms, peer_ms=peer_ms, **more)


def check(what: str, ok: object, found: str, **more: Any) -> dict[str, Any]:
    """Return one line of a result that has no figure: what was looked at, and what was found."""
    return {"check": what, "ok": bool(ok), "found": found, **more}


def target(line: Mapping[str, Any]) -> str:
    """Return the target of a row in words, empty when there is none."""
    for word, bound in (("at most", line["most"]), ("at least", line["least"])):
        if bound is not None:
            return f"{word} {shown(bound, line['unit'])}"
    return ""


def shown(figure: float, unit: str) -> str:
    """Return a figure with its unit, to three digits."""
    return f"{figure:,.0f} {unit}" if abs(figure) >= 100 else f"{figure:.3g} {unit}"


def verdict(line: Mapping[str, Any]) -> str:
    """Return the figure of a row as pages have it: bold where a target is missed."""
    figure = shown(line["figure"], line["unit"])
    return figure if line["ok"] else f"**{figure}**"


def table(head: Sequence[Any], rows: Iterable[Sequence[Any]]) -> str:
    """Return a table as Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines) + "\n"


def line_of(line: Mapping[str, Any]) -> str:
    """Return a row, or a check, as programs print it."""
    if "check" in line or "figure" not in line:
        what, words = line.get("check", line.get("work")), [line["found"]]
    else:
        what = line["work"]
        words = [shown(line["figure"], line["unit"]), target(line), line["peer"]]
    return f"{'ok  ' if line['ok'] else 'FAIL'}  {what:<60}  {'; '.join(filter(None, words))}"


def report(name: str, result: dict[str, Any], directory: Path) -> list[dict[str, Any]]:
    """Print the rows of a result, write it, and return the rows that miss their target."""
    for line in result["rows"]:
        print(line_of(line))
    print(f"\nwritten to {save(name, result, directory)}")
    return [line for line in result["rows"] if not line["ok"]]


def missed(lines: Iterable[Mapping[str, Any]]) -> None:
    """Print which rows of a benchmark miss their target."""
    for line in lines:
        print(f"missed: {line['work']}: {shown(line['figure'], line['unit'])}, {target(line)}")


def write_page(path: Path, text: str, program: str, *, check: bool) -> int:
    """Write what a program makes of results, or only compare it; returns the exit status."""
    if not check:
        path.write_text(text)
        print(f"written to {path}")
    elif not path.exists() or path.read_text() != text:
        print(f"{path} is stale: run python -m {program}")
        return 1
    return 0


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
    triton = importlib.metadata.distribution("triton").locate_file("triton")
    tools = Path(str(triton)) / "backends" / "nvidia" / "bin"
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


def version_of(name: str) -> str | None:
    """Return the version of a package; None where it is not installed."""
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
    asked = ("--query-gpu=name,driver_version", "--format=csv,noheader")
    found = said("nvidia-smi", *asked, timeout=30)
    return found.splitlines()[0] if found else None
