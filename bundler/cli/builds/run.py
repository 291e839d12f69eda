# SPDX-License-Identifier: Apache-2.0
"""The command `run`: a program and all its children, recorded without a change to any of them.

`app.py` lists it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import click

from bundler.cli import wording
from bundler.cli.command import command, keep_option, output_option, strip_option
from bundler.cli.interruption import SIGNAL_STATUS
from bundler.cli.pack import check_output, contents, save
from bundler.cli.terminal import Screen
from bundler.errors import AccessDenied, BundlerError, ConfigError, NotFound, RecordingError
from bundler.format.bundle import Keep
from bundler.format.bundle_file import cleaned_up, open_regular
from bundler.format.source_stripping import Strip, strip_source

if TYPE_CHECKING:
    from bundler.toolchain.recording.child_recording import ChildSpool

NOTHING = (
    "nothing was recorded, so no bundle was written: the command compiled no Triton kernel and"
    " found none in its cache, or it sets triton.knobs.cache.manager_class itself"
)
# As shells end when they cannot run a program.
NOT_EXECUTABLE, NOT_FOUND = 126, 127
# What the kernel sets as the sender of a signal that a terminal's key caused.
_FROM_KERNEL = 0x80
_PYTHON = re.compile(r"python[\d.]*t?|pypy[\d.]*")
_FIRST_LINE_BYTES = 512
_PASSED_ON = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}


@command(
    "Record a program and its child processes.",
    "run -o model.tbundle -- python train.py --steps 10",
    "run -o all.tbundle -- torchrun train.py",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- CMD...")
@output_option
@keep_option
@strip_option
def run(
    screen: Screen, command: tuple[str, ...], output: str, keep: Keep, strip: Strip | None
) -> int:
    """Run CMD, record what it and its child processes compile, and write the bundle.

    The bundle is written even when CMD fails or is stopped by Ctrl-C, and the exit status is CMD's
    own: 128 + N when signal N ended it, 127 when there is no such program, 126 when it cannot be
    executed. When CMD was fine, the status is 1 if nothing was recorded; then no bundle is written.
    With --json, what CMD prints goes to standard error.
    """
    from bundler.toolchain.recording.child_recording import ChildSpool

    check_output(output)
    spool = ChildSpool()
    try:
        return cleaned_up(lambda: _record(screen, spool, command, output, keep, strip), spool.close)
    except _NotStarted as refused:
        screen.fail(refused.error)
        return refused.status


class _NotStarted(Exception):
    """The command could not be started."""

    def __init__(self, error: BundlerError, status: int) -> None:
        super().__init__(error)
        self.error, self.status = error, status


def _not_executable(name: str, why: str | None) -> _NotStarted:
    error = AccessDenied(f"cannot run {name}: {why or 'it is not executable'}", path=name)
    return _NotStarted(error, NOT_EXECUTABLE)


def _not_found(name: str, why: str) -> _NotStarted:
    return _NotStarted(NotFound(f"cannot run {name}: {why}", path=name), NOT_FOUND)


def _record(
    screen: Screen,
    spool: ChildSpool,
    command: tuple[str, ...],
    output: str,
    keep: Keep,
    strip: Strip | None,
) -> int:
    from bundler.lifecycle.recorder import collect_spool

    environment = spool.environ()
    _check_python(command, environment)
    with _signals_held() as mask:
        code = _run(command, environment, mask, quiet=screen.as_json)
        status = SIGNAL_STATUS - code if code < 0 else code
        bundle, report = collect_spool(spool, keep)
        bundle = strip_source(bundle) if strip else bundle
        processes = len({event.pid for event in spool.events()})
        # Said on standard error, since standard output is the program's.
        people = dataclasses.replace(screen, out=screen.err)
        people.reasons("left out", report.left_out)
        if status:
            screen.warn(f"the command ended with status {status}")
        size = 0
        if bundle.kernels:
            size = save(screen, bundle, output)
            people.done(
                f"recorded {wording.count(len(bundle.kernels), 'kernel')} in"
                f" {wording.count(processes, 'process')}: {wording.count(report.compiles, 'compile')},"
                f" {wording.count(report.hits, 'hit')}; wrote {output}: {wording.size(size)},"
                f" {bundle.digest}"
            )
        elif status:
            screen.warn(NOTHING)
        else:
            raise RecordingError(NOTHING)
        path = output if bundle.kernels else None
        facts = {"path": path, "size_bytes": size, "status": status, "processes": processes}
        screen.finish({**contents(bundle), **facts, **dataclasses.asdict(report)})
    return status


def _check_python(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Raise if the command is a Python, or a script of one, that could not import what recording
    needs.
    """
    from bundler.toolchain.recording.child_recording import check_interpreter

    program = shutil.which(command[0], path=environment.get("PATH"))
    if program is None and _is_there(command[0], environment):
        raise _not_executable(command[0], None)
    if program is None:
        raise _not_found(command[0], "no such program; check its name and PATH")
    python = _interpreter(program, environment)
    reason = check_interpreter(python, environment) if python is not None else None
    if reason is not None:
        raise ConfigError(f"cannot record {command[0]}: {reason}", path=program)


def _is_there(name: str, environment: Mapping[str, str]) -> bool:
    path = environment.get("PATH", os.defpath)
    folders = [""] if os.path.dirname(name) else path.split(os.pathsep)
    return any(os.path.exists(os.path.join(folder, name)) for folder in folders)


def _interpreter(program: str, environment: Mapping[str, str]) -> str | None:
    """Return the Python that runs a program, None when it is something else."""
    if _PYTHON.fullmatch(os.path.basename(program)):
        return program
    try:
        with open(open_regular(program), "rb") as file:
            first = os.fsdecode(file.readline(_FIRST_LINE_BYTES))
    except OSError:
        return None  # a program that may be executed and not read is no script
    if not first.startswith("#!"):
        return None
    words = [word for word in first[2:].split() if not word.startswith("-") and "=" not in word]
    if words and os.path.basename(words[0]) == "env":
        del words[0]
    if not words or not _PYTHON.fullmatch(os.path.basename(words[0])):
        return None
    return shutil.which(words[0], path=environment.get("PATH"))


@contextlib.contextmanager
def _signals_held() -> Iterator[set[signal.Signals]]:
    """Keep back the signals that would end us while the block runs, for us to pass on; yields the
    mask of before.

    From before the child exists until the bundle is written: none is lost, and none leaves half a
    bundle.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON | {signal.SIGCHLD})
    try:
        yield {signal.Signals(number) for number in before}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run(
    command: Sequence[str],
    environment: Mapping[str, str],
    mask: set[signal.Signals],
    *,
    quiet: bool,
) -> int:
    """Run a command to its end and return its return code; signals that reach us reach it."""
    try:
        child = subprocess.Popen(
            list(command),
            env=dict(environment),
            stdout=sys.stderr.fileno() if quiet else None,
            # The child must not inherit the signals that we hold.  No thread of ours runs here that
            # could hold a lock.
            preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, mask),  # noqa: PLW1509
        )
    except OSError as error:
        if error.errno == errno.ENOENT:
            raise _not_found(
                command[0], "the interpreter that its first line names is not there"
            ) from error
        raise _not_executable(command[0], error.strerror) from error
    while child.poll() is None:
        received = signal.sigwaitinfo(_PASSED_ON | {signal.SIGCHLD})
        # A terminal sends its signals to the child as well; a second one would end its cleaning up.
        if received.si_signo != signal.SIGCHLD and received.si_code != _FROM_KERNEL:
            child.send_signal(received.si_signo)
    return child.returncode
