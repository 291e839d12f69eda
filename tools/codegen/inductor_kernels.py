# SPDX-License-Identifier: Apache-2.0
"""`of_inductor`, `of_ours`: what kernels a function becomes, by Inductor and by our generator, on a machine without a GPU.

Inductor generates Triton for the CPU with `cpu_backend="triton"`.  So that it decides as for a GPU, it is told of one: a driver that only says which, the
properties of an H200, and that its device counts as a GPU.  It is stopped once the text is there; nothing is compiled or run.  `counts` calls both.
"""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from bundler.codegen import generate
from bundler.format.entries import Target
from bundler.runtime.program.program_plan import Launch, OperatorStep
from bundler.toolchain.declared_target import declared

Found = dict[str, Any]
_TARGET = "cuda:90"
_MULTIPROCESSORS, _REGISTERS, _THREADS = 132, 65536, 2048
_MODULE = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str", re.DOTALL)
_CALLED = re.compile(
    r"^ +(?:\w+ = )?(?:extern_kernels\.|torch\.ops\.|aten\.|inductor_ops\.)\S+\(", re.MULTILINE
)


class _TextIsThereError(Exception):
    """Stops Inductor before it imports what it generated."""


def of_ours(function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> Found:
    """Return what our generator makes of a function."""
    program = generate(function, inputs)
    steps = program.plan.steps
    launched = [step.kernel for step in steps if isinstance(step, Launch)]
    return {
        "calls": sum(isinstance(step, OperatorStep) for step in steps),
        "kernels": [{"name": name, **_facts(program.sources[name])} for name in launched],
    }


def of_inductor(function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> Found:
    """Return what Inductor makes of a function."""
    text = _wrapper(function, inputs)
    sources = dict(_MODULE.findall(text))
    body = text[text.index("def call(") :]
    launched = re.findall(r"^ +(\w+)\.run\(", body[: body.index("\ndef ")], re.MULTILINE)
    return {
        "calls": len(_CALLED.findall(body)),
        "kernels": [{"name": name, **_facts(sources[name])} for name in launched],
    }


def _facts(source: str) -> Found:
    """Return what a module says of its kernel: kind, size hints, masks that are always true, attributes of parameters."""
    kind = re.search(r"(?:@heuristic\(\s*'|@triton_heuristics\.)(\w+)", source)
    hints = re.search(r"size_hints=(\{.*?\})", source)
    configs = re.search(r"'configs': \[(\{.*?\]\]\}|\{\}|.*?\)\])", source)
    constants = re.search(r"'constants': (\{.*?\})", source)
    signature = re.search(r"'signature': (\{.*?\})", source)
    assert kind is not None
    assert hints is not None
    assert signature is not None
    passed = [name for name in ast.literal_eval(signature[1]).values() if name != "constexpr"]
    sizes = ast.literal_eval(hints[1])
    masked = {
        prefix for prefix in sizes if re.search(rf"\b{prefix}mask = {prefix}index < ", source)
    }
    return {
        "kind": kind[1],
        "size_hints": sizes,
        "full": sorted(sizes.keys() - masked),
        "types": sorted(passed),
        "unaligned": len(passed) - (configs[1].count("tt.divisibility") if configs else 0),
        "ones": len(ast.literal_eval(constants[1])) if constants else 0,
    }


# Inductor ---------------------------------------------------------------------------------------------------------------


def _wrapper(function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> str:
    """Return the text of the module that Inductor generates for a function."""
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering

    texts: list[str] = []

    def keep(lowering: Any, *_: Any) -> None:
        texts.append(lowering.codegen()[0].value)
        raise _TextIsThereError

    def called(*given: Any) -> Any:
        return function(*given)

    functional = torch.func.functionalize(called, remove="mutations")
    traced = make_fx(functional, decomposition_table=select_decomp_table(), tracing_mode="fake")(
        *inputs
    )
    torch._dynamo.reset()  # noqa: SLF001
    with (
        _as_for_a_gpu(),
        mock.patch.object(GraphLowering, "compile_to_module", keep),
        torch.no_grad(),
    ):
        try:
            compile_fx(traced, list(inputs))
        except Exception as error:
            if not texts:
                raise RuntimeError(f"Inductor generates nothing for {function.__name__}") from error
    return texts[0]


@contextlib.contextmanager
def _as_for_a_gpu() -> Iterator[None]:
    from torch._inductor import config, scheduler, utils
    from torch._inductor.codegen.triton import TritonScheduling
    from torch._inductor.runtime.hints import DeviceProperties

    told = DeviceProperties(
        type="cuda", index=0, multi_processor_count=_MULTIPROCESSORS, cc=90, major=9, regs_per_multiprocessor=_REGISTERS,
        max_threads_per_multi_processor=_THREADS, warp_size=32,
    )  # fmt: skip
    with (
        declared(Target.parse(_TARGET)),
        config.patch(cpu_backend="triton", fx_graph_cache=False, compile_threads=1),
        mock.patch.object(utils, "GPU_TYPES", [*utils.GPU_TYPES, "cpu"]),
        mock.patch.object(DeviceProperties, "create", classmethod(lambda _cls, _device: told)),
        mock.patch.object(
            scheduler.Scheduler, "create_backend", lambda self, _device: TritonScheduling(self)
        ),
        mock.patch.object(scheduler, "device_need_guard", return_value=False),
    ):
        yield
