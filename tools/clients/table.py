# SPDX-License-Identifier: Apache-2.0
"""`section`: the part of `docs/benchmarks.md` that shows `docs/results/clients.json`;
`tools/bench/page.py` calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tools.shared.measurement import table, target, verdict

SECTION = """`python -m tools.clients check`. Kernels of released wheels, compiled without a GPU by the compile service, bundled, restored to another
path, and asked for by another process whose ptxas refuses, with the sources at another path too. A kernel is a distinct `@triton.jit` function that
something launches; functions that only kernels call are not counted. Each is counted once for a target: one specialization, and of an
autotuned kernel one configuration; copies in a wheel that have one key are one. What is refused is listed with Triton's reason in the result;
*not finished* are kernels for which a guess of the arguments was wrong and others were not tried, listed with the reason too, as are files that
cannot be imported. For hip:gfx942 a sample is compiled. [clients.md](clients.md) says how arguments are guessed.
"""
_AGAIN = ("compiles", "ptxas_calls")
_COLUMNS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "client": lambda one: f"{one['client']} {one['version']}",
    "target": lambda one: one["target"],
    "kernels": lambda one: one["found"],
    "tried": lambda one: one["tried"],
    "compiled": lambda one: one["compiled"],
    "distinct": lambda one: one["keys"],
    "refused": lambda one: len(one["refused"]),
    "not finished": lambda one: len(one["unfinished"]),
    "restored": lambda one: one["second_process"]["restored"],
    "hits": lambda one: one["second_process"]["hits"],
    "compiled again": lambda one: sum(one["second_process"][name] for name in _AGAIN),
}


def section(result: dict[str, Any]) -> str:
    """Return the section of the page."""
    what = [[line["work"], verdict(line), target(line)] for line in result["rows"]]
    clients = [[value(one) for value in _COLUMNS.values()] for one in result["clients"]]
    rows, kernels = table(["what", "figure", "target"], what), table([*_COLUMNS], clients)
    return f"## Kernels of clients\n\n{SECTION}\n{rows}\n{kernels}"
