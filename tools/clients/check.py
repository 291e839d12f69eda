# SPDX-License-Identifier: Apache-2.0
"""Compiles, records and restores the real kernels of our users' programs without a GPU, and writes
`docs/results/clients.json`.

    python -m tools.clients check --folder ~/clients

It needs a package index for the wheels, torch without a GPU, and a gigabyte and a half of disk in
the folder, which lies outside the repository and keeps wheels, compiled kernels and what was found
out: a run that was stopped goes on where it was.  For each client one process compiles for each
target, and one more restores.  Exit status 1 when a kernel that was restored was compiled again.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from tools.clients.compile import environment
from tools.clients.restore import RESTORED
from tools.clients.wheels import CLIENTS
from tools.shared import measurement, processes, programs
from tools.shared.measurement import row

TARGETS = ("cuda:90", "hip:gfx942")
# The whole of cuda:90, and so many kernels of each client for the other target.
_WANTED = {"hip:gfx942": 60}
_SITE_PACKAGES = re.compile(r"/[^\s\"\\]*/site-packages/")
_TIMEOUT_S = 4 * 3600.0
_LEAST = {"cuda:90": 1000, "hip:gfx942": 200}


def main() -> int:
    """Check all clients, or some."""
    parser = programs.parser(
        __doc__,
        folder=(Path, "where wheels and compiled kernels are kept between runs"),
        workers=(2, "processes that compile"),
        seconds=(7200.0, "of one client and target; what is left counts as not tried"),
        merge=(False, "run nothing; put together what earlier runs left in the folder"),
        results=(measurement.RESULTS, "where clients.json goes"),
    )
    every = ", ".join(CLIENTS)
    parser.add_argument("clients", nargs="*", help=f"of {every}; all when none is named")
    options = parser.parse_args()
    if options.folder is None:
        parser.error("--folder is missing: a place outside the repository")
    unknown = [name for name in options.clients if name not in CLIENTS]
    if unknown:
        parser.error(f"unknown client {', '.join(unknown)}; expected {', '.join(CLIENTS)}")
    pairs = [(name, target) for name in options.clients or CLIENTS for target in TARGETS]
    if options.merge:
        pairs = [pair for pair in pairs if _path(*pair, options).with_suffix(RESTORED).exists()]
    found = [check(name, target, options) for name, target in pairs]
    result = {"rows": rows(found), "clients": found}
    print(json.dumps(result["rows"], indent=1))
    print(f"wrote {measurement.save('clients', result, options.results)}")
    return 0 if all(row["ok"] for row in result["rows"]) else 1


def check(name: str, target: str, options: argparse.Namespace) -> dict[str, Any]:
    """Compile a client's kernels for a target, then restore them in another process; returns what
    came of it.
    """
    path = _path(name, target, options)
    if not options.merge:
        _run(name, target, path, options)
    text = path.read_text()
    root = json.loads(text)["root"]
    # Reasons name files of this machine.
    told: dict[str, Any] = json.loads(_SITE_PACKAGES.sub("", text.replace(f"{root}/", "")))
    del told["root"]
    told["second_process"] = json.loads(path.with_suffix(RESTORED).read_text())
    hits = told["second_process"]["hits"]
    counts = f"{told['compiled']} of {told['tried']} compiled, {hits} hit"
    print(f"{name} for {target}: {counts}", flush=True)
    return told


def _path(name: str, target: str, options: argparse.Namespace) -> Path:
    folder: Path = options.folder.absolute()
    return folder / "results" / f"{name}-{target.replace(':', '-')}.json"


def _run(name: str, target: str, path: Path, options: argparse.Namespace) -> None:
    folder = options.folder.absolute()
    limits = ("--workers", str(options.workers), "--folder", str(folder))
    wanted = ("--wanted", str(_WANTED[target])) if target in _WANTED else ()
    found = ("--result", str(path), "--seconds", str(options.seconds))
    for words in (("compile", name, target, *found, *wanted), ("restore", str(path))):
        variables = environment(folder)
        line = (*words, *limits)
        processes.output("tools.clients", *line, environment=variables, timeout_s=_TIMEOUT_S)


def rows(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what must hold, with figures."""
    lines = []
    for target, least in _LEAST.items():
        mine = [one for one in found if one["target"] == target]
        total: Counter[str] = Counter()
        for one in mine:
            total.update({"compiled": one["compiled"], "keys": one["keys"]})
            names = ("restored", "asked", "hits", "compiles", "ptxas_calls")
            total.update({name: one["second_process"][name] for name in names})
        again, compiled = total["compiles"] + total["ptxas_calls"], total["compiled"]
        lines += [
            row(f"distinct kernels compiled for {target}", total["keys"], "kernels", least=least),
            row(
                f"of these found in another process, {target}",
                total["hits"],
                "kernels",
                least=compiled,
            ),
            row(f"compiled there, {target}", again, "kernels", most=0),
        ]
    return lines
