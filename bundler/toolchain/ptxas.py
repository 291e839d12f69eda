# SPDX-License-Identifier: Apache-2.0
"""`ptxas_version`: which ptxas Triton runs for a target, and its version, which is part of the key of every CUDA kernel.

Compile jobs, recordings and the comparison of a kernel with this machine ask it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import select
import sys
import time
from typing import IO, TYPE_CHECKING, Any

from bundler.package_loggers import logger
from bundler.toolchain.identity import triton_dir

if TYPE_CHECKING:
    import ast

_LOG = logger("bundler.toolchain")
# ptxas answers in milliseconds; a wrapper script that hangs must not hang this process.
_TIMEOUT_S = 20
_ANSWER_BYTES = 1 << 16
_PAUSE_S = 0.0002
# `signal` makes enumerations of all signals as it is imported.
_SIGKILL = 9
_RELEASE = re.compile(r"release (\S+?), (V\S+)")
# What stands on both sides of the number in Triton 3.6 and 3.7; to import what parses Python takes longer than to ask ptxas.
_BEFORE = b"""
def get_ptxas(arch: int) -> knobs.NvidiaTool:
    return knobs.nvidia.ptxas_blackwell if arch >= """
_BEHIND = b" else knobs.nvidia.ptxas\n"


def ptxas_version(arch: int) -> str | None:
    """Return a short version of the ptxas that Triton uses for compute capability `arch`, such as `12.8 V12.8.93`.

    Triton is not imported, and none of its caches is filled: where it is imported already, its settings count (`knobs`),
    else the environment and the files of the installation.  None when there is no Triton, no ptxas, or it fails.  The
    answer is kept for each state of the program on disk.
    """
    mocked = os.environ.get("TRITON_MOCK_PTX_VERSION")
    if mocked is not None:
        return mocked  # Triton puts this into its keys in place of the version.
    program = _uses_blackwell(arch)
    if program is None:
        return None
    for path in candidates("ptxas-blackwell" if program else "ptxas"):
        try:
            status = os.stat(path)
        except OSError:
            continue
        version = _ask(path, status.st_size, status.st_mtime_ns)
        if version is not None:
            return version
    return None


def short_version(text: str) -> str:
    """Shorten the answer of `ptxas --version`; an answer of another shape is returned without its line breaks."""
    match = _RELEASE.search(text)
    return f"{match[1]} {match[2]}" if match is not None else " ".join(text.split())[:200]


def _uses_blackwell(arch: int) -> bool | None:
    directory = triton_dir()
    if directory is None:
        return None
    threshold = _blackwell_threshold(os.path.join(directory, "backends", "nvidia", "compiler.py"))
    return arch >= threshold if threshold is not None else None


@functools.lru_cache(maxsize=8)
def _blackwell_threshold(compiler_source: str) -> int | None:
    """Return the first compute capability for which Triton takes `ptxas-blackwell`.

    It is 100 in Triton 3.6 and 3.7 and 90 in 3.9, and stands nowhere but in the condition inside `get_ptxas`: reading it
    there is exact for each release, and needs no import.
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
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and function.name == "get_ptxas":
            return _threshold_in(function)
    return None


def _threshold_in(function: ast.FunctionDef) -> int | None:
    import ast

    for node in ast.walk(function):
        match node:
            case ast.Compare(
                left=ast.Name(id="arch"),
                ops=[ast.GtE() | ast.Lt()],
                comparators=[ast.Constant(value=int(threshold))],
            ):
                return threshold
    return None


def candidates(program: str) -> list[str]:
    """Return paths in the order in which Triton tries them: what the user set, then the one it was installed with."""
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


@functools.lru_cache(maxsize=32)
def _ask(path: str, _size_bytes: int, _mtime_ns: int) -> str | None:
    """Run `path --version`; size and modification time only tell states of the file apart."""
    try:
        status, answer = _run(path, "--version")
    except OSError as error:
        _LOG.warning("ptxas does not answer: %s (%s)", path, error)
        return None
    if status:
        _LOG.warning("ptxas does not answer: %s (exit status %s)", path, status)
        return None
    return short_version(answer.decode("utf-8", "replace"))


def _run(*command: str) -> tuple[int, bytes]:
    """Return the exit status of a program and what it wrote; raises `OSError` for one that cannot run, or takes too long.

    `subprocess` does this too, and is imported for longer than the program runs: a new process asks before its first kernel.
    """
    ends_s = time.monotonic() + _TIMEOUT_S
    reading, writing = os.pipe()
    with open(reading, "rb", buffering=0) as output:
        try:
            redirected = [(os.POSIX_SPAWN_DUP2, writing, descriptor) for descriptor in (1, 2)]
            child = os.posix_spawn(command[0], command, os.environ, file_actions=redirected)
        finally:
            os.close(writing)
        try:
            answer = _read_all(output, ends_s)
            return _exit_status(child, ends_s), answer
        except BaseException:
            with contextlib.suppress(OSError):  # it ended meanwhile
                os.kill(child, _SIGKILL)
                os.waitpid(child, 0)
            raise


def _read_all(output: IO[bytes], ends_s: float) -> bytes:
    poll = select.poll()
    poll.register(output, select.POLLIN | select.POLLHUP)
    parts: list[bytes] = []
    while poll.poll(max(0.0, ends_s - time.monotonic()) * 1000):
        part = output.read(_ANSWER_BYTES)
        if not part:
            return b"".join(parts)
        parts.append(part)
    raise TimeoutError(f"no answer in {_TIMEOUT_S} s")


def _exit_status(child: int, ends_s: float) -> int:
    try:
        while True:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > ends_s:
                raise TimeoutError(f"it does not end in {_TIMEOUT_S} s")
            time.sleep(_PAUSE_S)  # it has closed its output, so it is about to end
    except ChildProcessError:
        return 0  # this process ignores SIGCHLD, so it does not learn how its children end
