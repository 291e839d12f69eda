# SPDX-License-Identifier: Apache-2.0
"""`run`: a program and all its children, recorded without a change to any of them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from bundler.cli import words
from bundler.cli.command import example, keep_option, output_option, reports
from bundler.cli.move import check_output, contents, save
from bundler.cli.screen import Screen
from bundler.errors import AccessDenied, ConfigError, NotFound, RecordingError
from bundler.format.bundle import Keep

if TYPE_CHECKING:
    from bundler.format.bundle import Bundle
    from bundler.lifecycle.report import RecordReport

NOTHING = (
    "nothing was recorded, so no bundle was written: the command compiled no Triton kernel and found none in its "
    "cache, or it sets triton.knobs.cache.manager_class itself"
)
SIGNAL_STATUS = 128
# What the kernel sets as the sender of a signal that a terminal's key caused.
_FROM_KERNEL = 0x80
_PYTHON = re.compile(r"python[\d.]*t?|pypy[\d.]*")
_FIRST_LINE_BYTES = 512


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    short_help="Record a program and its child processes.",
    epilog=example("run -o model.tbundle -- python train.py --steps 10", "run -o all.tbundle -- torchrun train.py"),
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- CMD...")
@output_option
@keep_option
@reports
def run(screen: Screen, command: tuple[str, ...], output: str, keep: Keep) -> int:
    """Run CMD, record what it and its child processes compile, and write the bundle.

    The bundle is written even when CMD fails, and the exit status is CMD's own, 128 + N when signal N ended it. When CMD
    was fine, the status is 1 if nothing was recorded; then no bundle is written. With --json, what CMD prints goes to
    standard error.
    """
    from bundler.lifecycle.collecting import collect_spool
    from bundler.toolchain.children import ChildSpool

    check_output(output)
    spool = ChildSpool()
    try:
        environment = spool.environ()
        _check_python(command, environment)
        with _signals_held() as mask:
            status = _status(_run(command, environment, mask, quiet=screen.as_json))
            bundle, report = collect_spool(spool, keep)
            processes = len({event.pid for event in spool.events()})
            _tell(screen, bundle, report, output, status=status, processes=processes)
    finally:
        spool.close()
    return status


def _status(returncode: int) -> int:
    return SIGNAL_STATUS - returncode if returncode < 0 else returncode


def _tell(screen: Screen, bundle: Bundle, report: RecordReport, output: str, *, status: int, processes: int) -> None:
    """Save what was recorded and say so: on standard error, since standard output is CMD's."""
    people = Screen(screen.as_json, out=screen.err)
    people.reasons("left out", report.left_out)
    if status:
        screen.warn(f"the command ended with status {status}")
    size = 0
    if bundle.kernels:
        size = save(screen, bundle, output)
        people.line(
            f"recorded {words.count(len(bundle.kernels), 'kernel')} in {words.count(processes, 'process')}: "
            f"{words.count(report.compiles, 'compile')}, {words.count(report.hits, 'hit')}"
        )
        people.done(f"wrote {output}: {words.size(size)}, {bundle.digest}")
    elif status:
        screen.warn(NOTHING)
    else:
        raise RecordingError(NOTHING)
    result: dict[str, Any] = {**contents(bundle), "path": output if bundle.kernels else None, "size_bytes": size}
    screen.finish({**result, "status": status, "processes": processes, **dataclasses.asdict(report)})


def _check_python(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Raise if the command is a Python, or a script of one, that could not import what recording needs."""
    from bundler.toolchain.children import check_interpreter

    program = shutil.which(command[0], path=environment.get("PATH"))
    if program is None:
        raise NotFound(f"cannot run {command[0]}: no such program; check its name and PATH", path=command[0])
    python = _interpreter(program, environment)
    reason = check_interpreter(python, environment) if python is not None else None
    if reason is not None:
        raise ConfigError(f"cannot record {command[0]}: {reason}", path=program)


def _interpreter(program: str, environment: Mapping[str, str]) -> str | None:
    """Return the Python that runs a program, None when it is something else."""
    if _PYTHON.fullmatch(os.path.basename(program)):
        return program
    try:
        with open(program, "rb") as file:
            first = os.fsdecode(file.readline(_FIRST_LINE_BYTES))
    except OSError as error:
        raise AccessDenied(f"cannot run {program}: {error.strerror}", path=program) from error
    if not first.startswith("#!"):
        return None
    words_of_line = [word for word in first[2:].split() if not word.startswith("-") and "=" not in word]
    if words_of_line and os.path.basename(words_of_line[0]) == "env":
        del words_of_line[0]
    if not words_of_line or not _PYTHON.fullmatch(os.path.basename(words_of_line[0])):
        return None
    return shutil.which(words_of_line[0], path=environment.get("PATH"))


@contextlib.contextmanager
def _signals_held() -> Iterator[set[signal.Signals]]:
    """Keep back the signals that would end us while the block runs, for us to pass on; yields the mask of before.

    From before the child exists until the bundle is written: none is lost, and none leaves half a bundle.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _passed_on() | {signal.SIGCHLD})
    try:
        yield {signal.Signals(number) for number in before}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _passed_on() -> set[signal.Signals]:
    return {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}


def _run(command: Sequence[str], environment: Mapping[str, str], mask: set[signal.Signals], *, quiet: bool) -> int:
    """Run a command to its end and return its return code; signals that reach us reach it."""
    try:
        child = subprocess.Popen(
            list(command),
            env=dict(environment),
            stdout=sys.stderr.fileno() if quiet else None,
            # The child must not inherit the signals that we hold.  No thread of ours runs here that could hold a lock.
            preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, mask),  # noqa: PLW1509
        )
    except OSError as error:
        raise AccessDenied(f"cannot run {command[0]}: {error.strerror}", path=command[0]) from error
    while child.poll() is None:
        received = signal.sigwaitinfo(_passed_on() | {signal.SIGCHLD})
        # A terminal sends its signals to the child as well; a second one would end its cleaning up.
        if received.si_signo != signal.SIGCHLD and received.si_code != _FROM_KERNEL:
            child.send_signal(received.si_signo)
    return child.returncode
