# SPDX-License-Identifier: Apache-2.0
"""The loop-level form of a program: `Buffer`s in memory, and the nodes that write them: `Loop` and
`ExternCall`.

A loop computes every element of a buffer by itself (`pointwise`), reduces rows into one element
each, or gives each element of a row what a scan has there.  Lowerings make nodes, `fusion` puts loops together, the kernel writer turns them into text,
and the wrapper runs what is left in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy

from bundler.codegen.loops.loop_terms import TEMPLATES, Load, Term, loads_of
from bundler.format.cached_properties import cached_property

POINTWISE = "pointwise"
#: The buffer that holds the seeds of a call's random numbers.
SEEDS = "seeds"
#: Stands for the number of a program in the index of what each program stores of its own.
PROGRAM = sympy.Symbol("program", integer=True, nonnegative=True)
#: Both kinds of a pair, such as `welford_mean` and `welford_m2`, come from one computation.
REDUCTIONS = frozenset(
    {
        "sum",
        "prod",
        "max",
        "min",
        "any",
        "xor_sum",
        "argmax",
        "argmin",
        "welford_mean",
        "welford_m2",
        "softmax_max",
        "softmax_sum",
    }
)


def numel(sizes: Sequence[sympy.Expr]) -> sympy.Expr:
    """Return the product of sizes."""
    return sympy.expand(sympy.Mul(*sizes)) if sizes else sympy.Integer(1)


def contiguous_strides(sizes: Sequence[sympy.Expr]) -> tuple[sympy.Expr, ...]:
    """Return the strides of a dense tensor whose last dimension is innermost."""
    strides, step = [], sympy.Integer(1)
    for size in reversed(sizes):
        strides.append(step)
        # torch counts an empty dimension as one element here.
        step = step * (sympy.Integer(1) if size == 0 else size)
    return tuple(reversed(strides))


def channels_last_strides(sizes: Sequence[sympy.Expr]) -> tuple[sympy.Expr, ...]:
    """Return the strides of a dense tensor of images whose channels are innermost."""
    count, channels, height, width = sizes
    batch, row, pixel, channel = contiguous_strides((count, height, width, channels))
    return batch, channel, row, pixel


@dataclass(frozen=True)
class TensorLayout:
    """How a tensor lies in memory: dtype, in elements sizes, strides and offset, and `HOST` where
    that is not the program's device.
    """

    dtype: str
    sizes: tuple[sympy.Expr, ...]
    strides: tuple[sympy.Expr, ...]
    offset: sympy.Expr = field(default_factory=lambda: sympy.Integer(0))
    device: str = ""

    def index(self, indices: Sequence[sympy.Expr]) -> sympy.Expr:
        """Return where an element is."""
        return self.offset + sum(
            (index * stride for index, stride in zip(indices, self.strides, strict=True)),
            sympy.Integer(0),
        )

    @property
    def storage(self) -> sympy.Expr:
        """How many elements of memory the tensor spans from its first one."""
        # Without an element nothing is spanned, whatever the strides.
        if any(size == 0 for size in self.sizes):
            return sympy.Integer(0)
        spans = [(size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True)]
        return sympy.expand(self.offset + sum(spans, sympy.Integer(1)))


@dataclass(frozen=True)
class Buffer:
    """A tensor in memory.

    Attributes:
        name: in the program.
        layout: where its elements are.
        source: `input`, `constant`, `seeds` for the seeds of random numbers, `value` for a number
            that the host computes of sizes, or `node` for what a node of the program writes.
        aligned: its address is known to be a multiple of 16 bytes.
        shared: its memory may be that of another buffer, since an operator that was called returned
            a view.
        bases: buffers whose memory it may share, as the result of such a call.
    """

    name: str
    layout: TensorLayout
    source: str = "node"
    aligned: bool = True
    shared: bool = False
    bases: tuple[str, ...] = ()

    @property
    def by_value(self) -> bool:
        """Whether kernels are given its only element instead of its address: it lies on the
        host.
        """
        return self.source == "value" or bool(self.layout.device)


@dataclass(frozen=True)
class Loop:
    """Elements of one buffer, each computed by the same body.

    Attributes:
        buffer: what is written.
        variables, sizes: one for each dimension that is kept, the outermost first.
        reduced, reduced_sizes: one for each dimension that is reduced; none for `pointwise`.
        value: the body.
        kind: `pointwise`, one of `REDUCTIONS`, or one of `ALONG_ROWS`: then the value is such a
            term, and `index` is over the reduced variables too. `product`: the value is such a
            term; variables are batch, if there is one, row and column. `attention`: so too; the
            last three are heads that share keys, row and column, all others are the batch.
        index: where in the buffer the value goes, over the kept variables and indirect symbols.
        index_terms: (symbol, term) of the indirect symbols of `index`.
        mode: None where every element is written once; `store`, `atomic_add`, `atomic_max` or
            `atomic_min` into a buffer that holds values already.
        origins: names of the operators that the loop came from.
        rows_each: of a reduction across rows in a kernel of rows (`mixed_reductions`) how many rows
            a program reduces into one: it keeps the reduced variables, and `index` is over those
            and `PROGRAM`; else 0.
        first: how many elements of each row are written, from the first on; None for all.
        of_product: whether a sum is a product of one row with a matrix.
        measured: of a product, whether its candidates are worth a measurement; one that is not
            loads both operands, and has the first candidate.
    """

    buffer: str
    variables: tuple[sympy.Symbol, ...]
    sizes: tuple[sympy.Expr, ...]
    reduced: tuple[sympy.Symbol, ...]
    reduced_sizes: tuple[sympy.Expr, ...]
    value: Term
    kind: str
    index: sympy.Expr
    index_terms: tuple[tuple[sympy.Symbol, Term], ...] = ()
    mode: str | None = None
    origins: frozenset[str] = frozenset()
    rows_each: int = 0
    first: int | None = None
    of_product: bool = False
    measured: bool = True

    @property
    def is_reduction(self) -> bool:
        """Whether rows become one element."""
        return self.kind in REDUCTIONS

    @property
    def has_rows(self) -> bool:
        """Whether it goes through rows: it reduces them, or its elements are made of several of
        their row.
        """
        return self.kind != POINTWISE and not self.is_product

    @property
    def is_product(self) -> bool:
        """Whether it is a product of matrices, or attention: its kernel is a template."""
        return self.kind in TEMPLATES

    @property
    def roots(self) -> tuple[Term, ...]:
        """The terms that have to be computed for it."""
        return (self.value, *(term for _, term in self.index_terms))

    @property
    def writes(self) -> tuple[str, ...]:
        """The buffers that it writes."""
        return (self.buffer,)

    @cached_property
    def loads(self) -> tuple[Load, ...]:
        """What it loads."""
        return tuple(load for root in self.roots for load in loads_of(root))

    @cached_property
    def reads(self) -> frozenset[str]:
        """The buffers that it reads; also the one that it adds to."""
        found = {load[0] for load in self.loads}
        return frozenset(found | ({self.buffer} if self.mode else set()))


@dataclass(frozen=True)
class Reference:
    """A buffer as an argument of an extern call or as a result, seen through a layout of its own.

    Attributes:
        buffer: its name.
        layout: where the elements are in it.
        view: a result that is another tensor than the one that was made in the buffer, and shares
            its memory.
        fresh: a result that is a copy, new in each call.
    """

    buffer: str
    layout: TensorLayout
    view: bool = False
    fresh: bool = False


@dataclass(frozen=True)
class TorchValue:
    """An argument of an extern call that only torch has: a dtype, a device, a memory format or a
    layout of storage, by name.
    """

    kind: str
    name: str


@dataclass(frozen=True)
class ExternCall:
    """An ATen operator that is called as it is.

    Attributes:
        operator: its name, as `aten.mm.default`.
        arguments, keywords: `Reference`s, sizes, plain values, and lists of these.
        outputs: buffers that hold its results; None in the place of a result that is no tensor, or
            that nobody uses.
        reason: why no kernel was generated.
        mutated: buffers that the call changes.
        ordered: whether all calls before it come first, and all behind it later.
    """

    operator: str
    arguments: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]
    outputs: tuple[str | None, ...]
    reason: str
    single: bool = True
    mutated: tuple[str, ...] = ()
    ordered: bool = False

    @property
    def writes(self) -> tuple[str, ...]:
        """The buffers that it writes."""
        return (*(name for name in self.outputs if name is not None), *self.mutated)

    @property
    def is_check(self) -> bool:
        """Whether it writes nothing: it is called to raise where values are wrong."""
        return not self.writes

    @cached_property
    def reads(self) -> frozenset[str]:
        """The buffers that it reads."""
        return frozenset(_references([*self.arguments, *(value for _, value in self.keywords)]))


def _references(values: Any) -> list[str]:
    if isinstance(values, Reference):
        return [values.buffer]
    if isinstance(values, (list, tuple)):
        return [name for value in values for name in _references(value)]
    return []


Node = Loop | ExternCall
