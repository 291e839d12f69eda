# SPDX-License-Identifier: Apache-2.0
"""What the opaque files of a bundle are, by their paths: trees of servers' caches, plans of programs,
and else files of Inductor's cache, which torch executes or unpickles.

::

    @families/<family>/<sha256>            a chunk of a file, once for all files that are equal
    @families/<family>/<sha256>.tree.json  the index of one tree: its place below the family's root, fingerprint, files, kernels
    programs/NAME.program.json             data, validated by a replay: it calls listed operators alone
    programs/NAME.code-program.json        calls operators of users or other libraries: needs trust in code

`TreeIndex` says which files make up a directory tree of a server's cache, and where in it the
kernels lie; `bundler/lifecycle/family_pack.py` writes indexes, `bundler/lifecycle/tree_plan.py` reads
them.  `emit` names the plans of programs, `run` looks for them, and a restore leaves both out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from bundler.errors import FormatError, UnsafeName, UnsupportedVersion
from bundler.format.digest import digest_raw, digest_text, sha256
from bundler.format.names import GROUP_PREFIX, check_kernel_key, path_with_members
from bundler.format.summary import Summarized

PREFIX = "@families"
INDEX_SUFFIX = ".tree.json"
FORMAT = 1
# A reader takes no file of a bundle that is larger than 64 MiB; larger ones of a tree travel in
# chunks.
CHUNK_BYTES = 32 << 20
# More files than any cache that we know; each is looked for on disk.
MOST_ROWS = 200_000
# Deeper and longer than any cache that we know; the limits of a file system come first.
_DEPTH, _CHARACTERS, _COMPONENT_BYTES = 32, 1024, 255
_FAMILY = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
# Made at a restore, never taken from a bundle.
_OURS_ALONE = (GROUP_PREFIX, "tmp.bundler.")


_PROGRAMS, _PROGRAM_SUFFIX, _CODE_SUFFIX = "programs/", ".program.json", ".code-program.json"
_PROGRAM = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,127}")


class TreeFile(Summarized, Struct, frozen=True, gc=False):
    """One file of a tree: its path below the tree's place, its size in bytes, and the digests of
    its chunks in order.
    """

    path: str
    size: int
    chunks: tuple[str, ...]


class TreeIndex(Summarized, Struct, frozen=True):
    """One tree of a server's cache.

    Attributes:
        family: the name of the family that the tree is of.
        place: where it is, relative to the family's root; empty for the root itself.
        fingerprint: name -> value of what the tree depends on, such as the versions of packages.
        ranks: names of the directories of single ranks in it; empty where it has none.
        files: what it holds, by path.
        kernels: path below `place` of each Triton cache directory -> keys of the directories in it
            that are entries of the bundle.
    """

    family: str
    place: str = ""
    fingerprint: Mapping[str, str] = msgspec.field(default_factory=dict)
    ranks: tuple[str, ...] = ()
    files: tuple[TreeFile, ...] = ()
    kernels: Mapping[str, tuple[str, ...]] = msgspec.field(default_factory=dict)

    @property
    def name(self) -> str:
        """What messages call it: `vllm:torch_compile_cache/0123456789`."""
        return f"{self.family}:{self.place or '.'}"

    def path_of(self, path: str) -> str:
        """Return a path of the tree relative to the family's root."""
        return f"{self.place}/{path}".strip("/")

    def encode(self) -> bytes:
        """Return canonical JSON: equal trees have equal bytes."""
        return msgspec.json.encode(
            {
                "family": self.family,
                "files": [
                    [one.path, one.size, list(one.chunks)]
                    for one in sorted(self.files, key=lambda one: one.path)
                ],
                "fingerprint": dict(sorted(self.fingerprint.items())),
                "format": FORMAT,
                "kernels": {path: sorted(keys) for path, keys in sorted(self.kernels.items())},
                "place": self.place,
                "ranks": sorted(self.ranks),
            }
        )

    @staticmethod
    def decode(data: bytes) -> TreeIndex:
        """Read what `encode` wrote.

        Raises:
            FormatError: it is no index.
            UnsupportedVersion: it is an index of a newer format.
            UnsafeName: a name in it could lead out of the family's root, or is none that a cache
                has.
        """
        try:
            if msgspec.json.decode(data, type=_IndexVersion).format > FORMAT:
                raise UnsupportedVersion(
                    f"an index of trees of a format newer than {FORMAT}; update triton-bundler"
                )
            row = msgspec.json.decode(data, type=_IndexRow)
        except (msgspec.DecodeError, RecursionError) as error:
            raise FormatError(f"not an index of a tree: {error!s:.200}") from None
        if max(len(row.files), len(row.kernels)) > MOST_ROWS:
            raise FormatError(f"an index of a tree has more than {MOST_ROWS:,} rows")
        check_family_name(row.family)
        for path in {row.place, *row.kernels} - {""}:
            check_tree_path(path)
        for path, _, digests in row.files:
            check_tree_path(path)
            for text in digests:
                digest_raw(text)
        for key in {key for keys in row.kernels.values() for key in keys}:
            check_kernel_key(key)
        _check_unique(row.files, row.kernels)
        files = tuple(TreeFile(path, size, digests) for path, size, digests in row.files)
        return TreeIndex(row.family, row.place, row.fingerprint, row.ranks, files, row.kernels)

    @property
    def entry_path(self) -> str:
        """Where the bundle keeps the index."""
        return blob_path(self.family, sha256(self.encode())) + INDEX_SUFFIX


class _IndexVersion(Struct):
    format: Annotated[int, Meta(ge=1)]


class _IndexRow(Struct):
    family: str
    place: str
    fingerprint: dict[str, str]
    ranks: tuple[str, ...]
    files: tuple[tuple[str, Annotated[int, Meta(ge=0)], tuple[str, ...]], ...]
    kernels: dict[str, tuple[str, ...]]


def blob_path(family: str, raw: bytes) -> str:
    """Return where a bundle keeps a chunk of a family's file with this digest."""
    return f"{PREFIX}/{family}/{raw.hex()}"


def is_tree_path(path: str) -> bool:
    """Whether an opaque file of a bundle belongs to trees, not to Inductor's cache."""
    return path.startswith(f"{PREFIX}/")


def is_index_path(path: str) -> bool:
    """Whether an opaque file of a bundle is the index of a tree."""
    return is_tree_path(path) and path.endswith(INDEX_SUFFIX)


def has_trees(paths: Iterable[str]) -> bool:
    """Whether there is the index of a tree among the paths of opaque files."""
    return any(map(is_index_path, paths))


def chunk_digests(data: bytes) -> list[tuple[bytes, bytes]]:
    """Return (raw digest, bytes) of the chunks of a file; an empty file has none."""
    pieces = (data[start : start + CHUNK_BYTES] for start in range(0, len(data), CHUNK_BYTES))
    return [(sha256(piece), piece) for piece in pieces]


def tree_file(path: str, chunks: Iterable[tuple[bytes, bytes]]) -> TreeFile:
    """Return the row of a file of these chunks."""
    pieces = list(chunks)
    return TreeFile(
        path, sum(len(piece) for _, piece in pieces), tuple(digest_text(raw) for raw, _ in pieces)
    )


def check_family_name(name: str) -> str:
    """Return the name of a family; raises `UnsafeName`."""
    if _FAMILY.fullmatch(name) is None:
        raise UnsafeName(
            f"not the name of a family: {name!r:.80}; expected a-z 0-9 _ -, at most 32 of them",
            name=name,
        )
    return name


def check_tree_path(path: str) -> str:
    """Return a path that stays below the directory that it is relative to.

    Raises:
        UnsafeName: it is absolute, has `..`, an empty component, control characters or a backslash,
            is too long or too deep, or is a name of files that a restore makes itself.
    """
    parts = path.split("/")
    unsafe = [
        part
        for part in parts
        if part in {"", ".", ".."}
        or not part.isprintable()
        or "\\" in part
        or len(part.encode("utf-8", "surrogatepass")) > _COMPONENT_BYTES
        or part.startswith(_OURS_ALONE)
    ]
    if unsafe or len(parts) > _DEPTH or len(path) > _CHARACTERS:
        raise UnsafeName(
            f"unsafe path {path!r:.200} in a tree: expected at most {_DEPTH} printable components,"
            " relative, without . and ..",
            name=path,
        )
    return path


def _check_unique(
    files: Iterable[tuple[str, int, tuple[str, ...]]], kernels: Iterable[str]
) -> None:
    paths = [path for path, _, _ in files]
    if len(set(paths)) != len(paths):
        raise FormatError("an index of a tree names a file twice")
    path = path_with_members(paths, kernels)
    if path is not None:
        raise FormatError(
            f"an index of a tree names {path!r} as a file and as a directory", name=path
        )


# --------------------------------------------------------------------------------------- Programs


def program_path(name: str, *, code: bool = False) -> str:
    """Return where the plan of a program stands in a bundle.

    Args:
        name: of the program.
        code: whether it calls operators that need trust in code.

    Raises:
        UnsafeName: the name is no plain one.
    """
    if not _PROGRAM.fullmatch(name):
        raise UnsafeName(
            f"program {name!r:.80}: expected a name of up to 128 letters, digits and any of _"
            " . + -",
            name=name,
        )
    return f"{_PROGRAMS}{name}{_CODE_SUFFIX if code else _PROGRAM_SUFFIX}"


def program_name(path: str) -> str | None:
    """Return the name of the program whose plan stands at a path; None for any other file."""
    suffix = _CODE_SUFFIX if path.endswith(_CODE_SUFFIX) else _PROGRAM_SUFFIX
    if not (path.startswith(_PROGRAMS) and path.endswith(suffix)):
        return None
    name = path[len(_PROGRAMS) : -len(suffix)]
    return name if _PROGRAM.fullmatch(name) else None


def is_program_path(path: str) -> bool:
    """Whether an opaque file of a bundle is the plan of a program."""
    return program_name(path) is not None


def is_code_path(path: str) -> bool:
    """Whether an opaque file of a bundle is the plan of a program that calls code of others."""
    return is_program_path(path) and path.endswith(_CODE_SUFFIX)


def is_cache_path(path: str) -> bool:
    """Whether an opaque file of a bundle belongs to Inductor's cache, where torch executes or
    unpickles it.
    """
    return not is_tree_path(path) and not is_program_path(path)
