# SPDX-License-Identifier: Apache-2.0
"""The command `capture`: a program's own warm-up, run without a GPU, becomes a bundle for any
target.

`app.py` lists it.  The program runs in a process of its own for each target
(`bundler/compile/captured_program.py`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import click

from bundler.cli import wording
from bundler.cli.command import (
    FINE,
    PROBLEM,
    command,
    option,
    output_option,
    read_by,
    repeated,
    targets_option,
)
from bundler.cli.interruption import SIGNAL_STATUS
from bundler.cli.pack import check_output, save, show_contents, written
from bundler.cli.terminal import Screen
from bundler.compile.captured_program import BUNDLE, MODULE, REPORT, CaptureRequest, Kind
from bundler.errors import ConfigError, NotFound, RecordingError
from bundler.format.bundle import Bundle
from bundler.format.bundle_union import merge
from bundler.format.entries import Target
from bundler.toolchain.recording.child_recording import hidden_package_parent
from bundler.toolchain.target_devices import device_of

NOTHING = (
    "nothing was captured, so no bundle was written: the program launched no Triton kernel in its"
    " own process; children are not captured, and torch.compile's kernels are recorded with run"
)
_PYTHON = re.compile(r"python[\d.]*t?|pypy[\d.]*")
# Options of Python that are followed by a value.
_WITH_VALUE = frozenset({"-W", "-X", "--check-hash-based-pycs"})
_NEEDED = ("bundler", "msgpack", "msgspec", "torch", "triton", "zstandard")
_FIND = (
    "import importlib.util, sys; print(*(name for name in sys.argv[1:] if"
    " importlib.util.find_spec(name) is None), sep=', ')"
)
_KINDS: dict[str, Kind] = {"-m": "module", "-c": "code"}
# So many guesses are shown; --json has all.
_SHOWN = 20
_COUNTED = (("kernels", "kernel"), ("functions", "function"), ("launches", "launch"))


def _properties(texts: tuple[str, ...]) -> dict[str, str | int]:
    """Read what `--property` was given; raises `ConfigError`, `click.BadParameter`."""
    found: dict[str, str | int] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise click.BadParameter(
                f"{text!r}: expected NAME=VALUE, such as multi_processor_count=114"
            )
        found[name] = int(value) if value.isdecimal() else value
    device_of(Target("cuda", "90"), found)  # raises for what is no property
    return found


@command(
    "Compile what a program would launch, without a GPU.",
    "capture -o warm.tbundle --target cuda:90 -- python warm_up.py --layers 2",
    name="capture",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument(
    "command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- python SCRIPT..."
)
@output_option
@targets_option("Capture", required=True)
@repeated(
    "--property NAME=VALUE",
    "properties",
    "What torch says of the GPU, where yours differs, such as multi_processor_count=114.",
    callback=read_by(_properties),
)
@option("--jobs N", "Compile N kernels at a time; without it, one a core.", type=click.IntRange(1))
def capture(
    screen: Screen,
    command: tuple[str, ...],
    output: str,
    targets: tuple[Target, ...],
    properties: dict[str, str | int],
    jobs: int | None,
) -> int:
    """Run a Python program as on a machine with the target's GPU, and compile every Triton kernel
    that it would launch.

    No GPU is needed: tensors have shapes and no memory, kernels are compiled and not launched, and
    of each autotuner every configuration is. The program runs once for each target. Where it
    depends on data, such as .item(), it is given a guess and the line is listed. The bundle is
    written even when the program crashes, and the exit status is the program's; otherwise it is 1
    if a kernel could not be compiled or nothing was captured. With --json, what the program prints
    goes to standard error.
    """
    # Standard output is the program's.
    people = screen if screen.as_json else replace(screen, out=screen.err)
    program = _Program.of(command)
    check_output(output)
    with tempfile.TemporaryDirectory(prefix="triton-bundler-capture-") as folder:
        captures = [program.capture(people, target, properties, jobs, folder) for target in targets]
        return _write(people, captures, output)


@dataclass(frozen=True)
class _Captured:
    """What one process left."""

    status: int
    path: str
    report: dict[str, Any]


@dataclass(frozen=True)
class _Program:
    """A Python program as a command says it."""

    python: str
    options: tuple[str, ...]
    kind: Kind
    name: str
    arguments: tuple[str, ...]

    @staticmethod
    def of(command: Sequence[str]) -> _Program:
        """Take a command apart; raises `UsageError`, `NotFound`."""
        python, words = _interpreter(command)
        options: list[str] = []
        while words and words[0].startswith("-") and words[0] not in _KINDS and words[0] != "-":
            number = 2 if words[0] in _WITH_VALUE else 1
            options, words = options + words[:number], words[number:]
        kind = _KINDS.get(words[0], "script") if words else "script"
        if kind != "script":
            words = words[1:]
        if not words or words[0] == "-":
            raise click.UsageError(
                "give the program to capture: -- python SCRIPT, -- python -m MODULE or -- python -c"
                " CODE"
            )
        if kind == "script" and not os.path.isfile(words[0]):
            raise NotFound(f"no such file: {words[0]}", path=words[0])
        return _Program(python, tuple(options), kind, words[0], tuple(words[1:]))

    def capture(
        self,
        screen: Screen,
        target: Target,
        properties: dict[str, str | int],
        jobs: int | None,
        folder: str,
    ) -> _Captured:
        """Run the program for a target; raises `RecordingError` when it left nothing."""
        own = os.path.join(folder, str(target).replace(":", "-"))
        os.mkdir(own)
        request = CaptureRequest(
            self.kind, self.name, str(target), own, properties, jobs, screen.quiet or screen.as_json
        )
        # With our package, where the program's Python would not find it otherwise.
        paths = [os.environ.get("PYTHONPATH", ""), *hidden_package_parent()]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        _check_modules(self.python, environment)
        started = [self.python, *self.options, "-m", MODULE, request.to_text(), *self.arguments]
        printed = sys.stderr.fileno() if screen.as_json else None
        code = subprocess.run(started, env=environment, stdout=printed, check=False).returncode
        report = os.path.join(own, REPORT)
        if not os.path.isfile(report):
            how = f"signal {-code}" if code < 0 else f"status {code}"
            raise RecordingError(
                f"{self.name} ended with {how} before what it had launched for {target} was"
                " compiled"
            )
        with open(report, encoding="utf-8") as file:
            status = SIGNAL_STATUS - code if code < 0 else code
            return _Captured(status, os.path.join(own, BUNDLE), json.load(file))


def _interpreter(command: Sequence[str]) -> tuple[str, list[str]]:
    """Return the Python that a command begins with, and the rest; a script stands for itself with
    this Python.
    """
    first, *rest = command
    if first.endswith(".py"):
        return sys.executable, list(command)
    if not _PYTHON.fullmatch(os.path.basename(first)):
        raise click.UsageError(
            f"{first} is no Python: only a Python program can be captured; give -- python SCRIPT"
        )
    found = shutil.which(first)
    if found is None:
        raise NotFound(
            f"cannot capture with {first}: no such program; check its name and PATH", path=first
        )
    # Absolute, since the check of its modules runs elsewhere; not resolved, since an environment's
    # Python is a link.
    return os.path.abspath(found), rest


def _check_modules(python: str, environment: Mapping[str, str]) -> None:
    """Raise when a Python lacks what a captured program and this package need."""
    done = subprocess.run(
        [python, "-c", _FIND, *_NEEDED],
        env=dict(environment),
        cwd=os.sep,
        capture_output=True,
        text=True,
        check=False,
    )
    missing = done.stdout.strip()
    if done.returncode or missing:
        why = f"it lacks {missing}" if missing else "it does not start"
        raise ConfigError(
            f"cannot capture with {python}: {why}; install triton-bundler, torch and Triton there",
            path=python,
        )


def _write(screen: Screen, captures: Sequence[_Captured], output: str) -> int:
    """Merge and save what was captured, and say so; returns the exit status."""
    status = next((captured.status for captured in captures if captured.status), FINE)
    for captured in captures:
        _tell(screen, captured)
    made = [captured.path for captured in captures if os.path.isfile(captured.path)]
    failed = any(captured.report["failures"] for captured in captures)
    if not made and not status:
        raise RecordingError(NOTHING)
    facts = {"status": status, "captures": [captured.report for captured in captures]}
    if not made:
        screen.warn(NOTHING)
        screen.finish({"path": None, "size_bytes": 0, **facts})
        return status
    parts = [Bundle.load(path) for path in made]
    bundle = parts[0] if len(parts) == 1 else merge(parts)
    size = save(screen, bundle, output)
    show_contents(screen, bundle)
    screen.done(f"wrote {output}: {wording.size(size)}, {bundle.digest}")
    screen.finish({**written(bundle, output, size), **facts})
    for part in parts:
        part.close()
    return status or (PROBLEM if failed else FINE)


def _tell(screen: Screen, captured: _Captured) -> None:
    report = captured.report
    numbers = [wording.count(report[nouns], noun) for nouns, noun in _COUNTED]
    screen.facts(
        [
            ("target", f"{report['target']}, as {report['device']}"),
            ("captured", f"{numbers[0]} of {numbers[1]}, {numbers[2]}"),
        ]
    )
    _tell_guesses(screen, report["guesses"])
    why = "asked of Triton's driver, which has no answer"
    screen.reasons("not answered", [(name, why) for name in report["unanswered"]])
    screen.reasons("to know", report["assumed"])
    screen.reasons("not compiled", report["failures"])
    if captured.status:
        screen.warn(
            f"the program ended with status {captured.status}; what it had launched until then was"
            " captured"
        )


def _tell_guesses(screen: Screen, guesses: Sequence[dict[str, Any]]) -> None:
    """List the lines that depend on data, each whole, since somebody will look at them."""
    if guesses:
        screen.line(f"depends on data: {wording.count(len(guesses), 'line')}")
    told = []
    for guess in guesses:
        called_from = guess["called_from"]
        origin = f", called from {_short(called_from)}" if called_from else ""
        place = f"{_short(guess['file'])}:{guess['line']}"
        told.append(f"  {place}: {guess['what']}, taken: {guess['taken']}{origin}")
    screen.lines(told, _SHOWN)


def _short(path: str) -> str:
    relative = os.path.relpath(path)
    return path if relative.startswith(os.pardir) else relative
