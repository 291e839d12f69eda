# SPDX-License-Identifier: Apache-2.0
"""`KernelArguments`: the parameters of one kernel, named as they are first used: buffers that are
read, written or both, sizes, numels.

Order of the signature: `in_out_ptr<i>`, `in_ptr<i>`, `out_ptr<i>`, `in_number<i>`, `ks<i>`,
`load_seed_offset<i>`, `ws_ptr<i>`, `counters`, numels (`znumel`, `ynumel`, `xnumel`, `r0_numel`),
then blocks, which are constexpr.  The body writer asks for names, `module_text` writes signature
and metadata, and the wrapper passes what `outer` lists.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import sympy

from bundler.codegen.kernels.index_text import index_text
from bundler.codegen.loops.data_types import NumberKind, data_type, store_type
from bundler.codegen.loops.loop_nodes import Buffer, TensorLayout
from bundler.runtime.heuristics.block_limits import MAX_RSPLIT

_ALIGNMENT = 16
#: What the program calls the memory of a launch through which programs hand each other values of a
#: dtype, and their counters.
WORKSPACE, COUNTERS = "workspace_{}", "counters"


@dataclass(frozen=True)
class KernelParameter:
    """One parameter that a launch passes.

    Attributes:
        name: in the kernel.
        outer: a buffer's name, or a size.
        type: Triton's, as `*fp32` or `i32`; no pointer for a buffer whose number is passed.
        aligned: known to be a multiple of 16.
        fixed: whether a size that is 1 may be a constant of the kernel.
    """

    name: str
    outer: str | sympy.Expr
    type: str
    aligned: bool
    fixed: bool = True


class KernelArguments:
    """Gives names to what a kernel uses.

    Args:
        buffers: of the program.
        mutated: buffers that the kernel both reads from memory and writes, or adds to.
        reused: buffer that is written -> buffer whose memory it takes, which the kernel reads.
    """

    def __init__(
        self, buffers: Mapping[str, Buffer], mutated: Iterable[str], reused: Mapping[str, str]
    ) -> None:
        self._buffers, self._mutated, self._reused = buffers, frozenset(mutated), dict(reused)
        # Both names of memory that is taken over are one parameter.
        self._taken = {old: new for new, old in self._reused.items()}
        self._both: dict[str, str] = {}
        self._read: dict[str, str] = {}
        self._written: dict[str, str] = {}
        self._sizes: dict[sympy.Symbol, str] = {}
        self._seeds: dict[int, str] = {}
        self._numbers: dict[str, str] = {}
        # Dtype -> how many values of each row programs hand each other.
        self._workspaces: dict[str, int] = {}

    def read(self, buffer: str) -> str:
        """Return the parameter that a buffer is loaded from."""
        if buffer in self._mutated or buffer in self._taken:
            return self._in_out(self._taken.get(buffer, buffer))
        return self._read.setdefault(buffer, f"in_ptr{len(self._read)}")

    def write(self, buffer: str) -> str:
        """Return the parameter that a buffer is stored to."""
        if buffer in self._mutated or buffer in self._reused:
            return self._in_out(buffer)
        return self._written.setdefault(buffer, f"out_ptr{len(self._written)}")

    def _in_out(self, buffer: str) -> str:
        return self._both.setdefault(buffer, f"in_out_ptr{len(self._both)}")

    def size(self, symbol: sympy.Symbol) -> str:
        """Return the parameter of a size."""
        return self._sizes.setdefault(symbol, f"ks{len(self._sizes)}")

    def number(self, buffer: str) -> str:
        """Return the parameter that has the only element of a buffer on the host."""
        return self._numbers.setdefault(buffer, f"in_number{len(self._numbers)}")

    def seed_offset(self, number: int) -> str:
        """Return the parameter that says where a seed is, so that kernels that differ in their
        seeds alone are one.
        """
        return self._seeds.setdefault(number, f"load_seed_offset{len(self._seeds)}")

    def workspace(self, dtype: str) -> tuple[str, int]:
        """Return the parameter of the memory through which programs hand each other values of a
        dtype, and the place of a new one there.
        """
        place = self._workspaces.setdefault(dtype, 0)
        self._workspaces[dtype] += 1
        return f"ws_ptr{[*self._workspaces].index(dtype)}", place

    @property
    def counters(self) -> str:
        """The parameter of the counters of programs that wait for each other."""
        return COUNTERS

    def workspaces(self, rows: sympy.Expr) -> dict[str, TensorLayout]:
        """Return the memory that a launch needs for itself where programs share so many rows, by
        what the program calls it.
        """
        sizes = {
            WORKSPACE.format(dtype): (dtype, count * rows * MAX_RSPLIT)
            for dtype, count in self._workspaces.items()
        }
        sizes |= {COUNTERS: ("int32", rows)} if sizes else {}
        one = sympy.Integer(1)
        return {name: TensorLayout(dtype, (size,), (one,)) for name, (dtype, size) in sizes.items()}

    def size_text(self, size: sympy.Expr) -> str:
        """Return the text of a size, with parentheses where it needs them."""
        symbols = sorted(size.free_symbols, key=str)
        names = {
            symbol: sympy.Symbol(self.size(symbol), **symbol.assumptions0) for symbol in symbols
        }
        text = index_text(size.xreplace(names), nonnegative=lambda expr: bool(expr.is_nonnegative))
        return text if size.is_Integer or size.is_Symbol else f"({text})"

    @property
    def pointers(self) -> tuple[KernelParameter, ...]:
        """The buffers, in order."""
        groups = (self._both, self._read, self._written)
        return tuple(
            self._pointer(name, buffer) for group in groups for buffer, name in group.items()
        )

    @property
    def sizes(self) -> tuple[KernelParameter, ...]:
        """The sizes, in order, then the places of seeds."""
        sizes = (
            KernelParameter(name, symbol, "i64", aligned=False)
            for symbol, name in self._sizes.items()
        )
        seeds = (
            # Never a constant: one kernel serves several seeds.
            KernelParameter(name, sympy.Integer(number), "i32", aligned=False, fixed=False)
            for number, name in self._seeds.items()
        )
        return (*sizes, *seeds)

    @property
    def numbers(self) -> tuple[KernelParameter, ...]:
        """The numbers of the host, in order: floats with 64 bits, so that nothing is lost on the
        way.
        """
        return tuple(
            KernelParameter(
                name, buffer, number_type(self._buffers[buffer].layout.dtype), aligned=False
            )
            for buffer, name in self._numbers.items()
        )

    @property
    def exchanged(self) -> tuple[KernelParameter, ...]:
        """The workspaces, in order, then the counters; none where no programs share rows."""
        if not self._workspaces:
            return ()
        return (
            *(
                KernelParameter(f"ws_ptr{n}", WORKSPACE.format(dtype), _type_of(dtype), True)
                for n, dtype in enumerate(self._workspaces)
            ),
            KernelParameter(COUNTERS, COUNTERS, "*i32", aligned=True),
        )

    @property
    def changed(self) -> tuple[str, ...]:
        """Names of parameters whose buffer holds something before the launch that the kernel
        changes.
        """
        return tuple(
            name for buffer, name in sorted(self._both.items(), key=lambda item: item[1]) if buffer
        )

    def _pointer(self, name: str, buffer: str) -> KernelParameter:
        found = self._buffers[buffer]
        return KernelParameter(name, buffer, _type_of(found.layout.dtype), found.aligned)


def _type_of(dtype: str) -> str:
    """Return Triton's name of the type of a pointer to elements of a dtype."""
    # Launches of torch's tensors name bools i1, though each is a byte in memory.
    return "*i1" if dtype == "bool" else f"*{_SHORT[store_type(dtype)]}"


def number_type(dtype: str) -> str:
    """Return Triton's name of the type in which a number of a dtype is passed."""
    if data_type(dtype).kind in {NumberKind.FLOAT, NumberKind.FLOAT8}:
        return "fp64"
    # Only a uint64 has values beyond int64.
    return "u64" if dtype == "uint64" else "i64"


def numel_parameter(prefix: str, size: sympy.Expr, *, wide: bool) -> KernelParameter:
    """Return the parameter that says how many elements a dimension has."""
    aligned = bool(size.is_Integer and size % _ALIGNMENT == 0)
    return KernelParameter(f"{prefix}numel", size, "i64" if wide else "i32", aligned)


# How Triton writes types in signatures.
_SHORT = {
    "tl.float64": "fp64",
    "tl.float32": "fp32",
    "tl.float16": "fp16",
    "tl.bfloat16": "bf16",
    "tl.float8e4nv": "fp8e4nv",
    "tl.float8e5": "fp8e5",
    "tl.float8e4b8": "fp8e4b8",
    "tl.float8e5b16": "fp8e5b16",
    "tl.int8": "i8",
    "tl.int16": "i16",
    "tl.int32": "i32",
    "tl.int64": "i64",
    "tl.uint8": "u8",
    "tl.uint16": "u16",
    "tl.uint32": "u32",
    "tl.uint64": "u64",
}
