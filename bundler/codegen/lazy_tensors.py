# SPDX-License-Identifier: Apache-2.0
"""`LazyTensor`: a tensor of a program that is being lowered, as a function from indices to a term; `GraphBuilder` puts some into buffers.

A tensor that is computed element by element stays a function: who reads it computes it again, as part of a larger body.  `realize` gives it a buffer
and a loop: for outputs, for arguments of extern calls, for what is reduced, and for what several others read and is costly (`mark_reuse`).
A view is another function, over the same term.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy

from bundler.codegen.index_ranges import Ranges
from bundler.codegen.loop_nodes import (
    POINTWISE,
    SEEDS,
    Buffer,
    ExternCall,
    Loop,
    Node,
    Reference,
    TensorLayout,
    contiguous_strides,
    numel,
)
from bundler.codegen.loop_terms import Term, TermPool, in_order, loads_of, substituted

Indices = tuple[sympy.Expr, ...]
At = Callable[[Indices], Term]

# A tensor that several others use is computed once, and kept, from so many loads or operators on.
_COSTLY_READS, _COSTLY_OPERATORS = 4, 30
# Philox takes about as long as so many operators.
_RANDOM = {"rand": 30, "randn": 60, "randint64": 30}
# A body reads at most so many buffers, whoever uses it.
_MOST_READS = 8


def variables(prefix: str, sizes: Sequence[sympy.Expr]) -> tuple[sympy.Symbol, ...]:
    """Return a variable for each dimension; the same names for every loop, so that equal bodies are the same terms."""
    return tuple(sympy.Symbol(f"{prefix}{number}", integer=True, nonnegative=True) for number in range(len(sizes)))


@dataclass(eq=False)
class LazyTensor:
    """A tensor as a function of its indices, or, once `buffer` is set, as a buffer with a layout.

    Attributes:
        sizes, dtype: of the tensor.
        compute: from indices to the term there; `at` calls it once for the same indices.
        origins: names of the operators that it came from.
        buffer: where it is in memory; None while it is computed where it is read.
        strides: how torch would have it lie in memory; None where nothing is asked.
        is_view: whether torch's tensor shares memory with what it was made of.
        storage_offset: where torch's tensor begins in that memory.
    """

    sizes: tuple[sympy.Expr, ...]
    dtype: str
    compute: At
    origins: frozenset[str] = frozenset()
    buffer: str | None = None
    strides: tuple[sympy.Expr, ...] | None = None
    is_view: bool = False
    storage_offset: sympy.Expr = field(default_factory=lambda: sympy.Integer(0))
    _known: dict[Indices, Term] = field(default_factory=dict, repr=False)

    def at(self, indices: Sequence[sympy.Expr]) -> Term:
        """Return the value at indices."""
        key = tuple(sympy.Integer(0) if size == 1 else index for index, size in zip(indices, self.sizes, strict=True))
        term = self._known.get(key)
        if term is None:
            term = self._known[key] = self.compute(key)
        return term

    def put_into(self, buffer: str, compute: At) -> None:
        """Read it from a buffer from now on."""
        self.buffer, self.compute = buffer, compute
        self._known.clear()


class GraphBuilder:
    """Collects buffers and nodes of one program while its operators are lowered, in order."""

    def __init__(self) -> None:
        self.pool = TermPool()
        self.buffers: dict[str, Buffer] = {}
        self.nodes: list[Node] = []
        self._count = self._seeds = 0

    # Tensors ------------------------------------------------------------------------------------------------------------

    def stored(self, name: str, layout: TensorLayout, source: str, *, aligned: bool = True) -> LazyTensor:
        """Return a tensor that is in memory before the program runs."""
        self.buffers[name] = Buffer(name, layout, source, aligned)
        return self._of_buffer(name, frozenset())

    def lazy(self, sizes: Iterable[Any], dtype: str, compute: At, origins: frozenset[str]) -> LazyTensor:
        """Return a tensor that is computed where it is read."""
        return LazyTensor(tuple(sympy.sympify(size) for size in sizes), dtype, compute, origins)

    def _of_buffer(self, name: str, origins: frozenset[str]) -> LazyTensor:
        layout = self.buffers[name].layout
        return LazyTensor(layout.sizes, layout.dtype, self._reader(name), origins, name)

    def _reader(self, name: str) -> At:
        layout = self.buffers[name].layout
        return lambda indices: self.pool.load(name, layout.index(indices), layout.dtype)

    def new_buffer(self, layout: TensorLayout, *, shared: bool = False) -> str:
        """Return the name of a new buffer that a node will write; `shared` where its memory may be another's."""
        name = f"buf{self._count}"
        self._count += 1
        self.buffers[name] = Buffer(name, layout, aligned=not shared, shared=shared)
        return name

    def seed(self) -> Term:
        """Return a new seed of random numbers, which each call of the program draws anew."""
        number = self._seeds
        self._seeds += 1
        layout = TensorLayout("int64", (sympy.Integer(self._seeds),), (sympy.Integer(1),))
        self.buffers[SEEDS] = Buffer(SEEDS, layout, "seeds")
        return self.pool.load(SEEDS, sympy.Integer(number), "int64")

    # Buffers ------------------------------------------------------------------------------------------------------------

    def realize(self, tensor: LazyTensor, strides: Sequence[sympy.Expr] | None = None) -> str:
        """Give a tensor a buffer, unless it is one; returns its name.

        Args:
            tensor: what to compute.
            strides: how it shall lie in memory; None for dense, the last dimension innermost.
        """
        if tensor.buffer is None:
            layout = TensorLayout(
                tensor.dtype, tensor.sizes, tuple(strides or tensor.strides or contiguous_strides(tensor.sizes))
            )
            name = self.new_buffer(layout)
            self.write(name, tensor, layout)
            tensor.put_into(name, self._reader(name))
        assert tensor.buffer is not None
        return tensor.buffer

    def write(self, buffer: str, tensor: LazyTensor, layout: TensorLayout) -> None:
        """Add the loop that computes a tensor into a buffer."""
        names = variables("i", layout.sizes)
        value = self._simplified(tensor.at(names), dict(zip(names, layout.sizes, strict=True)))
        index = sympy.expand(
            layout.index([sympy.Integer(0) if s == 1 else v for v, s in zip(names, layout.sizes, strict=True)])
        )
        value = self.pool.cast(value, layout.dtype)
        self.nodes.append(Loop(buffer, names, layout.sizes, (), (), value, POINTWISE, index, origins=tensor.origins))

    def scatter(self, buffer: str, loop: Loop) -> None:
        """Add a loop that writes, or adds, to places of a buffer which values decide."""
        ranges = dict(zip(loop.variables, loop.sizes, strict=True))
        terms = tuple((symbol, self._simplified(term, ranges)) for symbol, term in loop.index_terms)
        self.nodes.append(replace(loop, buffer=buffer, value=self._simplified(loop.value, ranges), index_terms=terms))

    def reduce(
        self, kind: str, source: LazyTensor, dims: Sequence[int], dtype: str, origins: frozenset[str]
    ) -> LazyTensor:
        """Reduce dimensions of a tensor, which are left out of the result.

        Args:
            kind: one of `REDUCTIONS`.
            source: what is reduced.
            dims: which dimensions, from 0 on.
            dtype: of the result.
            origins: names of the operators this comes from.
        """
        kept = [number for number in range(len(source.sizes)) if number not in dims]
        sizes, reduced = tuple(source.sizes[k] for k in kept), tuple(source.sizes[d] for d in dims)
        outer, inner = variables("i", sizes), variables("r", reduced)
        places = dict(zip([*kept, *dims], [*outer, *inner], strict=True))
        ranges = dict(zip([*outer, *inner], [*sizes, *reduced], strict=True))
        value = self._simplified(source.at([places[n] for n in range(len(source.sizes))]), ranges)
        layout = TensorLayout(dtype, sizes, contiguous_strides(sizes))
        name = self.new_buffer(layout)
        index = sympy.expand(
            layout.index([sympy.Integer(0) if s == 1 else v for v, s in zip(outer, sizes, strict=True)])
        )
        self.nodes.append(
            Loop(name, outer, sizes, inner, reduced, value, kind, index, origins=origins | source.origins)
        )
        return self._of_buffer(name, origins)

    def call(
        self, operator: str, arguments: Any, keywords: dict[str, Any], results: Sequence[TensorLayout | None], reason: str,
        *, single: bool, view: bool = False,
    ) -> tuple[LazyTensor | None, ...]:  # fmt: skip
        """Call an ATen operator as it is; returns its results.

        Args:
            operator: its name.
            arguments, keywords: as the graph has them; tensors become references to buffers.
            results: layout of each result, None for one that is no tensor.
            reason: why no kernel is generated.
            single: whether it returns one value instead of a tuple.
            view: whether its results may share memory with its arguments.
        """
        outputs = tuple(None if layout is None else self.new_buffer(layout, shared=view) for layout in results)
        call = ExternCall(
            operator,
            tuple(self._in_memory(value) for value in arguments),
            tuple((name, self._in_memory(value)) for name, value in sorted(keywords.items())),
            outputs,
            reason,
            single,
        )
        for name in call.reads if view else ():
            self.buffers[name] = replace(self.buffers[name], shared=True)
        self.nodes.append(call)
        return tuple(None if name is None else self._of_buffer(name, frozenset()) for name in outputs)

    def _in_memory(self, value: Any) -> Any:
        if isinstance(value, LazyTensor):
            return self.reference(value)
        return [self._in_memory(item) for item in value] if isinstance(value, (list, tuple)) else value

    def reference(self, tensor: LazyTensor) -> Reference:
        """Return where a tensor lies in memory: a view of a buffer where it is one, else of a buffer that it is given."""
        found = self.strided_view(tensor)
        if found is None:
            name = self.realize(tensor)
            found = Reference(name, self.buffers[name].layout)
        return found

    def strided_view(self, tensor: LazyTensor) -> Reference | None:
        """Return a tensor as a strided view of one buffer, None where it is no such view."""
        names = variables("i", tensor.sizes)
        term = self._simplified(tensor.at(names), dict(zip(names, tensor.sizes, strict=True)))
        if term.operator != "load" or term.arguments:
            return None
        index = sympy.expand(term.details[1])
        strides = tuple(index.coeff(name) for name in names)
        offset = sympy.expand(index - sum((n * s for n, s in zip(names, strides, strict=True)), sympy.Integer(0)))
        if offset.free_symbols & set(names) or any(stride.free_symbols & set(names) for stride in strides):
            return None
        if not all(stride.is_nonnegative for stride in strides):
            return None  # torch has no such tensors
        if tensor.dtype != self.buffers[term.details[0]].layout.dtype:
            return None
        return Reference(term.details[0], TensorLayout(tensor.dtype, tensor.sizes, strides, offset))

    def mark_reuse(self, tensor: LazyTensor, users: int) -> None:
        """Keep a tensor in memory where several others read it and it is costly to compute, or reads very much."""
        if tensor.buffer is not None or numel(tensor.sizes) == 0:
            return
        body = tensor.at(variables("i", tensor.sizes))
        reads = len({(load[0], load[1]) for load in loads_of(body)})
        operators = sum(_RANDOM.get(term.operator, 1) for term in in_order(body))
        if (users > 1 and (reads > _COSTLY_READS or operators > _COSTLY_OPERATORS)) or reads > _MOST_READS:
            self.realize(tensor)

    def _simplified(self, value: Term, sizes: dict[sympy.Symbol, sympy.Expr]) -> Term:
        return substituted(self.pool, value, Ranges(sizes).simplified)
