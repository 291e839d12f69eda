# SPDX-License-Identifier: Apache-2.0
"""`write_combination`: kernels that do not wait for each other become one, in which each program
works for one of them.

The programs of the first part come first, then those of the second, and so on.  A part has the
lines that its kernel has alone, behind a test of the program's number, and blocks of its own,
`XBLOCK_0`, `XBLOCK_1`.  Kernels that are equal but for their tensors are one part: its programs
choose the tensors, so that a list of many tensors of few shapes is a short text.

::

    program = tl.program_id(0)
    end_0 = tl.cdiv(10, XBLOCK_0)
    if program < end_0:
        pid = program  # a kernel of 10 elements
        ...
    end_1 = end_0 + 2 * tl.cdiv(6000, XBLOCK_1)
    if (program >= end_0) & (program < end_1):
        programs = tl.cdiv(6000, XBLOCK_1)  # two of 6,000 elements
        member, pid = (program - end_0) // programs, (program - end_0) % programs
        of_in_ptr0 = in_ptr1
        of_in_ptr0 = tl.where(member == 1, in_ptr2, of_in_ptr0)
        ...

No name is used behind its part, so parts may have equal names.  `schedule` calls it, `module_text`
puts the function into a module.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import sympy

from bundler.codegen.kernels.kernel_arguments import KernelParameter, numel_parameter
from bundler.codegen.kernels.kernel_plan import Bounded, KernelText, write_kernel
from bundler.codegen.kernels.module_text import module_text
from bundler.codegen.loops.fusion import LoopGroup
from bundler.codegen.loops.loop_nodes import Buffer
from bundler.codegen.loops.loop_terms import TermPool

_WORD = re.compile(r"\b[A-Za-z_][A-Za-z0-9_]*\b")
_PROGRAM = "tl.program_id(0)"
_BLOCKS = ("XBLOCK", "R0_BLOCK")
# The order of a signature: what is in memory, then numbers.
_ORDER = ("in_out_ptr", "in_ptr", "out_ptr", "in_number", "ks", "load_seed_offset")


def write_combination(
    group: LoopGroup,
    pool: TermPool,
    buffers: Mapping[str, Buffer],
    removed: frozenset[str],
    reused: Mapping[str, str],
    size_hints: Mapping[sympy.Symbol, int],
    bounded: Bounded | None = None,
    *,
    asserted: bool = True,
    upcast: bool = True,
) -> KernelText:
    """Return the kernel of a group's parts, each of elements along one dimension, or of rows, whose
    sizes are known; arguments as `write_kernel` has them.
    """
    # Equal kernels together, by all that their modules say.
    alike: dict[str, list[KernelText]] = {}
    for part in group.parts:
        given = (part, pool, buffers, removed, reused, size_hints, bounded)
        text = write_kernel(*given, asserted=asserted, upcast=upcast)
        alike.setdefault(module_text(text, {}), []).append(text)
    return _combined(list(alike.values()))


def _combined(parts: Sequence[Sequence[KernelText]]) -> KernelText:
    texts = [text for members in parts for text in members]
    shared, kept = _Parameters(), [members[0] for members in parts]
    lines = _body(parts, shared)
    given = [
        *shared.ordered,
        *((size, int(size.outer)) for n, m in enumerate(parts) for size in _sizes(m, n)),
    ]
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text.counts)
    return KernelText(
        kind="reduction" if any(part.kind != "pointwise" for part in kept) else "pointwise",
        dimensions=(),
        parameters=tuple(parameter for parameter, _ in given),
        blocks=tuple(f"{block}_{n}" for n, part in enumerate(kept) for block in part.blocks),
        body=tuple(lines),
        hints={},
        reduction_hint="DEFAULT",
        changed=tuple(p.name for p, _ in given if p.name.startswith("in_out")),
        counts=dict(counts),
        atomic=False,
        origins=tuple(sorted(frozenset().union(*(text.origins for text in texts)))),
        buffers=tuple(name for text in texts for name in text.buffers),
        bounds=tuple(dict.fromkeys(size for text in texts for size in text.bounds)),
        asserts=any(part.asserts for part in kept),
        examples=tuple(example for _, example in given),
        gigabytes=sum(text.gigabytes for text in texts),
        parts=tuple(kept),
    )


class _Parameters:
    """The parameters of a combination: a buffer that several parts read is passed once."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, Any, str], tuple[KernelParameter, Any]] = {}
        self._counts: Counter[str] = Counter()

    def names(self, text: KernelText) -> dict[str, str]:
        """Return for each parameter of a part, other than its sizes, the name that it has here."""
        found = {}
        for parameter, example in zip(text.parameters, text.examples, strict=True):
            prefix = parameter.name.rstrip("0123456789")
            if prefix.endswith("numel"):
                continue
            key = (prefix, parameter.outer, parameter.type)
            if key not in self._made:
                name = f"{prefix}{self._counts[prefix]}"
                self._counts[prefix] += 1
                self._made[key] = (replace(parameter, name=name), example)
            found[parameter.name] = self._made[key][0].name
        return found

    @property
    def ordered(self) -> list[tuple[KernelParameter, Any]]:
        """The parameters with their examples, as signatures have them."""
        return [made for prefix in _ORDER for key, made in self._made.items() if key[0] == prefix]


def _sizes(members: Sequence[KernelText], number: int) -> list[KernelParameter]:
    """Return the parameters that the grid is made of: the length of a part, and how many members it
    has, if several.
    """
    (length,) = (parameter for parameter in members[0].parameters if parameter.name == "xnumel")
    found = [replace(length, name=f"xnumel_{number}")]
    if len(members) > 1:
        count = numel_parameter("y", sympy.Integer(len(members)), wide=False)
        found.append(replace(count, name=f"ynumel_{number}"))
    return found


def _body(parts: Sequence[Sequence[KernelText]], shared: _Parameters) -> list[str]:
    lines = [f"program = {_PROGRAM}"]
    for number, members in enumerate(parts):
        text, count, end = members[0], len(members), f"end_{number}"
        programs, before = (
            f"tl.cdiv({text.dimensions[0][1]}, XBLOCK_{number})",
            f"end_{number - 1}",
        )
        own = programs if count == 1 else f"{count} * {programs}"
        first, place = number == 0, "program" if number == 0 else f"(program - {before})"
        lines += [
            f"{end} = {own}" if first else f"{end} = {before} + {own}",
            f"if program < {end}:" if first else f"if (program >= {before}) & (program < {end}):",
        ]
        names = {block: f"{block}_{number}" for block in _BLOCKS}
        given = [shared.names(member) for member in members]
        if count == 1:
            inside, names = [f"pid = {place}"], names | given[0]
        else:
            inside = [f"programs = {programs}", f"member = {place} // programs"]
            inside.append(f"pid = {place} % programs")
            chosen, of_member = _chosen(given)
            inside, names = [*inside, *chosen], names | of_member
        inside += [_renamed(line, names) for line in text.body]
        lines += [f"    {line}" for line in inside]
    return lines


def _chosen(given: Sequence[Mapping[str, str]]) -> tuple[list[str], dict[str, str]]:
    """Return the lines that choose the parameters of a program's member, and what each parameter of
    the part is called then; what all members share is not chosen.
    """
    lines, names = [], {}
    for local, first in given[0].items():
        others = [item[local] for item in given[1:]]
        names[local] = first
        if set(others) != {first}:
            names[local] = name = f"of_{local}"
            lines.append(f"{name} = {first}")
            lines += [
                f"{name} = tl.where(member == {n}, {other}, {name})"
                for n, other in enumerate(others, 1)
            ]
    return lines, names


def _renamed(line: str, names: Mapping[str, str]) -> str:
    return _WORD.sub(lambda word: names.get(word[0], word[0]), line.replace(_PROGRAM, "pid"))
