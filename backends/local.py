# SPDX-License-Identifier: Apache-2.0
"""`LocalBackend`: a byte store in a directory, on a local or network file system.

::

    <root>/data/v1/u/+3f/9a0c…     objects: created by a hard link from tmp, never changed
    <root>/refs/v1/t/demo/+gen/0000000007   refs: the highest generation counts, created the same way
    <root>/leases/…                who may compile what, for a time
    <root>/tmp/…                   being written; swept when a day old by the file system's own clock

Objects and refs depend on no locks: the first process that links to a name has it, which also holds
between clients of NFS.  A lease, among processes of one host, is a file of a token and an expiry,
changed under a short file lock.

`bundler/store/store_urls.py` opens it for paths and `file://` URLs; the compile room keeps its
host-wide leases in one.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import logging
import os
import time
from collections.abc import Collection, Iterator, Mapping

from bundler.backends import file_steps, refs
from bundler.backends.backend_errors import BackendError, BackendFull
from bundler.backends.keys import check_key, check_prefix, is_key
from bundler.backends.port import (
    OBJECT_LIMIT,
    Backend,
    HeldLease,
    Lease,
    Stat,
    held_lease,
    in_prefix,
    new_token,
)

# After the disk was full we do not try again at once: each attempt costs time, and the caller goes
# on without us.
FULL_PAUSE_S = 30.0
STALE_AFTER_S = 24 * 3600.0
_SHARD = "+"
GENERATIONS = "+gen"
_log = logging.getLogger("bundler.backends")
# A program that does not configure logging sees no lines of it.
_log.addHandler(logging.NullHandler())


class LocalBackend(Backend):
    """Objects, refs and leases in a directory that processes of one or many hosts share.

    A directory that cannot be written works for reading.  When the disk is full, writing pauses for
    `FULL_PAUSE_S` with one warning in the log; until then every write raises `BackendFull`.  Leases
    hold among processes of one host. Not guaranteed: on a file system without hard links, of two
    that swap one ref at the same instant both may succeed.

    Args:
        root: the directory; made when first written to.
        permissions: `file_steps.PRIVATE` or `file_steps.GROUP`.

    Raises:
        UntrustedRoot: others could write to the directory.
    """

    reads_are_cheap = True

    def __init__(self, root: str, permissions: file_steps.Permissions = file_steps.PRIVATE) -> None:
        self.root = os.path.abspath(root)
        self._data = os.path.join(self.root, "data")
        self._permissions = permissions
        self._made: set[str] = set()
        self._full_until_s = 0.0
        self._swept = False
        self._trusted = False
        self._trust_root()

    def get(self, keys: Collection[str]) -> dict[str, bytes]:
        return self.get_within(dict.fromkeys(keys, OBJECT_LIMIT))

    def get_within(self, max_bytes: Mapping[str, int]) -> dict[str, bytes]:
        found = {}
        with file_steps.errors_by_meaning(self.root, "read"):
            for key, most in max_bytes.items():
                data = file_steps.read(self._object(key), most)
                if data is not None:
                    found[key] = data
        return found

    def put(self, items: Mapping[str, bytes]) -> frozenset[str]:
        targets = {key: self._object(key) for key in items}
        with self._writing():
            return frozenset(
                key for key, target in targets.items() if self._create(target, items[key])
            )

    def exists(self, keys: Collection[str]) -> frozenset[str]:
        with file_steps.errors_by_meaning(self.root, "read"):
            return frozenset(key for key in keys if os.path.lexists(self._object(key)))

    def delete(
        self, keys: Collection[str], unmodified_since_s: float | None = None
    ) -> frozenset[str]:
        paths = {key: self._object(key) for key in keys}
        with file_steps.errors_by_meaning(self.root, "delete in"):
            return frozenset(
                key for key, path in paths.items() if self._remove(path, unmodified_since_s)
            )

    def touch(self, keys: Collection[str]) -> None:
        for path in [self._object(key) for key in keys]:
            try:
                os.utime(path, follow_symlinks=False)
            except OSError as error:
                if error.errno not in file_steps.ABSENT | file_steps.DENIED:
                    with file_steps.errors_by_meaning(path, "touch"):
                        raise

    def list(self, prefix: str = "") -> Iterator[Stat]:
        check_prefix(prefix)
        self._trust_root()
        with file_steps.errors_by_meaning(self._data, "list"):
            for path, key in _walk(self._data, prefix):
                try:
                    found = os.lstat(path)
                except FileNotFoundError:
                    continue  # removed since
                yield Stat(key, found.st_size, found.st_mtime)

    def read_ref(self, key: str) -> bytes | None:
        return self._latest(key).value

    def swap_ref(self, key: str, expected: bytes | None, value: bytes | None) -> bool:
        current = self._latest(key)
        if current.value != expected:
            return False
        mine, folder = refs.following(current, value), self._generations(key)
        with self._writing():
            if not self._create(refs.path_of(folder, mine.number), mine.encode()):
                return False
            if not refs.took_effect(folder, mine):
                file_steps.remove(refs.path_of(folder, mine.number))
                return False
            with contextlib.suppress(OSError):  # the value is set; the next one cleans
                refs.clean(folder)
        return True

    def list_refs(self, prefix: str = "") -> Iterator[str]:
        check_prefix(prefix)
        self._trust_root()
        top = os.path.join(self.root, "refs")
        with file_steps.errors_by_meaning(top, "list"):
            for folder, subfolders, _ in os.walk(top, onerror=_raise_unless_absent):
                if GENERATIONS in subfolders:
                    key = os.path.relpath(folder, top).replace(os.sep, "/")
                    if in_prefix(key, prefix) and self.read_ref(key) is not None:
                        yield key
                subfolders[:] = sorted(name for name in subfolders if name != GENERATIONS)

    def now_s(self) -> float:
        """Return the file system's time, by making a file; the local clock where that is not
        permitted.
        """
        try:
            # Not `_writing`: on a full disk a prune needs the right time, and an empty file often
            # has room.
            with file_steps.errors_by_meaning(self.root, "write to"):
                probe = self._temporary_path()

                def write_and_look() -> float:
                    self._write(probe, b"")
                    return os.stat(probe).st_mtime

                return file_steps.with_temporary(probe, write_and_look)
        except BackendError:
            return time.time()

    def flush(self) -> None:
        """Write what was put so far to the disk; see `Backend`."""
        with file_steps.errors_by_meaning(self.root, "flush"):
            try:
                fd = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:
                return
            try:
                file_steps.sync(fd)
            finally:
                os.close(fd)

    def lease(self, key: str, ttl_s: float) -> Lease | None:
        """Take a lease among processes of this host; see `Backend`."""
        folder = os.path.join(self.root, "leases")
        with self._writing():
            self._directory(folder)
            return take(os.path.join(folder, _short(check_key(key))), ttl_s, self._permissions, key)

    def leases(self) -> Iterator[HeldLease]:
        """Yield the leases that are held; see `Backend`."""
        folder = os.path.join(self.root, "leases")
        self._trust_root()
        with file_steps.errors_by_meaning(folder, "list"):
            return iter([*held(folder)])

    def _trust_root(self) -> None:
        """Check the directory as soon as it exists: another user may have made it after this store
        was opened.
        """
        if not self._trusted:
            with file_steps.errors_by_meaning(self.root, "open"):
                self._trusted = file_steps.check_root(self.root, self._permissions)

    def _object(self, key: str) -> str:
        relative = _relative_path(key)
        if not self._trusted:
            self._trust_root()
        return f"{self._data}/{relative}"

    def _generations(self, key: str) -> str:
        return os.path.join(self.root, "refs", *key.split("/"), GENERATIONS)

    def _latest(self, key: str) -> refs.Version:
        folder = self._generations(check_key(key))
        self._trust_root()
        with file_steps.errors_by_meaning(folder, "read"):
            return refs.latest(folder)

    def _remove(self, path: str, unmodified_since_s: float | None) -> bool:
        if unmodified_since_s is None:
            return file_steps.remove(path)
        if not os.path.lexists(path):
            return False
        return file_steps.remove_unmodified(path, self._temporary_path(), unmodified_since_s)

    def _create(self, target: str, data: bytes) -> bool:
        try:
            return self._create_now(target, data)
        except FileNotFoundError:
            # Somebody removed directories that this store has made.
            self._made.clear()
            self._trusted = False
            return self._create_now(target, data)

    def _create_now(self, target: str, data: bytes) -> bool:
        self._directory(os.path.dirname(target))
        temporary = self._temporary_path()

        def write_and_link() -> bool:
            self._write(temporary, data)
            return file_steps.create(temporary, target)

        return file_steps.with_temporary(temporary, write_and_link)

    def _write(self, temporary: str, data: bytes) -> None:
        file_steps.write_new(temporary, data, self._permissions)
        if not self._swept:
            self._swept = True
            with contextlib.suppress(OSError):  # the next process sweeps
                self._sweep(os.path.dirname(temporary), os.stat(temporary).st_mtime)

    def _sweep(self, folder: str, now_s: float) -> None:
        # The root may be a directory of the user's in which tmp/ holds other files, so only names
        # of our form are removed.
        for name in filter(file_steps.is_temporary_name, os.listdir(folder)):
            path = os.path.join(folder, name)
            with contextlib.suppress(OSError):  # its writer has removed it meanwhile
                if now_s - os.lstat(path).st_mtime > STALE_AFTER_S:
                    file_steps.remove(path)

    def _temporary_path(self) -> str:
        """Return a name for a temporary file, which `file_steps.with_temporary` makes and
        removes.
        """
        folder = os.path.join(self.root, "tmp")
        self._directory(folder)
        return os.path.join(folder, file_steps.temporary_name())

    def _directory(self, path: str) -> None:
        if path not in self._made:
            file_steps.make_directories(path, self.root, self._permissions)
            self._trust_root()
            self._made.add(path)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Map errors of writing, and pause writing after a full disk."""
        left_s = self._full_until_s - time.monotonic()
        if left_s > 0:
            raise BackendFull(f"{self.root} was full; writing is tried again in {left_s:.0f} s")
        try:
            with file_steps.errors_by_meaning(self.root, "write to"):
                yield
        except BackendFull:
            now_s, until_s = time.monotonic(), self._full_until_s
            self._full_until_s = now_s + FULL_PAUSE_S
            if now_s >= until_s:  # no other thread has said so
                _log.warning("%s is full; writing pauses for %.0f s", self.root, FULL_PAUSE_S)
            raise


def _raise_unless_absent(error: OSError) -> None:
    # A listing that silently lacks something would let a prune remove what is in use.
    if error.errno not in file_steps.ABSENT:
        raise error


def _walk(top: str, prefix: str) -> Iterator[tuple[str, str]]:
    """Yield path and key of every object under `top` whose key is in `prefix`; other names are
    nothing of ours.
    """
    start = os.path.join(top, *prefix.split("/")) if prefix else top
    if prefix:
        *folders, last = prefix.split("/")
        exact = os.path.join(top, *folders, _SHARD + _short(last)[:2], last)
        if os.path.lexists(exact):
            yield exact, prefix
    for folder, subfolders, names in os.walk(start, onerror=_raise_unless_absent):
        subfolders.sort()
        if os.path.basename(folder).startswith(_SHARD):
            parent = os.path.relpath(os.path.dirname(folder), top).replace(os.sep, "/")
            # A directory in place of an object is listed as a damaged object: it stands in the way
            # of the real one.
            for name in sorted([*names, *subfolders]):
                key = name if parent == "." else f"{parent}/{name}"
                if is_key(key):
                    yield os.path.join(folder, name), key
            subfolders.clear()


# Who reads what was there touches it before.
@functools.lru_cache(maxsize=1024)
def _relative_path(key: str) -> str:
    """Return where the object of a key lies; raises `InvalidKey`."""
    folder, slash, last = check_key(key).rpartition("/")
    # Ten thousand names in one directory are slow on some file systems.
    return f"{folder}{slash}{_SHARD}{_short(last)[:2]}/{last}"


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


# The lock is held only while a few bytes are read and written; a process that waits longer than
# this goes on without the lease.
LOCK_TIMEOUT_S = 1.0
_LEASE_BYTES = 512
# Of a directory that a crash filled nobody wants to see more.
_MOST_LISTED = 10_000


def take(
    path: str, ttl_s: float, permissions: file_steps.Permissions, key: str = ""
) -> Lease | None:
    """Take the lease at `path`, which people call `key`; None while another holds it, or while its
    file is busy.
    """
    token = new_token(key)
    if not _replaced(path, None, token, ttl_s, permissions):
        return None

    def change(ttl_s: float | None) -> bool:
        with file_steps.errors_by_meaning(path, "change"):
            return _replaced(path, token, token, ttl_s, permissions)

    return Lease(change)


def _replaced(
    path: str,
    owner: str | None,
    token: str,
    ttl_s: float | None,
    permissions: file_steps.Permissions,
) -> bool:
    """Write a lease, or remove it for a `ttl_s` of None, if `owner` holds it, None for nobody;
    False when it is not, or its file is busy.
    """
    import filelock

    try:
        with filelock.FileLock(f"{path}.lock", timeout=LOCK_TIMEOUT_S, mode=permissions.file):
            holder = _holder(path)
            if (holder and holder[0]) != owner:
                return False
            if ttl_s is None:
                file_steps.remove(path)
            else:
                _write(path, token, ttl_s, permissions)
            return True
    except filelock.Timeout:
        return False


def held(folder: str) -> Iterator[HeldLease]:
    """Yield the leases in a directory that somebody holds; reads them without the lock, since each
    is replaced whole.
    """
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as found:
        for entry in itertools.islice(found, _MOST_LISTED):
            holder = None if entry.name.endswith((".lock", ".new")) else _holder(entry.path)
            if holder is not None:
                yield held_lease(*holder)


def _holder(path: str) -> tuple[str, float] | None:
    """Return the token of who holds a lease, and for how long; None where nobody does."""
    data = file_steps.read(path, _LEASE_BYTES)
    token, _, expiry = (data or b"").decode("ascii", "replace").partition(" ")
    try:
        left_s = float(expiry) - time.time()
    except ValueError:
        return None  # empty or damaged: nobody holds it
    return (token, left_s) if left_s > 0 else None


def _write(path: str, token: str, ttl_s: float, permissions: file_steps.Permissions) -> None:
    temporary = f"{path}.new"
    # Left by a process that was killed: under the lock nobody else writes it.
    file_steps.remove(temporary)
    content = f"{token} {time.time() + ttl_s!r}".encode()

    def write_and_rename() -> None:
        file_steps.write_new(temporary, content, permissions)
        os.replace(temporary, path)

    file_steps.with_temporary(temporary, write_and_rename)
