# SPDX-License-Identifier: Apache-2.0
"""Signatures in a bundle file: sections of kind 18, an envelope each, after all others.

`SignatureSections` reads them, `stored_digest` is what a signature names beside the content,
`write_signed` writes a copy of a file with other signatures.  `Bundle.signatures` and
`bundler/trust/signing.py` call them.  Nothing here says whether a signature is good.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, BinaryIO

from msgspec.structs import replace

from bundler.errors import ConfigError, LimitExceeded, UnsupportedVersion
from bundler.format import wire
from bundler.format.bundle_file import replace_file
from bundler.format.cached_properties import cached_property
from bundler.format.container import HEADER_BYTES, SIGNATURES, STORED, write_end
from bundler.format.digest import sha256
from bundler.format.frames import Section
from bundler.format.summary import count

if TYPE_CHECKING:
    from bundler.format.container import Container

# More of them, or larger ones, are no signatures that anybody needs.
MAX_ENVELOPES, MAX_ENVELOPE_BYTES = 64, 256 << 10


class SignatureSource:
    """Where the signatures of a bundle are; this one has none.

    Attributes:
        stored_digest: what a signature of a file names beside the digest of the content; empty
            where there is no file.
        doubt: what else speaks against it, for reports: that of a tag which was followed no
            signature counts.
    """

    stored_digest: str = ""
    doubt: str = ""

    def envelopes(self) -> tuple[bytes, ...]:
        """Return them, as they were put there by anybody."""
        return ()

    def write_copy(self, path: str | os.PathLike[str], envelopes: Sequence[bytes]) -> None:
        """Write a copy of the bundle's file with these signatures in place of those that it has.

        Raises:
            ConfigError: the bundle was not loaded from a file; save it first.
        """
        raise ConfigError(
            f"{os.fspath(path)}: signatures are put into files, and this bundle was not loaded from"
            " one; save it and load it"
        )

    def file_chunks(self) -> Iterator[bytes]:
        """Yield the bytes of the bundle's file in pieces, as they are in the file that is open.

        Raises:
            ConfigError: the bundle was not loaded from a file.
        """
        raise ConfigError(
            "the bytes of a file were asked for, and this bundle was not loaded from one; save it"
            " and load it"
        )


UNSIGNED = SignatureSource()


class SignatureSections(SignatureSource):
    """The signatures in an open bundle file, read and compared with their digests when somebody
    asks.

    They and everything else are read through one open file, whose table was read once: a file that
    is put in its place, or written over, changes nothing of what was judged without being found
    out.
    """

    def __init__(self, container: Container) -> None:
        self._container = container

    @cached_property
    def stored_digest(self) -> str:  # type: ignore[override]  # computed when it is asked for
        """What a signature of this file names beside the digest of the content."""
        return stored_digest(self._container.sections)

    def envelopes(self) -> tuple[bytes, ...]:
        """Return them.

        Raises:
            LimitExceeded: there are more than 64, or one is larger than 256 KiB.
            FormatError, DigestMismatch: one is damaged.
        """
        sections = [section for section in self._container.sections if section.kind == SIGNATURES]
        _check_bounds([section.raw_bytes for section in sections])
        return tuple(map(self._container.decoded, sections))

    def write_copy(self, path: str | os.PathLike[str], envelopes: Sequence[bytes]) -> None:
        """Write a copy of the file with these signatures, as `write_signed`."""
        write_signed(path, self._container, envelopes)

    def file_chunks(self) -> Iterator[bytes]:
        """Yield the bytes of the open file, whatever is at its path by now."""
        return self._container.chunks()


def stored_digest(sections: Iterable[Section]) -> str:
    """Return the digest of sections as they are stored, but for signatures: 64 hexadecimal
    digits.
    """
    rows = [
        [section.kind, section.codec, section.sha256]
        for section in sections
        if section.kind != SIGNATURES
    ]
    return sha256(wire.pack(rows)).hex()


def write_signed(
    path: str | os.PathLike[str], container: Container, envelopes: Sequence[bytes]
) -> None:
    """Write a copy of a bundle file with these signatures in place of those that it has.

    Every other section is copied as it is stored, so that content, digest and stored digest stay.

    Args:
        path: where to; may be the file that is open, which the copy replaces whole.
        container: the open file.
        envelopes: the signatures.

    Raises:
        UnsupportedVersion: the file is of a newer version, which says things in its table that
            would be lost.
        LimitExceeded: more than 64 signatures, or one of more than 256 KiB.
        DigestMismatch: the file is damaged.
        StoreFull, AccessDenied, NotFound: it could not be written; what was at `path` stays.
    """
    if container.newer_minor or container.read_only:
        raise UnsupportedVersion(
            f"{os.fspath(path)}: written by a newer version, whose table this one cannot write;"
            " sign it with that one"
        )
    _check_bounds([len(envelope) for envelope in envelopes])
    replace_file(path, lambda out: _write(out, container, envelopes))


def _write(out: BinaryIO, container: Container, envelopes: Sequence[bytes]) -> None:
    out.write(b"\0" * HEADER_BYTES)
    position = HEADER_BYTES
    rows: list[Section] = []
    # A prefix names sections by their place among all, which changes where signatures stood before
    # them.
    places: dict[int, int] = {}
    for number, section in enumerate(container.sections):
        if section.kind == SIGNATURES:
            continue
        places[number] = len(rows)
        out.write(container.stored(section))
        prefix = tuple(places[place] for place in section.prefix)
        rows.append(replace(section, offset=position, prefix=prefix))
        position += section.stored_bytes
    for envelope in envelopes:
        out.write(envelope)
        rows.append(
            Section(SIGNATURES, STORED, position, len(envelope), len(envelope), sha256(envelope))
        )
        position += len(envelope)
    write_end(out, rows, position, container.compatible_flags)


def _check_bounds(sizes: Sequence[int]) -> None:
    if len(sizes) > MAX_ENVELOPES:
        raise LimitExceeded(
            f"{count(len(sizes), 'signature')} in a bundle, expected at most {MAX_ENVELOPES}",
            got=len(sizes),
        )
    largest = max(sizes, default=0)
    if largest > MAX_ENVELOPE_BYTES:
        raise LimitExceeded(
            f"a signature of {count(largest, 'byte')}, expected at most {MAX_ENVELOPE_BYTES:,}",
            got=largest,
        )
