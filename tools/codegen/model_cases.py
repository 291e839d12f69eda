# SPDX-License-Identifier: Apache-2.0
"""Uses of models that are no model of a list, each in a process of its own: autocast, dropout,
checkpoints, running statistics, `generate`, two GPUs.

    python -m tools.codegen.model_cases cases NAME - DEVICE FILE

`models` starts it, and reads the JSON that it writes, as of `model_process`.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tools.codegen import model_process, transformers_models
from tools.codegen.model_judge import wrong

Found = dict[str, Any]
WIDTHS = {"cuda": 128, "cpu": 32}
ROWS = {"cuda": 32, "cpu": 4}


def names(kind: str) -> list[str]:
    """Return the cases of a kind, `cases` or `multi-gpu`."""
    return list(CASES[kind])


def main() -> int:
    """Run one case."""
    kind, name, _, device, path, *_ = sys.argv[1:]
    model_process.prepared()
    Path(path).write_text(json.dumps(_found(kind, name, device)), encoding="utf-8")
    return 0


def _found(kind: str, name: str, device: str) -> Found:
    if kind == "multi-gpu" and torch.cuda.device_count() < 2:
        return {
            "status": "skipped",
            "error": f"needs two GPUs, and there are {torch.cuda.device_count()}",
        }
    programs: list[Any] = []
    try:
        problems = CASES[kind][name](device, programs)
    except Exception as error:  # noqa: BLE001  # whatever is raised is the finding
        found: Found = {"status": "raises", **model_process.told(error)}
    else:
        found = {
            "status": "wrong" if problems else "right",
            "wrong": {"": problems} if problems else {},
        }
    return found | {"launches": None, "first_call_s": None} | model_process.counted(programs)


class Block(nn.Module):  # type: ignore[misc]  # to mypy torch is Any
    """Attention and a feed-forward network with a norm before each, as most transformers
    have them.
    """

    def __init__(self, width: int, dropout: float = 0.0, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.dropout, self.checkpointed = nn.Dropout(dropout), checkpointed

    def forward(self, x: torch.Tensor) -> Any:
        """Return the block's result; forward is computed again in backward where that was asked
        for.
        """
        return (
            checkpoint(self._result, x, use_reentrant=False)
            if self.checkpointed
            else self._result(x)
        )

    def _result(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.first(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.feed(self.second(x)))


def block(device: str, dropout: float = 0.0, *, checkpointed: bool = False) -> nn.Module:
    """Return a block with random weights, the same ones each time."""
    torch.manual_seed(0)
    return Block(WIDTHS[device], dropout, checkpointed=checkpointed).to(device)


def compiled(model: Any, programs: list[Any]) -> Any:
    """Return what our backend makes of a model or a function; its programs go into the list."""
    from bundler.codegen.torch_backend import triton_bundler

    return torch.compile(model, backend=triton_bundler, options={"programs": programs})


def trained(model: Any, call: Callable[..., Any], x: Any) -> dict[str, Any]:
    """Return loss, result and gradients of one step."""
    result = call(x)
    loss = result.float().square().mean()
    loss.backward()
    gradients = {f"gradient of {name}": one.grad for name, one in model.named_parameters()}
    return {"result": result.detach(), "loss": loss.detach(), **gradients}


def _beside(
    device: str, programs: list[Any], run: Callable[[Any, Any, Any], dict[str, Any]], model: Any
) -> list[str]:
    """Return what is wrong of a step beside eager mode and float64; `run` takes the model, what is
    called, and an input.
    """
    place = next(model.parameters()).device
    x = torch.randn(ROWS[device], 16, WIDTHS[device], device=place)

    def stepped(side: str, one: Any) -> dict[str, Any]:
        called = compiled(one, programs) if side == "ours" else one
        return run(one, called, x.double() if side == "exact" else x)

    return beside(model, stepped)


def beside(model: Any, stepped: Callable[[str, Any], dict[str, Any]]) -> list[str]:
    """Return what is wrong with our results of a model beside those of eager mode and of float64,
    `exact`; `stepped` takes the side and a copy of the model.
    """
    found = {}
    for side in ("eager", "exact", "ours"):
        one = copy.deepcopy(model)
        found[side] = stepped(side, one.double() if side == "exact" else one)
    return wrong(found["ours"], found["eager"], found["exact"], 1e-2)


def autocast(device: str, programs: list[Any]) -> list[str]:
    """Train a block in float32 under autocast to bfloat16."""

    def run(model: Any, called: Any, x: Any) -> dict[str, Any]:
        with torch.autocast(device, torch.bfloat16, enabled=x.dtype != torch.float64):
            return trained(model, called, x)

    return _beside(device, programs, run, block(device))


def dropout(device: str, programs: list[Any]) -> list[str]:
    """Train with dropout: a finite loss, as many zeros as asked for, other ones each time, and the
    same ones in backward.
    """
    share, x = (
        0.25,
        torch.ones(256, 256 if device == "cuda" else 64, device=device, requires_grad=True),
    )
    called = compiled(lambda one: functional.dropout(one, share, training=True), programs)
    first, second = called(x), called(x)
    problems = []
    zeros = float((first == 0).float().mean())
    if abs(zeros - share) > 0.03:
        problems.append(f"expected {share} of zeros, got {zeros:.4f}")
    if torch.equal(first, second):
        problems.append("two calls drop the same elements")
    if not torch.allclose(first[first != 0], torch.tensor(1 / (1 - share), device=device)):
        problems.append("what is kept is not divided by the share that is kept")
    first.sum().backward()
    if not torch.equal(x.grad, first.detach()):
        problems.append("backward drops other elements than forward")
    model = block(device, dropout=share).train()
    found = trained(
        model,
        compiled(model, programs),
        torch.randn(ROWS[device], 16, WIDTHS[device], device=device),
    )
    problems += [f"{name} is not finite" for name, one in found.items() if not one.isfinite().all()]
    return problems


def checkpointing(device: str, programs: list[Any]) -> list[str]:
    """Train a block whose forward is computed again in backward."""
    return _beside(device, programs, trained, block(device, checkpointed=True))


def running_statistics(device: str, programs: list[Any]) -> list[str]:
    """Train batch norm for several steps, and look at its running mean and variance."""
    torch.manual_seed(0)
    width = WIDTHS[device] // 4
    model = nn.Sequential(
        nn.Conv2d(3, width, 3),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, width, 1),
        nn.BatchNorm2d(width),
    ).to(device)
    draw = torch.Generator().manual_seed(1)
    steps = [torch.randn(8, 3, 12, 12, generator=draw).to(device) for _ in range(4)]

    def stepped(side: str, one: Any) -> dict[str, Any]:
        called = compiled(one, programs) if side == "ours" else one
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for x in steps:
            optimizer.zero_grad()
            called(x.double() if side == "exact" else x).square().mean().backward()
            optimizer.step()
        return {name: value.clone() for name, value in one.state_dict().items()}

    return beside(model, stepped)


def generate_static_cache(device: str, programs: list[Any]) -> list[str]:
    """Let a small Llama of transformers generate tokens with a static cache: those of eager
    mode.
    """
    torch.manual_seed(0)
    model = transformers_models.build("Llama-3.2-1B", device).to(device).eval()
    given = {
        "input_ids": (
            torch.randint(3, 100, (2, 8), generator=torch.Generator().manual_seed(0)).to(device)
        )
    }
    given["attention_mask"] = torch.ones_like(given["input_ids"])
    new = 12 if device == "cuda" else 3
    model.config.use_cache = True
    settings = {
        "max_new_tokens": new,
        "min_new_tokens": new,
        "do_sample": False,
        "cache_implementation": "static",
        "pad_token_id": 0,
        "disable_compile": True,
    }
    expected = model.generate(**given, **settings)
    model.forward = compiled(model.forward, programs)
    found = model.generate(**given, **settings)
    return (
        []
        if torch.equal(found, expected)
        else [f"tokens {found.tolist()} are not {expected.tolist()}"]
    )


def second_gpu(_device: str, programs: list[Any]) -> list[str]:
    """Train a block on cuda:1 while cuda:0 is the current device."""
    return _beside("cuda", programs, trained, block("cuda").to("cuda:1"))


def distributed(_device: str, programs: list[Any]) -> list[str]:
    """Train a block on two GPUs by DistributedDataParallel, a process each: the gradients of eager
    mode.
    """
    from tools.codegen.model_ranks import ranks

    del programs  # they are made in the processes of the ranks
    answers = ranks(torch.cuda.device_count() and 2)
    return [f"rank {rank}: {line}" for rank, lines in enumerate(answers) for line in lines]


CASES: dict[str, dict[str, Callable[[str, list[Any]], list[str]]]] = {
    "cases": {
        "autocast": autocast,
        "dropout": dropout,
        "checkpointing": checkpointing,
        "running-statistics": running_statistics,
        "generate-static-cache": generate_static_cache,
    },
    "multi-gpu": {"second-gpu": second_gpu, "distributed": distributed},
}

if __name__ == "__main__":
    sys.exit(main())
