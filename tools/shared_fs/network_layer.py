# SPDX-License-Identifier: Apache-2.0
"""One client of a network file system, in small: a FUSE mount of a directory that others mount too.

    python -m tools.shared_fs.network_layer DIRECTORY PLACE KIND SEED      mounts, prints a line, ends with its standard input

`KINDS` says what each kind does wrong: the kernel keeps names, missing ones too, attributes and listings for `known_s`; requests take up to
`delay_s` and overtake each other; some answers are lost, so that a request that was made is made again and fails; a file that
another client replaced is ESTALE; locks hold within one mount alone.  `race` starts two.
"""

from __future__ import annotations

import errno
import os
import random
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from tools.shared_fs import fuse_link
from tools.shared_fs.fuse_link import Call

THREADS = 6
_SET_MODE, _SET_SIZE, _SET_TIME, _SET_TIME_NOW = 1, 8, 32, 256


@dataclass(frozen=True)
class Kind:
    """How a file system misbehaves.

    Attributes:
        known_s: how long names, attributes and listings are believed without asking.
        delay_s: the most that a request takes longer.
        lost: the share of changes whose answer is lost; the request is made again, and its error is what the caller gets.
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
        self._paths: dict[int, str] = {fuse_link.ROOT_NODE: ""}
        self._inodes: dict[int, int] = {}
        self._nodes: dict[tuple[str, int], int] = {}
        self._listings: dict[str, tuple[float, list[str]]] = {}
        self._open: dict[int, list[str]] = {}
        self._answers: dict[int, Callable[[Call], bytes]] = {
            fuse_link.INIT: lambda _: fuse_link.pack_init(), fuse_link.LOOKUP: self._look_up, fuse_link.GETATTR: self._attributes,
            fuse_link.SETATTR: self._set_attributes, fuse_link.MKDIR: self._make_directory, fuse_link.UNLINK: self._unlink,
            fuse_link.RMDIR: self._remove_directory, fuse_link.RENAME: lambda call: self._rename(call, 8),
            fuse_link.RENAME2: lambda call: self._rename(call, 16), fuse_link.LINK: self._link, fuse_link.OPEN: self._open_file,
            fuse_link.READ: self._read, fuse_link.WRITE: self._write, fuse_link.RELEASE: self._release, fuse_link.CREATE: self._create,
            fuse_link.OPENDIR: self._open_directory, fuse_link.READDIR: self._read_directory, fuse_link.RELEASEDIR: self._close_directory,
            fuse_link.FSYNC: lambda _: b"", fuse_link.FLUSH: lambda _: b"", fuse_link.FSYNCDIR: lambda _: b"",
            fuse_link.STATFS: self._statistics,
        }  # fmt: skip

    def serve(self, fd: int) -> None:
        """Answer until the file system is unmounted."""
        while (call := fuse_link.receive(fd)) is not None:
            if call.number in fuse_link.UNANSWERED:
                continue
            if self._kind.delay_s and call.number != fuse_link.INIT:
                time.sleep(self._random.uniform(0, self._kind.delay_s))
            try:
                handler = self._answers.get(call.number)
                if handler is None:
                    fuse_link.answer(fd, call, error=errno.ENOSYS)
                else:
                    fuse_link.answer(fd, call, handler(call))
            except OSError as error:
                fuse_link.answer(fd, call, error=error.errno or errno.EIO)

    def _where(self, node: int) -> str:
        return os.path.join(self._root, self._paths[node])

    def _found(self, node: int) -> os.stat_result:
        """Return the attributes of a node; ESTALE when another file has taken its place, or none is there."""
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
        return fuse_link.pack_entry(found, node, self._kind.known_s)

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
            return fuse_link.pack_entry(None, 0, self._kind.known_s)

    def _attributes(self, call: Call) -> bytes:
        return fuse_link.pack_attributes_answer(
            self._found(call.node), call.node, self._kind.known_s
        )

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
        return fuse_link.pack_open(
            os.open(self._where(call.node), flags & ~(os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW))
        )

    def _create(self, call: Call) -> bytes:
        flags, mode = struct.unpack_from("<II", call.rest)
        path, where = self._named(call, 16)
        self._changed(path)
        fd = os.open(where, flags & ~os.O_NOFOLLOW, mode & 0o7777)
        return self._entry(path) + fuse_link.pack_open(fd)

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
        return fuse_link.pack_open(handle)

    def _read_directory(self, call: Call) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", call.rest)
        return fuse_link.pack_names(self._open[handle], offset, size)

    def _close_directory(self, call: Call) -> bytes:
        self._open.pop(struct.unpack_from("<Q", call.rest)[0], None)
        return b""

    def _statistics(self, _call: Call) -> bytes:
        found = os.statvfs(self._root)
        return struct.pack(
            "<QQQQQIIII24x", found.f_blocks, found.f_bfree, found.f_bavail, found.f_files, found.f_ffree, found.f_bsize,
            found.f_namemax, found.f_frsize, 0,
        )  # fmt: skip


def main(root: str, place: str, kind: str, seed: str) -> None:
    """Mount, serve, and unmount when standard input ends."""
    layer = NetworkLayer(root, KINDS[kind], int(seed))
    with fuse_link.mounted(place) as fd:
        for _ in range(THREADS):
            threading.Thread(target=layer.serve, args=(fd,), daemon=True).start()
        print("mounted", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
