# SPDX-License-Identifier: Apache-2.0
"""`generate` and `Program`: from a PyTorch function to kernels, built for any GPU, and a plan that runs them.

    program = bundler.codegen.generate(function, [x, weight])
    bundle = program.build(["cuda:90", "hip:gfx942"])
    (result,) = program.run(x, weight)

Users call it, the command `generate`, and the backend of torch.compile.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from bundler.codegen.module_text import ProgramKernel
from bundler.codegen.program_build import Buildable, build_bundle
from bundler.codegen.program_builder import build_program
from bundler.compile.source_modules import source_module
from bundler.format.bundle import Bundle
from bundler.format.cached_properties import cached_property
from bundler.runtime.launch.program_plan import ProgramPlan
from bundler.runtime.launch.program_replay import Launcher, ProgramRunner
from bundler.runtime.launch.seed_stream import SeedSource
from bundler.toolchain.torch_memory import TorchMemory, unusual_numbers


@dataclass(frozen=True)
class GenerateOptions:
    """How programs are generated.

    Attributes:
        name: of the program in a bundle.
        sources: directory for modules that are imported; None takes the user's cache directory.
        wide_indices: give indices 64 bits wherever sizes may change from call to call; else they have 32, and a call with more elements is refused.
        assert_indices: let kernels assert that indices which they read from tensors are in range, as torch does, unless that is known.
        benchmark_harness: end each kernel's module with a benchmark, which runs where the module is run as a program.
        nan_checks: look after each launch of `Program.run` whether a tensor of floats that the kernel was given has a NaN or an infinity.
    """

    name: str = "program"
    sources: str | None = None
    wide_indices: bool = False
    assert_indices: bool = True
    benchmark_harness: bool = False
    nan_checks: bool = False


@dataclass(frozen=True)
class FallbackCall:
    """An operator that the program calls as it is, and why no kernel was generated."""

    operator: str
    reason: str


@dataclass(frozen=True, eq=False)
class Program:
    """Kernels and the plan that runs them.

    Attributes:
        kernels: by name, in the order in which they are first launched.
        plan: what the program does, as data.
        fallbacks: operators that are called as they are.
        constants: tensors that the graph holds, by name.
        device: where its tensors lie in this process, as torch names it.
        options: as it was generated.
    """

    kernels: Mapping[str, ProgramKernel]
    plan: ProgramPlan
    fallbacks: tuple[FallbackCall, ...]
    constants: Mapping[str, Any] = field(repr=False)
    device: str = "cpu"
    options: GenerateOptions = field(default_factory=GenerateOptions)

    @property
    def sources(self) -> dict[str, str]:
        """The text of each kernel's module, by the kernel's name."""
        return {name: kernel.source for name, kernel in self.kernels.items()}

    def build(self, targets: Sequence[str], *, workers: int | None = 1, candidates: int | Literal["all"] = 1) -> Bundle:
        """Compile the kernels for targets, without a GPU, into a bundle that also holds the plan.

        Args:
            targets: such as `cuda:90`.
            workers: processes that compile; None for one a core, 1 compiles in this process.
            candidates: how many candidates of each kernel, or `all`; a replay takes the one that a tuning record in the bundle names, else the first.

        Raises:
            CompileFailed: a kernel does not compile for a target; the first one's message.
            UnsupportedOperator: a kernel has an 8-bit float that a target lacks.
            ConfigError: a target is none, or a number of candidates.
        """
        buildable = Buildable(self.options.name, self.sources, self.modules, self.plan)
        return build_bundle(buildable, targets, workers, candidates)

    def run(self, *inputs: Any, seed: int | None = None) -> tuple[Any, ...]:
        """Run the program in this process, by Triton's JIT, or its interpreter where that is switched on.

        Args:
            *inputs: tensors and numbers, as the example's.
            seed: decides the random numbers of this call; None draws from torch's generator, which `torch.manual_seed` sets.

        Raises:
            FloatingPointError: a NaN or an infinity, where the program was generated with `nan_checks`.

        Returns:
            The tensors that the function returns, in order, whatever tuples and lists it has them in.
        """
        return self._runner(*inputs, seed=seed)

    def runner(self, memory: Any, launch: Launcher, seeds: SeedSource | None = None) -> ProgramRunner:
        """Return what runs the plan with other memory, another launcher, or seeds from elsewhere."""
        return ProgramRunner(self.plan, launch, memory, self.constants, seeds)

    @cached_property
    def modules(self) -> Mapping[str, Any]:
        """The kernels, imported: name -> `ModuleKernel`; importing runs the generated text."""
        return {
            name: getattr(source_module(kernel.source, self.options.sources).load(), name)
            for name, kernel in self.kernels.items()
        }

    @cached_property
    def _runner(self) -> ProgramRunner:
        def launch(name: str, arguments: Sequence[Any], _sizes: Mapping[str, int]) -> None:
            self.modules[name].run(*arguments)
            wrong = unusual_numbers(arguments) if self.options.nan_checks else ""
            if wrong:
                raise FloatingPointError(
                    f"{name}: after its launch {wrong}: expected finite numbers; look at what the function computes there, or leave nan_checks out"
                )

        memory = TorchMemory(self.device)
        return self.runner(memory, launch, memory.seeds)


def generate(
    function: Any,
    example_inputs: Sequence[Any],
    *,
    dynamic: bool = False,
    options: GenerateOptions | None = None,
) -> Program:
    """Generate the kernels of a function.

    Args:
        function: of tensors, or a `torch.export.ExportedProgram`, whose parameters and buffers are the first inputs of the program, and whose
            changed buffers its first outputs; backward steps that a function takes are part of the program.
        example_inputs: one tensor or number for each argument; their values do not matter.
        dynamic: let sizes change from call to call, where torch finds that they may.
        options: see `GenerateOptions`.

    Returns:
        The program.  An operator that has no kernel is called as it is, and listed in `fallbacks`.

    Raises:
        UnsupportedOperator: the graph has something that is no ATen operator.
    """
    tracing = importlib.import_module("bundler.codegen.graph_tracing")
    return program_of_graph(tracing.trace(function, example_inputs, dynamic=dynamic), options)


def program_of_graph(module: Any, options: GenerateOptions | None = None, *, guarded: bool = False) -> Program:
    """Return the program of an FX graph whose nodes have fake tensors.

    Args:
        module: the graph.
        options: see `GenerateOptions`.
        guarded: have torch see to it that sizes which change fit where they were taken to, so that it compiles anew where they do not.
    """
    options = options or GenerateOptions()
    graph = importlib.import_module("bundler.codegen.graph_reading").read_graph(module)
    bounded = graph.guarded if guarded else lambda _: True
    built = build_program(
        graph,
        None if options.wide_indices else bounded,
        asserted=options.assert_indices,
        harness=options.benchmark_harness,
    )
    fallbacks = tuple(FallbackCall(found.operator, found.reason) for found in graph.fallbacks)
    return Program(built.kernels, built.plan, fallbacks, graph.constants, graph.device, options)
