# SPDX-License-Identifier: Apache-2.0
"""How a program of tools is chosen by its name: `run` is what the `__main__` of every package calls."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping


def run(package: str, programs: Mapping[str, str]) -> int:
    """Run the program that the command line names, with the arguments after its name.

    Args:
        package: full name of the package.
        programs: the name of each program and what it is about; `torch-compile` is the `main` of the module `torch_compile`.
    """
    lines = (f"  {name:<15} {about}" for name, about in programs.items())
    parser = argparse.ArgumentParser(
        prog=f"python -m {package}",
        description="\n".join(["programs:", *lines, "", f"python -m {package} PROGRAM --help says more."]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("program", choices=programs, metavar="PROGRAM", help="one of those above")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the program")
    options = parser.parse_args()
    module = importlib.import_module(f"{package}.{options.program.replace('-', '_')}")
    sys.argv = [f"python -m {package} {options.program}", *options.arguments]
    status: int = module.main()
    return status
