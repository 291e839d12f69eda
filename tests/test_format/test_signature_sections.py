# SPDX-License-Identifier: Apache-2.0
"""Signatures travel in the file, and everything else in it stays as it was stored."""

from pathlib import Path

import pytest

from bundler.errors import (
    ConfigError,
    DigestMismatch,
    FormatError,
    LimitExceeded,
    UnsupportedVersion,
)
from bundler.format.bundle import Bundle
from bundler.format.signature_sections import MAX_ENVELOPE_BYTES, MAX_ENVELOPES, stored_digest

DATA = Path(__file__).parents[1] / "data" / "v2.0"
GOLDEN = [DATA / f"{name}.tbundle" for name in ("empty", "synthetic", "tuned", "triton-3.7.1")]
ENVELOPES = (b"one", b"", b"three" * 100)


@pytest.fixture
def parts(build):
    """A bundle with every kind of entry, taken apart."""
    return build.Parts.of(build.several().to_bytes())


def signed(path, envelopes, to):
    with Bundle.load(path) as bundle:
        bundle.signed.write_copy(to, envelopes)
    return to


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_a_signed_copy_is_the_same_bundle(path, tmp_path, independent):
    """Its signatures come back, digests stay, a stranger reads the same files, and without
    signatures the file is byte for byte the old one.
    """
    copy = signed(path, ENVELOPES, tmp_path / "copy.tbundle")
    with Bundle.load(path) as old, Bundle.load(copy) as new:
        assert (old.signatures, new.signatures) == ((), ENVELOPES)
        assert (new.digest, new.stored_digest, new.observed) == (
            old.digest,
            old.stored_digest,
            old.observed,
        )
        new.verify()
    assert independent.read(copy.read_bytes()) == independent.read(path.read_bytes())
    assert signed(copy, (), tmp_path / "bare.tbundle").read_bytes() == path.read_bytes()


def test_a_file_is_signed_in_its_place_and_again(tmp_path):
    """The open file is replaced whole; later signatures replace the earlier ones."""
    path = tmp_path / "b.tbundle"
    path.write_bytes(GOLDEN[-1].read_bytes())
    for envelopes in ((b"a",), (b"b", b"c")):
        signed(path, envelopes, path)
        with Bundle.load(path) as bundle:
            assert bundle.signatures == envelopes


def test_sections_of_strangers_keep_their_prefixes(build, parts, tmp_path):
    """Where signatures stood before what a prefix names, the copy's prefixes name the same
    sections.
    """
    parts.sections.insert(0, build.Part.stored(build.SIGNATURES, b"old"))
    parts.sections.append(build.Part.stored(77, b"?"))
    for section in parts.sections:
        section.prefix = [position + 1 for position in section.prefix]
    (tmp_path / "a").write_bytes(parts.join())
    with Bundle.load(signed(tmp_path / "a", (b"new",), tmp_path / "b")) as bundle:
        bundle.verify()
        assert bundle.signatures == (b"new",)
        assert build.read_all(bundle) == build.read_all(build.several())
        assert [section.kind for section in bundle.blobs.sections][-2:] == [77, build.SIGNATURES]


def test_the_stored_digest_covers_what_the_content_does_not(tmp_path):
    """Other observations, and another compression, give another one."""
    with Bundle.load(GOLDEN[-1]) as bundle:
        again = Bundle.from_bytes(bundle.to_bytes(level=1))
        rows = bundle.blobs.sections
        assert again.digest == bundle.digest
        assert (
            len(
                {
                    again.stored_digest,
                    bundle.stored_digest,
                    stored_digest(rows[:-1]),
                    stored_digest(rows[::-1]),
                }
            )
            == 4
        )
        assert bundle.select(target="cuda:1").stored_digest == ""
        assert bundle.select(target="cuda:1").signatures == ()


def test_a_bundle_that_is_written_anew_is_not_signed(tmp_path):
    """Its digest stays, and who signed the file said so of the file."""
    with Bundle.load(signed(GOLDEN[-1], (b"a",), tmp_path / "a")) as bundle:
        assert Bundle.from_bytes(bundle.to_bytes()).signatures == ()


def test_many_and_large_signatures_are_not_looked_at(build, parts, tmp_path):
    """Such a file is readable, and its signatures are refused; none such is written."""
    for many in ([b"s"] * (MAX_ENVELOPES + 1), [b"s" * (MAX_ENVELOPE_BYTES + 1)]):
        with pytest.raises(LimitExceeded, match="expected at most"):
            signed(GOLDEN[-1], many, tmp_path / "none")
        kept = list(parts.sections)
        parts.sections += [build.Part.stored(build.SIGNATURES, data) for data in many]
        with Bundle.from_bytes(parts.join()) as bundle:
            bundle.verify()
            with pytest.raises(LimitExceeded, match="expected at most"):
                bundle.signatures  # noqa: B018
        parts.sections[:] = kept
    assert not (tmp_path / "none").exists()


def test_a_damaged_signature_is_found_out(tmp_path):
    """By the digest in the table, before anybody decodes it."""
    path = signed(GOLDEN[-1], (b"envelope",), tmp_path / "a")
    path.write_bytes(path.read_bytes().replace(b"envelope", b"enveloqe"))
    with Bundle.load(path) as bundle, pytest.raises(DigestMismatch, match="section"):
        bundle.signatures  # noqa: B018


def test_what_cannot_be_signed_is_refused(build, parts, tmp_path):
    """A bundle without a file, a file of a newer version, and one that was damaged since it was
    opened; nothing is written.
    """
    with pytest.raises(ConfigError, match="save it"):
        build.several().signed.write_copy(tmp_path / "out", (b"a",))
    parts.flags = (0, 1, 0)
    (tmp_path / "newer").write_bytes(parts.join())
    with pytest.raises(UnsupportedVersion, match="newer version"):
        signed(tmp_path / "newer", (b"a",), tmp_path / "out")
    data = GOLDEN[-1].read_bytes()
    (tmp_path / "a").write_bytes(data)
    with Bundle.load(tmp_path / "a") as bundle:
        (tmp_path / "a").write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])
        with pytest.raises((DigestMismatch, FormatError)):
            bundle.signed.write_copy(tmp_path / "out", (b"a",))
    assert not (tmp_path / "out").exists()
