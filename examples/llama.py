# SPDX-License-Identifier: Apache-2.0
"""A Llama of the shape of 1 B parameters in plain PyTorch, with random weights, and programs of it
in one bundle, built without a GPU: `prefill_64` and `prefill_128` read a prompt of up to so many
tokens, `decode` one token after another.

    python examples/llama.py --bundle llama.tbundle --weights llama.safetensors
    python examples/llama.py --tiny --bundle tiny.tbundle --weights tiny.safetensors

`llama_run.py` runs the bundle where neither torch nor Triton is.  A conversation is a few tensors
that stay on the device, and that the programs change in place: the tokens so far, how many there
are, and keys and values of each layer.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from bundler.codegen import GenerateOptions, build_programs, generate

TARGETS = ("cuda:80", "cuda:90", "cuda:100", "hip:gfx942")


@dataclass(frozen=True)
class Shape:
    """Sizes of a model and of its programs: a prompt is read by the smallest of the `buckets` that
    it fits into, and has at most `length` tokens together with its answer.
    """

    layers: int = 16
    width: int = 2048
    heads: int = 32
    key_heads: int = 8
    head: int = 64
    hidden: int = 8192
    words: int = 128256
    buckets: tuple[int, ...] = (64, 128)
    length: int = 256
    dtype: torch.dtype = torch.bfloat16


ONE_B = Shape()
TINY = Shape(2, 64, 4, 2, 16, 128, 512, (16,), 96, torch.float32)
EPSILON, THETA = 1e-5, 500000.0


def attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Return what the rows of `query` [heads, rows, head] find among keys and values [key heads,
    length, head], where `mask` [rows, length] lets them look; several heads share keys.

    The same in one line: `functional.scaled_dot_product_attention(query[None], keys[None],
    values[None], mask, enable_gqa=True)[0]`.
    """
    heads, rows, head = query.shape
    grouped = query.reshape(keys.shape[0], -1, head)
    scores = torch.matmul(grouped, keys.transpose(1, 2)).float() / math.sqrt(head)
    seen = scores.view(heads, rows, -1).masked_fill(~mask, -math.inf)
    weights = torch.softmax(seen, -1).to(values.dtype).view(scores.shape)
    return torch.matmul(weights, values).view(heads, rows, head)


def rotated(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Turn pairs of numbers of each head by angles, of which cosines and sines [rows, 1, half a
    head] are given.
    """
    one, other = x.float().chunk(2, -1)
    cos, sin = turns
    return torch.cat([one * cos - other * sin, other * cos + one * sin], -1).to(x.dtype)


class Norm(nn.Module):
    """Divides each row by its root mean square."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape.width, dtype=shape.dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Return rows of one size, each number with a weight of its own."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON)
        return (wide * scale).to(x.dtype) * self.weight


class Layer(nn.Module):
    """Attention, and a gated product."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        heads, keys = shape.heads * shape.head, shape.key_heads * shape.head

        def product(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, dtype=shape.dtype)

        self.before, self.between = Norm(shape), Norm(shape)
        self.project, self.output = (
            product(shape.width, heads + 2 * keys),
            product(heads, shape.width),
        )
        self.gate, self.up = product(shape.width, shape.hidden), product(shape.width, shape.hidden)
        self.down = product(shape.hidden, shape.width)

    def forward(
        self,
        x: Tensor,
        keys: Tensor,
        values: Tensor,
        places: Tensor,
        turns: tuple[Tensor, Tensor],
        mask: Tensor,
    ) -> Tensor:
        """Return the next `x` [rows, width] of tokens at `places`, whose keys and values are put
        there.
        """
        shape = self.shape
        projected = self.project(self.before(x)).view(x.shape[0], -1, shape.head)
        query, key, value = projected.split([shape.heads, shape.key_heads, shape.key_heads], 1)
        keys.index_copy_(1, places, rotated(key, turns).transpose(0, 1))
        values.index_copy_(1, places, value.transpose(0, 1))
        found = attend(rotated(query, turns).transpose(0, 1), keys, values, mask)
        x = x + self.output(found.transpose(0, 1).reshape(x.shape[0], -1))
        seen = self.between(x)
        return x + self.down(functional.silu(self.gate(seen)) * self.up(seen))


class Llama(nn.Module):
    """The model."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.words = nn.Embedding(shape.words, shape.width, dtype=shape.dtype)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.last = Norm(shape)

    def forward(
        self, tokens: Tensor, places: Tensor, row: Tensor, caches: tuple[Tensor, ...]
    ) -> Tensor:
        """Return the logits [1, words] of one row of `tokens`, which stand at `places`."""
        shape, device = self.shape, tokens.device
        steps = torch.arange(0, shape.head, 2, device=device) / shape.head
        angles = (places[:, None] * THETA**-steps)[:, None]
        turns = angles.cos(), angles.sin()
        mask = torch.arange(shape.length, device=device) <= places[:, None]
        x = self.words(tokens)
        for number, layer in enumerate(self.layers):
            keys, values = caches[2 * number : 2 * number + 2]
            x = layer(x, keys, values, places, turns, mask)
        return functional.linear(self.last(x.index_select(0, row)), self.words.weight).float()


class Prefill(nn.Module):
    """Reads a prompt: the first `count` tokens, of which there are at most `bucket`."""

    def __init__(self, model: Llama, bucket: int) -> None:
        super().__init__()
        self.model, self.bucket = model, bucket

    def forward(self, tokens: Tensor, count: Tensor, *caches: Tensor) -> Tensor:
        """Return the logits of the next token, which is written behind the others.

        What stands behind the prompt has keys and values, too; each is written again before some
        token may look at it.
        """
        places = torch.arange(self.bucket, device=tokens.device)
        logits = self.model(tokens[: self.bucket], places, count - 1, caches)
        return _with_next(logits, tokens, count)


class Decode(nn.Module):
    """Reads the last of `count` tokens."""

    def __init__(self, model: Llama) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, count: Tensor, *caches: Tensor) -> Tensor:
        """Return the logits of the next token, which is written behind the others."""
        place = count - 1
        logits = self.model(tokens.index_select(0, place), place, torch.zeros_like(place), caches)
        return _with_next(logits, tokens, count)


def _with_next(logits: Tensor, tokens: Tensor, count: Tensor) -> Tensor:
    tokens.index_copy_(0, count, logits.argmax(-1))
    count.add_(1)
    return logits


def state(shape: Shape, device: str = "cpu") -> list[Tensor]:
    """Return tokens, their number, and keys and values of each layer, as a conversation begins."""
    cache = (shape.key_heads, shape.length, shape.head)
    return [
        torch.zeros(shape.length, dtype=torch.int64, device=device),
        torch.ones(1, dtype=torch.int64, device=device),
        *(torch.zeros(cache, dtype=shape.dtype, device=device) for _ in range(2 * shape.layers)),
    ]


def model_of(shape: Shape, seed: int = 0, device: str = "cpu") -> Llama:
    """Return a model with random weights, the same for each seed."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = Llama(shape)
    model.requires_grad_(False)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.normal_(0.0, 1 / math.sqrt(weight.shape[1]))
        else:
            weight.uniform_(0.5, 1.5)
    return model


def entries_of(model: Llama) -> dict[str, nn.Module]:
    """Return what programs are made of, by their names."""
    prefills = {f"prefill_{bucket}": Prefill(model, bucket) for bucket in model.shape.buckets}
    return {**prefills, "decode": Decode(model)}


def programs_of(model: Llama, device: str | None = None) -> list[Any]:
    """Return the programs, which call no operator of torch; weights are `model.` and their name.

    Kernels assert nothing: tokens and places come from the host, where `llama_run.py` looks at
    them, and from programs.
    """
    example = state(model.shape, str(model.last.weight.device))
    options = GenerateOptions(templates="all", assert_indices=False)
    return [
        generate(entry, example, device=device, options=replace(options, name=name))
        for name, entry in entries_of(model).items()
    ]


def main() -> None:
    """Save weights, and build the bundle."""
    line = argparse.ArgumentParser(description=__doc__)
    line.add_argument("--bundle", default="llama.tbundle")
    line.add_argument("--weights", default="llama.safetensors")
    line.add_argument(
        "--target", action="append", help=f"such as {TARGETS[1]}; {', '.join(TARGETS)}"
    )
    line.add_argument("--tiny", action="store_true")
    line.add_argument("--workers", type=int, help="processes that compile; one a core")
    options = line.parse_args()
    model = model_of(TINY if options.tiny else ONE_B)
    programs = programs_of(model, device="cuda")
    targets = options.target or TARGETS
    build_programs(programs, targets, workers=options.workers).save(options.bundle)
    save_file({f"model.{name}": one for name, one in model.state_dict().items()}, options.weights)


if __name__ == "__main__":
    main()
