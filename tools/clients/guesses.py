# SPDX-License-Identifier: Apache-2.0
"""`guesses`: with which arguments a kernel may be called, from its text: which are pointers, sizes,
flags, numbers.

A guess is right when Triton compiles it; `check.py` tries one after the other until one is.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from bundler.toolchain import jit_specialization
from bundler.toolchain.argument_specs import Spec

Call = tuple[dict[str, Spec], dict[str, Any]]

_MEMORY = frozenset(
    {"load", "store", "make_block_ptr", "make_tensor_descriptor", "prefetch", "advance"}
)
_MAKE = ("arange", "zeros", "full", "make_block_ptr", "zeros_like")
_SHAPES = frozenset({*_MAKE, "reshape", "view", "broadcast_to", "trans"})
_INTEGERS = re.compile(
    r"(ind(ex|ices|ptr)|_ids?\b|idx|ids$|seqlen|cu_|lens?(_|$|\b)|length|offset|table|slot|mapping|count|num_|loc|block_tables|position|pos\b|label"
    r"|target|req|page|expert|topk_id|sorted|token|start|_map|counter|lock|chunk_)",
    re.IGNORECASE,
)
_MASKS = re.compile(r"(mask|^is_|^has_|flag|valid)", re.IGNORECASE)
_WIDE = re.compile(
    r"(lse|\bm_|rstd|mean|scale|amax|delta|^l_|max|sum|norm|state|^ht$|^h0$|acc|loss|logit|^dg|^dA|^A_log|bias_f)",
    re.IGNORECASE,
)
_FLOATS = re.compile(
    r"(scale|eps|alpha|beta|temperature|softcap|soft_cap|cap$|prob|weight$|dropout|^p$|factor|theta|momentum|limit|^lr|gamma"
    r"|threshold|smoothing|lower_bound|upper_bound|coef|clamp|cap_|log2e|ratio|sigma|epsilon|lambda|_lo$|_hi$)",
    re.IGNORECASE,
)
_FLAGS = re.compile(
    r"(^|_)(USE|HAS|IS|ENABLE|APPLY|CAUSAL|STORE|SAVE|REVERSE|RETURN|WITH|DO|ALLOW|NEED|EVEN|FUSE|TRANS|VARLEN|INTERLEAVED"
    r"|SKIP|OUTPUT|ADD|COMPUTE|WRITE|LOAD)_|BIAS$|^CAUSAL$|^REVERSE$|GATED|INPLACE|PDL$",
    re.IGNORECASE,
)
_TYPES = re.compile(r"(dtype|_type$|^type_|_ty$)", re.IGNORECASE)
_BLOCKS = re.compile(
    r"(BLOCK|TILE|^B[A-Z]{0,2}[0-9]?$|SIZE|CHUNK|_DIM|DIM$|^D[A-Z]?$|^[KV]$|PADDED|POW2|HEAD_?DIM|ROTARY)",
    re.IGNORECASE,
)
_FEW = re.compile(
    r"(^N_|NUM|^H[A-Z]?$|^G$|^N[A-Z]$|GROUPS|TOP_?K|SPLIT|STAGES|WARPS|^W$|WIDTH|ITER|COUNT|RATIO|REPEAT|UNROLL|^R$)",
    re.IGNORECASE,
)


@dataclass
class Usage:
    """What a function's text does with its parameters.

    Attributes:
        pointers: those that are loaded from or stored to, perhaps by a function that is called.
        descriptors: those with `.load([…])` or `.store([…])`.
        types, functions, shapes, flags: constants that stand where these stand.
        counts: constants that say how often a loop runs.
        texts: constant -> a text that it is compared with.
    """

    pointers: set[str] = field(default_factory=set)
    descriptors: set[str] = field(default_factory=set)
    types: set[str] = field(default_factory=set)
    functions: set[str] = field(default_factory=set)
    shapes: set[str] = field(default_factory=set)
    flags: set[str] = field(default_factory=set)
    counts: set[str] = field(default_factory=set)
    texts: dict[str, str] = field(default_factory=dict)


class _Reader(ast.NodeVisitor):
    """Reads one function; what it calls is read first."""

    def __init__(self, function: Any, seen: frozenset[int]) -> None:
        self.names, self.usage = list(function.arg_names), Usage()
        self._scope, self._seen = function.get_capture_scope(), seen
        self._leads: dict[str, set[str]] = {name: {name} for name in self.names}

    def visit_Assign(self, node: ast.Assign) -> None:
        """A name that a pointer expression is assigned to leads to its parameter."""
        for target in node.targets:
            self._assign(target, node.value)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """The same with a type."""
        if node.value is not None:
            self._assign(node.target, node.value)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """Calls show what their arguments are."""
        name = getattr(node.func, "attr", "") or getattr(node.func, "id", "")
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        if name in _MEMORY or name.startswith("atomic_"):
            self._access(node)
        if name in _SHAPES:
            self.usage.shapes.update(*map(self._plain, arguments))
        if name in {"range", "static_range"}:
            self.usage.counts.update(*map(self._plain, node.args))
        if name == "to" and len(node.args) == 1:
            self.usage.types.update(self._plain(node.args[0]))
        self.usage.types.update(
            *(self._plain(keyword.value) for keyword in node.keywords if keyword.arg == "dtype")
        )
        if isinstance(node.func, ast.Name) and node.func.id in self.names:
            self.usage.functions.add(node.func.id)
        self._callee(node)
        self.generic_visit(node)

    def _access(self, node: ast.Call) -> None:
        """Note what is loaded from or stored to: `tl.load(pointer)`, or `descriptor.load([…])`."""
        of = node.func.value if isinstance(node.func, ast.Attribute) else None
        if isinstance(of, ast.Name) and of.id in self._leads:
            self.usage.descriptors.update(self._leads[of.id])
            return
        named = (one.value for one in node.keywords if one.arg in {"pointer", "base"})
        first = node.args[0] if node.args else next(named, None)
        if first is not None:
            self.usage.pointers.update(self._lead(first))

    def visit_If(self, node: ast.If) -> None:
        """A constant that stands alone in a condition is a flag."""
        self._condition(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        """The same within an expression."""
        self._condition(node.test)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        """A constant that is compared with a text is one."""
        if (
            isinstance(node.left, ast.Name)
            and isinstance(node.comparators[0], ast.Constant)
            and isinstance(node.comparators[0].value, str)
        ):
            self.usage.texts.setdefault(node.left.id, node.comparators[0].value)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """`x.dtype.element_ty` is what a pointer has."""
        if node.attr == "element_ty" and isinstance(node.value, ast.Attribute):
            self.usage.pointers.update(self._lead(node.value.value))
        self.generic_visit(node)

    def _condition(self, test: ast.expr) -> None:
        if isinstance(test, ast.BoolOp):
            for value in test.values:
                self._condition(value)
        elif isinstance(test, ast.UnaryOp):
            self._condition(test.operand)
        else:
            self.usage.flags.update(self._plain(test))

    def _plain(self, node: ast.expr) -> set[str]:
        if isinstance(node, (ast.Tuple, ast.List)):
            return set().union(*map(self._plain, node.elts))
        return {node.id} if isinstance(node, ast.Name) and node.id in self.names else set()

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if (
            isinstance(target, ast.Tuple)
            and isinstance(value, ast.Tuple)
            and len(target.elts) == len(value.elts)
        ):
            for one, other in zip(target.elts, value.elts, strict=True):
                self._assign(one, other)
        elif isinstance(target, ast.Name):
            self._leads.setdefault(target.id, set()).update(self._lead(value))

    def _lead(self, node: ast.expr) -> set[str]:
        """Return the parameters that may be the pointer of an expression."""
        match node:
            case ast.Name():
                return set(self._leads.get(node.id, ()))
            case ast.BinOp(op=ast.Add() | ast.Sub()):
                left = self._lead(node.left)
                return left or self._lead(node.right)
            case ast.IfExp():
                return self._lead(node.body) | self._lead(node.orelse)
            case ast.Call(func=ast.Attribute(attr="to", value=value)):
                return self._lead(value)
            case ast.Call(
                func=ast.Attribute(attr="cast" | "multiple_of" | "advance" | "make_block_ptr"),
                args=[first, *_],
            ):
                return self._lead(first)
        return set()

    def _callee(self, node: ast.Call) -> None:
        callee = self._scope.get(node.func.id) if isinstance(node.func, ast.Name) else None
        function = (
            jit_specialization.jit_function(callee)
            if jit_specialization.is_kernel(callee)
            else None
        )
        if (
            function is None
            or id(function) in self._seen
            or any(isinstance(one, ast.Starred) for one in node.args)
        ):
            return
        inner = usage_of(function, self._seen)
        given = [
            *zip(function.arg_names, node.args, strict=False),
            *((one.arg, one.value) for one in node.keywords),
        ]
        for name, value in given:
            if name in inner.pointers:
                self.usage.pointers.update(self._lead(value))
            for kind in ("descriptors", "types", "functions", "shapes", "flags"):
                if name in getattr(inner, kind):
                    getattr(self.usage, kind).update(self._plain(value))
            if name in inner.texts:
                self.usage.texts.update(dict.fromkeys(self._plain(value), inner.texts[name]))


def usage_of(function: Any, seen: frozenset[int] = frozenset()) -> Usage:
    """Return what a JIT function, and those that it calls, do with its parameters."""
    reader = _Reader(function, seen | {id(function)})
    tree = ast.parse(function.src)
    for _ in range(2):  # a loop may use a name before the text assigns it
        reader.visit(tree)
    return reader.usage


@dataclass(frozen=True)
class _Manner:
    """One way of guessing: element types, sizes, and whether what is optional is there."""

    element: str = "fp16"
    wide: str = "fp32"
    block: int = 64
    few: int = 2
    flags: bool | None = False
    optional: bool = True
    index: str = "i32"
    alike: bool = False


_MANNERS = (
    _Manner(block=32),
    _Manner("fp32", block=64),
    _Manner(optional=False),
    _Manner("bf16", wide="bf16", block=64, alike=True),
    _Manner(block=32, flags=True),
    _Manner("fp32", block=32, flags=True),
    _Manner("fp32", block=32, optional=False, flags=None),
    _Manner("bf16", block=128, few=4, flags=None, index="i64"),
    _Manner("bf16", block=16, few=16, flags=None),
    _Manner("i32", block=64, wide="i32", few=2),
    _Manner("fp8e4nv", block=128, few=1, flags=True),
)


def guesses(kernel: Any) -> Iterator[Call]:
    """Yield calls, the likeliest first."""
    function = jit_specialization.jit_function(kernel)
    usage, chosen = usage_of(function), _chosen(kernel)
    seen = set()
    for manner in _MANNERS:
        call = _guess(function, usage, chosen, manner)
        if (text := repr(call)) not in seen:
            seen.add(text)
            yield call


def _chosen(kernel: Any) -> frozenset[str]:
    """Return the names that autotuners and heuristics around a function give."""
    names: set[str] = set()
    while kernel is not None and not hasattr(kernel, "arg_names_only") and hasattr(kernel, "fn"):
        for config in getattr(kernel, "configs", ()) or ():
            names.update(config.all_kwargs())
        values = getattr(kernel, "values", None)
        if isinstance(values, Mapping):
            names.update(values)
        kernel = kernel.fn
    return frozenset(names)


def _guess(function: Any, usage: Usage, chosen: frozenset[str], manner: _Manner) -> Call:
    specs: dict[str, Spec] = {}
    constants: dict[str, Any] = {}
    for parameter in function.params:
        name = parameter.name
        if name in chosen:
            continue
        if parameter.is_constexpr:
            constants[name] = _constant(parameter, usage, manner)
        else:
            specs[name] = _spec(parameter, usage, manner)
    return specs, constants


def _spec(parameter: Any, usage: Usage, manner: _Manner) -> Spec:
    name, annotated = parameter.name, parameter.annotation_type
    if annotated and not annotated.startswith("*"):
        return str(annotated)
    if name in usage.pointers or name.endswith(("_ptr", "_ptrs")) or name.startswith("ptr_"):
        if not manner.optional and parameter.has_default and parameter.default is None:
            return "none"
        return f"*{_element(name, manner)}:16"
    if name in usage.descriptors:
        return f"tensordesc<{manner.element}[{manner.block}, {manner.block}]>"
    if parameter.has_default and isinstance(parameter.default, float):
        return "fp32"
    if parameter.has_default and parameter.default is None and not manner.optional:
        return "none"
    if _FLOATS.search(name) and "stride" not in name:
        return "fp32"
    return "i32:16" if "stride" in name else "i32"


def _element(name: str, manner: _Manner) -> str:
    if manner.alike:
        return manner.element if not _INTEGERS.search(name) else manner.index
    if _MASKS.search(name):
        return "i1" if manner.index == "i32" else "u8"
    if _INTEGERS.search(name) and not _FLOATS.search(name):
        return manner.index
    return manner.wide if _WIDE.search(name) else manner.element


def _constant(parameter: Any, usage: Usage, manner: _Manner) -> Any:
    import triton.language as tl

    name = parameter.name
    if "evict" in name.lower():
        return ""
    if name in usage.texts:
        return usage.texts[name]
    if name in usage.functions:
        return None
    if name in usage.types or _TYPES.search(name):
        return {"fp16": tl.float16, "bf16": tl.bfloat16}.get(manner.element, tl.float32)
    if parameter.has_default and (manner.flags is None or parameter.default is not None):
        return parameter.default
    if name in usage.flags or _FLAGS.search(name):
        return bool(manner.flags)
    if _FLOATS.search(name):
        return 1.0
    return _size(name, usage, manner)


def _size(name: str, usage: Usage, manner: _Manner) -> int:
    if "stride" in name.lower():
        return manner.block
    if name in usage.shapes or (_BLOCKS.search(name) and not _FEW.search(name)):
        return manner.block
    if name in usage.counts or _FEW.search(name):
        return manner.few
    return manner.block
