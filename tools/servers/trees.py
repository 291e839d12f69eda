# SPDX-License-Identifier: Apache-2.0
"""Packs a cache that vLLM's own code laid out, restores it under another root, and checks what is
refused and explained; no GPU.

    python -m tools.servers wheels DIR
    python -m tools.servers trees DIR [--results FOLDER]

Two ranks lay out a cache root, each in a process of its own (`vllm_worker.py`); a third one has
another environment, so vLLM gives its model another hash.  Exit status 1 when any row is wrong.
The raw result goes to docs/results/server-trees.json.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import bundler
from tools.servers.vllm_worker import KERNELS
from tools.servers.wheels import RELEASES
from tools.shared import measurement
from tools.shared.processes import ROOT, python_path

RANKS = 2
# What vLLM hashes, although it compiles nothing else for it.
CHANGED = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"
_TIMEOUT_S = 300


def main() -> int:
    """Run every row, print the table, write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "sources", type=Path, metavar="DIR", help="what `python -m tools.servers wheels` filled"
    )
    parser.add_argument(
        "--results", type=Path, default=measurement.RESULTS, help="where server-trees.json goes"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="server-trees.") as folder:
        rows = check_all(options.sources.resolve(), Path(folder))
    for row in rows:
        print(f"{'ok  ' if row['ok'] else 'FAIL'}  {row['check']:<58}  {row['found']}")
    print(
        "\nwritten to"
        f" {measurement.save('server-trees', {'vllm': RELEASES['vllm'], 'rows': rows}, options.results)}"
    )
    return 0 if all(row["ok"] for row in rows) else 1


def check_all(sources: Path, folder: Path) -> list[dict[str, Any]]:
    """Lay out, pack, restore, refuse, explain."""
    root, other, copy = folder / "cache", folder / "other", folder / "copy"
    lay_out(sources, root, RANKS, {})
    lay_out(sources, other, 1, {CHANGED: "TRITON_"}, ranks_of_model=RANKS)
    with bundler.pack_family("vllm", root, facts={"vllm": RELEASES["vllm"]}) as bundle:
        bundle.save(folder / "vllm.tbundle")
        kernels = len(bundle.kernels)
    restored = restore(folder, copy, ranks=str(RANKS))
    refused = restore(folder, folder / "refused", ranks="4")
    reasons = sorted({reason for _, reason in refused.skipped})
    found = bundler.explain_trees(folder / "vllm.tbundle", f"vllm={other}")
    factors = sorted({name for one in found for name, *_ in one.factors})
    theirs, ours = contents(root), contents(copy)
    return [
        _row(
            "kernels of two ranks are stored once",
            kernels == len(KERNELS),
            f"{kernels} kernels, {count_kernels(root)} directories",
        ),
        _row(
            "restored under another root, every file equal",
            theirs == ours and not restored.skipped,
            f"{len(ours)} files",
        ),
        _row(
            "each kernel is where each rank looks",
            count_kernels(copy) == count_kernels(root),
            f"{count_kernels(copy)} directories",
        ),
        _row(
            "the layout of another number of ranks is refused",
            bool(reasons) and all("ranks" in text for text in reasons),
            "; ".join(reasons),
        ),
        _row(
            "only kernels are restored for it",
            not any(name.endswith("/model") for name in contents(folder / "refused")),
            f"{refused.usable} kernels",
        ),
        _row(
            "the factor of another hash is named",
            any(CHANGED in name for name in factors),
            "; ".join(factors),
        ),
    ]


def lay_out(
    sources: Path,
    root: Path,
    ranks: int,
    environment: Mapping[str, str],
    *,
    ranks_of_model: int = 0,
) -> None:
    """Let vLLM's own code lay out a cache root, one process a rank."""
    env = {**os.environ, "PYTHONPATH": python_path(), "VLLM_CACHE_ROOT": str(root), **environment}
    env.pop("TRITON_CACHE_DIR", None)
    line = [sys.executable, "-W", "ignore", "-m", "tools.servers.vllm_worker", str(sources)]
    for rank in range(ranks):
        done = subprocess.run(
            [*line, str(rank), str(ranks_of_model or ranks)],
            env=env,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIMEOUT_S,
        )
        if done.returncode:
            raise RuntimeError(f"vLLM's code laid out nothing for rank {rank}:\n{done.stderr}")


def restore(folder: Path, root: Path, *, ranks: str) -> bundler.RestoreReport:
    """Restore the bundle to a root, for a number of ranks."""
    facts = {"ranks": ranks, "vllm": RELEASES["vllm"]}
    return bundler.restore(
        folder / "vllm.tbundle", trust="code", trees=bundler.TreeOptions({"vllm": root}, facts)
    )


def contents(root: Path) -> dict[str, bytes]:
    """Return the files below a root, but for those that hold its path: Triton's group files, and
    locks.
    """
    files = (
        path for path in root.rglob("*") if path.is_file() and not path.name.startswith("__grp__")
    )
    # Metadata of kernels may hold the path of the cache; a kernel of another root differs in that
    # alone.
    named = {
        str(path.relative_to(root)): path.read_bytes().replace(str(root).encode(), b"<root>")
        for path in files
    }
    return {name: data for name, data in named.items() if not name.endswith(".lock")}


def count_kernels(root: Path) -> int:
    """Return how many kernel directories are below a root."""
    return len(list(root.rglob("__grp__*.json")))


def _row(check: str, ok: bool, found: str) -> dict[str, Any]:
    return {"check": check, "ok": bool(ok), "found": found}
