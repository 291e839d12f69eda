# SPDX-License-Identifier: Apache-2.0
"""Generates the kernels of graphs as models have them, and lets Inductor generate them too, without
a GPU: writes docs/results/codegen-counts.json.

    python -m tools.codegen counts [NAME ...]

A row has, for both, the launches of one run, calls of operators among them, and of each kernel its
size hints, the dimensions without a mask (`full`), the types of its parameters, how many of these
are not known to be multiples of 16, and how many are known to be 1. Where both launch kernels of
the same sizes, what differs between these is named.

Inductor generates Triton for the CPU with `cpu_backend="triton"`. So that it decides as for a GPU,
it is told of one: a driver that only says which, the properties of an H200, and that its device
counts as a GPU. It is stopped once the text is there; nothing is compiled or run.

Exit status 1 when we launch more kernels than Inductor for a graph.
"""

from __future__ import annotations

import ast
import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from bundler.codegen import generate
from bundler.format.entries import Target
from bundler.runtime.program.program_plan import Launch, OperatorStep
from bundler.toolchain.declared_target import declared
from tools.codegen.bench_rows import EXPLAINED
from tools.codegen.command_line import parser
from tools.codegen.compared_graphs import GRAPHS
from tools.shared import measurement

RESULT = "codegen-counts"
Row = dict[str, Any]
# Graphs with a kernel of the same sizes as Inductor's and other parameters, and why.
OTHER_PARAMETERS: Mapping[str, str] = {
    "both_directions": (
        "the kernel of the rows stores what its programs come to in the columns, too; Inductor's"
        " others read everything again"
    ),
    "joined": "one kernel reads every part; Inductor writes each part in a kernel of its own",
    "softmax_looped": "nobody reads the maxima and the sums, so they are not stored",
    "group_norm_backward": (
        "what belongs to a group is computed again for its elements; Inductor stores some of it"
        " before"
    ),
    "router": ("the softmax stores its largest elements and their places; Inductor's stores all"),
    "few_long_variances": (
        "all pieces have one length, so no kernel reads how many elements each has"
    ),
    "group_norm_of_convolution": (
        "the kernel that reads what was convolved applies the norm; Inductor's copies it first"
    ),
    "rotary": "both halves are read where they are needed; Inductor joins them in memory before",
    "adamw": (
        "moments and parameters are changed where they are; Inductor reads and writes them as two"
        " parameters"
    ),
}
_COMPARED = ("full", "unaligned", "ones", "types")
_Found = dict[str, Any]
_TARGET = "cuda:90"
_MULTIPROCESSORS, _REGISTERS, _THREADS = 132, 65536, 2048
_MODULE = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str", re.DOTALL)
# Calls of operators in a module of Inductor's.
CALLED = re.compile(
    r"^ +(?:\w+ = )?(?:extern_kernels\.|torch\.ops\.|aten\.|inductor_ops\.)\S+\(", re.MULTILINE
)


def main() -> int:
    """Count, and write the result."""
    options_parser = parser(__doc__, "names results")
    options = options_parser.parse_args()
    unknown = set(options.names) - GRAPHS.keys()
    if unknown:
        options_parser.error(
            f"no graph is called {', '.join(sorted(unknown))}; there are {', '.join(GRAPHS)}"
        )
    rows = [row_of(name) for name in options.names or GRAPHS]
    more = [
        f"{row['graph']}: {count} more launches than Inductor"
        for row in rows
        if (count := row["ours"]["launches"] - row["inductor"]["launches"]) > 0
        and "explained" not in row
    ]
    for row in rows:
        print(
            f"{row['graph']:<24} {row['ours']['launches']:>2} {row['inductor']['launches']:>2} "
            f" {'; '.join(row['differs'])}"
        )
    for line in more:
        print(line)
    if not options.names:
        print(f"wrote {measurement.save(RESULT, {'rows': rows}, options.results)}")
    return 1 if more else 0


def row_of(name: str) -> Row:
    """Return what both make of a graph."""
    function, make = GRAPHS[name]
    ours, theirs = _of_ours(function, make()), _of_inductor(function, make())
    row: Row = {
        "graph": name,
        "ours": ours,
        "inductor": theirs,
        "differs": differences(ours, theirs),
    }
    for side in (ours, theirs):
        side["launches"] = len(side["kernels"]) + side["calls"]
    if name in OTHER_PARAMETERS:
        row["parameters"] = OTHER_PARAMETERS[name]
    if name in EXPLAINED:
        row["explained"] = EXPLAINED[name]
    return row


def differences(ours: Row, theirs: Row) -> list[str]:
    """Return what differs between kernels of one kind and one size, where each side has one such
    kernel.
    """
    found = []
    for kernel in ours["kernels"]:
        same = [[k for k in side["kernels"] if _key(k) == _key(kernel)] for side in (ours, theirs)]
        if list(map(len, same)) != [1, 1]:
            continue
        other = same[1][0]
        found += [
            f"{kernel['kind']} {_sizes(kernel)}: {name} {kernel[name]}, Inductor {other[name]}"
            for name in _COMPARED
            if kernel[name] != other[name]
        ]
    return found


def _key(kernel: Row) -> tuple[str, str]:
    return kernel["kind"], _sizes(kernel)


def _sizes(kernel: Row) -> str:
    return " ".join(f"{prefix}={size}" for prefix, size in sorted(kernel["size_hints"].items()))


class _TextIsThereError(Exception):
    """Stops Inductor before it imports what it generated."""


def _of_ours(function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> _Found:
    """Return what our generator makes of a function."""
    program = generate(function, inputs)
    steps = program.plan.steps
    launched = [step.kernel for step in steps if isinstance(step, Launch)]
    return {
        "calls": sum(isinstance(step, OperatorStep) for step in steps),
        "kernels": [{"name": name, **_facts(program.sources[name])} for name in launched],
    }


def _of_inductor(function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> _Found:
    """Return what Inductor makes of a function."""
    text = _wrapper(function, inputs)
    sources = dict(_MODULE.findall(text))
    body = text[text.index("def call(") :]
    launched = re.findall(r"^ +(\w+)\.run\(", body[: body.index("\ndef ")], re.MULTILINE)
    return {
        "calls": len(CALLED.findall(body)),
        "kernels": [{"name": name, **_facts(sources[name])} for name in launched],
    }


def _facts(source: str) -> _Found:
    """Return what a module says of its kernel: kind, size hints, masks that are always true,
    attributes of parameters.
    """
    kind = re.search(r"(?:@heuristic\(\s*'|@triton_heuristics\.|@(?=combination))(\w+)", source)
    hints = re.search(r"size_hints=(\{.*?\})", source)
    configs = re.search(r"'configs': \[(\{.*?\]\]\}|\{\}|.*?\)\])", source)
    constants = re.search(r"'constants': (\{.*?\})", source)
    signature = re.search(r"'signature': (\{.*?\})", source)
    assert kind is not None
    assert signature is not None
    passed = [name for name in ast.literal_eval(signature[1]).values() if name != "constexpr"]
    # A kernel of several parts has no sizes of its own.
    sizes = ast.literal_eval(hints[1]) if hints and kind[1] != "combination" else {}
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


# ----------------------------------------------------------------------------------------- Inductor


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
        type="cuda",
        index=0,
        multi_processor_count=_MULTIPROCESSORS,
        cc=90,
        major=9,
        regs_per_multiprocessor=_REGISTERS,
        max_threads_per_multi_processor=_THREADS,
        warp_size=32,
    )
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


if __name__ == "__main__":
    sys.exit(main())
