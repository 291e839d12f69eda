# SPDX-License-Identifier: Apache-2.0
"""Whatever is encoded comes back, and comes out the same in whatever order it went in."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bundler.format.bundle import Bundle, MemoryBlobs
from bundler.format.constant_values import Value, encode
from bundler.format.keyparts import KeyParts
from bundler.format.launch_spec import LaunchFacts, LaunchSpec, TuningRecord
from bundler.format.manifest import Content, Observed
from bundler.format.wire import pack, unpack

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
    ),
    max_leaves=8,
)


def sorted_observed(observed):
    """Return observations as they are after encoding: environments are sorted."""
    return Observed(dict(observed.kernels), tuple(sorted(observed.environments)))


@given(data=st.data())
def test_values_come_back(drawn, data):
    """A value comes back from its encoding."""
    value = data.draw(drawn.VALUES)
    assert Value.from_wire(unpack(pack(value.to_wire()), "value")) == value


@given(PLAIN)
def test_plain_data_comes_back(obj):
    """Plain data comes back from its tagged value: types, infinities, NaN and order included."""
    back = encode(obj).plain()
    assert repr(back) == repr(obj)


@pytest.mark.parametrize("number", [0.0, -0.0, math.inf, -math.inf, math.nan, 5e-324])
def test_floats_keep_every_bit(number):
    """Floating point numbers keep their sign, and infinities and NaN are encoded as any other."""
    assert repr(encode(number).plain()) == repr(number)


@pytest.mark.parametrize(
    "number", [2**63 - 1, -(2**63), 2**64 - 1, 2**64, -(2**63) - 1, 2**1300 - 1]
)
def test_integers_of_any_size_come_back(number):
    """Integers come back whether they fit 64 bits or not."""
    assert Value.from_wire(unpack(pack(encode(number).to_wire()), "value")).plain() == number


@pytest.mark.parametrize(
    "obj",
    [object(), {1: 2}, 10**5000, [lambda: 0], {"k": {3}}],
    ids=["object", "dict", "huge int", "function", "set"],
)
def test_what_has_no_encoding_is_marked_as_not_portable(obj):
    """An object without an encoding is encoded as the name of its type, and the value says that it
    is not portable.
    """
    value = encode(obj)
    assert not value.portable
    assert Value.from_wire(unpack(pack(value.to_wire()), "value")) == value


@given(data=st.data())
def test_launch_facts_come_back(drawn, data):
    """Launch facts come back from their encoding, and encode to the same bytes again."""
    facts = data.draw(drawn.FACTS)
    assert LaunchFacts.from_bytes(facts.to_bytes()) == facts


@given(data=st.data())
def test_key_parts_come_back(drawn, data):
    """Key parts come back from their encoding in the same order."""
    parts = data.draw(drawn.PARTS)
    assert KeyParts.from_bytes(parts.to_bytes()) == parts


@given(data=st.data())
def test_tuning_records_and_launch_specs_come_back(drawn, data):
    """Tuning records and launch specs come back from their encodings."""
    record, spec = data.draw(drawn.RECORDS), data.draw(drawn.SPECS)
    assert TuningRecord.from_wire(unpack(pack(record.to_wire()), "record")) == record
    assert LaunchSpec.from_wire(unpack(pack(spec.to_wire()), "spec"), None) == spec


@given(data=st.data())
def test_content_comes_back(drawn, data):
    """Content comes back from its encoding, and encodes to the same bytes again."""
    entries, records, _ = data.draw(drawn.contents())
    content = Content.of(entries, records)
    back = Content.decode(content.encode())
    assert back == content
    assert back.encode() == content.encode()
    assert Content.of(back.entries, back.tuning_records).encode() == content.encode()


@given(data=st.data())
def test_observations_come_back(drawn, data):
    """Observations come back from their encoding; which layouts there are is known before any is
    made.
    """
    observed = data.draw(drawn.OBSERVED)
    decoded = Observed.decode(observed.encode())
    assert (
        decoded.layouts
        == observed.layouts
        == {name for seen in observed.kernels.values() for name in seen.layouts}
    )
    assert decoded == sorted_observed(observed)


@given(data=st.data())
def test_bundles_come_back(drawn, data):
    """A saved bundle has the same entries, names, sizes, spans, bytes and observations as the one
    in memory.
    """
    entries, records, blobs = data.draw(drawn.contents())
    bundle = Bundle(Content.of(entries, records), data.draw(drawn.OBSERVED), MemoryBlobs(blobs))
    with Bundle.from_bytes(bundle.to_bytes()) as back:
        assert (back.digest, back.content) == (bundle.digest, bundle.content)
        assert back.observed == sorted_observed(bundle.observed)
        for digest, size in bundle.content.blobs:
            assert back.blobs.read_blob(digest) == blobs[digest]
            assert len(blobs[digest]) == size
        back.verify()
        assert back.to_bytes() == bundle.to_bytes()


@given(data=st.data())
def test_order_does_not_matter(drawn, data):
    """The same entries give the same digest and the same file in whatever order they, and their
    files, were found.
    """
    entries, records, blobs = data.draw(drawn.contents())
    observed = data.draw(drawn.OBSERVED)
    first = Bundle(Content.of(entries, records), observed, MemoryBlobs(blobs))
    shuffled = data.draw(st.permutations(entries))
    environments = tuple(data.draw(st.permutations(observed.environments)))
    seen = Observed(dict(reversed(observed.kernels.items())), environments)
    content = Content.of(shuffled, data.draw(st.permutations(records)))
    second = Bundle(content, seen, MemoryBlobs(blobs))
    assert (second.digest, second.to_bytes()) == (first.digest, first.to_bytes())


def test_the_order_of_a_kernels_files_does_not_matter(build):
    """A kernel's files come in Triton's order, whatever order they were given in."""
    files = build.Files()
    kernel = files.kernel("A", extra={"k.source": b"s", "k.ptx": b"p"})
    turned = replace(kernel, artifacts=kernel.artifacts[::-1])
    bundle = files.bundle(turned)
    assert bundle.digest == files.bundle(kernel).digest
    assert [a.kind for a in bundle.kernels[0].artifacts] == [
        "source",
        "ttir",
        "ptx",
        "cubin",
        "json",
    ]


def test_large_frames_come_back(build):
    """Files that need several frames, that do not compress, that compress like a bomb, or that
    repeat others come back.
    """
    files = build.Files()
    big = {
        "k.llir": build.noise("big", 5 << 20),
        "k.ptx": b"a" * (6 << 20),
        "k.source": b"b" * (2 << 20),
    }
    bundle = files.bundle(
        files.kernel("A", extra=big), files.opaque("o/big", build.noise("big", 5 << 20) + b"c")
    )
    data = bundle.to_bytes()
    with Bundle.from_bytes(data) as back:
        assert build.read_all(back) == build.read_all(bundle)
    parts = build.Parts.of(data).sections
    assert [(part.kind, part.codec) for part in parts[:4]] == [(1, 0), (2, 1), (2, 0), (5, 1)]
    assert len(parts[3].data) < 100_000


def test_an_empty_file_lies_in_a_section_of_its_own_kind(build):
    """A bundle whose first file of some kind is empty is written and read."""
    files = build.Files()
    bundle = files.bundle(files.opaque("ab/__init__.py", b""))
    data = bundle.to_bytes()
    assert [(part.kind, part.blobs) for part in build.Parts.of(data).sections][:1] == [(5, [0])]
    with Bundle.from_bytes(data) as back:
        assert build.read_all(back) == {"ab/__init__.py": b""}


def test_tensor_descriptors_come_back(build):
    """A kernel with tensor descriptors, which nest deepest of all that real metadata holds, is
    written and read.
    """
    descriptor = {"swizzle": 3, "elem_size": 2, "block_size": [64, 64], "fp4_padded": False}
    bundle = build.one(metadata={"tensordesc_meta": [descriptor, descriptor]})
    with Bundle.from_bytes(bundle.to_bytes()) as back:
        assert back.kernels[0].launch.tensor_descriptors.plain() == [descriptor, descriptor]
