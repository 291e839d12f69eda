# SPDX-License-Identifier: Apache-2.0
"""Runs functions by `generate` and by torch.compile beside eager torch, and prints for each what
differs: numbers, dtype, strides, aliases.
"""

import copy
import json
import os
import sys
from functools import partial

os.environ["XDG_CACHE_HOME"] = sys.argv[1]

import torch
from torch.utils._pytree import tree_leaves

import bundler.codegen
from bundler.codegen.torch_backend import triton_bundler

F = torch.nn.functional


def added_to(x):
    x.add_(1)
    return x.view(-1), x * 2


def reversed_in_place(x):
    x.copy_(x.flip(0))
    return x.sum()


def swapped(x, y):
    old = x.clone()
    x.copy_(y)
    y.copy_(old * 2)
    return x + y


def products(x, y):
    z = (x * 2).t()
    return z @ y, (x + 1).t() @ (y - 1), (x * y.sum()).expand(3, 6, 8).transpose(1, 2) @ y[:6]


def attention(x):
    q, k, v = (x * 1.5).chunk(3, -1)
    q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in (q, k, v))
    # On the CPU torch's rule for fake tensors has other strides than its kernel.
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).contiguous()


def reused(x, y):
    a = torch.relu(x + 1)
    b = a.reshape(12, 4) * 2
    return b @ y


def reused_behind_a_view(x, y):
    # The results of both called views lie in the memory of `a`, which is read last.
    a = x * 2
    seen = torch.view_as_real(torch.view_as_complex(a))
    return a.view(6, 8) + (seen + 1).view(6, 8) @ y


def reused_by_an_earlier_pass(x, y):
    # The row is read again for its second result, behind the loop that stores the first one.
    a = x @ y
    b = a * 2
    return b, a - b.sum(-1, keepdim=True)


def reused_by_another_type(x, y):
    return ((x @ y) * 3).to(torch.int32), (y @ x).bfloat16()


def reused_by_a_larger_tensor(x, y):
    a = F.pad((x @ y).view(-1), (0, 300))
    return a, (y @ x).view(-1)[:12] * 2


def parts_and_their_extremes(x):
    # The largest of one number is that number, in memory of its own.
    y = x.exp()
    part = y[1, 2]
    return part, part.amax(()), y


def changed_and_scaled(x):
    x.mul_(2)
    return x[1:], x + 1


def scaled_by_a_constant(x):
    return x * NEGATIVE[:6]


def conjugates(z):
    other = z.conj()
    product = torch.mm(other.imag.view(2, 3), z.real.view(3, 2))
    return other, other.imag, other.imag * 2, other.real + 1, z.real * other.imag, product


def conjugate_of_a_part(z):
    # No kernel reads it, and an operator sees it in other sizes.
    return torch.mm(z.conj().imag.view(2, 3), z.real.view(3, 2))


def contiguous(x):
    return x.t().contiguous(), x.t().clone(memory_format=torch.contiguous_format).view(-1)


def channels_last(x):
    y = x.relu().contiguous(memory_format=torch.channels_last)
    return y, F.conv2d(y, torch.ones(4, 3, 3, 3)), y.mean((2, 3), keepdim=True)


def slices(x):
    y = x.exp()
    return y[:, 1:], y[::2].t(), y, y.flatten()[3:]


def seen_before_a_change(x, y):
    product = (x * 2) @ y
    # The view is a called operator's, so that who reads it reads the input.
    length = torch.view_as_complex(x.unflatten(-1, (4, 2))).abs()
    x.mul_(3)
    return product, length


def clones(x):
    y = x.clone()
    return y.view(y.shape), y.sum(0), x.sum(0), x.detach(), x.sum(0).clone()


def changed_and_seen(x):
    x.add_(1)
    x *= 2
    return x[1:], x.t(), x


def assigned(x):
    x[x > 0] = 0.5
    x[1] = 2
    x[:, [0, 2]] += 1
    return x, x[2:]


def seen_and_changed(x):
    row = x[1]
    row.mul_(2)
    x.clamp_(-1, 1)
    return row, x


def written_diagonals(x, y):
    return (
        torch.diagonal_scatter(x, y),
        torch.diagonal_scatter(x.t(), y, 0),
        x.select_scatter(y, 1, 2),
    )


def resized(x, y):
    z = y.clone()
    return x.clone().resize_as_(y), z.resize_(z.shape), x.resize_(tuple(x.shape)).mul_(2)


def unpooled(x):
    places = torch.arange(2 * 3 * 4 * 2).view(2, 2, 4, 3).permute(0, 1, 3, 2) % 12
    return F.max_unpool2d(x, places, 2), F.max_unpool2d(x.contiguous(), places, 2)


def convolved(x, weight, second):
    """Results of a convolution, and what operators and views make of them: all lie as eager's."""
    y = F.conv2d(x, weight, padding=1)
    z = (y * 2).relu()
    rows = z.flatten(2)
    found = F.conv2d(z, second)
    a = found.as_strided((2, 3), (5, 1), 4)
    parts = (y.permute(0, 2, 3, 1), z[:, 1:3], z.sum((2, 3)), found.flatten(1), found.argmax())
    return y, rows @ rows.transpose(1, 2), a * 1, *parts, found.view(torch.int32) + 1


def branches(x, weight, second):
    one, two = F.conv2d(x, weight, padding=1).chunk(2, 1)
    c = torch.cat([F.conv2d(one, second[:, :4]), two[..., 2:, 2:].relu()], 1)
    mean = c.mean((2, 3), keepdim=True)
    gates = F.conv2d(mean, second.flatten()[:169].view(13, 13, 1, 1))
    c = c * gates.sigmoid()
    large = F.interpolate(c, scale_factor=2)
    seen = torch.view_as_complex(large.unflatten(-1, (-1, 2)))
    pools = (
        seen,
        large.view(2, -1),
        F.avg_pool2d(large, 3, 1, 1),
        *F.max_pool2d(large, 2, return_indices=True),
    )
    attended = F.scaled_dot_product_attention(c, c.flip(0), c)
    return *pools, attended, F.pixel_shuffle(large[:, :8], 2), F.conv_transpose2d(one, second[:4])


def changed_between(x, weight, second):
    y = F.conv2d(x, weight, padding=1)
    x.mul_(2)
    z = F.conv2d(x, weight, padding=1) + y
    weight.add_(1)
    return F.conv2d(z, second), F.conv2d(x, weight), z.detach()


def of_one_channel(x, weight, second):
    y = F.conv2d(x[:, :1], weight[:, :1])
    return F.conv2d(y, second, groups=1), F.conv2d(y, weight[:, :1].repeat(2, 1, 1, 1), groups=8)


def of_pixels(x, weight, bias, other):
    """Windows of one pixel: of whole images, of what is computed, of parts, of one pixel alone;
    the last one leaves pixels out.
    """
    y = F.conv2d(x, weight, bias)
    z = F.conv2d((y * 2).relu(), other)
    part = F.conv2d(x[:, 8:, ::2, 1:], other[:, :8])
    gates = F.conv2d(x.amax((2, 3), keepdim=True), weight)
    seen = z.permute(0, 2, 3, 1), z.argmax(), y.flatten(2)[..., 3:], F.max_pool2d(z, 2)
    return y, z + y, part, gates.flatten(1), *seen, F.conv2d(F.conv2d(y, other), other, stride=2)


def of_whole_numbers(dtype):
    """Return what `of_pixels` is given, so that all sums are exact."""
    shapes = ((2, 16, 6, 4), (16, 16, 1, 1), (16,), (16, 16, 1, 1))
    return [small(shape, seed=n).sign().to(dtype) for n, shape in enumerate(shapes)]


def images():
    return [small((2, 3, 6, 4)), small((8, 3, 3, 3), seed=1), small((9, 8, 3, 3), seed=2)]


def small(shape, *, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator)


def filled(x, places):
    y = x.permute(2, 0, 1)
    return y.index_fill(1, places, 0.5), x[..., ::2].index_fill(-1, places, x[0, 0, 0])


def decided(x):
    product = x * 1.7
    return product.argmax(-1), (x * 1.5 * 4).long(), product == product.amax(-1, keepdim=True)


def negative(size, *, seed=0):
    """A tensor whose memory holds its negative."""
    parts = small((size, 2), seed=seed)
    return torch.view_as_complex(parts).conj().imag


NEGATIVE = negative(8, seed=2)
GENERATED = {
    "changed, lazily negative input": (changed_and_scaled, lambda: [negative(8)], 1),
    "conjugates": (conjugates, lambda: [torch.view_as_complex(small((6, 2)))], 3),
    "conjugate of a part": (
        conjugate_of_a_part,
        lambda: [torch.view_as_complex(small((6, 2)))],
        1,
    ),
    "lazily negative constant": (scaled_by_a_constant, lambda: [small((6,))]),
    "lazily negative operand": (torch.mm, lambda: [negative(36).view(6, 6), small((6, 6))], 1),
    "decided by 16-bit floats": (decided, lambda: [small((16, 24)).bfloat16()]),
    "filled": (filled, lambda: [small((4, 5, 6)), torch.tensor([2, 0, 2])]),
    "added_to": (added_to, lambda: [small((4, 6))]),
    "reversed_in_place": (reversed_in_place, lambda: [small((64,))]),
    "swapped": (swapped, lambda: [small((4, 6)), small((4, 6), seed=1)]),
    "products": (products, lambda: [small((6, 8)), small((6, 8), seed=1)]),
    "attention": (attention, lambda: [small((2, 5, 24))]),
    "reused": (reused, lambda: [small((6, 8)), small((4, 5), seed=1)]),
    "reused behind a view": (
        reused_behind_a_view,
        lambda: [small((6, 4, 2)), small((8, 8), seed=1)],
    ),
    "reused by an earlier pass": (
        reused_by_an_earlier_pass,
        lambda: [small((3, 2)), small((2, 5000), seed=1)],
    ),
    "reused by another type": (
        reused_by_another_type,
        lambda: [small((6, 6)), small((6, 6), seed=1)],
    ),
    "reused by a larger tensor": (
        reused_by_a_larger_tensor,
        lambda: [small((5, 7)), small((7, 5), seed=1)],
    ),
    "parts and their extremes": (parts_and_their_extremes, lambda: [small((6, 8))]),
    "contiguous": (contiguous, lambda: [small((6, 8))]),
    "channels_last": (channels_last, lambda: [small((2, 3, 5, 7))]),
    "convolved": (convolved, images),
    "convolved in channels last": (
        convolved,
        lambda: [x.contiguous(memory_format=torch.channels_last) for x in images()],
    ),
    "branches": (branches, images),
    **{
        f"{dtype} pixels": (of_pixels, partial(of_whole_numbers, dtype))
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    },
    "pixels in channels last": (
        of_pixels,
        lambda: [
            x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x
            for x in of_whole_numbers(torch.bfloat16)
        ],
    ),
    "changed between convolutions": (changed_between, images),
    "one channel": (of_one_channel, lambda: [small((2, 3, 9, 8)), *images()[1:]]),
    "slices": (slices, lambda: [small((6, 8))]),
    "seen before a change": (seen_before_a_change, lambda: [small((6, 8)), small((8, 3), seed=1)]),
    "clones": (clones, lambda: [small((6, 8))]),
    "turned input": (slices, lambda: [small((6, 8)).t()]),
    "sliced input": (slices, lambda: [small((6, 9))[:, 1:]]),
    "changed, sliced input": (changed_and_seen, lambda: [small((4, 5, 2))[..., 1]]),
    "changed, turned input": (changed_and_seen, lambda: [small((5, 4)).t()]),
    "changed input at an offset": (changed_and_seen, lambda: [small((24,))[4:].view(4, 5)]),
    "sliced input with other elements": (assigned, lambda: [small((4, 5, 2))[..., 1]]),
    "changed part of a sliced input": (seen_and_changed, lambda: [small((4, 5, 2))[..., 1]]),
    "sliced input with another diagonal": (
        written_diagonals,
        lambda: [small((5, 5, 2))[..., 1], small((5,), seed=1)],
    ),
    "expanded input with another diagonal": (
        written_diagonals,
        lambda: [small((5, 1)).expand(5, 5), small((5,), seed=1)],
    ),
    "resized to their own sizes": (
        resized,
        lambda: [small((5, 4)).t(), small((5, 4), seed=1).t()],
    ),
    "unpooled in channels last": (
        unpooled,
        lambda: [small((2, 2, 3, 4)).contiguous(memory_format=torch.channels_last)],
    ),
    "expanded input": (slices, lambda: [small((1, 8)).expand(6, 8)]),
}


class GatedBlock(torch.nn.Module):
    """A decoder block: norm, rotary positions over a chunk, attention, gated linear units with
    bias.
    """

    def __init__(self):
        super().__init__()
        self.norm, self.projected = torch.nn.LayerNorm(16), torch.nn.Linear(16, 48)
        self.out, self.gate = torch.nn.Linear(16, 16), torch.nn.Linear(16, 64)
        self.down, self.query_norm = torch.nn.Linear(32, 16), torch.nn.RMSNorm(4)

    def forward(self, x):
        q, k, v = self.projected(self.norm(x)).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (4, 4)).transpose(1, 2) for t in (q, k, v))
        a, b = self.query_norm(q).chunk(2, -1)
        q = torch.cat([-b, a], -1) + q
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        value, gate = self.gate(x).chunk(2, -1)
        return x + self.down(value * F.gelu(gate))


class Convolutions(torch.nn.Module):
    """Convolutions, normalization over a transposed input, pooling and a flattened head."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(8, 8, 3, groups=2)
        self.norm, self.head = torch.nn.BatchNorm2d(8), torch.nn.Linear(8 * 2 * 3, 5)

    def forward(self, x):
        y = self.norm(self.first(x).transpose(2, 3)).relu()
        y = F.max_pool2d(self.second(y), 2)
        return self.head(torch.flatten(y, 1))


class Residual(torch.nn.Module):
    """Convolutions that run channels last: of all channels, of each by itself, of one pixel."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = (
            torch.nn.Conv2d(3, 72, 3, 2, 1, bias=False),
            torch.nn.BatchNorm2d(72),
        )
        self.each = torch.nn.Conv2d(72, 72, 3, 1, 1, groups=72, bias=False)
        self.narrow, self.wide = torch.nn.Conv2d(72, 72, 1), torch.nn.Conv2d(72, 72, 1)

    def forward(self, x):
        x = F.max_pool2d(self.norm(self.first(x)).relu(), 3, 2, 1)
        y = F.silu(self.each(x))
        y = y * self.wide(self.narrow(y.mean((2, 3), keepdim=True)).relu()).sigmoid()
        return (y + x).relu()


class Transposed(torch.nn.Module):
    """Batch norm over a transposed input."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(6)

    def forward(self, x):
        return self.norm(x.transpose(1, 2)) * 2


class Ties(torch.nn.Module):
    """A maximum in bfloat16: its gradient goes to the numbers that are equal to what forward
    stored.
    """

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return ((x.bfloat16() * self.scale.bfloat16()).amax(-2) * 2).float()


class ChangesWhatIsSaved(torch.nn.Module):
    """A bias that is changed after the norm that forward computes again for its gradient."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(1, 2, 6))
        self.vector = torch.nn.Parameter(torch.linspace(-1, 1, 6))
        self.register_buffer("shift", torch.linspace(0, 1, 6))

    def forward(self, x):
        found = F.group_norm(x, 6, self.weight, self.shift.clone()) @ self.vector
        shift = self.shift.detach()
        found = found + F.group_norm(x / 2, 2, self.weight, shift) @ self.vector
        shift.add_(1)
        return found


TRAINED = {
    "ties in bfloat16": (Ties, (2, 5, 6), None, 2e-2),
    "a saved input that is changed": (ChangesWhatIsSaved, (5, 6), None),
    "batch norm over a transposed input": (Transposed, (3, 5, 6), None),
}
MODELS = {
    "decoder block": (GatedBlock, (2, 6, 16), None, 1e-4, 2),
    "convolutions": (Convolutions, (2, 3, 10, 8), None),
    "convolutions in channels last": (Convolutions, (2, 3, 10, 8), torch.channels_last),
    "residual": (Residual, (2, 3, 16, 12), None),
    "residual in channels last": (Residual, (2, 3, 16, 12), torch.channels_last),
}


def described(tensors, given):
    """Return of each tensor dtype, sizes, strides, and with which others it shares memory."""
    places = [t.untyped_storage().data_ptr() for t in [*given, *tensors]]
    return [
        [
            str(t.dtype),
            list(t.shape),
            significant(t),
            [n for n, p in enumerate(places) if p == place],
        ]
        for t, place in zip(tensors, places[len(given) :], strict=True)
    ]


def significant(tensor):
    """Return the strides of dimensions of several elements, which alone say something."""
    return [s for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1]


def differences(ours, theirs, inputs, expected_inputs):
    """Return what differs between two runs."""
    found = []
    pairs = zip([*ours, *inputs], [*theirs, *expected_inputs], strict=True)
    for place, (mine, other) in enumerate(pairs):
        if mine.shape != other.shape or distance(mine, other) > 1e-4:
            found.append(f"numbers of {place}")
    mine, other = described(ours, inputs), described(theirs, expected_inputs)
    return found + [f"{a} for {b}" for a, b in zip(mine, other, strict=True) if a != b]


def distance(ours, theirs):
    """Return how far numbers are apart, in parts of their size."""
    wide = torch.complex128 if theirs.is_complex() else torch.double
    ours, theirs = ours.detach().to(wide), theirs.detach().to(wide)
    return ((ours - theirs).norm() / theirs.norm().clamp_min(1e-2)).item()


def generated(function, inputs, copies=0):
    theirs, ours = inputs(), inputs()
    program = bundler.codegen.generate(function, inputs())
    expected = tree_leaves(function(*theirs))
    found = differences(list(program.run(*ours)), expected, ours, theirs)
    return found, program.copies - copies


def trained(kind, shape, memory_format, tolerance=1e-4, batches=1):
    torch.manual_seed(0)
    model = kind()
    eager, programs = copy.deepcopy(model), []
    options = {"programs": programs}
    compiled = torch.compile(model, backend=triton_bundler, dynamic=False, options=options)
    found = []
    for batch in range(shape[0], shape[0] + batches):
        x = small((batch, *shape[1:]))
        if memory_format is not None:
            x = x.contiguous(memory_format=memory_format)
        mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        ours, theirs = compiled(mine), eager(other)
        for out in (ours, theirs):
            (out * torch.arange(out.numel()).view(out.shape)).mean().backward()
        found += [] if significant(ours) == significant(theirs) else [f"strides of {batch}"]
        pairs = zip(model.parameters(), eager.parameters(), strict=True)
        for (name, a), b in zip(model.named_parameters(), eager.parameters(), strict=True):
            if significant(a.grad) != significant(b.grad):
                found.append(f"strides of the gradient of {name}")
        values = [(ours, theirs), (mine.grad, other.grad), *((a.grad, b.grad) for a, b in pairs)]
        values += zip(model.buffers(), eager.buffers(), strict=True)
        found += [
            f"numbers of {n}" for n, (a, b) in enumerate(values) if distance(a, b) > tolerance
        ]
    whole = [item.reason for item in programs if isinstance(item, bundler.codegen.FallbackCall)]
    return found + whole, sum(item.copies for item in programs) if not whole else 0


def saved():
    """Return how what forward saves lies, and how many kernels compute nothing."""
    programs = []
    # Verified: strides of what is saved are no difference to eager torch.
    options = {"programs": programs, "verify": True}
    model = torch.compile(Residual(), backend=triton_bundler, dynamic=False, options=options)
    model(small((2, 3, 24, 16)).requires_grad_()).sum().backward()
    forward, backward = programs
    specs = [item.spec for item in backward.plan.inputs]
    images = [(s.sizes, s.strides) for s in specs if len(s.sizes) == 4 and min(s.sizes[2:]) > 3]
    copying = {
        name: sum("nothing" in getattr(step, "kernel", "") for step in program.plan.steps)
        for name, program in (("forward", forward), ("backward", backward))
    }
    return {
        "results that the caller sees": [forward.result_strides[0]],
        "saved images": images,
        "kernels that copy": copying,
    }


if sys.argv[2] == "saved":
    print(json.dumps(saved()))
    sys.exit()
parts = {
    "generated": (GENERATED, generated),
    "trained": (TRAINED, trained),
    "models": (MODELS, trained),
}
cases, judged = parts[sys.argv[2]]
print(json.dumps({name: judged(*case) for name, case in cases.items()}))
