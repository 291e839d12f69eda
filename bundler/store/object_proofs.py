# SPDX-License-Identifier: Apache-2.0
"""What makes an object's bytes proof of themselves, so that they may come from anybody: `of_units`,
`of_manifest`, `of_dictionaries`.

`StoreBlobs` and `read_manifest` ask peers by them; `Mirror` checks by `unit_payload_of` what it
carries.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from functools import partial

from bundler.backends.port import Provable
from bundler.errors import LimitExceeded, NotFound
from bundler.format.limits import Limits
from bundler.store import store_layout
from bundler.store.dictionaries import Dictionary, opened
from bundler.store.store_failures import DAMAGED

# Asks who sent an object for another one, up to a size.
Need = Callable[[str, int], bytes | None]
# Opened ones that are kept: the units of one bundle need two or three.
_KEPT = 8


def of_units(units: Iterable[store_layout.Unit], limits: Limits) -> dict[str, int]:
    """Return what `store_layout.bounds_of_units` does, provable."""
    return {
        unit.key: Provable(
            store_layout.most_object_bytes(unit.size), partial(prove_unit, unit, limits)
        )
        for unit in units
    }


def of_manifest(key: str, limits: Limits) -> dict[str, int]:
    """Return what `store_layout.bounds_of_keys` does for a manifest, provable."""
    return {
        key: Provable(store_layout.bound_of_key(key, limits), partial(_prove_manifest, key, limits))
    }


def of_dictionaries(keys: Iterable[str]) -> dict[str, int]:
    """Return what `store_layout.bounds_of_keys` does for dictionaries, provable."""
    return {
        key: Provable(store_layout.bound_of_key(key), partial(_prove_dictionary, key))
        for key in keys
    }


def prove_unit(unit: store_layout.Unit, limits: Limits, value: bytes, need: Need) -> bytes | None:
    """Return the stored value of a unit to take, whose files have the digests that the unit names.

    It needs no dictionary: one that only a peer has would leave a unit in a store that nobody else
    can read.

    Returns:
        Empty bytes when the dictionary is not to be had, or it is larger than this reader takes;
        None when it is something else.
    """
    try:
        payload = unit_payload_of(unit, limits, value, need)
    except (LimitExceeded, NotFound):
        return b""
    except DAMAGED:
        return None
    return (
        value
        if store_layout.dictionary_of(value) is None
        else store_layout.encode_small_object(payload)
    )


def unit_payload_of(unit: store_layout.Unit, limits: Limits, value: bytes, need: Need) -> bytes:
    """Return what is in a unit's stored value, each file compared with its digest.

    Raises:
        DigestMismatch, FormatError: it is something else, or its dictionary is.
        LimitExceeded: it is larger than this reader takes.
        NotFound: its dictionary is not to be had.
    """
    frame = store_layout.checked_frame(value, unit.key, unit.size)
    digest = store_layout.dictionary_of(value)
    dictionary = None
    if digest is not None:
        key = store_layout.dictionary_key(digest)
        stored = need(key, store_layout.bound_of_key(key))
        if stored is None:
            raise NotFound(f"{unit.key} needs the dictionary {key}, which is missing", key=unit.key)
        dictionary = _opened(key, stored).data
    payload = store_layout.decompress(frame, unit.key, unit.size, limits, dictionary)
    store_layout.split_unit(payload, unit)
    return payload


def _prove_manifest(key: str, limits: Limits, value: bytes, _need: Need) -> bytes | None:
    try:
        store_layout.decode_manifest(value, key, limits)
    except LimitExceeded:
        return b""
    except DAMAGED:
        return None
    return value


def _prove_dictionary(key: str, value: bytes, _need: Need) -> bytes | None:
    try:
        _opened(key, value)
    except DAMAGED:
        return None
    return value


@functools.lru_cache(_KEPT)
def _opened(key: str, stored: bytes) -> Dictionary:
    return opened(key, stored)
