# SPDX-License-Identifier: Apache-2.0
"""`section`: the part of `docs/benchmarks.md` that shows `docs/results/clients.json`;
`tools/bench/page.py` calls it.
"""

from __future__ import annotations

from typing import Any

from tools.shared.measurement import shown, target

SECTION = """`python -m tools.clients check`. Kernels of released wheels, compiled without a GPU by the compile service, bundled, restored to another
path, and asked for by another process whose ptxas refuses, with the sources at another path too. A kernel is a distinct `@triton.jit` function that
something launches; functions that only kernels call are not counted. Each is counted once for a target: one specialization, and of an
autotuned kernel one configuration; copies in a wheel that have one key are one. What is refused is listed with Triton's reason in the result;
*not finished* are kernels for which a guess of the arguments was wrong and others were not tried, listed with the reason too, as are files that
cannot be imported. For hip:gfx942 a sample is compiled. [clients.md](clients.md) says how arguments are guessed.
"""
_HEAD = (
    "client",
    "target",
    "kernels",
    "tried",
    "compiled",
    "distinct",
    "refused",
    "not finished",
    "restored",
    "hits",
    "compiled again",
)


def section(result: dict[str, Any]) -> str:
    """Return the section of the page."""
    lines = [f"| {line['work']} | {_verdict(line)} | {target(line)} |" for line in result["rows"]]
    table = "\n".join(["| what | figure | target |", "| --- | --- | --- |", *lines])
    return f"## Kernels of clients\n\n{SECTION}\n{table}\n\n{_clients(result)}\n"


def _clients(result: dict[str, Any]) -> str:
    lines: list[tuple[Any, ...]] = [_HEAD, ("---",) * len(_HEAD)]
    for one in result["clients"]:
        again = one["second_process"]
        lines.append(
            (
                f"{one['client']} {one['version']}",
                one["target"],
                one["found"],
                one["tried"],
                one["compiled"],
                one["keys"],
                len(one["refused"]),
                len(one["unfinished"]),
                again["restored"],
                again["hits"],
                again["compiles"] + again["ptxas_calls"],
            )
        )
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def _verdict(line: dict[str, Any]) -> str:
    figure = shown(line["figure"], line["unit"])
    return figure if line["ok"] else f"**{figure}**"
