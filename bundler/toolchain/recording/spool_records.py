# SPDX-License-Identifier: Apache-2.0
"""The records that a child process writes about each kernel or file, one file of the spool
directory each.

`SpooledEvent` is the record of a kernel, `SpooledFile` that of a file; `spool_manager.py` writes
them and `child_recording.py` reads them. Sessions take a `SpooledEvent` also as what is known of a
compile in their own process, and encode it in the notes of misses.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import tempfile
from typing import Any, NamedTuple

from bundler.errors import FormatError
from bundler.format import wire
from bundler.format.entries import Target, Toolchain

VERSION = 1
SUFFIX = ".record"
_PREFIX = "triton-bundler-spool"
_MAYBE_TEXT = (str, type(None))
_MAYBE_BYTES = (bytes, type(None))


class SpooledEvent(NamedTuple):
    """A kernel that a child process compiled or found; everything is data already.

    `name` is the entry point for a compile and the file's stem for a hit, since a hit is written
    down before Triton reads the metadata.  Target, facts and parts are None, and the toolchain is
    empty, when the compile call could not be seen.
    """

    key: str
    hash: str
    directory: str
    name: str
    target: Target | None
    device: int | None
    stage_times_us: tuple[tuple[str, int], ...]
    cache_hit: bool
    facts_bytes: bytes | None
    parts_bytes: bytes | None
    toolchain: Toolchain
    pid: int


class SpooledFile(NamedTuple):
    """A single file of the cache that a child process wrote or used: a helper library or a tuning
    file.
    """

    directory: str
    filename: str
    pid: int


Record = SpooledEvent | SpooledFile


def encode(record: Record) -> bytes:
    """Return the positional msgpack form."""
    if isinstance(record, SpooledFile):
        return wire.pack([VERSION, "file", [record.directory, record.filename, record.pid]])
    target, toolchain = record.target, record.toolchain
    return wire.pack(
        [
            VERSION,
            "kernel",
            [
                record.key,
                record.hash,
                record.directory,
                record.name,
                None if target is None else [target.backend, target.arch, target.warp_size],
                record.device,
                [list(stage) for stage in record.stage_times_us],
                record.cache_hit,
                record.facts_bytes,
                record.parts_bytes,
                [toolchain.release, toolchain.binary, toolchain.ptxas],
                record.pid,
            ],
        ]
    )


def decode(data: bytes) -> Record:
    """Decode what `encode` wrote; raises `FormatError` for anything else, another version
    included.
    """
    version, kind, body = wire.fields(
        wire.unpack(data, "spool record"), "spool record", int, str, list
    )
    if version != VERSION or kind not in {"kernel", "file"}:
        raise FormatError(
            f"spool record: unknown version {version} or kind {kind!r}", version=version, kind=kind
        )
    if kind == "file":
        return SpooledFile(*wire.fields(body, "spooled file", str, str, int))
    return _kernel(body)


def _kernel(body: list[object]) -> SpooledEvent:
    key, digest, directory, name, target, device, stages, hit, facts, parts, toolchain, pid = (
        wire.fields(
            body,
            "spooled kernel",
            str,
            str,
            str,
            str,
            (list, type(None)),
            (int, type(None)),
            list,
            bool,
            _MAYBE_BYTES,
            _MAYBE_BYTES,
            list,
            int,
        )
    )
    if target is not None:
        target = Target(*wire.fields(target, "spooled target", str, str, int))
    toolchain = Toolchain(
        *wire.fields(toolchain, "spooled toolchain", _MAYBE_TEXT, _MAYBE_TEXT, _MAYBE_TEXT)
    )
    times: Any = tuple(tuple(wire.fields(stage, "spooled stage", str, int)) for stage in stages)
    return SpooledEvent(
        key, digest, directory, name, target, device, times, hit, facts, parts, toolchain, pid
    )


def spool_path() -> str:
    """Return a path for a new spool directory; its name tells who records (`owner`)."""
    return os.path.join(tempfile.gettempdir(), f"{_PREFIX}-{os.getpid()}-{secrets.token_hex(8)}")


def owner(spool: str) -> int | None:
    """Return the process id of the process that records into a spool and listens itself; None for a
    foreign directory.
    """
    match = re.fullmatch(rf"{_PREFIX}-(\d+)-.+", os.path.basename(spool))
    return int(match[1]) if match is not None else None


def write(spool: str, name: str, record: Record) -> None:
    """Put a record into the spool directory whole: a reader sees all of it or nothing, also when
    this process is killed.

    Raises:
        OSError: the directory is gone, or cannot be written.
    """
    temporary = os.path.join(spool, f".{name}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(encode(record))
        os.rename(temporary, os.path.join(spool, name + SUFFIX))
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
