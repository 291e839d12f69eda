# SPDX-License-Identifier: Apache-2.0
"""`autograd_key`: names a graph of Dynamo's with all that decides what AOTAutograd makes of it, and
which programs come of that.  Imports torch.

::

    of `graph_key`   generator, libraries, state and options
    tracing          gradients, autocast, which attention torch takes, settings of AOTAutograd and of
                     its partitioner, the GPUs, and the files of torch that trace and decompose
    inputs           type, dtype, sizes, strides, offset, device, whether they have gradients
    graph            each node: function or method, arguments, and what Dynamo knows of its value

A graph that holds something else than what is listed in `_DynamoLines`, or whose inputs share
memory, has no key: AOTAutograd takes guards by what it sees there.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._dynamo import compiled_autograd
from torch._functorch import config
from torch._inductor import config as inductor_config
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from bundler.codegen.graph_key import GraphLines, Unkeyed, surroundings
from bundler.package_loggers import logger

_log = logger("bundler.codegen")
# Where torch's functions are, and Python's that Dynamo leaves in graphs.
_PACKAGES = frozenset({"torch", "_operator", "operator", "math", "builtins"})
# Ranks of a group may differ in what they trace.
_NOT_TORCHS = ("torch.distributed",)
_OPERATORS = frozenset({"aten", "prims"})
# Parts of torch that decide what a graph is taken apart into.
_TRACING = (
    "_decomp",
    "_functorch",
    "_higher_order_ops",
    "_library",
    "_prims",
    "_prims_common",
    "_refs",
    "_subclasses",
    "autograd",
    "fx",
    "nn",
)
# Settings that torch leaves out of what it saves, since they may be functions.
_FUNCTIONS = (
    "joint_custom_pass",
    "activation_memory_budget_runtime_estimator",
    "activation_memory_budget_solver",
)


def autograd_key(module: fx.GraphModule, inputs: Sequence[Any], options: Any) -> str | None:
    """Return the digest of what decides the programs of a graph, 64 hex digits; None where that is
    not known.

    Args:
        module: of Dynamo, as torch.compile's backends get it.
        inputs: examples.
        options: `GenerateOptions`, by which programs are generated.
    """
    lines = _DynamoLines(module)
    try:
        graph = "\n".join(lines.all())
        given = "\n".join(lines.inputs(inputs))
        parts = {
            **surroundings(options, lines.devices),
            "tracing": "\n".join(_tracing(lines.devices)),
            "inputs": given,
            "graph": graph,
            # Where calls are CUDA graphs, inputs of backward graphs are not written over.
            "graphs": str(options.graphs),
        }
    except Unkeyed as error:
        _log.debug("a graph of Dynamo's has no key: %s", error)
        return None
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _tracing(devices: set[str]) -> Iterator[str]:
    """Yield what torch's state decides of a trace."""
    if compiled_autograd.compiled_autograd_enabled or _get_current_dispatch_mode_stack():
        raise Unkeyed("a mode that changes what is traced")
    if torch._C._len_torch_function_stack():  # noqa: SLF001  # torch has no other name for it
        raise Unkeyed("a mode that changes what is called")
    if any(callable(getattr(config, name, None)) for name in _FUNCTIONS):
        raise Unkeyed("a function of the user's that decides what is saved")
    yield f"{torch.is_grad_enabled()} {torch.is_inference_mode_enabled()}"
    for kind in sorted({"cpu", *(name.partition(":")[0] for name in devices)}):
        yield f"{kind} {torch.is_autocast_enabled(kind)} {torch.get_autocast_dtype(kind)}"
    attention = torch.backends.cuda
    yield " ".join(
        str(one())
        for one in (
            attention.flash_sdp_enabled,
            attention.mem_efficient_sdp_enabled,
            attention.math_sdp_enabled,
            attention.cudnn_sdp_enabled,
            attention.fp16_bf16_reduction_math_sdp_allowed,
            torch._C._get_sdp_priority_order,  # noqa: SLF001  # torch has no other name for it
            torch.is_deterministic_algorithms_warn_only_enabled,
        )
    )
    yield f"{torch.backends.mkldnn.enabled} {torch.utils.deterministic.fill_uninitialized_memory}"
    yield hashlib.sha256(config.save_config()).hexdigest()
    yield inductor_config.get_hash().hex()
    for name in sorted(devices):
        if torch.device(name).type == "cuda":
            known = torch.cuda.get_device_properties(name)
            yield f"{known.name} {known.major}.{known.minor} {known.multi_processor_count}"
    yield _torchs_files()


@functools.cache
def _torchs_files() -> str:
    """Return a digest of names, sizes and times of torch's files that trace."""
    root, found = Path(torch.__file__).parent, []
    folders = [(str(root), [one.name for one in root.glob("*.py")])]
    for folder in _TRACING:
        folders += [(at, names) for at, _, names in os.walk(root / folder)]
    for at, names in folders:
        for name in names:
            if name.endswith(".py"):
                about = os.stat(os.path.join(at, name))
                found.append((at, name, about.st_size, about.st_mtime_ns))
    return hashlib.sha256(repr(sorted(found)).encode()).hexdigest()


def _full_name(packet: OpOverloadPacket) -> str:
    return str(packet._qualified_op_name)  # noqa: SLF001  # torch has no other name for it


class _DynamoLines(GraphLines):
    """A graph of Dynamo as text, a line a node."""

    def inputs(self, inputs: Sequence[Any]) -> Iterator[str]:
        """Yield a line for each example."""
        storages = [
            one.untyped_storage()._cdata  # noqa: SLF001  # torch has no other name for it
            for one in inputs
            if isinstance(one, torch.Tensor)
        ]
        if len({*storages}) < len(storages):
            raise Unkeyed("inputs that share memory")
        for one in inputs:
            yield f"{type(one).__name__} {self._value(one)}"

    def _target(self, node: fx.Node) -> str:
        if node.op in {"placeholder", "output"}:
            return ""
        if node.meta.get("custom"):
            raise Unkeyed("an annotation of the user's")
        if node.op == "call_method":
            return f"method {node.target}"
        if node.op != "call_function":
            raise Unkeyed(node.op)
        return self._function(node.target)

    def _known(self, node: fx.Node) -> str:
        return self._value(node.meta["example_value"]) if "example_value" in node.meta else ""

    def _function(self, target: Any) -> str:
        if isinstance(target, (OpOverload, OpOverloadPacket)):
            qualified = target.name() if isinstance(target, OpOverload) else _full_name(target)
            if qualified.partition("::")[0] not in _OPERATORS:
                raise Unkeyed(f"an operator of the user's: {target}")
            return f"operator {target}"
        name, home = getattr(target, "__qualname__", None), getattr(target, "__module__", None)
        if name is None:
            raise Unkeyed(f"no function: {target}")
        if isinstance(target, types.BuiltinFunctionType) and home is None:
            short = name.rpartition(".")[2]
            if getattr(torch, short, None) is not target:
                raise Unkeyed(f"a function of nobody's: {name}")
            return f"torch.{short}"
        if str(home).partition(".")[0] not in _PACKAGES or str(home).startswith(_NOT_TORCHS):
            raise Unkeyed(f"a function of the user's: {home}.{name}")
        return f"{home}.{name}"

    def _value(self, value: Any) -> str:
        if isinstance(value, slice):
            return f"slice{self._value((value.start, value.stop, value.step))}"
        return "..." if value is Ellipsis else super()._value(value)

    def _tensor(self, tensor: torch.Tensor) -> str:
        facts = (
            tensor.requires_grad,
            tensor.is_leaf,
            isinstance(tensor, torch.nn.Parameter),
            tensor.is_conj(),
            tensor.is_neg(),
            tensor.is_inference(),
        )
        return f"{super()._tensor(tensor)} {facts}"

    def _symbolic(self, value: Any) -> str:
        raise Unkeyed(f"a size that changes: {value}")
