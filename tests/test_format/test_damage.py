# SPDX-License-Identifier: Apache-2.0
"""Any damage to a bundle gives a typed error or the bytes that were saved: never other bytes, never
another exception.
"""

import os
import re

import pytest

from bundler.errors import BundlerError, DigestMismatch, FormatError, TruncatedBundle
from bundler.format.bundle import Bundle

MUTATIONS = 3000


@pytest.fixture(scope="module")
def small(build):
    """A small bundle with a kernel and an opaque file that has a prefix: its bytes, and what is in
    it.
    """
    files = build.Files()
    kernel = files.kernel("A", facts_bytes=build.facts())
    binary = files.blobs[bytes.fromhex(kernel.binary.digest[7:])]
    bundle = files.bundle(kernel, files.opaque("o/x", binary * 3))
    return bundle.to_bytes(), build.read_all(bundle)


@pytest.fixture
def outcome(build, small):
    """Read everything from damaged bytes: the error, or None when all is as it was; other bytes
    fail the test.
    """

    def read(data):
        try:
            with Bundle.from_bytes(data) as bundle:
                found = build.read_all(bundle)
                bundle.verify()
        except BundlerError as error:
            return error
        assert found == small[1]
        return None

    return read


def test_the_small_bundle_is_worth_damaging(build, small, outcome):
    """The bundle under test is sound, has frames with and without a prefix, and is small."""
    parts = build.Parts.of(small[0])
    assert outcome(small[0]) is None
    assert [(part.kind, part.codec, part.prefix) for part in parts.sections if part.codec] == [
        (2, 1, []),
        (5, 1, [0, 1]),
        (16, 1, []),
    ]
    assert len(small[0]) < 1200


def test_a_bundle_cut_anywhere_is_refused_when_opened(small, outcome):
    """Cut at any byte, a bundle is refused with a typed error: no bundle when nothing is left,
    truncated otherwise.
    """
    for length in range(len(small[0])):
        error = outcome(small[0][:length])
        assert type(error) is (TruncatedBundle if length else FormatError), length
        if length:
            assert str(length) in error.message


def test_a_file_cut_while_it_is_open_is_refused(build, small, tmp_path):
    """A bundle file that somebody cuts while it is open gives a typed error, and the rest can be
    read.
    """
    path = tmp_path / "b.tbundle"
    path.write_bytes(small[0])
    with Bundle.load(path) as bundle:
        os.truncate(path, 100)
        with pytest.raises((TruncatedBundle, DigestMismatch)):
            build.read_all(bundle)


def test_no_flipped_bit_goes_unnoticed(small, outcome):
    """With any single bit flipped, all of the bundle is never read: a typed error says so."""
    data = bytearray(small[0])
    for position in range(len(data)):
        for bit in range(8):
            data[position] ^= 1 << bit
            assert outcome(bytes(data)) is not None, (position, bit)
            data[position] ^= 1 << bit
    assert bytes(data) == small[0]


def test_swapped_and_doubled_blocks_are_noticed(small, outcome):
    """Blocks that were swapped, repeated or zeroed, as broken disks and downloads do it, give a
    typed error.
    """
    data, size = small[0], 64
    for start in range(0, len(data) - 2 * size, size):
        one, two = data[start : start + size], data[start + size : start + 2 * size]
        for middle in (two + one, one + one + two, one, b"\0" * size + two):
            assert outcome(data[:start] + middle + data[start + 2 * size :]) is not None


@pytest.mark.slow
def test_mutations_give_only_typed_errors_within_bounds(run_tool, tmp_path):
    """Thousands of bundles, damaged or made by an attacker, with checksums made right, give only
    typed errors.

    The fuzzer reads, merges and restores them in processes whose memory and time are limited, and
    tells when a promise does not hold.
    """
    done = run_tool("fuzz bundle", "--count", MUTATIONS, "--seed", 3, "--keep", tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    outcomes = {
        name: int(count.replace(",", ""))
        for name, count in re.findall(r"^(\w+) +([\d,]+) +[\d.]+%$", done.stdout, re.M)
    }
    assert sum(outcomes.values()) == MUTATIONS
    # Some change nothing that is read, or something that may be anything; most are refused, in many
    # ways.
    assert 0 < outcomes["accepted"] < MUTATIONS // 3
    expected = {
        "FormatError",
        "DigestMismatch",
        "LimitExceeded",
        "TruncatedBundle",
        "UnsafeName",
        "MergeConflict",
    }
    assert expected <= outcomes.keys()
    assert list(tmp_path.iterdir()) == []
