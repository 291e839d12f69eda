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
from functools import partial
from operator import attrgetter
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
VARLEN = frozenset({"chunk_delta_rule", "chunk_gated_delta_rule"})
NO_BACKWARD = frozenset({"fused_recurrent_gated_delta_rule"})
# What an operator returned, and what it was called with.
Called = tuple[Any, tuple[Any, ...]]
Case = tuple[str, Callable[[], Called]]
Arguments = Callable[[], tuple[Any, ...]]


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


def backward(result: Any) -> Any:
    """Run the backward of whatever an operator returned; returns its first result."""
    first = result[0] if isinstance(result, (tuple, list)) else result
    first.float().sum().backward()
    return first


def liger_cases() -> Iterator[Case]:
    """Yield Liger's operators, each in two types."""
    liger = importlib.import_module("liger_kernel.ops")
    for dtype in (torch.bfloat16, torch.float32):
        kind = str(dtype).rpartition(".")[2]
        for name, (function, make) in _liger(dtype).items():
            yield f"liger.{name}.{kind}", _call(liger, f"Liger{function}Function.apply", make)


def _call(module: Any, name: str, make: Arguments, **more: Any) -> Callable[[], Called]:
    def call() -> Called:
        given = make()
        # Looked up when it is called: what a release lacks is left out alone.
        return attrgetter(name)(module)(*given, **more), given

    return call


def _liger(dtype: Any) -> dict[str, tuple[str, Arguments]]:
    """Return name -> the operator's own and its arguments."""
    tokens = BATCH * LENGTH

    def wide(*shape: int, grad: bool = True) -> Any:
        return tensor(*shape, dtype=dtype, grad=grad)

    def labels() -> Any:
        return torch.randint(0, VOCABULARY, (tokens,), device=DEVICE)

    def probabilities() -> Any:
        return wide(tokens, VOCABULARY).float().log_softmax(-1).detach().requires_grad_()

    def rope() -> tuple[Any, ...]:
        angles = torch.randn(1, LENGTH, WIDTH, device=DEVICE, dtype=dtype)
        q, k = wide(BATCH, HEADS, LENGTH, WIDTH), wide(BATCH, 2, LENGTH, WIDTH)
        return q, k, angles.cos(), angles.sin()

    def x() -> Any:
        return wide(BATCH, LENGTH, HIDDEN)

    def weight() -> Any:
        return wide(HIDDEN)

    def scores() -> Any:
        return wide(tokens, VOCABULARY)

    def groups() -> tuple[Any, ...]:
        return wide(BATCH, 32, 128), wide(32), wide(32), 32, 4, 1e-6

    llama, gemma = (0.0, "llama", False), (1.0, "gemma", False)
    plain, smooth = (0.0, 0.0, "mean", None, False), (1e-4, 0.1, "sum", 30.0, False)
    jsd, tvd = (None, 0.5, -100), (None, "batchmean", -100)
    linear = "FusedLinearCrossEntropy"
    return {
        "rms_norm": ("RMSNorm", lambda: (x(), weight(), 1e-6, *llama)),
        "rms_norm_gemma": ("RMSNorm", lambda: (x(), weight(), 1e-6, *gemma)),
        "fused_add_rms_norm": ("FusedAddRMSNorm", lambda: (x(), x(), weight(), 1e-6, *llama)),
        "layer_norm": ("LayerNorm", lambda: (x(), weight(), weight(), 1e-6)),
        "group_norm": ("GroupNorm", groups),
        "rope": ("Rope", rope),
        "swiglu": ("SiLUMul", lambda: (x(), x())),
        "geglu": ("GELUMul", lambda: (x(), x())),
        "relu_squared": ("ReLUSquared", lambda: (x(),)),
        "softmax": ("Softmax", lambda: (x(),)),
        "sparsemax": ("Sparsemax", lambda: (x(), -1)),
        "dyt": ("DyT", lambda: (x(), wide(1), weight(), weight())),
        "poly_norm": ("PolyNorm", lambda: (x(), wide(3), wide(), 1e-6, False)),
        "cross_entropy": ("CrossEntropy", lambda: (scores(), labels(), None, -100, *plain)),
        "cross_entropy_smooth": ("CrossEntropy", lambda: (scores(), labels(), None, -100, *smooth)),
        "fused_linear_cross_entropy": (
            linear,
            lambda: (wide(tokens, HIDDEN), wide(VOCABULARY, HIDDEN), labels()),
        ),
        "kl_div": (
            "KLDivLoss",
            lambda: (probabilities(), probabilities().exp(), "batchmean", False),
        ),
        "jsd": ("JSD", lambda: (probabilities(), probabilities(), *jsd)),
        "jsd_labels": ("JSD", lambda: (probabilities(), probabilities(), labels(), 0.5, -100)),
        "tvd": ("TVDLoss", lambda: (probabilities().exp(), probabilities().exp(), *tvd)),
    }


def fla_cases() -> Iterator[Case]:
    """Yield FLA's operators for sequences of one length, without those that try the most
    configurations.
    """
    yield from ((f"fla.{name}", call) for name, call in _fla(torch.bfloat16) if name not in WIDE)


def wide_cases() -> Iterator[Case]:
    """Yield FLA's operators that try hundreds of configurations, and some in a second type."""
    yield from ((f"fla.{name}", call) for name, call in _fla(torch.bfloat16) if name in WIDE)
    half = _fla(torch.float16)
    yield from ((f"fla.{name}.float16", call) for name, call in half if name in HALF)


def varlen_cases() -> Iterator[Case]:
    """Yield FLA's operators for sequences of several lengths in one tensor, whose shapes follow
    from the data of a tensor.
    """
    for name, call in _fla(torch.bfloat16, 1, [0, 100, 164, LENGTH]):
        if name in VARLEN:
            yield f"varlen.{name}", call


def _fla(dtype: Any, batch: int = BATCH, offsets: list[int] | None = None) -> Iterator[Case]:
    fla = importlib.import_module("fla.ops")
    given = {} if offsets is None else {"cu_seqlens": torch.tensor(offsets, device=DEVICE)}
    for name, make in _fla_arguments((batch, LENGTH, HEADS), dtype).items():
        # With a length of its own for each sequence only two are called.
        call = _call(fla, name, make, **(given if name in VARLEN else {}))
        yield name, partial(_no_backward, call) if name in NO_BACKWARD else call
    few = partial(tensor, batch, LENGTH, 1, WIDTH, dtype=dtype)
    weights = partial(_weights, batch, 16, dtype)
    yield (
        "parallel_nsa",
        lambda: (
            fla.parallel_nsa(
                tensor(batch, LENGTH, 16, WIDTH, dtype=dtype),
                few(),
                few(),
                g_cmp=weights(),
                g_slc=weights(),
                block_counts=2,
                block_size=32,
            ),
            (),
        ),
    )
    three = partial(tensor, batch, LENGTH, HEADS, WIDTH, dtype=dtype)
    attention = partial(importlib.import_module, "fla.ops.attn")
    yield "parallel_attn", lambda: (attention().parallel_attn(three(), three(), three()), ())


def _fla_arguments(many: tuple[int, int, int], dtype: Any) -> dict[str, Arguments]:
    """Return the arguments of most operators, by name."""

    def states(width: int = WIDTH) -> Any:
        return tensor(*many, width, dtype=dtype)

    def unit() -> Any:
        return functional.normalize(states().float(), dim=-1).to(dtype).detach().requires_grad_()

    def beta() -> Any:
        return torch.rand(*many, device=DEVICE).sigmoid().to(dtype).requires_grad_()

    def gates(*shape: int) -> Any:
        return gate(*many, *shape, dtype=dtype)

    def qkv() -> tuple[Any, Any, Any]:
        return states(), states(), states()

    def hgrn() -> tuple[Any, Any]:
        long = (*many[:2], HIDDEN)
        return tensor(*long, dtype=dtype), gate(*long, dtype=dtype)

    def rwkv6() -> tuple[Any, ...]:
        return (*qkv(), gates(WIDTH), tensor(HEADS, WIDTH, dtype=dtype))

    def flat_gates() -> Any:
        return gates().float().detach().requires_grad_()

    return {
        "chunk_gla": lambda: (*qkv(), gates(WIDTH)),
        "fused_recurrent_gla": lambda: (*qkv(), gates(WIDTH)),
        "chunk_retention": qkv,
        "fused_recurrent_retention": qkv,
        "parallel_retention": qkv,
        "chunk_delta_rule": lambda: (states(), unit(), states(), beta()),
        "fused_recurrent_delta_rule": lambda: (states(), unit(), states(), beta()),
        "chunk_gated_delta_rule": lambda: (states(), unit(), states(), gates(), beta()),
        "fused_recurrent_gated_delta_rule": lambda: (states(), unit(), states(), gates(), beta()),
        "chunk_linear_attn": qkv,
        "fused_recurrent_linear_attn": qkv,
        "chunk_simple_gla": lambda: (*qkv(), flat_gates()),
        "chunk_rwkv6": rwkv6,
        "fused_recurrent_rwkv6": rwkv6,
        "chunk_rwkv7": lambda: (states(), gates(WIDTH), unit(), states(), unit(), unit()),
        "fused_recurrent_hgrn": hgrn,
        "parallel_based": lambda: (states(16), states(16), states()),
        "chunk_kda": lambda: (states(), unit(), states(), gates(WIDTH), beta()),
        "parallel_forgetting_attn": lambda: (*qkv(), gates()),
    }


def _weights(batch: int, heads: int, dtype: Any) -> Any:
    """Return weights between 0 and 1 for each head."""
    return torch.rand(batch, LENGTH, heads, device=DEVICE).to(dtype).requires_grad_()


def _no_backward(call: Callable[[], Called]) -> Called:
    """Return a result whose backward touches nothing of the operator, which has none."""
    result, given = call()
    first = result[0] if isinstance(result, (tuple, list)) else result
    return first.detach().requires_grad_(), given


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


def _called(call: Callable[[], Called]) -> str:
    torch.manual_seed(0)
    try:
        backward(call()[0])
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001  # an operator may raise anything; the others go on, and this one is named
        trace = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error} ({trace.filename}:{trace.lineno})"
    return "fine"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
