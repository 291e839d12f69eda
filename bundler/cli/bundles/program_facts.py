# SPDX-License-Identifier: Apache-2.0
"""`program_facts`, `show_programs`: what a generated program needs, as `generate` and `inspect`
print it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from bundler.cli import wording
from bundler.cli.terminal import Screen
from bundler.runtime.program.program_summary import ProgramSummary

_SHOWN = 12


def program_facts(program: ProgramSummary) -> dict[str, Any]:
    """Return what `--json` prints of a program."""
    return dataclasses.asdict(program)


def show_programs(screen: Screen, programs: Sequence[ProgramSummary]) -> None:
    """Print what each program is called with, what it needs, and where it runs."""
    for program in programs:
        screen.facts(_lines(program))
        screen.line()


def _lines(program: ProgramSummary) -> list[tuple[str, str]]:
    if program.problem is not None:
        return [("program", program.name), ("problem", program.problem)]
    kernels = wording.count(program.kernels, "kernel")
    launches = wording.count(program.launches, "launch")
    sizes = [f"{size} is {place}" for size, place in program.sizes.items()]
    return [
        ("program", f"{program.name}: {kernels} in {launches}"),
        ("inputs", _listed([str(one) for one in program.inputs])),
        ("sizes", _listed(sizes) if sizes else ""),
        ("constants", _listed(program.constants)),
        ("results", _listed([str(one) for one in program.results])),
        ("memory", memory_words(program)),
        ("needs torch", _listed(program.operators, "no")),
        (
            "code",
            "it calls operators of yours or of others: trust in code is needed"
            if program.code
            else "",
        ),
        ("random", "it draws random numbers" if program.random else ""),
        ("targets", _listed(program.targets, "any" if not program.kernels else "none yet")),
    ]


def memory_words(program: ProgramSummary) -> str:
    """Return how much memory a program allocates."""
    beside = "beside inputs and constants"
    if program.memory_bytes is None:
        return f"depends on sizes, {beside}"
    return f"{wording.size(program.memory_bytes)} at its peak, {beside}"


def _listed(words: Sequence[str], nothing: str = "none") -> str:
    more = len(words) - _SHOWN
    return (", ".join(words[:_SHOWN]) or nothing) + (f" and {more:,} more" if more > 0 else "")
