# SPDX-License-Identifier: Apache-2.0
"""More functions that programs are generated for, operator by operator; `program_cases` holds the
machine's own.

Importing adds them to its list.
"""

import torch
import torch.nn.functional as F
from program_cases import CASES, case, seeded

assert CASES is not None
special = torch.special


def positive(*sizes, dtype=torch.float32):
    return (seeded(*sizes).abs() + 0.1).to(dtype)


def awkward():
    """Zeros of both signs, ties, infinities, NaN and numbers beyond what a float32 rounds to."""
    numbers = [
        0.0,
        -0.0,
        0.5,
        -0.5,
        1.5,
        2.5,
        -2.5,
        1.0,
        -1.0,
        float("inf"),
        -float("inf"),
        float("nan"),
        1e30,
        -1e-30,
        0.125,
        3.375,
    ]
    return torch.tensor(numbers)


def with_gradient(function, *given):
    """Return a function's result and the gradient of its sum."""
    result, backward = torch.func.vjp(function, *given)
    return result, *backward(torch.ones_like(result))


# -------------------------------------------------------------------------------------- Mathematics


@case(lambda: (positive(40),), kernels=1)
def bessel(a):
    return (
        special.bessel_j0(a),
        special.bessel_j1(a),
        special.bessel_y0(a),
        special.bessel_y1(a),
        special.i0(a),
        special.i1(a),
        special.modified_bessel_i0(a),
        special.modified_bessel_i1(a),
        special.erfcx(a),
    )


@case(lambda: (awkward(), seeded(16, dtype=torch.int32)), kernels=1)
def representations(a, n):
    return (
        *torch.frexp(a),
        torch.ldexp(a, n),
        torch.signbit(a),
        torch.copysign(torch.ones_like(a), a),
        torch.nextafter(a, -a),
    )


@case(lambda: (seeded(30), seeded(30)), kernels=1)
def of_two(a, b):
    return (
        torch.hypot(a, b),
        torch.atan2(a, b),
        torch.fmod(a, b),
        torch.remainder(a, b),
        a // b,
        torch.addcmul(a, b, b, value=0.3),
        torch.addcdiv(a, a, b.abs() + 1, value=2),
        torch.xlogy(a, b.abs()),
        torch.heaviside(a, b),
        torch.logaddexp(a, b),
        torch.fmax(a, b),
        torch.fmin(a, b),
        torch.lerp(a, b, 0.3),
        torch.logical_xor(a > 0, b > 0),
    )


@case(lambda: (seeded(30, dtype=torch.int32), seeded(30, dtype=torch.int32)), kernels=1)
def of_two_integers(a, b):
    b = torch.where(b == 0, 3, b)
    return (
        a // b,
        torch.fmod(a, b),
        torch.remainder(a, b),
        torch.div(a, b, rounding_mode="trunc"),
        torch.pow(a, b),
        a**5,
        2 ** b.abs(),
        a << 3,
        a >> 2,
        torch.bitwise_left_shift(a, b.abs()),
        torch.bitwise_right_shift(a, b.abs()),
        a ^ b,
        ~a,
    )


@case(lambda: (awkward(), seeded(40) * 100), kernels=1)
def rounded(a, b):
    return (
        torch.round(a),
        torch.round(b, decimals=2),
        torch.round(b, decimals=-1),
        torch.round(a, decimals=1),
        a.frac(),
        b.trunc(),
    )


@case(lambda: (seeded(6, 8), seeded(6, 8, dtype=torch.int64), seeded(6, 8, dtype=torch.float16)))
def bitcasts(a, n, h):
    return (
        a.view(torch.int32),
        a.view(torch.int16),
        a.view(torch.uint8),
        a.view(torch.int64),
        n.view(torch.int32),
        n.view(torch.float64),
        h.view(torch.int16),
        h.view(torch.int32),
        h.view(torch.int8),
        a.view(torch.float64),
        n.view(torch.bfloat16),
    )


@case(lambda: (awkward(), seeded(40)))
def activations(a, b):
    return (
        F.softplus(a),
        F.elu(a),
        F.mish(a),
        F.hardswish(a),
        F.hardsigmoid(a),
        F.silu(a),
        F.logsigmoid(a),
        F.selu(a),
        F.relu6(a),
        F.celu(a),
        F.leaky_relu(a),
        F.gelu(b, approximate="tanh"),
        F.hardshrink(b),
        F.softshrink(b),
        F.threshold(b, 0.1, 2),
        torch.logit(b, 1e-3),
        torch.nan_to_num(a),
        torch.sinc(b),
        F.prelu(b, torch.tensor([0.2])),
        torch.isposinf(a),
        torch.isneginf(a),
        torch.sgn(a),
    )


# ------------------------------------------------------------------------------------------- Places


@case(lambda: (seeded(6, 8), seeded(3, 8), torch.tensor([4, 0, 4])))
def added_to_places(a, v, i):
    spread = i[:, None].expand(3, 8)
    return (
        a.index_add(0, i, v, alpha=2),
        a.scatter_reduce(0, spread, v, "sum"),
        a.scatter_reduce(0, spread, v, "sum", include_self=False),
        a.scatter(0, spread, v, reduce="add"),
        a.half().index_put([i], v.half(), accumulate=True),
        a.double().index_put([i], v.double(), accumulate=True),
        a.index_copy(0, i[:2], v[:2]),
        a.index_fill(0, i, 3.0),
    )


@case(
    lambda: (
        seeded(6, 8, dtype=torch.int32),
        seeded(3, 8, dtype=torch.int32),
        torch.tensor([4, 0, 4]),
    )
)
def extremes_of_places(a, v, i):
    spread = i[:, None].expand(3, 8)
    wide, values = a.long(), v.long()
    return (
        a.scatter_reduce(0, spread, v, "amax"),
        a.scatter_reduce(0, spread, v, "amin", include_self=False),
        wide.scatter_reduce(0, spread, values, "amax", include_self=False),
        wide.scatter_reduce(0, spread, values, "amin"),
    )


@case(lambda: (seeded(6, 8), seeded(3, 8), torch.tensor([4, 0, 4])), fallbacks=4)
def reduced_by_torch(a, v, i):
    """What atomics would compute otherwise than torch, or not at all."""
    spread = i[:, None].expand(3, 8)
    return (
        a.scatter_reduce(0, spread, v, "amax"),
        a.scatter_reduce(0, spread, v, "mean"),
        a.scatter_reduce(0, spread, v, "prod"),
        a.short().index_put([i], v.short(), accumulate=True),
    )


@case(lambda: (seeded(6, 8), seeded(6, 8)))
def filled(a, b):
    return (
        a.masked_fill(b > 0, -1.5),
        a.index_put([b > 0], torch.tensor(7.0)),
        a.tril(1),
        a.triu(-1),
        torch.where(b > 0, a, 0),
        a.index_put([b[:, 0] > 0], torch.tensor(2.0)),
        torch.slice_scatter(a, b[:3], 0, 1, 6, 2),
        torch.slice_scatter(a, b[:, :2], 1, 3, 8, 3),
        torch.select_scatter(a, b[0], 0, 2),
    )


@case(lambda: (seeded(6, 8), seeded(6, 8)))
def placed_by_values(a, b):
    return a.masked_scatter(b > 0, b)


@case(lambda: (seeded(6, 8),))
def moved(a):
    return (
        torch.roll(a, (2, -3), (0, 1)),
        torch.roll(a, 5),
        a.flip(0, 1),
        torch.rot90(a),
        a.repeat(2, 3),
        a.repeat_interleave(3, 1),
        a.unfold(1, 3, 2),
        F.pad(a, (-1, 2)),
        torch.diag(a[0]),
        torch.diag_embed(a),
        a.take(torch.tensor([3, 40, 0])),
        torch.meshgrid(a[0], a[:, 0], indexing="ij")[1],
    )


@case(lambda: (seeded(2, 3, 6, 5), seeded(2, 3, 7)))
def padded(a, b):
    return (
        F.pad(a, (1, 2, 2, 1), mode="reflect"),
        F.pad(a, (1, 2, 2, 1), mode="replicate"),
        F.pad(a, (1, 2, 2, 1), mode="circular"),
        F.pad(b, (2, 3), mode="reflect"),
        F.pad(b, (2, 3), mode="replicate"),
    )


@case(lambda: (seeded(2, 3, 6, 5), seeded(2, 3, 7)))
def resized(a, b):
    return (
        F.interpolate(a, scale_factor=2),
        F.interpolate(a, size=(9, 4)),
        F.interpolate(b, scale_factor=3),
        F.interpolate(a, size=(3, 7), mode="nearest-exact"),
        F.interpolate(a, scale_factor=2, mode="bilinear", align_corners=False),
        F.pixel_shuffle(a[:, :, :4, :4].reshape(2, 12, 2, 2), 2),
    )


def with_infinities():
    a = seeded(2, 2, 7, 6)
    a[0, 0, :3, :3], a[0, 1, 2, 2], a[1, 0, 5, 5] = float("-inf"), float("nan"), float("nan")
    return a


@case(lambda: (with_infinities(), seeded(2, 2, 7)))
def pools(a, b):
    return (
        *F.max_pool2d(a, 3, 2, 1, return_indices=True),
        *F.max_pool2d(a, 2, return_indices=True),
        *F.max_pool2d(a, 2, 2, 1, 2, True, return_indices=True),
        F.avg_pool2d(a, 2),
        F.avg_pool2d(a, 3, 2, 1),
        F.avg_pool2d(a, 3, 2, 1, True),
        F.avg_pool2d(a, 3, 2, 1, True, False),
        F.avg_pool2d(a, 2, divisor_override=3),
        F.avg_pool1d(b, 3, 2),
        F.max_pool1d(b, 2),
        F.adaptive_avg_pool2d(a, (1, 1)),
        F.max_pool2d((b * 9).int()[None], 2),
    )


@case(lambda: (seeded(4), seeded(4)))
def counted(a, b):
    return (
        torch.arange(0, 1, 0.25) + a,
        torch.arange(4, dtype=torch.float16),
        torch.linspace(0, 1, 4) + b,
        torch.eye(4) * a,
        torch.arange(7, 3, -1),
    )


# --------------------------------------------------------------------------------------- Reductions


@case(lambda: (seeded(5, 37),), kernels=1)
def norms(a):
    vector = torch.linalg.vector_norm
    return (
        a.logsumexp(1),
        a.norm(dim=1),
        vector(a, 1, dim=1),
        vector(a, float("inf"), dim=1),
        vector(a, 3, dim=1),
        vector(a, 0, dim=1),
    )


def ties():
    a = (seeded(5, 37) * 2).round()
    a[1, 7], a[3, 20], a[3, 30] = float("nan"), float("nan"), float("nan")
    return a


@case(lambda: (ties(),), kernels=3)
def positions(a):
    return (
        a.argmax(1),
        a.argmin(1),
        *a.max(1),
        *a.min(1),
        a.argmax(),
        a.argmin(0),
        *(a > 0).max(1),
        *(a > 0).min(0),
        (a > 5).any(1),
        (a > -9).all(1),
        torch.aminmax(a, dim=1)[0],
        a.nansum(),
        a.nanmean(),
        torch.count_nonzero(a, 1),
    )


@case(lambda: (seeded(6, 12),), tolerance=1e-4)
def gradients_of_reductions(a):
    return (
        *with_gradient(lambda x: x.amax(1), a),
        *with_gradient(lambda x: x.std(1), a),
        *with_gradient(lambda x: x.logsumexp(1), a),
        *with_gradient(lambda x: x.norm(dim=1), a),
        *with_gradient(lambda x: x.softmax(1).square(), a),
        *with_gradient(lambda x: x.max(1)[0], a),
    )


@case(lambda: (seeded(6, 12), torch.tensor([1, 1, 4])), tolerance=1e-4)
def gradients_of_places(a, i):
    return (
        *with_gradient(lambda x: x[i], a),
        *with_gradient(lambda x: F.embedding(i, x, padding_idx=4), a),
        *with_gradient(lambda x: torch.gather(x, 0, i[:, None].expand(3, 12)), a),
        *with_gradient(lambda x: x.index_select(0, i), a),
    )


@case(lambda: (seeded(40),), tolerance=1e-4)
def gradients_of_activations(a):
    functions = (
        F.gelu,
        F.silu,
        F.mish,
        F.softplus,
        F.elu,
        F.hardswish,
        F.logsigmoid,
        F.leaky_relu,
        torch.sigmoid,
        torch.tanh,
    )
    return tuple(part for function in functions for part in with_gradient(function, a))


@case(lambda: (seeded(2, 4, 6, 6),), tolerance=1e-4)
def gradients_of_windows(a):
    return (
        *with_gradient(lambda x: F.max_pool2d(x, 2), a),
        *with_gradient(lambda x: F.pad(x, (1, 2, 2, 1), mode="reflect"), a),
        *with_gradient(lambda x: F.group_norm(x, 2, torch.ones(4), torch.zeros(4)).square(), a),
    )


@case(lambda: (with_infinities(), seeded(2, 3, 9, 8)))
def gradients_of_maxima(a, b):
    """Of windows that overlap, leave gaps, reach over the edge or are dilated; ties, NaN, both memory
    formats.
    """
    pools = ((3, 2, 1), (3, 1, 1), ((2, 3),), (2, 3, 1, 1, True), (3, 1, 1, 2), ((7, 3),))
    last = b.to(memory_format=torch.channels_last)
    return (
        *(
            part
            for given in pools
            for part in with_gradient(lambda x, given=given: F.max_pool2d(x, *given).square(), a)
        ),
        *with_gradient(lambda x: F.max_pool2d(x, 3, 2, 1).square(), a[0].double()),
        *with_gradient(lambda x: F.max_pool2d(x, 3, 2, 1).square(), (b * 2).round()),
        *with_gradient(lambda x: F.max_pool2d(x, 3, 2, 1).square(), last),
    )


@case(lambda: (seeded(2, 2, 7, 6), seeded(2, 2, 5)), tolerance=1e-4)
def gradients_of_averages(a, b):
    averages = (
        (2,),
        (3, 2, 1),
        (3, 2, 1, True),
        (3, 2, 1, True, False),
        (3, 2, 1, False, False),
        (2, 3),
        (2, 2, 0, False, True, 3),
        ((3, 2), (1, 2)),
    )
    return (
        *(
            part
            for given in averages
            for part in with_gradient(lambda x, given=given: F.avg_pool2d(x, *given).square(), a)
        ),
        *with_gradient(lambda x: F.interpolate(x, scale_factor=2).square(), a),
        *with_gradient(lambda x: F.interpolate(x, scale_factor=3).square(), b),
        *with_gradient(lambda x: F.avg_pool1d(x, 3, 2, 1), b),
    )


@case(lambda: (seeded(6, 40), seeded(40)), tolerance=1e-4)
def gradients_of_rms_norm(a, w):
    return with_gradient(lambda x, weight: F.rms_norm(x, (40,), weight), a, w)


@case(
    lambda: (seeded(8, 11), torch.tensor([1, 0, 10, 3, -100, 4, 2, 7]), positive(11)),
    tolerance=1e-4,
)
def losses(a, t, w):
    return (
        *with_gradient(lambda x: F.nll_loss(x.log_softmax(-1), t, w), a),
        *with_gradient(lambda x: F.cross_entropy(x, t, label_smoothing=0.1), a),
        F.smooth_l1_loss(a, a * 2),
        F.binary_cross_entropy_with_logits(a, a.sigmoid()),
        F.kl_div(a, a.exp()),
        F.huber_loss(a, a * 3),
        F.cosine_similarity(a, a + 1),
    )


# ------------------------------------------------------------------------------------------- Models


@case(lambda: (seeded(2, 4, 6), seeded(6), seeded(6)), kernels=1)
def interleaved_rotary(x, cos, sin):
    even, odd = x[..., ::2], x[..., 1::2]
    turned = torch.stack([-odd, even], -1).flatten(-2)
    return x * cos + turned * sin


@case(lambda: (seeded(2, 4, 6), seeded(4, 3)), fallbacks=4)
def complex_rotary(x, angles):
    turned = torch.view_as_complex(x.reshape(2, 4, 3, 2)) * torch.polar(
        torch.ones_like(angles), angles
    )
    return torch.view_as_real(turned).flatten(2)


@case(lambda: (seeded(1), seeded(1), seeded(1)), kernels=1)
def a_few_numbers(a, b, c):
    """Parts of a list by their places, one of which is beyond it; sums and extremes of it."""
    few = torch.cat([a, b * 2, c])
    return F.pad(few, (1, 1))[4] + few[1], few.sum(), few.amax(0, keepdim=True), few.amin()


@case(lambda: (seeded(20), seeded(7, 3), positive(20), positive(7, 3)))
def lists(a, b, c, d):
    one, other = [a, b], [c, d]
    return (
        *torch._foreach_add(one, other, alpha=2),
        *torch._foreach_mul(one, 0.5),
        *torch._foreach_addcmul(one, other, other, 0.3),
        *torch._foreach_addcdiv(one, other, other, [0.1, 0.2]),
        *torch._foreach_sqrt(other),
        *torch._foreach_lerp(one, other, 0.1),
        *torch._foreach_maximum(one, 0.25),
        *torch._foreach_div(one, torch.tensor(2.0)),
        *torch._foreach_pow(2.0, one),
        *torch._foreach_norm(one),
        *torch._foreach_clamp_min(one, other),
        *torch._foreach_addcmul(one, one, other, torch.tensor([0.5, 2.0])),
    )


def adam_state():
    parameters, gradients, means = ([seeded(20), seeded(7, 3)] for _ in range(3))
    return (
        *parameters,
        *gradients,
        *means,
        positive(20),
        positive(7, 3),
        torch.tensor(3.0),
        torch.tensor(5.0),
    )


def stepped(step, given, **options):
    parameters, gradients, means, squares, steps = (
        [given[n], given[n + 1]] for n in range(0, 10, 2)
    )
    largest = [square * 2 for square in squares]
    step(
        parameters,
        gradients,
        means,
        squares,
        largest,
        steps,
        lr=1e-2,
        beta1=0.9,
        beta2=0.99,
        eps=1e-8,
        amsgrad=True,
        **options,
    )
    return largest[0]


@case(adam_state, tolerance=1e-5, kernels=1)
def fused_adamw(*given):
    return stepped(torch._fused_adamw_, given, weight_decay=0.01, maximize=False)


@case(adam_state, tolerance=1e-5, kernels=1)
def fused_adam(*given):
    return stepped(torch._fused_adam_, given, weight_decay=0.1, maximize=True)


@case(lambda: (seeded(4, 8), seeded(4, 8) > 0))
def kept_by_a_mask(a, mask):
    """What goes back through a dropout, and what an evaluation keeps."""
    return torch.ops.aten.native_dropout_backward(a, mask, 1.25), F.dropout(a, 0.5, training=False)
