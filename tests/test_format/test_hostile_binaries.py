# SPDX-License-Identifier: Apache-2.0
"""Device binaries whose headers say anything: every reader of them ends with what it looks for, or
with an error of ours.
"""

import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bundler.errors import BundlerError, FormatError
from bundler.format import device_elf
from bundler.format.entries import Target
from bundler.format.source_stripping import (
    constant_texts,
    debug_sections,
    source_traces,
    without_debug,
)
from bundler.lifecycle.binary_resources import read_resources
from bundler.runtime.launch.plan_builder import read_layout
from bundler.runtime.tuning.occupancy import usage_of

# Offsets and sizes at which something changes: the ends of what a call of C takes, of 64 bits, and
# of the binary.
PLACES = st.sampled_from(
    [0, 1, 63, 64, 65, 128, 2**31, 2**32, 2**63 - 64, 2**63 - 1, 2**63, 2**64 - 1]
)
COUNTS = st.sampled_from([0, 1, 2, 3, 64, 65535])
STRIDES = st.sampled_from([0, 1, 63, 64, 65, 65535])
READERS = {
    "sections": device_elf.sections,
    "section": lambda image: device_elf.section_named(image, b".nv.info"),
    "metadata": lambda image: device_elf.amd_kernel(image, "k"),
    "debug": debug_sections,
    "without debug": without_debug,
    "texts": constant_texts,
    "traces": source_traces,
    "resources": lambda image: read_resources(image, "k"),
    "layout": lambda image: read_layout(image, "k"),
    "usage": lambda image: usage_of(image, "k", Target("cuda", "90")),
    "usage of AMD": lambda image: usage_of(image, "k", Target("hip", "gfx942")),
}


def binary(table, stride, count, names, rows=(), machine=190):
    """Return a binary with a table of sections where and as the header says."""
    head = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack(
        "<HHIQQQI", 1, machine, 1, 0, 0, table, 0
    )
    head += struct.pack("<HHHHHH", 64, 56, 0, stride, count, names)
    return head + b"".join(struct.pack("<IIQQQQI20x", *row) for row in rows)


ROWS = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 2**32 - 1]),
        st.sampled_from([1, 2, 3, 7, 8]),
        st.sampled_from([0, 2]),
        PLACES,
        PLACES,
        PLACES,
        st.sampled_from([0, 1, 2**32 - 1]),
    ),
    max_size=3,
)


@given(PLACES, STRIDES, COUNTS, COUNTS, ROWS, st.sampled_from([190, 224]))
@example(2**63, 65, 3, 0, [], 190)
@example(2**63 - 1, 65, 3, 0, [], 224)
def test_whatever_a_header_says_the_error_is_ours(table, stride, count, names, rows, machine):
    """No offset of 64 bits reaches a call that takes fewer."""
    image = binary(table, stride, count, names, rows, machine)
    for read in READERS.values():
        try:
            read(image)
        except BundlerError:
            continue


@pytest.mark.parametrize("cut", [0, 3, 16, 40, 63])
@pytest.mark.parametrize("reader", ["sections", "section", "metadata"])
def test_a_binary_that_ends_in_its_header(reader, cut):
    """What is not there is said to be missing."""
    with pytest.raises(FormatError, match=r"ends within|no kernel"):
        READERS[reader](binary(64, 64, 0, 0)[:cut])
