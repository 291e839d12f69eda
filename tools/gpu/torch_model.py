# SPDX-License-Identifier: Apache-2.0
"""One process of `python -m tools.gpu torch-compile`: a 6-layer transformer, forward and backward,
through torch.compile.

It prints one JSON object: seconds for loading a saved cache and for the first iterations, the
losses, and what torch counted.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tools.shared import programs

ACTIVATIONS = (
    functional.silu,
    functional.gelu,
    torch.tanh,
    functional.relu,
    functional.mish,
    functional.hardswish,
)
ITERATIONS = 3


class RootMeanSquare(nn.Module):  # type: ignore[misc]  # torch is not followed
    """A norm that computes in 32 bits."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale each row to a mean square of one."""
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(
            x.dtype
        ) * self.weight


class Layer(nn.Module):  # type: ignore[misc]  # torch is not followed
    """Attention and a gated block; each layer has another activation, and the second norms take
    turns.
    """

    def __init__(self, width: int, number: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.first = RootMeanSquare(width)
        self.queries = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.second = nn.LayerNorm(width) if number % 2 else RootMeanSquare(width)
        self.gate, self.up = nn.Linear(width, 4 * width), nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.activation: Callable[[torch.Tensor], torch.Tensor] = ACTIVATIONS[
            number % len(ACTIVATIONS)
        ]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows for the next layer."""
        batch, length, width = x.shape
        parts = (
            self.queries(self.first(x))
            .view(batch, length, 3, self.heads, 64)
            .permute(2, 0, 3, 1, 4)
        )
        mixed = functional.scaled_dot_product_attention(
            parts[0], parts[1], parts[2], is_causal=True
        )
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        y = self.second(x)
        out: torch.Tensor = x + self.down(self.activation(self.gate(y)) * self.up(y))
        return out


class Transformer(nn.Module):  # type: ignore[misc]  # torch is not followed
    """Token numbers in, the loss of guessing each next token out."""

    def __init__(self, layers: int, width: int, tokens: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.layers = nn.ModuleList(Layer(width, number) for number in range(layers))
        self.norm = RootMeanSquare(width)
        self.head = nn.Linear(width, tokens)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean loss."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        scores = self.head(self.norm(x)).float()
        return functional.cross_entropy(scores[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def main() -> int:
    """Run one process's part and print what it measured."""
    options = programs.arguments(
        __doc__,
        device=("cuda", "of the model"),
        mode=("default", "torch.compile's mode"),
        small=(False, "two narrow layers, to try the program without a GPU"),
        load_torch=(Path, "what torch.compiler.save_cache_artifacts returned"),
        load_ours=(Path, "a bundle of bundler.integrations.inductor.save"),
        save=(Path, "folder for what both save afterwards"),
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = measure(options)
    found["warnings"] = sorted(
        {str(warning.message) for warning in caught if "bundler" in str(warning.category)}
    )
    print(json.dumps(found))
    return 0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Load, iterate, save."""
    step = _prepare(options)
    started = time.monotonic()
    loaded = _load(options)
    load_s = time.monotonic() - started
    losses, seconds = [], []
    for _ in range(ITERATIONS):
        started = time.monotonic()
        losses.append(step())
        seconds.append(time.monotonic() - started)
    from torch._dynamo.utils import counters

    words = ("cache", "bundler", "coordesc", "benchmark")
    inductor = {
        name: count
        for name, count in counters["inductor"].items()
        if any(word in name for word in words)
    }
    return {
        "load_s": load_s,
        "loaded": loaded,
        "iterations_s": seconds,
        "first_s": seconds[0],
        "total_s": load_s + seconds[0],
        "losses": losses,
        "inductor": inductor,
        "aot_autograd": dict(counters["aot_autograd"]),
        "saved": _save(options.save) if options.save is not None else None,
    }


def _prepare(options: argparse.Namespace) -> Callable[[], str]:
    """Return a function for one iteration, which returns the loss exactly, as hexadecimal text."""
    torch.manual_seed(0)
    layers, width, count, shape = (
        (2, 64, 128, (2, 16)) if options.small else (6, 512, 8192, (4, 256))
    )
    dtype = torch.float32 if options.device == "cpu" else torch.bfloat16
    model = Transformer(layers, width, count).to(options.device, dtype)
    tokens = torch.randint(0, count, shape, device=options.device)
    compiled = torch.compile(model, mode=options.mode)
    if options.device != "cpu":
        torch.cuda.synchronize()

    def step() -> str:
        model.zero_grad(set_to_none=True)
        loss = compiled(tokens)
        loss.backward()
        if options.device != "cpu":
            torch.cuda.synchronize()
        return float(loss.detach()).hex()

    return step


def _load(options: argparse.Namespace) -> str:
    """Load what an earlier process saved; returns what was loaded, in words."""
    if options.load_torch is not None:
        info = torch.compiler.load_cache_artifacts(options.load_torch.read_bytes())
        return repr(info and {kind: len(keys) for kind, keys in info.artifacts.items()})
    if options.load_ours is not None:
        from bundler.integrations import inductor

        return repr(inductor.load(options.load_ours, trust="code"))
    return ""


def _save(folder: Path) -> dict[str, Any]:
    from bundler.integrations import inductor

    found: dict[str, Any] = {}
    for name, winners in (("ours", False), ("ours-winners", True)):
        path = folder / f"{name}.tbundle"
        started = time.monotonic()
        bundle = inductor.save(path, winners_only=winners)
        found[name] = {
            "seconds": time.monotonic() - started,
            "bytes": path.stat().st_size,
            "bundle": repr(bundle),
            "left_out": bundle.left_out,
        }
    started = time.monotonic()
    artifacts = torch.compiler.save_cache_artifacts()
    if artifacts is not None:
        (folder / "mega-cache.bin").write_bytes(artifacts[0])
        found["mega-cache"] = {"seconds": time.monotonic() - started, "bytes": len(artifacts[0])}
    return found


if __name__ == "__main__":
    sys.exit(main())
