# SPDX-License-Identifier: Apache-2.0
"""How a program of tools is chosen by its name (`run` is what the `__main__` of every package calls)
and reads its command line (`arguments`).
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# What these measure and attack is another thing without the extensions.
_OF_EXTENSIONS = ("tools.bench", "tools.fuzz")
_EXTENSIONS = (
    "lifecycle/_kernel_reader",
    "lifecycle/_kernel_writer",
    "runtime/launch/_launch",
    "runtime/launch/jit/_jit_driver",
)


def missing_extensions() -> list[str]:
    """Return the names of extensions that the bundler which would be imported does not have."""
    spec = importlib.util.find_spec("bundler")
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()] if spec else []
    return [
        name.rpartition("/")[2]
        for name in _EXTENSIONS
        if not any([*folder.glob(f"{name}.*.so")] for folder in folders)
    ]


def run(package: str, programs: Mapping[str, str]) -> int:
    """Run the program that the command line names, with the arguments after its name.

    Args:
        package: full name of the package.
        programs: the name of each program and what it is about; `torch-compile` is the `main` of
            the module `torch_compile`.
    """
    lines = (f"  {name:<15} {about}" for name, about in programs.items())
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
    if package in _OF_EXTENSIONS and (missing := missing_extensions()):
        print(
            f"note: bundler has no {', '.join(missing)} here, so that this is about Python alone;"
            f" `make {package.rpartition('.')[2]} PROGRAM={options.program}` builds them first,"
            " with a C compiler",
            file=sys.stderr,
        )
    module = importlib.import_module(f"{package}.{options.program.replace('-', '_')}")
    sys.argv = [f"python -m {package} {options.program}", *options.arguments]
    status: int = module.main()
    return status


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
