# SPDX-License-Identifier: Apache-2.0
"""Calls operators of Liger and of FLA, forward and backward, as a program warms up: a workload for
`capture.py`, and a program of its own.

    python tools/gpu/library_calls.py [--only liger,fla,varlen,wide] [--seen FILE]

A library that is not importable, and an operator that raises, are named and left out: FILE gets
(operator, what happened) as JSON.  Importing this file needs torch alone.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional

DEVICE = "cuda"
BATCH, LENGTH, HEADS, WIDTH = 2, 256, 4, 64
HIDDEN, VOCABULARY = 512, 1000
# Each of these is autotuned over 150 to 450 configurations, forward and backward.
WIDE = frozenset(
    {"chunk_gla", "chunk_linear_attn", "chunk_simple_gla", "chunk_rwkv6", "chunk_rwkv7"}
)
HALF = frozenset({"fused_recurrent_gla", "fused_recurrent_retention", "chunk_delta_rule"})
Case = tuple[str, Callable[[], Any]]


def tensor(*shape: int, dtype: Any = torch.bfloat16, grad: bool = True) -> Any:
    """Return small random numbers."""
    made = (torch.randn(shape, device=DEVICE, dtype=torch.float32) * 0.1).to(dtype)
    return made.requires_grad_(grad)


def gate(*shape: int, dtype: Any = torch.float32) -> Any:
    """Return logarithms of gates."""
    return (
        functional.logsigmoid(torch.randn(shape, device=DEVICE, dtype=torch.float32))
        .to(dtype)
        .requires_grad_()
    )


def backward(result: Any) -> None:
    """Run the backward of whatever an operator returned."""
    first = result[0] if isinstance(result, (tuple, list)) else result
    first.float().sum().backward()


def liger_cases() -> Iterator[Case]:
    """Yield Liger's operators, each in two types."""
    liger = importlib.import_module("liger_kernel.ops")
    for dtype in (torch.bfloat16, torch.float32):
        kind = str(dtype).rpartition(".")[2]
        for name, call in _liger(liger, dtype):
            yield f"liger.{name}.{kind}", call


def _liger(liger: Any, dtype: Any) -> Iterator[Case]:
    tokens = BATCH * LENGTH

    def wide(*shape: int, grad: bool = True) -> Any:
        return tensor(*shape, dtype=dtype, grad=grad)

    def labels() -> Any:
        return torch.randint(0, VOCABULARY, (tokens,), device=DEVICE)

    def probabilities() -> Any:
        return wide(tokens, VOCABULARY).float().log_softmax(-1).detach().requires_grad_()

    def rope() -> Any:
        angles = torch.randn(1, LENGTH, WIDTH, device=DEVICE, dtype=dtype)
        q, k = wide(BATCH, HEADS, LENGTH, WIDTH), wide(BATCH, 2, LENGTH, WIDTH)
        return liger.LigerRopeFunction.apply(q, k, angles.cos(), angles.sin())

    def x() -> Any:
        return wide(BATCH, LENGTH, HIDDEN)

    def weight() -> Any:
        return wide(HIDDEN)

    yield (
        "rms_norm",
        lambda: liger.LigerRMSNormFunction.apply(x(), weight(), 1e-6, 0.0, "llama", False),
    )
    yield (
        "rms_norm_gemma",
        lambda: liger.LigerRMSNormFunction.apply(x(), weight(), 1e-6, 1.0, "gemma", False),
    )
    yield (
        "fused_add_rms_norm",
        lambda: liger.LigerFusedAddRMSNormFunction.apply(
            x(), x(), weight(), 1e-6, 0.0, "llama", False
        ),
    )
    yield "layer_norm", lambda: liger.LigerLayerNormFunction.apply(x(), weight(), weight(), 1e-6)
    yield (
        "group_norm",
        lambda: liger.LigerGroupNormFunction.apply(
            wide(BATCH, 32, 128), wide(32), wide(32), 32, 4, 1e-6
        ),
    )
    yield "rope", rope
    yield "swiglu", lambda: liger.LigerSiLUMulFunction.apply(x(), x())
    yield "geglu", lambda: liger.LigerGELUMulFunction.apply(x(), x())
    yield "relu_squared", lambda: liger.LigerReLUSquaredFunction.apply(x())
    yield "softmax", lambda: liger.LigerSoftmaxFunction.apply(x())
    yield "sparsemax", lambda: liger.LigerSparsemaxFunction.apply(x(), -1)
    yield "dyt", lambda: liger.LigerDyTFunction.apply(x(), wide(1), weight(), weight())
    yield "poly_norm", lambda: liger.LigerPolyNormFunction.apply(x(), wide(3), wide(), 1e-6, False)
    yield (
        "cross_entropy",
        lambda: liger.LigerCrossEntropyFunction.apply(
            wide(tokens, VOCABULARY), labels(), None, -100, 0.0, 0.0, "mean", None, False
        ),
    )
    yield (
        "cross_entropy_smooth",
        lambda: liger.LigerCrossEntropyFunction.apply(
            wide(tokens, VOCABULARY), labels(), None, -100, 1e-4, 0.1, "sum", 30.0, False
        ),
    )
    yield (
        "fused_linear_cross_entropy",
        lambda: liger.LigerFusedLinearCrossEntropyFunction.apply(
            wide(tokens, HIDDEN), wide(VOCABULARY, HIDDEN), labels()
        ),
    )
    yield (
        "kl_div",
        lambda: liger.LigerKLDivLossFunction.apply(
            probabilities(), probabilities().exp(), "batchmean", False
        ),
    )
    yield (
        "jsd",
        lambda: liger.LigerJSDFunction.apply(probabilities(), probabilities(), None, 0.5, -100),
    )
    yield (
        "jsd_labels",
        lambda: liger.LigerJSDFunction.apply(probabilities(), probabilities(), labels(), 0.5, -100),
    )
    yield (
        "tvd",
        lambda: liger.LigerTVDLossFunction.apply(
            probabilities().exp(), probabilities().exp(), None, "batchmean", -100
        ),
    )


def fla_cases() -> Iterator[Case]:
    """Yield FLA's operators for sequences of one length, without those that try the most
    configurations.
    """
    yield from ((f"fla.{name}", call) for name, call in _all_fla() if name not in WIDE)


def wide_cases() -> Iterator[Case]:
    """Yield FLA's operators that try hundreds of configurations, and some in a second type."""
    yield from ((f"fla.{name}", call) for name, call in _all_fla() if name in WIDE)
    fla = importlib.import_module("fla.ops")
    yield from (
        (f"fla.{name}.float16", call)
        for name, call in _fla(fla, torch.float16, BATCH, None)
        if name in HALF
    )


def _all_fla() -> Iterator[Case]:
    yield from _fla(importlib.import_module("fla.ops"), torch.bfloat16, BATCH, None)


def varlen_cases() -> Iterator[Case]:
    """Yield FLA's operators for sequences of several lengths in one tensor, whose shapes follow
    from the data of a tensor.
    """
    fla = importlib.import_module("fla.ops")
    for name, call in _fla(fla, torch.bfloat16, 1, [0, 100, 164, LENGTH]):
        if name in {"chunk_delta_rule", "chunk_gated_delta_rule"}:
            yield f"varlen.{name}", call


def _fla(fla: Any, dtype: Any, batch: int, offsets: list[int] | None) -> Iterator[Case]:
    def states() -> Any:
        return tensor(batch, LENGTH, HEADS, WIDTH, dtype=dtype)

    def unit() -> Any:
        return functional.normalize(states().float(), dim=-1).to(dtype).detach().requires_grad_()

    def beta() -> Any:
        return torch.rand(batch, LENGTH, HEADS, device=DEVICE).sigmoid().to(dtype).requires_grad_()

    def small_gate(*shape: int) -> Any:
        return gate(batch, LENGTH, HEADS, *shape, dtype=dtype)

    def where() -> dict[str, Any]:
        return (
            {}
            if offsets is None
            else {"cu_seqlens": torch.tensor(offsets, device=DEVICE, dtype=torch.int64)}
        )

    def qkv() -> tuple[Any, Any, Any]:
        return states(), states(), states()

    yield "chunk_gla", lambda: fla.chunk_gla(*qkv(), small_gate(WIDTH), **where())
    yield (
        "fused_recurrent_gla",
        lambda: fla.fused_recurrent_gla(*qkv(), small_gate(WIDTH), **where()),
    )
    yield "chunk_retention", lambda: fla.chunk_retention(*qkv(), **where())
    yield "fused_recurrent_retention", lambda: fla.fused_recurrent_retention(*qkv(), **where())
    yield "parallel_retention", lambda: fla.parallel_retention(*qkv())
    yield (
        "chunk_delta_rule",
        lambda: fla.chunk_delta_rule(states(), unit(), states(), beta(), **where()),
    )
    yield (
        "fused_recurrent_delta_rule",
        lambda: fla.fused_recurrent_delta_rule(states(), unit(), states(), beta(), **where()),
    )
    yield (
        "chunk_gated_delta_rule",
        lambda: fla.chunk_gated_delta_rule(
            states(), unit(), states(), small_gate(), beta(), **where()
        ),
    )
    yield (
        "fused_recurrent_gated_delta_rule",
        lambda: _no_backward(
            fla.fused_recurrent_gated_delta_rule(
                states(), unit(), states(), small_gate(), beta(), **where()
            )
        ),
    )
    yield "chunk_linear_attn", lambda: fla.chunk_linear_attn(*qkv())
    yield "fused_recurrent_linear_attn", lambda: fla.fused_recurrent_linear_attn(*qkv())
    yield (
        "chunk_simple_gla",
        lambda: fla.chunk_simple_gla(
            *qkv(), small_gate().float().detach().requires_grad_(), **where()
        ),
    )
    yield (
        "chunk_rwkv6",
        lambda: fla.chunk_rwkv6(*qkv(), small_gate(WIDTH), tensor(HEADS, WIDTH, dtype=dtype)),
    )
    yield (
        "fused_recurrent_rwkv6",
        lambda: fla.fused_recurrent_rwkv6(
            *qkv(), small_gate(WIDTH), tensor(HEADS, WIDTH, dtype=dtype)
        ),
    )
    yield (
        "chunk_rwkv7",
        lambda: fla.chunk_rwkv7(states(), small_gate(WIDTH), unit(), states(), unit(), unit()),
    )
    yield (
        "fused_recurrent_hgrn",
        lambda: fla.fused_recurrent_hgrn(
            tensor(batch, LENGTH, HIDDEN, dtype=dtype), gate(batch, LENGTH, HIDDEN, dtype=dtype)
        ),
    )
    yield (
        "parallel_based",
        lambda: fla.parallel_based(
            tensor(batch, LENGTH, HEADS, 16, dtype=dtype),
            tensor(batch, LENGTH, HEADS, 16, dtype=dtype),
            states(),
        ),
    )
    yield (
        "parallel_nsa",
        lambda: fla.parallel_nsa(
            tensor(batch, LENGTH, 16, WIDTH, dtype=dtype),
            tensor(batch, LENGTH, 1, WIDTH, dtype=dtype),
            tensor(batch, LENGTH, 1, WIDTH, dtype=dtype),
            g_cmp=beta_like(batch, 16, dtype),
            g_slc=beta_like(batch, 16, dtype),
            block_counts=2,
            block_size=32,
        ),
    )
    yield (
        "chunk_kda",
        lambda: fla.chunk_kda(states(), unit(), states(), small_gate(WIDTH), beta(), **where()),
    )
    yield "parallel_attn", lambda: importlib.import_module("fla.ops.attn").parallel_attn(*qkv())
    yield "parallel_forgetting_attn", lambda: fla.parallel_forgetting_attn(*qkv(), small_gate())


def beta_like(batch: int, heads: int, dtype: Any) -> Any:
    """Return weights between 0 and 1 for each head."""
    return torch.rand(batch, LENGTH, heads, device=DEVICE).to(dtype).requires_grad_()


def _no_backward(result: Any) -> Any:
    """Return a result whose backward touches nothing of the operator, which has none."""
    first = result[0] if isinstance(result, (tuple, list)) else result
    return first.detach().requires_grad_()


GROUPS: dict[str, Callable[[], Iterator[Case]]] = {
    "liger": liger_cases,
    "fla": fla_cases,
    "varlen": varlen_cases,
    "wide": wide_cases,
}


def main(argv: list[str]) -> int:
    """Call everything that was asked for; returns the exit status."""
    parser = argparse.ArgumentParser(
        description="Call operators of Liger and FLA, forward and backward."
    )
    parser.add_argument(
        "--only", default="liger,fla,varlen", help="groups: liger, fla, varlen, wide"
    )
    parser.add_argument("--seen", help="file for what happened to each operator, as JSON")
    options = parser.parse_args(argv)
    happened: dict[str, str] = {}
    for group in options.only.split(","):
        try:
            for name, call in GROUPS[group]():
                happened[name] = _called(call)
                if happened[name] != "fine":
                    print(f"left out: {name}: {happened[name]}", flush=True)
        except ImportError as error:
            happened[group] = f"not importable: {error}"
            print(f"left out: {group}: {happened[group]}", flush=True)
    if options.seen:
        with open(options.seen, "w", encoding="utf-8") as file:
            json.dump(happened, file, indent=1)
    print(
        f"{sum(said == 'fine' for said in happened.values())} of {len(happened)} operators called",
        flush=True,
    )
    return 0


def _called(call: Callable[[], Any]) -> str:
    torch.manual_seed(0)
    try:
        backward(call())
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001  # an operator may raise anything; the others go on, and this one is named
        trace = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error} ({trace.filename}:{trace.lineno})"
    return "fine"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
