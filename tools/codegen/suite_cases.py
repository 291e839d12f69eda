# SPDX-License-Identifier: Apache-2.0
"""The cases of `suites`: `listed` names them all, and `Samples` makes the inputs of one, as small
as torch's lists have them.  Imports torch.

A case is an operator of `op_db`, those on lists of tensors included, or a module of `module_db`, in
a dtype, one of the samples that the list has for it, and a mode: `plain`, `sliced`, `transposed`
and `dynamic` are generated and run, `compiled`, `compiled-dynamic` and `inplace` go through
torch.compile, and so does `compiled-graphs`, on a GPU alone, whose judged call is a CUDA graph's.
Its name is all of that.
"""

from __future__ import annotations

import functools
import itertools
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.testing._comparison import default_tolerances
from torch.testing._internal.common_device_type import precisionOverride, toleranceOverride
from torch.testing._internal.common_methods_invocations import (
    foreach_binary_op_db,
    foreach_other_op_db,
    foreach_pointwise_op_db,
    foreach_reduce_op_db,
    foreach_unary_op_db,
    op_db,
)
from torch.testing._internal.common_modules import module_db
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from tools.codegen.suite_judge import Tolerance

# Operators on one tensor, and on lists of tensors (`_foreach_add`), which have lists of their own.
OPERATORS = (
    *op_db,
    *foreach_unary_op_db,
    *foreach_binary_op_db,
    *foreach_pointwise_op_db,
    *foreach_reduce_op_db,
    *foreach_other_op_db,
)
DTYPES = ("float32", "bfloat16", "int64", "bool", "complex64")
# What is done with an operator's samples, by dtype: first the modes of the first sample, then those
# of the second, and so on.
_ALL = ("plain", "sliced", "transposed", "dynamic", "compiled", "compiled-dynamic", "inplace")
OPERATOR_MODES = {
    "float32": (
        (*_ALL, "lazy", "lazy-compiled"),
        ("plain", "sliced", "compiled"),
        ("plain", "compiled"),
    ),
    "bfloat16": (("plain", "sliced", "compiled"), ("plain", "transposed", "compiled")),
    "int64": (("plain", "transposed", "dynamic"), ("plain", "sliced", "compiled")),
    "bool": (("plain", "sliced"), ("plain", "compiled")),
    "complex64": (("plain", "compiled", "lazy", "lazy-compiled"), ("plain", "sliced")),
}
_MODULE_SAMPLES = (
    ("plain", "compiled", "compiled-dynamic", "sliced-compiled"),
    ("plain", "compiled"),
    ("compiled",),
)
MODULE_MODES = {"float32": _MODULE_SAMPLES, "bfloat16": (("plain", "compiled"), ("compiled",))}
# So many samples of a list are looked at.
_LOOKED_AT = 200
# Samples of so many elements are preferred: fewer hide what goes wrong, more take long.
_LEAST_ELEMENTS, _MOST_ELEMENTS = 8, 2048


class Case(NamedTuple):
    """One case; its name is its parts with slashes between them."""

    suite: str
    operator: str
    dtype: str
    mode: str
    sample: int

    @property
    def name(self) -> str:
        """What the case is called in tables, journals and the list of exceptions."""
        return "/".join(map(str, self))


@dataclass(frozen=True)
class Call:
    """What a case calls.

    Attributes:
        function: takes the tensors, and returns whatever the operator or module returns.
        tensors: of the sample, in order.
        finished: makes of a result what gradients are taken of.
        tolerance: of floats.
        resized: tensors of other sizes, where sizes may change and the list has a sample that
            differs in nothing else.
    """

    function: Callable[..., Any]
    tensors: list[Any]
    finished: Callable[[Any], Any]
    tolerance: Tolerance
    resized: list[Any] | None = None


def listed(device: str) -> tuple[list[Case], dict[str, str]]:
    """Return all cases that torch's lists have for a device, and what is left out with the
    reason.
    """
    kind = torch.device(device).type
    cases, skipped = [], {}
    graphs = ("compiled-graphs",) if kind == "cuda" else ()
    for info in OPERATORS:
        dtypes = [name for name in DTYPES if getattr(torch, name) in info.supported_dtypes(kind)]
        if not dtypes:
            skipped[f"op_db/{info.full_name}"] = f"takes none of {', '.join(DTYPES)} on {kind}"
        cases += [
            Case("op_db", info.full_name, dtype, mode, number)
            for dtype in dtypes
            for number, modes in enumerate(OPERATOR_MODES[dtype])
            for mode in (*modes, *(graphs if number == 0 else ()))
        ]
    for info in module_db:
        states = ("train", "eval") if info.train_and_eval_differ else ("train",)
        cases += [
            Case("module_db", f"{info.name}.{state}", dtype, mode, number)
            for state in states
            for dtype in MODULE_MODES
            for number, modes in enumerate(MODULE_MODES[dtype])
            for mode in (*modes, *(graphs if number == 0 else ()))
        ]
    return cases, skipped


def call_of(case: Case, device: str) -> Call | None:
    """Return what a case calls; None where the list has no such sample, or the mode changes nothing
    of it.

    Each call returns tensors of their own.
    """
    _make_drawn_numbers_plain()
    found = _operator_call(case, device) if case.suite == "op_db" else _module_call(case, device)
    if found is None:
        return None
    changed, change = found.tensors, _LAYOUTS.get(case.mode.partition("-")[0])
    if change is not None:
        changed = [change(tensor) for tensor in found.tensors]
        if all(one is other for one, other in zip(changed, found.tensors, strict=True)):
            return None
    if not differentiable(case, device):
        changed = [tensor.detach() for tensor in changed]
    return replace(found, tensors=changed)


@functools.cache
def _make_drawn_numbers_plain() -> None:
    """Let operators that draw numbers draw them as users' calls do: op_db saves and sets the state
    of the generator around each, which no graph can hold.
    """

    def plain(operator: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        return operator(*arguments, **keywords)

    for name, module in list(sys.modules.items()):
        if name.startswith("torch.testing") and hasattr(module, "wrapper_set_seed"):
            vars(module)["wrapper_set_seed"] = plain


# ---------------------------------------------------------------------------------------- Operators


@functools.cache
def _operators() -> dict[str, Any]:
    return {info.full_name: info for info in OPERATORS}


def _operator_call(case: Case, device: str) -> Call | None:
    info = _operators()[case.operator]
    samples = _chosen(case.operator, case.dtype, device, differentiable(case, device))
    if case.sample >= len(samples):
        return None
    sample = samples[case.sample]
    operator = info.get_op()
    if case.mode == "inplace":
        operator = info.get_inplace()
        if operator is None or sample.broadcasts_input:
            return None
    leaves, structure = tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    tensors = copied([leaves[place] for place in places])
    rest = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    dtype = getattr(torch, case.dtype)

    def function(*given: Any) -> Any:
        # An operator that is told the dtype of its input is told it in float64 too.
        wide = dtype.is_floating_point and any(one.dtype == torch.float64 for one in given)
        filled = [torch.float64 if wide and leaf is dtype else leaf for leaf in rest]
        for place, tensor in zip(places, given, strict=True):
            filled[place] = tensor
        first, arguments, keywords = tree_unflatten(filled, structure)
        return operator(first, *arguments, **keywords)

    near = tolerance(info, case.dtype, device)
    resized = _resized(sample, case, device) if "dynamic" in case.mode else None
    return Call(function, tensors, sample.output_process_fn_grad, near, resized)


def _resized(sample: Any, case: Case, device: str) -> list[Any] | None:
    """Return the tensors of a sample that differs from another in its sizes alone, none of which is
    0 or 1 where the other's is not.
    """

    def parts(one: Any) -> tuple[list[Any], str]:
        leaves = tree_leaves((one.input, one.args, one.kwargs))
        given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        rest = [repr(leaf) for leaf in leaves if not isinstance(leaf, torch.Tensor)]
        fixed = [[(size if size < 2 else -1) for size in tensor.shape] for tensor in given]
        return given, f"{_kind(one)} {rest} {fixed}"

    mine, kind = parts(sample)
    for other in _samples(case.operator, case.dtype, device, differentiable(case, device)):
        given, same = parts(other)
        if same == kind and [one.shape for one in given] != [one.shape for one in mine]:
            return copied(given)
    return None


def differentiable(case: Case, device: str) -> bool:
    """Whether gradients of a case are taken."""
    if "compiled" not in case.mode:
        return False
    if case.suite == "module_db":
        return True
    info = _operators()[case.operator]
    return bool(
        info.supports_autograd
        and getattr(torch, case.dtype) in info.supported_backward_dtypes(torch.device(device).type)
    )


@functools.lru_cache(maxsize=4)
def _samples(operator: str, dtype: str, device: str, gradients: bool) -> list[Any]:
    torch.manual_seed(zlib.crc32(f"{operator}/{dtype}".encode()))
    made: Iterator[Any] = iter(
        _operators()[operator].sample_inputs(device, getattr(torch, dtype), requires_grad=gradients)
    )
    return list(itertools.islice(made, _LOOKED_AT))


@functools.lru_cache(maxsize=4)
def _chosen(operator: str, dtype: str, device: str, gradients: bool) -> list[Any]:
    """Return the samples of an operator: of each kind the smallest of a usual size, and last one of
    no elements, or of no dimensions, if there is any.
    """
    samples = _samples(operator, dtype, device, gradients)
    order = sorted(range(len(samples)), key=lambda number: _rank(samples[number]))
    kinds: set[Any] = set()
    first: list[Any] = []
    later: list[Any] = []
    for number in order:
        kind = _kind(samples[number])
        (later if kind in kinds else first).append(samples[number])
        kinds.add(kind)
    count = len(OPERATOR_MODES[dtype])
    unusual = [sample for sample in first if _rank(sample)[0]][:1]
    usual = [sample for sample in first + later if not any(sample is one for one in unusual)]
    return [*usual[: count - len(unusual)], *unusual] if count > 2 else (usual + unusual)[:count]


def _rank(sample: Any) -> tuple[int, int]:
    counts = [
        leaf.numel()
        for leaf in tree_leaves((sample.input, sample.args, sample.kwargs))
        if isinstance(leaf, torch.Tensor)
    ]
    total = sum(counts)
    usual = min(counts, default=0) > 0 and _LEAST_ELEMENTS <= total <= _MOST_ELEMENTS
    return (0 if usual else 1, total)


def _kind(sample: Any) -> Any:
    """Return what samples of one kind have in common: the tensors' numbers of dimensions, and the
    names and types of all else.
    """

    def seen(leaf: Any) -> str:
        if isinstance(leaf, torch.Tensor):
            return f"tensor of {min(leaf.dim(), 3)}"
        return repr(leaf) if isinstance(leaf, (bool, str)) else type(leaf).__name__

    return str(tree_map(seen, (sample.input, sample.args, sample.kwargs)))


def tolerance(info: Any, dtype: str, device: str) -> Tolerance:
    """Return the widest tolerance that torch's tests of an operator have for a dtype, or torch's
    own for the dtype.
    """
    kind, number = torch.device(device).type, getattr(torch, dtype)
    relative, absolute = default_tolerances(number)
    for entry in info.decorators:
        if getattr(entry, "device_type", None) not in {None, kind}:
            continue
        for found in getattr(entry, "decorators", [entry]):
            if isinstance(found, toleranceOverride) and number in found.d:
                relative = max(relative, found.d[number].rtol)
                absolute = max(absolute, found.d[number].atol)
            elif isinstance(found, precisionOverride) and number in found.d:
                absolute = max(absolute, found.d[number])
    return Tolerance(relative, absolute)


# ------------------------------------------------------------------------------------------ Modules


@functools.cache
def _modules() -> dict[str, Any]:
    return {info.name: info for info in module_db}


def _module_call(case: Case, device: str) -> Call | None:
    name, _, state = case.operator.rpartition(".")
    info, dtype = _modules()[name], getattr(torch, case.dtype)
    torch.manual_seed(zlib.crc32(f"{name}/{case.dtype}".encode()))
    made = info.module_inputs_func(
        info,
        device=device,
        dtype=dtype,
        requires_grad="compiled" in case.mode,
        training=state == "train",
    )
    samples = [sample for sample in made if sample.forward_input is not None]
    if case.sample >= len(samples):
        return None
    # Lists begin with what is usual and end with what is not, so both are drawn.
    sample = samples[case.sample if case.sample < 2 else -1]
    given = sample.constructor_input
    torch.manual_seed(0)
    module = info.module_cls(*given.args, **given.kwargs).to(device, dtype)
    module.train(state == "train")
    inputs = (sample.forward_input.args, sample.forward_input.kwargs)
    if info.is_lazy:
        with torch.no_grad():
            module(*tree_map(_detached, inputs[0]), **tree_map(_detached, inputs[1]))
    return _parameters_as_inputs(module, inputs, tolerance(info, case.dtype, device))


def _parameters_as_inputs(module: Any, inputs: Any, near: Tolerance) -> Call:
    """Return a call of a module whose parameters and buffers are tensors of the call, so that they
    are compared afterwards, as running statistics are.
    """
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    names = list(state)
    leaves, structure = tree_flatten(inputs)
    places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    rest = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def function(*given: Any) -> Any:
        filled = list(rest)
        for place, tensor in zip(places, given[len(names) :], strict=True):
            filled[place] = tensor
        arguments, keywords = tree_unflatten(filled, structure)
        held = dict(zip(names, given[: len(names)], strict=True))
        return torch.func.functional_call(module, held, arguments, keywords)

    tensors = copied([*(state[name] for name in names), *(leaves[place] for place in places)])
    return Call(function, tensors, lambda result: result, near)


def _detached(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


# ------------------------------------------------------------------------------------------ Tensors


def copied(tensors: list[Any], dtype: Any = None) -> list[Any]:
    """Return tensors with the same numbers, strides and offsets in memory of their own, which those
    share that shared it.

    Args:
        tensors: to copy.
        dtype: of floats, where it is to be another one.
    """
    memories: dict[int, Any] = {}
    return [_copy(tensor, dtype, memories) for tensor in tensors]


def nudged(tensors: list[Any], seed: int) -> list[Any]:
    """Return copies of tensors whose floats are off by a unit in the last place or two, up or down;
    the seed decides which way.
    """
    draw = torch.Generator().manual_seed(seed)
    found = copied(tensors)
    with torch.no_grad():
        for tensor in found:
            if tensor.layout == torch.strided and tensor.is_floating_point():
                signs = torch.randint(0, 2, tensor.shape, generator=draw).to(tensor) * 2 - 1
                tensor.detach().mul_(1 + signs * torch.finfo(tensor.dtype).eps)
    return found


def _copy(tensor: Any, dtype: Any, memories: dict[int, Any]) -> Any:
    with torch.no_grad():
        plain = tensor.detach()
        if dtype is not None and plain.is_complex():
            dtype = torch.complex128
        elif not plain.is_floating_point():
            dtype = None
        if plain.layout != torch.strided or not plain.numel() or plain.is_conj() or plain.is_neg():
            new = plain.clone() if dtype is None else plain.clone().to(dtype)
            if plain.is_conj() or plain.is_neg():
                new = _lazy(new)
        else:
            memory = plain.untyped_storage()
            if memory.data_ptr() not in memories:
                count = memory.nbytes() // plain.element_size()
                whole = plain.as_strided((count,), (1,), 0).clone()
                memories[memory.data_ptr()] = whole if dtype is None else whole.to(dtype)
            new = memories[memory.data_ptr()].as_strided(
                plain.shape, plain.stride(), plain.storage_offset()
            )
            new = new.detach()  # one that shares memory and no history
    return new.requires_grad_(tensor.requires_grad) if tensor.requires_grad else new


def _sliced(tensor: Any) -> Any:
    """Return every second element of a tensor that is twice as long, which begins behind the first;
    what lies between is NaN.
    """
    if tensor.layout != torch.strided or not tensor.dim() or tensor.is_quantized:
        return tensor
    with torch.no_grad():
        filler = float("nan") if tensor.is_floating_point() or tensor.is_complex() else 1
        wide = torch.full((*tensor.shape, 2), filler, dtype=tensor.dtype, device=tensor.device)
        wide[..., 1] = tensor
    return wide[..., 1].requires_grad_(tensor.requires_grad)


def _transposed(tensor: Any) -> Any:
    """Return a tensor whose last two dimensions lie in memory the other way round; one of one
    dimension begins at an odd place.
    """
    if tensor.layout != torch.strided or not tensor.dim() or tensor.is_quantized:
        return tensor
    with torch.no_grad():
        if tensor.dim() > 1:
            turned = tensor.detach().mT.contiguous().mT
            if turned.is_contiguous():  # one of its last two dimensions has one element
                return tensor
        else:
            turned = torch.cat([tensor.detach().new_zeros(1), tensor.detach()])[1:]
    return turned.requires_grad_(tensor.requires_grad)


def _lazy(tensor: Any) -> Any:
    """Return the same numbers as the negative, or the conjugate, of what lies in memory; the tensor
    itself where it has neither.
    """
    if tensor.layout is not torch.strided or not (
        tensor.is_floating_point() or tensor.is_complex()
    ):
        return tensor
    with torch.no_grad():
        if tensor.is_complex():
            made = tensor.detach().conj_physical().conj()
        else:
            made = torch._neg_view(tensor.detach().neg())  # noqa: SLF001  # as torch's own tests do
    return made.requires_grad_(tensor.requires_grad)


_LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "sliced": _sliced,
    "transposed": _transposed,
    "lazy": _lazy,
}
