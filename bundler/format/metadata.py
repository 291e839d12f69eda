# SPDX-License-Identifier: Apache-2.0
"""Parses Triton's metadata JSON, which may come from anybody, within bounds."""

from __future__ import annotations

import json
from typing import Any

from bundler.errors import FormatError, LimitExceeded

# Triton writes 1 to 3 KB; parsed, JSON takes up to thirty times its size.
METADATA_BYTES = 1 << 20
# Far above what Triton nests, and far below what Python's own recursion limit refuses: where that strikes depends on who
# calls, so a kernel would be sound for one reader and broken for the next.
METADATA_DEPTH = 32


def parse_metadata(data: bytes) -> dict[str, Any]:
    """Return the object that a metadata file holds.

    Raises:
        FormatError: it is not JSON in UTF-8, or not an object.
        LimitExceeded: it is longer or nested deeper than any metadata is.
    """
    check_metadata_size(len(data), "metadata")
    try:
        # Decoded first: json.loads would take UTF-16 as well, which Triton does not read.
        metadata = json.loads(data.decode("utf-8"))
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise FormatError(f"metadata is not valid JSON: {error!s:.200}") from error
    if not isinstance(metadata, dict):
        raise FormatError(f"metadata: expected a JSON object, got {type(metadata).__name__}")
    _check_depth(metadata, data)
    return metadata


def check_metadata_size(size: int, what: str) -> None:
    """Raise `LimitExceeded` when a metadata file is too long to be one."""
    if size > METADATA_BYTES:
        raise LimitExceeded(
            f"{what}: {size} bytes of metadata, over the limit of {METADATA_BYTES}", limit=METADATA_BYTES, got=size
        )


def _check_depth(metadata: dict[str, Any], data: bytes) -> None:
    if data.count(b"[") + data.count(b"{") <= METADATA_DEPTH:  # too few to nest so deep; Triton's has a dozen
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
    return LimitExceeded(f"metadata is not valid JSON: nested deeper than {METADATA_DEPTH}", limit=METADATA_DEPTH)
