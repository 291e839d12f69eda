# SPDX-License-Identifier: Apache-2.0
"""Attention as a kernel: torch's operator, those of the libraries that torch calls for it, and the
one that tracing keeps whole (`attention_operator`).

Few queries have few programs, so that keys are split among several, and a second kernel adds up
what each found. Where heads of queries share keys, the queries of all of them are rows of one
block then, so that each key is read once. `ATTENTIONS` maps names to functions (builder, call) ->
results; `operator_lowerings` calls them where the graph is lowered with templates.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import sympy

from bundler.codegen.loops.data_types import NumberKind, data_type
from bundler.codegen.loops.index_functions import FloorDiv
from bundler.codegen.loops.lazy_tensors import GraphBuilder, Indices, LazyTensor, variables
from bundler.codegen.loops.loop_nodes import Loop, TensorLayout, numel
from bundler.codegen.loops.loop_terms import ATTENTION, AttentionDetails, Term
from bundler.codegen.lowerings.operator_calls import OperatorCall
from bundler.codegen.lowerings.view_lowerings import broadcast, viewed
from bundler.runtime.heuristics.attention_rules import LARGEST_HEAD
from bundler.runtime.heuristics.block_limits import ceil_div, pow2_down

Lowered = tuple[LazyTensor | None, ...]
Lowering = Callable[[GraphBuilder, OperatorCall], Lowered]
_MATRIX_UNITS = frozenset({"float16", "bfloat16", "float32"})
_LN_2 = math.log(2)
_LOG2_E = 1 / _LN_2
_ONE = sympy.Integer(1)
# Of at most so many queries keys are split, into parts of at least so many, so that there are
# about as many programs as the largest devices run at once.
_FEW_QUERIES, _LEAST_PART, _PROGRAMS, _MOST_PARTS = 16, 128, 256, 64
# What a size counts as that has no example.
_UNKNOWN_SIZE = 2048


class _Shape(NamedTuple):
    """How the work is laid out.

    Attributes:
        batch: sizes in front of rows and columns, of the result.
        group: how many neighbours of the last of them are rows of one block.
        splits: how many programs share the keys of a row.
    """

    batch: tuple[sympy.Expr, ...]
    group: int
    splits: int


class _AttentionOperands(NamedTuple):
    """Attention of tensors that have the result's batch, whatever they share."""

    query: LazyTensor
    key: LazyTensor
    value: LazyTensor
    mask: LazyTensor | None
    causal: bool
    scale: float


def _attention(builder: GraphBuilder, call: OperatorCall) -> Lowered:
    logarithms = 1 in call.read
    if not call.read <= {0, 1}:
        raise call.refusal(
            "something reads its random state or its debug mask: expected readers of the result and"
            " the logarithms of sums alone"
        )
    problem = _problem(builder, call)
    if problem.key.sizes[-2] == 0 or numel(call.sizes) == 0:
        if logarithms:
            raise call.refusal("no key, and something reads the logarithms of sums")
        zero = builder.pool.constant(0, call.dtype)
        found = builder.lazy(call.sizes, call.dtype, lambda _: zero, call.origins)
        return (found, *[None] * (len(call.results) - 1))
    shape = _laid_out(builder, problem, call, split=not logarithms)
    if logarithms:
        given = call.results[1]
        if given is None or given.sizes != call.sizes[:-1]:
            raise call.refusal("its logarithms of sums have other sizes than its rows")
        result, sums = _with_logarithms(builder, call, problem, shape)
        return (result, sums, *[None] * (len(call.results) - 2))
    if shape.splits > 1:
        return (_added_up(builder, call, problem, shape), *[None] * (len(call.results) - 1))
    return (_loop(builder, call, problem, shape), *[None] * (len(call.results) - 1))


def _problem(builder: GraphBuilder, call: OperatorCall) -> _AttentionOperands:
    """Return what a call computes; raises where no kernel does."""
    given = call.arguments
    query, key, value = (given[name] for name in ("query", "key", "value"))
    mask = given.get("attn_mask", given.get("attn_bias"))
    if given.get("dropout_p", 0.0) != 0:
        raise call.refusal("dropout: its random numbers are torch's")
    dtypes = {tensor.dtype for tensor in (query, key, value)}
    if len(dtypes) != 1 or not dtypes <= _MATRIX_UNITS:
        raise call.refusal(f"attention of {', '.join(sorted(dtypes))}")
    heads = (query.sizes[-1], value.sizes[-1])
    if not all(size.is_Integer and 0 < size <= LARGEST_HEAD for size in heads):
        raise call.refusal(
            f"heads of {' and '.join(map(str, heads))} elements: expected 1 to {LARGEST_HEAD},"
            " the same in each call"
        )
    scale = given.get("scale")
    if scale is None:
        scale = 1 / math.sqrt(int(heads[0]))
    if sympy.sympify(scale).is_finite is not True or not sympy.sympify(scale).is_number:
        raise call.refusal(f"a scale of {scale}: expected a finite number, the same in each call")
    if mask is not None and data_type(mask.dtype).kind not in {NumberKind.BOOL, NumberKind.FLOAT}:
        raise call.refusal(f"a mask of {mask.dtype}")
    causal = bool(given.get("is_causal", False))
    if causal and mask is not None:
        raise call.refusal("both a mask and a causal one")
    batch = call.sizes[:-2]
    rows_and_keys = (*batch, query.sizes[-2], key.sizes[-2])
    return _AttentionOperands(
        _batched(builder, call, query),
        _batched(builder, call, key),
        _batched(builder, call, value),
        None if mask is None else _repeated(builder, mask, rows_and_keys),
        causal,
        float(scale),
    )


def _batched(builder: GraphBuilder, call: OperatorCall, tensor: LazyTensor) -> LazyTensor:
    """Return a tensor with the result's batch: repeated, or, of heads that several of the batch
    share, each as often as there are such.
    """
    batch = call.sizes[:-2]
    sizes = (*batch, *tensor.sizes[-2:])
    if len(tensor.sizes) != len(sizes) or not batch or tensor.sizes[-3] in {1, batch[-1]}:
        return _repeated(builder, tensor, sizes)
    shared, head = sympy.cancel(batch[-1] / tensor.sizes[-3]), len(batch) - 1
    if not shared.is_Integer:
        raise call.refusal(f"{batch[-1]} heads that share {tensor.sizes[-3]}: how many changes")
    _keep_in_memory(builder, tensor)

    def reindex(at: Indices) -> Indices:
        return (*at[:head], FloorDiv(at[head], shared), *at[head + 1 :])

    return viewed(tensor, sizes, reindex)


def _repeated(
    builder: GraphBuilder, tensor: LazyTensor, sizes: tuple[sympy.Expr, ...]
) -> LazyTensor:
    _keep_in_memory(builder, tensor)
    return broadcast(tensor, sizes)


def _keep_in_memory(builder: GraphBuilder, tensor: LazyTensor) -> None:
    """Store what is computed, before it is seen repeated."""
    term = tensor.at(variables("i", tensor.sizes))
    if term.operator != "load" or term.arguments:
        builder.realize(tensor)


# -------------------------------------------------------------------------------- The work's layout


def _laid_out(
    builder: GraphBuilder, problem: _AttentionOperands, call: OperatorCall, *, split: bool
) -> _Shape:
    """Return how many programs share what.

    Args:
        builder: that knows the example's sizes.
        problem, call: what is computed.
        split: whether keys may be split.
    """
    batch, rows = call.sizes[:-2], call.sizes[-2]
    few = rows.is_Integer and rows <= _FEW_QUERIES
    if not few or not split or problem.causal:
        return _Shape(batch, 1, 1)
    group = _sharing(builder, problem, batch)
    heads = _example(builder, numel(batch)) // group
    programs = max(1, heads * ceil_div(group * int(rows), _FEW_QUERIES))
    keys = _example(builder, problem.key.sizes[-2])
    parts = min(keys // _LEAST_PART, _PROGRAMS // programs, _MOST_PARTS)
    return _Shape(batch, group, pow2_down(parts) if parts > 1 else 1)


def _sharing(
    builder: GraphBuilder, problem: _AttentionOperands, batch: tuple[sympy.Expr, ...]
) -> int:
    """Return how many neighbours of the last dimension of the batch read the same keys and
    values.
    """
    heads = batch[-1] if batch else _ONE
    if not heads.is_Integer:
        return 1
    for group in sympy.divisors(int(heads))[:0:-1]:
        space = _Space(_Shape(batch, int(group), 1), problem)
        read = builder.loads(
            [space.of_key(problem.key), space.of_value(problem.value)], space.ranges
        )
        if not any(term.details[1].has(space.member) for term in read):
            return int(group)
    return 1


def _example(builder: GraphBuilder, size: sympy.Expr) -> int:
    known = size.subs(builder.hints)
    return int(known) if known.is_Integer else _UNKNOWN_SIZE


class _Space:
    """The variables of attention's loop: of the batch, the part of the keys, the member of a group
    of heads, row and column; and those that are summed up, key and element.
    """

    def __init__(self, shape: _Shape, problem: _AttentionOperands) -> None:
        batch, group = shape.batch, sympy.Integer(shape.group)
        heads = (*batch[:-1], sympy.cancel(batch[-1] / group)) if batch else ()
        rows, length = problem.query.sizes[-2:]
        columns, keys = problem.value.sizes[-1], problem.key.sizes[-2]
        self.sizes = (*heads, sympy.Integer(shape.splits), group, rows, columns)
        self.summed = (keys, length)
        self.variables, self.reduced = variables("i", self.sizes), variables("r", self.summed)
        self.ranges = dict(
            zip((*self.variables, *self.reduced), (*self.sizes, *self.summed), strict=True)
        )
        *of_heads, self.split, self.member, self.row, self.column = (
            sympy.Integer(0) if size == 1 else name
            for name, size in zip(self.variables, self.sizes, strict=True)
        )
        self.key, self.element = self.reduced
        # What each element of the batch is, by the variables.
        self.batch = (*of_heads[:-1], of_heads[-1] * group + self.member) if batch else ()

    def of_query(self, tensor: LazyTensor) -> tuple[LazyTensor, Indices]:
        """Return a tensor and the indices of an element of a query."""
        return tensor, (*self.batch, self.row, self.element)

    def of_key(self, tensor: LazyTensor) -> tuple[LazyTensor, Indices]:
        """Return a tensor and the indices of an element of a key."""
        return tensor, (*self.batch, self.key, self.element)

    def of_value(self, tensor: LazyTensor) -> tuple[LazyTensor, Indices]:
        """Return a tensor and the indices of an element of a value."""
        return tensor, (*self.batch, self.key, self.column)

    def of_mask(self, tensor: LazyTensor) -> tuple[LazyTensor, Indices]:
        """Return a tensor and the indices of an element of a mask."""
        return tensor, (*self.batch, self.row, self.key)


# -------------------------------------------------------------------------------------------- Loops


class _Parts:
    """A buffer with the results of all parts of the keys, each divided by its own sum, and behind
    them the logarithms of these sums, to the base 2.
    """

    def __init__(self, builder: GraphBuilder, call: OperatorCall, shape: _Shape) -> None:
        self._pool, self._shape, (*_, self._rows, self._columns) = builder.pool, shape, call.sizes
        self._count = numel([*shape.batch, sympy.Integer(shape.splits), self._rows])
        size = sympy.expand(self._count * (self._columns + 1))
        self.name = builder.new_buffer(TensorLayout("float32", (size,), (_ONE,)))

    def _row_of(self, batch: Indices, split: sympy.Expr, row: sympy.Expr) -> sympy.Expr:
        place = sympy.Integer(0)
        for index, size in zip(batch, self._shape.batch, strict=True):
            place = place * size + index
        return (place * self._shape.splits + split) * self._rows + row

    def of_result(
        self, batch: Indices, split: sympy.Expr, row: sympy.Expr, column: sympy.Expr
    ) -> sympy.Expr:
        """Return where an element of a part's result is."""
        return sympy.expand(self._row_of(batch, split, row) * self._columns + column)

    def of_logarithm(self, batch: Indices, split: sympy.Expr, row: sympy.Expr) -> sympy.Expr:
        """Return where the logarithm of a part's row is."""
        return sympy.expand(self._count * self._columns + self._row_of(batch, split, row))

    def load(self, index: sympy.Expr) -> Term:
        """Return what stands there."""
        return self._pool.load(self.name, index, "float32")


def _loop(
    builder: GraphBuilder,
    call: OperatorCall,
    problem: _AttentionOperands,
    shape: _Shape,
    parts: _Parts | None = None,
) -> LazyTensor:
    """Add the loop that fills the result, or parts of it, and return that buffer."""
    space, pool = _Space(shape, problem), builder.pool
    query, key, value = builder.loads(
        [
            space.of_query(problem.query),
            space.of_key(problem.key),
            space.of_value(problem.value),
        ],
        space.ranges,
    )
    mask: tuple[Term, ...] = ()
    place: tuple[Term, ...] = ()
    if problem.mask is not None:
        mask = builder.loads([space.of_mask(problem.mask)], space.ranges)
    if parts is None:
        name = builder.new_buffer(call.result)
        index = sympy.expand(call.result.index((*space.batch, space.row, space.column)))
    else:
        name = parts.name
        index = parts.of_result(space.batch, space.split, space.row, space.column)
        place = (pool.index(parts.of_logarithm(space.batch, space.split, space.row)),)
    details = AttentionDetails(
        causal=problem.causal,
        scale=problem.scale * _LOG2_E,
        precision=builder.precision,
        splits=shape.splits,
        masked=problem.mask is not None,
        logarithms=parts is not None,
    )
    term = pool.make(ATTENTION, (query, key, value, *place, *mask), "float32", tuple(details))
    return builder.filled_by(
        Loop(
            name,
            space.variables,
            space.sizes,
            space.reduced,
            space.summed,
            term,
            ATTENTION,
            index,
            origins=call.origins,
        )
    )


def _with_logarithms(
    builder: GraphBuilder, call: OperatorCall, problem: _AttentionOperands, shape: _Shape
) -> Lowered:
    """Return the result, and the natural logarithms of the sums of its rows."""
    parts, pool = _Parts(builder, call, shape), builder.pool
    _loop(builder, call, problem, shape, parts)
    none = sympy.Integer(0)

    def result(at: Indices) -> Term:
        *batch, row, column = at
        return pool.cast(parts.load(parts.of_result(tuple(batch), none, row, column)), call.dtype)

    def logarithm(at: Indices) -> Term:
        *batch, row = at
        found = parts.load(parts.of_logarithm(tuple(batch), none, row))
        return pool.operate("mul", found, pool.constant(_LN_2, "float32"), dtype="float32")

    return (
        builder.lazy(call.sizes, call.dtype, result, call.origins),
        builder.lazy(call.sizes[:-1], "float32", logarithm, call.origins),
    )


def _added_up(
    builder: GraphBuilder, call: OperatorCall, problem: _AttentionOperands, shape: _Shape
) -> LazyTensor:
    """Return the result of all parts of the keys: each part's, weighted by its share of the sum."""
    parts, pool = _Parts(builder, call, shape), builder.pool
    _loop(builder, call, problem, shape, parts)
    sizes, origins = (*call.sizes, sympy.Integer(shape.splits)), call.origins

    def binary(operator: str, one: Term, other: Term, dtype: str = "float32") -> Term:
        return pool.operate(operator, one, other, dtype=dtype)

    def where(condition: Term, value: float, other: Term) -> Term:
        chosen = pool.constant(value, "float32")
        return pool.operate("where", condition, chosen, other, dtype="float32")

    def logarithm(at: Indices) -> Term:
        *batch, row, _, split = at
        return parts.load(parts.of_logarithm(tuple(batch), split, row))

    def weight(at: Indices) -> Term:
        largest = top.at(at[:-1])
        lowest = pool.constant(-math.inf, "float32")
        base = where(binary("eq", largest, lowest, "bool"), 0.0, largest)
        return pool.operate("exp2", binary("sub", logarithm(at), base), dtype="float32")

    def weighted(at: Indices) -> Term:
        *batch, row, column, split = at
        found = parts.load(parts.of_result(tuple(batch), split, row, column))
        return binary("mul", weight(at), found)

    def reduced(kind: str, made: Callable[[Indices], Term]) -> LazyTensor:
        every = builder.lazy(sizes, "float32", made, origins)
        return builder.reduce(kind, every, [len(sizes) - 1], "float32", origins)

    top = reduced("max", logarithm)
    total, result = reduced("sum", weight), reduced("sum", weighted)

    def divided(at: Indices) -> Term:
        every, none = total.at(at), pool.constant(0.0, "float32")
        divisor = where(binary("eq", every, none, "bool"), 1.0, every)
        return pool.cast(binary("truediv", result.at(at), divisor), call.dtype)

    return builder.lazy(call.sizes, call.dtype, divided, origins)


#: Operators whose kernel is attention's.
ATTENTIONS: dict[str, Lowering] = dict.fromkeys(
    (
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_fused_attention_overrideable",
        "attention",
        "scaled_dot_product_attention",
    ),
    _attention,
)
