# SPDX-License-Identifier: Apache-2.0
"""`GraphKey`: names a graph with all that decides its program, so that another process finds the
program of an equal one.  Imports torch.

::

    generator   our version, and the text of every module that may decide what is written
    libraries   torch, Triton, SymPy, Python
    state       what lowering reads of torch's settings: deterministic algorithms, the default dtype,
                whether there is cuDNN, the precision of products of float32
    options     those that change text or plan
    sizes       torch's symbols: assumptions, value in the example, bounds; whether guards are taken
    graph       each node: operator, arguments, and what torch knows of its value
    device      the GPU, where measurements on it decide which kernels there are

Not part of it: names of nodes, which nothing is named after; lines of the user's program, which
errors alone tell; paths; numbers of tensors, but for those of one element on the host, which are
written into kernels; else the GPU, since the text is the same for every one.  A graph that holds
something else than what is listed in `GraphLines` has no key.
"""

from __future__ import annotations

import functools
import hashlib
import json
import operator
import platform
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import sympy
import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._sympy import functions

from bundler.codegen.channels_last import CALLERS_RESULTS, DONATED, FREED, STORED_STRIDES
from bundler.codegen.lower import (
    NarrowGuard,
    example_of,
    float32_precision,
    narrow_guard,
    number_of,
)
from bundler.codegen.measured_choices import identity_of
from bundler.codegen.program_policy import WHERE_FASTER
from bundler.codegen.trace import EXPORTED, RETURNED_INPUTS
from bundler.errors import FormatError
from bundler.project import VERSION
from bundler.toolchain.identity import installed_triton

SCHEMA = 1
# Of `GenerateOptions`: names, places, and what is done beside a run.
_OPTIONS_LEFT_OUT = ("name", "sources", "nan_checks", "verify", "graphs")
# Folders of this package whose modules decide what is generated.
_GENERATOR = ("codegen", "runtime/heuristics", "runtime/program")
_PLAIN = frozenset({bool, int, float, complex, str, type(None)})
_NAMED = (torch.dtype, torch.device, torch.memory_format, torch.layout)
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_TENSORS = frozenset({FakeTensor, torch.Tensor, torch.nn.Parameter})
# torch's own operators, whose schemas its version says.
_TORCHS = frozenset({"aten", "prims"})
# What guarded sizes are made of.
_FUNCTIONS: Mapping[str, Any] = {
    one.__name__: one
    for one in (
        sympy.Add,
        sympy.Mul,
        sympy.Pow,
        functions.FloorDiv,
        functions.ModularIndexing,
        functions.Mod,
        functions.PythonMod,
        functions.CleanDiv,
        functions.Max,
        functions.Min,
    )
}


class Unkeyed(Exception):
    """A graph holds something that nothing is known of, so it has no key."""


@dataclass(frozen=True, eq=False)
class GraphKey:
    """What names a graph, and what of it this process has.

    Attributes:
        parts: name -> text; see the module's text.
        module: the graph.
        environment: torch's, of the graph's sizes; None where none changes.
        symbols: of torch's, by name.
    """

    parts: Mapping[str, str]
    module: fx.GraphModule
    environment: Any
    symbols: Mapping[str, sympy.Symbol]

    @property
    def digest(self) -> str:
        """The name, 64 hex digits."""
        return hashlib.sha256(json.dumps(self.parts, sort_keys=True).encode()).hexdigest()

    @property
    def guards(self) -> int:
        """How many guards torch has on the sizes."""
        return 0 if self.environment is None else len(self.environment.guards)

    def attribute(self, name: str) -> Any:
        """Return a tensor that the module holds."""
        return operator.attrgetter(name)(self.module)

    def packed(self, guard: NarrowGuard) -> list[Any]:
        """Return a guard as JSON can hold it, for `is_guarded` of an equal key; raises `Unkeyed`
        where it is made of something unknown.
        """
        packed = _packed(guard.size)
        if self._unpacked(packed) != guard.size:
            raise Unkeyed(f"a guarded size: {guard.size}")
        return [packed, guard.fits]

    def is_guarded(self, packed: Sequence[Any]) -> bool:
        """Have torch take a guard that another process needed; False where torch's answer is
        another one here.

        Raises:
            FormatError: it is no guard that `packed` returned.
        """
        try:
            size, fits = self._unpacked(packed[0]), bool(packed[1])
        except (LookupError, TypeError, AttributeError) as error:
            raise FormatError(f"a guard of a kept program: {error}") from error
        if self.environment is None or self.environment.frozen:
            return False
        return narrow_guard(self.environment, size).fits == fits

    def _unpacked(self, packed: Any) -> sympy.Expr:
        if isinstance(packed, int):
            return sympy.Integer(packed)
        if isinstance(packed, str):
            return self.symbols[packed]
        name, *parts = packed
        return _FUNCTIONS[name](*map(self._unpacked, parts))


def graph_key(module: fx.GraphModule, options: Any) -> GraphKey | None:
    """Return the key of a graph; None where it has none.

    Args:
        module: whose nodes have fake tensors, as `lower_graph` takes it.
        options: `GenerateOptions`, by which its program is generated.
    """
    lines = GraphLines(module)
    try:
        graph = "\n".join(lines.all())
        sizes = "\n".join(lines.sizes())
    except Unkeyed:
        return None
    parts = {**surroundings(options, lines.devices), "sizes": sizes, "graph": graph}
    return GraphKey(parts, module, lines.environment, lines.symbols)


def surroundings(options: Any, devices: Collection[str]) -> dict[str, str]:
    """Return the parts of a key that no graph decides.

    Args:
        options: `GenerateOptions`.
        devices: where the graph's tensors lie, as torch names it.
    """
    chosen = {k: v for k, v in asdict(options).items() if k not in _OPTIONS_LEFT_OUT}
    parts = {
        "generator": _generator(),
        "libraries": _libraries(),
        "state": _state(),
        "options": repr(sorted(chosen.items())),
    }
    if options.policy.measured_fusion or options.templates == WHERE_FASTER:
        parts["device"] = " ".join(map(identity_of, sorted(devices)))
    return parts


@functools.cache
def _generator() -> str:
    root, found = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(path for name in _GENERATOR for path in (root / name).rglob("*.py")):
        data = path.read_bytes()
        found.update(f"{path.relative_to(root).as_posix()} {len(data)}\n".encode() + data)
    return f"{SCHEMA} {VERSION} {found.hexdigest()}"


@functools.cache
def _libraries() -> str:
    triton = installed_triton()
    versions = (
        torch.__version__,
        torch.version.git_version,
        torch.version.cuda,
        torch.version.hip,  # a GPU of AMD is called cuda, too
        triton.release if triton is not None else None,
        sympy.__version__,
        platform.python_version(),
    )
    return " ".join(map(str, versions))


def _state() -> str:
    deterministic = torch.are_deterministic_algorithms_enabled()
    known = (deterministic, torch.get_default_dtype(), torch.backends.cudnn.enabled)
    return " ".join(map(str, (*known, float32_precision())))


class GraphLines:
    """A graph as text, a line a node: nodes are called by their number.

    Attributes:
        environment: torch's, of the sizes that were met; None for none.
        symbols: of these sizes, by name.
        devices: where the tensors lie, as torch names it.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        self._numbers: dict[fx.Node, int] = {}
        self._expressions: dict[Any, str] = {}
        self.environment: Any = None
        self.symbols: dict[str, sympy.Symbol] = {}
        self.devices: set[str] = set()

    def all(self) -> Iterator[str]:
        """Yield a line for each node."""
        # Only programs by `generate` have these; they go into bundles.
        if self._module.meta.keys() & {EXPORTED, RETURNED_INPUTS}:
            raise Unkeyed("a graph of no torch.compile")
        yield f"the caller sees {self._module.meta.get(CALLERS_RESULTS)} results"
        for node in self._module.graph.nodes:
            yield f"{node.op} {self._target(node)} {self._arguments(node)} {self._known(node)}"
            self._numbers[node] = len(self._numbers)

    def sizes(self) -> Iterator[str]:
        """Yield a line for each symbol that the lines have."""
        environment = self.environment
        if environment is not None:
            yield f"frozen {environment.frozen}"
        for name, symbol in sorted(self.symbols.items()):
            bounds = environment.var_to_range.get(symbol)
            yield f"{sympy.srepr(symbol)} {example_of(environment, symbol)!r} {bounds!r} {name}"

    def _known(self, node: fx.Node) -> str:
        original = node.meta.get("original_aten")
        # A value that is missing is another than None, the value of a token.
        value = self._value(node.meta["val"]) if "val" in node.meta else ""
        stored = node.meta.get(STORED_STRIDES, "")
        marks = " ".join(mark for mark in (FREED, DONATED) if mark in node.meta)
        return f"{value} {'' if original is None else original} {stored} {marks}"

    def _target(self, node: fx.Node) -> str:
        target = node.target
        if node.op == "get_attr":
            return self._attribute(node)
        if node.op in {"placeholder", "output"}:
            return ""
        if isinstance(target, OpOverload):
            return self._operator(target)
        if isinstance(target, HigherOrderOperator):
            return f"higher order {target}"
        if hasattr(target, "__qualname__"):  # numbers of sizes, and parts of a tuple
            return f"{target.__module__}.{target.__qualname__}"
        raise Unkeyed(f"{node.op} {target}")

    def _operator(self, target: OpOverload) -> str:
        known = target.namespace in _TORCHS
        return str(target) if known else f"{target} {target._schema}"  # noqa: SLF001

    def _attribute(self, node: fx.Node) -> str:
        value = operator.attrgetter(str(node.target))(self._module)
        if type(value) not in _TENSORS:
            raise Unkeyed(f"{node.target}: {type(value).__name__}")
        number = number_of(value, node.meta.get("val", value))
        return f"{node.target} {type(value).__name__} {self._tensor(value)} {number!r}"

    def _arguments(self, node: fx.Node) -> str:
        given = "" if node.op == "placeholder" else self._value(node.args)
        return given + (self._value(dict(node.kwargs)) if node.kwargs else "")

    def _value(self, value: Any) -> str:
        kind = type(value)
        if kind in _PLAIN:
            return repr(value)
        if isinstance(value, fx.Node):
            return f"%{self._numbers[value]}"
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, _SYMBOLIC):
            return self._symbolic(value)
        if isinstance(value, tuple):
            return f"({','.join(map(self._value, value))})"
        if isinstance(value, list):
            return f"[{','.join(map(self._value, value))}]"
        if isinstance(value, dict):
            pairs = (f"{key!r}:{self._value(one)}" for key, one in value.items())
            return f"{{{','.join(pairs)}}}"
        if isinstance(value, _NAMED):
            return str(value)
        if isinstance(value, OpOverload):
            return self._operator(value)
        raise Unkeyed(kind.__name__)

    def _tensor(self, tensor: torch.Tensor) -> str:
        if type(tensor) not in _TENSORS or tensor.layout is not torch.strided:
            raise Unkeyed(f"{type(tensor).__name__} {tensor.layout}")
        if tensor.is_quantized:
            raise Unkeyed("a quantized tensor")
        sizes, strides = self._value(tuple(tensor.shape)), self._value(tensor.stride())
        offset = self._value(tensor.storage_offset())
        self.devices.add(str(tensor.device))
        return f"{tensor.dtype} {tensor.device} {sizes} {strides} {offset}"

    def _symbolic(self, value: Any) -> str:
        node = value.node
        if self.environment is None:
            self.environment = node.shape_env
        if self.environment is not node.shape_env:
            raise Unkeyed("sizes of two environments")
        wanted = type(value).__name__, node.expr
        if wanted not in self._expressions:
            kind, expression = wanted
            self.symbols |= {str(symbol): symbol for symbol in expression.free_symbols}
            self._expressions[wanted] = f"{kind} {sympy.srepr(expression)}"
        return self._expressions[wanted]


def _packed(expression: sympy.Expr) -> Any:
    if isinstance(expression, sympy.Integer):
        return int(expression)
    if isinstance(expression, sympy.Symbol):
        return str(expression)
    name = type(expression).__name__
    if _FUNCTIONS.get(name) is not type(expression):
        raise Unkeyed(f"a guarded size: {expression}")
    return [name, *map(_packed, expression.args)]
