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
from typing import NamedTuple

from bundler.errors import FormatError
from bundler.format import wire
from bundler.format.entries import Target, Toolchain

VERSION = 2
SUFFIX = ".record"
_PREFIX = "triton-bundler-spool"
_NONE = type(None)
_MAYBE_TEXT, _MAYBE_BYTES = (str, _NONE), (bytes, _NONE)
# The types of the fields of a kernel, as they are written.
_KERNEL = (
    *(str, str, str, str),
    *((int, _NONE), list, bool, int),
    *((list, _NONE), _MAYBE_BYTES, _MAYBE_BYTES, list),
)


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
    device: int | None
    stage_times_us: tuple[tuple[str, int], ...]
    cache_hit: bool
    pid: int
    target: Target | None = None
    facts_bytes: bytes | None = None
    parts_bytes: bytes | None = None
    toolchain: Toolchain = Toolchain()


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
        return wire.pack([VERSION, "file", list(record)])
    target, toolchain = record.target, record.toolchain
    fields = record._replace(
        stage_times_us=[list(stage) for stage in record.stage_times_us],  # type: ignore[arg-type]
        target=target and [target.backend, target.arch, target.warp_size],  # type: ignore[arg-type]
        toolchain=[toolchain.release, toolchain.binary, toolchain.ptxas],  # type: ignore[arg-type]
    )
    return wire.pack([VERSION, "kernel", list(fields)])


def decode(data: bytes) -> Record:
    """Decode what `encode` wrote; raises `FormatError` for anything else, another version
    included.
    """
    array = wire.unpack(data, "spool record")
    version, kind, body = wire.fields(array, "spool record", int, str, list)
    if version != VERSION or kind not in {"kernel", "file"}:
        raise FormatError(
            f"spool record: unknown version {version} or kind {kind!r}", version=version, kind=kind
        )
    if kind == "file":
        return SpooledFile(*wire.fields(body, "spooled file", str, str, int))
    found = SpooledEvent(*wire.fields(body, "spooled kernel", *_KERNEL))
    target, release = found.target, found.toolchain
    stages = (wire.fields(stage, "spooled stage", str, int) for stage in found.stage_times_us)
    return found._replace(
        stage_times_us=tuple((name, spent_us) for name, spent_us in stages),
        target=target and Target(*wire.fields(target, "spooled target", str, str, int)),
        toolchain=Toolchain(*wire.fields(release, "spooled toolchain", *[_MAYBE_TEXT] * 3)),
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
