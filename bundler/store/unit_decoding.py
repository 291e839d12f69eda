# SPDX-License-Identifier: Apache-2.0
"""`decoded_together`: decompresses the units of one fetch in one call for each dictionary.

A restore decodes hundreds of small units.  In a call each, every call would give the interpreter to another thread, which keeps it for
milliseconds: decoding beside a thread that places kernels took five times as long.  `StoreBlobs` calls it.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

import zstandard

from bundler.backends.port import Unread
from bundler.store.dictionaries import Dictionaries
from bundler.store.store_layout import Unit, check_seal, decompressor, dictionary_of

# The C library's binding has it, the one for other interpreters has not.
_TOGETHER = "multi_decompress_to_buffer" in zstandard.backend_features


def decoded_together(
    values: Mapping[str, bytes], units: Mapping[str, Unit], dictionaries: Dictionaries
) -> dict[str, memoryview]:
    """Return the payloads of units by key, each of the size that its unit has; no digest of a blob is compared.

    Left out, for the caller to open alone and say why: what is damaged or lacks its dictionary, and everything that would have been decoded
    with it.

    Args:
        values: what the store gave by key, each compared with the digest in its head.
        units: the units by key.
        dictionaries: those that were fetched.
    """
    found: dict[str, memoryview] = {}
    if not _TOGETHER:
        return found
    for digest, keys in _by_dictionary(values).items():
        dictionary = None if digest is None else dictionaries.known(digest)
        if dictionary is None and digest is not None:
            continue
        frames = [check_seal(values[key], key, verified=True) for key in keys]
        try:
            sizes = [zstandard.get_frame_parameters(frame).content_size for frame in frames]
            # Nothing is allocated for what a frame alone says.
            if sizes != [units[key].size for key in keys]:
                continue
            payloads = decompressor(dictionary and dictionary.data).multi_decompress_to_buffer(
                frames, decompressed_sizes=struct.pack(f"={len(sizes)}Q", *sizes), threads=1
            )
        except zstandard.ZstdError:
            continue
        found.update(zip(keys, map(memoryview, payloads), strict=True))
    return found


def _by_dictionary(values: Mapping[str, bytes]) -> dict[bytes | None, list[str]]:
    """Return the keys of values that may be units, by the digest of the dictionary that they need."""
    keys: dict[bytes | None, list[str]] = {}
    for key, value in values.items():
        if not isinstance(value, Unread):
            keys.setdefault(dictionary_of(value), []).append(key)
    return keys
