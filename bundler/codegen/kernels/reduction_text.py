# SPDX-License-Identifier: Apache-2.0
"""`ReductionWriter`: the text of reductions, in a kernel that holds whole rows and in one that
loops over them.

A row that is held whole is reduced at once, lanes beyond its end replaced by the identity.  A
looped one has an accumulator for each lane, which keeps its value where the mask is false, and is
reduced after the loop.  Mean and deviations share one computation, as do equal reductions.  Where
programs share a row, what lanes come to in each is exchanged behind the loop, and the parts of all
programs are reduced as lanes are.

`kernel_body` calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bundler.codegen.kernels.kernel_shape import KernelShape
from bundler.codegen.kernels.literals import constant_text
from bundler.codegen.kernels.operation_text import Value
from bundler.codegen.kernels.shared_row_text import SharedRow
from bundler.codegen.loops.data_types import compute_type, identity_of
from bundler.codegen.loops.loop_terms import Term
from bundler.codegen.loops.range_trees import Dimension

Reduced = tuple[Value, list[str]]
# Kinds that one computation gives, and which of its results each is.
_FAMILIES = {
    "welford_mean": ("welford", 0),
    "welford_m2": ("welford", 1),
    "softmax_max": ("softmax", 0),
    "softmax_sum": ("softmax", 1),
}
_FINAL = {
    "sum": "tl.sum",
    "prod": "lib.product",
    "max": "lib.largest",
    "min": "lib.smallest",
    "any": "lib.any_of",
    "xor_sum": "lib.xor_sum",
}
_COMBINED = {
    "sum": "{0} + {1}",
    "prod": "{0} * {1}",
    "max": "lib.maximum({0}, {1})",
    "min": "lib.minimum({0}, {1})",
    "any": "{0} | {1}",
    "xor_sum": "{0} ^ {1}",
}


@dataclass(frozen=True)
class ReducedRow:
    """The row that a kernel reduces.

    Attributes:
        shape: text of the shape of a block.
        axis: which axis is reduced.
        kept: text of the shape of a value that rows have one of.
        suffix: subscript that gives a reduced value the reduced axis back, of size 1.
        mask: which lanes count; None for all.
        prefix: of the reduced dimension.
    """

    shape: str
    axis: int
    kept: str
    suffix: str
    mask: str | None
    prefix: str


def row_of(shape: KernelShape) -> ReducedRow | None:
    """Return what reductions need to know of the row."""
    reduced = shape.space.reduced
    return None if reduced is None else _along(shape, reduced)


def column_of(shape: KernelShape) -> ReducedRow | None:
    """Return the same for reductions across rows, in a kernel that runs through rows."""
    return _along(shape, shape.space.kept[0]) if shape.rows_each else None


def _along(shape: KernelShape, reduced: Dimension) -> ReducedRow:
    dimensions = shape.space.dimensions
    active = sorted(shape.masks(set(dimensions)))
    return ReducedRow(
        shape.block_shape,
        dimensions.index(reduced),
        shape.shape_of([d for d in dimensions if d is not reduced]),
        f"[{', '.join('None' if d is reduced else ':' for d in dimensions)}]",
        " & ".join(active) or None,
        reduced.prefix,
    )


class ReductionWriter:
    """Writes reductions of one kernel.

    Args:
        looped: whether rows are run through block by block.
        row: None in a kernel without reductions.
        name: returns the name of a new value.
        shared: exchanges what programs that share a row come to; None where none do.
    """

    def __init__(
        self,
        looped: bool,
        row: ReducedRow | None,
        name: Callable[[], str],
        shared: SharedRow | None = None,
    ) -> None:
        self._looped, self._given, self._name, self._shared = looped, row, name, shared
        self._known: dict[tuple[str, Term], tuple[Value, ...]] = {}
        self._before: list[str] = []
        # Of lanes behind the loop, and of parts of a row behind their exchange.
        self._lanes: list[str] = []
        self._after: list[str] = []

    @property
    def _row(self) -> ReducedRow:
        assert self._given is not None, "a reduction in a kernel without rows"
        return self._given

    def take(self) -> tuple[list[str], list[str]]:
        """Return the lines before and after a loop over the row, and forget them."""
        exchange = [] if self._shared is None else self._shared.take()
        found = self._before, [*self._lanes, *exchange, *self._after]
        self._before, self._lanes, self._after = [], [], []
        return found

    def reduce(self, kind: str, term: Term, value: Value, indexed: bool) -> Reduced:
        """Return the reduced value, and the lines that compute or accumulate it where the body
        stands.

        Args:
            kind: of `REDUCTIONS`.
            term: what is reduced; equal ones are reduced once.
            value: its text.
            indexed: whether the result is a position in the row.
        """
        family, place = _FAMILIES.get(kind, (kind, 0))
        known = self._known.get((family, term))
        lines: list[str] = []
        if known is None:
            writers = {"welford": self._welford, "softmax": self._softmax}
            write = writers.get(family, self._extremal_index if indexed else self._plain)
            known = self._known[family, term] = write(family, value, lines)
        return known[place], lines

    def _new(self, lines: list[str], text: str) -> str:
        name = self._name()
        lines.append(f"{name} = {text}")
        return name

    def _whole(self, accumulators: Sequence[str], dtypes: Sequence[str], reduced: str) -> list[str]:
        """Return accumulators of all that a row has: those of the lanes, or, where programs share
        the row, the parts of all programs.

        Args:
            accumulators, dtypes: of the lanes.
            reduced: text that reduces them along an axis, with places for their names.
        """
        if self._shared is None:
            return list(accumulators)
        names = [self._name() for _ in accumulators]
        text = reduced.format(*accumulators, axis=self._row.axis)
        self._lanes.append(f"{', '.join(names)} = {text}")
        return self._shared.exchange(list(zip(names, dtypes, strict=True)))

    def _spread(self, lines: list[str], value: Value) -> str:
        return self._new(lines, f"tl.broadcast_to({value.text}, {self._row.shape})")

    # --------------------------------------------------------------------- Sums, products, extremes

    def _plain(self, kind: str, value: Value, lines: list[str]) -> tuple[Value, ...]:
        row, identity = self._row, constant_text(identity_of(kind, value.dtype), value.dtype)
        # The value may be the same along the row, as in the sum of a constant: each lane counts.
        spread = self._spread(lines, value)
        if not self._looped:
            masked = (
                spread
                if row.mask is None
                else self._new(lines, f"tl.where({row.mask}, {spread}, {identity})")
            )
            return (Value(self._new(lines, self._finished(kind, masked)), value.dtype),)
        # One partial result for each lane, so that the loop has no step that all lanes wait for.
        accumulator = f"_{self._name()}"
        self._before.append(
            f"{accumulator} ="
            f" {constant_text(identity_of(kind, value.dtype), value.dtype, row.shape)}"
        )
        combined = self._new(lines, _COMBINED[kind].format(accumulator, spread))
        lines.append(f"{accumulator} = {self._kept(combined, accumulator)}")
        (whole,) = self._whole([accumulator], [value.dtype], _FINAL[kind] + "({0}, {axis})")
        return (Value(self._new(self._after, self._finished(kind, whole)), value.dtype),)

    def _finished(self, kind: str, text: str) -> str:
        return f"{_FINAL[kind]}({text}, {self._row.axis}){self._row.suffix}"

    def _kept(self, new: str, old: str) -> str:
        """Return the text of an accumulator that keeps its value where the mask is false."""
        return new if self._row.mask is None else f"tl.where({self._row.mask}, {new}, {old})"

    # ------------------------------------------------------------------------ Positions of extremes

    def _extremal_index(self, kind: str, value: Value, lines: list[str]) -> tuple[Value, ...]:
        row, identity = self._row, identity_of(kind.removeprefix("arg"), value.dtype)
        spread = self._spread(lines, value)
        index = self._new(lines, f"tl.broadcast_to({row.prefix}index, {row.shape}).to(tl.int64)")
        if not self._looped:
            masked = spread
            if row.mask is not None:
                masked = self._new(
                    lines, f"tl.where({row.mask}, {spread}, {constant_text(identity, value.dtype)})"
                )
            return (self._position(kind, masked, index, lines),)
        # The largest index loses against any other of an equal value: torch names the first one.
        best, place = f"_{self._name()}", f"_{self._name()}"
        self._before += [
            f"{best} = {constant_text(identity, value.dtype, row.shape)}",
            f"{place} = tl.full({row.shape}, {2**63 - 1}, tl.int64)",
        ]
        new, new_place = self._name(), self._name()
        lines += [
            f"{new}, {new_place} = lib.{kind}_combine({best}, {place}, {spread}, {index})",
            f"{best} = {self._kept(new, best)}",
            f"{place} = {self._kept(new_place, place)}",
        ]
        best, place = self._whole(
            [best, place], [value.dtype, "int64"], f"lib.{kind}({{0}}, {{1}}, {{axis}})"
        )
        return (self._position(kind, best, place, self._after),)

    def _position(self, kind: str, values: str, indices: str, lines: list[str]) -> Value:
        unused, found = self._name(), self._name()
        lines.append(f"{unused}, {found} = lib.{kind}({values}, {indices}, {self._row.axis})")
        return Value(self._new(lines, f"{found}{self._row.suffix}"), "int64")

    # -------------------------------------------------------------------------- Mean and deviations

    def _welford(self, _kind: str, value: Value, lines: list[str]) -> tuple[Value, ...]:
        row, kind = self._row, compute_type(value.dtype)
        spread = self._spread(lines, value)
        # A row that is held whole has its mean first and its deviations from it then, which is more
        # exact than combining partial results.
        if not self._looped:
            count = f"tl.full([], {row.prefix}numel, {kind})"
            mean, squares, weight = (self._name() for _ in range(3))
            # The count is that of the row, not of the block, whose other lanes are masked.
            lines.append(
                f"{mean}, {squares}, {weight} = lib.welford_two_pass({spread}, {row.mask}, {count},"
                f" {row.axis})"
            )
            return self._shaped((mean, squares), value.dtype, lines)
        kept = [f"_{self._name()}" for _ in range(3)]
        self._before += [f"{name} = tl.zeros({row.shape}, {kind})" for name in kept]
        # In the first step accumulators hold nothing, which `welford_next` is told; where it is not,
        # as in a later part of a row, nothing has no weight.
        new = [self._name() for _ in range(3)]
        lines.append(
            f"{', '.join(new)} = lib.welford_next({spread}, {', '.join(kept)}, {row.prefix}offset"
            " == 0)"
        )
        lines += [f"{old} = {self._kept(fresh, old)}" for old, fresh in zip(kept, new, strict=True)]
        kept = self._whole(kept, [value.dtype] * 3, "lib.welford({0}, {1}, {2}, {axis})")
        found = [self._name() for _ in range(3)]
        self._after.append(f"{', '.join(found)} = lib.welford({', '.join(kept)}, {row.axis})")
        return self._shaped((found[0], found[1]), value.dtype, self._after)

    # ---------------------------------------------- Maximum, and sum of exponentials relative to it

    def _softmax(self, _kind: str, value: Value, lines: list[str]) -> tuple[Value, ...]:
        row, kind = self._row, compute_type(value.dtype)
        least, one = (
            constant_text(number, value.dtype, row.shape) for number in (float("-inf"), 1.0)
        )
        spread = self._spread(lines, value)
        if not self._looped:
            top, total = spread, one
            if row.mask is not None:
                top = self._new(lines, f"tl.where({row.mask}, {spread}, {least})")
                total = self._new(lines, f"tl.where({row.mask}, {one}, 0.0)")
            return self._softmax_results(top, total, value.dtype, lines)
        top, total = f"_{self._name()}", f"_{self._name()}"
        self._before += [f"{top} = {least}", f"{total} = tl.zeros({row.shape}, {kind})"]
        new, new_total = self._name(), self._name()
        lines += [
            f"{new}, {new_total} = lib.softmax_combine({top}, {total}, {spread}, {one})",
            f"{top} = {self._kept(new, top)}",
            f"{total} = {self._kept(new_total, total)}",
        ]
        top, total = self._whole(
            [top, total], [value.dtype] * 2, "lib.softmax_reduce({0}, {1}, {axis})"
        )
        return self._softmax_results(top, total, value.dtype, self._after)

    def _softmax_results(
        self, top: str, total: str, dtype: str, lines: list[str]
    ) -> tuple[Value, ...]:
        first, second = self._name(), self._name()
        lines.append(f"{first}, {second} = lib.softmax_reduce({top}, {total}, {self._row.axis})")
        # A row of nothing but minus infinity has no softmax: -inf - -inf is NaN, as in torch.
        whole = self._new(lines, f"tl.where({first} == float('-inf'), float('nan'), {second})")
        return self._shaped((first, whole), dtype, lines)

    def _shaped(self, names: tuple[str, ...], dtype: str, lines: list[str]) -> tuple[Value, ...]:
        return tuple(Value(self._new(lines, f"{name}{self._row.suffix}"), dtype) for name in names)
