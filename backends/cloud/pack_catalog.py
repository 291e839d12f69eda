# SPDX-License-Identifier: Apache-2.0
"""`Catalog`: what an object store holds for us: where each object lies, and the value of each ref.

It is one stored file, replaced as a whole by compare-and-set; `cloud_backend.py` says why.  A
`Catalog` that was read is never changed: a change makes another one with `evolved`, and
`encode_catalog` and `decode_catalog` turn it into bytes and back.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping

import msgspec

from bundler.backends.backend_errors import BackendFull, BackendUnavailable
from bundler.backends.keys import is_key

# Larger than about 600,000 objects; every change writes the whole file.
CATALOG_BYTES = 64 * 1024 * 1024
# The last changes, by which a writer whose answer was lost finds out that its change was made.
TOKENS_KEPT = 64
_MAGIC = b"tbcat1\n\0"
_DIGEST_BYTES = 32
_FIX = "restore an earlier version of it, or remove it and push again"


class PackSpan(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Where an object lies: in which pack, from which byte on, how many bytes, and when it was last
    in use.
    """

    pack: int
    offset: int
    size: int
    modified_ms: int


class Catalog(msgspec.Struct, array_like=True, frozen=True):
    """All that a store holds.

    Attributes:
        time_ms: the time of the last change; times never run backwards.
        tokens: one for each of the last changes.
        packs: how many bytes each pack has.
        objects, refs: by key.
    """

    time_ms: int = 0
    tokens: list[bytes] = []
    packs: dict[int, int] = {}
    objects: dict[str, PackSpan] = {}
    refs: dict[str, bytes] = {}

    def evolved(
        self,
        now_ms: int,
        *,
        packs: Mapping[int, int] | None = None,
        objects: Mapping[str, PackSpan] | None = None,
        refs: Mapping[str, bytes] | None = None,
    ) -> Catalog:
        """Return the catalog after a change, with a token of its own; packs that nothing lies in
        are left out.
        """
        every = dict(self.objects if objects is None else objects)
        used = {place.pack for place in every.values()}
        known = self.packs if packs is None else packs
        return Catalog(
            max(now_ms, self.time_ms),
            [*self.tokens[1 - TOKENS_KEPT :], secrets.token_bytes(8)],
            {pack: size for pack, size in known.items() if pack in used},
            every,
            dict(self.refs if refs is None else refs),
        )


_DECODER = msgspec.msgpack.Decoder(Catalog)
_ENCODER = msgspec.msgpack.Encoder()


def encode_catalog(catalog: Catalog, shown: str) -> bytes:
    """Return the stored bytes of a catalog; raises `BackendFull` when there are too many."""
    payload = _ENCODER.encode(catalog)
    if len(payload) > CATALOG_BYTES:
        raise BackendFull(
            f"{shown}: its catalog has {len(payload):,} bytes, expected at most {CATALOG_BYTES:,};"
            " prune"
        )
    return _MAGIC + hashlib.sha256(payload).digest() + payload


def decode_catalog(data: bytes, shown: str) -> Catalog:
    """Return a catalog; raises `BackendUnavailable` for bytes that are none, or not whole."""
    start = len(_MAGIC) + _DIGEST_BYTES
    digest = hashlib.sha256(data[start:]).digest()
    if not data.startswith(_MAGIC + digest):
        raise BackendUnavailable(
            f"{shown}: its file `catalog` is no whole catalog of ours ({len(data):,} bytes); {_FIX}"
        )
    try:
        catalog = _DECODER.decode(memoryview(data)[start:])
    except msgspec.MsgspecError as error:
        raise BackendUnavailable(
            f"{shown}: its catalog cannot be read ({error}); {_FIX}, or upgrade"
        ) from error
    for key, place in catalog.objects.items():
        end, pack_bytes = place.offset + place.size, catalog.packs.get(place.pack, -1)
        if not is_key(key) or not 0 <= place.offset <= end <= pack_bytes:
            raise BackendUnavailable(
                f"{shown}: its catalog places {key!r:.80} outside of every pack; {_FIX}"
            )
    if not all(map(is_key, catalog.refs)):
        raise BackendUnavailable(f"{shown}: its catalog has a ref that is no key; {_FIX}")
    return catalog


def pack_name(pack: int) -> str:
    """Return the name of a pack's file."""
    return f"packs/{pack:016x}"


def new_pack() -> int:
    """Return the number of a pack that nobody has."""
    return secrets.randbits(63)
