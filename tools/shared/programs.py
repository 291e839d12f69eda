# SPDX-License-Identifier: Apache-2.0
"""How a program of tools is chosen by its name (`run` is what the `__main__` of every package calls)
and reads its command line (`arguments`).
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tools.shared import measurement
from tools.shared.processes import ROOT

# What these measure and attack is another thing without the extensions.
_OF_EXTENSIONS = ("tools.bench", "tools.fuzz")


def run(package: str, programs: Iterable[str]) -> int:
    """Run the program that the command line names, with the arguments after its name.

    Args:
        package: full name of the package.
        programs: the name of each program: `torch-compile` is the `main` of the module
            `torch_compile`, whose docstring begins with what it is about.
    """
    lines = (f"  {name:<15} {_about(_module(package, name))}" for name in programs)
    parser = argparse.ArgumentParser(
        prog=f"python -m {package}",
        description="\n".join(
            ["programs:", *lines, "", f"python -m {package} PROGRAM --help says more."]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("program", choices=programs, metavar="PROGRAM", help="one of those above")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the program"
    )
    options = parser.parse_args()
    built = measurement.extensions() if package in _OF_EXTENSIONS else {}
    if missing := [name for name, is_built in sorted(built.items()) if not is_built]:
        print(
            f"note: bundler has no {', '.join(missing)} here, so that this is about Python alone;"
            f" `make {package.rpartition('.')[2]} PROGRAM={options.program}` builds them first,"
            " with a C compiler",
            file=sys.stderr,
        )
    module = importlib.import_module(_module(package, options.program))
    sys.argv = [f"python -m {package} {options.program}", *options.arguments]
    status: int = module.main()
    return status


def _module(package: str, program: str) -> str:
    return f"{package}.{program.replace('-', '_')}"


def _about(module: str) -> str:
    """Return the first sentences of a module, which is read and not imported: it may need a GPU."""
    text = (ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
    return " ".join((ast.get_docstring(ast.parse(text)) or "").partition("\n\n")[0].split())


def parser(description: str | None, **options: tuple[Any, str]) -> argparse.ArgumentParser:
    """Return a reader of command lines.

    Args:
        description: the docstring of the program.
        options: name -> default and help. The type of the default is that of the option: False is a
            switch, a list takes several words, a type has no default.
    """
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, (default, about) in options.items():
        flag = f"--{name.replace('_', '-')}"
        if default is False:
            made.add_argument(flag, action="store_true", help=about)
        elif isinstance(default, list):
            made.add_argument(flag, nargs="+", default=default, help=about)
        elif isinstance(default, type):
            made.add_argument(flag, type=default, help=about)
        else:
            made.add_argument(flag, type=type(default), default=default, help=about)
    return made


def arguments(description: str | None, **options: tuple[Any, str]) -> argparse.Namespace:
    """Read the command line, as `parser` says."""
    return parser(description, **options).parse_args()


def run_step(steps: Mapping[str, Callable[..., Any]]) -> bool:
    """Do one step of a program in this process, where the command line is `--step NAME WORD...`;
    prints what it returns as JSON.
    """
    if sys.argv[1:2] != ["--step"]:
        return False
    name, *words = sys.argv[2:]
    print(json.dumps(steps[name](*words)))
    return True
