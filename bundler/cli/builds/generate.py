# SPDX-License-Identifier: Apache-2.0
"""The command `generate`: a PyTorch function becomes kernels for GPUs that need not be here, in a
bundle with the program that launches them.

It imports the function's module, as `build` does, and hands the function to
`bundler/codegen/program.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import traceback
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from bundler.cli import wording
from bundler.cli.builds.build import printing_aside
from bundler.cli.command import command, flag, option, repeated, targets_option
from bundler.cli.pack import check_output, save, show_programs, written
from bundler.cli.terminal import Screen
from bundler.compile import module_import
from bundler.config import without_registered_bundles
from bundler.errors import BundlerError, ConfigError, NotFound
from bundler.format.entries import Target
from bundler.project import install
from bundler.runtime.program.program_summary import programs_of, summary_of
from bundler.runtime.program.program_weights import check_weights, stored_tensors
from bundler.toolchain.torch_memory import example_tensor, random_example

if TYPE_CHECKING:
    from bundler.codegen.program import Program

_INPUTS = "example_inputs"


@command(
    "Generate kernels of a PyTorch function, for GPUs that need not be here.",
    "generate model.py:softmax --input float32[128,512] --target cuda:90 -o softmax.tbundle",
    "generate model.py:prefill model.py:decode --templates all --target cuda:90 -o model.tbundle",
    "generate model.py:softmax --input float32[128,512] --show",
    name="generate",
)
@click.argument("functions", metavar="MODULE:FUNCTION...", nargs=-1, required=True)
@repeated(
    "--input TYPE[SIZES]",
    "inputs",
    "An argument of the function, such as float32[128,512]; without any, FUNCTION_inputs() of the"
    f" module, or else {_INPUTS}().",
)
@targets_option()
@option("-o", "--output FILE", "The bundle to write.")
@flag("--dynamic", "Let sizes change from call to call.")
@option("--device D", "Trace for the device D, such as cuda, which need not be here.")
@option(
    "--name N",
    "What the program is called in the bundle; without it as the function is.",
    default="",
)
@repeated(
    "--weights FILE",
    "weights",
    "A file of safetensors, or its index: compare what the module needs with what is there.",
)
@option(
    "--templates WHICH",
    "all: products of matrices and attention become kernels, too, and what torch would still"
    " compute is refused; none: these are called; where faster: as a measurement on the GPU here,"
    " or a tuning record, says of each; by rule: products that cuBLAS is known to be slow at.",
    type=click.Choice(["all", "none", "where faster", "by rule"]),
    default="none",
)
@flag("--show", "Print the generated kernels.")
@flag(
    "--verify",
    "Run the program beside eager torch: on a GPU, or with TRITON_INTERPRET=1 on the CPU.",
)
@flag("--debug", "Where the function raises, print all of the traceback, and what torch logs.")
def generate_command(
    screen: Screen,
    functions: tuple[str, ...],
    inputs: tuple[str, ...],
    targets: tuple[Target, ...],
    output: str | None,
    weights: tuple[str, ...],
    show: bool,
    verify: bool,
    debug: bool,
    **options: Any,
) -> None:
    """Generate the kernels of FUNCTION, compile them for targets, and write a bundle with them and
    the program; of several, such as prefill and decode of a model, one bundle.

    MODULE is a file or a dotted name of a Python module, which is imported. Operators that no
    kernel is generated for are called as they are when the program runs, and listed. With --verify
    each --input has random numbers, of floats, and lies on the GPU where there is one. FUNCTION may
    be a torch.nn.Module, or a class of one that takes no arguments; which parameters and buffers
    the program needs is in the bundle, and printed.
    """
    if bool(targets) != (output is not None):
        raise click.UsageError("give --target and -o together, or neither with --show")
    if not (targets or show or verify):
        raise click.UsageError("nothing to do: give --target and -o, --show, or --verify")
    if len(functions) > 1 and (inputs or options["name"]):
        raise click.UsageError("--input and --name are of one function; give one function")
    if output is not None:
        check_output(output)
    aside = printing_aside(screen)
    with aside, without_registered_bundles(), _user_mistakes(debug=debug):
        target = targets[0] if targets else Target("cuda", "90")
        programs = [_generated(one, inputs, target, verify=verify, **options) for one in functions]
    told = []
    for program in programs:
        _compare_weights(program, weights)
        if show and not screen.as_json:
            _show_kernels(screen, program)
        told.append(_told(screen, program))
    summaries = [summary_of(program.name, program.plan) for program in programs]
    whole: dict[str, Any] = {}
    if output is not None:
        with aside, without_registered_bundles():
            from bundler.codegen.program import build_programs

            bundle = build_programs(programs, [str(target) for target in targets])
        summaries = programs_of(bundle)
        size = save(screen, bundle, output)
        show_programs(screen, summaries)
        number = wording.count(len(bundle.kernels), "kernel")
        screen.done(f"wrote {output}: {number}, {wording.size(size)}, {bundle.digest}")
        whole = written(bundle, output, size)
    else:
        show_programs(screen, summaries)
    known = {summary.name: dataclasses.asdict(summary) for summary in summaries}
    each = [
        one | {"program": known[program.name]} for one, program in zip(told, programs, strict=True)
    ]
    screen.finish({**whole, **(each[0] if len(each) == 1 else {"programs": each})})


def _told(screen: Screen, program: Program) -> dict[str, Any]:
    """Tell which operators a program calls, and whether it was compared; returns what JSON has of
    it.
    """
    for fallback in program.fallbacks:
        screen.line(f"called as it is: {fallback.operator}: {fallback.reason}")
    facts: dict[str, Any] = {
        "kernels": {kernel: made.digest for kernel, made in program.kernels.items()},
        "fallbacks": [vars(fallback) for fallback in program.fallbacks],
    }
    if program.verifier is not None and program.verifier.verification is not None:
        facts["verified"] = vars(program.verifier.verification)
        found = program.verifier.verification
        beside = "eager torch and float64" if found.float64 else "eager torch"
        screen.line(f"equal to {beside}: {', '.join(found.checked) or 'nothing'}")
        for unchecked, reason in found.unchecked.items():
            screen.line(f"not compared: {unchecked}: {reason}")
    return facts


def _compare_weights(program: Program, files: Sequence[str]) -> None:
    """Raise where files lack what the program's module names, or have it otherwise."""
    if files:
        plan = program.plan
        others = [name for name in plan.constants if not plan.weights[name].names]
        check_weights(plan, stored_tensors(files), dict.fromkeys(others))


def _show_kernels(screen: Screen, program: Program) -> None:
    for kernel, source in program.sources.items():
        screen.line(kernel, style="bold")
        for comment in program.comments.get(kernel, ()):
            screen.text("\n".join(comment))
        screen.text(source)


@contextlib.contextmanager
def _user_mistakes(*, debug: bool) -> Iterator[None]:
    """Tell what the user's function raises in one message, without the frames of torch and ours."""
    logging.disable(logging.NOTSET if debug else logging.ERROR)  # torch logs tracebacks of its own
    try:
        yield
    except (BundlerError, click.ClickException):
        raise
    except Exception as error:
        if debug:
            traceback.print_exception(error)
        from bundler.codegen.graph_errors import raised_by_user

        raise raised_by_user(error) from error
    finally:
        logging.disable(logging.NOTSET)


def _generated(
    path: str,
    inputs: Sequence[str],
    target: Target,
    *,
    name: str,
    verify: bool,
    templates: str,
    **traced: Any,
) -> Program:
    """Return the program of a function; `traced` is what `generate` is told of its tracing."""
    try:
        # It needs torch, and what comes with torch, which the other commands do without.
        from bundler.codegen.program import GenerateOptions, generate
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"generate needs torch, and {error.name} is not installed; {install('torch')}",
            extra="torch",
        ) from error
    module_name, _, function_name = path.rpartition(":")
    if not module_name:
        raise click.UsageError(f"{path}: expected MODULE:FUNCTION, such as model.py:softmax")
    module = module_import.load(module_import.find(module_name), target)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise NotFound(f"{module_name} has no function {function_name!r}", name=function_name)
    if isinstance(function, type) and hasattr(function, "named_parameters"):
        function = function()
    made = random_example if verify else example_tensor
    values = (
        [made(text) for text in inputs]
        if inputs
        else _declared_inputs(module, module_name, function_name)
    )
    options = GenerateOptions(name=name, verify=verify, templates=templates)
    program = generate(function, values, options=options, **traced)
    if verify:
        if program.kernels and program.device == "cpu" and not program.is_interpreted:
            raise ConfigError(
                "--verify runs the program, and its tensors are on the CPU: set"
                f" TRITON_INTERPRET=1, or have {_INPUTS}() return tensors on a GPU",
                device=program.device,
            )
        program.run(*values)
    return program


def _declared_inputs(module: Any, name: str, function: str) -> list[Any]:
    declared = getattr(module, f"{function}_inputs", None) or getattr(module, _INPUTS, None)
    if not callable(declared):
        raise ConfigError(
            f"{name} has no function {_INPUTS}(); write one that returns the arguments, or give"
            " --input",
            name=name,
        )
    return list(declared())
