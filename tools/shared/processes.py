# SPDX-License-Identifier: Apache-2.0
"""How a program starts a module of tools as a process of its own: by `command`, by `output` or
`answer` when it waits for the end, by `Helper` when it asks it questions.

Its import is part of what some benchmarks measure, so it imports little.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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


def captured(*words: object, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; returns its status and all that it said."""
    line = [*map(str, words)]
    return subprocess.run(line, check=False, capture_output=True, text=True, **more)


def said(*words: object, **more: Any) -> str | None:
    """Return what a program says, None where it is missing or fails."""
    try:
        done = captured(*words, **more)
    except (OSError, subprocess.SubprocessError):
        return None
    return None if done.returncode else done.stdout.strip()


def output(
    module: str, *arguments: str, environment: Mapping[str, str], timeout_s: float = 900
) -> str:
    """Run a module, which finds the package as `python_path` says; returns its standard output.

    Raises:
        RuntimeError: it failed; the message has all that it printed.
    """
    variables = {**os.environ, **environment, "PYTHONPATH": python_path()}
    words = command(module, *arguments)
    answer = captured(*words, env=variables, cwd=ROOT, timeout=timeout_s)
    if answer.returncode:
        line = shlex.join([module, *arguments])
        raise RuntimeError(
            f"{line} failed with {answer.returncode}:\n{answer.stdout}\n{answer.stderr}"
        )
    return answer.stdout


def answer(module: str, *arguments: str, environment: Mapping[str, str], **more: float) -> Any:
    """Run a module as `output` does; returns the JSON in its last line."""
    return json.loads(output(module, *arguments, environment=environment, **more).splitlines()[-1])


class Helper:
    """A module of tools that answers lines of JSON with lines of JSON.

    Args:
        module: its full name.
        arguments: of its command line.
        environment: of its process; None for that of this one.
    """

    def __init__(
        self, module: str, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> None:
        self._module = module
        self.process = subprocess.Popen(
            command(module, *arguments),
            env={**os.environ, "PYTHONPATH": python_path()} if environment is None else environment,
            cwd=ROOT,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def tell(self, question: Any) -> None:
        """Send one line."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()

    def hear(self) -> Any:
        """Return the next answer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(
                f"{self._module} ended with status {self.process.wait()}; its error is above"
            )
        return json.loads(line)

    def ask(self, question: Any) -> Any:
        """Send one line and return the answer."""
        self.tell(question)
        return self.hear()

    def close(self) -> None:
        """End it, by force when it does not end by itself."""
        try:
            self.process.communicate(timeout=5)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self.process.kill()
            self.process.communicate()


@contextmanager
def listening(module: str, *arguments: str) -> Iterator[int]:
    """Run a server until the block ends; yields the port, which is all that it prints."""
    server = Helper(module, *arguments)
    try:
        yield server.hear()
    finally:
        server.close()
