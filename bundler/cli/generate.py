# SPDX-License-Identifier: Apache-2.0
"""The command `generate`: a PyTorch function becomes kernels for GPUs that need not be here, in a bundle with the program that launches them.

It imports the function's module, as `build` does, and hands the function to `bundler/codegen/program.py`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from bundler.cli import wording
from bundler.cli.build import parse_targets
from bundler.cli.command import FINE, example, reports
from bundler.cli.pack import check_output, contents, save
from bundler.cli.terminal import Screen
from bundler.compile import module_import
from bundler.errors import ConfigError, NotFound
from bundler.format.entries import Target
from bundler.project import install
from bundler.toolchain.torch_memory import example_tensor

if TYPE_CHECKING:
    from bundler.codegen.program import Program

_INPUTS = "example_inputs"


@click.command(
    "generate",
    short_help="Generate kernels of a PyTorch function, for GPUs that need not be here.",
    epilog=example(
        "generate model.py:softmax --input float32[128,512] --target cuda:90 -o softmax.tbundle",
        "generate model.py:softmax --input float32[128,512] --show",
    ),
)
@click.argument("function", metavar="MODULE:FUNCTION")
@click.option("--input", "inputs", multiple=True, metavar="TYPE[SIZES]",
              help=f"An argument of the function, such as float32[128,512]; without any, {_INPUTS}() of the module.")  # fmt: skip
@click.option("--target", "targets", multiple=True, metavar="T", callback=parse_targets,
              help="Compile for T, such as cuda:90 or hip:gfx942; repeat for several.")  # fmt: skip
@click.option("-o", "--output", metavar="FILE", help="The bundle to write.")
@click.option("--dynamic", is_flag=True, help="Let sizes change from call to call.")
@click.option(
    "--name", default="program", show_default=True, metavar="N", help="What the program is called in the bundle."
)
@click.option("--show", is_flag=True, help="Print the generated kernels.")
@reports
def generate_command(
    screen: Screen, function: str, inputs: tuple[str, ...], targets: tuple[Target, ...], output: str | None, dynamic: bool,
    name: str, show: bool,
) -> int:  # fmt: skip
    """Generate the kernels of FUNCTION, compile them for targets, and write a bundle with them and the program.

    MODULE is a file or a dotted name of a Python module, which is imported. Operators that no kernel is generated for are called as they
    are when the program runs, and listed.
    """
    if bool(targets) != (output is not None):
        raise click.UsageError("give --target and -o together, or neither with --show")
    if not targets and not show:
        raise click.UsageError("nothing to do: give --target and -o, or --show")
    if output is not None:
        check_output(output)
    aside = contextlib.redirect_stdout(sys.stderr) if screen.as_json else contextlib.nullcontext()
    with aside:
        program = _generated(function, inputs, targets, dynamic=dynamic, name=name)
    if show:
        _show(screen, program)
    _show_fallbacks(screen, program)
    facts: dict[str, Any] = {
        "kernels": {kernel: made.digest for kernel, made in program.kernels.items()},
        "fallbacks": [vars(fallback) for fallback in program.fallbacks],
    }
    if output is not None:
        with aside:
            bundle = program.build([str(target) for target in targets])
        size = save(screen, bundle, output)
        screen.done(
            f"wrote {output}: {wording.count(len(bundle.kernels), 'kernel')}, {wording.size(size)}, {bundle.digest}"
        )
        facts = {**contents(bundle), **facts, "path": output, "size_bytes": size}
    screen.finish(facts)
    return FINE


def _generated(path: str, inputs: Sequence[str], targets: Sequence[Target], *, dynamic: bool, name: str) -> Program:
    try:
        # It needs torch, and what comes with torch, which the other commands do without.
        from bundler.codegen.program import GenerateOptions, generate
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"generate needs torch, and {error.name} is not installed; {install('torch')}", extra="torch"
        ) from error
    module_name, _, function_name = path.rpartition(":")
    if not module_name:
        raise click.UsageError(f"{path}: expected MODULE:FUNCTION, such as model.py:softmax")
    module = module_import.load(module_import.find(module_name), targets[0] if targets else Target("cuda", "90"))
    function = getattr(module, function_name, None)
    if not callable(function):
        raise NotFound(f"{module_name} has no function {function_name!r}", name=function_name)
    values = [example_tensor(text) for text in inputs] if inputs else _declared_inputs(module, module_name)
    return generate(function, values, dynamic=dynamic, options=GenerateOptions(name=name))


def _declared_inputs(module: Any, name: str) -> list[Any]:
    declared = getattr(module, _INPUTS, None)
    if not callable(declared):
        raise ConfigError(
            f"{name} has no function {_INPUTS}(); write one that returns the arguments, or give --input", name=name
        )
    return list(declared())


def _show(screen: Screen, program: Program) -> None:
    if screen.as_json:
        return
    for kernel, source in program.sources.items():
        screen.line(kernel, style="bold")
        screen.text(source)


def _show_fallbacks(screen: Screen, program: Program) -> None:
    for fallback in program.fallbacks:
        screen.line(f"called as it is: {fallback.operator}: {fallback.reason}")
