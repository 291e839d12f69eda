# SPDX-License-Identifier: Apache-2.0
"""Positional msgpack: arrays only, bounded, every field checked for its type.

`decode` and `decode_each` read records whose type is declared (manifests), `unpack` and `fields`
any other (values, tuning records, what processes tell each other).  Maps are refused: decoders keep
the last of two equal keys silently.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from bundler.errors import FormatError, LimitExceeded
from bundler.format.limits import DEFAULT_LIMITS, Limits
from bundler.format.summary import count

T = TypeVar("T")
Count = Annotated[int, Meta(ge=0)]

# An empty array is one byte there and eighty in memory.  All arrays of a document together are
# bounded by so many times the members that a single one may have; a manifest of the size that the
# limits allow has half as many.
ARRAYS_PER_ITEM = 2
# Facts of one kernel are a few kilobytes.
MAX_SPLIT_BYTES = 1 << 16
_PAIR = 2
_BYTES_PER_CHARACTER = 4  # in UTF-8, at most
# What decoding may end in; msgspec's own errors became a `ValueError` after 0.19.
MSGSPEC_ERRORS = (ValueError, msgspec.MsgspecError, RecursionError)
# Decodes nothing: it only goes through a document, and finds where an array or text declares more
# than there is.
_WALK = msgspec.msgpack.Decoder(msgspec.Raw)
_ENCODER = msgspec.msgpack.Encoder()
# The head of an array, at most.
ARRAY_HEAD_BYTES = 5
# What an array can begin with.
_FIXED_ARRAY = 0x90
_ARRAY_16_32 = {0xDC: 3, 0xDD: 5}  # where the members begin
_ARRAY_HEADS = bytes([*range(0x90, 0xA0), 0xDC, 0xDD])
# A table of contents of hundreds of sections and thousands of blobs.
_SMALL_BYTES = 1 << 16
_PLAIN = frozenset({list, str, bytes, int, float, bool, type(None)})


def pack(data: Any) -> bytes:
    """Encode nested arrays of scalars and records; the same data gives the same bytes everywhere.
    Among the data may be what is encoded already, as `msgspec.Raw`.

    Raises:
        FormatError: a string is not Unicode text, or an integer needs more than 64 bits.
    """
    try:
        return msgspec.msgpack.encode(data)
    except (*MSGSPEC_ERRORS, OverflowError) as error:
        raise FormatError(
            f"cannot be stored: {error}; expected Unicode text and integers of 64 bits"
        ) from error


def encode_within(size_bytes: int, data: Any) -> bytearray:
    """Encode what takes no more than so many bytes.

    Memory is had before msgspec begins: where there is none for it, msgspec (0.22) ends the
    process, and this raises `MemoryError`.
    """
    room = bytearray(size_bytes)
    _ENCODER.encode_into(data, room)
    return room


def is_canonical(data: bytes | bytearray, record: object) -> bool:
    """Tell whether a record that was decoded from these bytes encodes to them; it never takes more,
    but may take fewer.
    """
    return encode_within(len(data), record) == data


def unpack(data: bytes, what: str, limits: Limits = DEFAULT_LIMITS) -> list[Any]:
    """Decode a positional array.

    Args:
        data: the msgpack bytes; their length is the caller's to check first.
        what: what they are, for error messages.
        limits: bounds for depth and strings.

    Raises:
        FormatError: not msgpack, trailing bytes, a map or extension type, or not an array.
        LimitExceeded: nested or long beyond the limits.
    """
    if len(data) <= min(_SMALL_BYTES, limits.manifest_bytes, limits.array_items):
        small = _small(data, limits)
        if small is not None:
            _check_depth(small, what, limits.depth)
            return small
    # knows better what is wrong, and takes a new process as long as a hundred kernels
    import msgpack

    try:
        result = msgpack.unpackb(
            data,
            list_hook=_array_counter(data, limits),
            raw=False,
            use_list=True,
            object_pairs_hook=_refuse_map,
            max_map_len=0,
            max_ext_len=0,
            max_str_len=limits.string_bytes,
            max_bin_len=limits.manifest_bytes,
            # The decoder allocates what an array declares; each member takes a byte at least.
            max_array_len=min(len(data), limits.array_items),
        )
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise _typed(error, what, limits) from error
    _check_depth(result, what, limits.depth)
    return expect(result, list, what)


def _small(data: bytes, limits: Limits) -> list[Any] | None:
    """Decode an array of few bytes, which has no more members and arrays than these; None when
    something is wrong with it.
    """
    try:
        _WALK.decode(data)
        document = msgspec.msgpack.decode(data)
    except MSGSPEC_ERRORS:
        return None
    level = [document]
    while level:
        if not {*map(type, level)} <= _PLAIN:
            return None
        if len(data) > limits.string_bytes:
            texts = (item for item in level if type(item) is str)
            if any(len(text.encode()) > limits.string_bytes for text in texts):
                return None
        level = [item for array in level if type(array) is list for item in array]
    return document if type(document) is list else None


def decode(
    data: bytes,
    decoder: msgspec.msgpack.Decoder[T],
    what: str,
    limits: Limits = DEFAULT_LIMITS,
    *,
    walked: bool = False,
) -> T:
    """Decode a positional record by its declared type; fields behind the declared ones are skipped.

    Args:
        data: the msgpack bytes; their length is the caller's to check first.
        decoder: of the type; the texts and arrays in it are the caller's to compare with the
            limits, and where `data` may be more than `limits.document_bytes`, it is the type that
            bounds what is made of them.
        what: what they are, for error messages.
        limits: bounds for depth and for arrays in all.
        walked: it is, or was a member of, what this function has decoded before.

    Raises:
        FormatError: not such a record.
        LimitExceeded: nested or long beyond the limits.
    """
    small = len(data) <= limits.document_bytes
    if small and (limits.depth < DEFAULT_LIMITS.depth or _array_counter(data, limits) is not None):
        unpack(data, what, limits)
    try:
        # The decoder allocates what an array declares, eight bytes a member.  After this walk each
        # has its member.
        if not walked:
            _WALK.decode(data)
        return decoder.decode(data)
    except MSGSPEC_ERRORS as error:
        # Whether it is beyond a limit, or has a map in it, is more worth saying than which field
        # comes first.
        got = _got(unpack(data, what, limits), str(error)) if small else ""
        raise FormatError(f"{what}: {error}{got}", what=what) from error


def decode_each(
    members: Sequence[bytes],
    decoder: msgspec.msgpack.Decoder[T],
    what: str,
    limits: Limits,
    *,
    open_ended: bool,
) -> list[T]:
    """Decode small records of one type, each of which `decode` and, unless it is open-ended,
    `check_canonical` would let through.

    Args:
        members: the msgpack bytes of each; their lengths and number are the caller's to check
            first.
        decoder, what, limits: as for `decode`.
        open_ended: further fields, which a newer minor version added, are skipped.

    Raises:
        FormatError, LimitExceeded: as `decode` and `check_canonical`.
    """
    try:
        records = [*map(decoder.decode, members)]
    except MSGSPEC_ERRORS:
        records = [
            decode(member, decoder, what, limits) for member in members
        ]  # which says what is wrong
    # All at once: whatever is encoded already stays as it is.
    if not open_ended and pack(records) != pack([*map(msgspec.Raw, members)]):
        for member, record in zip(members, records, strict=True):
            check_canonical(member, record, what)
    return records


class SchemaRow(Struct, array_like=True, frozen=True, gc=False):
    """How any part of a manifest begins."""

    schema: Count


_SCHEMA = msgspec.msgpack.Decoder(SchemaRow)


def schema_of(data: bytes, what: str, limits: Limits) -> int:
    """Return the schema of a part of a manifest; raises as `decode`."""
    return decode(data, _SCHEMA, what, limits).schema


def version_fix(got: int, known: int) -> str:
    """Return what to do about something of another version than the one that is read."""
    return "record or pack its kernels again" if got < known else "upgrade triton-bundler"


def array_length(data: bytes) -> int:
    """Return how many members an array declares to have, 0 for anything else; nothing is decoded
    for it.
    """
    if data[0] in _ARRAY_16_32:
        return int.from_bytes(data[1 : _ARRAY_16_32[data[0]]])
    return data[0] & 0x0F if data[0] & 0xF0 == _FIXED_ARRAY else 0


def _got(document: Any, message: str) -> str:
    """Return what stands at the place that msgspec's message names, unless it says so itself."""
    if ", got " in message:
        return ""
    for position in map(int, re.findall(r"\[(\d+)\]", message.rpartition(" at `$")[2])):
        document = document[position]
    if isinstance(document, (str, bytes)):
        return (
            f", got {document!r:.80} of"
            f" {count(len(document), 'character' if isinstance(document, str) else 'byte')}"
        )
    return (
        f", got {count(len(document), 'field')}"
        if isinstance(document, list)
        else f", got {document!r:.80}"
    )


def check_canonical(data: bytes, record: object, what: str) -> None:
    """Raise `FormatError` unless a decoded record encodes to the bytes that it came from."""
    if not is_canonical(data, record):
        raise FormatError(
            f"{what}: expected the fields of this version and no other, and each number in its"
            f" shortest form, got {count(len(data), 'byte')} that say the same otherwise",
            what=what,
        )


def check_texts(texts: Iterable[str], what: str, limits: Limits) -> None:
    """Raise `LimitExceeded` when the longest of these texts is over the limit."""
    texts = [*texts]
    if _BYTES_PER_CHARACTER * max(map(len, texts), default=0) <= limits.string_bytes:
        return
    limits.check(
        "string_bytes", max((len(text.encode()) for text in texts), default=0), f"{what}: a string"
    )


def inside(limits: Limits, arrays: int) -> Limits:
    """Return the limits for a member that lies inside so many arrays."""
    return limits if not arrays else _inside(limits, arrays)


@functools.lru_cache(maxsize=16)
def _inside(limits: Limits, arrays: int) -> Limits:
    return msgspec.structs.replace(limits, depth=limits.depth - arrays)


def split(data: bytes, members: int) -> list[bytes] | None:
    """Return the packed members of an array, undecoded; None when it is not an array of so many, or
    not small.

    It checks nothing but where each member ends: whoever decodes a member has to `unpack` it.
    """
    if len(data) > MAX_SPLIT_BYTES:
        return None
    try:
        return [bytes(member) for member in _splitter(members).decode(data)]
    except MSGSPEC_ERRORS:
        return None


@functools.lru_cache(maxsize=16)
def _splitter(members: int) -> msgspec.msgpack.Decoder[tuple[msgspec.Raw, ...]]:
    # Of a fixed length: for any other the decoder would allocate what the array declares.
    return msgspec.msgpack.Decoder(tuple[(msgspec.Raw,) * members])  # type: ignore[misc]


def _typed(error: Exception, what: str, limits: Limits) -> FormatError:
    import msgpack

    text = str(error)
    if isinstance(error, (msgpack.StackError, RecursionError)):
        return LimitExceeded(
            f"{what}: nested deeper than {limits.depth} arrays", what=what, limit=limits.depth
        )
    if text.endswith(" arrays") and text.startswith("more than"):
        return LimitExceeded(
            f"{what}: {text}", what=what, limit=ARRAYS_PER_ITEM * limits.array_items
        )
    # msgpack reports an exceeded max_*_len as a ValueError whose text names the bound.
    for name, limit in (
        ("str", limits.string_bytes),
        ("bin", limits.manifest_bytes),
        ("array", limits.array_items),
    ):
        if f"max_{name}_len({limit})" in text:
            return LimitExceeded(f"{what}: over a limit ({text})", what=what, limit=limit)
    return FormatError(f"{what}: not valid positional msgpack ({text})", what=what)


class _ArrayCounter:
    """Lets so many arrays through, as msgpack's hook for each that it has decoded."""

    def __init__(self, limit: int) -> None:
        self._limit = self._left = limit

    def __call__(self, array: list[Any]) -> list[Any]:
        self._left -= 1
        if self._left < 0:
            raise ValueError(f"more than {self._limit} arrays")
        return array


def _array_counter(data: bytes, limits: Limits) -> _ArrayCounter | None:
    """Return a hook where there may be too many arrays; it doubles the time of decoding, so only
    there.
    """
    limit = ARRAYS_PER_ITEM * limits.array_items
    if len(data) <= limit or len(data) - len(data.translate(None, _ARRAY_HEADS)) <= limit:
        return None
    return _ArrayCounter(limit)


def _refuse_map(pairs: Any) -> Any:
    raise ValueError(f"a map of {count(len(pairs), 'member')}, expected arrays only")


def _check_depth(root: Any, what: str, depth: int) -> None:
    level = [root]
    for _ in range(depth + 1):
        level = [item for array in level if type(array) is list for item in array]
        if not level:
            return
    raise LimitExceeded(f"{what}: nested deeper than {depth} arrays", what=what, limit=depth)


def expect(value: Any, kind: type[T], what: str) -> T:
    """Return `value` if it is exactly of type `kind` (a bool is no int), else raise
    `FormatError`.
    """
    if type(value) is not kind:
        raise FormatError(
            f"{what}: expected {kind.__name__}, got {type(value).__name__}",
            what=what,
            expected=kind.__name__,
            got=type(value).__name__,
        )
    return value


def pair(data: Any, what: str) -> tuple[str, Any]:
    """Return the members of a positional record of a text and anything, as `fields(data, what, str,
    object)` does.
    """
    # Of the records in a manifest most are these.
    if type(data) is list and len(data) == _PAIR and type(data[0]) is str:
        return data[0], data[1]
    first, second = fields(data, what, str, object)
    return first, second


def fields(data: Any, what: str, *kinds: Any, open_ended: bool = False) -> list[Any]:
    """Return the members of a positional record, each checked against its type.

    Args:
        data: the decoded array.
        what: the name of the record.
        kinds: one type, or tuple of types, a field; `object` admits anything; negative integers are
            refused.
        open_ended: further fields, which a newer minor version added, are ignored.
    """
    array = expect(data, list, what)
    if len(array) < len(kinds) or (len(array) > len(kinds) and not open_ended):
        raise FormatError(
            f"{what}: expected {len(kinds)} fields, got {len(array)}",
            what=what,
            expected=len(kinds),
            got=len(array),
        )
    for position, (value, kind) in enumerate(zip(array, kinds, strict=False)):
        got = type(value)
        fits = got is kind or (type(kind) is tuple and got in kind)
        if kind is object or (fits and (got is not int or value >= 0)):
            continue
        names = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        raise FormatError(
            f"{what}: field {position} should be {names}, got {value!r:.80}",
            what=what,
            expected=names,
            got=got.__name__,
        )
    return array[: len(kinds)]
