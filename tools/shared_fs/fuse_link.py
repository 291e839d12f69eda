# SPDX-License-Identifier: Apache-2.0
"""The kernel's side of a FUSE mount, in the standard library alone: mounting, and requests and answers as the kernel lays them out.

`mounted` mounts a directory and yields the descriptor; `receive` and `answer` speak over it; the `pack_` functions lay out what
answers hold.  Needs Linux, /dev/fuse and the right to mount.  `network_layer` is what answers.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass

# Numbers of requests, from the kernel's include/uapi/linux/fuse.h.
LOOKUP, FORGET, GETATTR, SETATTR, MKDIR, UNLINK, RMDIR, RENAME, LINK = 1, 2, 3, 4, 9, 10, 11, 12, 13
OPEN, READ, WRITE, STATFS, RELEASE, FSYNC, FLUSH, INIT = 14, 15, 16, 17, 18, 20, 25, 26
OPENDIR, READDIR, RELEASEDIR, FSYNCDIR, CREATE, INTERRUPT, DESTROY, BATCH_FORGET, RENAME2 = (
    27,
    28,
    29,
    30,
    35,
    36,
    38,
    42,
    45,
)
UNANSWERED = {FORGET, BATCH_FORGET, INTERRUPT}
VERSION, MINOR = 7, 31
MOST_BYTES = 128 * 1024
ROOT_NODE = 1
_IN = struct.Struct("<IIQQIIIHH")
_OUT = struct.Struct("<IiQ")
_INIT_OUT = struct.Struct("<IIIIHHIIHHII24x")
_ATTRIBUTES = struct.Struct("<QQQQQQIIIIIIIIII")
_ENTRY = struct.Struct("<QQQQII")
_ATTRIBUTES_OUT = struct.Struct("<QII")
_OPEN_OUT = struct.Struct("<QII")
_DIRECTORY_ENTRY = struct.Struct("<QQII")
_NS = 1_000_000_000
_DETACH = 2


@dataclass(frozen=True)
class Call:
    """One request of the kernel: its number, its own name, the node that it is about, and the rest."""

    number: int
    unique: int
    node: int
    rest: bytes


@contextlib.contextmanager
def mounted(place: str) -> Iterator[int]:
    """Mount at a directory; yields the descriptor over which the kernel speaks.

    Raises:
        OSError: there is no /dev/fuse, or no right to mount.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    settings = f"fd={fd},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()},allow_other"
    try:
        if libc.mount(b"bundler-shared-fs", os.fsencode(place), b"fuse", 0, settings.encode()):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), place)
        try:
            yield fd
        finally:
            libc.umount2(os.fsencode(place), _DETACH)
    finally:
        os.close(fd)


def receive(fd: int) -> Call | None:
    """Return the next request, None when the file system was unmounted."""
    while True:
        try:
            data = os.read(fd, MOST_BYTES + 4096)
        except OSError as error:
            if error.errno in {errno.ENODEV, errno.EBADF}:
                return None
            if error.errno in {errno.EINTR, errno.EAGAIN, errno.ENOENT}:
                continue
            raise
        _, number, unique, node, *_ = _IN.unpack_from(data)
        return Call(number, unique, node, data[_IN.size :])


def answer(fd: int, call: Call, body: bytes = b"", error: int = 0) -> None:
    """Answer a request with a body, or with an error of the operating system."""
    with contextlib.suppress(OSError):  # the caller was interrupted, or the file system unmounted
        os.write(fd, _OUT.pack(_OUT.size + len(body), -error, call.unique) + body)


def pack_init() -> bytes:
    """Return what the kernel is told first: our version, and how much it may write at once."""
    return _INIT_OUT.pack(
        VERSION, MINOR, MOST_BYTES, 0, 16, 12, MOST_BYTES, 1, MOST_BYTES // 4096, 0, 0, 0
    )


def pack_attributes(found: os.stat_result, node: int) -> bytes:
    """Return the attributes of a file as the kernel lays them out."""
    times = [found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns]
    return _ATTRIBUTES.pack(
        node, found.st_size, found.st_blocks, *(time // _NS for time in times), *(time % _NS for time in times),
        found.st_mode, found.st_nlink, found.st_uid, found.st_gid, found.st_rdev & 0xFFFFFFFF, 4096, 0,
    )  # fmt: skip


def pack_entry(found: os.stat_result | None, node: int, known_s: float) -> bytes:
    """Return a name's node and attributes, None for a name that is not there, and how long the kernel may keep them."""
    seconds, rest = int(known_s), int(known_s % 1 * _NS)
    head = _ENTRY.pack(node if found else 0, 0, seconds, seconds, rest, rest)
    return head + (pack_attributes(found, node) if found else bytes(_ATTRIBUTES.size))


def pack_attributes_answer(found: os.stat_result, node: int, known_s: float) -> bytes:
    """Return attributes, and how long the kernel may keep them."""
    return _ATTRIBUTES_OUT.pack(int(known_s), int(known_s % 1 * _NS), 0) + pack_attributes(
        found, node
    )


def pack_open(handle: int) -> bytes:
    """Return the number of an open file."""
    return _OPEN_OUT.pack(handle, 0, 0)


def pack_names(names: list[str], offset: int, size: int) -> bytes:
    """Return as many names of a listing as fit, from an offset on."""
    made = b""
    for number, name in enumerate(names[offset:], offset + 1):
        data = os.fsencode(name)
        entry = _DIRECTORY_ENTRY.pack(number, number, len(data), 0) + data
        entry += bytes(-len(entry) % 8)
        if len(made) + len(entry) > size:
            break
        made += entry
    return made
