# SPDX-License-Identifier: Apache-2.0
"""Operators of Liger and of FLA, forward and backward, to be called as a program warms up: a test
captures them without a GPU.

`GROUPS` makes the calls of a library, `happened` says how one ended.  Importing this file needs
torch alone.
"""

from __future__ import annotations

import importlib
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
VARLEN = frozenset({"chunk_delta_rule", "chunk_gated_delta_rule"})
NO_BACKWARD = frozenset({"fused_recurrent_gated_delta_rule"})
Call = Callable[[], Any]
Case = tuple[str, Call]
Arguments = Callable[[], tuple[Any, ...]]


def tensor(*shape: int, dtype: Any = torch.bfloat16, grad: bool = True) -> Any:
    """Return small random numbers."""
    made = (torch.randn(shape, device=DEVICE, dtype=torch.float32) * 0.1).to(dtype)
    return made.requires_grad_(grad)


def gate(*shape: int) -> Any:
    """Return logarithms of gates."""
    drawn = torch.randn(shape, device=DEVICE, dtype=torch.float32)
    return functional.logsigmoid(drawn).bfloat16().requires_grad_()


def _first(result: Any) -> Any:
    return result[0] if isinstance(result, (tuple, list)) else result


def liger_cases() -> Iterator[Case]:
    """Yield Liger's operators, each in two types."""
    liger = importlib.import_module("liger_kernel.ops")
    for dtype in (torch.bfloat16, torch.float32):
        kind = str(dtype).rpartition(".")[2]
        for name, (function, make) in _liger(dtype).items():
            yield f"liger.{name}.{kind}", _call(liger, f"Liger{function}Function.apply", make)


def _call(module: Any, name: str, make: Arguments, **more: Any) -> Call:
    # Looked up when it is called: what a release lacks is left out alone.
    return lambda: attrgetter(name)(module)(*make(), **more)


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
    """Yield FLA's operators for sequences of one length, without those that try hundreds of
    configurations.
    """
    yield from ((f"fla.{name}", call) for name, call in _fla())


def varlen_cases() -> Iterator[Case]:
    """Yield FLA's operators for sequences of several lengths in one tensor, whose shapes follow
    from the data of a tensor.
    """
    for name, call in _fla(1, [0, 100, 164, LENGTH]):
        if name in VARLEN:
            yield f"varlen.{name}", call


def _fla(batch: int = BATCH, offsets: list[int] | None = None) -> Iterator[Case]:
    fla = importlib.import_module("fla.ops")
    given = {} if offsets is None else {"cu_seqlens": torch.tensor(offsets, device=DEVICE)}
    for name, make in _fla_arguments((batch, LENGTH, HEADS)).items():
        # With a length of its own for each sequence only two are called.
        call = _call(fla, name, make, **(given if name in VARLEN else {}))
        yield name, partial(_no_backward, call) if name in NO_BACKWARD else call
    few = partial(tensor, batch, LENGTH, 1, WIDTH)
    weights = partial(_weights, batch, 16)
    yield (
        "parallel_nsa",
        lambda: fla.parallel_nsa(
            tensor(batch, LENGTH, 16, WIDTH),
            few(),
            few(),
            g_cmp=weights(),
            g_slc=weights(),
            block_counts=2,
            block_size=32,
        ),
    )
    three = partial(tensor, batch, LENGTH, HEADS, WIDTH)
    attention = partial(importlib.import_module, "fla.ops.attn")
    yield "parallel_attn", lambda: attention().parallel_attn(three(), three(), three())


def _fla_arguments(many: tuple[int, int, int]) -> dict[str, Arguments]:
    """Return the arguments of most operators, by name."""

    def states(width: int = WIDTH) -> Any:
        return tensor(*many, width)

    def unit() -> Any:
        return functional.normalize(states().float(), dim=-1).bfloat16().detach().requires_grad_()

    def beta() -> Any:
        return torch.rand(*many, device=DEVICE).sigmoid().bfloat16().requires_grad_()

    def gates(*shape: int) -> Any:
        return gate(*many, *shape)

    def qkv() -> tuple[Any, Any, Any]:
        return states(), states(), states()

    def hgrn() -> tuple[Any, Any]:
        long = (*many[:2], HIDDEN)
        return tensor(*long), gate(*long)

    def rwkv6() -> tuple[Any, ...]:
        return (*qkv(), gates(WIDTH), tensor(HEADS, WIDTH))

    return {
        "fused_recurrent_gla": lambda: (*qkv(), gates(WIDTH)),
        "chunk_retention": qkv,
        "fused_recurrent_retention": qkv,
        "parallel_retention": qkv,
        "chunk_delta_rule": lambda: (states(), unit(), states(), beta()),
        "fused_recurrent_delta_rule": lambda: (states(), unit(), states(), beta()),
        "chunk_gated_delta_rule": lambda: (states(), unit(), states(), gates(), beta()),
        "fused_recurrent_gated_delta_rule": lambda: (states(), unit(), states(), gates(), beta()),
        "fused_recurrent_linear_attn": qkv,
        "fused_recurrent_rwkv6": rwkv6,
        "fused_recurrent_hgrn": hgrn,
        "parallel_based": lambda: (states(16), states(16), states()),
        "chunk_kda": lambda: (states(), unit(), states(), gates(WIDTH), beta()),
        "parallel_forgetting_attn": lambda: (*qkv(), gates()),
    }


def _weights(batch: int, heads: int) -> Any:
    """Return weights between 0 and 1 for each head."""
    return torch.rand(batch, LENGTH, heads, device=DEVICE).bfloat16().requires_grad_()


def _no_backward(call: Call) -> Any:
    """Return a result whose backward touches nothing of the operator, which has none."""
    return _first(call()).detach().requires_grad_()


GROUPS: dict[str, Callable[[], Iterator[Case]]] = {
    "liger": liger_cases,
    "fla": fla_cases,
    "varlen": varlen_cases,
}


def happened(call: Call) -> str:
    """Call an operator and its backward; returns `fine`, or what it raised and where."""
    torch.manual_seed(0)
    try:
        _first(call()).float().sum().backward()
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001  # an operator may raise anything; the others go on, and this one is named
        trace = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error} ({trace.filename}:{trace.lineno})"
    return "fine"
