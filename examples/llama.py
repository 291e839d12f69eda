# SPDX-License-Identifier: Apache-2.0
"""A Llama of 1 B parameters' shape in plain PyTorch, which `generate` makes two programs of, without
a GPU: `prefill` of a prompt, and `decode` of one token after the other.

    python examples/llama.py --output llama.tbundle --weights llama.safetensors
    python examples/llama.py --tiny ...                        # small sizes, in seconds

`llama_run.py` runs the bundle where neither torch nor Triton is.  What a conversation is lies on the
device, and both programs change it in place: the tokens so far, how many there are, and the keys and
values of each layer.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

TARGETS = ("cuda:80", "cuda:90", "cuda:100", "hip:gfx942")


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, and of the programs: a prompt has `bucket` tokens at most, prompt and answer
    together `length`.
    """

    layers: int = 16
    width: int = 2048
    heads: int = 32
    key_heads: int = 8
    head: int = 64
    hidden: int = 8192
    words: int = 128256
    length: int = 256
    bucket: int = 64
    theta: float = 500000.0
    dtype: torch.dtype = torch.bfloat16


ONE_B = Shape()
TINY = Shape(2, 64, 4, 2, 16, 128, 512, 32, 8, dtype=torch.float32)


class Norm(nn.Module):
    """Divides each row by its root mean square."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape.width, dtype=shape.dtype))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
        return (wide * scale).to(x.dtype) * self.weight


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Return what each head of `query` [heads of keys, rows, head] finds among keys and values
    [heads of keys, length, head]; `mask` is true where a row may look.
    """
    scores = torch.matmul(query, keys.transpose(1, 2)).float() / math.sqrt(query.shape[-1])
    weights = torch.softmax(scores.masked_fill(~mask, -math.inf), -1)
    return torch.matmul(weights.to(values.dtype), values)


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Turn pairs of numbers of each head by angles [rows, half a head]."""
    one, other = x.float().chunk(2, -1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat([one * cos - other * sin, other * cos + one * sin], -1).to(x.dtype)


class Layer(nn.Module):
    """Attention, and a gated product."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        heads, keys = shape.heads * shape.head, shape.key_heads * shape.head

        def product(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, dtype=shape.dtype)

        self.before, self.between = Norm(shape), Norm(shape)
        self.query = product(shape.width, heads)
        self.key, self.value = product(shape.width, keys), product(shape.width, keys)
        self.output = product(heads, shape.width)
        self.gate, self.up = product(shape.width, shape.hidden), product(shape.width, shape.hidden)
        self.down = product(shape.hidden, shape.width)

    def forward(
        self, x: Tensor, cache: Tensor, places: Tensor, angles: Tensor, mask: Tensor
    ) -> Tensor:
        shape, rows = self.shape, x.shape[0]
        seen = self.before(x)
        query = rotated(self.query(seen).view(rows, shape.heads, shape.head), angles)
        key = rotated(self.key(seen).view(rows, shape.key_heads, shape.head), angles)
        value = self.value(seen).view(rows, shape.key_heads, shape.head)
        cache[0].index_copy_(1, places, key.transpose(0, 1))
        cache[1].index_copy_(1, places, value.transpose(0, 1))
        group = shape.heads // shape.key_heads
        grouped = query.view(rows, shape.key_heads, group, shape.head).permute(1, 2, 0, 3)
        grouped = grouped.reshape(shape.key_heads, group * rows, shape.head)
        found = attend(grouped, cache[0], cache[1], mask.repeat(group, 1))
        found = found.view(shape.key_heads, group, rows, shape.head).permute(2, 0, 1, 3)
        x = x + self.output(found.reshape(rows, shape.heads * shape.head))
        seen = self.between(x)
        return x + self.down(functional.silu(self.gate(seen)) * self.up(seen))


class Llama(nn.Module):
    """The model; its parameters are the weights of both programs."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.words = nn.Embedding(shape.words, shape.width, dtype=shape.dtype)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.last = Norm(shape)

    def logits(self, tokens: Tensor, places: Tensor, caches: tuple[Tensor, ...], row: Tensor):
        """Return the logits of one row of `tokens`, which stand at `places`."""
        shape = self.shape
        steps = torch.arange(0, shape.head, 2, device=tokens.device) / shape.head
        angles = places[:, None] * shape.theta ** -steps
        mask = torch.arange(shape.length, device=tokens.device)[None, :] <= places[:, None]
        x = self.words(tokens)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cache, places, angles, mask)
        return functional.linear(self.last(x.index_select(0, row)), self.words.weight).float()
