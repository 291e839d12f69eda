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

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import bundler
from tools.servers.vllm_worker import KERNELS
from tools.servers.wheels import RELEASES
from tools.shared import measurement, programs
from tools.shared.measurement import check
from tools.shared.processes import output

RANKS = 2
# What vLLM hashes, although it compiles nothing else for it.
CHANGED = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"
_TIMEOUT_S = 300


def main() -> int:
    """Run every row, print the table, write the result."""
    parser = programs.parser(__doc__, results=(measurement.RESULTS, "where the result goes"))
    filled = "what `python -m tools.servers wheels` filled"
    parser.add_argument("sources", type=Path, metavar="DIR", help=filled)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="server-trees.") as folder:
        rows = check_all(options.sources.resolve(), Path(folder))
    result = {"vllm": RELEASES["vllm"], "rows": rows}
    return 1 if measurement.report("server-trees", result, options.results) else 0


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
    there, placed = count_kernels(root), count_kernels(copy)
    same, named = theirs == ours and not restored.skipped, any(CHANGED in name for name in factors)
    other_ranks = bool(reasons) and all("ranks" in text for text in reasons)
    alone = not any(name.endswith("/model") for name in contents(folder / "refused"))
    stored, usable = f"{kernels} kernels, {there} directories", f"{refused.usable} kernels"
    refusal = "the layout of another number of ranks is refused"
    return [
        check("kernels of two ranks are stored once", kernels == len(KERNELS), stored),
        check("restored under another root, every file equal", same, f"{len(ours)} files"),
        check("each kernel is where each rank looks", placed == there, f"{placed} directories"),
        check(refusal, other_ranks, "; ".join(reasons)),
        check("only kernels are restored for it", alone, usable),
        check("the factor of another hash is named", named, "; ".join(factors)),
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
    variables = {"TRITON_CACHE_DIR": "", "VLLM_CACHE_ROOT": str(root), **environment}
    for rank in range(ranks):
        words = (str(sources), str(rank), str(ranks_of_model or ranks))
        output("tools.servers.vllm_worker", *words, environment=variables, timeout_s=_TIMEOUT_S)


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
