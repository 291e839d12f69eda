# SPDX-License-Identifier: Apache-2.0
"""One client of a network file system, in small: a FUSE mount of a directory that others mount too.

    python -m tools.shared_fs.network_layer DIRECTORY PLACE KIND SEED      mounts, prints a line, ends with its standard input

`KINDS` says what each kind does wrong: the kernel keeps names, missing ones too, attributes and
listings for `known_s`; requests take up to `delay_s` and overtake each other; some answers are
lost, so that a request that was made is made again and fails; a file that another client replaced
is ESTALE; locks hold within one mount alone. `race` starts two. The side of the kernel is spoken to
in the standard library alone; it needs Linux, /dev/fuse and the right to mount.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import random
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

# Numbers of requests, from the kernel's include/uapi/linux/fuse.h: the first one, and those that
# have no answer (to forget one node, or several, and to interrupt).
_INIT = 26
_UNANSWERED = {2, 42, 36}
_VERSION, _MINOR = 7, 31
_MOST_BYTES = 128 * 1024
_ROOT_NODE = 1
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
THREADS = 6
_SET_MODE, _SET_SIZE, _SET_TIME, _SET_TIME_NOW = 1, 8, 32, 256


@dataclass(frozen=True)
class Call:
    """One request of the kernel: its number, its own name, the node that it is about, and
    the rest.
    """

    number: int
    unique: int
    node: int
    rest: bytes


@contextlib.contextmanager
def _mounted(place: str) -> Iterator[int]:
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


def _receive(fd: int) -> Call | None:
    """Return the next request, None when the file system was unmounted."""
    while True:
        try:
            data = os.read(fd, _MOST_BYTES + 4096)
        except OSError as error:
            if error.errno in {errno.ENODEV, errno.EBADF}:
                return None
            if error.errno in {errno.EINTR, errno.EAGAIN, errno.ENOENT}:
                continue
            raise
        _, number, unique, node, *_ = _IN.unpack_from(data)
        return Call(number, unique, node, data[_IN.size :])


def _answer(fd: int, call: Call, body: bytes = b"", error: int = 0) -> None:
    """Answer a request with a body, or with an error of the operating system."""
    with contextlib.suppress(OSError):  # the caller was interrupted, or the file system unmounted
        os.write(fd, _OUT.pack(_OUT.size + len(body), -error, call.unique) + body)


def _pack_init() -> bytes:
    """Return what the kernel is told first: our version, and how much it may write at once."""
    return _INIT_OUT.pack(
        _VERSION, _MINOR, _MOST_BYTES, 0, 16, 12, _MOST_BYTES, 1, _MOST_BYTES // 4096, 0, 0, 0
    )


def _pack_attributes(found: os.stat_result, node: int) -> bytes:
    """Return the attributes of a file as the kernel lays them out."""
    times = [found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns]
    return _ATTRIBUTES.pack(
        node,
        found.st_size,
        found.st_blocks,
        *(time // _NS for time in times),
        *(time % _NS for time in times),
        found.st_mode,
        found.st_nlink,
        found.st_uid,
        found.st_gid,
        found.st_rdev & 0xFFFFFFFF,
        4096,
        0,
    )


def _pack_entry(found: os.stat_result | None, node: int, known_s: float) -> bytes:
    """Return a name's node and attributes, None for a name that is not there, and how long the
    kernel may keep them.
    """
    seconds, rest = int(known_s), int(known_s % 1 * _NS)
    head = _ENTRY.pack(node if found else 0, 0, seconds, seconds, rest, rest)
    return head + (_pack_attributes(found, node) if found else bytes(_ATTRIBUTES.size))


def _pack_attributes_answer(found: os.stat_result, node: int, known_s: float) -> bytes:
    """Return attributes, and how long the kernel may keep them."""
    return _ATTRIBUTES_OUT.pack(int(known_s), int(known_s % 1 * _NS), 0) + _pack_attributes(
        found, node
    )


def _pack_open(handle: int) -> bytes:
    """Return the number of an open file."""
    return _OPEN_OUT.pack(handle, 0, 0)


def _pack_names(names: list[str], offset: int, size: int) -> bytes:
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


@dataclass(frozen=True)
class Kind:
    """How a file system misbehaves.

    Attributes:
        known_s: how long names, attributes and listings are believed without asking.
        delay_s: the most that a request takes longer.
        lost: the share of changes whose answer is lost; the request is made again, and its error is
            what the caller gets.
        busy: the share of removals of directories that are refused with EBUSY.
        links: whether it has hard links.
        split_rename: whether renaming over a file removes that file first, and pauses.
    """

    known_s: float = 0.0
    delay_s: float = 0.0
    lost: float = 0.0
    busy: float = 0.0
    links: bool = True
    split_rename: bool = False


KINDS = {
    "plain": Kind(),
    "nfs": Kind(known_s=0.5, delay_s=0.002, lost=0.01, busy=0.1),
    "without-links": Kind(known_s=0.2, delay_s=0.002, busy=0.1, links=False),
    "split-rename": Kind(known_s=0.2, delay_s=0.002, busy=0.1, split_rename=True),
}


class NetworkLayer:
    """Answers the kernel for one mount.

    Args:
        root: the directory that all clients share.
        kind: how it misbehaves.
        seed: of what is random.
    """

    def __init__(self, root: str, kind: Kind, seed: int) -> None:
        self._root, self._kind, self._random = root, kind, random.Random(seed)  # it must repeat
        self._lock = threading.Lock()
        # A node is a path and the file that was there when the kernel asked for it.
        self._paths: dict[int, str] = {_ROOT_NODE: ""}
        self._inodes: dict[int, int] = {}
        self._nodes: dict[tuple[str, int], int] = {}
        self._listings: dict[str, tuple[float, list[str]]] = {}
        self._open: dict[int, list[str]] = {}
        self._answers: dict[int, Callable[[Call], bytes]] = {
            _INIT: lambda _: _pack_init(),
            1: self._look_up,
            3: self._attributes,
            4: self._set_attributes,
            9: self._make_directory,
            10: self._unlink,
            11: self._remove_directory,
            12: lambda call: self._rename(call, 8),
            45: lambda call: self._rename(call, 16),
            13: self._link,
            14: self._open_file,
            15: self._read,
            16: self._write,
            18: self._release,
            35: self._create,
            27: self._open_directory,
            28: self._read_directory,
            29: self._close_directory,
            **dict.fromkeys((20, 25, 30), lambda _: b""),  # to synchronize and to flush
            17: self._statistics,
        }

    def serve(self, fd: int) -> None:
        """Answer until the file system is unmounted."""
        while (call := _receive(fd)) is not None:
            if call.number in _UNANSWERED:
                continue
            if self._kind.delay_s and call.number != _INIT:
                time.sleep(self._random.uniform(0, self._kind.delay_s))
            try:
                handler = self._answers.get(call.number)
                if handler is None:
                    _answer(fd, call, error=errno.ENOSYS)
                else:
                    _answer(fd, call, handler(call))
            except OSError as error:
                _answer(fd, call, error=error.errno or errno.EIO)

    def _where(self, node: int) -> str:
        return os.path.join(self._root, self._paths[node])

    def _found(self, node: int) -> os.stat_result:
        """Return the attributes of a node; ESTALE when another file has taken its place, or none is
        there.
        """
        try:
            found = os.lstat(self._where(node))
        except FileNotFoundError:
            raise OSError(errno.ESTALE, "stale") from None
        if self._inodes.get(node, found.st_ino) != found.st_ino:
            raise OSError(errno.ESTALE, "stale")
        return found

    def _named(self, call: Call, start: int = 0) -> tuple[str, str]:
        """Return the path of a name below a node, from the root, and in full."""
        name = os.fsdecode(call.rest[start:].partition(b"\0")[0])
        path = os.path.join(self._paths[call.node], name)
        return path, os.path.join(self._root, path)

    def _entry(self, path: str) -> bytes:
        found = os.lstat(os.path.join(self._root, path))
        with self._lock:
            node = self._nodes.setdefault((path, found.st_ino), len(self._paths) + 1)
            self._paths[node], self._inodes[node] = path, found.st_ino
        return _pack_entry(found, node, self._kind.known_s)

    def _changed(self, *paths: str) -> None:
        """A client knows of its own changes."""
        for path in paths:
            self._listings.pop(os.path.dirname(path), None)

    def _made(self, change: Callable[[], object]) -> None:
        """Make a change; where its answer is lost, the caller gets what the second attempt says."""
        change()
        if self._random.random() < self._kind.lost:
            change()

    def _look_up(self, call: Call) -> bytes:
        path, _ = self._named(call)
        try:
            return self._entry(path)
        except FileNotFoundError:
            # No error: the kernel may keep it that the name is missing.
            return _pack_entry(None, 0, self._kind.known_s)

    def _attributes(self, call: Call) -> bytes:
        return _pack_attributes_answer(self._found(call.node), call.node, self._kind.known_s)

    def _set_attributes(self, call: Call) -> bytes:
        valid, _, _, size, _, _, mtime, _, _, mtime_ns, _, mode = struct.unpack_from(
            "<IIQQQQQQIIII", call.rest
        )
        self._found(call.node)
        where = self._where(call.node)
        if valid & _SET_MODE:
            os.chmod(where, stat.S_IMODE(mode))
        if valid & _SET_SIZE:
            os.truncate(where, size)
        if valid & _SET_TIME_NOW:
            os.utime(where)
        elif valid & _SET_TIME:
            os.utime(where, ns=(mtime * 10**9 + mtime_ns,) * 2)
        return self._attributes(call)

    def _make_directory(self, call: Call) -> bytes:
        path, where = self._named(call, 8)
        (mode,) = struct.unpack_from("<I", call.rest)
        self._changed(path)
        self._made(lambda: os.mkdir(where, mode & 0o7777))
        return self._entry(path)

    def _unlink(self, call: Call) -> bytes:
        path, where = self._named(call)
        self._changed(path)
        self._made(lambda: os.unlink(where))
        return b""

    def _remove_directory(self, call: Call) -> bytes:
        path, where = self._named(call)
        if self._random.random() < self._kind.busy:
            raise OSError(errno.EBUSY, "busy")
        self._changed(path)
        os.rmdir(where)
        return b""

    def _rename(self, call: Call, start: int) -> bytes:
        (parent,) = struct.unpack_from("<Q", call.rest)
        old, new, *_ = (os.fsdecode(name) for name in call.rest[start:].split(b"\0"))
        source = os.path.join(self._paths[call.node], old)
        target = os.path.join(self._paths[parent], new)
        full = [os.path.join(self._root, path) for path in (source, target)]
        self._changed(source, target)
        if self._kind.split_rename and os.path.isfile(full[1]):
            os.unlink(full[1])
            time.sleep(self._kind.delay_s)
        self._made(lambda: os.rename(*full))
        with self._lock:
            for node, path in self._paths.items():
                if path == source or path.startswith(f"{source}/"):
                    self._paths[node] = target + path[len(source) :]
                    self._nodes[self._paths[node], self._inodes.get(node, 0)] = node
        return b""

    def _link(self, call: Call) -> bytes:
        if not self._kind.links:
            raise OSError(errno.EOPNOTSUPP, "no hard links")
        (old,) = struct.unpack_from("<Q", call.rest)
        path, where = self._named(call, 8)
        self._found(old)
        self._changed(path)
        self._made(lambda: os.link(self._where(old), where, follow_symlinks=False))
        return self._entry(path)

    def _open_file(self, call: Call) -> bytes:
        (flags,) = struct.unpack_from("<I", call.rest)
        self._found(call.node)
        # The kernel has looked at these itself.
        return _pack_open(
            os.open(self._where(call.node), flags & ~(os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW))
        )

    def _create(self, call: Call) -> bytes:
        flags, mode = struct.unpack_from("<II", call.rest)
        path, where = self._named(call, 16)
        self._changed(path)
        fd = os.open(where, flags & ~os.O_NOFOLLOW, mode & 0o7777)
        return self._entry(path) + _pack_open(fd)

    def _read(self, call: Call) -> bytes:
        fd, offset, size = struct.unpack_from("<QQI", call.rest)
        if not os.fstat(fd).st_nlink:
            raise OSError(errno.ESTALE, "removed by another client")
        return os.pread(fd, size, offset)

    def _write(self, call: Call) -> bytes:
        fd, offset, size = struct.unpack_from("<QQI", call.rest)
        return struct.pack("<II", os.pwrite(fd, call.rest[40 : 40 + size], offset), 0)

    def _release(self, call: Call) -> bytes:
        os.close(struct.unpack_from("<Q", call.rest)[0])
        return b""

    def _open_directory(self, call: Call) -> bytes:
        path = self._paths[call.node]
        at_s, names = self._listings.get(path, (0.0, []))
        if not at_s or time.monotonic() - at_s > self._kind.known_s:
            names = sorted(os.listdir(self._where(call.node)))
            self._listings[path] = (time.monotonic(), names)
        with self._lock:
            handle = max(self._open, default=0) + 1
            self._open[handle] = names
        return _pack_open(handle)

    def _read_directory(self, call: Call) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", call.rest)
        return _pack_names(self._open[handle], offset, size)

    def _close_directory(self, call: Call) -> bytes:
        self._open.pop(struct.unpack_from("<Q", call.rest)[0], None)
        return b""

    def _statistics(self, _call: Call) -> bytes:
        found = os.statvfs(self._root)
        return struct.pack(
            "<QQQQQIIII24x",
            found.f_blocks,
            found.f_bfree,
            found.f_bavail,
            found.f_files,
            found.f_ffree,
            found.f_bsize,
            found.f_namemax,
            found.f_frsize,
            0,
        )


def main(root: str, place: str, kind: str, seed: str) -> None:
    """Mount, serve, and unmount when standard input ends."""
    layer = NetworkLayer(root, KINDS[kind], int(seed))
    with _mounted(place) as fd:
        for _ in range(THREADS):
            threading.Thread(target=layer.serve, args=(fd,), daemon=True).start()
        print(json.dumps("mounted"), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
