# SPDX-License-Identifier: Apache-2.0
"""Whether a device binary has lost its end, told by its headers."""

import struct

import pytest
import support

from bundler.format import device_elf

HEADER = struct.Struct("<4sBBB9xHHIQQQIHHHHHH")


def binary(sections, *, after=b"", at=None, row=64, more=0):
    """An ELF file: header, 100 bytes, a table of sections given as (kind, offset, size), and what
    follows it.
    """
    start = 164 if at is None else at
    table = b"".join(
        struct.pack("<4xI16xQQ24x", *section).ljust(row, b"\0") for section in sections
    )
    head = HEADER.pack(
        b"\x7fELF", 2, 1, 1, 2, 190, 1, 0, 0, start, 0, 64, 56, 0, row, len(sections) + more, 0
    )
    return head + bytes(100) + table + after


@pytest.mark.parametrize(
    ("data", "verdict"),
    [
        (binary([(1, 64, 100)]), None),
        (binary([(1, 64, 101)], after=b"x"), None),
        (binary([(1, 64, 165)], after=b""), "truncated"),
        (binary([(8, 164, 1 << 40)]), None),  # shared memory takes no room in the file
        (binary([(8, 1 << 40, 0)]), "truncated"),
        (binary([(1, 64, 100), (8, 100, 1 << 30), (1, 200, 200)], after=bytes(44)), None),
        (binary([(1, 64, 100), (8, 100, 1 << 30), (1, 200, 201)], after=bytes(44)), "truncated"),
        (binary([(1, 64, 100)] * 300), None),
        (binary([(1, 64, 100)] * 300, more=1), "truncated"),
        (binary([(1, 64, 100)], row=80), None),
        (binary([(1, 64, 245)], row=80), "truncated"),
        (binary([(1, 64, 100)], at=1 << 63), "truncated"),
        (binary([(1, (1 << 64) - 1, 1)]), "truncated"),
        (binary([]), None),
        (b"", "empty"),
        (b"\x7fEL", "not an ELF file"),
        (b"\x7fELF", "truncated"),
        (b"\x7fELF\x01", None),  # of 32 bits: nothing is known of it
        (b"\x7fELF\x02", "truncated"),
    ],
)
@pytest.mark.parametrize("kind", [bytes, memoryview])
def test_a_binary_is_as_long_as_its_headers_say(data, verdict, kind):
    assert device_elf.why_unusable(kind(data)) == verdict


def test_a_real_binary_is_unusable_at_any_shorter_length(compiled):
    """A cubin and an hsaco lose their end to a broken write; wherever that is, it is noticed."""
    for key in (
        compiled.keys_of("gelu_kernel")[0],
        next(k for k in compiled.keys if list((compiled.cache / k).glob("*.hsaco"))),
    ):
        suffix = ".hsaco" if list((compiled.cache / key).glob("*.hsaco")) else ".cubin"
        data = support.one(compiled.cache / key, suffix).read_bytes()
        assert device_elf.why_unusable(data) is None
        assert {device_elf.why_unusable(data[:size]) for size in range(64, len(data), 7)} == {
            "truncated"
        }
