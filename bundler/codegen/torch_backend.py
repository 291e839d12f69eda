# SPDX-License-Identifier: Apache-2.0
"""`triton_bundler`: the backend of that name of torch.compile: forward and backward graphs by AOTAutograd, run as generated programs.  Imports torch.

    torch.compile(function, backend="triton_bundler", options={"programs": programs})

torch finds it by the entry point `torch_dynamo_backends`.  A graph that no program can be generated for runs as torch has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition

from bundler.codegen.graph_tracing import decompositions
from bundler.codegen.module_decorators import current_target
from bundler.codegen.program import FallbackCall, Program, program_of_graph
from bundler.codegen.program_build import has_float8, refuse_missing_types
from bundler.errors import ConfigError, UnsupportedOperator
from bundler.package_loggers import logger
from bundler.toolchain import tuner_toolchain as toolchain

_log = logger("bundler.codegen")
_WHOLE_GRAPH = "the whole graph"


def triton_bundler(
    module: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, **_: Any
) -> Any:
    """Compile a graph for torch.compile.

    Args:
        module, example_inputs: as torch hands them over.
        options: `programs`, a list that gets each program, and a `FallbackCall` for each graph that runs as torch has it.

    Raises:
        ConfigError: another option.
    """
    chosen = dict(options or {})
    programs: list[Program | FallbackCall] = chosen.pop("programs", [])
    if chosen:
        raise ConfigError(
            f"backend triton_bundler: expected the option programs, got {', '.join(sorted(chosen))}", got=sorted(chosen)
        )
    compiler = partial(compile_graph, programs=programs)
    return aot_autograd(
        fw_compiler=compiler,
        bw_compiler=compiler,
        inference_compiler=compiler,
        decompositions=decompositions(),
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )(module, example_inputs)


def compile_graph(
    module: fx.GraphModule, _example_inputs: Sequence[Any], *, programs: list[Program | FallbackCall]
) -> Callable[..., Any]:
    """Return what runs a graph of ATen operators: a program, or the graph itself where none can be generated."""
    try:
        program = program_of_graph(module, guarded=True)
        if has_float8(program.sources) and program.device != "cpu":
            refuse_missing_types(program.sources, current_target())
    except UnsupportedOperator as error:
        return _as_it_is(module, programs, error.message)
    if program.kernels and program.device == "cpu" and not _is_interpreted(program):
        return _as_it_is(
            module, programs, "its tensors are on the CPU, which no kernel runs on without Triton's interpreter"
        )
    programs.append(program)
    boxed: Callable[..., Any] = make_boxed_func(lambda *inputs: list(program.run(*inputs)))
    return boxed


def _is_interpreted(program: Program) -> bool:
    return all(toolchain.interpreted(kernel.fn) for kernel in program.modules.values())


def _as_it_is(module: fx.GraphModule, programs: list[Program | FallbackCall], reason: str) -> Callable[..., Any]:
    _log.warning("backend triton_bundler: a graph runs as torch has it: %s", reason)
    programs.append(FallbackCall(_WHOLE_GRAPH, reason))
    boxed: Callable[..., Any] = make_boxed_func(module.forward)
    return boxed
