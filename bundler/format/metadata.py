# SPDX-License-Identifier: Apache-2.0
"""Parses Triton's metadata JSON, which may come from anybody, within bounds.

`parse_metadata` says what is in it, and refuses what Triton could not read.  `is_readable_head`
looks at the few members that tell whether a kernel is the one that it is said to be; a restore asks
it for every kernel.
"""

# Annotations are real ones in this module: msgspec reads those of a struct that it decodes, and
# each that is a text is compiled for it.
from typing import Any

import msgspec

from bundler.errors import FormatError, LimitExceeded
from bundler.format import names
from bundler.format.limits import check_metadata_size

#: In the metadata of a kernel that was placed for a function which only moved: the key of the
#: kernel that was recorded (`bundler/lifecycle/rekeyed_kernels.py`).
MOVED_FROM = "bundler_moved_from"
# Far above what Triton nests, and far below what Python's own recursion limit refuses: where that
# strikes depends on who calls, so a kernel would be sound for one reader and broken for the next.
METADATA_DEPTH = 32
# The quick decoder does not look into what it skips: a number of 4,301 digits, which Python
# refuses, has no room in so few bytes.
_HEAD_BYTES = 4096


class HeadTarget(msgspec.Struct, gc=False):
    """What the binary runs on."""

    backend: str
    arch: str | int
    warp_size: int


class MetadataHead(msgspec.Struct, gc=False):
    """What Triton's metadata says of which kernel it is, and what a launch cannot do without."""

    hash: str
    name: str
    shared: int
    num_warps: int
    target: HeadTarget


_HEAD = msgspec.json.Decoder(MetadataHead)
_ANYTHING = msgspec.json.Decoder()


def read_head(data: bytes) -> MetadataHead | None:
    """Return the head of a metadata file that Triton could read.

    None says nothing: the document may be sound all the same, and `parse_metadata` has to tell.
    What it would refuse has no head.
    """
    # What the decoder does not look into is thereby no threat either: text in other encodings, deep
    # nesting, endless numbers.
    if len(data) > _HEAD_BYTES or not data.isascii() or not _is_shallow(data):
        return None
    try:
        return _HEAD.decode(data)
    except (ValueError, msgspec.MsgspecError, RecursionError):
        return None


def is_readable_head(key: str, binary_name: str, metadata: bytes) -> bool:
    """Tell whether Triton could surely read a kernel of this metadata, if its binary is whole;
    False says nothing.
    """
    head = read_head(metadata)
    if head is None or not _is_hash_of(key, head.hash):
        return False
    expected = names.BINARY_KIND_OF_BACKEND.get(head.target.backend)
    return expected is None or binary_name.endswith(f".{expected}")


def _is_hash_of(key: str, text: str) -> bool:
    try:
        return names.is_key_of(key, bytes.fromhex(text))
    except ValueError:
        return False


def parse_metadata(data: bytes) -> dict[str, Any]:
    """Return the object that a metadata file holds.

    Raises:
        FormatError: it is not JSON in UTF-8, or not an object.
        LimitExceeded: it is longer or nested deeper than any metadata is.
    """
    check_metadata_size(len(data), "metadata")
    try:
        metadata = _parsed(data)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise FormatError(f"metadata is not valid JSON: {error!s:.200}") from error
    if not isinstance(metadata, dict):
        raise FormatError(f"metadata: expected a JSON object, got {type(metadata).__name__}")
    _check_depth(metadata, data)
    return metadata


def _parsed(data: bytes) -> Any:
    try:
        return _ANYTHING.decode(data)
    except (ValueError, msgspec.MsgspecError):
        import json

        # Python reads some that msgspec does not, such as NaN; what Triton can read is sound.
        # Decoded first: json.loads would take UTF-16 as well, which Triton does not read.
        return json.loads(data.decode("utf-8"))


def _is_shallow(data: bytes) -> bool:
    return (
        data.count(b"[") + data.count(b"{") <= METADATA_DEPTH
    )  # too few to nest deeper; Triton's has a dozen


def _check_depth(metadata: dict[str, Any], data: bytes) -> None:
    if _is_shallow(data):
        return
    level: list[Any] = [metadata]
    for _ in range(METADATA_DEPTH):
        level = [
            member
            for item in level
            for member in (item.values() if isinstance(item, dict) else item)
            if isinstance(member, (dict, list))
        ]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> LimitExceeded:
    return LimitExceeded(
        f"metadata is not valid JSON: nested deeper than {METADATA_DEPTH}", limit=METADATA_DEPTH
    )
