# SPDX-License-Identifier: Apache-2.0
"""`ptxas_version`: which ptxas Triton runs for a target, and its version, which is part of the key
of every CUDA kernel.

Compile jobs, recordings and the comparison of a kernel with this machine ask it.  `begin_asking`
starts the program for who asks later (bundler/lifecycle/compatibility.py): it runs beside this
process, and no thread waits for it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
import time
from collections.abc import Iterator
from typing import Any, TypeAlias

from bundler.format.entries import Target
from bundler.package_loggers import logger
from bundler.toolchain.identity import triton_dir

_LOG = logger("bundler.toolchain")
#: The path of a program, its size and its modification time, which only tell states of the file
#: apart.
_State: TypeAlias = tuple[str, int, int]
_MOCKED = "TRITON_MOCK_PTX_VERSION"
# ptxas answers in milliseconds; a wrapper script that hangs must not hang this process.
_TIMEOUT_S = 20
_ANSWER_BYTES = 1 << 16
_PAUSE_S = 0.0002
# `signal` makes enumerations of all signals as it is imported.
_SIGKILL = 9
_RELEASE = "release "
_STATES_REMEMBERED = 32
# What stands on both sides of the number in Triton 3.6 and 3.7; to import what parses Python takes
# longer than to ask ptxas.
_BEFORE = b"""
def get_ptxas(arch: int) -> knobs.NvidiaTool:
    return knobs.nvidia.ptxas_blackwell if arch >= """
_BEHIND = b" else knobs.nvidia.ptxas\n"
# What each program said of itself; None where it failed.
_versions: dict[_State, str | None] = {}


def ptxas_version(arch: int) -> str | None:
    """Return a short version of the ptxas that Triton uses for compute capability `arch`, such as
    `12.8 V12.8.93`.

    Triton is not imported, and none of its caches is filled: where it is imported already, its
    settings count (`knobs`), else the environment and the files of the installation.  None when
    there is no Triton, no ptxas, or it fails.  The answer is kept for each state of the program on
    disk.
    """
    mocked = os.environ.get(_MOCKED)
    if mocked is not None:
        return mocked  # Triton puts this into its keys in place of the version.
    for state in _programs(arch):
        if state not in _versions:
            ProgramVersion(state).finish()
        version = _versions.get(state)
        if version is not None:
            return version
    return None


def ptxas_for(target: Target) -> str | None:
    """Return the version of the ptxas that Triton uses for a target, as `ptxas_version`; None for
    other targets than NVIDIA's.
    """
    is_cuda = target.backend == "cuda" and target.arch.isdecimal()
    return ptxas_version(int(target.arch)) if is_cuda else None


def begin_asking(arch: int) -> ProgramVersion | None:
    """Start the program of which `ptxas_version` asks first; None where it needs none.  The caller
    has to `finish` what is returned.
    """
    state = None if _MOCKED in os.environ else next(_programs(arch), None)
    return None if state is None or state in _versions else ProgramVersion(state)


def short_version(text: str) -> str:
    """Shorten the answer of `ptxas --version`; an answer of another shape is returned without its
    line breaks.
    """
    # A pattern, `release (\S+?), (V\S+)`, takes longer to compile than all else that is done with
    # the answer.
    for rest in text.split(_RELEASE)[1:]:
        number, comma, build = rest.partition(", ")
        is_build = build[:1] == "V" and build[1:2].strip()
        if comma and number.split() == [number] and is_build:
            return f"{number} {build.split(None, 1)[0]}"
    return " ".join(text.split())[:200]


def _programs(arch: int) -> Iterator[_State]:
    """Yield the programs that are there, in the order in which Triton tries them."""
    blackwell = _uses_blackwell(arch)
    if blackwell is None:
        return
    for path in candidates("ptxas-blackwell" if blackwell else "ptxas"):
        try:
            status = os.stat(path)
        except OSError:
            continue
        yield path, status.st_size, status.st_mtime_ns


def _uses_blackwell(arch: int) -> bool | None:
    directory = triton_dir()
    if directory is None:
        return None
    threshold = _blackwell_threshold(os.path.join(directory, "backends", "nvidia", "compiler.py"))
    return arch >= threshold if threshold is not None else None


@functools.lru_cache(maxsize=8)
def _blackwell_threshold(compiler_source: str) -> int | None:
    """Return the first compute capability for which Triton takes `ptxas-blackwell`.

    It is 100 in Triton 3.6 and 3.7 and 90 in 3.9, and stands nowhere but in the condition inside
    `get_ptxas`: reading it there is exact for each release, and needs no import.
    """
    try:
        with open(compiler_source, "rb") as file:
            source = file.read()
    except OSError:
        return None
    number, usual, _ = source.partition(_BEFORE)[2].partition(_BEHIND)
    return int(number) if usual and number.isdigit() else _parsed_threshold(source)


def _parsed_threshold(source: bytes) -> int | None:
    import ast  # for what is written in a release that is not known here

    # Only that function: parsing all of the module takes as long as a restore of a hundred kernels.
    text = re.search(rb"^def get_ptxas\(.*?(?=^\S|\Z)", source, re.MULTILINE | re.DOTALL)
    try:
        tree = ast.parse(source if text is None else text[0])
    except (SyntaxError, ValueError):
        return None
    every = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    inside = [node for one in every if one.name == "get_ptxas" for node in ast.walk(one)]
    for node in inside:
        match node:
            case ast.Compare(
                left=ast.Name(id="arch"),
                ops=[ast.GtE() | ast.Lt()],
                comparators=[ast.Constant(value=int(threshold))],
            ):
                return threshold
    return None


def candidates(program: str) -> list[str]:
    """Return paths in the order in which Triton tries them: what the user set, then the one it was
    installed with.
    """
    # What Triton takes from `sysconfig`, which reads how Python was built before it answers.
    name = program + (".exe" if sys.platform in {"win32", "cygwin"} else "")
    default = os.path.join(triton_dir() or "", "backends", "nvidia", "bin", name)
    chosen = _set_in_python(program.replace("-", "_"))
    if chosen is None:
        chosen = os.environ.get(f"TRITON_{name.upper().replace('-', '_')}_PATH")
    return [default] if chosen is None else [chosen, default]


def _set_in_python(attribute: str) -> str | None:
    nvidia: Any = getattr(sys.modules.get("triton.knobs"), "nvidia", None)
    value = getattr(nvidia, "__dict__", {}).get(attribute)
    return value if isinstance(value, str) else None


class ProgramVersion:
    """`ptxas --version`, running from the beginning on; its answer is kept for `ptxas_version`.

    `subprocess` runs programs too, and is imported for longer than this one runs: a new process
    asks before its first kernel. For one thread at a time.

    Args:
        state: which program.
    """

    def __init__(self, state: _State) -> None:
        self._state, self._ends_s = state, time.monotonic() + _TIMEOUT_S
        self._parts: list[bytes] = []
        self._output = self._child = -1
        try:
            self._start(state[0], "--version")
        except OSError as error:
            self._learn(None, f" ({error})")

    def ended(self, within_s: float) -> bool:
        """Wait for the end of the program, for so long at most and in whole milliseconds, and learn
        its answer; returns whether it has ended.
        """
        until_s = time.monotonic() + within_s
        try:
            while self._output >= 0:
                if not self._read(until_s):
                    return False
            while self._child >= 0:
                if not self._wait(until_s):
                    return False
        except BaseException as error:
            self._end()
            if not isinstance(error, OSError):
                raise
            self._learn(None, f" ({error})")
        return True

    def finish(self) -> None:
        """Wait until it has ended, or its time is over and it was ended; calling it twice
        is fine.
        """
        while not self.ended(_TIMEOUT_S):
            pass

    def _start(self, *command: str) -> None:
        self._output, writing = os.pipe()
        try:
            redirected = [(os.POSIX_SPAWN_DUP2, writing, descriptor) for descriptor in (1, 2)]
            self._child = os.posix_spawn(command[0], command, os.environ, file_actions=redirected)
        except OSError:
            self._close()
            raise
        finally:
            os.close(writing)

    def _read(self, until_s: float) -> bool:
        """Read what there is, or comes in time; False when nothing does."""
        import select  # many restores ask no program

        now_s = time.monotonic()
        if now_s > self._ends_s:
            raise TimeoutError(f"no answer in {_TIMEOUT_S} s")
        poll = select.poll()
        poll.register(self._output, select.POLLIN | select.POLLHUP)
        if not poll.poll(int(max(0.0, min(until_s, self._ends_s) - now_s) * 1000)):
            return until_s > self._ends_s
        part = os.read(self._output, _ANSWER_BYTES)
        if part:
            self._parts.append(part)
        else:
            self._close()
        return True

    def _wait(self, until_s: float) -> bool:
        try:
            ended, status = os.waitpid(self._child, os.WNOHANG)
        except ChildProcessError:
            # This process ignores SIGCHLD, so it does not learn how its children end.
            ended, status = self._child, 0
        if ended:
            self._child, code = -1, os.waitstatus_to_exitcode(status)
            answer = b"".join(self._parts).decode("utf-8", "replace")
            if code:
                self._learn(None, f" (exit status {code})")
            else:
                self._learn(short_version(answer))
        elif time.monotonic() > self._ends_s:
            raise TimeoutError(f"it does not end in {_TIMEOUT_S} s")
        elif time.monotonic() > until_s:
            return False
        else:
            time.sleep(_PAUSE_S)  # it has closed its output, so it is about to end
        return True

    def _learn(self, version: str | None, problem: str = "") -> None:
        if problem:
            _LOG.warning("ptxas does not answer: %s%s", self._state[0], problem)
        if len(_versions) >= _STATES_REMEMBERED:
            _versions.clear()
        _versions[self._state] = version

    def _end(self) -> None:
        self._close()
        child, self._child = self._child, -1
        if child >= 0:
            with contextlib.suppress(OSError):  # it ended meanwhile
                os.kill(child, _SIGKILL)
                os.waitpid(child, 0)

    def _close(self) -> None:
        output, self._output = self._output, -1
        if output >= 0:
            os.close(output)
