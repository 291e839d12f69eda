# SPDX-License-Identifier: Apache-2.0
"""`ReferenceGraph`: an FX graph run by eager torch beside a program that was generated from it, and
how far results may be apart.

The generator's `verify=True` uses it.  Nothing that the graph changes is changed for the caller:
changed inputs and constants are copied, and torch's generators of random numbers are put back.

`CHOICES`: operators of which torch leaves open which of equal elements they name, with the choice
that generated kernels promise: the lowest place, of `mode` the last one.  Each takes what the
operator takes, and returns the operator's own results, with these numbers; it runs in the
operator's place, unless a program calls the operator, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from bundler.package_loggers import logger

_log = logger("bundler.toolchain")
# How close results of a dtype are to eager's without another question: relative, and of the
# tensor's root mean square.
_TOLERANCES = {torch.float64: 1e-8, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 2e-2}
_COARSEST = 1e-1
# Beyond that: how many times farther from float64 than eager's they may be.  These are the factors
# of TorchInductor's dashboard.
_FACTOR, _FACTOR_OF_FEW = 2.0, 3.0
_FEW_ELEMENTS = 1000
# Numbers as small are noise beside it.
_SMALLEST_SCALE = 1e-6
# Results of attention that say which random numbers dropout drew; nothing is in them where it drew
# none.
_SEEDS = "rng_state unused philox_seed philox_offset debug_attn_mask"
_SEED_RESULTS = frozenset(_SEEDS.split())
_DROPOUT = "dropout_p"
_EMPTY = "empty empty_like empty_strided empty_permuted new_empty new_empty_strided"
_UNINITIALIZED = frozenset(_EMPTY.split())
_WIDE = torch.float64


@dataclass(frozen=True)
class EagerResults:
    """What eager torch computes.

    Attributes:
        outputs: as the graph returns them, flat.
        wide: the same in float64; None where some operator has no such form.
        changed: name of an input or constant that the graph changes -> what it holds afterwards.
        wide_changed: the same in float64.
    """

    outputs: tuple[Any, ...]
    wide: tuple[Any, ...] | None
    changed: Mapping[str, Any]
    wide_changed: Mapping[str, Any] | None


@dataclass(frozen=True)
class _Copies:
    """Tensors in memory of their own, which views of one memory go on to share."""

    storages: dict[int, Any] = field(default_factory=dict)

    def copy(self, tensor: Any, dtype: Any) -> Any:
        """Return a copy of a tensor, with its strides and offset, in a dtype."""
        storage = tensor.untyped_storage()
        flat = self.storages.get(storage.data_ptr()) if storage.nbytes() else None
        if flat is None or flat.dtype != dtype:
            count = storage.nbytes() // tensor.element_size()
            flat = tensor.detach().as_strided((count,), (1,), 0).to(dtype, copy=True)
            self.storages[storage.data_ptr()] = flat
        return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class ReferenceGraph:
    """A graph that eager torch runs.

    Args:
        module: the graph.
        called: the operators that the program calls as they are.

    Attributes:
        results: names of the nodes that are returned; None for one that is a number or nothing.
        nodes: by name.
        unchecked: place of a result -> why its numbers cannot be compared.
        changed: names of the inputs and constants that the graph changes.
    """

    def __init__(self, module: fx.GraphModule, called: Collection[str] = ()) -> None:
        self._module = module
        # Where the program calls the operator too, its choice is torch's.
        self._choices = {
            target: choice for target, choice in CHOICES.items() if str(target) not in called
        }
        self.nodes = {node.name: node for node in module.graph.nodes}
        (output,) = (node for node in module.graph.nodes if node.op == "output")
        # as torch's own backends
        leaves = torch.utils._pytree.tree_leaves(output.args[0])  # noqa: SLF001
        self.results = tuple(leaf.name if isinstance(leaf, fx.Node) else None for leaf in leaves)
        open_values = _open_values(module.graph)
        self.unchecked = {
            place: open_values[name]
            for place, name in enumerate(self.results)
            if name is not None and name in open_values
        }
        copies = [n for n in module.graph.nodes if n.target is torch.ops.aten.copy_.default]
        self.changed = tuple(dict.fromkeys(node.args[0].name for node in copies))
        self.open_changes = {
            node.args[0].name: open_values[node.name] for node in copies if node.name in open_values
        }

    def run(self, inputs: Sequence[Any]) -> EagerResults:
        """Run the graph on inputs, which stay as they are."""
        outputs, changed = self._run(inputs, None)
        try:
            wide, wide_changed = self._run(inputs, _WIDE)
        except Exception as error:  # noqa: BLE001  # torch raises whatever it likes for an operator that float64 lacks
            _log.debug("no float64 run of the graph beside the program: %s", error)
            return EagerResults(outputs, None, changed, None)
        return EagerResults(outputs, wide, changed, wide_changed)

    def constant(self, name: str) -> Any:
        """Return a tensor that the graph holds, by its node's name."""
        return _attribute(self._module, str(self.nodes[name].target))

    def placeholders(self) -> list[str]:
        """Return the names of the inputs, in order."""
        return [node.name for node in self._module.graph.nodes if node.op == "placeholder"]

    def _run(self, inputs: Sequence[Any], wide: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        copies = _Copies()
        changed_memory = {
            _memory(value)
            for name, value in zip(self.placeholders(), inputs, strict=True)
            if name in self.changed and isinstance(value, torch.Tensor)
        }

        def taken(value: Any, *, is_changed: bool) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            dtype = wide if wide and value.dtype.is_floating_point else value.dtype
            shared = is_changed or _memory(value) in changed_memory
            return copies.copy(value, dtype) if shared or dtype != value.dtype else value

        given = [taken(value, is_changed=False) for value in inputs]
        held: dict[str, Any] = {}
        for node in self.nodes.values():
            if node.op == "get_attr":
                value = _attribute(self._module, str(node.target))
                held[str(node.target)] = taken(value, is_changed=node.name in self.changed)
        with _quiet(given):
            found = _Replay(self._module, held, wide, self._choices).run(*given)
        named = dict(zip(self.placeholders(), given, strict=True))
        after = {
            name: named[name] if name in named else held[str(self.nodes[name].target)]
            for name in self.changed
        }
        return tuple(torch.utils._pytree.tree_leaves(found)), after  # noqa: SLF001


class _Replay(fx.Interpreter):  # type: ignore[misc]  # torch is not typed here
    """Runs a graph with tensors of ours in place of those that it holds, in float64 where `wide`,
    and with functions of ours in place of operators.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        held: Mapping[str, Any],
        wide: Any,
        functions: Mapping[Any, Callable[..., Any]],
    ) -> None:
        super().__init__(module)
        self._held, self._wide, self._functions = held, wide, functions

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._held[str(target)]

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if self._wide is not None:
            if target is torch.ops.aten.view.dtype:
                raise TypeError("the bits of a float64 are not those of another float")
            args, kwargs = fx.node.map_aggregate((args, kwargs), self._widened)
        return super().call_function(self._functions.get(target, target), args, kwargs)

    def _widened(self, item: Any) -> Any:
        is_float = isinstance(item, torch.dtype) and item.is_floating_point
        return self._wide if is_float else item


@contextlib.contextmanager
def _quiet(inputs: Sequence[Any]) -> Iterator[None]:
    """Run eager torch without gradients and autocast, and put the generators of random numbers back
    afterwards.
    """
    devices = {item.device for item in inputs if isinstance(item, torch.Tensor)}
    kinds = {device.type for device in devices} | {"cpu"}
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        # Also of GPUs that the graph alone names.
        initialized = torch.cuda.is_available() and torch.cuda.is_initialized()
        every = list(range(torch.cuda.device_count())) if initialized else []
        stack.enter_context(torch.random.fork_rng(devices=every))
        for kind in kinds - {"meta"}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


def _attribute(module: Any, path: str) -> Any:
    for part in path.split("."):
        module = getattr(module, part)
    return module


# ---------------------------------------------------------------------- What has no one right value


def _open_values(graph: fx.Graph) -> dict[str, str]:
    """Return the nodes whose numbers are random, or of memory that nobody wrote, and which
    of both.
    """
    found: dict[str, str] = {}
    changes: dict[str, str] = {}
    for node in graph.nodes:
        own = _openness(node)
        inherited = [found[parent.name] for parent in node.all_input_nodes if parent.name in found]
        if node.op != "output" and (own or inherited):
            if own is None and _is_size(node):
                continue
            found[node.name] = own or inherited[0]
            if node.target is torch.ops.aten.copy_.default:
                changes[node.args[0].name] = found[node.name]
    return found | changes


def _openness(node: fx.Node) -> str | None:
    if isinstance(node.target, OpOverload):
        name = node.target.overloadpacket.__name__
        if name in _UNINITIALIZED:
            return "nobody wrote it"
        dropout = _argument(node, _DROPOUT)
        if torch.Tag.nondeterministic_seeded in node.target.tags and dropout != 0:
            return "it is random"
    elif len(node.args) == 2 and isinstance(node.args[0], fx.Node):  # noqa: PLR2004  # getitem
        source = node.args[0].target
        if isinstance(source, OpOverload) and isinstance(node.args[1], int):
            returns = source._schema.returns  # noqa: SLF001  # torch shows a schema nowhere else
            place = node.args[1]
            if place < len(returns) and returns[place].name in _SEED_RESULTS:
                return "it says which random numbers were drawn"
    return None


def _argument(node: fx.Node, name: str) -> Any:
    """Return the value of an argument of an operator, by its name; its default where the node
    leaves it out.
    """
    schema = node.target._schema  # noqa: SLF001
    for place, argument in enumerate(schema.arguments):
        if argument.name == name:
            given = node.args[place] if place < len(node.args) else argument.default_value
            return node.kwargs.get(name, given)
    return None


def _is_size(node: fx.Node) -> bool:
    return not isinstance(node.meta.get("val"), (torch.Tensor, tuple, list))


# ---------------------------------------------------------------------------------------- Comparing


@dataclass(frozen=True)
class ResultDifference:
    """What is wrong with a result: `fact` is `dtype`, `sizes`, `strides`, `device` or `numbers`."""

    fact: str
    expected: Any
    got: Any
    largest: float | None = None
    place: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.largest is None:
            return f"expected {self.fact} {self.expected}, got {self.got}"
        at = f" at {list(self.place)}" if self.place else ""
        apart = f"the largest difference is {self.largest:.3g}"
        return f"expected {self.expected}{at}, got {self.got}; {apart}"


def difference(
    got: Any,
    eager: Any,
    wide: Any = None,
    traced: Any = None,
    *,
    numbers: bool = True,
    placement: bool = True,
) -> ResultDifference | None:
    """Return what is wrong with a result; None where nothing is.

    Args:
        got: the program's.
        eager: what eager torch computes.
        wide: the same in float64; None where there is no such.
        traced: the fake tensor of the trace, whose strides will do as well.
        numbers: compare them, too.
        placement: compare strides, too.
    """
    if not isinstance(eager, torch.Tensor) or not isinstance(got, torch.Tensor):
        same = type(got) is type(eager) and got == eager
        return None if same else ResultDifference("value", eager, got)
    for fact, one, other in (
        ("dtype", eager.dtype, got.dtype),
        ("sizes", tuple(eager.shape), tuple(got.shape)),
        ("device", eager.device, got.device),
    ):
        if one != other:
            return ResultDifference(fact, one, other)
    strides = [_strides(tensor) for tensor in (eager, traced) if isinstance(tensor, torch.Tensor)]
    if placement and _strides(got) not in strides:
        return ResultDifference("strides", eager.stride(), got.stride())
    if not numbers or not got.numel():
        return None
    return _number_difference(got, eager, wide)


def _strides(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the strides of the dimensions that have several elements: others have no meaning."""
    if not all(isinstance(size, int) for size in (*tensor.shape, *tensor.stride())):
        return ()
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return tuple(stride if size > 1 else 0 for size, stride in pairs) if tensor.numel() else ()


def _number_difference(got: Any, eager: Any, wide: Any) -> ResultDifference | None:
    is_float = eager.dtype.is_floating_point or eager.dtype.is_complex
    if not is_float:
        return _count_difference(got, eager, wide)
    kind = torch.complex128 if eager.dtype.is_complex else _WIDE
    ours, theirs = got.to(kind), eager.to(kind)
    right = theirs if wide is None else wide.to(kind)
    unlike = ~_alike(ours, theirs) & ~_alike(ours, right)
    if bool(unlike.any()):
        return _described(got, eager, unlike, float("inf"))
    finite = torch.isfinite(ours) & torch.isfinite(theirs) & torch.isfinite(right)
    ours, theirs, right = (torch.where(finite, part, 0) for part in (ours, theirs, right))
    if _is_close(ours, theirs, right, eager.dtype, exact=wide is None):
        return None
    apart = (ours - theirs).abs()
    return _described(got, eager, apart == apart.max(), float(apart.max()))


def _is_close(ours: Any, theirs: Any, right: Any, dtype: Any, *, exact: bool) -> bool:
    """Whether numbers are close to eager's, or hardly farther from float64's than those are."""
    tolerance = _TOLERANCES.get(dtype, _COARSEST)
    scale = max(_root_mean_square(right), _SMALLEST_SCALE)
    if torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance * scale):
        return True
    if exact:
        return False
    # halves
    few = ours.numel() < _FEW_ELEMENTS or ours.dtype != _WIDE or dtype.itemsize < 4  # noqa: PLR2004
    factor = _FACTOR_OF_FEW if few else _FACTOR
    allowed = factor * _root_mean_square(theirs - right) + tolerance * scale / 10
    return _root_mean_square(ours - right) <= allowed


def _root_mean_square(numbers: Any) -> float:
    return float(numbers.abs().square().mean().sqrt())


def _count_difference(got: Any, eager: Any, wide: Any) -> ResultDifference | None:
    """Compare whole numbers: as many may differ from what float64 gives as of eager's, times the
    factor for few elements.
    """
    apart = got != eager
    if not bool(apart.any()):
        return None
    if wide is not None and wide.dtype == eager.dtype:
        allowed = _FACTOR_OF_FEW * int((eager != wide).sum())
        if int((got != wide).sum()) <= allowed:
            return None
    largest = float((got.double() - eager.double()).abs().max())
    return _described(got, eager, apart, largest)


def _alike(one: Any, other: Any) -> Any:
    """Return where two tensors are both finite, both NaN, or the same infinity."""
    both_nan = one.isnan() & other.isnan()
    return torch.where(torch.isfinite(one), torch.isfinite(other), (one == other) | both_nan)


def _described(got: Any, eager: Any, where: Any, largest: float) -> ResultDifference:
    place = tuple(int(part) for part in where.nonzero()[0])
    return ResultDifference("numbers", eager[place].item(), got[place].item(), largest, place)


aten = torch.ops.aten


def _filled(results: Any, values: Any, places: Any) -> Any:
    """Return the results of an operator, whose layout stays, with other numbers."""
    results[0].copy_(values.reshape(results[0].shape))
    results[1].copy_(places.reshape(results[1].shape))
    return results


def _sort(tensor: Any, dim: int = -1, descending: bool = False) -> Any:
    results = aten.sort.default(tensor, dim, descending)
    return _filled(results, *torch.sort(tensor, dim=dim, descending=descending, stable=True))


def _topk(tensor: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:  # noqa: A002  # torch's name
    results = aten.topk.default(tensor, k, dim, largest, sorted)
    ordered = torch.sort(tensor, dim=dim, descending=largest, stable=True)
    return _filled(results, *(one.narrow(dim, 0, k) if one.dim() else one for one in ordered))


def _kthvalue(tensor: Any, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    results = aten.kthvalue.default(tensor, k, dim, keepdim)
    ordered = torch.sort(tensor, dim=dim, stable=True)
    return _filled(results, *(one.select(dim, k - 1) if one.dim() else one for one in ordered))


def _mode(tensor: Any, dim: int = -1, keepdim: bool = False) -> Any:
    results = aten.mode.default(tensor, dim, keepdim)
    if not tensor.dim():
        return results
    ordered = torch.sort(tensor.movedim(dim, -1), dim=-1, stable=True)
    place = torch.arange(tensor.shape[dim], device=tensor.device).expand(ordered.values.shape)
    differs = ordered.values[..., 1:] != ordered.values[..., :-1]
    starts = torch.where(torch.nn.functional.pad(differs, (1, 0)), place, 0)
    length = place - starts.cummax(-1).values
    longest = length == length.amax(-1, keepdim=True)
    at = torch.where(longest, place, place.shape[-1]).amin(-1, keepdim=True)
    return _filled(results, *(one.gather(-1, at) for one in ordered))


CHOICES: dict[Any, Callable[..., Any]] = {
    aten.sort.default: _sort,
    aten.topk.default: _topk,
    aten.kthvalue.default: _kthvalue,
    aten.mode.default: _mode,
}
