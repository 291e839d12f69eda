# SPDX-License-Identifier: Apache-2.0
"""`check_arguments`: refuses arguments that would lead an operator of torch out of its tensors.

torch trusts its own autograd to hand matching tensors to backward operators, and some forward ones
look at no index.  Each function here has the parameters of its operator, by the names in torch's
schema, so that arguments are bound as torch does, and raises `ArgumentRefused`. `CheckedMemory`
asks for each call of a loaded plan; `python -m tools.fuzz operators` looks for what is missing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

Check = Callable[..., None]
_LEAST = -(2**63)


class ArgumentRefused(ValueError):
    """What was expected of an argument, and what was given."""


def check_arguments(operator: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> None:
    """Raise `ArgumentRefused` where an operator must not be called with these arguments.

    Looking at the values of indices waits for the device that they lie on.
    """
    check = CHECKS.get(operator)
    if check is None:
        return
    try:
        check(*arguments, **keywords)
    except ArgumentRefused:
        raise
    # Of another type or rank than the operator takes.
    except (
        TypeError,
        AttributeError,
        IndexError,
        ValueError,
        OverflowError,
        RuntimeError,
    ) as error:
        raise ArgumentRefused(
            f"expected arguments of the operator's types and ranks: {error}"
        ) from error


def _by_name(parameters: str) -> Callable[[Callable[[Any], None]], Check]:
    """Return what makes a check of a function that takes one object with all arguments.

    Args:
        parameters: their names, as torch's schema has them and in its order.
    """
    names = parameters.split()
    return lambda check: partial(_check_named, names, check)


def _check_named(
    names: Sequence[str], check: Callable[[Any], None], *arguments: Any, **keywords: Any
) -> None:
    given = SimpleNamespace(**dict(zip(names, arguments, strict=False)), **keywords)
    check(given)


def _demand(holds: bool, expected: str, got: object) -> None:
    if not holds:
        raise ArgumentRefused(f"expected {expected}, got {got}")


# Values -----------------------------------------------------------------------------------------


def _between(name: str, tensor: Any, least: int, most: int) -> None:
    """Demand that all numbers of a tensor of integers are within bounds."""
    _demand(
        not (tensor.is_floating_point() or tensor.is_complex()),
        f"integers for {name}",
        tensor.dtype,
    )
    if tensor.numel():
        low, high = (int(bound) for bound in tensor.detach().aminmax())
        _demand(least <= low and high <= most, f"{name} from {least} to {most}", f"{low} to {high}")


def _below(name: str, tensor: Any, size: int) -> None:
    _between(name, tensor, 0, size - 1)


def _size(tensor: Any, dim: int) -> int:
    return int(tensor.shape[dim]) if tensor.dim() else 1


def _sized(tensor: Any, sizes: Sequence[int], of: str) -> None:
    """Demand that a tensor has some sizes; `of` says whose they are."""
    wanted, got = tuple(sizes), tuple(tensor.shape)
    if got != wanted:  # as `_demand`, without making words of sizes that are right
        raise ArgumentRefused(f"expected sizes {wanted} {of}, got {got}")


def _leading(tensor: Any, self: Any, rank: int) -> None:
    """Demand that a tensor has the sizes of `self`, but for the last `rank` of both."""
    wanted, got = tuple(self.shape[:-rank]), tuple(tensor.shape[:-rank])
    _demand(got == wanted, f"leading sizes {wanted} of self", tuple(tensor.shape))


def _same(**tensors: Any) -> None:
    """Demand that tensors have the sizes of the first."""
    (first, wanted), *others = tensors.items()
    for name, tensor in others:
        _sized(tensor, wanted.shape, f"of {first} for {name}")


def _vectors(size: int, **tensors: Any) -> None:
    """Demand that tensors, where they are given, have one dimension of a size."""
    for name, tensor in tensors.items():
        if tensor is not None:
            _sized(tensor, (size,), f"for {name}")


def _ranks(tensor: Any, *ranks: int) -> None:
    _demand(
        tensor.dim() in ranks,
        f"a tensor of {' or '.join(map(str, ranks))} dimensions",
        tensor.dim(),
    )


def _filled(**tensors: Any) -> None:
    for name, tensor in tensors.items():
        _demand(tensor.numel() > 0, f"elements in {name}", tuple(tensor.shape))


# Places that values decide ----------------------------------------------------------------------


def _embedding(weight: Any, indices: Any, *_: Any, **__: Any) -> None:
    _below("indices", indices, _size(weight, 0))


def _embedding_dense_backward(
    grad_output: Any, indices: Any, num_weights: int, padding_idx: int, *_: Any, **__: Any
) -> None:
    _demand(num_weights >= 0, "num_weights from 0", num_weights)
    expected = (*indices.shape, grad_output.shape[-1])
    _sized(grad_output, expected, "of a gradient")
    _below("indices", indices, num_weights)


def _at_dim(self: Any, dim: int, index: Any, *_: Any, **__: Any) -> None:
    _below("index", index, _size(self, dim))


def _at_list(self: Any, indices: Sequence[Any], *_: Any, **__: Any) -> None:
    dim = 0
    for index in indices:
        if index is not None and str(index.dtype) in {"torch.bool", "torch.uint8"}:
            dim += int(index.dim())  # a mask, whose sizes torch compares
            continue
        if index is not None:
            _between("indices", index, -_size(self, dim), _size(self, dim) - 1)
        dim += 1


def _taken(self: Any, index: Any, *_: Any, **__: Any) -> None:
    _between("index", index, -self.numel(), self.numel() - 1)


def _pool_backward(rank: int) -> Check:
    """Return the check of a maximum pool's gradient, whose indices are places in the input, and the
    last parameter.
    """

    def check(grad_output: Any, self: Any, *others: Any, indices: Any = None, **_: Any) -> None:
        places = others[-1] if indices is None else indices
        _ranks(self, rank + 1, rank + 2)
        _same(grad_output=grad_output, indices=places)
        _leading(grad_output, self, rank)
        _below("indices", places, math.prod(self.shape[-rank:]))

    return check


def _unpooled(self: Any, indices: Any, output_size: Sequence[int], *_: Any, **__: Any) -> None:
    _same(self=self, indices=indices)
    _below("indices", indices, math.prod(output_size))


def _class_loss(self: Any, target: Any, weight: Any, reduction: int, ignore_index: int) -> None:
    dim = 1 if self.dim() > 1 else 0
    classes = _size(self, dim)
    sizes = tuple(size for place, size in enumerate(self.shape) if place != dim)
    _demand(
        tuple(target.shape) in {sizes, sizes or (1,)},
        f"sizes {sizes} of a target",
        tuple(target.shape),
    )
    _vectors(classes, weight=weight)
    # What is ignored is no class, and so may be any number.
    kept = target[target != ignore_index]
    _below("target", kept, classes)


@_by_name("grad_output self target weight reduction ignore_index total_weight")
def _class_loss_backward(given: Any) -> None:
    _class_loss(given.self, given.target, given.weight, given.reduction, given.ignore_index)
    total, gradient = tuple(given.total_weight.shape), tuple(given.grad_output.shape)
    _demand(given.total_weight.numel() == 1, "one number for total_weight", total)
    sizes = tuple(given.target.shape) if given.reduction == 0 else ()
    _demand(gradient in {sizes, sizes or (1,)}, f"sizes {sizes} of a gradient", gradient)


def _margin_loss(
    self: Any, target: Any, p: Any = 1, margin: Any = 1, weight: Any = None, *_: Any, **__: Any
) -> None:
    classes = _size(self, -1)
    _below("target", target, classes)
    _vectors(classes, weight=weight)


def _sorted_search(sorted_sequence: Any, self: Any, *, sorter: Any = None, **_: Any) -> None:
    if sorter is not None:
        _same(sorted_sequence=sorted_sequence, sorter=sorter)
        _below("sorter", sorter, _size(sorted_sequence, -1))


def _repeats(repeats: Any, *, output_size: int | None = None) -> None:
    _between("repeats", repeats, 0, 2**48)
    if output_size is not None:
        total = int(repeats.sum())
        _demand(total == output_size, f"output_size {total}", output_size)


def _lu_solve(LU: Any, pivots: Any, *_: Any, **__: Any) -> None:
    rows, columns = LU.shape[-2:]
    expected = (*LU.shape[:-2], min(rows, columns))
    _sized(pivots, expected, "of pivots")
    _between("pivots", pivots, 1, rows)


def _lu_unpack(LU_data: Any, LU_pivots: Any, *_: Any, **__: Any) -> None:
    _lu_solve(LU_data, LU_pivots)


# Sizes that torch does not compare --------------------------------------------------------------


def _softmax_backward(grad_output: Any, output: Any, *_: Any, **__: Any) -> None:
    _same(output=output, grad_output=grad_output)


def _fourier(self: Any, dim: Sequence[int], *_: Any, **__: Any) -> None:
    rank = self.dim()
    _demand(all(0 <= place < rank for place in dim), f"dimensions from 0 to {rank - 1}", dim)
    _demand(0 < len(dim) == len(set(dim)), "dimensions, each once", dim)
    _filled(self=self)


def _fourier_real(self: Any, dim: Sequence[int], normalization: int, last_dim_size: int) -> None:
    _fourier(self, dim)
    _demand(last_dim_size > 0, "last_dim_size from 1", last_dim_size)
    expected = last_dim_size // 2 + 1
    _demand(
        self.shape[dim[-1]] == expected,
        f"size {expected} of the last dimension",
        self.shape[dim[-1]],
    )


def _adaptive_mean_backward(rank: int) -> Check:
    def check(grad_output: Any, self: Any) -> None:
        _ranks(self, rank + 1, rank + 2)
        _leading(grad_output, self, rank)
        _filled(self=self, grad_output=grad_output)

    return check


def _mean_backward(grad_output: Any, self: Any, *_: Any, **__: Any) -> None:
    leading = tuple(self.shape[: max(self.dim() - 3, 0)])
    _demand(
        tuple(grad_output.shape[: len(leading)]) == leading,
        f"leading sizes {leading} of self",
        tuple(grad_output.shape),
    )


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> None:
    """Demand (batch, heads, rows, columns); keys may have fewer heads, for grouped queries."""
    for tensor in (query, key, value):
        _ranks(tensor, 4)
    _filled(query=query, key=key, value=value)
    batch, heads, _, columns = query.shape
    _demand(
        key.shape[0] == value.shape[0] == batch,
        f"batch {batch} of keys and values",
        (key.shape[0], value.shape[0]),
    )
    _demand(
        key.shape[1] == value.shape[1] and heads % key.shape[1] == 0,
        f"a divisor of {heads} heads",
        key.shape[1],
    )
    _demand(key.shape[2] == value.shape[2], f"{key.shape[2]} rows of values", value.shape[2])
    _demand(key.shape[3] == columns, f"{columns} columns of keys", key.shape[3])


def _bias_of(query: Any, key: Any, bias: Any) -> None:
    """Demand that a bias broadcasts to (batch, heads, rows of queries, rows of keys)."""
    if bias is not None:
        full = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        fits = 0 < bias.dim() <= len(full) and all(
            size in {1, wanted}
            for size, wanted in zip(reversed(bias.shape), reversed(full), strict=False)
        )
        _demand(fits, f"a bias that broadcasts to {full}", tuple(bias.shape))


def _attention_on_cpu(
    query: Any, key: Any, value: Any, *_: Any, attn_mask: Any = None, **__: Any
) -> None:
    _attention(query, key, value)
    _same(key=key, value=value)
    _bias_of(query, key, attn_mask)


def _attention_backward(given: Any, gradient: Any) -> None:
    query, key, value, logsumexp = given.query, given.key, given.value, given.logsumexp
    _attention(query, key, value)
    expected = (*query.shape[:3], value.shape[3])
    for name, tensor in (("grad_out", gradient), ("out", given.out)):
        _sized(tensor, expected, f"of {name}")
    # Kernels pad its rows.
    least = (*query.shape[:2], query.shape[2])
    fits = logsumexp.dim() in {3, 4} and all(
        got >= wanted for got, wanted in zip(logsumexp.shape, least, strict=False)
    )
    if not fits:
        raise ArgumentRefused(f"expected sizes {least} of logsumexp, got {tuple(logsumexp.shape)}")


@_by_name("grad_out query key value out logsumexp dropout_p is_causal attn_mask scale")
def _attention_backward_on_cpu(given: Any) -> None:
    _attention_backward(given, given.grad_out)
    _same(key=given.key, value=given.value)
    _sized(given.logsumexp, tuple(given.query.shape[:3]), "of logsumexp")
    _bias_of(given.query, given.key, getattr(given, "attn_mask", None))


def _flash(given: Any) -> None:
    _attention_backward(given, given.grad_out)
    some = given.cum_seq_q is not None or given.cum_seq_k is not None
    _demand(not some, "no cumulative lengths", "some")
    rows, most = (given.query.shape[2], given.key.shape[2]), (given.max_q, given.max_k)
    _demand(most == rows, f"{rows[0]} and {rows[1]} rows", most)


@_by_name("grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k")
def _flash_backward(given: Any) -> None:
    _flash(given)


def _efficient_forward(
    query: Any, key: Any, value: Any, attn_bias: Any, *_: Any, **__: Any
) -> None:
    _attention(query, key, value)
    _bias_of(query, key, attn_bias)


@_by_name("grad_out_ query key value attn_bias out logsumexp")
def _efficient_backward(given: Any) -> None:
    _attention_backward(given, given.grad_out_)
    _bias_of(given.query, given.key, given.attn_bias)


@_by_name(
    "grad_out query key value out logsumexp philox_seed philox_offset attn_bias cum_seq_q cum_seq_k"
    " max_q max_k"
)
def _cudnn_backward(given: Any) -> None:
    _flash(given)
    _bias_of(given.query, given.key, given.attn_bias)


def _batch_norm(
    input: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, *_: Any, **__: Any
) -> None:
    _demand(input.dim() > 1, "a tensor of at least 2 dimensions", input.dim())
    _vectors(
        input.shape[1], weight=weight, bias=bias, running_mean=running_mean, running_var=running_var
    )


def _batch_norm_of_batch(
    input: Any, weight: Any, bias: Any, training: bool, *_: Any, **__: Any
) -> None:
    _batch_norm(input, weight, bias, None, None)
    _demand(training is True, "training where no statistics are given", training)


@_by_name("grad_out input weight running_mean running_var save_mean save_invstd train")
def _batch_norm_backward(given: Any) -> None:
    _same(input=given.input, grad_out=given.grad_out)
    running, saved = (given.running_mean, given.running_var), (given.save_mean, given.save_invstd)
    _batch_norm(given.input, given.weight, None, *running)
    _vectors(given.input.shape[1], save_mean=given.save_mean, save_invstd=given.save_invstd)
    needed = saved if given.train else running
    _demand(all(one is not None for one in needed), "the statistics that it needs", None)


@_by_name("grad_out input normalized_shape mean rstd weight bias")
def _layer_norm_backward(given: Any) -> None:
    whole, normalized = given.input, tuple(given.normalized_shape)
    _same(input=whole, grad_out=given.grad_out)
    rank = len(normalized)
    _demand(
        0 < rank <= whole.dim() and tuple(whole.shape[-rank:]) == normalized,
        f"the last sizes of {tuple(whole.shape)}",
        given.normalized_shape,
    )
    rows = math.prod(whole.shape[:-rank])
    for name, tensor in (("mean", given.mean), ("rstd", given.rstd)):
        _demand(tensor.numel() == rows, f"{rows} numbers of {name}", tensor.numel())
    for name, tensor in (("weight", given.weight), ("bias", given.bias)):
        if tensor is not None:
            _sized(tensor, normalized, f"of {name}")


def _group_norm(
    input: Any, weight: Any, bias: Any, N: int, C: int, HxW: int, group: int, *_: Any, **__: Any
) -> None:
    _demand(
        min(N, C, HxW, group) > 0 and C % group == 0,
        "sizes from 1, and groups that divide them",
        (N, C, HxW, group),
    )
    expected = N * C * HxW
    _demand(input.numel() == expected, f"{expected} elements", input.numel())
    _vectors(C, weight=weight, bias=bias)


@_by_name("grad_out input mean rstd weight N C HxW group")
def _group_norm_backward(given: Any) -> None:
    _same(input=given.input, grad_out=given.grad_out)
    _group_norm(given.input, given.weight, None, given.N, given.C, given.HxW, given.group)
    for name, tensor in (("mean", given.mean), ("rstd", given.rstd)):
        _sized(tensor, (given.N, given.group), f"of {name}")


def _resized(input_sizes: Sequence[int], output_size: Sequence[int], scales: Sequence[Any]) -> None:
    """Demand that scales, where they are given, are those of the sizes."""
    for size, wanted, scale in zip(
        reversed(input_sizes), reversed(output_size), reversed(scales), strict=False
    ):
        if scale is not None:
            fits = math.isfinite(scale) and scale > 0 and math.floor(size * scale) == wanted
            _demand(fits, f"a scale from {size} to {wanted}", scale)


def _scales(options: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
    """Return the scales among what follows the sizes; by position, so that each has its place."""
    _demand(all(item is None for item in named.values()), "scales by position", sorted(named))
    return [item for item in options if not isinstance(item, bool)]


def _upsample(self: Any, output_size: Sequence[int], *options: Any, **named: Any) -> None:
    _resized(self.shape, output_size, _scales(options, named))


def _upsample_backward(
    grad_output: Any,
    output_size: Sequence[int],
    input_size: Sequence[int],
    *options: Any,
    **named: Any,
) -> None:
    _resized(input_size, output_size, _scales(options, named))


def _common_multiple(self: Any, other: Any) -> None:
    # The least integer divided by -1 ends the process.
    for tensor in (self, other):
        _between("operands", tensor, _LEAST + 1, 2**63 - 1)


def _distances_backward(grad: Any, x1: Any, x2: Any, p: float, cdist: Any) -> None:
    expected = (*x1.shape[:-1], x2.shape[-2])
    _demand(
        tuple(x2.shape[:-2]) == tuple(x1.shape[:-2]) and x2.shape[-1] == x1.shape[-1],
        "batches and columns of x1 in x2",
        tuple(x2.shape),
    )
    for name, tensor in (("grad", grad), ("cdist", cdist)):
        _sized(tensor, expected, f"of {name}")


def _padded_backward(grad_output: Any, self: Any, padding: Sequence[int]) -> None:
    sizes, padded = list(self.shape), len(padding) // 2
    _ranks(self, padded + 1, padded + 2)
    for place in range(padded):
        sizes[-1 - place] += padding[2 * place] + padding[2 * place + 1]
        inside = all(
            -1 < width < self.shape[-1 - place] for width in padding[2 * place : 2 * place + 2]
        )
        _demand(inside, f"padding below {self.shape[-1 - place]}", padding)
    _sized(grad_output, tuple(sizes), "of a gradient")


_UPSAMPLED = (
    "_upsample_bicubic2d_aa",
    "_upsample_bilinear2d_aa",
    "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d",
    "upsample_bicubic2d",
    "upsample_bilinear2d",
    "upsample_linear1d",
    "upsample_nearest1d",
    "upsample_nearest2d",
    "upsample_nearest3d",
    "upsample_trilinear3d",
)

#: Operator -> what raises where its arguments would lead it out of its tensors.
CHECKS: Mapping[str, Check] = {
    "aten._adaptive_avg_pool2d_backward.default": _adaptive_mean_backward(2),
    "aten._adaptive_avg_pool3d_backward.default": _adaptive_mean_backward(3),
    "aten._batch_norm_no_update.default": _batch_norm,
    "aten._batch_norm_with_update_functional.default": _batch_norm,
    "aten._cdist_backward.default": _distances_backward,
    "aten._fft_c2c.default": _fourier,
    "aten._fft_c2r.default": _fourier_real,
    "aten._fft_r2c.default": _fourier,
    "aten._log_softmax_backward_data.default": _softmax_backward,
    "aten._native_batch_norm_legit.no_stats": _batch_norm_of_batch,
    "aten._native_batch_norm_legit_functional.default": _batch_norm,
    "aten._native_batch_norm_legit_no_training.default": _batch_norm,
    "aten._scaled_dot_product_cudnn_attention.default": _efficient_forward,
    "aten._scaled_dot_product_cudnn_attention_backward.default": _cudnn_backward,
    "aten._scaled_dot_product_efficient_attention.default": _efficient_forward,
    "aten._scaled_dot_product_efficient_attention_backward.default": _efficient_backward,
    "aten._scaled_dot_product_flash_attention.default": _attention,
    "aten._scaled_dot_product_flash_attention_backward.default": _flash_backward,
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _attention_on_cpu,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": _attention_backward_on_cpu,
    "aten._softmax_backward_data.default": _softmax_backward,
    "aten._unsafe_index.Tensor": _at_list,
    "aten._unsafe_index_put.default": _at_list,
    "aten.adaptive_max_pool2d_backward.default": _pool_backward(2),
    "aten.adaptive_max_pool3d_backward.default": _pool_backward(3),
    "aten.avg_pool2d_backward.default": _mean_backward,
    "aten.avg_pool3d_backward.default": _mean_backward,
    "aten.embedding.default": _embedding,
    "aten.embedding_dense_backward.default": _embedding_dense_backward,
    "aten.fractional_max_pool2d_backward.default": _pool_backward(2),
    "aten.fractional_max_pool3d_backward.default": _pool_backward(3),
    "aten.gather.default": _at_dim,
    "aten.index.Tensor": _at_list,
    "aten.index_add.default": _at_dim,
    "aten.index_copy.default": _at_dim,
    "aten.index_fill.int_Scalar": _at_dim,
    "aten.index_fill.int_Tensor": _at_dim,
    "aten.index_put.default": _at_list,
    "aten.index_reduce.default": _at_dim,
    "aten.index_select.default": _at_dim,
    "aten.lcm.default": _common_multiple,
    "aten.linalg_lu_solve.default": _lu_solve,
    "aten.lu_unpack.default": _lu_unpack,
    "aten.max_pool2d_with_indices_backward.default": _pool_backward(2),
    "aten.max_pool3d_with_indices_backward.default": _pool_backward(3),
    "aten.max_unpool2d.default": _unpooled,
    "aten.max_unpool3d.default": _unpooled,
    "aten.multi_margin_loss.default": _margin_loss,
    "aten.native_batch_norm_backward.default": _batch_norm_backward,
    "aten.native_group_norm.default": _group_norm,
    "aten.native_group_norm_backward.default": _group_norm_backward,
    "aten.native_layer_norm_backward.default": _layer_norm_backward,
    "aten.nll_loss2d_backward.default": _class_loss_backward,
    "aten.nll_loss2d_forward.default": _class_loss,
    "aten.nll_loss_backward.default": _class_loss_backward,
    "aten.nll_loss_forward.default": _class_loss,
    "aten.put.default": _taken,
    "aten.repeat_interleave.Tensor": _repeats,
    "aten.scatter.reduce": _at_dim,
    "aten.scatter.src": _at_dim,
    "aten.scatter.value": _at_dim,
    "aten.scatter.value_reduce": _at_dim,
    "aten.scatter_add.default": _at_dim,
    "aten.scatter_reduce.two": _at_dim,
    "aten.searchsorted.Tensor": _sorted_search,
    "aten.take.default": _taken,
    **{
        f"aten.{kind}_pad{rank}d_backward.default": _padded_backward
        for kind in ("reflection", "replication")
        for rank in (1, 2, 3)
    },
    **{f"aten.{name}.default": _upsample for name in _UPSAMPLED},
    **{f"aten.{name}_backward.default": _upsample_backward for name in _UPSAMPLED},
}
