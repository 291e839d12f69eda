# SPDX-License-Identifier: Apache-2.0
"""Kernels that a machine without a GPU built: whether this machine's JIT finds each of them, and
compiles none.

Each bundle in `.whl/built/` of the checkout is one: `py312.tbundle` for the Python that it was
built under.  One that is built here, in a process that sees no GPU, is added, so that the rows
never depend on somebody's files alone.  To make the others, on any machine, under each Python:

    triton-bundler build examples/kernels.py --target cuda:90 -o .whl/built/py312.tbundle
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.gpu.steps import Row, Step, bundler_command
from tools.shared.measurement import check
from tools.shared.processes import ROOT

BUILT = ROOT / ".whl" / "built"
_NAME = re.compile(r"py(\d)(\d+)")


def rows(step: Step, folder: Path) -> tuple[list[Row], dict[str, Any]]:
    """Return a row for each bundle: how often the JIT compiled after it was restored."""
    found = [_built_here(step, folder)]
    for path in sorted(BUILT.glob("*.tbundle")):
        match = _NAME.match(path.name)
        version = (int(match[1]), int(match[2])) if match is not None else sys.version_info[:2]
        found += _built_elsewhere(step, folder, path, version)
    return found, {}


def _built_here(step: Step, folder: Path) -> Row:
    bundle = folder / "here.tbundle"
    try:
        built = step(folder, "built-here", str(bundle), cache=folder / "built-here-unused")
    except RuntimeError as error:  # the bundles that came from elsewhere do not need it
        return broken("build here, without a GPU", error)
    return _jit_row(f"built here for {built['target']}, without a GPU", step, folder, bundle)


def _built_elsewhere(
    step: Step, folder: Path, path: Path, version: tuple[int, ...]
) -> Iterator[Row]:
    name = f"built elsewhere under Python {version[0]}.{version[1]}"
    if version == sys.version_info[:2]:
        yield _jit_row(name, step, folder, path)
        return
    plain = step(folder, "built-restore", str(path), "", cache=folder / f"built-{path.stem}-plain")
    reasons = _reasons(plain)
    refused = plain["usable"] == 0 and "rekey=True" in reasons
    yield check(f"{name}: skipped, and why", refused, reasons or "nothing was skipped")
    yield _jit_row(f"{name}, rekey=True", step, folder, path, rekey=True)


def _jit_row(name: str, step: Step, folder: Path, bundle: Path, *, rekey: bool = False) -> Row:
    """Restore into a new directory, and run the examples there with a ptxas that refuses to
    assemble.
    """
    what, cache = f"{name}: compiles of the JIT", folder / f"built-{bundle.stem}"
    restored = step(folder, "built-restore", str(bundle), "rekey" if rekey else "", cache=cache)
    usable = restored["usable"]
    if not usable:
        return check(what, False, f"nothing can be used here: {_reasons(restored)}")
    try:
        replay = step(folder, "replay", cache=cache, refuse_ptxas=True)
    except RuntimeError as error:
        return broken(what, error)
    compiles, calls, hits = (replay[name] for name in ("compiles", "ptxas_calls", "hits"))
    said = f"{compiles} compiles, {hits} hits, {calls} ptxas calls; {usable} kernels restored,"
    said += f" {restored['rekeyed']} of them rekeyed"
    # Every kernel that was built is one that the examples launch.
    return check(what, compiles == calls == 0 < usable == hits, said)


def _reasons(restored: dict[str, Any]) -> str:
    return "; ".join(sorted({reason for _, reason in restored["skipped"]}))


def broken(what: str, error: RuntimeError) -> Row:
    """Return the row of what could not be looked at."""
    return check(what, False, f"broke off: {str(error).rstrip().splitlines()[-1]}")


def build_here(output: str) -> dict[str, Any]:
    """Build the examples for this machine's GPU in a process that cannot see it."""
    from bundler.toolchain.targets import visible_targets

    target = str((visible_targets() or ())[0])
    words = ("build", "examples/kernels.py", "--target", target, "-o", output)
    done = bundler_command(*words, capture_output=True, check=False)
    if done.returncode:
        raise RuntimeError(f"build failed: {done.stderr or done.stdout}")
    return {"target": target}


def restore(path: str, rekey: str) -> dict[str, Any]:
    """Restore where Triton looks."""
    import bundler

    report = bundler.restore(path, rekey=bool(rekey))
    return {"usable": report.usable, "rekeyed": len(report.rekeyed), "skipped": report.skipped}


STEPS: dict[str, Step] = {"built-here": build_here, "built-restore": restore}
