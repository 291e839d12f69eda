# SPDX-License-Identifier: Apache-2.0
"""Reads kernel directories as Triton left them: `read_kernel` returns `KernelFiles`, complete and
from one compile, or `Rejected`; `read_kernels` does so for many, whose files threads read while the
caller looks at those that were read before.

Collecting and packing read directories with it; restores read what is in place already, and ask
`why_unreadable` before they write whether Triton could read the result.
"""

from __future__ import annotations

import errno
import importlib
import os
import re
import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice, pairwise, repeat
from typing import Any, Protocol

from msgspec import Struct
from msgspec.structs import replace

from bundler.errors import UnsafeName
from bundler.format import names
from bundler.format.device_elf import why_unusable
from bundler.format.entries import Target
from bundler.format.frames import processors
from bundler.format.limits import DEFAULT_LIMITS, METADATA_BYTES, MIB, Limits
from bundler.format.metadata import is_readable_head, parse_metadata
from bundler.format.summary import count

ATTEMPTS = 3
# Of the source files that an assembly text names, so many are looked for in the binary; real ones
# name a few dozen.
_SOURCES_LOOKED_FOR = 1000
_SHOWN_CHARACTERS = 200
# Without O_NONBLOCK opening a named pipe waits for somebody to write to it.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# How each text names source files: what every place begins with, and (directory, file) or (path)
# behind it.  A pattern begins with the same literal, and looks behind that afterwards: the other way
# round the search takes ten times as long, and it goes over every text there is.  Compiled when first
# used: a restore reads no texts.
_SOURCES = {
    "ttir": (b'loc("', rb'loc\("(?<=\Wloc\(")([^"]+)":\d+:\d+\)'),
    "ttgir": (b'loc("', rb'loc\("(?<=\Wloc\(")([^"]+)":\d+:\d+\)'),
    "llir": (
        b"!DIFile(",
        rb'!DIFile\(filename: "(?P<file>[^"]+)", directory: "(?P<folder>[^"]*)"',
    ),
    "ptx": (b".file", rb'\.file(?<=\s\.file)\s+\d+\s+"([^"]+)"'),
    "amdgcn": (
        b".file",
        rb'\.file(?<=\s\.file)\s+\d+\s+"(?P<folder>[^"]+)"\s+"(?P<file>[^"]+)"',
    ),
}
_ASSEMBLY = {"ptx", "amdgcn"}
_NO_FILE = b"<unknown>"

# What changes when a file is replaced or written: inode, size and modification time.
Stamp = tuple[int, int, int]
_NO_DIGESTS: Mapping[str, bytes] = {}


class KernelFiles(Struct, frozen=True):
    """A complete kernel directory.

    Attributes:
        key: the directory's name.
        files: the group's children by name, in Triton's order; the group file itself is not among
            them.
        child_paths: name -> path, as the group file spells it.
        metadata: the parsed metadata JSON.
        others: names in the directory that are no child of the group.
        digests: name -> raw digest of the files that were hashed while they were read.
    """

    key: str
    files: dict[str, bytes]
    child_paths: dict[str, str]
    metadata: dict[str, Any]
    others: tuple[str, ...]
    digests: Mapping[str, bytes] = _NO_DIGESTS

    @property
    def name(self) -> str:
        """Entry point of the kernel."""
        return str(self.metadata["name"])

    @property
    def target(self) -> Target:
        """What the binary runs on."""
        target = self.metadata["target"]
        return Target(str(target["backend"]), str(target["arch"]), int(target["warp_size"]))

    @property
    def metadata_name(self) -> str:
        """File name of the metadata JSON."""
        return next(name for name in self.files if names.artifact_kind(name) == "json")

    @property
    def binary_name(self) -> str:
        """File name of the device binary."""
        return next(name for name in self.files if names.artifact_kind(name) in names.BINARY_KINDS)

    @property
    def written_roots(self) -> set[str]:
        """The cache directories that the group file names, as Triton spelled them."""
        directories = {
            path[: path.rfind("/") + 1] for path in self.child_paths.values()
        }  # one, as Triton writes it
        return {os.path.dirname(os.path.dirname(directory + "file")) for directory in directories}


class Rejected(Struct, frozen=True):
    """Why a directory is not a kernel that could be used; `missing` when it is simply not there."""

    reason: str
    missing: bool = False


# Reads one file of a directory, by its name.
Reader = Callable[[str, Limits], bytes | Rejected]


def read_kernel(directory: str, limits: Limits = DEFAULT_LIMITS) -> KernelFiles | Rejected:
    """Read a kernel directory.

    The files are those that the group file lists, taken from this directory whatever path the group
    file gives (a copied cache still names its old place).  If any of them changes while we read, we
    read again.

    Args:
        directory: `<cache>/<kernel key>`.
        limits: bounds on number and sizes of files.
    """
    result: KernelFiles | Rejected = Rejected("never read")
    for _ in range(ATTEMPTS):
        try:
            present = os.listdir(directory)
            seen: dict[str, Stamp] = {}
            result = _read_once(directory, sorted(present), limits, _reader(directory, seen))
            if not _changed(directory, present, seen):
                return result
        except FileNotFoundError as error:
            if not os.path.isdir(directory):
                return Rejected("the directory is gone", missing=True)
            result = Rejected(
                f"{os.path.basename(error.filename or directory)} vanished while being read"
            )
        except NotADirectoryError:
            return Rejected("not a directory")
        except OSError as error:
            return Rejected(f"cannot read: {error.strerror}")
        except UnsafeName as error:
            return Rejected(str(error))
    if isinstance(result, Rejected):
        return result
    return Rejected("another process keeps writing to it")


def read_kernels(
    directories: Sequence[str], limits: Limits = DEFAULT_LIMITS
) -> Iterator[KernelFiles | Rejected]:
    """Yield what `read_kernel` returns for each directory; the next ones are read meanwhile."""
    for directory, read in zip(directories, read_ahead(directories, limits), strict=True):
        if read is None:
            yield read_kernel(directory, limits)
        else:
            yield _kernel_of(directory, *read, limits)


def _kernel_of(
    directory: str, files: dict[str, bytes], digests: Mapping[str, bytes], limits: Limits
) -> KernelFiles | Rejected:
    """Return the kernel of a directory with these files, which did not change while they
    were read.
    """

    def read(name: str, limits: Limits) -> bytes | Rejected:
        data = files[name]
        return data if len(data) <= limits.file_bytes else Rejected(_too_large(name, limits))

    try:
        found = _read_once(directory, sorted(files), limits, read)
    except UnsafeName as error:
        return Rejected(str(error))
    return found if isinstance(found, Rejected) else replace(found, digests=digests)


def _too_large(name: str, limits: Limits) -> str:
    return f"{name}: over the limit of {limits.file_bytes} bytes"


def _changed(directory: str, present: list[str], seen: dict[str, Stamp]) -> bool:
    """Tell whether names came or went, or files were replaced or written, since they were read."""
    if any(_stamp(os.lstat(f"{directory}/{name}")) != stamp for name, stamp in seen.items()):
        return True
    return sorted(os.listdir(directory)) != sorted(present)


def _stamp(status: os.stat_result) -> Stamp:
    return status.st_ino, status.st_size, status.st_mtime_ns


def _read_once(
    directory: str, present: list[str], limits: Limits, read: Reader
) -> KernelFiles | Rejected:
    groups = [
        name for name in present if name.startswith(names.GROUP_PREFIX) and name.endswith(".json")
    ]
    if len(groups) != 1:
        return Rejected(
            "no group file: the compile did not finish" if not groups else "several group files"
        )
    children = _children(read(groups[0], _group_limits(limits)))
    if children is None:
        return Rejected(f"{groups[0]} is not a valid group file")
    if len(children) > limits.files_per_kernel:
        return Rejected(f"{len(children)} files, over the limit of {limits.files_per_kernel}")
    absent = [name for name in children if name not in present]
    if absent:
        return Rejected(f"{absent[0]} is listed in the group file but not there")
    ordered = sorted(map(names.check_file_name, children), key=names.artifact_order)
    files: dict[str, bytes] = {}
    left = limits.kernel_bytes
    for name in ordered:
        data = read(name, limits)
        if isinstance(data, Rejected):
            return data
        files[name] = data
        left -= len(data)
        if left < 0:
            return Rejected(f"more than {limits.kernel_bytes} bytes in all")
    others = tuple(name for name in present if name not in children and name != groups[0])
    kernel = check_kernel_files(os.path.basename(directory), files, children, others)
    mixed = None if isinstance(kernel, Rejected) else _mixed(files, kernel.binary_name)
    return Rejected(mixed) if mixed else kernel


def _reader(directory: str, seen: dict[str, Stamp]) -> Reader:
    return lambda name, limits: read_file(directory, name, limits, seen)


@lru_cache(1)
def _group_limits(limits: Limits) -> Limits:
    return replace(limits, file_bytes=METADATA_BYTES)


def read_file(
    directory: str, name: str, limits: Limits, seen: dict[str, Stamp] | None = None
) -> bytes | Rejected:
    """Read one regular file; symbolic links are refused, since they could lead anywhere.

    Args:
        directory: where it is.
        name: its name there.
        limits: bounds on its size.
        seen: gets the stamp that the file had when it was opened.
    """
    try:
        fd = os.open(f"{directory or os.curdir}/{name}", _READ)
    except OSError as error:
        if error.errno == errno.ELOOP:
            return Rejected(f"{name} is a symbolic link")
        if error.errno == errno.ENXIO:
            return Rejected(f"{name} is a socket or device, not a regular file")
        if error.errno in {errno.EACCES, errno.EPERM}:
            return Rejected(f"{name}: {error.strerror}")
        raise
    try:
        status = os.fstat(fd)
        if seen is not None:
            seen[name] = _stamp(status)
        if not stat.S_ISREG(status.st_mode):
            return Rejected(
                f"{name} is"
                f" {'a directory' if stat.S_ISDIR(status.st_mode) else 'not a regular file'}"
            )
        if status.st_size > limits.file_bytes:
            return Rejected(_too_large(name, limits))
        # One byte more than there should be: getting that many says that the file is at its end.
        data = os.read(fd, status.st_size + 1)
        if len(data) != status.st_size:
            with open(fd, "rb", closefd=False) as file:
                data += file.read(limits.file_bytes + 1 - len(data))
    finally:
        os.close(fd)
    return data if len(data) <= limits.file_bytes else Rejected(_too_large(name, limits))


def walk_files(
    root: str, enters: Callable[[str], bool], left_out: list[tuple[str, str]]
) -> Iterator[str]:
    """Yield the files below a directory by their paths relative to it; a link to a directory is one
    of them.

    Args:
        root: the directory.
        enters: whether what is in a directory is wanted, by its path.
        left_out: gets (path, reason) of directories that cannot be listed.
    """

    def unreadable(error: OSError) -> None:
        left_out.append((os.path.relpath(error.filename, root), f"cannot read: {error.strerror}"))

    for folder, subfolders, files in os.walk(root, onerror=unreadable):
        inside = os.path.relpath(folder, root)
        base = "" if inside == os.curdir else f"{inside}/"
        subfolders[:] = [name for name in sorted(subfolders) if enters(base + name)]
        links = [name for name in subfolders if os.path.islink(os.path.join(folder, name))]
        yield from (base + name for name in sorted([*files, *links]))


def _children(data: bytes | Rejected) -> dict[str, str] | None:
    if isinstance(data, Rejected):
        return None
    import json  # a restore reads none

    try:
        paths = json.loads(data)["child_paths"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if (
        not isinstance(paths, dict)
        or not paths
        or not all(isinstance(path, str) for path in paths.values())
    ):
        return None
    return paths


def check_kernel_files(
    key: str,
    files: dict[str, bytes],
    children: dict[str, str] | None = None,
    others: tuple[str, ...] = (),
) -> KernelFiles | Rejected:
    """Tell whether these files make a kernel that Triton can read: one whole binary, and metadata
    of this key.

    Args:
        key: the kernel key.
        files: name -> bytes of every file but the group file.
        children: what the group file says of them, if there is one.
        others: names of further files beside them.
    """
    kinds = [names.artifact_kind(name) for name in files]
    binaries = [name for name, kind in zip(files, kinds, strict=True) if kind in names.BINARY_KINDS]
    if len(binaries) != 1 or kinds.count("json") != 1:
        return Rejected(
            f"{count(len(binaries), 'device binary')} and"
            f" {count(kinds.count('json'), 'metadata file')}, expected one of each"
        )
    metadata_name = next(name for name in files if name.endswith(".json"))
    try:
        metadata = parse_metadata(files[metadata_name])
        kernel = KernelFiles(key, files, children or {}, metadata, others)
        target, digest = kernel.target, bytes.fromhex(metadata["hash"])
        numbers = (int(metadata["shared"]), int(metadata["num_warps"]), kernel.name)
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        return Rejected(
            f"{metadata_name} is not valid metadata ({type(error).__name__}: {_shown(error)})"
        )
    if not names.is_key_of(key, digest):
        return Rejected(f"{metadata_name} is of another kernel: its hash is {digest.hex()[:12]}…")
    expected = names.BINARY_KIND_OF_BACKEND.get(target.backend)
    if expected is not None and names.artifact_kind(binaries[0]) != expected:
        return Rejected(
            f"{binaries[0]} is no binary for {_shown(target)}, {_shown(numbers[2])} needs a"
            f" {expected}"
        )
    unusable = why_unusable(files[binaries[0]])
    if unusable is not None:
        return Rejected(f"{binaries[0]} is {unusable}")
    return kernel


def why_unreadable(
    key: str, binary: tuple[str, bytes | memoryview], metadata: tuple[str, bytes]
) -> str | None:
    """Return why Triton could not read a kernel, as `check_kernel_files` says; None when it could.

    Args:
        key: the kernel key.
        binary, metadata: name and bytes of the two files that a hit needs.
    """
    if is_readable_head(key, binary[0], metadata[1]) and why_unusable(binary[1]) is None:
        return None
    checked = check_kernel_files(key, {binary[0]: bytes(binary[1]), metadata[0]: metadata[1]})
    return checked.reason if isinstance(checked, Rejected) else None


def _shown(value: object) -> str:
    """Return a text of somebody else as it can stand in a message: short, and nothing that a
    terminal obeys.
    """
    return ascii(str(value))[1:-1][:_SHOWN_CHARACTERS]


def _mixed(files: dict[str, bytes], binary: str) -> str | None:
    """Say which two files come from different compiles, as far as their debug information tells.

    Two processes that compile one key from sources in different places may interleave their files
    in one directory. Each intermediate text names the source file, and so does the line table of a
    device binary.
    """
    sources = {
        name: _named_sources(names.artifact_kind(name), data) for name, data in files.items()
    }
    named = [(name, found) for name, found in sources.items() if found]
    for (one, here), (two, there) in pairwise(named):
        if not here >= there and not there >= here:
            return f"{one} and {two} come from two compiles: they name different source files"
    for name, found in named:
        # The line table keeps directory and file name apart; a binary without line information
        # names neither.
        if names.artifact_kind(name) in _ASSEMBLY and b".debug_line" in files[binary]:
            absent = (
                path
                for path in islice(found, _SOURCES_LOOKED_FOR)
                if os.path.basename(path) not in files[binary]
                or os.path.dirname(path) not in files[binary]
            )
            if path := next(absent, None):
                return (
                    f"{name} and {binary} come from two compiles: {_shown(os.fsdecode(path))} is"
                    " not in the binary"
                )
    return None


def _named_sources(kind: str, data: bytes) -> set[bytes]:
    if kind not in _SOURCES:
        return set()
    beginning, expression = _SOURCES[kind]
    # Names are at the end of some texts, and plain bytes are found quicker than patterns.
    start = data.find(beginning)
    if start < 0:
        return set()
    pattern = re.compile(expression)
    if "folder" in pattern.groupindex:
        return _plain(
            os.path.join(found["folder"], found["file"]) for found in pattern.finditer(data, start)
        )
    return _plain(set(pattern.findall(data, start)))


def _plain(paths: Iterable[bytes]) -> set[bytes]:
    # LLVM and ptxas escape other characters in different ways, which would look like two files;
    # what LLVM made itself it says is of no file.
    return {path for path in paths if path.isascii() and b"\\" not in path and path != _NO_FILE}


# ------------------------------------------------------------------------------ Files read ahead
#
# The extension `_kernel_reader` reads and hashes, where it was built.  It answers only for
# directories in which nothing is out of the ordinary; all others are read one by one, which tells
# the reasons.

DIRECTORIES_PER_BATCH = 32
# What one batch may bring; the directories beyond are read one by one.
BYTES_PER_BATCH = 32 * MIB
# Of one batch the files are listed, and those of the one before it are read, while the caller looks
# at a third.
_BATCHES_AHEAD = 2
_MOST_THREADS = 4

# Bytes and raw digest of each file by name; no digests where the extension found no library that
# computes them.
Files = tuple[dict[str, bytes], Mapping[str, bytes]]


class Reading(Protocol):
    """Directories that are being read; not for two threads at once."""

    def go_on(self) -> None:
        """Wait until the files are listed, and begin to read them."""

    def finish(self) -> list[Files | None]:
        """Wait for all, and return what each directory holds, None for one that is to be read by
        itself.
        """


# The last is how many threads read, or what `start_threads` of the extension returned.
BeginReading = Callable[[tuple[bytes, ...], int, int, object], Reading]


def compiled_reader() -> BeginReading | None:
    """Return the extension's `begin_reading`, None where it was not built.

    It takes paths, how many files a directory and how many bytes all of them may have, and threads;
    with none the caller reads while it waits.  A directory is to be read by itself when there is
    anything in it but regular files, when there are more or larger ones, when it cannot be read, or
    when a file was replaced, written or added before the last one was read.
    """
    extension = _extension()
    found: BeginReading | None = None if extension is None else extension.begin_reading
    return found


def _extension() -> Any:
    try:
        return importlib.import_module("bundler.lifecycle._kernel_reader")
    except ImportError:
        return None


def read_ahead(directories: Sequence[str], limits: Limits) -> Iterator[Files | None]:
    """Yield the files of each directory, or None for one that has to be read by itself."""
    begin = compiled_reader()
    if begin is None:
        yield from repeat(None, len(directories))
        return
    # The group file is none of the files that are counted.
    most = min(limits.files_per_kernel + 1, 4096)
    available = processors(_MOST_THREADS)
    threads = _extension().start_threads(available if available > 1 else 0)
    under_way: deque[Reading] = deque()
    for start in range(0, len(directories), DIRECTORIES_PER_BATCH):
        paths = tuple(map(os.fsencode, directories[start : start + DIRECTORIES_PER_BATCH]))
        under_way.append(begin(paths, most, BYTES_PER_BATCH, threads))
        if len(under_way) > _BATCHES_AHEAD:
            yield from _next_of(under_way)
    while under_way:
        yield from _next_of(under_way)


def _next_of(under_way: deque[Reading]) -> list[Files | None]:
    """Return what the oldest reading found; the one after it goes on meanwhile."""
    oldest = under_way.popleft()
    found = oldest.finish()
    if under_way:
        under_way[0].go_on()
    return found
