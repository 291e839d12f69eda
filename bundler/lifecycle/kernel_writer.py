# SPDX-License-Identifier: Apache-2.0
"""`begin_writing` and `write_kernels`: write kernels below one directory, each whole, by one
rename.

The extension `_kernel_writer` does it where it was built, in threads that need no interpreter;
elsewhere `write_in_python` does the same, one kernel after the other, before it returns.
`cache_directory.py` calls them, and knows what to do about each answer; `Placement.new_kernel`
makes what a writer takes.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import os
import time
from collections.abc import Callable, Iterable
from typing import Any

from bundler.format.bundle_file import cleaned_up
from bundler.format.digest import DIGEST_BYTES, sha256
from bundler.format.names import GROUP_PREFIX
from bundler.format.sentinel import Edit, edited, holds

Buffer = bytes | memoryview
# The position of a file, and what is changed in it after its digest was compared.
FileEdits = tuple[int, tuple[Edit, ...]]
# What writers take, in C too: the names of the temporary directory and of the kernel's; name, bytes
# and digest of each file, or no digests when they were compared; what is changed in files; which
# files are device binary and metadata, if these are to be looked at; and name and text of the group
# file, with a zero byte where the kernel key stands in it.
NewKernel = tuple[
    str,
    str,
    tuple[str, ...],
    tuple[Buffer, ...],
    tuple[bytes, ...],
    tuple[FileEdits, ...],
    int,
    int,
    str,
    bytes,
]
# In place of the position of a device binary that was found whole before, or of metadata that
# Triton can read.
ALREADY_CHECKED = -1
# Stands in the text of a group file for the kernel key; no path holds it.
_KEY = b"\0"
# Kernels of one name have files of the same names.
_GROUP_FILES_REMEMBERED = 1024
# Waits, and returns the codes; calling it again returns them again.  Not for two threads at once.
Finish = Callable[[], list[int]]
# How many, or what `start_threads` returned.
Threads = object
BeginWriting = Callable[[str, tuple[NewKernel, ...], Threads], Finish]

# The codes of a kernel of which a file does not have its digest, or not the bytes that are to be
# changed; of one whose device binary is not a whole ELF file; and of one whose metadata the caller
# has to look at first.  No error number of a system is that large.
DAMAGED = 1 << 16
NO_BINARY = DAMAGED + 1
UNSURE = DAMAGED + 2
REFUSED = frozenset({DAMAGED, NO_BINARY, UNSURE})

# What stands in the place of a kernel; after any other error the next kernel would meet the same
# one.
OCCUPIED = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR})
# How long is waited before a directory is asked for again, which is said to be there and to be
# missing.
_PAUSES_S = (0.05, 0.25, 0.75)
_READ_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CREATE_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@functools.lru_cache(_GROUP_FILES_REMEMBERED)
def group_file(names: tuple[str, ...], directory: str) -> tuple[str, bytes]:
    """Return name and text of the group file of these files, as json.dumps writes it."""
    metadata, key = next(name for name in names if name.endswith(".json")), _KEY.decode()
    # Key and names are of characters that JSON leaves alone.
    members = ", ".join([f'"{name}": "{directory}{key}/{name}"' for name in names])
    return GROUP_PREFIX + metadata, f'{{"child_paths": {{{members}}}}}'.encode()


def make_directories(path: str) -> None:
    """Make a directory and those above it; one that is there is fine.

    A file system that remembers missing names (FUSE, some network mounts) may say that the name is
    taken, by the client that was faster, and for a moment that nothing is there.  So it is asked
    again.

    Raises:
        OSError: it cannot be made, or something else has its name.
    """
    for pause_s in (*_PAUSES_S, None):
        try:
            os.makedirs(path, exist_ok=True)
        except FileExistsError:
            if pause_s is None or os.path.lexists(path):
                raise
            time.sleep(pause_s)
        else:
            return


def _imported_extension() -> Any:
    try:
        return importlib.import_module("bundler.lifecycle._kernel_writer")
    except ImportError:
        return None


# With this module, so that no restore waits for it.
_extension = _imported_extension()


def start_threads(count: int) -> Threads:
    """Return threads that write one batch after the other; they end when nobody has them
    any more.
    """
    return count if compiled_writer() is None else _extension.start_threads(count)


def compiled_writer() -> BeginWriting | None:
    """Return `begin_writing` of the extension, None where it was not built."""
    if _extension is None:
        return None
    return (
        _begin_compiled
        if _extension.COMPARES_DIGESTS
        else functools.partial(_compare_first, _begin_compiled)
    )


def _begin_compiled(root: str, kernels: tuple[NewKernel, ...], threads: Threads) -> Finish:
    finish: Finish = _extension.begin_writing(root, kernels, threads).finish
    return finish


def begin_writing(root: str, kernels: tuple[NewKernel, ...], threads: Threads) -> Finish:
    """Begin what `write_kernels` does, and return what waits for it.

    With no thread it is done while the caller waits, and without the extension when this returns.
    """
    return (compiled_writer() or _write_at_once)(root, kernels, threads)


def _write_at_once(root: str, kernels: tuple[NewKernel, ...], threads: Threads) -> Finish:
    codes = write_in_python(root, kernels, threads)
    return lambda: codes


def write_kernels(root: str, kernels: tuple[NewKernel, ...], threads: Threads) -> list[int]:
    """Write kernels, each into a temporary directory beside its place, which is then renamed once.

    Before that, the bytes of each file that comes with a digest are compared with it, and then,
    where nobody has, the headers of the device binary with its length, and the metadata with the
    kernel key.  What is to be changed in a file is changed as it is written.

    Args:
        root: the directory.
        kernels: what to write.
        threads: so many write at once, or those that `start_threads` returned; in Python, and with
            0, the caller does.

    Returns:
        A code for each kernel: 0, it is in place.  A positive error number: it could not be
        written, and nothing of it is left; `ECANCELED` when it was not begun, because another one
        had failed; `DAMAGED` when a file does not have its digest, `NO_BINARY` when the binary is
        none, and `UNSURE` when Triton could perhaps not read the metadata, which stop no other
        kernel.  A negative one: the rename failed with that number, and the temporary directory is
        there, whole.
    """
    return begin_writing(root, kernels, threads)()


def write_in_python(root: str, kernels: tuple[NewKernel, ...], _threads: Threads) -> list[int]:
    """Do what `write_kernels` says."""
    for kernel in kernels:
        _check_form(kernel)
    codes = [errno.ECANCELED] * len(kernels)
    for number, kernel in enumerate(kernels):
        codes[number] = _why_unsound(kernel) or _write_kernel(root, kernel)
        if codes[number] and codes[number] not in REFUSED and -codes[number] not in OCCUPIED:
            break
    return codes


def _check_form(kernel: NewKernel) -> None:
    temporary, key, names, contents, digests, edits, binary, metadata, group, _ = kernel
    for name in (temporary, key, group, *names):
        if name in {"", ".", ".."} or "/" in name or "\0" in name:
            raise ValueError(f"not the name of a file: {name!r}")
    if len(contents) != len(names) or len(digests) not in {0, len(names)}:
        raise ValueError("expected bytes, and a digest or none at all, for each name")
    if any(len(digest) != DIGEST_BYTES for digest in digests):
        raise ValueError("not a SHA-256 digest")
    if any(not 0 <= position < len(names) for position, _ in edits):
        raise ValueError("what is to be changed is none of the files")
    if not ALREADY_CHECKED <= binary < len(names):
        raise ValueError("the binary is none of the files")
    if not ALREADY_CHECKED <= metadata < (0 if binary == ALREADY_CHECKED else len(names)):
        raise ValueError("the metadata is none of the files, or without a binary")


def _compare_first(
    begin: BeginWriting, root: str, kernels: tuple[NewKernel, ...], threads: Threads
) -> Finish:
    """Do what `begin_writing` says with a writer that compares no digests."""
    for kernel in kernels:
        _check_form(kernel)
    unsound = [_why_unsound(kernel) for kernel in kernels]
    plain = [
        (*kernel[:4], (), kernel[5], ALREADY_CHECKED, ALREADY_CHECKED, *kernel[8:])
        for kernel in kernels
    ]
    finish = begin(
        root,
        tuple([kernel for kernel, why in zip(plain, unsound, strict=True) if not why]),
        threads,
    )

    def codes() -> list[int]:
        written = iter(finish())
        return [why or next(written) for why in unsound]

    return codes


def _why_unsound(kernel: NewKernel) -> int:
    """Return `DAMAGED`, `NO_BINARY`, `UNSURE` or 0."""
    from bundler.format.device_elf import why_unusable
    from bundler.format.metadata import is_readable_head  # the extension looks itself

    _, key, names, contents, digests, edits, binary, metadata, _, _ = kernel
    compared = zip(contents, digests, strict=False)  # there may be no digests
    if any(sha256(data) != digest for data, digest in compared):
        return DAMAGED
    if not all(holds(contents[position], some) for position, some in edits):
        return DAMAGED
    if binary != ALREADY_CHECKED and why_unusable(contents[binary]) is not None:
        return NO_BINARY
    if metadata != ALREADY_CHECKED and not is_readable_head(
        key, names[binary], bytes(contents[metadata])
    ):
        return UNSURE
    return 0


def _write_kernel(root: str, kernel: NewKernel) -> int:
    ours, temporary, target = True, os.path.join(root, kernel[0]), os.path.join(root, kernel[1])

    def write_and_rename() -> int:
        nonlocal ours
        try:
            os.mkdir(temporary)
        except OSError as error:
            ours = False  # it may be somebody else's
            return error.errno or errno.EIO
        try:
            _write_files(temporary, kernel)
        except OSError as error:
            return error.errno or errno.EIO
        ours = False  # the caller's now
        try:
            os.rename(temporary, target)
        except OSError as error:
            return -(error.errno or errno.EIO)
        return 0

    def clear() -> None:
        if ours:
            remove_tree(temporary)

    return cleaned_up(write_and_rename, clear)


def _write_files(temporary: str, kernel: NewKernel) -> None:
    _, key, names, contents, _, edits, _, _, group, text = kernel
    changes = dict(edits)
    folder = os.open(temporary, _READ_DIRECTORY)
    try:
        for position, (name, data) in enumerate(zip(names, contents, strict=True)):
            edited_data = edited(data, changes[position]) if position in changes else data
            write_file(name, [edited_data], folder)
        write_file(group, [text.replace(_KEY, key.encode())], folder)
    finally:
        os.close(folder)


def write_file(path: str, chunks: Iterable[Buffer], folder: int | None = None) -> None:
    """Write a new file in pieces; `folder` is a descriptor of the directory that `path` is relative
    to.
    """
    fd = os.open(path, _CREATE_FILE, 0o666, dir_fd=folder)
    try:
        for data in chunks:
            done = os.write(fd, data) if data else 0
            while done < len(data):
                done += os.write(fd, memoryview(data)[done:])
    finally:
        os.close(fd)


def remove_tree(path: str) -> None:
    """Remove a temporary directory of ours, which has files in it and nothing else, unless it was
    renamed, as it is nearly always.

    `shutil.rmtree` does it too, and takes longer to import than a restore of a hundred kernels: it
    knows every kind of archive.
    """
    if os.path.lexists(path):
        with contextlib.suppress(OSError):
            for name in os.listdir(path):
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(path, name))
            os.rmdir(path)
