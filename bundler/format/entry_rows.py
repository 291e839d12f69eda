# SPDX-License-Identifier: Apache-2.0
"""The records that a manifest is made of, as types that msgspec decodes, and what becomes of each.

`content_tables` puts them together.  Every record is an array; a field that a newer minor version
added at its end is skipped, and `wire.check_canonical` refuses it where the version is known.
"""

# Annotations are real ones in this module: msgspec reads those of a struct that it decodes, and
# each that is a text is compiled for it.
import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta, Raw, Struct

from bundler.errors import FormatError
from bundler.format import names, wire
from bundler.format.entries import (
    Artifact,
    HelperLibrary,
    Kernel,
    Opaque,
    Target,
    Toolchain,
    TuningFile,
)
from bundler.format.limits import DEFAULT_LIMITS, Limits

# Who restores kernels looks neither at launch facts nor at tuning records.
if TYPE_CHECKING:
    from bundler.format.constant_values import Value
    from bundler.format.launch_spec import LaunchSpec, TuningRecord

Count = Annotated[int, Meta(ge=0)]
# Nearly every kernel has the same one: an empty list of tensor descriptors.
_VALUES_REMEMBERED = 256
_SMALL_VALUE_BYTES = 1024
_EMPTY_VALUES = frozenset({b"\x92\xa4list\x90", b"\x92\xa5tuple\x90"})
_NO_RECORDS = b"\x90"
NUMBERS_PER_SPAN = 3  # offset, place, style


class SchemaRow(Struct, array_like=True, frozen=True, gc=False):
    """How any part of a manifest begins."""

    schema: Count


_HEAD = msgspec.msgpack.Decoder(SchemaRow)


def schema_of(data: bytes, what: str, limits: Limits) -> int:
    """Return the schema of a part of a manifest; raises as `wire.decode`."""
    return wire.decode(data, _HEAD, what, limits).schema


def version_fix(got: int, known: int) -> str:
    """Return what to do about something of another version than the one that is read."""
    return "record or pack its kernels again" if got < known else "upgrade triton-bundler"


class Entries(Struct, frozen=True):
    """The entries of a content, and its blob table: raw digest and size (bytes) of every blob, by
    digest.

    The kernels may be `TableKernels`, which `Content` takes.
    """

    kernels: Iterable[Kernel]
    tuning_files: tuple[TuningFile, ...]
    helpers: tuple[HelperLibrary, ...]
    opaque: tuple[Opaque, ...]
    tuning_records: "tuple[TuningRecord, ...]"
    blobs: Sequence[tuple[bytes, int]]


class TargetRow(Struct, array_like=True, frozen=True, gc=False):
    """What a kernel's binary runs on."""

    backend: str
    arch: str
    warp_size: Count

    def texts(self) -> tuple[str, ...]:
        """Return its texts, whose lengths are to be checked."""
        return self.backend, self.arch

    def target(self) -> Target:
        """Return what it stands for."""
        return Target(self.backend, self.arch, self.warp_size)


class ToolchainRow(Struct, array_like=True, frozen=True, gc=False):
    """Who compiled a kernel."""

    release: str | None
    binary: str | None
    ptxas: str | None

    def texts(self) -> tuple[str, ...]:
        """Return its texts, whose lengths are to be checked."""
        return tuple(text for text in (self.release, self.binary, self.ptxas) if text is not None)

    def toolchain(self) -> Toolchain:
        """Return what it stands for."""
        return Toolchain(self.release, self.binary, self.ptxas)


class SpecRow(Struct, array_like=True, frozen=True, gc=False):
    """What a static launch needs; the tensor descriptors are a tagged value, still encoded."""

    entry: str | None
    num_warps: Count
    num_ctas: Count
    warp_size: Count
    shared_bytes: Count
    tmem_columns: Count | None
    global_scratch_bytes: Count | None
    global_scratch_align: Count | None
    profile_scratch_bytes: Count | None
    profile_scratch_align: Count | None
    cooperative: bool
    pdl: bool
    tensor_descriptors: Raw

    def spec(self, name: str) -> "LaunchSpec":
        """Return what it stands for; `name` is the entry point where the row names none."""
        from bundler.format.launch_spec import LaunchSpec

        return LaunchSpec(
            name if self.entry is None else self.entry,
            self.num_warps,
            self.num_ctas,
            self.warp_size,
            self.shared_bytes,
            self.tmem_columns,
            self.global_scratch_bytes,
            self.global_scratch_align,
            self.profile_scratch_bytes,
            self.profile_scratch_align,
            self.cooperative,
            self.pdl,
            value_of(bytes(self.tensor_descriptors)),
        )


def check_value(packed: bytes, limits: Limits, arrays: int) -> None:
    """Raise what `value_of` raises; nothing is decoded of the values that nearly every
    kernel has.
    """
    if packed not in _EMPTY_VALUES or limits != DEFAULT_LIMITS:
        value_of(packed, limits, arrays)


def value_of(packed: bytes, limits: Limits | None = None, arrays: int = 0) -> "Value":
    """Return an encoded value; with `limits`, checked where it lies inside so many arrays."""
    if len(packed) <= _SMALL_VALUE_BYTES:
        return _small_value(packed, limits, arrays)
    return _value(packed, limits, arrays)


def _value(packed: bytes, limits: Limits | None, arrays: int) -> "Value":
    # Packed alone it lies inside no array; wrapped, it may also be a scalar, which is refused as
    # such.
    bounds = () if limits is None else (wire.inside(limits, arrays - 1),)
    (data,) = wire.unpack(b"\x91" + packed, "value", *bounds)
    if not wire.encodes_to(data, packed):
        raise FormatError("value: expected each number in its shortest form")
    from bundler.format.constant_values import Value

    return Value.from_wire(data)


_small_value = functools.lru_cache(_VALUES_REMEMBERED)(_value)


def tuning_records(packed: Raw, limits: Limits, *, open_ended: bool) -> "tuple[TuningRecord, ...]":
    """Return the tuning records of a content, which lie in one array."""
    if bytes(packed) == _NO_RECORDS:
        return ()
    limits.check("document_bytes", len(bytes(packed)), "tuning records")
    # They are inside the content's own array.
    rows = wire.unpack(bytes(packed), "tuning records", wire.inside(limits, 1))
    if not open_ended and not wire.encodes_to(rows, bytes(packed)):
        raise FormatError("tuning records: expected each number in its shortest form")
    from bundler.format.launch_spec import TuningRecord

    return tuple(TuningRecord.from_wire(row, open_ended=open_ended) for row in rows)


def check_path(path: str, artifact: Artifact, what: str) -> None:
    """Raise `UnsafeName` or `FormatError` unless a path is safe and ends in its file's name."""
    if names.check_relative_path(path).rpartition("/")[2] != artifact.filename:
        raise FormatError(f"{what}: path {path!r} and file name {artifact.filename!r} differ")
