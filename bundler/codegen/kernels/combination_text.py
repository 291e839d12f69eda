# SPDX-License-Identifier: Apache-2.0
"""`write_combination`: kernels that do not wait for each other become one, in which each program
works for one of them.

The programs of the first part come first, then those of the second, and so on; or neighbouring
programs take the parts in turn, where a measurement found that faster.  A part has the lines that
its kernel has alone, behind a test of the program's number, and blocks of its own, `XBLOCK_0`,
`XBLOCK_1`.  Kernels that are equal but for their tensors are one part: its programs choose the
tensors, so that a list of many tensors of few shapes is a short text.

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

A length that changes from call to call is a parameter, `xnumel_0`, in the place of the number.
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
from bundler.codegen.kernels.module_text import members_of, module_text
from bundler.codegen.loops.fusion import LoopGroup
from bundler.codegen.loops.loop_nodes import Buffer
from bundler.codegen.loops.loop_terms import TermPool

_WORD = re.compile(r"\b[A-Za-z_][A-Za-z0-9_]*\b")
_PROGRAM = "tl.program_id(0)"
_BLOCKS = ("XBLOCK", "R0_BLOCK")
# What a program of elements mostly works for, and the least where blocks are balanced.
_ELEMENTS_OF_A_PROGRAM, _FEWEST_OF_A_PROGRAM = 1024, 128
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
    """Return the kernel of a group's parts, each of elements along one dimension, or of rows;
    arguments as `write_kernel` has them.
    """
    # Equal kernels together, by all that their modules say.
    alike: dict[object, list[KernelText]] = {}
    for part in group.parts:
        given = (part, pool, buffers, removed, reused, size_hints, bounded)
        text = write_kernel(*given, asserted=asserted, upcast=upcast)
        # The text of a size that changes is a name, whatever size it is.
        alike.setdefault((module_text(text, {}), text.dimensions), []).append(text)
    return _combined(list(alike.values()), in_turn=group.in_turn)


def takes_turns(text: KernelText) -> bool:
    """Whether at most half of the programs would have nothing to do if the parts of a kernel were
    taken in turn, so that each has as many programs as the largest, in blocks that are balanced.
    """
    sizes = dict(zip((p.name for p in text.parameters), text.examples, strict=True))
    least, most = [], []
    for number, (part, members) in enumerate(zip(text.parts, members_of(text), strict=True)):
        count = sizes[f"xnumel_{number}"] * members
        elements = part.kind == "pointwise"
        least.append(-(-count // _ELEMENTS_OF_A_PROGRAM) if elements else count)
        most.append(-(-count // _FEWEST_OF_A_PROGRAM) if elements else count)
    largest = max(least, default=0)
    busy = sum(min(one, largest) for one in most)
    return len(least) > 1 and largest * len(least) <= 2 * busy


def _combined(parts: Sequence[Sequence[KernelText]], *, in_turn: bool) -> KernelText:
    texts = [text for members in parts for text in members]
    shared, kept = SharedParameters(), [members[0] for members in parts]
    lines = (_in_turn if in_turn else _one_after_another)(parts, shared)
    given = [
        *shared.ordered,
        *(size for number, members in enumerate(parts) for size in _sizes(members, number)),
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
        in_turn=in_turn,
    )


class SharedParameters:
    """The parameters of kernels that share a launch: a buffer that several read is passed once."""

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


def changing_lengths(text: KernelText) -> list[str]:
    """Return the prefixes of dimensions whose length changes from call to call."""
    return [prefix for prefix, length in text.dimensions if not length.is_Integer]


def _sizes(members: Sequence[KernelText], number: int) -> list[tuple[KernelParameter, Any]]:
    """Return the parameters that the grid is made of, with their examples: the length of a part,
    and how many members it has, if several; and the length of its rows where that changes.
    """
    text = members[0]
    passed = {"x", *changing_lengths(text)}
    found = [
        (replace(parameter, name=f"{parameter.name}_{number}"), example)
        for parameter, example in zip(text.parameters, text.examples, strict=True)
        if parameter.name in {f"{prefix}numel" for prefix in passed}
    ]
    if len(members) > 1:
        count = numel_parameter("y", sympy.Integer(len(members)), wide=False)
        found.append((replace(count, name=f"ynumel_{number}"), len(members)))
    return found


def _one_after_another(
    parts: Sequence[Sequence[KernelText]], shared: SharedParameters
) -> list[str]:
    lines = [f"program = {_PROGRAM}"]
    for number, members in enumerate(parts):
        end, before = f"end_{number}", f"end_{number - 1}"
        own = _programs(members, number)
        first, place = number == 0, "program" if number == 0 else f"(program - {before})"
        lines += [
            f"{end} = {own}" if first else f"{end} = {before} + {own}",
            f"if program < {end}:" if first else f"if (program >= {before}) & (program < {end}):",
            *_of_part(members, number, place, shared),
        ]
    return lines


def _in_turn(parts: Sequence[Sequence[KernelText]], shared: SharedParameters) -> list[str]:
    """Return the lines of a kernel whose neighbouring programs work for different parts; a part
    that needs fewer programs than the largest leaves the last ones idle.
    """
    count = len(parts)
    lines = [f"part = {_PROGRAM} % {count}", f"turn = {_PROGRAM} // {count}"]
    for number, members in enumerate(parts):
        lines += [
            f"if (part == {number}) & (turn < {_programs(members, number)}):",
            *_of_part(members, number, "turn", shared),
        ]
    return lines


def _programs(members: Sequence[KernelText], number: int) -> str:
    """Return how many programs a part needs, as text."""
    one = f"tl.cdiv({_length(members[0], number)}, XBLOCK_{number})"
    return one if len(members) == 1 else f"{len(members)} * {one}"


def _length(text: KernelText, number: int) -> str:
    length = text.dimensions[0][1]
    return str(length) if length.is_Integer else f"xnumel_{number}"


def _of_part(
    members: Sequence[KernelText], number: int, place: str, shared: SharedParameters
) -> list[str]:
    """Return the lines of a part, indented, given the text of the program's number within it."""
    text = members[0]
    names = {block: f"{block}_{number}" for block in _BLOCKS}
    names |= {f"{prefix}numel": f"{prefix}numel_{number}" for prefix in changing_lengths(text)}
    given = [shared.names(member) for member in members]
    if len(members) == 1:
        inside, names = [f"pid = {place}"], names | given[0]
    else:
        inside = [f"programs = tl.cdiv({_length(text, number)}, XBLOCK_{number})"]
        inside += [f"member = {place} // programs", f"pid = {place} % programs"]
        chosen, of_member = lines_that_choose(given)
        inside, names = [*inside, *chosen], names | of_member
    inside += [renamed(line, names) for line in text.body]
    return [f"    {line}" for line in inside]


def lines_that_choose(given: Sequence[Mapping[str, str]]) -> tuple[list[str], dict[str, str]]:
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


def renamed(line: str, names: Mapping[str, str]) -> str:
    """Return a line of a part with the names that its parameters have in the whole kernel."""
    return _WORD.sub(lambda word: names.get(word[0], word[0]), line.replace(_PROGRAM, "pid"))
