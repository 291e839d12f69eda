# SPDX-License-Identifier: Apache-2.0
"""`Unit`, `encode_object`, `encode_tag`, `encode_manifest`: what a store holds, under which keys,
and how each value is encoded.

::

    v1/u/<64 hex>   a unit: the launch set of one kernel, the rest of one kernel, or one other file
    v1/d/<64 hex>   a dictionary that units were compressed with, by the digest of its bytes
    v1/m/<64 hex>/<16 hex>   a manifest: content and observations of a bundle, by the digests of both
    v1/t/<tag>      a ref: which manifest, which dictionaries its units were compressed with lately, and signatures (store_signatures.py)
    v1/e/<64 hex>/<16 hex>   a signature of a bundle, by the digests of both
    v1/k/<kernel key>   a kernel that was published by itself (kernel_records.py)
    v1/b/<kernel key>   which bundle has that kernel (kernel_index.py), and v1/b/f/<64 hex>, which has that single file
    v1/l/<moved key>    the key under which a kernel was recorded, by what is the same once it moved (kernel_index.py)

    value   TBV1, digest of the rest, one zstd frame
            TBD1, digest of the rest, digest of a dictionary, one zstd frame that needs it

Keys begin with the major version of this layout, so that two versions of the library share a store
without reading each other's objects. Units are named by the digests of what is in them, however
they are compressed: bundles that share kernels share units.

Every module of this room reads and writes objects and refs through it.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import zstandard

from bundler.backends.port import OBJECT_LIMIT, Unread
from bundler.errors import ConfigError, DigestMismatch, FormatError, LimitExceeded
from bundler.format import wire
from bundler.format.digest import DIGEST_BYTES, check_digest, digest_raw, sha256
from bundler.format.entries import FileLayout, HelperLibrary, Kernel, Opaque, Target, TuningFile
from bundler.format.lazy_kernel import blobs_of_files
from bundler.format.limits import DEFAULT_LIMITS, KIB, MIB, Limits
from bundler.format.manifest import Content
from bundler.format.signature_sections import MAX_ENVELOPE_BYTES
from bundler.format.summary import count

MAJOR = "v1"
UNITS, MANIFESTS, TAGS, DICTIONARIES, ENVELOPES = (f"{MAJOR}/{kind}" for kind in "umtde")
ZSTD_LEVEL = 6
# What one call to a byte store may carry; larger ones are split.
BATCH_BYTES = 16 * MIB
BATCH_KEYS = 512

_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}(?:/[A-Za-z0-9_][A-Za-z0-9._-]{0,99}){0,3}")
_MANIFEST = re.compile(MANIFESTS + r"/[0-9a-f]{64}/[0-9a-f]{16}")
_ALONE, _WITH_DICTIONARY = b"TBV1", b"TBD1"
_HEAD_BYTES = len(_ALONE) + DIGEST_BYTES
_LEAST_BYTES = {_ALONE: _HEAD_BYTES, _WITH_DICTIONARY: _HEAD_BYTES + DIGEST_BYTES}
_FRAME_BYTES = 1024
#: A family of units, and the digest of a dictionary that was good for it lately.
Hint = tuple[str, bytes]
HINTS = 16
# A tag is a few hundred bytes, the last failure of a compile a few thousand.
REF_BYTES = 128 * KIB
RECORDS = f"{MAJOR}/k"
INDEX = f"{MAJOR}/b"
MOVED = f"{MAJOR}/l"
RECORD_BYTES = MIB  # a record is of one kernel, and has some KB
# An entry of the kernel index names a manifest and a tag.
PLACE_BYTES, ROW_VERSION = 1024, 1
# The largest dictionary that a reader keeps; a unit that is larger is compressed alone and becomes
# part of no dictionary.
DICTIONARY_BYTES = MIB

# Of one thread; a bundle of one target has units of two families, each with a dictionary.
_DECOMPRESSORS = 4
_of_thread = threading.local()


class Unit:
    """Blobs that are stored as one value; two of the same blobs are equal.

    Args:
        blobs: raw digests and sizes, in order.
        family: names the units that it resembles, which one dictionary may serve; empty for a file
            that resembles none.

    Attributes:
        size: bytes, uncompressed.
    """

    __slots__ = ("_key", "blobs", "family", "size")

    # By hand: a push and a pull make two for each kernel, and ask each for its size.
    def __init__(self, blobs: tuple[tuple[bytes, int], ...], family: str = "") -> None:
        self.blobs, self.family = blobs, family
        self._key: str | None = None
        self.size = sum([size for _, size in blobs])

    @property
    def key(self) -> str:
        """Its key, from the digests alone."""
        if self._key is None:
            self._key = f"{UNITS}/{hashlib.sha256(b''.join([digest for digest, _ in self.blobs])).hexdigest()}"
        return self._key

    def __eq__(self, other: object) -> bool:
        return self.blobs == other.blobs if isinstance(other, Unit) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.blobs)

    def __repr__(self) -> str:
        return f"<Unit {self.key} {count(len(self.blobs), 'blob')}, {count(self.size, 'byte')}>"


def units_of(content: Content, *, launch: bool = True) -> Iterator[Unit]:
    """Yield the units of a bundle, with the launch sets or without; a blob that two kernels share
    is in a unit of each.
    """
    yield from units_of_kernels(content.kernels, launch=launch)
    companions: list[TuningFile | HelperLibrary | Opaque] = [
        *content.tuning_files,
        *content.helpers,
        *content.opaque,
    ]
    for entry in companions:
        yield Unit(((digest_raw(entry.artifact.digest), entry.artifact.size),))


def units_of_kernels(kernels: Iterable[Kernel], *, launch: bool = True) -> Iterator[Unit]:
    """Yield the units of kernels: of each its launch set, if that is wanted, and the rest of it if
    there is more.
    """
    # Thousands have few layouts and targets, each of them one object, which is kept here: so no
    # other one has its `id`.
    known: dict[tuple[int, int], tuple[FileLayout, Target, tuple[int, ...], str, str]] = {}
    for kernel in kernels:
        layout, target = kernel.layout, kernel.target
        if (id(layout), id(target)) not in known:
            others = tuple([position for position in layout.order if position not in layout.launch])
            of_launch, of_rest = f"{target}/launch", f"{target}/rest"
            known[id(layout), id(target)] = layout, target, others, of_launch, of_rest
        _, _, rest, of_launch, of_rest = known[id(layout), id(target)]
        files = blobs_of_files(kernel)
        if launch:
            yield Unit(tuple(sorted({files[position] for position in layout.launch})), of_launch)
        if rest:
            yield Unit(tuple(sorted({files[position] for position in rest})), of_rest)


def encode_object(payload: bytes) -> bytes:
    """Return what is stored for a payload that is compressed alone."""
    parameters = zstandard.ZstdCompressionParameters.from_level(
        ZSTD_LEVEL, source_size=len(payload), write_checksum=True, write_content_size=True
    )
    data = zstandard.ZstdCompressor(compression_params=parameters).compress(payload)
    return _ALONE + sha256(data) + data


def encode_small_object(payload: bytes) -> bytes:
    """Return what is stored for some bytes, of which there are thousands, or that a restore waits
    for: compressed fast, and the compressor is kept, and chosen for none of them.
    """
    compressor: zstandard.ZstdCompressor | None = getattr(_of_thread, "compressor", None)
    if compressor is None:
        compressor = _of_thread.compressor = zstandard.ZstdCompressor(
            level=1, write_checksum=True, write_content_size=True
        )
    data = compressor.compress(payload)
    return _ALONE + sha256(data) + data


def encode_object_with(dictionary: bytes, frame: bytes) -> bytes:
    """Return what is stored for a frame that was compressed with the dictionary of this digest."""
    rest = dictionary + frame
    return _WITH_DICTIONARY + sha256(rest) + rest


def most_object_bytes(size: int) -> int:
    """Return the most that a stored value may have whose payload has `size` bytes: zstd adds little
    to data that it cannot compress.
    """
    return _HEAD_BYTES + DIGEST_BYTES + size + size // 256 + _FRAME_BYTES


def checked_frame(
    value: bytes, key: str, size: int | None = None, *, verified: bool = False
) -> memoryview:
    """Return the frame of a stored value.

    Args:
        value: what the store gave.
        key: its key, for messages.
        size: the size of its payload, where that is known.
        verified: the digest in its head was compared already: the byte store is `verified`.

    Raises:
        DigestMismatch: it is damaged.
        LimitExceeded: it may be whole, but is larger than this reader takes.
    """
    view = memoryview(value)
    start = _HEAD_BYTES + (DIGEST_BYTES if value.startswith(_WITH_DICTIONARY) else 0)
    if isinstance(value, Unread):
        if size is None and _may_be_whole(value, start):
            raise LimitExceeded(
                f"{key}: {value.why}; if you trust this store, pass Limits with larger values",
                key=key,
            )
        raise DigestMismatch(f"{key}: {value.why}; the next push sends it again", key=key)
    if len(view) < start or not value.startswith((_ALONE, _WITH_DICTIONARY)):
        raise DigestMismatch(
            f"{key}: not a value of this store; verify --repair removes it", key=key
        )
    if not verified:
        check_digest(view[_HEAD_BYTES:], bytes(view[len(_ALONE) : _HEAD_BYTES]), key)
    return view[start:]


def is_sound_object(value: bytes) -> bool:
    """Tell whether a stored value is undamaged; of one that is not, `checked_frame` says why.

    For who looks at thousands that are nearly all sound.
    """
    rest = memoryview(value)[_HEAD_BYTES:]
    least = _LEAST_BYTES.get(value[: len(_ALONE)])
    return (
        least is not None
        and len(value) >= least
        and sha256(rest) == value[len(_ALONE) : _HEAD_BYTES]
    )


def _may_be_whole(value: Unread, start: int) -> bool:
    """Tell by the head of a value that was not read whether it is as large as it says."""
    if value.size_bytes is None or not value.startswith((_ALONE, _WITH_DICTIONARY)):
        return False
    try:
        declared: int = zstandard.get_frame_parameters(value[start:]).content_size
    except zstandard.ZstdError:
        return False
    return declared != zstandard.CONTENTSIZE_UNKNOWN and value.size_bytes <= most_object_bytes(
        declared
    )


def dictionary_of(value: bytes) -> bytes | None:
    """Return the digest of the dictionary that a stored value needs; None when it needs none, or is
    no such value.
    """
    if not value.startswith(_WITH_DICTIONARY) or len(value) < _HEAD_BYTES + DIGEST_BYTES:
        return None
    return value[_HEAD_BYTES : _HEAD_BYTES + DIGEST_BYTES]


def frame_of(value: bytes) -> tuple[bytes | None, bytes]:
    """Return the digest of the dictionary that a stored value needs, and its frame, which is empty
    when it is no such value; nothing is compared.
    """
    if value.startswith(_WITH_DICTIONARY) and type(value) is bytes:
        return value[_HEAD_BYTES : _HEAD_BYTES + DIGEST_BYTES], value[_HEAD_BYTES + DIGEST_BYTES :]
    return None, value[_HEAD_BYTES:] if value.startswith(_ALONE) and type(value) is bytes else b""


def dictionary_key(digest: bytes) -> str:
    """Return the key of a dictionary."""
    return f"{DICTIONARIES}/{digest.hex()}"


def decode_object(
    value: bytes,
    key: str,
    size: int | None,
    limits: Limits = DEFAULT_LIMITS,
    most_bytes: int | None = None,
    *,
    limit: str = "document_bytes",
) -> bytes:
    """Return the payload of a stored value that needs no dictionary; arguments and errors as of
    `checked_frame` and `decompress`.
    """
    return decompress(
        checked_frame(value, key, size), key, size, limits, most_bytes=most_bytes, limit=limit
    )


def decode_row(value: bytes, key: str, *kinds: type) -> list[Any]:
    """Return the fields of an entry of an index, which follow its version; raises `FormatError`,
    `DigestMismatch`.
    """
    payload = wire.unpack(decode_object(value, key, None, most_bytes=PLACE_BYTES), key)
    version, *row = wire.fields(payload, key, int, *kinds, open_ended=True)
    if version != ROW_VERSION:
        raise FormatError(f"{key}: version {version}, expected {ROW_VERSION}", key=key)
    return row


def decompress(
    frame: memoryview,
    key: str,
    size: int | None,
    limits: Limits = DEFAULT_LIMITS,
    dictionary: zstandard.ZstdCompressionDict | None = None,
    most_bytes: int | None = None,
    *,
    limit: str = "document_bytes",
) -> bytes:
    """Return the payload of a stored value's frame.

    Args:
        frame: what `checked_frame` returned.
        key: the key of the value, for messages.
        size: the size that the payload must have; None where `limit` bounds it.
        limits: bounds.
        dictionary: the one that `dictionary_of` names.
        most_bytes: the size that the payload may have, where that is less than the limits allow.
        limit: which of the limits bounds a payload whose size nobody knows.

    Raises:
        FormatError, LimitExceeded: damaged, or not what it should be.
    """
    try:
        declared = zstandard.get_frame_parameters(frame).content_size
        if declared == zstandard.CONTENTSIZE_UNKNOWN:
            raise FormatError(f"{key}: does not say its size", key=key)
        if most_bytes is not None and declared > most_bytes:
            # Not a limit that a user could raise: such a value is damaged, and may be removed.
            raise FormatError(
                f"{key}: declares {declared} bytes, expected {most_bytes} at most", key=key
            )
        if size is None:
            limits.check(limit, declared, key)
        elif declared != size:
            raise FormatError(
                f"{key}: declares {count(declared, 'byte')}, expected {size}", key=key
            )
        payload: bytes = decompressor(dictionary).decompress(
            frame, max_output_size=declared, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise FormatError(f"{key}: {error}", key=key) from error
    return payload


def decompressor(dictionary: zstandard.ZstdCompressionDict | None) -> zstandard.ZstdDecompressor:
    """Return this thread's decompressor: a restore decodes thousands of units, and one decompressor
    serves one thread at a time.
    """
    known: dict[int, tuple[Any, zstandard.ZstdDecompressor]] = _of_thread.__dict__.setdefault(
        "decompressors", {}
    )
    # The dictionary is kept beside its decompressor, so that no other one can have its `id`.
    found = known.get(id(dictionary))
    if found is None:
        if len(known) >= _DECOMPRESSORS:
            known.clear()
        made = (
            zstandard.ZstdDecompressor(dict_data=dictionary)
            if dictionary is not None
            else zstandard.ZstdDecompressor()
        )
        found = known[id(dictionary)] = (dictionary, made)
    return found[1]


def split_unit(payload: bytes, unit: Unit) -> dict[bytes, memoryview]:
    """Return a unit's blobs by raw digest, each verified, where they lie in the payload."""
    blobs = blobs_of(memoryview(payload), unit)
    for digest, data in blobs.items():
        check_digest(data, digest, unit.key)
    return blobs


def blobs_of(payload: memoryview, unit: Unit) -> dict[bytes, memoryview]:
    """Return a unit's blobs by raw digest where they lie in the payload; none is verified."""
    blobs, offset = {}, 0
    for digest, size in unit.blobs:
        end = offset + size
        blobs[digest] = payload[offset:end]
        offset = end
    return blobs


def manifests_of(digest: str) -> str:
    """Return the prefix of a bundle's manifests; raises `ConfigError` when it is not a digest."""
    try:
        return f"{MANIFESTS}/{digest_raw(digest).hex()}"
    except FormatError as error:
        raise ConfigError(error.message, got=digest) from error


def manifest_key(digest: str, observed_bytes: bytes) -> str:
    """Return the key of a manifest: one bundle may have been observed in several ways."""
    return f"{manifests_of(digest)}/{sha256(observed_bytes).hex()[:16]}"


def digest_of_manifest(key: str) -> str:
    """Return the bundle digest that a manifest's key names; raises `FormatError` for a key that is
    none.
    """
    if not _MANIFEST.fullmatch(key):
        raise FormatError(f"{key}: no key of a manifest; verify --repair removes it", key=key)
    return f"sha256:{key.split('/')[2]}"


def tag_key(tag: str) -> str:
    """Return the key of a tag.

    Raises:
        ConfigError: not a tag: up to four components of `A-Z a-z 0-9 . _ -` joined by `/`.
    """
    if not is_tag(tag):
        raise ConfigError(
            f"not a tag: {tag!r}; expected up to four components of A-Z a-z 0-9 . _ - joined by /,"
            " each beginning with a letter, digit or _, such as llama3/h200",
            tag=tag,
        )
    return f"{TAGS}/{tag}"


def is_tag(text: str) -> bool:
    """Tell whether a tag may be called so."""
    return _TAG.fullmatch(text) is not None


def encode_tag(manifest: str, hints: Sequence[Hint] = (), envelopes: Sequence[bytes] = ()) -> bytes:
    """Return the value of a tag that names a manifest by its key, dictionaries that are worth
    fetching with its units, and signatures.
    """
    rows: list[Any] = [[list(hint) for hint in hints]] if hints or envelopes else []
    return wire.pack([1, manifest, *rows, *([list(envelopes)] if envelopes else [])])


def unpack_ref(value: bytes, what: str) -> list[Any]:
    """Decode the value of a ref; raises `FormatError`, before it decodes what is too large
    for one.
    """
    if len(value) > REF_BYTES:
        raise LimitExceeded(
            f"{what}: {len(value)} bytes or more, expected {REF_BYTES} at most", what=what
        )
    return wire.unpack(value, what)


def hints_of(value: bytes | None) -> tuple[Hint, ...]:
    """Return the dictionaries that a tag names, the latest first; none for a tag that does not say,
    or cannot be read.
    """
    try:
        data = unpack_ref(value or b"", "tag")
        *_, hints = wire.fields(data, "tag", int, str, list, open_ended=True)
        found = [wire.fields(hint, "hint", str, bytes) for hint in hints[:HINTS]]
    except FormatError:
        return ()
    return tuple((family, digest) for family, digest in found if len(digest) == DIGEST_BYTES)


def decode_tag(value: bytes, tag: str) -> str:
    """Return the key of the manifest that a tag names; raises `FormatError`."""
    try:
        if isinstance(value, Unread):
            raise FormatError(value.why)
        version, manifest = wire.fields(
            unpack_ref(value, "its value"), "its value", int, str, open_ended=True
        )
        if version == 1 and _MANIFEST.fullmatch(manifest):
            return str(manifest)
        why = f"version {version}, naming {manifest!r:.90}"
    except FormatError as error:
        why = error.message
    raise FormatError(
        f"tag {tag} cannot be read ({why}): it is damaged or of a newer version; push it with mode"
        " replace, delete it, or upgrade triton-bundler",
        tag=tag,
    )


class StoredManifest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A manifest as a store keeps it; what is in it is decoded where its limits are checked."""

    version: int
    content: bytes
    observed: bytes


_STORED_MANIFEST = msgspec.msgpack.Decoder(StoredManifest)


def encode_manifest(content_bytes: bytes, observed_bytes: bytes) -> bytes:
    """Return the stored value of a manifest."""
    return encode_object(wire.pack([1, content_bytes, observed_bytes]))


def decode_manifest(value: bytes, key: str, limits: Limits) -> tuple[bytes, bytes]:
    """Return content and observed bytes; raises `DigestMismatch` when they are not what the key
    names.
    """
    payload = decode_object(value, key, None, limits, limit="manifest_bytes")
    row = wire.decode(payload, _STORED_MANIFEST, key, limits)
    check_digest(row.content, digest_raw(digest_of_manifest(key)), key)
    if manifest_key(digest_of_manifest(key), row.observed) != key:
        raise DigestMismatch(
            f"{key}: the observations are of another manifest; push the bundle again", key=key
        )
    return row.content, row.observed


# ---------------------------------------------------------------- How large an object may be
#
# Readers ask for no more than that, so that a damaged or hostile store cannot fill the memory.


def bounds_of_keys(keys: Iterable[str], limits: Limits = DEFAULT_LIMITS) -> dict[str, int]:
    """Return keys with the most that an object of their kind may have."""
    return {key: bound_of_key(key, limits) for key in keys}


def bound_of_key(key: str, limits: Limits = DEFAULT_LIMITS) -> int:
    """Return the most that an object of the kind of this key may have."""
    if key.startswith(f"{UNITS}/"):
        return most_object_bytes(max(limits.kernel_bytes, limits.file_bytes))
    if key.startswith(f"{DICTIONARIES}/"):
        return most_object_bytes(DICTIONARY_BYTES)
    if key.startswith(f"{ENVELOPES}/"):
        return most_object_bytes(MAX_ENVELOPE_BYTES)
    if key.startswith(f"{RECORDS}/"):
        return RECORD_BYTES
    if key.startswith((f"{INDEX}/", f"{MOVED}/")):
        return most_object_bytes(PLACE_BYTES)
    # At least `OBJECT_LIMIT`, since the writer may have had higher limits than this reader.
    return max(OBJECT_LIMIT, most_object_bytes(limits.manifest_bytes))


def bounds_of_units(units: Iterable[Unit]) -> dict[str, int]:
    """Return the keys of units with the most that each may have, however it is compressed."""
    return {unit.key: most_object_bytes(unit.size) for unit in units}


def bounds_of_heads(keys: Iterable[str]) -> dict[str, int]:
    """Return keys with a bound that lets the head of a value be read and no more."""
    return dict.fromkeys(keys, 0)
