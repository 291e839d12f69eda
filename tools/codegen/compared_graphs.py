# SPDX-License-Identifier: Apache-2.0
"""`GRAPHS`: functions of tensors, as models have them, with inputs; `counts` generates kernels
for each, by us and by Inductor.

An input is a tensor without values, at the size of a model; `filled` gives values to such inputs,
for those who compute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Make = Callable[[], tuple[torch.Tensor, ...]]
GRAPHS: dict[str, tuple[Callable[..., Any], Make]] = {}
#: Graphs whose sizes may change from call to call; `bench` times them at those of the example.
CHANGING = frozenset({"changing_softmax", "changing_layer_norm", "changing_variances"})
#: Graphs that change their inputs: steps of optimizers.
STEPS = frozenset({"adamw", "adamw_list"})
#: Graphs that both sides tune as by `max-autotune`.
TUNED = frozenset(
    {
        *("few_long_sums", "few_long_softmax", "few_long_variances"),
        *("tiles_transposed", "tiles_scaled_rows", "tiles_shifted_long_rows"),
    }
)
#: Graphs of which both sides measure what to fuse.
MEASURED = frozenset({"measured_directions", "measured_bias_gradient", "measured_list"})
# A list of tensors of mixed sizes, as the parameters of a small model.
_LIST = ((256, 1024), (1024,), (1024, 512), (512,), (300, 70)) * 12


def graph(
    *shapes: tuple[int, ...] | torch.Tensor, dtype: torch.dtype = torch.float32
) -> Callable[[Any], Any]:
    """Add a function with inputs of these shapes; a tensor stands for itself."""

    def make() -> tuple[torch.Tensor, ...]:
        return tuple(
            item if isinstance(item, torch.Tensor) else torch.empty(item, dtype=dtype)
            for item in shapes
        )

    def add(function: Any) -> Any:
        GRAPHS[function.__name__] = (function, make)
        return function

    return add


def gradients(
    function: Callable[..., torch.Tensor], *inputs: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return the result of a function and the gradients of its inputs, the last input being the
    gradient of the result.
    """
    *given, upstream = inputs
    result, backward = torch.func.vjp(function, *given)
    return (result, *backward(upstream))


def indices(count: int, below: int) -> torch.Tensor:
    """Return valid indices; what they are does not matter."""
    return torch.arange(count) % below


def filled(name: str, device: str, seed: int = 0) -> list[torch.Tensor]:
    """Return inputs of a graph with numbers in them, on a device: integers are those that are
    given, or small.
    """
    generator = torch.Generator(device).manual_seed(seed)
    found = []
    for given in GRAPHS[name][1]():
        if given.dtype.is_floating_point:
            numbers = torch.randn(
                given.shape, generator=generator, device=device, dtype=torch.float32
            ).to(given.dtype)
            # Second moments are not negative.
            found.append(numbers.abs() if name in STEPS else numbers)
        elif given.dtype is torch.int64:
            found.append(given.to(device))
        else:
            found.append(
                torch.randint(
                    -100, 100, given.shape, generator=generator, device=device, dtype=given.dtype
                )
            )
    return found


# ---------------------------------------------------------------------------------------- Pointwise


@graph((4096, 4096), (4096, 4096))
def chain(a: Tensor, b: Tensor) -> Any:
    return torch.tanh(a * b + 1).relu() - b.sigmoid()


@graph((1000, 3001), (3001,))
def chain_uneven(a: Tensor, b: Tensor) -> Any:
    return (a + b).abs().sqrt() * 2, a - b


@graph((4096, 4096), (4096,), dtype=torch.bfloat16)
def bias_gelu(a: Tensor, b: Tensor) -> Any:
    return F.gelu(a + b)


@graph((4096, 4096), (4096,), dtype=torch.bfloat16)
def bias_gelu_tanh(a: Tensor, b: Tensor) -> Any:
    return F.gelu(a + b, approximate="tanh")


@graph((4096, 11008), (4096, 11008), dtype=torch.bfloat16)
def swiglu(a: Tensor, b: Tensor) -> Any:
    return F.silu(a) * b


@graph((4096, 4096), dtype=torch.float16)
def geglu_halves(a: Tensor) -> Any:
    return F.glu(a) + F.gelu(a[:, :2048]) * a[:, 2048:]


@graph((64, 128, 512), (128, 1), (512,))
def broadcasts(a: Tensor, b: Tensor, c: Tensor) -> Any:
    return torch.where(a > b, a * c, b - c), (a + c).clamp(-1, 1)


@graph((2048, 2048), (2048, 2048))
def transposed_sum(a: Tensor, b: Tensor) -> Any:
    return a + b.t()


@graph((32, 128, 64, 64))
def channels_moved(a: Tensor) -> Any:
    return a.permute(0, 2, 3, 1).contiguous() * 2


@graph((8, 16, 1024, 64))
def heads_merged(a: Tensor) -> Any:
    return a.transpose(1, 2).reshape(8, 1024, 1024) + 1


@graph((2048, 512), (1024, 512), (512, 512))
def joined(a: Tensor, b: Tensor, c: Tensor) -> Any:
    return torch.cat([a, b * 2, c.relu()]) + 1


@graph((64, 3, 100, 100))
def padded(a: Tensor) -> Any:
    return F.pad(a, (1, 1, 2, 2), value=1.0) * 3


@graph((1 << 20,), dtype=torch.float64)
def doubles(a: Tensor) -> Any:
    return a.exp().log1p(), a.round()


@graph((4096, 1024), dtype=torch.bfloat16)
def to_float8(a: Tensor) -> Any:
    return a.to(torch.float8_e4m3fn), a.float().abs()


@graph((1 << 20,), dtype=torch.int32)
def integers(a: Tensor) -> Any:
    return a // 3 + (a % 7), (a > 5) & (a != 9)


@graph(indices(8192, 50257), (50257, 768), (8192, 768))
def embedding_sum(i: Tensor, w: Tensor, p: Tensor) -> Any:
    return F.embedding(i, w) + p


# --------------------------------------------------------------------------------------- Reductions


@graph((4096, 512))
def rows_held(a: Tensor) -> Any:
    return a.sum(1), a.amax(1), a.mean(1)


@graph((4096, 8192))
def rows_looped(a: Tensor) -> Any:
    return a.sum(1), a.amax(1)


@graph((4096, 4096))
def columns(a: Tensor) -> Any:
    return a.sum(0), a.amax(0)


@graph((64, 128, 1024))
def mixed_directions(a: Tensor) -> Any:
    return a.sum(2), a.sum(0)


@graph((1 << 24,))
def everything(a: Tensor) -> Any:
    return a.sum(), a.amax()


@graph((4096, 2048))
def variances(a: Tensor) -> Any:
    return torch.var_mean(a, 1)


@graph((4096, 1000))
def places(a: Tensor) -> Any:
    return a.argmax(1), a.amax(1)


@graph((4096, 4096), (4096, 4096), dtype=torch.bfloat16)
def mean_squares(a: Tensor, b: Tensor) -> Any:
    return ((a - b).float() ** 2).mean()


# -------------------------------------------------------------------------- What models are made of


@graph((4096, 1024), dtype=torch.bfloat16)
def softmax_held(a: Tensor) -> Any:
    return torch.softmax(a, -1)


@graph((4, 4 << 20))
def few_long_sums(a: Tensor) -> Any:
    return a.sum(1)


@graph((2, 1 << 20))
def few_long_softmax(a: Tensor) -> Any:
    return torch.softmax(a, -1)


@graph((8, 500_000))
def few_long_variances(a: Tensor) -> Any:
    return a.var(1)


@graph((4096, 50257))
def softmax_looped(a: Tensor) -> Any:
    return torch.softmax(a, -1)


@graph((4096, 1000))
def log_softmax(a: Tensor) -> Any:
    return torch.log_softmax(a, -1)


@graph((4096, 1024), (4096, 1024))
def softmax_backward(a: Tensor, g: Tensor) -> Any:
    return gradients(lambda x: torch.softmax(x, -1), a, g)


@graph((4096, 1000), (4096, 1000))
def log_softmax_backward(a: Tensor, g: Tensor) -> Any:
    return gradients(lambda x: torch.log_softmax(x, -1), a, g)


@graph((4096, 32000), indices(4096, 32000))
def cross_entropy(a: Tensor, i: Tensor) -> Any:
    return F.cross_entropy(a, i)


@graph((4096, 32000), indices(4096, 32000), ())
def cross_entropy_backward(a: Tensor, i: Tensor, g: Tensor) -> Any:
    return gradients(lambda x: F.cross_entropy(x, i), a, g)


@graph((4096, 1024), (1024,), (1024,))
def layer_norm(a: Tensor, w: Tensor, b: Tensor) -> Any:
    return F.layer_norm(a, (1024,), w, b)


@graph((4096, 4096), (4096,), (4096,))
def layer_norm_looped(a: Tensor, w: Tensor, b: Tensor) -> Any:
    return F.layer_norm(a, (4096,), w, b)


@graph((4096, 1000))
def changing_softmax(a: Tensor) -> Any:
    return torch.softmax(a, -1)


@graph((4096, 768), (768,), (768,))
def changing_layer_norm(a: Tensor, w: Tensor, b: Tensor) -> Any:
    return F.layer_norm(a, a.shape[-1:], w, b)


@graph((4096, 3000))
def changing_variances(a: Tensor) -> Any:
    return torch.var_mean(a, -1)


@graph((4096, 1024), (1024,), (1024,), (4096, 1024))
def layer_norm_backward(a: Tensor, w: Tensor, b: Tensor, g: Tensor) -> Any:
    return gradients(lambda x, y, z: F.layer_norm(x, (1024,), y, z), a, w, b, g)


@graph((4096, 1024), (1024,), dtype=torch.bfloat16)
def rms_norm(a: Tensor, w: Tensor) -> Any:
    return F.rms_norm(a, (1024,), w)


@graph((4096, 1024), (4096, 1024), (1024,), dtype=torch.bfloat16)
def residual_rms_norm(a: Tensor, r: Tensor, w: Tensor) -> Any:
    total = a + r
    return total, F.rms_norm(total, (1024,), w)


@graph((4096, 1024), (1024,), (4096, 1024))
def rms_norm_backward(a: Tensor, w: Tensor, g: Tensor) -> Any:
    return gradients(lambda x, y: F.rms_norm(x, (1024,), y), a, w, g)


@graph((32768, 1024), (1024,), (1024,), (32768, 1024), dtype=torch.bfloat16)
def layer_norm_backward_rows(a: Tensor, w: Tensor, b: Tensor, g: Tensor) -> Any:
    return gradients(lambda x, y, z: F.layer_norm(x, (1024,), y, z), a, w, b, g)


@graph((16384, 4096), (4096,), (16384, 4096), dtype=torch.bfloat16)
def rms_norm_backward_rows(a: Tensor, w: Tensor, g: Tensor) -> Any:
    return gradients(lambda x, y: F.rms_norm(x, (4096,), y), a, w, g)


@graph((16384, 768), (16384, 768))
def both_directions(a: Tensor, b: Tensor) -> Any:
    return (a * b).sum(1), a.amax(1), (a * b).sum(0), a.amax(0)


@graph((2048, 768), (2048, 768))
def measured_directions(a: Tensor, b: Tensor) -> Any:
    return (a * b).sum(1), (a * b).sum(0)


@graph((8192, 1024), (8192, 1024), (1024,))
def measured_bias_gradient(a: Tensor, upstream: Tensor, bias: Tensor) -> Any:
    return gradients(lambda x, y: F.gelu(x + y), a, bias, upstream)[1:]


@graph((32, 128, 56, 56), (128,), (128,), (32, 128, 56, 56))
def batch_norm_backward(a: Tensor, w: Tensor, b: Tensor, g: Tensor) -> Any:
    return gradients(lambda x, y, z: F.batch_norm(x, None, None, y, z, training=True), a, w, b, g)


@graph((32, 64, 32, 32), (64,), (64,))
def group_norm(a: Tensor, w: Tensor, b: Tensor) -> Any:
    return F.group_norm(a, 8, w, b)


@graph((32, 64, 32, 32), (64,), (64,), (32, 64, 32, 32))
def group_norm_backward(a: Tensor, w: Tensor, b: Tensor, g: Tensor) -> Any:
    return gradients(lambda x, y, z: F.group_norm(x, 8, y, z), a, w, b, g)


@graph((4096, 4096), (4096, 4096), dtype=torch.bfloat16)
def gelu_backward(a: Tensor, g: Tensor) -> Any:
    return gradients(F.gelu, a, g)


@graph((4096, 4096), (4096, 4096), (4096, 4096), dtype=torch.bfloat16)
def swiglu_backward(a: Tensor, b: Tensor, g: Tensor) -> Any:
    return gradients(lambda x, y: F.silu(x) * y, a, b, g)


@graph((4096, 1024), (4096, 1024))
def dropout(a: Tensor, r: Tensor) -> Any:
    return F.dropout(a, 0.1) + r


@graph((4, 32, 1024, 128), (1024, 128), (1024, 128), dtype=torch.bfloat16)
def rotary(q: Tensor, cos: Tensor, sin: Tensor) -> Any:
    turned = torch.cat([-q[..., 64:], q[..., :64]], -1)
    return q * cos + turned * sin


@graph((4096, 1024), (4096, 1024), (4096, 1024), (4096, 1024))
def adamw(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> Any:
    p.mul_(1 - 0.01 * 0.001)
    m.lerp_(g, 0.1)
    v.mul_(0.999).addcmul_(g, g, value=0.001)
    p.addcdiv_(m, (v / 0.002).sqrt() + 1e-8, value=-0.001)
    return p


@graph(*_LIST * 4)
def adamw_list(*given: Tensor) -> Any:
    p, g, m, v = (given[n : n + len(_LIST)] for n in range(0, len(given), len(_LIST)))
    torch._foreach_mul_(p, 1 - 0.01 * 0.001)  # what torch's optimizers call
    torch._foreach_lerp_(m, g, 0.1)
    torch._foreach_mul_(v, 0.999)
    torch._foreach_addcmul_(v, g, g, 0.001)
    roots = torch._foreach_sqrt(torch._foreach_div(v, 0.002))  # noqa: SLF001
    torch._foreach_addcdiv_(p, m, torch._foreach_add(roots, 1e-8), -0.001)  # noqa: SLF001
    return p


@graph((1024, 1024), (1024,), (4096, 1024), (300,))
def clipped_gradients(*given: Tensor) -> Any:
    total = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(given)))  # noqa: SLF001
    scale = (1.0 / (total + 1e-6)).clamp(max=1.0)
    return total, *torch._foreach_mul(given, scale)  # noqa: SLF001


@graph(*_LIST)
def norms_of_list(*given: Tensor) -> Any:
    return torch._foreach_norm(given)  # noqa: SLF001


@graph(*_LIST)
def measured_list(*given: Tensor) -> Any:
    return torch._foreach_mul(torch._foreach_sigmoid(given), 3.0)  # noqa: SLF001


@graph((4, 16, 512, 512), (4, 1, 1, 512))
def masked_scores(s: Tensor, m: Tensor) -> Any:
    causal = torch.ones(512, 512, dtype=torch.bool, device=s.device).tril()
    return torch.softmax((s / 8.0 + m).masked_fill(~causal, float("-inf")), -1)


@graph((16384, 64))
def router(a: Tensor) -> Any:
    weights, experts = torch.softmax(a, -1).topk(8, -1)
    return weights / weights.sum(-1, keepdim=True), experts


@graph((32, 50257))
def sampler(a: Tensor) -> Any:
    logits, tokens = (a / 0.7).topk(50, -1)
    return torch.softmax(logits, -1), tokens


@graph((4096, 512))
def kth_value(a: Tensor) -> Any:
    return a - a.kthvalue(400, -1, keepdim=True).values


@graph((4096, 1024))
def argsort(a: Tensor) -> Any:
    return a.argsort(dim=-1, stable=True)


@graph((4096, 4096), (4096, 4096), dtype=torch.bfloat16)
def tiles_transposed(a: Tensor, b: Tensor) -> Any:
    return a + b.t()


@graph((16384, 1024), dtype=torch.bfloat16)
def tiles_scaled_rows(a: Tensor) -> Any:
    scale = a.abs().amax(-1, keepdim=True).float() / 127.0
    return (a / scale).to(torch.bfloat16), scale


@graph((4096, 16384))
def tiles_shifted_long_rows(a: Tensor) -> Any:
    return a - a.amax(-1, keepdim=True), a.argmax(-1)


# Scans: along memory, across it, and of few long rows.


@graph((64, 4096, 128), (64, 4096, 128))
def gated_cumsum(a: Tensor, gate: Tensor) -> Any:
    return (a * torch.sigmoid(gate)).cumsum(1)


@graph((8192, 2048))
def running_sums(a: Tensor) -> Any:
    return a.cumsum(-1) / a.shape[-1]


@graph((4, 1 << 20))
def few_long_scans(a: Tensor) -> Any:
    return torch.logcumsumexp(a, -1)


# What models have that took far longer than Inductor's kernels once.


@graph((4096, 8192), (4096, 8192))
def kl_divergence(a: Tensor, b: Tensor) -> Any:
    ours, theirs = F.log_softmax(a, -1), F.log_softmax(b, -1)
    return F.kl_div(ours, theirs, log_target=True, reduction="batchmean")


@graph((64, 512, 768), (64, 512))
def masked_mean(states: Tensor, scores: Tensor) -> Any:
    mask = (scores > 0).unsqueeze(-1).to(states.dtype)
    return (states * mask).sum(1) / mask.sum(1).clamp(min=1e-9)


@graph((8, 64, 64, 64))
def bilinear(a: Tensor) -> Any:
    return F.interpolate(a, scale_factor=2.0, mode="bilinear", align_corners=False)


@graph((16, 64, 56, 56))
def rolled_and_enlarged(a: Tensor) -> Any:
    return F.interpolate(torch.roll(a, (5, -7), (2, 3)), scale_factor=2.0, mode="nearest") + 1


@graph((16, 56, 56, 96))
def shifted_windows(a: Tensor) -> Any:
    rolled = torch.roll(a, (-3, -3), (1, 2))
    windows = rolled.view(16, 8, 7, 8, 7, 96).permute(0, 1, 3, 2, 4, 5)
    return windows.reshape(-1, 49, 96) * 2


@graph((16, 64, 64, 64), (64, 64, 3, 3), (64,), (64,))
def group_norm_of_convolution(a: Tensor, kernel: Tensor, weight: Tensor, bias: Tensor) -> Any:
    return F.silu(F.group_norm(F.conv2d(a, kernel, padding=1), 8, weight, bias))


@graph((16, 2048, 16), (16, 2048), (16, 2048), (16, 16), (16, 16), (2048, 16))
def state_space_step(
    state: Tensor, x: Tensor, step: Tensor, b: Tensor, c: Tensor, decay: Tensor
) -> Any:
    step = F.softplus(step).unsqueeze(-1)
    new = state * torch.exp(-step * torch.exp(decay)) + step * b.unsqueeze(1) * x.unsqueeze(-1)
    return new, (new * c.unsqueeze(1)).sum(-1) + x
