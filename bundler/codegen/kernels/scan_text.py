# SPDX-License-Identifier: Apache-2.0
"""`ScanWriter`: the text of scans, in a kernel that holds whole rows and in one that loops over
them, and of the functions that combine two elements.

Each element of a row becomes the combination of all elements up to it.  A row that is held whole is
scanned at once; lanes beyond its end come last, so no lane that counts sees them.  A looped kernel
scans one block after the other, and combines each with what the blocks before it came to.

`kernel_body` calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bundler.codegen.kernels import operation_text
from bundler.codegen.kernels.literals import constant_text
from bundler.codegen.kernels.operation_text import Value
from bundler.codegen.kernels.operator_support import options_of
from bundler.codegen.kernels.reduction_text import ReducedRow
from bundler.codegen.loops.data_types import compute_type
from bundler.codegen.loops.loop_terms import Argument, Combination, Term, in_order_of


class ScanWriter:
    """Writes scans of one kernel.

    Args:
        looped: whether rows are run through block by block.
        row: None in a kernel without rows.
        name: returns the name of a new value.
    """

    def __init__(self, looped: bool, row: ReducedRow | None, name: Callable[[], str]) -> None:
        self._looped, self._given, self._name = looped, row, name
        # Text without the name -> name.
        self._functions: dict[str, str] = {}
        self._before: list[str] = []

    @property
    def functions(self) -> tuple[str, ...]:
        """The texts of the functions that the scans use."""
        return tuple(f"@triton.jit\ndef {name}{text}" for text, name in self._functions.items())

    def take(self) -> list[str]:
        """Return the lines before a loop over the row, and forget them."""
        found, self._before = self._before, []
        return found

    def scan(
        self, combination: Combination, values: Sequence[Value]
    ) -> tuple[list[Value], list[str]]:
        """Return what each operand becomes, and the lines that compute it where the body stands.

        Args:
            combination: of two neighbours.
            values: an element of each operand.
        """
        row, lines = self._given, list[str]()
        assert row is not None, "a scan in a kernel without rows"
        text = function_text(combination)
        function = self._functions.setdefault(text, f"combine_{len(self._functions)}")
        spread = [
            self._new(lines, f"tl.broadcast_to({value.text}, {row.shape})") for value in values
        ]
        found = self._several(
            lines, spread, f"tl.associative_scan(({', '.join(spread)},), {row.axis}, {function})"
        )
        dtypes = [term.dtype for term in combination.results]
        if self._looped:
            found = self._continued(lines, found, dtypes, function)
        return [Value(name, dtype) for name, dtype in zip(found, dtypes, strict=True)], lines

    def _continued(
        self, lines: list[str], scanned: list[str], dtypes: list[str], function: str
    ) -> list[str]:
        """Return a block's elements combined with what all blocks before it came to."""
        row = self._given
        assert row is not None
        carried = [f"_{self._name()}" for _ in scanned]
        # Not used in the first step of the loop: no value changes nothing in every combination.
        self._before += [
            f"{name} = tl.zeros({row.kept}, {compute_type(dtype)})"
            for name, dtype in zip(carried, dtypes, strict=True)
        ]
        first = self._new(lines, f"{row.prefix}offset == 0")
        last = f"{row.prefix}base == {row.prefix.upper()}BLOCK - 1"
        ends = [self._new(lines, f"lib.last_of({name}, {last}, {row.axis})") for name in scanned]
        whole = self._several(
            lines, scanned, f"{function}({', '.join([*carried, *scanned])})", tuple_of_one=False
        )
        found = [
            self._new(lines, f"tl.where({first}, {part}, {all_})")
            for part, all_ in zip(scanned, whole, strict=True)
        ]
        after = self._several(
            lines, ends, f"{function}({', '.join([*carried, *ends])})", tuple_of_one=False
        )
        lines += [
            f"{name} = tl.where({first}, {end}, {together})"
            for name, end, together in zip(carried, ends, after, strict=True)
        ]
        return found

    def _new(self, lines: list[str], text: str) -> str:
        name = self._name()
        lines.append(f"{name} = {text}")
        return name

    def _several(
        self, lines: list[str], like: Sequence[str], text: str, *, tuple_of_one: bool = True
    ) -> list[str]:
        """Return the names of the results of a call, one for each of `like`."""
        names = [self._name() for _ in like]
        comma = "," if tuple_of_one and len(names) == 1 else ""
        lines.append(f"{', '.join(names)}{comma} = {text}")
        return names


def function_text(combination: Combination) -> str:
    """Return the text of a function behind its name."""
    count = len(combination.results)
    names = [f"{side}{number}" for side in ("left", "right") for number in range(count)]
    values: dict[Argument, Value] = {}
    lines: list[str] = []
    for term in in_order_of(combination.results):
        value = _value_of(term, names, values)
        if term.operator != "argument":
            name = f"tmp{len(lines)}"
            lines.append(f"    {name} = {value.text}\n")
            value = Value(name, value.dtype)
        values[term] = value
    results = ", ".join(values[term].text for term in combination.results)
    return f"({', '.join(names)}):\n{''.join(lines)}    return {results}\n"


def _value_of(term: Term, names: Sequence[str], values: dict[Argument, Value]) -> Value:
    if term.operator == "argument":
        return Value(names[term.details[0]], term.dtype)
    if term.operator == "constant":
        return Value(constant_text(term.details[0], term.dtype), term.dtype)
    arguments = [values[item] if isinstance(item, Term) else item for item in term.arguments]
    return operation_text.render(term.operator, arguments, **dict(options_of(term)))
