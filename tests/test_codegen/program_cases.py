# SPDX-License-Identifier: Apache-2.0
"""Functions of tensors that programs are generated for, each with inputs, and whether it may call
operators as they are.
"""

import torch
import torch.nn.functional as F

CASES = {}


def case(make, *, fallbacks=0, kernels=None, tolerance=2e-5):
    """Add a function; `make` returns its inputs."""

    def add(function):
        CASES[function.__name__] = (function, make, fallbacks, kernels, tolerance)
        return function

    return add


def seeded(*sizes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(sizes) + len(sizes))
    made = torch.randn(sizes, generator=generator)
    if dtype is torch.bool:
        return made > 0
    return (made * 10).to(dtype) if not dtype.is_floating_point else made.to(dtype)


# ---------------------------------------------------------------------------------------- Pointwise


@case(lambda: (seeded(33, 65), seeded(65, 33)), kernels=1)
def transposed(a, b):
    return (a * 2 + b.t()).relu(), torch.sigmoid(a)


@case(lambda: (seeded(16, 17, 18), seeded(17, 18, 16), seeded(18, 16, 17)), kernels=1)
def turned(a, b, c):
    return a + b.permute(2, 0, 1) + c.permute(1, 2, 0)


@case(lambda: (seeded(20), seeded(20, 70)), kernels=1)
def running_mean(m, x):
    m.mul_(0.9).add_(x.mean(1))
    return x - m[:, None]


@case(lambda: (seeded(7, 1, 5), seeded(3, 5)), kernels=1)
def broadcast(a, b):
    return torch.where(a > b, a, b) * 3 - a


@case(lambda: (seeded(12, 8), seeded(12, 8)), kernels=1)
def gelu_gate(a, b):
    return F.gelu(a) * b + F.silu(b)


@case(
    lambda: (seeded(40, dtype=torch.float16), seeded(40, dtype=torch.bfloat16)),
    kernels=1,
    tolerance=2e-2,
)
def halves(a, b):
    return a.float() * b, (a + 1).to(torch.bfloat16) - b


@case(lambda: (seeded(30, dtype=torch.int64), seeded(30, dtype=torch.int32)), kernels=1)
def integers(a, b):
    return a // 3 + b, a % 7, (a > b) & (b != 2), a.float() / 2


@case(lambda: (seeded(10, dtype=torch.bool), seeded(10)), kernels=1)
def bools(a, b):
    return ~a, torch.where(a, b, -b), a.float() + b.clamp(-0.5, 0.5)


@case(lambda: (seeded(1),), kernels=1)
def single(a):
    return a.exp() - 1


@case(lambda: (seeded(0, 3),), kernels=0)
def empty(a):
    return a + 1


@case(lambda: (seeded(),), kernels=1)
def scalar(a):
    return torch.tanh(a) * 2


# -------------------------------------------------------------------------------------------- Views


@case(lambda: (seeded(4, 6, 8),))
def views(a):
    return (
        a.permute(2, 0, 1).reshape(8, 24) + 1,
        a[:, 1:5:2, 3],
        a.flip(1) * 2,
        a.view(2, 2, 48).sum(-1),
    )


@case(lambda: (seeded(4, 5), seeded(3, 5)))
def joined(a, b):
    both = torch.cat([a, b, a * 2], 0)
    return both + 1, F.pad(a, (1, 2, 0, 1), value=3.0), torch.stack([a, a.exp()], 1)


@case(lambda: (seeded(9, 5), torch.tensor([3, -1, 0, 8, 2])))
def chosen(a, i):
    return a[i] + 1, a.index_select(0, i.abs()), torch.gather(a, 0, i.abs().view(1, 5).expand(2, 5))


@case(lambda: (torch.tensor([[1, 2], [0, 6]]), seeded(7, 10)))
def embedded(i, w):
    return F.embedding(i, w) * 2


@case(lambda: (seeded(6, 4), torch.tensor([1, 3, 1]), seeded(3, 4)))
def put(a, i, v):
    return a.index_put([i], v, accumulate=True), a.index_put([torch.tensor([0, 5, 2])], v)


@case(lambda: (seeded(6, 4), torch.tensor([[1, 3, 1, 0]]), seeded(1, 4)))
def scattered(a, i, v):
    return a.scatter(0, i, v), a.scatter_add(0, i, v)


@case(lambda: (seeded(6, 4), torch.tensor([[1, 3, 1, 0], [2, 0, 5, 4]]), seeded(3, 5)))
def scattered_often(a, i, v):
    return a.scatter(0, i, v), a.scatter(0, i, 2.5)


@case(lambda: (seeded(6, 9), torch.tensor([[1], [8], [0], [4], [4], [2]])), kernels=1)
def one_hot_rows(a, i):
    """One element of each row is replaced, as in the gradient of a loss of classes: no memory is
    filled first.
    """
    return (
        torch.zeros_like(a).scatter(1, i, -1.0) * a,
        a.scatter(1, i, 3.0),
        a.to(torch.int32).scatter(1, i, i.int()),
    )


@case(lambda: (seeded(32, 6),), kernels=1)
def summed_and_flattened(a):
    return a.view(32, 2, 3, 1).sum(0).view(6)


# --------------------------------------------------------------------------------------- Reductions


@case(lambda: (seeded(5, 37),), kernels=1)
def sums(a):
    return (
        a.sum(1),
        a.amax(1),
        a.amin(1),
        a.mean(1),
        a.prod(1),
        (a > 2).any(1),
        (a > -9).all(1),
        a.argmax(1),
        a.argmin(1),
    )


@case(lambda: (seeded(3, 1500),), kernels=1)
def long_sums(a):
    return a.sum(1), a.amax(1), a.mean(1), (a > 2).any(1), a.argmax(1), a.argmin(1)


@case(lambda: (seeded(3, 1500),), kernels=1)
def looped_sums(a):
    return a.sum(1), (a - a.mean(1, keepdim=True)).abs().sum(1)


@case(lambda: (seeded(70, 12),), kernels=1)
def outer_sums(a):
    return a.sum(0), a.amax(0), a.var(0)


@case(lambda: (seeded(4, 5, 6),))
def all_sums(a):
    return a.sum(), a.sum((0, 2)), a.argmax(), a.max(1)


@case(lambda: (seeded(4, 33),), kernels=1)
def variances(a):
    return a.var(1), a.std(1, correction=0), torch.var_mean(a, 1)[1]


@case(lambda: (seeded(3, 1300),), kernels=1)
def long_variances(a):
    return a.var(1), a.mean(1)


@case(lambda: (seeded(2, 32768),), kernels=2, tolerance=2e-3)
def split_sum(a):
    return (a * a).sum(1)


@case(lambda: (seeded(300, 5),), kernels=2)
def split_variances(a):
    return torch.var_mean(a, 0)


@case(lambda: (seeded(257, 6), seeded(257, 6, dtype=torch.int64)), kernels=4)
def split_unevenly(a, i):
    return a.amax(0), a.amin(0), a.sum(0), i.amin(0), i.sum(0)


@case(lambda: (seeded(9, 20, dtype=torch.int64),), kernels=1)
def integer_sums(a):
    return a.sum(1), a.amax(1), a.prod(1), a.argmin(1), a.bool().sum(1)


@case(lambda: (seeded(9, 20, dtype=torch.bool),))
def bool_sums(a):
    return a.sum(1), a.amax(1), a.amin(1), a.any(), a.all(0), a.float().mean(1)


@case(lambda: (seeded(5, 33, dtype=torch.bool), seeded(2, 3, 9)))
def running_sums(mask, a):
    """Positions, as language models count them; across memory, of a view, in another dtype."""
    turned = a.transpose(0, 2).flip(0)
    return (
        mask.cumsum(1) * mask - 1,
        a.cumsum(1).exp(),
        a.cumprod(-1),
        turned.cumsum(0),
        a.cumsum(0, dtype=torch.float64).sum(2),
    )


@case(lambda: (seeded(5, 33), torch.tensor([[2, 3, 3, 1], [-5, -5, -7, -5]])))
def running_extremes(a, whole):
    """Of equal numbers the place of the last; NaN and infinities, and the least number there is."""
    odd = torch.where(a > 1.2, float("nan"), torch.where(a < -1, float("-inf"), a.round()))
    least = torch.full_like(whole, torch.iinfo(torch.int64).min)
    return (
        *odd.cummax(1),
        *odd.cummin(0),
        *whole.cummax(1),
        *least.cummax(-1),
        (a.exp() * 90).logcumsumexp(1),
        odd.bfloat16().logcumsumexp(0).relu(),
    )


@case(lambda: (seeded(1), seeded(2), seeded(3)), kernels=1)
def one_value_in_rows(a, b, c):
    spread = a.expand(3).unsqueeze(1)
    return (spread >= b).any(1), a.expand(3) != a, F.pad(c, (1, 0))[:3] + (spread * b).sum(1)


@case(lambda: (seeded(), seeded(0, 3)), kernels=1)
def variances_of_little(a, b):
    return torch.var_mean(a), a.var(correction=0), b.var(0), b.mean(0)


# -------------------------------------------------------------------------- What models are made of


@case(lambda: (seeded(6, 50),), kernels=1)
def softmax(a):
    return torch.softmax(a, -1)


@case(lambda: (seeded(3, 1100),), kernels=1)
def long_softmax(a):
    return torch.softmax(a * 0.5, -1)


@case(
    lambda: (
        seeded(4, 1100).masked_fill(seeded(4, 1100) > 1, float("-inf")),
        torch.full((1, 1100), float("-inf")),
    ),
    kernels=1,
)
def long_softmax_of_infinities(a, b):
    both = torch.cat([a, b])
    return torch.softmax(both, -1), torch.exp(both - both.amax(-1, keepdim=True)).sum(-1)


@case(lambda: (seeded(3, 1300), torch.tensor([5, 1299, 0])))
def long_cross_entropy(a, t):
    return F.cross_entropy(a, t), torch.log_softmax(a, -1).amax(-1)


@case(lambda: (seeded(6, 50),), kernels=1)
def log_softmax(a):
    return torch.log_softmax(a, -1)


@case(lambda: (seeded(6, 40), seeded(40), seeded(40)), kernels=1)
def layer_norm(x, w, b):
    return F.layer_norm(x, (40,), w, b)


@case(lambda: (seeded(2, 1200), seeded(1200), seeded(1200)), kernels=1)
def long_layer_norm(x, w, b):
    return F.layer_norm(x, (1200,), w, b)


@case(lambda: (seeded(6, 40), seeded(40)), kernels=1)
def rms_norm(x, w):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w


@case(lambda: (seeded(6, 40), seeded(40), seeded(40), seeded(6, 40)), tolerance=1e-4)
def layer_norm_backward(x, w, b, g):
    _, backward = torch.func.vjp(lambda *given: F.layer_norm(given[0], (40,), *given[1:]), x, w, b)
    return backward(g)


@case(lambda: (seeded(8, 11), torch.tensor([1, 0, 10, 3, 4, 4, 2, 7])), tolerance=1e-4)
def cross_entropy(x, t):
    return F.cross_entropy(x, t)


@case(lambda: (seeded(2, 3, 10, 8), seeded(10, 8), seeded(10, 8)), kernels=1)
def rotary(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


@case(lambda: (seeded(50), seeded(50), seeded(50), seeded(50).abs()), kernels=1)
def adamw(p, g, m, v):
    m = m * 0.9 + g * 0.1
    v = v * 0.999 + g * g * 0.001
    return p - 1e-3 * (m / (v.sqrt() + 1e-8) + 0.01 * p), m, v


@case(lambda: (seeded(6, 6), seeded(6, 6)), kernels=1)
def causal(scores, bias):
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    return torch.softmax((scores + bias).masked_fill(~mask, float("-inf")), -1)


@case(lambda: (seeded(4, 8), seeded(8, 5), seeded(5)), fallbacks=1)
def linear(x, w, b):
    return torch.relu(x @ w + b)


@case(lambda: (seeded(4, 8), seeded(4, 8)), fallbacks=3)
def complex_parts(a, b):
    both = torch.complex(a, b)
    parts = torch.view_as_real(both)
    return parts * 2, both.abs() + parts.sum(-1)


@case(lambda: (seeded(4, 8), seeded(4, 8)), kernels=1)
def changed(x, y):
    x.add_(y)
    return x * 2


@case(lambda: (seeded(5, 7), seeded(4)), kernels=1)
def kept_and_padded(a, b):
    return a.sum(1) + F.pad(b, (1, 0), value=2.0), a * 2


@case(lambda: (seeded(2), seeded(1)), kernels=1)
def kept_and_one_for_all(a, b):
    b = b.unsqueeze(0).expand(3, 1)
    return (b >= a).any(1), b.ne(b)


@case(
    lambda: (seeded(6, 40, dtype=torch.bfloat16), seeded(40, dtype=torch.bfloat16)),
    kernels=1,
    tolerance=2e-2,
)
def half_rms_norm(a, w):
    """A decomposition of torch's that changes what it made."""
    return F.rms_norm(a, (40,), w)


@case(
    lambda: (
        seeded(4, 24, 3, 4).to(memory_format=torch.channels_last),
        seeded(24),
        seeded(4, 24, 3, 4).to(memory_format=torch.channels_last),
    ),
    kernels=1,
)
def batch_norm_of_few_pixels(x, scale, upstream):
    """Reductions across memory, and what is computed of their results for each element."""

    def normed(x, scale):
        return F.relu(F.batch_norm(x, None, None, scale, training=True))

    found, backward = torch.func.vjp(normed, x, scale)
    return found, *backward(upstream)


@case(
    lambda: (seeded(6, 4), seeded(5, 4), seeded(5), seeded(1), seeded(6, 5)), fallbacks=3, kernels=1
)
def biases(x, w, row, number, whole):
    """What is added to a product, in each form that torch spreads over it."""
    return [torch.addmm(bias, x, w.t()).tanh() for bias in (row, number, whole)]


@case(
    lambda: (
        seeded(9, 3),
        seeded(6, 5, dtype=torch.int64) % 9,
        seeded(4, 3, 6, 5),
        seeded(4, 3, 6, 5),
    ),
    kernels=2,
)
def bias_of_positions(table, places, one, other):
    """The gradient of a table whose rows two layers add to each score, of all batches."""

    def biased(table):
        bias = F.embedding(places.abs(), table).permute(2, 0, 1)
        return bias.expand_as(one), bias.expand_as(other)

    return torch.func.vjp(biased, table)[1]((one, other))
