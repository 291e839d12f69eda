# SPDX-License-Identifier: Apache-2.0
"""`LazyTensor`: a tensor of a program that is being lowered, as a function from indices to a term;
`GraphBuilder` puts some into buffers.

A tensor that is computed element by element stays a function: who reads it computes it again, as
part of a larger body.  `realize` gives it a buffer and a loop: for outputs, for arguments of extern
calls, for what is reduced, and for what several others read and is costly (`mark_reuse`). A view is
another function, over the same term.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import sympy

from bundler.codegen.loops.index_ranges import Ranges
from bundler.codegen.loops.index_values import simplified
from bundler.codegen.loops.loop_nodes import (
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
from bundler.codegen.loops.loop_terms import PRODUCT, Term, TermPool, in_order
from bundler.runtime.program.device_tensors import item_bytes

Indices = tuple[sympy.Expr, ...]
Strides = tuple[sympy.Expr, ...]
At = Callable[[Indices], Term]

# A tensor that several others use is stored if it takes more loads or operators than this; a
# cheaper one is computed again by each.
_COSTLY_READS, _COSTLY_OPERATORS = 4, 30
# How many operators a random number by Philox counts as; and a function of large arguments, of
# tensors with so few elements that to store them costs nothing.
_RANDOM = {"rand": 30, "randn": 60, "randint64": 30}
_SLOW = {"sin": 30, "cos": 30, "tan": 30, "pow": 30}
_FEW_ELEMENTS = 1 << 14
_MADE = "buf"
# A body that reads more buffers than this is stored, even for a single user: each read takes
# registers.
_MOST_READS = 8
# A deeper body is stored. Reading a tensor calls the function of each one below it, and Python
# stops at 1000 nested calls. Loops that are cut here are fused again, so no kernel gets smaller.
_DEEPEST = 64


def variables(prefix: str, sizes: Sequence[sympy.Expr]) -> tuple[sympy.Symbol, ...]:
    """Return a variable for each dimension; the same names for every loop, so that equal bodies are
    the same terms.
    """
    return tuple(
        sympy.Symbol(f"{prefix}{number}", integer=True, nonnegative=True)
        for number in range(len(sizes))
    )


def are_same_strides(sizes: Sequence[sympy.Expr], one: Strides, other: Strides) -> bool:
    """Whether every element is at the same place: strides of dimensions of one element say
    nothing.
    """
    return all(
        size == 1 or sympy.expand(ours - theirs) == 0
        for size, ours, theirs in zip(sizes, one, other, strict=True)
    )


@dataclass(eq=False)
class LazyTensor:
    """A tensor as a function of its indices, or, once `buffer` is set, as a buffer with a layout.

    Attributes:
        sizes, dtype: of the tensor.
        compute: from indices to the term there; `at` calls it once for the same indices.
        origins: names of the operators that it came from.
        buffer: where it is in memory; None while it is computed where it is read.
        host: of a tensor on the host beside a program's device, puts it into a buffer there and
            returns the buffer's name.
        strides: those that torch traced, which whoever sees the tensor from outside of our kernels
            relies on; None for what only lowerings know.
        own_strides: those that it is stored in where only our kernels, and operators that ask for
            them, see it; None where these are the traced ones. A copy serves all others.
        base: of a view, the tensor whose memory torch's tensor shares.
        storage_offset: where torch's tensor begins in its storage.
        made: buffers that the lowering of its operator made, one of which may be its memory.
        copies: strides -> the buffer that holds it in these, beside the one that it is read from.
    """

    sizes: tuple[sympy.Expr, ...]
    dtype: str
    compute: At
    origins: frozenset[str] = frozenset()
    buffer: str | None = None
    strides: Strides | None = None
    own_strides: Strides | None = None
    base: LazyTensor | None = None
    storage_offset: sympy.Expr = field(default_factory=lambda: sympy.Integer(0))
    host: Callable[[], str] | None = None
    made: frozenset[str] = frozenset()
    copies: dict[Strides, str] = field(default_factory=dict, repr=False)
    _known: dict[Indices, Term] = field(default_factory=dict, repr=False)

    def at(self, indices: Sequence[sympy.Expr]) -> Term:
        """Return the value at indices."""
        key = tuple(
            sympy.Integer(0) if size == 1 else index
            for index, size in zip(indices, self.sizes, strict=True)
        )
        # A view is asked anew each time, since its base may have got a buffer meanwhile.
        if self.base is not None:
            return self.compute(key)
        term = self._known.get(key)
        if term is None:
            term = self._known[key] = self.compute(key)
        return term

    @property
    def root(self) -> LazyTensor:
        """The tensor itself, or, of a view, the one that all memory came from."""
        return self if self.base is None else self.base.root

    def put_into(self, buffer: str, compute: At) -> None:
        """Read it from a buffer from now on."""
        self.buffer = buffer
        self.compute_by(compute)

    def compute_by(self, compute: At) -> None:
        """Compute it otherwise from now on."""
        self.compute = compute
        self._known.clear()


class GraphBuilder:
    """Collects buffers and nodes of one program while its operators are lowered, in order.

    Attributes:
        deterministic: whether equal calls have to give equal results, so that nothing is added in
            an order that is open.
        hints: symbol of a size -> its value in the example.
        precision: of products of float32 that become kernels, `ieee` or `tf32`.
        operands: load of an operand of a product that was stored for it -> what it was computed as.
    """

    def __init__(self) -> None:
        self.pool = TermPool()
        self.buffers: dict[str, Buffer] = {}
        self.nodes: list[Node] = []
        self.deterministic = False
        self.hints: dict[sympy.Symbol, int] = {}
        self.precision = "ieee"
        self.operands: dict[Term, Term] = {}
        self._count = self._seeds = 0
        # Buffers that belong to one tensor of torch's, and must not serve as another one's result.
        self._owned: set[str] = set()
        # Term -> what it loads, and its depth. At most `_MOST_READS + 1` loads are kept, which is
        # enough to see that there are too many.
        self._weights: dict[Term, tuple[frozenset[Any], int]] = {}

    # -------------------------------------------------------------------------------------- Tensors

    def stored(
        self, name: str, layout: TensorLayout, source: str, *, aligned: bool = True
    ) -> LazyTensor:
        """Return a tensor that is in memory before the program runs."""
        self.buffers[name] = Buffer(name, layout, source, aligned)
        return self._of_buffer(name, frozenset())

    def lazy(
        self, sizes: Iterable[Any], dtype: str, compute: At, origins: frozenset[str]
    ) -> LazyTensor:
        """Return a tensor that is computed where it is read."""
        return LazyTensor(tuple(sympy.sympify(size) for size in sizes), dtype, compute, origins)

    def _of_buffer(self, name: str, origins: frozenset[str]) -> LazyTensor:
        layout = self.buffers[name].layout
        tensor = LazyTensor(layout.sizes, layout.dtype, self._reader(name), origins, name)
        tensor.host = (lambda: name) if layout.device else None
        return tensor

    @property
    def made(self) -> int:
        """How many buffers there are that nodes write."""
        return self._count

    def made_since(self, count: int) -> frozenset[str]:
        """Return the buffers that were made since there were `count`."""
        return frozenset(f"{_MADE}{number}" for number in range(count, self._count))

    def _reader(self, name: str) -> At:
        layout = self.buffers[name].layout
        return lambda indices: self.pool.load(name, layout.index(indices), layout.dtype)

    def new_buffer(self, layout: TensorLayout, bases: Iterable[str] = ()) -> str:
        """Return the name of a new buffer that a node will write.

        Args:
            layout: of its elements.
            bases: buffers whose memory it may share.
        """
        name = f"{_MADE}{self._count}"
        self._count += 1
        found = tuple(sorted(bases))
        self.buffers[name] = Buffer(
            name, layout, aligned=not found, shared=bool(found), bases=found
        )
        return name

    def seed(self) -> Term:
        """Return a new seed of random numbers, which each call of the program draws anew."""
        number = self._seeds
        self._seeds += 1
        layout = TensorLayout("int64", (sympy.Integer(self._seeds),), (sympy.Integer(1),))
        self.buffers[SEEDS] = Buffer(SEEDS, layout, "seeds")
        return self.pool.load(SEEDS, sympy.Integer(number), "int64")

    # -------------------------------------------------------------------------------------- Buffers

    def realize(self, tensor: LazyTensor) -> str:
        """Give a tensor, or the one that it is a view of, a buffer, unless it has one.

        The buffer has the tensor's own strides, else those that torch traced, else it is dense, the
        last dimension innermost.

        Returns:
            The name of the buffer.
        """
        root = tensor.root
        return root.buffer if root.buffer is not None else self._moved(root, root.own_strides)

    def _moved(self, root: LazyTensor, strides: Strides | None) -> str:
        """Compute a tensor into a new buffer, and read it there.

        Args:
            root: the tensor.
            strides: of the buffer; None for those that torch traced, which whoever sees the tensor
                from outside relies on.
        """
        name = self._filled(root, strides or root.strides or contiguous_strides(root.sizes))
        root.put_into(name, self._reader(name))
        return name

    def _filled(self, tensor: LazyTensor, strides: Strides) -> str:
        """Return a new buffer of these strides with what a tensor is computed as, or is read as."""
        layout = TensorLayout(tensor.dtype, tensor.sizes, tuple(strides))
        name = self.new_buffer(layout)
        self.write(name, tensor, layout)
        self._owned.add(name)
        return name

    def write(self, buffer: str, tensor: LazyTensor, layout: TensorLayout) -> None:
        """Add the loop that computes a tensor into a buffer."""
        names = variables("i", layout.sizes)
        value = self._simplified(tensor.at(names), dict(zip(names, layout.sizes, strict=True)))
        index = sympy.expand(
            layout.index(
                [
                    sympy.Integer(0) if s == 1 else v
                    for v, s in zip(names, layout.sizes, strict=True)
                ]
            )
        )
        # The dtype of the buffer, which a 16-bit result is rounded to when it is stored.
        value = self.pool.cast(value, layout.dtype)
        self.nodes.append(
            Loop(
                buffer, names, layout.sizes, (), (), value, POINTWISE, index, origins=tensor.origins
            )
        )

    def scatter(self, buffer: str, loop: Loop) -> None:
        """Add a loop that writes, or adds, to places of a buffer which values decide."""
        ranges = dict(zip(loop.variables, loop.sizes, strict=True))
        terms = tuple((symbol, self._simplified(term, ranges)) for symbol, term in loop.index_terms)
        self.nodes.append(
            replace(
                loop, buffer=buffer, value=self._simplified(loop.value, ranges), index_terms=terms
            )
        )

    def reduce(
        self,
        kind: str,
        source: LazyTensor,
        dims: Sequence[int],
        dtype: str,
        origins: frozenset[str],
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
            layout.index(
                [sympy.Integer(0) if s == 1 else v for v, s in zip(outer, sizes, strict=True)]
            )
        )
        self.nodes.append(
            Loop(
                name,
                outer,
                sizes,
                inner,
                reduced,
                value,
                kind,
                index,
                origins=origins | source.origins,
            )
        )
        return self._of_buffer(name, origins)

    def multiply(
        self,
        left: LazyTensor,
        right: LazyTensor,
        layout: TensorLayout,
        origins: frozenset[str],
        precision: str | None = None,
    ) -> LazyTensor:
        """Multiply matrices, or those of a batch one by one.

        Args:
            left, right: of one dtype.
            layout: of the result.
            origins: names of the operators this comes from.
            precision: as terms of products have it; None for the program's.
        """
        length = (left.sizes[-1],)
        outer, inner = variables("i", layout.sizes), variables("r", length)
        *batch, row, column = outer
        ranges = dict(zip([*outer, *inner], [*layout.sizes, *length], strict=True))
        operands = (
            self._element_in_memory(left, (*batch, row, *inner), ranges),
            self._element_in_memory(right, (*batch, *inner, column), ranges),
        )
        value = self.pool.make(PRODUCT, operands, "float32", (precision or self.precision,))
        places = [
            sympy.Integer(0) if size == 1 else name
            for name, size in zip(outer, layout.sizes, strict=True)
        ]
        name = self.new_buffer(layout)
        index = sympy.expand(layout.index(places))
        self.nodes.append(
            Loop(name, outer, layout.sizes, inner, length, value, PRODUCT, index, origins=origins)
        )
        return self._of_buffer(name, origins)

    def loads(
        self,
        elements: Sequence[tuple[LazyTensor, Sequence[sympy.Expr]]],
        ranges: dict[sympy.Symbol, sympy.Expr],
    ) -> tuple[Term, ...]:
        """Return the loads of elements of tensors that are in memory, in copies if need be."""
        return tuple(self._element_in_memory(one, tuple(at), ranges) for one, at in elements)

    def filled_by(self, loop: Loop) -> LazyTensor:
        """Add a loop, and return the new buffer that it fills."""
        self.nodes.append(loop)
        return self._of_buffer(loop.buffer, loop.origins)

    def _element_in_memory(
        self, tensor: LazyTensor, indices: Indices, ranges: dict[sympy.Symbol, sympy.Expr]
    ) -> Term:
        """Return the load of an element of a tensor that is in memory, in a copy if need be."""
        term = self._simplified(tensor.at(indices), ranges)
        if self._is_in_memory(term, tensor.dtype):
            return term
        if tensor.host is None and self._as_traced(tensor) is None:
            self._put_as_traced(tensor.root)
            # What no strides describe, such as patches, is read where the whole tensor lies.
            load = self._simplified(tensor.at(indices), ranges)
            if self._is_in_memory(load, tensor.dtype):
                self.operands[load] = self.pool.cast(term, tensor.dtype)
                return load
        found = self.reference(tensor)
        single = [
            sympy.Integer(0) if size == 1 else index
            for index, size in zip(indices, tensor.sizes, strict=True)
        ]
        load = self.pool.load(found.buffer, sympy.expand(found.layout.index(single)), tensor.dtype)
        self.operands[load] = self.pool.cast(term, tensor.dtype)
        return load

    def _is_in_memory(self, term: Term, dtype: str) -> bool:
        """Whether a term is an element of a buffer of this dtype, not at a place that is loaded."""
        if term.operator != "load" or term.arguments:
            return False
        buffer = self.buffers[term.details[0]]
        return buffer.layout.dtype == dtype and not buffer.by_value

    def along_rows(
        self,
        kind: str,
        sources: Sequence[LazyTensor],
        dim: int,
        made: Callable[[tuple[Term, ...]], Sequence[Term]],
        layouts: Sequence[TensorLayout],
        origins: frozenset[str],
        first: int | None = None,
    ) -> tuple[LazyTensor, ...]:
        """Give each element along a dimension what is made of several of its row.

        Args:
            kind: one of `ALONG_ROWS`.
            sources: of equal sizes.
            dim: along which the rows run.
            made: returns a term for each result, of terms for the sources.
            layouts: of the results.
            origins: names of the operators this comes from.
            first: how many elements of each row are wanted; None for all.
        """
        sizes = sources[0].sizes
        kept = [number for number in range(len(sizes)) if number != dim]
        outer, inner = variables("i", [sizes[k] for k in kept]), variables("r", [sizes[dim]])
        places = dict(zip([*kept, dim], [*outer, *inner], strict=True))
        names = [places[number] for number in range(len(sizes))]
        ranges = dict(zip(names, sizes, strict=True))
        operands = tuple(self._simplified(source.at(names), ranges) for source in sources)
        from_sources = frozenset().union(*(source.origins for source in sources))
        found = []
        for term, layout in zip(made(operands), layouts, strict=True):
            name = self.new_buffer(layout)
            index = [sympy.Integer(0) if s == 1 else v for v, s in zip(names, sizes, strict=True)]
            self.nodes.append(
                Loop(
                    name,
                    outer,
                    tuple(sizes[k] for k in kept),
                    inner,
                    (sizes[dim],),
                    self.pool.cast(term, layout.dtype),
                    kind,
                    sympy.expand(layout.index(index)),
                    origins=origins | from_sources,
                    first=first,
                )
            )
            found.append(self._of_buffer(name, origins))
        return tuple(found)

    def call(
        self,
        operator: str,
        arguments: Any,
        keywords: dict[str, Any],
        results: Sequence[TensorLayout | None],
        reason: str,
        *,
        single: bool,
        view: bool = False,
        ordered: bool = False,
        place: Callable[[LazyTensor], Reference] | None = None,
    ) -> tuple[LazyTensor | None, ...]:
        """Call an ATen operator as it is; returns its results.

        Args:
            operator: its name.
            arguments, keywords: as the graph has them; tensors become references to buffers.
            results: layout of each result, None for one that is no tensor.
            reason: why no kernel is generated.
            single: whether it returns one value instead of a tuple.
            view: whether its results may share memory with its arguments.
            ordered: whether all calls before it come first, and all behind it later.
            place: where it is given a tensor; None for where the tensor lies as torch traced it.
        """
        if place is None:
            # A view's result must not share memory with a tensor that torch does not have it share
            # with.
            place = self.owned if view else self.reference
        given = tuple(self._in_memory(value, place) for value in arguments)
        named = tuple((k, self._in_memory(value, place)) for k, value in sorted(keywords.items()))
        # The result of a called view may share the memory of any buffer that the call reads.
        read = ExternCall(operator, given, named, (), reason).reads
        bases = read if view else ()
        outputs = tuple(None if item is None else self.new_buffer(item, bases) for item in results)
        call = ExternCall(operator, given, named, outputs, reason, single, ordered=ordered)
        for name in bases:
            self.buffers[name] = replace(self.buffers[name], shared=True)
        self.nodes.append(call)
        return tuple(
            None if name is None else self._of_buffer(name, frozenset()) for name in outputs
        )

    def _in_memory(self, value: Any, place: Callable[[LazyTensor], Reference]) -> Any:
        if isinstance(value, LazyTensor):
            return place(value)
        if isinstance(value, (list, tuple)):
            return [self._in_memory(item, place) for item in value]
        return value

    # ------------------------------------------------------------ What others see of our tensors

    def reference(self, tensor: LazyTensor) -> Reference:
        """Return where a tensor lies in memory, with the strides that torch traced.

        Its memory may be that of a tensor with equal elements: for readers, which change nothing.
        """
        if tensor.host is not None:
            name = tensor.host()
            return Reference(name, self.buffers[name].layout)
        found = self._as_traced(tensor)
        if found is None:
            self._put_as_traced(tensor.root)
            found = self._as_traced(tensor)
        return found if found is not None else self._copy(tensor)

    def _put_as_traced(self, root: LazyTensor) -> None:
        """Have a tensor in memory in the layout that torch traced.

        One that has a layout of its own stays where it is: who reads it mostly has that layout too.
        """
        if root.buffer is None or root.own_strides is None or root.strides is None:
            self._moved(root, None)
        elif root.strides not in root.copies:
            root.copies[root.strides] = self._filled(root, root.strides)

    def placed(self, tensor: LazyTensor, strides: Strides) -> Reference:
        """Return where a tensor lies in memory with these strides, in a copy if need be.

        Strides of dimensions of one element may be others. Its memory may be that of a tensor with
        equal elements.
        """
        seen = self.strided_view(tensor)
        if seen is not None and are_same_strides(tensor.sizes, seen.layout.strides, strides):
            whole = self.buffers[seen.buffer].layout
            is_whole = whole.sizes == tensor.sizes and whole.offset == seen.layout.offset
            return replace(seen, layout=whole) if is_whole else seen
        if tensor.root is tensor and tensor.buffer is None:
            name = self._moved(tensor, strides)
        elif strides in tensor.copies:
            name = tensor.copies[strides]
        else:
            name = tensor.copies[strides] = self._filled(tensor, strides)
        return Reference(name, self.buffers[name].layout)

    def kept(self, tensor: LazyTensor) -> Reference:
        """Return where a tensor lies that leaves the graph for a reader who is told its strides.

        An input that a call was given in another layout, as the weight of a convolution, leaves in
        that one: its reader calls the like, and would convert it once more.
        """
        root = tensor.root
        given = root.buffer is not None and self.buffers[root.buffer].source == "input"
        if given and tensor is root and len(root.copies) == 1:
            (name,) = root.copies.values()
            return Reference(name, self.buffers[name].layout)
        if (
            tensor is not root
            or root.own_strides is None
            or root.strides in root.copies
            or (root.buffer is None and self._owns_what_it_reads(root))
        ):
            return self.owned(tensor)
        name = self.realize(tensor)
        return Reference(name, self.buffers[name].layout)

    def owned(self, tensor: LazyTensor) -> Reference:
        """Return where a tensor lies in memory that it shares with no tensor but those that torch
        has it share with.
        """
        root = tensor.root
        if tensor.host is None and root.buffer is None and not self._owns_what_it_reads(root):
            self._moved(root, None)
        return self.reference(tensor)

    def _owns_what_it_reads(self, root: LazyTensor) -> bool:
        """Whether a tensor is all of a buffer that its own lowering made, as a reduction does."""
        seen = self._as_traced(root)
        if seen is None or seen.buffer not in root.made - self._owned:
            return False
        root.put_into(seen.buffer, root.compute)
        self._owned.add(seen.buffer)
        return True

    def _copy(self, tensor: LazyTensor) -> Reference:
        """Return a copy of a view that our indices do not show as one."""
        copy = LazyTensor(
            tensor.sizes, tensor.dtype, tensor.at, tensor.origins, strides=tensor.strides
        )
        name = self._moved(copy, None)
        return Reference(name, self.buffers[name].layout)

    def _as_traced(self, tensor: LazyTensor) -> Reference | None:
        """Return a tensor as torch sees it in one buffer, None where its root has other strides
        there.
        """
        root = tensor.root
        place = self._root_as_traced(root)
        if place is None or tensor is root:
            return place
        if tensor.strides is None or tensor.dtype != root.dtype:
            return None
        # In torch both share one storage, and the root lies here as it does there, so the distance
        # of the two offsets is the same.
        start = place.layout.offset + tensor.storage_offset - root.storage_offset
        layout = TensorLayout(tensor.dtype, tensor.sizes, tensor.strides, sympy.expand(start))
        return Reference(place.buffer, layout)

    def _root_as_traced(self, root: LazyTensor) -> Reference | None:
        copy = root.copies.get(root.strides) if root.strides is not None else None
        if copy is not None:
            return Reference(copy, self.buffers[copy].layout)
        seen = self.strided_view(root)
        if seen is None or root.strides is None or numel(root.sizes) == 0:
            return seen
        if not are_same_strides(root.sizes, seen.layout.strides, root.strides):
            return None
        return Reference(seen.buffer, replace(seen.layout, strides=root.strides))

    def strided_view(self, tensor: LazyTensor) -> Reference | None:
        """Return a tensor as a strided view of one buffer, None where it is no such view."""
        names = variables("i", tensor.sizes)
        # A view is a plain load whose address is linear in the indices: their factors are the
        # strides.
        term = self._simplified(tensor.at(names), dict(zip(names, tensor.sizes, strict=True)))
        if term.operator != "load" or term.arguments:
            return None
        index = sympy.expand(term.details[1])
        strides = tuple(index.coeff(name) for name in names)
        offset = sympy.expand(
            index - sum((n * s for n, s in zip(names, strides, strict=True)), sympy.Integer(0))
        )
        if offset.free_symbols & set(names) or any(
            stride.free_symbols & set(names) for stride in strides
        ):
            return None
        if not all(stride.is_nonnegative for stride in strides):
            return None  # a flipped tensor, which torch has no strides for
        if tensor.dtype != self.buffers[term.details[0]].layout.dtype:
            return None
        return Reference(term.details[0], TensorLayout(tensor.dtype, tensor.sizes, strides, offset))

    def mark_reuse(
        self, tensor: LazyTensor, users: int, *, returned: bool = False, rounded: bool = False
    ) -> None:
        """Keep a tensor in memory where several others read it and it is costly to compute, or
        reads very much: of one that is returned, and so stored anyway, more than itself.

        Args:
            tensor: that may be kept.
            users: how many read it.
            returned: whether the program returns it.
            rounded: let the kernel that stores it, too, compute with the bits that are stored.
        """
        if tensor.root.buffer is not None or numel(tensor.sizes) == 0:
            return
        # The same variables for every tensor, so that terms, and their weights, are shared.
        names = variables("i", tensor.sizes)
        body = tensor.at(names)
        loads, depth = self._weight_of(body)
        reads = len(loads)
        if (
            reads > _MOST_READS
            or depth > _DEEPEST
            or (users > 1 and (reads > _COSTLY_READS or _is_costly(body, _weights_of(tensor))))
            or (users > 1 and returned and self._reads_more(tensor, loads, names))
        ):
            if rounded:
                exact = tensor.compute
                tensor.compute_by(lambda indices: self.pool.rounded(exact(indices)))
            self.realize(tensor)

    def _reads_more(
        self, tensor: LazyTensor, loads: Iterable[Any], names: Sequence[sympy.Symbol]
    ) -> bool:
        """Whether the elements that a body reads for each of its own take more bytes than it, of a
        tensor whose traffic counts.
        """
        elements = numel(tensor.sizes)
        if elements.is_Integer and elements <= _FEW_ELEMENTS:
            return False
        moving = {name for name, size in zip(names, tensor.sizes, strict=True) if size != 1}
        each = [buffer for buffer, index in loads if moving <= index.free_symbols]
        read = sum(item_bytes(self.buffers[buffer].layout.dtype) for buffer in each)
        return read > item_bytes(tensor.dtype)

    def _weight_of(self, body: Term) -> tuple[frozenset[Any], int]:
        """Return loads of a body and its depth, from those of the terms that were asked for
        before: a body grows by an operator at a time.
        """
        if body not in self._weights:
            for term in in_order(body, self._weights):
                below = [self._weights[item] for item in term.terms]
                found = {term.details[:2]} if term.operator == "load" else set()
                for loads, _ in below:
                    found.update(loads)
                depth = 1 + max((depth for _, depth in below), default=0)
                self._weights[term] = (frozenset(islice(found, _MOST_READS + 1)), depth)
        return self._weights[body]

    def _simplified(self, value: Term, sizes: dict[sympy.Symbol, sympy.Expr]) -> Term:
        return simplified(self.pool, value, Ranges(sizes))


def _weights_of(tensor: LazyTensor) -> Mapping[str, int]:
    """Return how many operators some count as where a tensor is computed again."""
    elements = numel(tensor.sizes)
    # One number costs less than a launch that stores it.
    few = elements.is_Integer and 1 < elements <= _FEW_ELEMENTS
    return {**_RANDOM, **_SLOW} if few else _RANDOM


def _is_costly(body: Term, weights: Mapping[str, int]) -> bool:
    """Whether a body has more operators than are computed again for each that reads it."""
    operators, seen, rest = 0, {body}, [body]
    while rest and operators <= _COSTLY_OPERATORS:
        term = rest.pop()
        operators += weights.get(term.operator, 1)
        following = set(term.terms) - seen
        seen |= following
        rest += following
    return operators > _COSTLY_OPERATORS
