# SPDX-License-Identifier: Apache-2.0
"""The messages between the pool and its workers: framed positional msgpack, and errors as plain
data.

`worker_processes` writes and reads them on the program's side, `compile_worker` on the worker's.

::

    frame     length (8 bytes, little-endian) + msgpack array
    job       [name, payload, environment or nil]              pool -> worker
    answers   ["started", where its output begins] | ["done", result, seconds] | ["failed", error]

Both sides are one release of this package; `PROTOCOL` and the version are compared when the
workers' server starts.
"""

from __future__ import annotations

import importlib
import os
import struct
import sys
from collections.abc import Callable, Iterator
from typing import Any

from msgspec import Struct

from bundler import errors
from bundler.errors import BundlerError, CompileFailed, FormatError, LimitExceeded
from bundler.format import wire
from bundler.toolchain.diagnostics import telling_line
from bundler.toolchain.recording.manager_environment import manager_environment

PROTOCOL = 2
# The IR of the largest kernels seen is a few megabytes.
MESSAGE_BYTES = 16 << 20
# So much of the end of an error's message is sent.
TEXT_BYTES = 16 << 10
# A longer text among an error's facts, such as a compiler's output, is cut to its beginning and
# end.
FACT_BYTES = 1 << 20
_HALF = FACT_BYTES // 2
# Room for the line that says how much is missing.
_MARK_BYTES = 64
_HEAD = struct.Struct("<Q")
_KINDS: dict[str, type[BundlerError]] = {
    cls.code: cls
    for cls in vars(errors).values()
    if isinstance(cls, type) and issubclass(cls, BundlerError)
}


class JobEnvironment(Struct, array_like=True, frozen=True):
    """Environment variables and import path for a job, as they were when it was submitted."""

    environment: tuple[tuple[bytes, bytes], ...]
    path: tuple[bytes, ...]

    @staticmethod
    def now() -> JobEnvironment:
        """Return those of this process; relative entries of the path become absolute."""
        path = tuple(os.fsencode(os.path.abspath(entry)) for entry in sys.path)
        # Another thread may begin or end a recording meanwhile.
        environment = manager_environment.current()
        pairs = ((os.fsencode(name), os.fsencode(value)) for name, value in environment.items())
        return JobEnvironment(tuple(sorted(pairs)), path)

    def apply(self) -> None:
        """Set them in this process; variables that are not among them are removed."""
        wanted = dict(self.environment)
        for name in set(os.environb) - set(wanted):
            del os.environb[name]
        for name, value in wanted.items():
            if os.environb.get(name) != value:
                os.environb[name] = value
        sys.path[:] = [os.fsdecode(entry) for entry in self.path]


def frame(message: list[Any]) -> bytes:
    """Return a message ready for a stream; raises `LimitExceeded` when it is too large."""
    data = wire.pack(message)
    if len(data) > MESSAGE_BYTES:
        raise LimitExceeded(
            f"a message of {len(data)} bytes for a compile worker is over the limit of"
            f" {MESSAGE_BYTES}",
            limit=MESSAGE_BYTES,
            got=len(data),
        )
    return _HEAD.pack(len(data)) + data


class FrameReader:
    """Puts frames together from the pieces that a stream gives."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[list[Any]]:
        """Add a piece and yield the messages that are complete now; raises `FormatError` for what
        is no message.
        """
        self._data += data
        while len(self._data) >= _HEAD.size:
            (length,) = _HEAD.unpack_from(self._data)
            # Before the bytes are waited for: a job that writes into its worker's socket may
            # announce any length.
            if length > MESSAGE_BYTES:
                raise LimitExceeded(
                    f"a message of {length} bytes from a compile process",
                    limit=MESSAGE_BYTES,
                    got=length,
                )
            end = _HEAD.size + length
            if len(self._data) < end:
                return
            body = bytes(self._data[_HEAD.size : end])
            del self._data[:end]
            yield wire.unpack(body, "message of a compile process")


def encode_error(error: BundlerError) -> list[Any]:
    """Return an error as plain data, without facts that are no scalars."""
    facts = [
        [
            name,
            ends(value.encode("utf-8", "replace")) if isinstance(value, str) else value,
            isinstance(value, str),
        ]
        for name, value in error.facts.items()
        if value is None or type(value) in {bool, int, float, str}
    ]
    return [error.code, tail(error.message), facts]


def decode_error(data: Any) -> BundlerError:
    """Make the error again; raises `FormatError` for anything that `encode_error` did not write."""
    code, message, facts = wire.fields(data, "error", str, bytes, list)
    named = {}
    for fact in facts:
        name, value, is_text = wire.fields(fact, "fact", str, object, bool)
        named[name] = (
            value.decode("utf-8", "replace") if is_text and isinstance(value, bytes) else value
        )
    if code not in _KINDS:
        raise FormatError(f"unknown kind of error {code!r}", got=code)
    return _KINDS[code](message.decode("utf-8", "replace"), **named)


def resolve(name: str) -> Callable[..., Any]:
    """Return the function that `module:function` names; the name comes from the program that starts
    the service.
    """
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def failure(
    name: str,
    reason: str,
    said: str = "",
    words: str = "",
    kind: type[CompileFailed] = CompileFailed,
    **facts: Any,
) -> CompileFailed:
    """Return the error of a kernel that was not compiled; `said`: the sentence, where the reason
    alone is none.
    """
    text = f"{name}: {said or reason}"
    return kind(text, name=name, reason=reason, line=None, words=words, **facts)


def as_failure(name: str, error: BaseException, words: str) -> BundlerError:
    """Return what a job raised as an error of ours that names the kernel."""
    if isinstance(error, BundlerError):
        return error
    return failure(name, f"{type(error).__name__}: {error}", words=words)


def tail(text: str) -> bytes:
    """Return the end of a text in UTF-8, at most so much as a message may carry."""
    return text.encode("utf-8", "replace")[-TEXT_BYTES:]


def ends(data: bytes) -> bytes:
    """Return a text; of one that is too long for a fact beginning and end, and how much is missing
    between them.
    """
    missing = len(data) - FACT_BYTES
    return data if missing <= 0 else _joined(data[:_HALF], missing, data[-_HALF:])


def read_printed(output: int, begin: int) -> str:
    """Return what the file of a worker's output holds from a place on; of much beginning and end,
    so that it fits a fact.
    """
    size, most = os.fstat(output).st_size - begin, FACT_BYTES - _MARK_BYTES
    if size <= most:
        data = os.pread(output, max(0, size), begin)
    else:
        half = most // 2
        data = _joined(
            os.pread(output, half, begin), size - most, os.pread(output, half, begin + size - half)
        )
    return data.decode("utf-8", "replace").strip()


def _joined(beginning: bytes, missing: int, end: bytes) -> bytes:
    return beginning + b"\n... %d bytes ...\n" % missing + end


def with_printed(error: BundlerError, printed: str) -> BundlerError:
    """Return a failed compile with what was printed meanwhile; where the compiler's exception does
    not say why, that output does.
    """
    if not isinstance(error, CompileFailed) or not printed:
        return error
    facts, message = {**error.facts, "printed": printed}, error.message
    line, reason = telling_line(printed), error.facts.get("reason")
    if (
        line is not None
        and telling_line(f"{error.facts.get('words', '')}") is None
        and reason
        and not facts.get("line")
    ):
        facts["reason"] = f"{reason.rstrip('. ')}: {line}"
        message = message.replace(reason, facts["reason"])
    return type(error)(message, **facts)
