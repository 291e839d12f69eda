# SPDX-License-Identifier: Apache-2.0
"""How many bytes an object of each kind may have as it is stored.

Readers ask for no more than that, so that a damaged or hostile store cannot fill the memory.  Every
module of this room that reads objects calls it.
"""

from __future__ import annotations

from collections.abc import Iterable

from bundler.backends.port import OBJECT_LIMIT
from bundler.format.limits import DEFAULT_LIMITS, MIB, Limits
from bundler.format.signature_sections import MAX_ENVELOPE_BYTES
from bundler.store import store_layout

# An entry of the kernel index names a manifest and a tag.
PLACE_BYTES = 1024
# The largest dictionary that a reader keeps; a unit that is larger is compressed alone and becomes
# part of no dictionary.
DICTIONARY_BYTES = MIB


def of_keys(keys: Iterable[str], limits: Limits = DEFAULT_LIMITS) -> dict[str, int]:
    """Return keys with the most that an object of their kind may have."""
    return {key: of_key(key, limits) for key in keys}


def of_key(key: str, limits: Limits = DEFAULT_LIMITS) -> int:
    """Return the most that an object of the kind of this key may have."""
    if key.startswith(f"{store_layout.UNITS}/"):
        return store_layout.sealed_bytes(max(limits.kernel_bytes, limits.file_bytes))
    if key.startswith(f"{store_layout.DICTIONARIES}/"):
        return store_layout.sealed_bytes(DICTIONARY_BYTES)
    if key.startswith(f"{store_layout.ENVELOPES}/"):
        return store_layout.sealed_bytes(MAX_ENVELOPE_BYTES)
    if key.startswith(f"{store_layout.RECORDS}/"):
        return store_layout.RECORD_BYTES
    if key.startswith((f"{store_layout.INDEX}/", f"{store_layout.MOVED}/")):
        return store_layout.sealed_bytes(PLACE_BYTES)
    # At least `OBJECT_LIMIT`, since the writer may have had higher limits than this reader.
    return max(OBJECT_LIMIT, store_layout.sealed_bytes(limits.manifest_bytes))


def of_units(units: Iterable[store_layout.Unit]) -> dict[str, int]:
    """Return the keys of units with the most that each may have, however it is compressed."""
    return {unit.key: store_layout.sealed_bytes(unit.size) for unit in units}


def of_heads(keys: Iterable[str]) -> dict[str, int]:
    """Return keys with a bound that lets the head of a value be read and no more."""
    return dict.fromkeys(keys, 0)
