# SPDX-License-Identifier: Apache-2.0
"""How a program starts a module of tools as a process of its own: by `command`, or by `output` when
it waits for the end.

Its import is part of what some benchmarks measure, so it imports little.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def command(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs a module or a package; its working directory must be
    `ROOT`.
    """
    return [sys.executable, "-W", "ignore", "-m", module, *arguments]


def python_path() -> str:
    """Return the search path of a child process: the checkout, then what this process was given.

    Where this process keeps the checkout's package off its path (`make bench`, and tests of the
    wheel), so does the child.
    """
    given = os.environ.get("PYTHONPATH", "")
    finds_tools = any(
        os.path.isdir(os.path.join(entry, "tools", "shared"))
        for entry in given.split(os.pathsep)
        if entry
    )
    if sys.flags.safe_path and finds_tools:
        return given
    return os.pathsep.join(filter(None, [str(ROOT), given]))


def output(
    module: str, *arguments: str, environment: Mapping[str, str], timeout_s: float = 900
) -> str:
    """Run a module, which finds the package as `python_path` says; returns its standard output.

    Raises:
        RuntimeError: it failed; the message has all that it printed.
    """
    answer = subprocess.run(
        command(module, *arguments),
        env={**os.environ, **environment, "PYTHONPATH": python_path()},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if answer.returncode:
        line = shlex.join([module, *arguments])
        raise RuntimeError(
            f"{line} failed with {answer.returncode}:\n{answer.stdout}\n{answer.stderr}"
        )
    return answer.stdout
