# SPDX-License-Identifier: Apache-2.0
"""`decompositions`: which operators are taken apart before a graph is lowered, and by what.

Imports torch. The table is torch's for its core operators, plus `_TAKEN_APART` and the functions
below, minus `_KEPT`; operators on lists of tensors become one operator a tensor. `trace` and
`torch_backend` use it; a test compares it with Inductor's and holds the reason of each difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._decomp.decompositions import pw_cast_for_opmath
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format
from torch.fx.experimental.symbolic_shapes import statically_known_true

aten, prims = torch.ops.aten, torch.ops.prims
Number = int | float
# torch's table for its core operators lacks these; taken apart, they are loops and reductions.
_TAKEN_APART = [
    "_fused_rms_norm",
    "_log_softmax",
    "_softmax",
    "adaptive_max_pool2d",
    "adaptive_max_pool3d",
    "addcdiv",
    "addcmul",
    "addmv",
    "batch_norm_backward",
    "dist",
    "elu",
    "embedding",
    "gelu",
    "glu",
    "grid_sampler_2d",
    "hann_window",
    "hardtanh",
    "lcm",
    "leaky_relu",
    "lerp",
    "linalg_vector_norm",
    "logsumexp",
    "masked_fill",
    "mse_loss",
    "narrow_copy",
    "native_group_norm",
    "native_layer_norm",
    "nll_loss_forward",
    "permute_copy",
    "rrelu_with_noise_backward",
    "silu",
    "softplus",
    "tril_indices",
    "triu_indices",
    "unbind_copy",
    "unfold",
    "upsample_bilinear2d",
]
# Random numbers: called whole where a generator is passed, which torch's decompositions refuse.
_DRAWING = ["cauchy", "log_normal", "normal"]
# Taken apart, and laid out as torch's kernels do it: in the memory format of the first argument.
_IN_FORMAT = [
    "_adaptive_avg_pool2d",
    "_batch_norm_no_update",
    "_batch_norm_with_update",
    "_batch_norm_with_update_functional",
    "_native_batch_norm_legit",
    "_native_batch_norm_legit_functional",
    "_native_batch_norm_legit_no_training",
    "native_batch_norm",
]
# Called whole: the decompositions of products would multiply in float32 what was bfloat16, and that
# of attention has no logsumexp.
_CALLED = ["addmm", "baddbmm", "_scaled_dot_product_flash_attention_for_cpu"]
# Lowered whole, since a kernel has something better: mean and squares in one pass, for example.
_LOWERED = [
    "_unsafe_index",
    "all",
    "any",
    "bernoulli",
    "clamp_max",
    "clamp_min",
    "isinf",
    "isnan",
    "mean",
    "native_dropout",
    "normal_functional",
    "select_scatter",
    "split",
    "squeeze",
    "std",
    "sum",
    "unbind",
    "var",
    "var_mean",
]
_KEPT = (*_CALLED, *_LOWERED)
_Tensors = Sequence[torch.Tensor]
# Operators on lists whose operator on one tensor has another name.
_SINGLE = {"clamp_min": torch.maximum, "clamp_max": torch.minimum}
_UNARY = (
    "abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 neg"
    " reciprocal round rsqrt sigmoid sign sin sinh sqrt tan tanh trunc"
)
_BINARY = "add sub mul div pow maximum minimum clamp_min clamp_max"


@lru_cache(maxsize=2)
def decompositions(*, templates: bool = False) -> dict[Any, Callable[..., Any]]:
    """Return the functions that take operators apart, by operator.

    Args:
        templates: whether products of matrices become kernels.
    """
    table = {
        **core_aten_decompositions(),
        **get_decompositions([getattr(aten, name) for name in _TAKEN_APART]),
        **_list_decompositions(),
    }
    for names, wrapper in _WRAPPED:
        found = get_decompositions([getattr(aten, name) for name in names])
        table |= {operator: wrapper(function) for operator, function in found.items()}
    # Last, since torch's tables have some of them; our own functions come on top.
    for packet in (getattr(aten, name) for name in _KEPT):
        for overload in packet.overloads():
            table.pop(getattr(packet, overload), None)
    if templates:
        table[aten.mv.default] = partial(_column, table[aten.mv.default])
    return table | _OWN


def _column(
    otherwise: Callable[..., Any], matrix: torch.Tensor, vector: torch.Tensor
) -> torch.Tensor:
    """Multiply a matrix by a column, which `row_products` has a rule for; others are summed up."""
    if matrix.dtype not in {torch.float32, torch.float16, torch.bfloat16}:
        summed: torch.Tensor = otherwise(matrix, vector)
        return summed
    return aten.mm(matrix, vector.unsqueeze(1)).squeeze(1)


def _without_generator(function: Callable[..., Any]) -> Callable[..., Any]:
    def drawn(*given: Any, generator: Any = None, **options: Any) -> Any:
        return NotImplemented if generator is not None else function(*given, **options)

    return drawn


def _in_memory_format(function: Callable[..., Any]) -> Callable[..., Any]:
    """Lay the first result out in the memory format of the first argument.

    torch's own batch norms on a GPU keep every order of dimensions instead, as its decomposition
    does.
    """

    def laid_out(given: torch.Tensor, *others: Any, **options: Any) -> Any:
        results = function(given, *others, **options)
        if given.device.type != "cpu" and not isinstance(results, torch.Tensor):
            return results
        return _first_in_format(given, results)

    return laid_out


def _as_cudnn(function: Callable[..., Any]) -> Callable[..., Any]:
    """Lay the first result out in the memory format of the first argument, as cuDNN's batch norm
    does.
    """

    def laid_out(given: torch.Tensor, *others: Any, **options: Any) -> Any:
        return _first_in_format(given, function(given, *others, **options))

    return laid_out


def _in_memory_format_on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """Lay the result out in the memory format of the first argument on the CPU; on a GPU it is
    dense.
    """

    def laid_out(given: torch.Tensor, *others: Any, **options: Any) -> Any:
        result = function(given, *others, **options)
        return _first_in_format(given, result) if given.device.type == "cpu" else result

    return laid_out


def _first_in_format(given: torch.Tensor, results: Any) -> Any:
    memory_format = suggest_memory_format(given)
    if isinstance(results, torch.Tensor):
        return results.contiguous(memory_format=memory_format)
    return (results[0].contiguous(memory_format=memory_format), *results[1:])


_WRAPPED = (
    (_DRAWING, _without_generator),
    (_IN_FORMAT, _in_memory_format),
    (["cudnn_batch_norm"], _as_cudnn),
    (["max_unpool2d"], _in_memory_format_on_host),
)


# Products -----------------------------------------------------------------------------------------


def _is_outer(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a product of matrices has no sum: each element is one product of two numbers."""
    sums = (one.shape[-1], other.shape[-2])
    return one.is_floating_point() and all(bool(statically_known_true(size == 1)) for size in sums)


def _outer(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (one * other).contiguous() if _is_outer(one, other) else NotImplemented


def _outer_plus(
    added: torch.Tensor,
    one: torch.Tensor,
    other: torch.Tensor,
    *,
    beta: Number = 1,
    alpha: Number = 1,
) -> torch.Tensor:
    return (
        _scaled_outer(added, one, other, beta, alpha) if _is_outer(one, other) else NotImplemented
    )


@pw_cast_for_opmath  # type: ignore[untyped-decorator]
def _scaled_outer(
    added: torch.Tensor, one: torch.Tensor, other: torch.Tensor, beta: Number, alpha: Number
) -> torch.Tensor:
    """Round halves once, as a product's kernel does."""
    product = one * other * alpha
    # With a beta of 0 the sum ignores what is added, NaN too.
    return (product if beta == 0 else product + added * beta).contiguous()


# Recurrent layers ---------------------------------------------------------------------------------


@pw_cast_for_opmath  # type: ignore[untyped-decorator]
def _gru_cell(
    of_input: torch.Tensor,
    of_hidden: torch.Tensor,
    hidden: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the next hidden state, and what a backward pass would read, as torch's kernel does.

    torch has no rule for its results: fake tensors would run the kernel, which needs a GPU.  Cho et
    al. 2014, with the reset gate behind the product, as cuDNN has it.
    """
    one, other = _plus(of_input, input_bias), _plus(of_hidden, hidden_bias)
    (reset_one, update_one, new_one) = one.chunk(3, -1)
    (reset_other, update_other, new_other) = other.chunk(3, -1)
    reset, update = (reset_one + reset_other).sigmoid(), (update_one + update_other).sigmoid()
    new = (new_one + reset * new_other).tanh()
    return new + update * (hidden - new), torch.cat([reset, update, new, hidden, new_other], -1)


@pw_cast_for_opmath  # type: ignore[untyped-decorator]
def _lstm_cell(
    of_input: torch.Tensor,
    of_hidden: torch.Tensor,
    cell: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the next hidden state and cell, and what a backward pass would read, as torch's
    kernel does.

    torch 2.11's rule for its results takes no cell without a bias.  Hochreiter and Schmidhuber
    1997, with the forget gate of Gers et al. 2000.
    """
    gates = _plus(of_input, input_bias) + _plus(of_hidden, hidden_bias)
    into, forget, new, out = gates.chunk(4, -1)
    into, forget, new, out = into.sigmoid(), forget.sigmoid(), new.tanh(), out.sigmoid()
    cell = forget * cell + into * new
    return out * cell.tanh(), cell, torch.cat([into, forget, new, out], -1)


def _plus(gates: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return gates if bias is None else gates + bias


# Convolutions and norms ---------------------------------------------------------------------------


def _convolution_backward(
    gradient: torch.Tensor,
    given: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    output_mask: Sequence[bool],
) -> Any:
    """Sum the gradient of the bias in a kernel of ours, and leave the others to the operator."""
    if not output_mask[2]:
        return NotImplemented
    # Without input channels torch has no gradient of the bias.
    nothing = bool(bias_sizes) and statically_known_true(given.shape[1] == 0)
    bias = (
        gradient.new_zeros(bias_sizes) if nothing else gradient.sum([0, *range(2, gradient.dim())])
    )
    if not output_mask[0] and not output_mask[1]:
        return None, None, bias
    others = aten.convolution_backward(
        gradient,
        given,
        weight,
        bias_sizes,
        stride,
        padding,
        dilation,
        transposed,
        output_padding,
        groups,
        [output_mask[0], output_mask[1], False],
    )
    return others[0], others[1], bias


def _miopen_batch_norm(
    given: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    variance: torch.Tensor | None,
    training: bool,
    momentum: float,
    epsilon: float,
) -> Any:
    results = aten.native_batch_norm(
        given, weight, bias, mean, variance, training, momentum, epsilon
    )
    return results if training else (results[0], weight.new_zeros((0,)), weight.new_zeros((0,)))


# Elements and places ------------------------------------------------------------------------------


def _angle(given: torch.Tensor) -> torch.Tensor:
    if given.is_complex():
        return NotImplemented
    number = given if given.is_floating_point() else given.to(torch.get_default_dtype())
    turned = torch.where(number < 0, torch.full_like(number, math.pi), 0.0)
    return torch.where(torch.isnan(number), number, turned)


def _unless_complex(given: torch.Tensor) -> torch.Tensor:
    return NotImplemented if given.is_complex() else given


def _itself(given: torch.Tensor) -> torch.Tensor:
    return given


def _view_copy(given: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    return given.reshape(size).clone(memory_format=torch.contiguous_format)


def _nothing(*_given: Any, **_options: Any) -> None:
    return None


def _diagonal_scatter(
    given: torch.Tensor, source: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> torch.Tensor:
    """Choose the source's element on the diagonal, and the given one elsewhere."""
    rows, columns = dim1 % given.dim(), dim2 % given.dim()
    index = {
        dim: (
            torch.arange(given.shape[dim], device=given.device).view(
                [-1 if place == dim else 1 for place in range(given.dim())]
            )
        )
        for dim in (rows, columns)
    }
    # The k-th element is in row k of a diagonal at or above the main one, else in column k.
    along, across = (rows, columns) if offset >= 0 else (columns, rows)
    padded = torch.constant_pad_nd(
        source.to(given.dtype), [0, given.shape[along] - source.shape[-1]]
    )
    spread = padded.movedim(-1, along - (along > across)).unsqueeze(across)
    chosen = torch.where(index[columns] - index[rows] == offset, spread, given)
    return aten.copy(_as_cloned(given), chosen)


def _as_cloned(given: torch.Tensor) -> torch.Tensor:
    """Return new memory with the strides of a tensor, dense ones where its elements overlap.

    torch's kernels that write to a part of a copy copy the whole storage.
    """
    if _overlaps(given):
        return torch.empty_like(given)
    return given.new_empty_strided(given.shape, given.stride())


def _overlaps(given: torch.Tensor) -> bool:
    """Whether a tensor has elements that share memory, as an expanded one."""
    return any(
        statically_known_true(stride == 0) and not statically_known_true(size <= 1)
        for size, stride in zip(given.shape, given.stride(), strict=True)
    )


def _select_scatter(
    given: torch.Tensor, source: torch.Tensor, dim: int, index: int
) -> torch.Tensor:
    """Copy a tensor whose elements overlap first, which the rule of torch 2.11 for strides
    forgets.
    """
    if not _overlaps(given):
        return NotImplemented
    return aten.select_scatter(given.clone(), source, dim, index)


def _index_fill(
    given: torch.Tensor, dim: int, index: torch.Tensor, value: torch.Tensor | complex
) -> torch.Tensor:
    """Put the value at the places; torch's function copies into a new tensor, which a graph may
    not.
    """
    filling = value if isinstance(value, torch.Tensor) else given.new_full((), value)
    if not given.dim():
        return aten.index_put(given[None], [index], filling)[0]
    places = [None] * (dim % given.dim()) + [index]
    return aten.index_put(given, places, filling.to(given.dtype))


# Random numbers -----------------------------------------------------------------------------------


def _normal(
    shape: Sequence[int],
    *,
    mean: Number,
    std: Number,
    dtype: torch.dtype,
    device: torch.device,
    generator: Any = None,
    **_options: Any,
) -> torch.Tensor:
    if generator is not None:
        return NotImplemented
    return torch.randn(shape, dtype=dtype, device=device) * std + mean


def _geometric(given: torch.Tensor, p: float, generator: Any = None) -> torch.Tensor:
    """Draw how often an experiment is made until it succeeds; in float32 where whole numbers are
    asked for.
    """
    if generator is not None:
        return NotImplemented
    torch._check(  # noqa: SLF001
        0 < p < 1, lambda: f"geometric_ expects p to be in (0, 1), but got p={p}"
    )
    drawn = given if given.is_floating_point() else given.to(torch.float32)
    failures = torch.log1p(-torch.rand_like(drawn)) / math.log1p(-p)
    return (torch.floor(failures) + 1).to(given.dtype)


def _rrelu_with_noise(
    given: torch.Tensor,
    noise: torch.Tensor,
    lower: float = 0.125,
    upper: float = 1 / 3,
    training: bool = False,
    generator: Any = None,
) -> Any:
    if generator is not None:
        return NotImplemented
    if not training:
        return aten.leaky_relu(given, (lower + upper) / 2), noise.clone()
    slope = torch.where(given <= 0, aten.uniform(given, lower, upper), 1.0)
    return given * slope, slope


_OWN: dict[OpOverload, Callable[..., Any]] = {
    aten.mm.default: _outer,
    aten.bmm.default: _outer,
    aten.addmm.default: _outer_plus,
    aten.baddbmm.default: _outer_plus,
    aten.convolution_backward.default: _convolution_backward,
    aten.miopen_batch_norm.default: _miopen_batch_norm,
    aten._thnn_fused_gru_cell.default: _gru_cell,  # noqa: SLF001  # torch names it so
    aten._thnn_fused_lstm_cell.default: _lstm_cell,  # noqa: SLF001
    aten.angle.default: _angle,
    aten.conj_physical.default: _unless_complex,
    aten.lift.default: _itself,
    aten.view_copy.default: _view_copy,
    aten.sym_constrain_range_for_size.default: _nothing,
    aten.diagonal_scatter.default: _diagonal_scatter,
    aten.index_fill.int_Scalar: _index_fill,
    aten.index_fill.int_Tensor: _index_fill,
    aten.select_scatter.default: _select_scatter,
    prims.normal.default: _normal,
    aten.geometric.default: _geometric,
    aten.rrelu_with_noise_functional.default: _rrelu_with_noise,
}


def _of_number(operator: str, tensor: torch.Tensor, number: Any, **options: Any) -> torch.Tensor:
    """Compute an operator of a tensor and a number."""
    limits = {"maximum": torch.clamp_min, "minimum": torch.clamp_max}
    found: Callable[..., torch.Tensor] = limits.get(operator) or getattr(torch, operator)
    return found(tensor, number, **options)


def _on_each(
    function: Callable[..., torch.Tensor], tensors: _Tensors, *others: Any, **options: Any
) -> list[torch.Tensor]:
    """Apply a function to each tensor, with the element of each other list that is beside it, or
    with what is no list.
    """
    count = len(tensors)
    columns = [other if isinstance(other, (list, tuple)) else [other] * count for other in others]
    return [function(*row, **options) for row in zip(tensors, *columns, strict=True)]


def _of_tensor(operator: str) -> Callable[..., torch.Tensor]:
    found: Callable[..., torch.Tensor] = _SINGLE.get(operator) or getattr(torch, operator)
    return found


def _with_value(
    operator: str, tensor: torch.Tensor, one: torch.Tensor, other: torch.Tensor, value: Any = 1
) -> Any:
    """Compute addcmul or addcdiv; the value may be a tensor of one element."""
    if isinstance(value, torch.Tensor):
        product = one * other if operator == "addcmul" else one / other
        return tensor + value * product
    return getattr(torch, operator)(tensor, one, other, value=value)


def _with_values(
    operator: str, tensors: _Tensors, one: _Tensors, other: _Tensors, values: Any
) -> list[torch.Tensor]:
    numbers = list(values.unbind()) if isinstance(values, torch.Tensor) else values
    return _on_each(partial(_with_value, operator), tensors, one, other, numbers)


def _power_of_number(number: Any, exponents: _Tensors) -> list[torch.Tensor]:
    return [torch.pow(number, exponent) for exponent in exponents]


def _norms(
    tensors: _Tensors, order: Any = 2, dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    return [torch.linalg.vector_norm(tensor, order, dtype=dtype) for tensor in tensors]


def _copied(
    _targets: _Tensors, sources: _Tensors, _non_blocking: bool = False
) -> list[torch.Tensor]:
    return [
        source.to(target.dtype).expand(target.shape).clone()
        for target, source in zip(_targets, sources, strict=True)
    ]


def _zeroed(tensors: _Tensors) -> list[torch.Tensor]:
    return [torch.zeros_like(tensor) for tensor in tensors]


def _adam(
    decoupled: bool,
    parameters: _Tensors,
    gradients: _Tensors,
    means: _Tensors,
    squares: _Tensors,
    largest: _Tensors,
    steps: _Tensors,
    *,
    lr: Any,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    amsgrad: bool,
    maximize: bool,
    grad_scale: torch.Tensor | None = None,
    found_inf: torch.Tensor | None = None,
) -> Any:
    """Take one step of Adam for each parameter; `steps` are counted already."""
    if grad_scale is not None or found_inf is not None:
        return NotImplemented
    found: list[list[torch.Tensor]] = [[], list(gradients), [], [], []]
    for place, (weight, gradient, mean, square, step) in enumerate(
        zip(parameters, gradients, means, squares, steps, strict=True)
    ):
        slope = -gradient if maximize else gradient
        if weight_decay and not decoupled:
            slope = slope + weight * weight_decay
        decayed = weight - weight * (lr * weight_decay) if weight_decay and decoupled else weight
        first = mean + (slope - mean) * (1 - beta1)
        second = square * beta2 + slope * slope * (1 - beta2)
        highest = torch.maximum(largest[place], second) if amsgrad else second
        correction = 1 - torch.pow(beta1, step.to(torch.float32))
        root = torch.sqrt(1 - torch.pow(beta2, step.to(torch.float32)))
        change = first / (torch.sqrt(highest) / root + eps) * (lr / correction)
        found[0].append((decayed - change).to(weight.dtype))
        found[2].append(first.to(mean.dtype))
        found[3].append(second.to(square.dtype))
        if amsgrad:
            found[4].append(highest.to(square.dtype))
    return tuple(found)


def _list_decompositions() -> dict[Any, Callable[..., Any]]:
    """Return what takes each of these operators apart, for those that the installed torch has."""
    table: dict[str, Callable[..., Any]] = {}
    for name in _UNARY.split():
        table[f"{name}.default"] = partial(_on_each, getattr(torch, name))
    for name in _BINARY.split():
        numbers = partial(_on_each, partial(_of_number, name))
        table |= {f"{name}.Scalar": numbers, f"{name}.ScalarList": numbers}
        table |= {
            f"{name}.List": partial(_on_each, _of_tensor(name)),
            f"{name}.Tensor": partial(_on_each, _of_tensor(name)),
        }
    for name in ("addcmul", "addcdiv"):
        for overload in ("Scalar", "ScalarList", "Tensor"):
            table[f"{name}.{overload}"] = partial(_with_values, name)
        table[f"{name}.Scalar"] = partial(_on_each, partial(_with_value, name))
    table |= {
        f"lerp.{overload}": partial(_on_each, torch.lerp)
        for overload in ("List", "Scalar", "ScalarList")
    }
    table |= {
        "pow.ScalarAndTensor": _power_of_number,
        "norm.Scalar": _norms,
        "max.default": partial(_on_each, torch.max),
        "copy.default": _copied,
        "zero.default": _zeroed,
    }
    found = {
        getattr(
            getattr(aten, f"_foreach_{name.split('.')[0]}", None), name.split(".")[1], None
        ): function
        for name, function in table.items()
    }
    for name, decoupled in (("_fused_adam", False), ("_fused_adamw", True)):
        for overload in ("default", "tensor_lr"):
            found[getattr(getattr(aten, name, None), overload, None)] = partial(_adam, decoupled)
    return {operator: function for operator, function in found.items() if operator is not None}
