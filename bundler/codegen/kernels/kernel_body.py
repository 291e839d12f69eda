# SPDX-License-Identifier: Apache-2.0
"""`BodyWriter`: the body of one kernel, from its loops: index parts, loads, operators, reductions,
stores.

A pointwise or persistent kernel is one run of lines. A looped reduction has a loop over the row for
each pass: a loop that uses the result of a reduction comes in a later pass, and computes anew what
the earlier one computed of each element. What does not depend on the row is computed before the
loop. Every value is computed once in its scope; stores come last, so that nothing is read after it
was changed.

What comes after a load decides whether its elements stay in the cache, so the policies of all loads
are filled in at the end (`LoadPolicies`).

`kernel_plan` calls it; `reduction_text` writes the reductions.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

import sympy

from bundler.codegen.kernels import operation_text
from bundler.codegen.kernels.descriptor_text import TileDescriptors
from bundler.codegen.kernels.index_text import index_text
from bundler.codegen.kernels.kernel_arguments import KernelArguments, number_type
from bundler.codegen.kernels.kernel_shape import (
    KernelShape,
    Masks,
    PlacedLoop,
    Scope,
    block_name,
    placed_loops,
)
from bundler.codegen.kernels.literals import constant_text
from bundler.codegen.kernels.operation_text import Value
from bundler.codegen.kernels.operator_support import options_of
from bundler.codegen.kernels.reduction_text import ReductionWriter, column_of, row_of
from bundler.codegen.kernels.scan_text import ScanWriter
from bundler.codegen.kernels.shared_row_text import SHARE, SHARES, SharedRow
from bundler.codegen.loops.data_types import (
    cast_text,
    compute_type,
    data_type,
    elements_per_thread,
    identity_of,
    loaded_text,
    stored_text,
)
from bundler.codegen.loops.loop_nodes import PROGRAM, SEEDS, Buffer, Loop
from bundler.codegen.loops.loop_terms import (
    ALONG_ROWS,
    Argument,
    Term,
    TermPool,
    in_order,
    symbols_of,
)
from bundler.codegen.loops.range_trees import Dimension, Part
from bundler.runtime.program.device_tensors import item_bytes

_NAME = re.compile(r"tmp\d+")
# Triton's type in which a number of the host is passed -> its dtype.
_NUMBERS = {"fp64": "float64", "i64": "int64", "u64": "uint64"}
_INFIX_NUMBERS = frozenset(
    {"add", "sub", "mul", "truediv", "maximum", "minimum", "eq", "ne", "lt", "le", "gt", "ge"}
)
# Their results are 16-bit floats where their arguments are.
_EXACT = frozenset({"neg", "abs", "where", "maximum", "minimum", "relu"})
# Stands in a line for the policy of a load until the whole body is written.
_MARK = re.compile(r"LOAD_(\d+)_AGAIN")
_RELAXED = "sem='relaxed'"
# On AMD, Triton 3.7 fails late for a float16 sum with the scope of one device: that instruction
# takes only pairs of halves. The one for the whole system takes a single half.
_ATOMIC_OPTIONS = {"float16": f"{_RELAXED}, scope='sys'"}


class BodyWriter:
    """Writes the loops of one kernel.

    Attributes:
        num_load, num_store, num_reduction, num_assert: how often the text does each.
        atomic: whether it adds atomically.
        elements: how many neighbouring elements a thread has to hold, for conversions of 8-bit
            floats.
        loads_first: whether a loop's loads stand before what is computed of them.
    """

    loads_first = True

    def __init__(
        self,
        shape: KernelShape,
        pool: TermPool,
        buffers: Mapping[str, Buffer],
        arguments: KernelArguments,
    ) -> None:
        self._shape, self._space, self._pool, self._buffers = shape, shape.space, pool, buffers
        self.arguments = arguments
        self.num_load = self.num_store = self.num_reduction = self.num_assert = 0
        self.atomic, self.elements = False, 1
        # Lines outside of a loop over the row, and those of the loop that is being written.
        self._outer = Scope()
        self._inner: Scope | None = None
        self._count = 0
        # (Buffer, address) -> what a pointwise loop of this kernel computes there.
        self._definitions: dict[tuple[str, sympy.Expr], Term] = {}
        # Term -> whether it, or anything below it, reads memory.
        self._loading: dict[Term, bool] = {}
        # (Buffer, address) -> the result of a reduction of this kernel.
        self._results: dict[tuple[str, sympy.Expr], Value] = {}
        # Symbol of an indirect index -> its value.
        self._symbols: dict[sympy.Symbol, Value] = {}
        # Term -> the dimensions along which its value differs.
        self._dimensions: dict[Term, frozenset[Dimension]] = {}
        # Name of a mask's value -> the dimensions along which it differs.
        self._mask_dimensions: dict[str, frozenset[Dimension]] = {}
        self._loaded_again = LoadPolicies()
        self._stored_along_row = 0
        rows = " & ".join(shape.masks(shape.space.kept)) or None
        one = all(dimension.numel == 1 for dimension in shape.space.kept)
        shared = SharedRow(arguments, rows, self.new_name, single=one) if shape.shared else None
        self._reductions = ReductionWriter(shape.looped, row_of(shape), self.new_name, shared)
        self._scans = ScanWriter(shape.looped, row_of(shape), self.new_name)
        self._across = ReductionWriter(True, column_of(shape), self.new_name)
        self._tiles = TileDescriptors(shape, buffers)
        self._symbols[PROGRAM] = Value("tl.program_id(0)", "int32")

    # ------------------------------------------------------------------------------- The whole body

    def write(self, loops: tuple[Loop, ...]) -> list[str]:
        """Return the lines of the body, behind the indices of the dimensions."""
        placed = placed_loops(loops, self._space, self._pool, self._buffers)
        if self._shape.rows_each:
            self._pass(sorted(placed, key=lambda item: (item.level, item.inside)))
            return self._loaded_again.decided([*self._outer.lines, *self._outer.stores])
        # A level ends with the reductions whose results the next one reads: one pass over the row
        # each, with what does not depend on the row in front of it.
        for level in range(max(item.level for item in placed) + 1):
            for item in placed:
                if item.level == level and not item.inside:
                    self._one(item)
            inside = [item for item in placed if item.level == level and item.inside]
            if inside and self._shape.looped:
                self._pass(inside)
            else:
                self._load_ahead(inside, {item.loop.buffer for item in placed})
                for item in inside:
                    self._one(item)
        return self._loaded_again.decided([*self._outer.lines, *self._outer.stores])

    @property
    def repeated(self) -> float:
        """How many times as much memory a kernel that loops over its rows moves as one that held
        them whole.
        """
        return self._loaded_again.repeated(self._stored_along_row)

    @property
    def row_bytes(self) -> int:
        """How many bytes are loaded for each element of the rows."""
        return self._loaded_again.row_bytes

    @property
    def functions(self) -> tuple[str, ...]:
        """The texts of the functions that the kernel calls, which its module has to define."""
        return self._scans.functions

    @property
    def least_blocks(self) -> Mapping[str, int]:
        """The least blocks that tensor descriptors need; none where there are none."""
        return self._tiles.least_blocks

    def _pass(self, items: list[PlacedLoop]) -> None:
        """Write one loop over the row, or over the rows of a program."""
        self._inner = Scope()
        for item in items:
            self._one(item)
        # Written once the loop's body is known: accumulators start before it and are reduced after.
        scope, self._inner = self._inner, None
        writer = self._across if self._shape.rows_each else self._reductions
        before, after = writer.take()
        self._outer.lines += [*before, *self._scans.take()]
        loop = self._shape.loop
        assert loop is not None
        prefix = loop.prefix
        run = f"0, {prefix}numel, {block_name(loop)}"
        if self._shape.shared:
            run = f"{prefix}first, {prefix}end, {block_name(loop)}"
        if self._shape.rows_each:
            run = f"{prefix}first, {prefix}end, {block_name(loop)}, num_stages=NUM_STAGES"
        self._outer.lines += [
            f"for {prefix}offset in tl.range({run}):",
            f"    {prefix}index = {prefix}offset + {prefix}base",
        ]
        if prefix not in self._shape.constant_masks:
            self._outer.lines.append(f"    {prefix}mask = {prefix}index < {prefix}numel")
        self._outer.lines += [f"    {line}" for line in (*scope.lines, *scope.stores)]
        self._outer.lines += after

    def _load_ahead(self, items: list[PlacedLoop], written: set[str]) -> None:
        """Write what several reductions across memory reduce of what other kernels wrote, in front
        of the first one: threads wait for each other in each, and a load behind it would begin only
        then.
        """
        reducing = [one for one in items if one.loop.is_reduction and not one.loop.reads & written]
        if self._shape.columns and len(reducing) > 1:
            for item in reducing:
                self._value(item.value, ())

    def _one(self, item: PlacedLoop) -> None:
        loop = item.loop
        if loop.is_reduction:
            self._reduce(item)
            return
        # A later load at this address takes the value itself, not memory: another lane's store may
        # not have arrived. A scatter, or an input that is overwritten, has no such single value.
        key = (loop.buffer, item.index)
        if loop.mode is None and self._buffers[loop.buffer].source == "node":
            self._definitions[key] = item.value
        if loop.buffer in self._shape.removed:
            return  # its value is computed where it is read
        self._tell(item)
        self._load_first(item.value)
        self._store(item, self._value(item.value, ()))

    def _load_first(self, body: Term) -> None:
        """Write the loads of a body whose addresses are known: a function with branches, as erf has
        them, would keep the compiler from moving those behind it to the front.
        """
        seen, rest = {body}, [body] if self.loads_first else []
        while rest:
            term = rest.pop()
            if self._known(term, ()) is not None:
                continue
            needed = [one for one in self._needed(term) if one not in seen]
            if term.operator == "load" and not self._needed(term):
                self._value(term, ())
            seen.update(needed)
            rest += reversed(needed)

    def _tell(self, item: PlacedLoop) -> None:
        """Write a comment in front of the lines of a loop."""
        reaches = item.inside or self._shape.rows_each
        scope = self._inner if reaches and self._inner is not None else self._outer
        # Without names of buffers, so that kernels that compute the same have the same text.
        scope.lines.append(f"# {item.loop.kind}: {', '.join(sorted(item.loop.origins))}")

    def _reduce(self, item: PlacedLoop) -> None:
        loop = item.loop
        self._tell(item)
        self._load_first(item.value)
        value = self._value(item.value, ())
        self.num_reduction += 1
        scope = self._outer if self._inner is None else self._inner
        writer = self._across if loop.rows_each else self._reductions
        result, lines = writer.reduce(loop.kind, item.value, value, loop.kind.startswith("arg"))
        scope.lines += lines
        self._results[loop.buffer, item.index] = self._in_its_type(result, loop.kind)
        if loop.buffer not in self._shape.removed:
            self._store(item, result)

    # --------------------------------------------------------------------------------------- Values

    def new_name(self) -> str:
        """Return the name of a new value; the caller writes the line."""
        self._count += 1
        return f"tmp{self._count - 1}"

    def _value(self, root: Term, masks: Masks) -> Value:
        """Return the value of a body behind masks, and write the lines that it needs.

        An explicit stack in place of recursion: a kernel may have thousands of operators, each
        using the one before.
        """
        known = self._known(root, masks)
        if known is not None:
            return known
        stack = [(root, iter(self._needed(root)))]
        while True:
            term, rest = stack[-1]
            following = next((item for item in rest if self._known(item, masks) is None), None)
            if following is not None:
                stack.append((following, iter(self._needed(following))))
                continue
            stack.pop()
            value = self._made(term, masks)
            self._scope_of(term, masks).values[term, self._masks_for(term, masks)] = value
            if not stack:
                return value

    def _needed(self, term: Term) -> Sequence[Term]:
        """Return the terms whose values `_made` asks for behind the same masks, in its order."""
        match term.operator:
            case "load":
                buffer, index, symbols = term.details
                if buffer == SEEDS or self._buffers[buffer].by_value:
                    return ()
                if (buffer, index) in self._results:
                    return ()
                definition = self._definitions.get((buffer, index))
                return term.terms[: len(symbols)] if definition is None else (definition,)
            case "masked":
                return term.terms[:1]
            case "check_bounds" | "index_expr":
                return term.terms
            case "scan" | "sort":
                return ()  # its elements are needed whatever mask its reader is behind
        return [item for item in term.terms if not _is_written_inside(item, term)]

    def _known(self, term: Term, masks: Masks) -> Value | None:
        key = (term, self._masks_for(term, masks))
        inner = None if self._inner is None else self._inner.values.get(key)
        return inner or self._outer.values.get(key)

    def _masks_for(self, term: Term, masks: Masks) -> Masks:
        """Return the masks that matter to a term: none where it loads nothing, so it is the same
        inside and outside of a mask.
        """
        return masks if masks and self._is_masked(term) else ()

    def _is_masked(self, term: Term) -> bool:
        if term not in self._loading:
            for item in in_order(term, self._loading):
                # A row is computed whole: a mask of who reads it must not change it.
                self._loading[item] = item.operator not in ALONG_ROWS and (
                    item.operator in {"load", "check_bounds"}
                    or any(self._loading[argument] for argument in item.terms)
                )
        return self._loading[term]

    def _scope_of(self, term: Term, masks: Masks) -> Scope:
        if self._inner is None:
            return self._outer
        # What does not differ along the row is computed once, in front of the loop, unless it is
        # behind a mask whose own value is only known inside of the loop.
        behind = [self._mask_dimensions[mask] for mask in self._masks_for(term, masks)]
        along = self._dimensions_of(term).union(*behind)
        return self._inner if self._shape.loop in along else self._outer

    def _dimensions_of(self, term: Term) -> frozenset[Dimension]:
        found = self._dimensions.get(term)
        if found is None:
            for item in in_order(term, self._dimensions):
                dims = {d for argument in item.terms for d in self._dimensions[argument]}
                if item.operator == "load":
                    dims |= self._space.dimensions_of(item.details[1])
                    definition = self._definitions.get((item.details[0], item.details[1]))
                    dims |= self._dimensions_of(definition) if definition is not None else set()
                elif item.operator == "index_expr":
                    dims |= self._space.dimensions_of(item.details[0])
                elif item.operator in ALONG_ROWS and self._space.reduced is not None:
                    dims.add(self._space.reduced)
                self._dimensions[item] = frozenset(dims)
            found = self._dimensions[term]
        return found

    def _made(self, term: Term, masks: Masks) -> Value:
        match term.operator:
            case "load":
                return self._loaded(term, masks)
            case "constant":
                return self._line(
                    term, masks, Value(constant_text(term.details[0], term.dtype), term.dtype)
                )
            case "index_expr":
                return self._index_value(term, masks)
            case "masked":
                return self._masked(term, masks)
            case "check_bounds":
                return self._checked(term, masks)
            case "scan":
                return self._scanned(term)
            case "sort":
                return self._sorted(term)
        # A thread has to hold several neighbours for some conversions, which decides the block.
        if term.operator == "to_dtype":
            self.elements = max(self.elements, elements_per_thread(term.terms[0].dtype, term.dtype))
        arguments = [self._argument(argument, term, masks) for argument in term.arguments]
        value = operation_text.render(term.operator, arguments, **dict(options_of(term)))
        return self._line(term, masks, self._in_its_type(value, term.operator))

    def _in_its_type(self, value: Value, operator: str) -> Value:
        """Return an operator's result, rounded to the 16-bit float that it is where that was asked
        for; the compiler makes one of such an operation and its conversions.
        """
        if self._shape.upcast or operator in _EXACT or not data_type(value.dtype).is_half:
            return value
        return Value(cast_text(value.text, value.dtype, value.dtype, rounded=True), value.dtype)

    def _scanned(self, term: Term) -> Value:
        """Return one result of a scan, and keep the others for who reads them."""
        combination, place = term.details
        values = [self._value(item, ()) for item in term.terms]
        self.num_reduction += 1
        results, lines = self._scans.scan(combination, values)
        results = [self._in_its_type(result, "scan") for result in results]
        scope = self._scope_of(term, ())
        scope.lines += lines
        for number, result in enumerate(results):
            key = self._pool.make(
                term.operator, term.arguments, result.dtype, (combination, number)
            )
            scope.values[key, ()] = result
        return results[int(place)]

    def _sorted(self, term: Term) -> Value:
        """Return the keys of a row in their order; lanes that do not count come last."""
        (source,), (first,) = term.terms, term.details
        value, reduced = self._value(source, ()), self._space.reduced
        assert reduced is not None, "a sort in a kernel without rows"
        self.num_reduction += 1
        keys = f"tl.broadcast_to({value.text}, {self._shape.block_shape})"
        for mask in self._shape.masks([reduced]):
            last = constant_text(identity_of("min", term.dtype), term.dtype)
            keys = f"tl.where({mask}, {keys}, {last})"
        return self._line(term, (), Value(f"lib.sort({keys}, {first})", term.dtype))

    def _argument(self, argument: Argument, term: Term, masks: Masks) -> Value | float:
        if not isinstance(argument, Term):
            return argument
        if _is_written_inside(argument, term):
            number: float = argument.details[0]
            return number
        return self._value(argument, masks)

    def _line(self, term: Term, masks: Masks, value: Value) -> Value:
        if _NAME.fullmatch(value.text):
            return value  # such as a conversion that changes nothing in a register
        name = self.new_name()
        self._scope_of(term, masks).lines.append(f"{name} = {value.text}")
        return Value(name, value.dtype)

    def _masked(self, term: Term, masks: Masks) -> Value:
        mask, body = term.terms
        condition = self._value(mask, masks).text
        self._mask_dimensions[condition] = self._dimensions_of(mask)
        # A mask within a mask: loads need both.
        inside = tuple(dict.fromkeys((*masks, condition)))
        # A masked load gives the other value itself, without a choice behind it; only memory has
        # masks, so what a register holds, or all lanes share, is chosen like any other value.
        if (
            body.operator == "load"
            and body.details[0] != SEEDS
            and not self._buffers[body.details[0]].by_value
            and not self._is_computed(body)
        ):
            return self._fetched(body, inside, term.details[0])
        value = self._value(body, inside)
        other = Value(constant_text(term.details[0], term.dtype), term.dtype)
        return self._line(
            term, masks, operation_text.render("where", [Value(condition, "bool"), value, other])
        )

    def _index_value(self, term: Term, masks: Masks) -> Value:
        expr = term.details[0]
        # An address is bounded by its buffer's size; the value of an index expression is not, so it
        # may need 64 bits in a kernel whose addresses fit in 32.
        far = not self._shape.wide and not self._space.ranges().fits(expr)
        text = self._index(expr, term, masks, far=far)
        if term.dtype == "int64":
            # Triton makes a constant of a size that is 1, and constants have no method `to`.
            plain = (
                f"({text}).to(tl.int64)"
                if self._dimensions_of(term)
                else f"tl.cast({text}, tl.int64)"
            )
            text = f"tl.full([], {text}, tl.int64)" if expr.is_Integer else plain
        elif expr.is_Integer:
            # In the width of indices, which are all that it is compared with.
            text = f"tl.full([], {text}, {self._index_type})"
        return self._line(term, masks, Value(text, term.dtype))

    def _checked(self, term: Term, masks: Masks) -> Value:
        value = self._value(term.terms[0], masks)
        limit = dict(term.details)["size"]
        if not self._shape.asserted:
            return value
        size = self._index(limit, term, masks)
        self.num_assert += 1
        # Lanes beyond the end hold any number, so only active lanes are asserted.
        active = [*self._shape.masks(self._dimensions_of(term)), *masks]
        inside = f"((0 <= {value.text}) & ({value.text} < {size}))"
        condition = inside if not active else f"{inside} | ~({' & '.join(sorted(active))})"
        message = f"index out of bounds: 0 <= {value.text} < {size}"
        self._scope_of(term, masks).lines.append(f'tl.device_assert({condition}, "{message}")')
        return value

    # ------------------------------------------------------------------------------------ Addresses

    def _index(self, expr: sympy.Expr, term: Term, masks: Masks, *, far: bool = False) -> str:
        """Return the text of an index expression, computed in 64 bits where it goes `far`, and
        write what it needs in front.
        """
        # Each symbol gets the text that stands for it, keeping what is known of its sign, on which
        # the choice between Triton's division and Python's depends.
        names: dict[sympy.Symbol, sympy.Symbol] = {}
        for argument, symbol in zip(term.terms, symbols_of(term), strict=False):
            self._symbols[symbol] = self._value(argument, masks)
        for symbol in sorted(expr.free_symbols, key=str):
            part = self._space.part_of(symbol)
            if part is not None:
                self._define(*part)
                if far:
                    names[symbol] = sympy.Symbol(
                        f"{symbol}.to(tl.int64)", integer=True, nonnegative=True
                    )
            elif symbol in self._symbols:
                names[symbol] = sympy.Symbol(
                    self._index_operand(self._symbols[symbol]), integer=True, nonnegative=True
                )
            else:
                name = self.arguments.size(symbol)
                names[symbol] = sympy.Symbol(
                    f"tl.cast({name}, tl.int64)" if far else name, **symbol.assumptions0
                )
        ranges = self._space.ranges()
        kind = "tl.int64" if far else self._index_type
        return index_text(
            expr.xreplace(names),
            nonnegative=ranges.nonnegative,
            below=ranges.below,
            index_type=kind,
        )

    def _index_operand(self, value: Value) -> str:
        """Return a value as a part of an address, in the width of indices, since its product with
        a stride may need all of it.
        """
        return (
            f"{value.text}.to(tl.int64)"
            if self._shape.wide and value.dtype == "int32"
            else value.text
        )

    def _define(self, dimension: Dimension, part: Part) -> None:
        """Write the line of a part of an index, once in its scope."""
        inside = dimension is self._shape.loop and self._inner is not None
        scope = self._inner if inside and self._inner is not None else self._outer
        if part.symbol in scope.parts:
            return
        scope.parts.add(part.symbol)
        whole = f"{dimension.prefix}index"
        text = (
            whole if part.divisor == 1 else f"{whole} // {self.arguments.size_text(part.divisor)}"
        )
        # The outermost part needs no remainder: the index ends where it does.
        if sympy.expand(part.divisor * part.length - dimension.numel) != 0:
            length = self.arguments.size_text(part.length)
            text = f"{whole} % {length}" if part.divisor == 1 else f"({text}) % {length}"
        scope.lines.append(f"{part.symbol} = {text}")

    def _loaded(self, term: Term, masks: Masks) -> Value:
        buffer, index, _ = term.details
        if buffer == SEEDS:
            return self._seed(term, masks)
        if self._buffers[buffer].by_value:
            return self._number(term, masks)
        # What this kernel computed itself is not read back from memory.
        result = self._results.get((buffer, index))
        if result is not None:
            return result
        definition = self._definitions.get((buffer, index))
        if definition is not None:
            return self._value(definition, masks)
        return self._fetched(term, masks, 0)

    def _seed(self, term: Term, masks: Masks) -> Value:
        """Return a seed, which all lanes share."""
        place = self.arguments.seed_offset(int(term.details[1]))
        return self._line(
            term, masks, Value(f"tl.load({self.arguments.read(SEEDS)} + {place})", "int64")
        )

    def _number(self, term: Term, masks: Masks) -> Value:
        """Return a number that the launch passes, which all lanes share."""
        buffer = term.details[0]
        kind, dtype = number_type(self._buffers[buffer].layout.dtype), term.dtype
        wide = _NUMBERS[kind]
        text = f"tl.cast({self.arguments.number(buffer)}, {compute_type(wide)})"
        return self._line(term, masks, Value(cast_text(text, wide, dtype), dtype))

    def _is_computed(self, load: Term) -> bool:
        """Whether the kernel itself computes what a load reads."""
        key = (load.details[0], load.details[1])
        return key in self._results or key in self._definitions

    def _fetched(self, term: Term, masks: Masks, other: float) -> Value:
        """Return what a load reads from memory, the other value where a mask is false."""
        buffer, index, _ = term.details
        tile = None if masks else self._tiles.tile(buffer, index)
        if tile is None:
            text = self._load_text(term, index, masks, other)
            text = f"tl.load({self.arguments.read(buffer)} + {text})"
        else:
            self._policy(term, index)  # counts what is read
            text = self._tiles.load(self.arguments.read(buffer), tile, self._outer.lines)
        self.num_load += 1
        dtype = self._buffers[buffer].layout.dtype
        return self._line(term, masks, Value(loaded_text(text, dtype), dtype))

    def _load_text(self, term: Term, index: sympy.Expr, masks: Masks, other: float) -> str:
        """Return what stands behind `pointer +`: address, mask and policy."""
        address = self._index(index, term, masks)
        used = self._dimensions_of(term)
        active = sorted({*self._shape.masks(used), *masks})
        # One element for all lanes: a block of one address, since a bare number has no shape.
        if not used and index.is_Integer:
            address = f"tl.full({self._shape.shape_of(())}, {address}, {self._index_type})"
        if masks:
            # Address and mask must have one shape, also where only the mask differs along a
            # dimension.
            spread = used.union(*(self._mask_dimensions[mask] for mask in masks))
            address = f"tl.broadcast_to({address}, {self._shape.shape_of(spread)})"
        parts = [f"({address})", " & ".join(active) or "None"]
        # A lane beyond the end of a row, or behind a mask of values, is used later, so it needs a
        # defined value; one beyond the end of kept dimensions is never stored.
        reduced = self._space.reduced
        if active and (
            masks or any(symbol.startswith("tmp") for symbol in active) or reduced in used
        ):
            plain = repr(other) if math.isfinite(other) else f"float('{other}')"
            parts.append(f"other={plain if other else '0.0'}")
        policy = self._policy(term, index)
        if policy:
            parts.append(f"eviction_policy='{policy}'")
        return ", ".join(parts)

    @property
    def _index_type(self) -> str:
        return "tl.int64" if self._shape.wide else "tl.int32"

    def _policy(self, term: Term, index: sympy.Expr) -> str | None:
        """Return how long a loaded element should stay in the cache: long where it is read again,
        by other programs or lanes or later on.
        """
        buffer, _, values = term.details
        again, used = self._loaded_again.load(buffer), self._dimensions_of(term)
        # The address does not move along some dimension: other programs, or lanes, read it too.
        if any(
            dimension.numel != 1 and dimension not in used for dimension in self._space.dimensions
        ):
            return "evict_last"
        self._loaded_again.along_row(
            buffer, str(index), item_bytes(self._buffers[buffer].layout.dtype)
        )
        # No dimension runs along memory here, so a line of the cache holds elements for other
        # lanes; or the address moves along some parts of a dimension alone.
        symbols = [part.symbol for d in self._space.dimensions for part in d.parts.values()]
        if not any(index.coeff(symbol) == 1 for symbol in symbols):
            return "evict_last"
        if not values and self._is_repeated(index):
            return "evict_last"
        return None if self._space.reduced is None else again

    def _is_repeated(self, index: sympy.Expr) -> bool:
        """Whether an address without values comes again at other indices of some dimension."""
        moving = index.free_symbols
        return any(
            sympy.prod(p.length for p in d.parts.values() if p.symbol in moving) != d.numel
            for d in self._space.dimensions
        )

    def _store(self, item: PlacedLoop, value: Value) -> None:
        loop, buffer = item.loop, self._buffers[item.loop.buffer]
        # A load of the same place has the dimensions and indirect symbols that the store needs.
        carrier = self._pool.make(
            "load",
            tuple(t for _, t in item.index_terms),
            buffer.layout.dtype,
            (loop.buffer, item.index, tuple(s for s, _ in item.index_terms)),
        )
        address = self._index(item.index, carrier, ())
        kept = not item.inside or loop.is_reduction
        domain = set(self._space.kept if kept else self._space.dimensions)
        if loop.rows_each:
            domain = set(self._space.dimensions).difference(self._space.kept)
        active = sorted(self._shape.masks(domain))
        if loop.first is not None:
            assert self._space.reduced is not None
            active.append(f"({self._space.reduced.prefix}index < {loop.first})")
        if self._shape.shared and kept:
            # All programs of a row have what it comes to; they take turns to store it.
            active.append(f"({SHARE} == {self.num_store} % {SHARES})")
        shape = self._shape.shape_of(domain)
        # Lanes that write one element with different values still need an address each.
        if self._dimensions_of(carrier) != domain:
            address = (
                f"tl.broadcast_to({address}, {shape})"
                if not item.index.is_Integer
                else f"tl.full({shape}, {address}, {self._index_type})"
            )
        # A 16-bit float is rounded here, once; until now it had the precision of float32.
        text = stored_text(
            operation_text.render("to_dtype", [value], dtype=buffer.layout.dtype).text,
            buffer.layout.dtype,
        )
        pointer = self.arguments.write(loop.buffer)
        self.num_store += 1
        self._stored_along_row += 0 if kept else item_bytes(buffer.layout.dtype)
        mask = " & ".join(active) or "None"
        # Stores come behind all lines of their scope, so that every load sees the old memory.
        inside = self._shape.loop in domain and self._inner is not None
        scope = self._inner if inside and self._inner is not None else self._outer
        atomic = loop.mode if loop.mode is not None and loop.mode.startswith("atomic_") else None
        self.atomic |= atomic is not None
        # Several warps may hold one element where the address does not move along a dimension.
        spread = any(
            d.numel != 1 and d not in self._dimensions_of(carrier) for d in self._space.dimensions
        )
        shared = spread and pointer.startswith("in_out")
        whole = loop.mode is None and loop.first is None and not shared
        tile = self._tiles.tile(loop.buffer, item.index) if whole else None
        if tile is not None and domain == set(tile.dimensions):
            scope.stores.append(self._tiles.store(pointer, tile, text, self._outer.lines))
            return
        scope.stores += _store_lines(
            f"{pointer} + ({address})",
            text,
            mask,
            buffer.layout.dtype,
            atomic=atomic,
            shape=shape,
            shared=shared,
        )


class LoadPolicies:
    """The loads of one kernel, in the order in which they are written."""

    def __init__(self) -> None:
        self._buffers: list[str] = []
        self._read: dict[tuple[str, str], list[int]] = {}

    def load(self, buffer: str) -> str:
        """Count a load; returns the mark that stands for its policy."""
        self._buffers.append(buffer)
        return f"LOAD_{len(self._buffers) - 1}_AGAIN"

    def along_row(self, buffer: str, address: str, size: int) -> None:
        """Count a load of `size` bytes for each element of the row."""
        self._read.setdefault((buffer, address), []).append(size)

    def repeated(self, stored: int) -> float:
        """Return how many times as much memory the kernel moves as one that held its rows whole,
        where it stores `stored` bytes for each element.
        """
        # A kernel that holds its rows reads each address once; this one reads it in each pass.
        every = sum(map(sum, self._read.values())) + stored
        return every / max(1, self.row_bytes + stored)

    @property
    def row_bytes(self) -> int:
        """How many bytes are loaded for each element of the row, each address once."""
        return sum(sizes[0] for sizes in self._read.values())

    def decided(self, lines: Sequence[str]) -> list[str]:
        """Return lines with policies in the place of marks."""
        return [_MARK.sub(self._policy, line) for line in lines]

    def _policy(self, mark: re.Match[str]) -> str:
        number = int(mark[1])
        return (
            "evict_last" if self._buffers[number] in self._buffers[number + 1 :] else "evict_first"
        )


def _store_lines(
    place: str, value: str, mask: str, dtype: str, *, atomic: str | None, shape: str, shared: bool
) -> list[str]:
    """Return the lines of a store.

    Args:
        place: text of the pointer.
        value: text of what is stored.
        mask: text of which lanes do, or `None`.
        dtype: of the buffer.
        atomic: name of Triton's function that combines; None for a plain store.
        shape: text of the shape of the block.
        shared: whether other warps hold the same element, and may read it in memory that the store
            changes.
    """
    if atomic is not None:
        options = _ATOMIC_OPTIONS.get(dtype, _RELAXED)
        return [f"tl.{atomic}({place}, tl.broadcast_to({value}, {shape}), {mask}, {options})"]
    # Memory that was taken over still holds what other warps may have to read first.
    return [*(["tl.debug_barrier()"] if shared else []), f"tl.store({place}, {value}, {mask})"]


def _is_written_inside(argument: Term, term: Term) -> bool:
    """Whether an argument is a number that is written in the text of an infix operator, which gives
    it the type of the other argument.
    """
    if argument.operator != "constant" or term.operator not in _INFIX_NUMBERS:
        return False
    others = [item for item in term.terms if item is not argument and item.operator != "constant"]
    return bool(others) and others[0].dtype == argument.dtype
