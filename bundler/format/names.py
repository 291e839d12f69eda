# SPDX-License-Identifier: Apache-2.0
"""The grammar of every name that can become a path, and what a file's extension says about it.

`check_file_name`, `check_relative_path` and `check_kernel_key` refuse, `artifact_kind` and
`artifact_order` classify.  Readers and writers of bundles, stores and cache directories call them
before they use a name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache

from bundler.errors import UnsafeName

NAME_CHARACTERS = 200
PATH_DEPTH = 6
_NAME = re.compile(rf"[A-Za-z0-9._@-]{{1,{NAME_CHARACTERS}}}")
_BASE32_CHARACTERS, _BASE32_PADDING = 52, 4  # 52 characters of 5 bits for 256 bits
# What a key of so many characters consists of: Triton's directory name is the unpadded base32 of a
# SHA-256; torch and older tools use hex.
_CHARACTERS_OF_KEYS = {
    _BASE32_CHARACTERS: b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567",
    64: b"0123456789abcdef",
}
_TO_INT_BASE_32 = bytes.maketrans(
    b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567", b"0123456789abcdefghijklmnopqrstuv"
)
# Every variant of a kernel has files of the same names, and each name is asked about a dozen times.
_NAMES_REMEMBERED = 4096

GROUP_PREFIX = "__grp__"
AUTOTUNE_SUFFIX = ".autotune.json"
BEST_CONFIG_SUFFIX = ".best_config"
# Of the helper libraries that Triton builds with the C compiler.
LIBRARY_SUFFIXES = (".so", ".pyd")

# In the order in which Triton writes them, which is also the order of a generated group file.
STAGE_ORDER = (
    "source",
    "glir",
    "ttir",
    "ttgir",
    "llir",
    "ptx",
    "amdgcn",
    "spv",
    "cubin",
    "hsaco",
    "zebin",
    "json",
)
BINARY_KINDS = frozenset({"cubin", "hsaco", "zebin"})
LAUNCH_KINDS = BINARY_KINDS | {"json"}
BINARY_KIND_OF_BACKEND = {"cuda": "cubin", "hip": "hsaco", "xpu": "zebin"}


@lru_cache(_NAMES_REMEMBERED)
def check_file_name(name: str) -> str:
    """Return `name` if it is one safe path component.

    Raises:
        UnsafeName: it is empty, too long, `.` or `..`, or has a character outside
            `[A-Za-z0-9._@-]`.
    """
    if not _NAME.fullmatch(name) or name in {".", ".."}:
        raise UnsafeName(
            f"unsafe file name {name!r}: expected 1 to {NAME_CHARACTERS} of A-Z a-z 0-9 . _ @ -,"
            " and not . or ..",
            name=name,
        )
    return name


def check_relative_path(path: str) -> str:
    """Return `path` if it is a relative path of at most six safe components joined by `/`."""
    parts = path.split("/")
    if len(parts) > PATH_DEPTH:
        raise UnsafeName(
            f"unsafe path {path!r}: {len(parts)} components, at most {PATH_DEPTH} allowed",
            name=path,
        )
    for part in parts:
        check_file_name(part)
    return path


def path_with_members(paths: Collection[str], folders: Iterable[str] = ()) -> str | None:
    """Return the first of these paths in which another one lies, or that is one of these folders;
    None when there is none.
    """
    taken = {
        path[:end] for path in paths for end, character in enumerate(path) if character == "/"
    } | {*folders}
    return next((path for path in paths if path in taken), None)


def is_kernel_key(name: str) -> bool:
    """Tell whether `name` is a directory name that Triton gives a compile."""
    characters = _CHARACTERS_OF_KEYS.get(len(name))
    return characters is not None and _has_only(name, characters)


def _has_only(text: str, characters: bytes) -> bool:
    return text.isascii() and not text.encode().translate(None, characters)


def is_key_of(key: str, digest: bytes) -> bool:
    """Tell whether a kernel key is the name, in base32 or hex, of this SHA-256."""
    if len(key) == _BASE32_CHARACTERS:
        # base64.b32decode does this in a Python loop, and it is asked for every kernel; a text is
        # translated ten times slower than bytes.
        return (
            is_kernel_key(key)
            and int(key.encode().translate(_TO_INT_BASE_32), 32)
            == int.from_bytes(digest) << _BASE32_PADDING
        )
    return key == digest.hex()


def check_kernel_key(key: str) -> str:
    """Return `key` if it is a kernel key, else raise `UnsafeName`."""
    if not is_kernel_key(key):
        raise UnsafeName(
            f"not a kernel key: {key!r}; expected 52 of A-Z 2-7, or 64 hex digits", name=key
        )
    return key


def are_kernel_keys(keys: Sequence[str]) -> bool:
    """Tell whether all of these are kernel keys, at a tenth of what asking for each takes."""
    lengths = {*map(len, keys)}
    characters = _CHARACTERS_OF_KEYS.get(lengths.pop()) if len(lengths) == 1 else None
    if characters is None:  # some are of another kind than others, or there are none
        return all(map(is_kernel_key, keys))
    return _has_only("".join(keys), characters)


@lru_cache(_NAMES_REMEMBERED)
def artifact_kind(filename: str) -> str:
    """Return the kind of an artifact by its extension, `other` for one we do not know."""
    _, dot, extension = filename.rpartition(".")
    return extension if dot and (extension in STAGE_ORDER or extension == "so") else "other"


@lru_cache(_NAMES_REMEMBERED)
def artifact_order(filename: str) -> tuple[int, str]:
    """Sort key that puts a kernel's files in Triton's own order: source, IR, binary, metadata."""
    kind = artifact_kind(filename)
    return (STAGE_ORDER.index(kind) if kind in STAGE_ORDER else -1, filename)
