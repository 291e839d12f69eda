# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a container is refused with the right error, one test a malformation, and a
newer version is read as far as allowed.
"""

import msgpack
import pytest
import zstandard

from bundler.errors import (
    DigestMismatch,
    FormatError,
    LimitExceeded,
    NotFound,
    TruncatedBundle,
    UnsupportedVersion,
)
from bundler.format import names
from bundler.format.bundle import Bundle
from bundler.format.digest import sha256
from bundler.format.limits import Limits


@pytest.fixture
def parts(build):
    """A bundle with every kind of entry, taken apart."""
    return build.Parts.of(build.several().to_bytes())


def refused(data, kind, *words, limits=None):
    """Assert that opening fails with exactly this class and that its message has these words;
    return the error.
    """
    with pytest.raises(kind) as caught:
        Bundle.from_bytes(data, *([limits] if limits else [])).close()
    assert type(caught.value) is kind
    for word in words:
        assert str(word) in str(caught.value)
    return caught.value


def test_an_empty_file_is_no_bundle():
    """An empty file is refused: expected the magic, got nothing."""
    error = refused(b"", FormatError, "not a bundle", r"\x89TBNDL", "got b''")
    assert (error.expected, error.got) == (b"\x89TBNDL\r\n", b"")


@pytest.mark.parametrize("data", [b"hello", b"PK\x03\x04" + b"\0" * 500, b"\0" * 4096, b"{}"])
def test_garbage_is_no_bundle(data):
    """Bytes of something else are refused, saying what they begin with."""
    assert refused(data, FormatError, "not a bundle", repr(data[:8])).got == data[:8]


@pytest.mark.parametrize("position", range(8))
def test_a_wrong_magic_is_no_bundle(parts, position):
    """A file that differs in one byte of the magic is refused."""
    data = bytearray(parts.join())
    data[position] ^= 0x20
    refused(bytes(data), FormatError, "not a bundle")


def test_line_endings_that_a_transfer_changed_are_noticed(parts):
    """A file whose line endings were changed as text is no bundle."""
    refused(parts.join().replace(b"\r\n", b"\n"), FormatError, "not a bundle")


def test_a_newer_major_is_refused(parts):
    """A bundle of the next major version is refused, naming both versions."""
    parts.major = 3
    error = refused(parts.join(), UnsupportedVersion, "3.0", "expected 2.x", "upgrade")
    assert (error.got, error.expected) == ((3, 0, 0), (2, 0, 0))


@pytest.mark.parametrize("major", [0, 1])
def test_an_older_major_is_refused(parts, major):
    """No release wrote these; the message says how to get a bundle that can be read."""
    parts.major = major
    error = refused(parts.join(), UnsupportedVersion, f"{major}.0", "expected 2.x", "pack", "again")
    assert (error.got, error.expected) == ((major, 0, 0), (2, 0, 0))


def test_content_of_another_schema_is_refused(build, parts):
    """Whatever the header says, content is read by its own number."""
    document = parts.document()
    document[0] = 1
    parts.put(document)
    error = refused(parts.join(), UnsupportedVersion, "schema 1, expected 2", "pack", "again")
    assert (error.got, error.expected) == (1, 2)


@pytest.mark.parametrize("bit", [0, 7, 31])
def test_an_unknown_incompatible_flag_is_refused(parts, bit):
    """Any unknown incompatible flag refuses the bundle, naming the flags."""
    parts.flags = (1 << bit, 0, 0)
    refused(parts.join(), UnsupportedVersion, hex(1 << bit))


@pytest.mark.parametrize("bit", [0, 31])
def test_an_unknown_read_only_flag_is_read_and_never_written(build, parts, tmp_path, bit):
    """A bundle with an unknown read-only flag is read; saving it, or what was made from it, is
    refused.
    """
    parts.flags = (0, 1 << bit, 0)
    with Bundle.from_bytes(parts.join()) as bundle:
        assert build.read_all(bundle) == build.read_all(build.several())
        assert not bundle.writable
        for made in (bundle, bundle.select(keep="launch")):
            with pytest.raises(UnsupportedVersion, match="read but not write"):
                made.save(tmp_path / "b.tbundle")
            with pytest.raises(UnsupportedVersion, match="read but not write"):
                made.to_bytes()
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_compatible_flag_is_ignored(build, parts):
    """A bundle with all compatible flags set is read and may be written."""
    parts.flags = (0, 0, 0xFFFFFFFF)
    with Bundle.from_bytes(parts.join()) as bundle:
        assert bundle.to_bytes() == build.several().to_bytes()


def extend(document):
    """Put a further field behind each open record of a content."""
    *_, targets, toolchains, specs, _, _, kernels, tuning, helpers, opaque, records = document
    placed = [*tuning, *helpers, *opaque]
    inner = [*targets, *toolchains, *specs, *(kernel[6] for kernel in kernels)]
    for record in (document, *inner, *kernels, *placed, *records):
        record.append(["something", "new"])


def extended(build, minor):
    """Return a bundle of a minor version with further fields wherever a newer one may have them."""
    parts = build.Parts.of(build.several().to_bytes())
    parts.minor = minor
    document, observed = parts.document(), parts.document(build.OBSERVED)
    document[-1] = [["k", [["a", "b"]], [["X", ["int", 1]]], "autotune"]]
    observed[1] = [[build.key("A"), [0], ["triton"], [["ttir", 1, "new"]], "new"]]
    observed[2] = [[["python", "3.11", "new"]]]
    extend(document)
    parts.put(document)
    parts.put([*observed, "new"], build.OBSERVED)
    for section in parts.sections:
        section.more = ["new", 1]
    parts.sections.append(build.Part.stored(99, b"a section of a kind that nobody knows yet"))
    return parts


def test_further_fields_of_a_newer_minor_are_ignored(build, tmp_path):
    """A bundle of a newer minor version is read without its further fields and sections, and is not
    written again.
    """
    parts = extended(build, 7)
    with Bundle.from_bytes(parts.join()) as bundle:
        assert build.read_all(bundle) == build.read_all(build.several())
        assert bundle.digest == f"sha256:{sha256(parts.find(build.CONTENT).data).hex()}"
        assert bundle.observed.kernels[build.key("A")].times_us == (("ttir", 1),)
        assert [record.found_by for record in bundle.tuning_records] == ["autotune"]
        bundle.verify()
        with pytest.raises(UnsupportedVersion, match="newer version"):
            bundle.save(tmp_path / "b.tbundle")


def test_further_fields_at_our_minor_are_refused(build):
    """The same fields in a bundle of our own minor version are an error, which says how many were
    expected.
    """
    refused(extended(build, 0).join(), FormatError, "section", "expected 8 fields, got 10")


def test_missing_fields_are_refused_at_any_minor(build, parts):
    """A record that lacks a field is an error in a newer minor version too."""
    parts.minor = 3
    document = parts.document()
    content = build.Tables(document)
    content.kernels[0].pop()
    parts.put(document)
    fields = len(content.kernels[0])
    refused(
        parts.join(), FormatError, "content", f"at least length {fields + 1}, got {fields}", "[0]"
    )


def test_unknown_sections_and_signatures_are_ignored(build, parts):
    """Sections of kind 18, and of kinds that nobody knows, change neither the digest nor what is
    read.
    """
    digest = build.several().digest
    parts.sections.insert(0, build.Part.stored(build.SIGNATURES, b"\xff signature"))
    parts.sections.append(build.Part.stored(build.SIGNATURES, b""))
    parts.sections.append(build.Part.stored(77, b"?"))
    for section in parts.sections:
        section.prefix = [position + 1 for position in section.prefix]
    with Bundle.from_bytes(parts.join()) as bundle:
        assert bundle.digest == digest
        bundle.verify()
        assert build.read_all(bundle) == build.read_all(build.several())


def test_a_damaged_header_or_table_is_noticed(parts):
    """A checksum that differs is refused, naming both digests."""
    error = refused(
        parts.join(checksum=b"\x01" * 32), DigestMismatch, "header and table of contents"
    )
    assert error.expected == f"sha256:{'01' * 32}"
    assert error.got != error.expected


@pytest.mark.parametrize("where", [1, 4])
def test_a_hole_is_refused(parts, where):
    """Bytes between two sections that belong to none are refused, naming both offsets."""
    parts.sections[where].offset = 72 + sum(len(s.data) for s in parts.sections[:where]) + 1
    refused(
        parts.join(),
        FormatError,
        f"section {where} begins at {parts.sections[where].offset}",
        "a hole or overlap",
    )


def test_a_hole_before_the_table_is_refused(parts):
    """Bytes between the last section and the table are refused."""
    refused(parts.join(gap=b"\0"), FormatError, "sections end at", "a hole or overlap")


def test_overlapping_sections_are_refused(parts):
    """Two sections over the same bytes are refused."""
    parts.sections[1].offset = 72
    refused(parts.join(), FormatError, "section 1 begins at 72", "a hole or overlap")


def test_sections_over_the_header_are_refused(parts):
    """A section that begins inside the header is refused."""
    parts.sections[0].offset = 0
    refused(parts.join(), FormatError, "section 0 begins at 0, expected 72")


@pytest.mark.parametrize("tail", [b"\0", b"\n", b"PK\x05\x06" + b"\0" * 18])
def test_trailing_bytes_are_refused(parts, tail):
    """Bytes after the table are refused, saying how many."""
    refused(
        parts.join(tail=tail),
        FormatError,
        f"{len(tail)} byte{'s' if len(tail) > 1 else ''} after the end",
    )


def test_a_table_over_the_limit_is_refused_before_it_is_read(parts):
    """A table that declares to be huge is refused by its size alone."""
    refused(
        parts.join(table_size=2**63), LimitExceeded, "table of contents", 2**63, "document_bytes"
    )


def test_a_table_beyond_the_end_means_truncated(parts):
    """A table that should reach beyond the end of the file says that the file was cut."""
    data = parts.join(table_size=10_000)
    error = refused(data, TruncatedBundle, "table of contents", f"it has {len(data)}")
    assert error.got == len(data) < error.expected


@pytest.mark.parametrize("missing", [16, 17])
def test_a_missing_manifest_is_refused(parts, missing):
    """A bundle without content or observations is refused."""
    parts.sections.remove(parts.find(missing))
    refused(parts.join(), FormatError, f"expected one section of kind {missing}, got 0")


def test_a_second_manifest_is_refused(parts, build):
    """Two content sections are refused: which would count?"""
    parts.sections.append(parts.find(build.CONTENT))
    refused(parts.join(), FormatError, "expected one section of kind 16, got 2")


def test_a_blob_stored_twice_is_refused(parts, build):
    """A blob that lies in two sections is refused, naming section and blob."""
    first = parts.sections[0]
    blob = first.blobs[0]
    with Bundle.from_bytes(parts.join()) as bundle:
        data = bundle.blobs.read_blob(bundle.content.blobs[blob][0])
    parts.sections.append(build.Part.stored(1, data, [blob]))
    refused(
        parts.join(),
        FormatError,
        f"section {len(parts.sections) - 1}: blob {blob} is unknown or stored twice",
    )


def test_a_missing_blob_is_refused(parts):
    """A blob that lies in no section is refused."""
    parts.sections = [section for section in parts.sections if section.kind != 5]
    refused(parts.join(), FormatError, "2 blobs of the manifest are in no section")


@pytest.mark.parametrize("blob", [-1, 999, 2**63])
def test_a_blob_that_is_not_in_the_table_is_refused(parts, blob):
    """A section that names a blob beyond the blob table is refused."""
    parts.sections[0].blobs[0] = blob
    refused(parts.join(), FormatError, f"blob {blob} is unknown")


def test_blobs_must_fill_their_section(parts):
    """A section whose blobs have other sizes in sum than its raw bytes is refused, naming both."""
    section = parts.find(3)
    section.data, section.raw = section.data + b"!", section.raw + 1
    refused(
        parts.join(), FormatError, f"blobs of {section.raw - 1} bytes in a frame of {section.raw}"
    )


@pytest.mark.parametrize("codec", [2, 7])
def test_an_unknown_codec_is_refused(parts, codec):
    """A codec that is not in the specification is refused."""
    parts.sections[0].codec = codec
    refused(parts.join(), FormatError, f"section 0: codec {codec}")


def test_a_stored_section_has_one_size(parts):
    """A section that is not compressed and declares two sizes is refused."""
    section = parts.find(3)
    section.raw += 1
    refused(parts.join(), FormatError, f"codec 0 with sizes {section.raw - 1}, {section.raw}")


@pytest.mark.parametrize(
    ("prefix", "position"),
    [([2], 2), ([3], 2), ([99], 2), ([-1], 2), ([1], 2), ([2**62], 2)],
    ids=["itself", "forward", "beyond", "negative", "tuning", "huge"],
)
def test_a_prefix_must_be_an_earlier_kernel_section(parts, prefix, position):
    """A prefix that points to the section itself, forward, or to a section without kernels, is
    refused.
    """
    assert [section.kind for section in parts.sections[:3]] == [1, 3, 2]
    parts.sections[position].prefix = prefix
    refused(
        parts.join(),
        FormatError,
        f"section {position}: its prefix is not a list of earlier kernel sections",
    )


def test_a_prefix_of_a_prefix_is_refused(parts):
    """A section that has a prefix cannot be one: decoding stays one step deep."""
    parts.sections[2].prefix = [0]
    refused(
        parts.join(), FormatError, "section 4: its prefix is not a list of earlier kernel sections"
    )


def test_a_prefix_over_the_window_is_refused(parts):
    """A prefix that is repeated until it is larger than the window limit is refused."""
    opaque = parts.find(5)
    opaque.prefix = [0] * 1000
    raw = 1000 * parts.sections[0].raw
    error = refused(parts.join(), LimitExceeded, "prefix", limits=Limits(window_bytes=raw - 1))
    assert str(raw - 1) in error.message


def reading_fails(data, kind, *words, limits=None):
    """Assert that reading some blob fails with exactly this class; opening may fail too."""
    with (
        pytest.raises(kind) as caught,
        Bundle.from_bytes(data, *([limits] if limits else [])) as bundle,
    ):
        bundle.verify()
    assert type(caught.value) is kind
    for word in words:
        assert str(word) in str(caught.value)


def test_a_frame_that_declares_another_size_is_refused(build, parts):
    """A frame whose declared size is not the one in the table is refused before it is decoded,
    naming both.
    """
    section = parts.find(2)
    section.data = build.compressed(b"a" * (1 << 20))
    reading_fails(parts.join(), FormatError, "declares 1048576 bytes", f"the table {section.raw}")


def test_a_frame_without_a_size_is_refused(build, parts):
    """A frame that does not declare its size is refused."""
    section = parts.find(2)
    raw = zstandard.decompress(section.data)
    section.data = build.compressed(raw, write_content_size=False)
    reading_fails(parts.join(), FormatError, "declares", f"the table {section.raw}")


def test_a_frame_without_checksum_is_refused(build, parts):
    """A frame without a checksum is refused."""
    section = parts.find(2)
    section.data = build.compressed(zstandard.decompress(section.data), write_checksum=False)
    reading_fails(parts.join(), FormatError, "checksum: False")


def test_two_frames_in_a_section_are_refused(build, parts):
    """A section has exactly one frame: bytes behind it are refused."""
    section = parts.find(2)
    section.data += build.compressed(b"more")
    reading_fails(parts.join(), FormatError, "section at offset")


@pytest.mark.parametrize(
    "data", [b"", b"\0", b"not zstd at all", b"\x28\xb5\x2f\xfd", b"\x50\x2a\x4d\x18\x01\0\0\0x"]
)
def test_a_section_that_is_no_frame_is_refused(parts, data):
    """Bytes that are no zstd frame, or a skippable one, are refused."""
    parts.find(2).data = data
    reading_fails(parts.join(), FormatError, "section at offset")


def test_a_frame_with_other_bytes_is_noticed(build, parts):
    """A frame of the right size with other bytes in it is found out by the digest of its blobs."""
    section = parts.find(2)
    section.data = build.compressed(b"x" * section.raw)
    reading_fails(parts.join(), DigestMismatch, "blob", "expected sha256:", "got sha256:")


def test_a_frame_that_was_made_without_its_prefix_is_noticed(build, parts):
    """An opaque frame that needs a prefix and does not name it cannot be read."""
    section = parts.find(5)
    section.prefix = []
    with pytest.raises((FormatError, DigestMismatch)), Bundle.from_bytes(parts.join()) as bundle:
        bundle.verify()


def test_a_damaged_section_is_noticed_and_others_are_read(build, parts):
    """Damage in one section raises when that is read, and the kernels in another are read all the
    same.
    """
    section = parts.find(2)
    section.digest = sha256(section.data)
    section.data = section.data[:-1] + bytes([section.data[-1] ^ 1])
    with Bundle.from_bytes(parts.join()) as bundle:
        kernel = bundle.kernels[0]
        assert bundle.read(kernel.binary).startswith(b"\x7fELF")
        with pytest.raises(DigestMismatch, match="section at offset"):
            bundle.read(kernel.artifact("k.ttir"))


def test_a_bomb_that_declares_itself_is_refused(build, parts):
    """A section that would expand to more than a frame may have is refused by what the
    table says.
    """
    section = parts.find(2)
    section.raw = 65 << 20
    refused(parts.join(), LimitExceeded, "section 2", 65 << 20, 64 << 20)


def test_a_bomb_by_ratio_is_refused(build, parts):
    """A section over 1 MiB that would expand more than 256 times is refused."""
    section = parts.find(2)
    section.raw, section.data = 32 << 20, build.compressed(b"\0" * (32 << 20))
    refused(
        parts.join(),
        LimitExceeded,
        "section 2",
        f"{len(section.data)} bytes would expand to {32 << 20}",
        "256 times",
    )


def test_a_bomb_in_the_manifest_is_refused(build, parts):
    """Content that expands beyond its limit is refused before it is decoded."""
    section = parts.find(build.CONTENT)
    section.codec, section.raw, section.data = 1, 1 << 30, build.compressed(b"\x90" * (1 << 20))
    refused(parts.join(), LimitExceeded, 1 << 30, 64 << 20)


def test_a_bomb_that_lies_about_its_size_is_refused(build, parts):
    """A frame that declares less than it holds is refused."""
    section = parts.find(build.CONTENT)
    frame = bytearray(build.compressed(b"\x90" * (4 << 20)))
    size_at = frame.index((4 << 20).to_bytes(4, "little"))
    frame[size_at : size_at + 4] = (64).to_bytes(4, "little")
    section.codec, section.raw, section.data = 1, 64, bytes(frame)
    refused(parts.join(), FormatError, "section at offset")


def test_a_window_over_the_limit_is_refused(parts):
    """A frame that wants a larger window than the limit is refused before it is decoded, naming
    both.
    """
    section = parts.find(2)
    descriptor = 0x44  # a checksum, and a content size of two bytes, to which a reader adds 256
    window = (26 - 10) << 3
    section.data = (
        b"\x28\xb5\x2f\xfd"
        + bytes([descriptor, window])
        + (section.raw - 256).to_bytes(2, "little")
        + b"\0" * 20
    )
    assert zstandard.get_frame_parameters(section.data).window_size == 64 << 20
    reading_fails(parts.join(), LimitExceeded, "zstd window", 64 << 20, 32 << 20)


@pytest.mark.parametrize("stored", [0, 1, 31, 33])
def test_a_digest_of_another_length_never_matches(parts, stored):
    """A section whose digest has not 32 bytes cannot be read."""
    section = parts.find(2)
    section.digest = sha256(section.data).ljust(33, b"\0")[:stored]
    reading_fails(parts.join(), DigestMismatch, "section at offset")


@pytest.mark.parametrize(
    ("table", "kind"),
    [
        (b"", FormatError),
        (b"\xc1", FormatError),
        (b"\x80", FormatError),
        (b"\x81\x01\x02", FormatError),
        (b"\xc0", FormatError),
        (b"\x91\x80", FormatError),
        (b"\x90\x90", FormatError),
        (b"\x91\xd4\x05\x00", FormatError),
        (b"\xdd\xff\xff\xff\xff", FormatError),
        (b"\x91" * 40 + b"\x90", LimitExceeded),
        (b"\x91" * 5000 + b"\x90", LimitExceeded),
        (b"\xdd\x00\xff\xff\xff" * 2000, FormatError),
        (b"\x91\xdb\x00\x00\x20\x00" + b"a" * 0x2000, LimitExceeded),
        (b"\x91\xdb\x7f\xff\xff\xff", FormatError),
        (b"\x91\xa1\xff", FormatError),
    ],
    ids=[
        "empty",
        "unused",
        "map",
        "full map",
        "nil",
        "map inside",
        "two",
        "extension",
        "long array",
        "deep",
        "very deep",
        "long and deep",
        "long text",
        "cut text",
        "not text",
    ],
)
def test_a_table_that_is_no_positional_msgpack_is_refused(parts, table, kind):
    """A table with maps, extensions, too deep or too long, or not msgpack at all, is refused."""
    refused(parts.join(table=table), kind, "table of contents")


WRONG = [
    (position, wrong)
    for position in range(8)
    for wrong in (None, True, 1.5, -1, "x", b"x", 7, [None], [True])
    if wrong != (b"x" if position == 5 else 7) or position > 5
]


@pytest.mark.parametrize(("position", "wrong"), WRONG)
def test_a_section_with_a_wrong_type_is_refused(parts, position, wrong):
    """Each field of a section has one type, and any other is refused."""
    table = msgpack.unpackb(parts.join()[-_table_size(parts) :])
    table[0][position] = wrong
    refused(parts.join(table=msgpack.packb(table)), FormatError, "section")


def _table_size(parts):
    return len(parts.join()) - 72 - sum(len(section.data) for section in parts.sections)


def test_limits_can_be_changed(build):
    """A bundle over a limit is read by whoever raises it, and refused by whoever lowers it; the
    message names the way out.
    """
    data = build.several().to_bytes()
    for name in (
        "manifest_bytes",
        "kernels",
        "files_per_kernel",
        "file_bytes",
        "kernel_bytes",
        "raw_bytes",
        "depth",
        "string_bytes",
        "frame_bytes",
    ):
        with pytest.raises(LimitExceeded) as caught:
            Bundle.from_bytes(data, Limits(**{name: 1}))
        assert caught.value.limit == 1
    Bundle.from_bytes(data, Limits(ratio=1, ratio_applies_above_bytes=1 << 30)).close()
    with pytest.raises(LimitExceeded, match="more than 1 times"):
        Bundle.from_bytes(data, Limits(ratio=1, ratio_applies_above_bytes=0))


def test_reading_what_is_not_there_is_not_found(build):
    """A blob or file of another bundle is not found."""
    with Bundle.from_bytes(build.one("A").to_bytes()) as bundle:
        other = build.one("B", "other").kernels[0]
        with pytest.raises(NotFound, match=other.binary.digest):
            bundle.read(other.binary)
        with pytest.raises(NotFound, match=r"has no file 'other\.cubin'"):
            bundle.kernels[0].artifact("other.cubin")


def test_what_the_kinds_are_called():
    """A file's kind is its extension, `other` for one that nobody knows."""
    found = {
        name: names.artifact_kind(name)
        for name in ("k.cubin", "k.hsaco", "k.so", "k.dat", "@k.ttir", "k")
    }
    assert found == {
        "k.cubin": "cubin",
        "k.hsaco": "hsaco",
        "k.so": "so",
        "k.dat": "other",
        "@k.ttir": "ttir",
        "k": "other",
    }
