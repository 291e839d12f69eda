# SPDX-License-Identifier: Apache-2.0
"""Kernels of a manifest are checked by columns, and where that shows nothing one by one; both find
the same.
"""

from itertools import pairwise

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bundler.errors import FormatError, LimitExceeded
from bundler.format import content_tables, names
from bundler.format.bundle import Bundle
from bundler.format.content_tables import TableReader
from bundler.format.entries import file_layout
from bundler.format.lazy_kernel import BlobTable, Pieces
from bundler.format.limits import DEFAULT_LIMITS, Limits
from bundler.format.manifest import Content

KERNELS = 9
SMALL = st.integers(0, 4)
ODD = st.sampled_from(
    [-1, 0, 1, 5, 2**31, 2**32, 2**64 - 1, None, "x", b"x", [], [0], [0, 1], [2, 0, 0, 0]]
)


def result(data, limits):
    """Return the kernels of a content, or what is wrong with it."""
    try:
        content = Content.decode(data, limits)
    except FormatError as error:
        return type(error), str(error)
    return [
        (kernel, kernel.facts_bytes, kernel.parts_bytes, *kernel.files())
        for kernel in content.kernels
    ]


def both_ways(data, limits=DEFAULT_LIMITS):
    """Return what is found by columns, which is what is found one by one."""
    found = result(data, limits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TableReader, "_are_sound", lambda self, rows, packed: False)
        assert result(data, limits) == found
    return found


@pytest.fixture(scope="module")
def document(build):
    """The decoded content of a bundle whose kernels differ in everything, some with spans, facts
    and key parts.
    """
    files = build.Files()
    kernels = [
        files.kernel(
            "A", facts_bytes=build.facts(), parts_bytes=msgpack.packb([True, [["a", "1"]]])
        ),
        files.kernel(
            "B", "other", facts_bytes=build.facts(source_kind="ir"), extra={"other.source": b"s"}
        ),
        files.kernel("C", "k", build.HIP),
        files.kernel("D", metadata={"num_warps": 8}),
    ]
    content = build.Parts.of(files.bundle(*kernels).to_bytes()).document()
    content[KERNELS][0][6][1] = [2, 1, 0, 0]
    return content


def test_sound_kernels_are_found_sound_by_columns(document, monkeypatch):
    """Nobody looks at them one by one."""

    def fail(self, rows):
        raise AssertionError("one by one")

    monkeypatch.setattr(TableReader, "_check_each", fail)
    assert len(Content.decode(msgpack.packb(document)).kernels) == 4


@given(data=st.data())
def test_whatever_is_drawn_is_found_sound_in_both_ways(drawn, data):
    entries, records, _ = data.draw(drawn.contents())
    content = Content.of(entries, records)
    assert [kernel[0] for kernel in both_ways(content.encode())] == list(content.kernels)


@given(data=st.data())
def test_both_ways_find_the_same_wrong(document, data):
    """One number or list of a kernel becomes another: the same error, with the same words, or the
    same kernels.
    """
    packed = msgpack.packb(document)
    changed = msgpack.unpackb(packed)
    for _ in range(data.draw(st.integers(1, 2))):
        row = changed[KERNELS][data.draw(st.integers(0, 3))]
        if data.draw(st.booleans()):
            row[data.draw(st.integers(1, 5))] = data.draw(SMALL | ODD)
            continue
        references = row[6]
        which = data.draw(st.integers(0, 3))
        if isinstance(references[which], list) and references[which] and data.draw(st.booleans()):
            references[which][data.draw(st.integers(0, len(references[which]) - 1))] = data.draw(
                SMALL | ODD
            )
        else:
            references[which] = data.draw(st.lists(SMALL, max_size=8) | st.none() | ODD)
    both_ways(msgpack.packb(changed))


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"kernel_bytes": 50}, "kernel_bytes"),
        ({"files_per_kernel": 2}, "files_per_kernel"),
        ({"raw_bytes": 130}, "raw_bytes"),
        ({"facts_bytes": 8}, "facts_bytes"),
        ({"all_facts_bytes": 20}, "all_facts_bytes"),
    ],
)
def test_limits_hold_in_both_ways(document, limits, words):
    kind, message = both_ways(msgpack.packb(document), Limits(**limits))
    assert kind is LimitExceeded
    assert words in message


@pytest.mark.parametrize("together", [1, 2, 3, 512])
@pytest.mark.parametrize("reference_bytes", [1, 40, 1 << 16])
def test_runs_of_kernels_of_any_length_are_checked_alike(
    build, monkeypatch, together, reference_bytes
):
    """Also where their references are too long for one column."""
    files = build.Files()
    content = files.bundle(
        *[files.kernel(number, f"k{number % 3}") for number in range(20)]
    ).content
    monkeypatch.setattr(content_tables, "_CHECKED_TOGETHER", together)
    monkeypatch.setattr(content_tables, "_DECODED_TOGETHER", 2)
    check = TableReader._check_some

    def short(self, rows):
        with monkeypatch.context() as patch:
            patch.setattr(content_tables, "REFERENCE_BYTES", reference_bytes)
            check(self, rows)

    if reference_bytes > 1:
        monkeypatch.setattr(TableReader, "_check_some", short)
        assert Content.decode(content.encode()).kernels == content.kernels
    else:
        monkeypatch.setattr(content_tables, "REFERENCE_BYTES", reference_bytes)
        with pytest.raises(LimitExceeded, match=r"references of .* over the limit of"):
            Content.decode(content.encode())


@given(st.lists(st.lists(st.integers(0, 6), max_size=6).map(tuple), max_size=6), st.integers(0, 3))
def test_documents_are_taken_together_only_when_each_is_sound(documents, before):
    """What `take` takes `check` takes too, with the same counts; what it refuses leaves nothing
    behind.
    """
    table = [b"x" * number for number in range(1, 7)]

    def counts(pieces):
        return pieces._seen, pieces._joined_bytes

    limits = Limits(facts_bytes=30, all_facts_bytes=60)
    at_once, one_by_one = Pieces(table, limits), Pieces(table, limits)
    for pieces in (at_once, one_by_one):
        pieces.check((0, before) if before else (), "key")
    start = counts(at_once)
    taken = at_once.take(documents)
    try:
        for runs in documents:
            one_by_one.check(runs, "key")
    except FormatError:
        assert not taken
    if taken:
        assert counts(at_once) == counts(one_by_one)
    else:
        assert counts(at_once) == start


def test_documents_that_were_taken_are_known():
    """The second time a document counts as the first time, without its runs."""
    pieces = Pieces([b"ab", b"c"], DEFAULT_LIMITS)
    assert pieces.take([(0, 2), (), (0, 2), (1, 1)])
    assert pieces.take([(0, 2)])
    assert pieces._joined_bytes == 3 + 0 + 3 + 1 + 3
    assert not pieces.take([(2, 1)])
    assert not pieces.take([(1 << 32, 1)])
    pieces.check_used()


KEY = st.sampled_from(["A" * 52, "2" * 52, "0" * 64, "f" * 64])
NO_KEY = st.sampled_from(
    [
        "",
        "A" * 51,
        "a" * 52,
        "A" * 64,
        "1" * 52,
        "g" * 64,
        "F" * 64,
        "A" * 51 + "\n",
        "é" * 52,
        "\ud800" * 52,
    ]
)


@given(st.lists(KEY | NO_KEY, max_size=5) | st.lists(KEY, max_size=5))
def test_keys_are_judged_together_as_each_alone(keys):
    assert names.are_kernel_keys(keys) == all(map(names.is_kernel_key, keys))


@given(
    st.lists(
        st.integers(0, 3).map(lambda n: bytes([n]) * 8) | st.binary(min_size=8, max_size=8),
        max_size=6,
    ),
    st.booleans(),
)
def test_a_blob_table_is_sorted_or_not(heads, ascending):
    """Also where digests begin alike."""
    digests = [head + bytes([number]) * 24 for number, head in enumerate(heads)]
    digests = sorted(digests) if ascending else digests
    expected = all(one < two for one, two in pairwise(digests))
    assert BlobTable(b"".join(digests), [0] * len(digests)).is_sorted() == expected


@pytest.fixture
def loaded(build):
    """A loaded bundle whose kernels have their files in order, and in another one."""
    files = build.Files()
    kernels = [
        files.kernel("A", facts_bytes=build.facts(), extra={"k.source": b"s", "k.dat": b"d"}),
        files.kernel("B", "other"),
        files.kernel("C"),
    ]
    bundle = files.bundle(*kernels, files.tuning("t/k.autotune.json"))
    parts = build.Parts.of(bundle.to_bytes())
    content = parts.document()
    content[KERNELS][0][6][1] = [1, 1, 0, 0, 4, 0, 1, 1, 4, 2, 0, 0]
    content[KERNELS][2][6][0].reverse()
    content[7].append(content[7][content[KERNELS][2][5]][::-1])
    content[KERNELS][2][5] = len(content[7]) - 1
    parts.find(16).data = msgpack.packb(content)
    parts.find(16).raw = len(parts.find(16).data)
    parts.find(16).codec = 0
    with Bundle.from_bytes(parts.join()) as opened:
        yield opened


@pytest.mark.parametrize("keep", ["all", "launch"])
@pytest.mark.parametrize("refiled", [False, True])
def test_the_columns_of_a_kernel_are_those_of_its_files(loaded, keep, refiled):
    """Names, digests, size and path sentinels: what `files` yields, of a row of the manifest and of
    a kernel with files of its own.
    """
    any_spans = False
    for row in loaded.kernels:
        kernel = row.with_artifacts(row.artifacts) if refiled else row
        stored, files = kernel.stored_files(keep), [*kernel.files(keep)]
        assert (stored.names, stored.digests) == (
            tuple(f[0] for f in files),
            tuple(f[1] for f in files),
        )
        assert stored.size_bytes == sum(size for _, _, size, _ in files)
        assert stored.layout == file_layout(stored.names)
        flat = [
            (place, span.offset, span.place, span.style)
            for place, file in enumerate(files)
            for span in file[3]
        ]
        assert [stored.spans[start : start + 4] for start in range(0, len(stored.spans), 4)] == flat
        any_spans |= bool(flat)
    assert any_spans


def test_blobs_are_read_together_as_one_by_one(loaded):
    source, table = loaded.blobs, loaded.content.blobs
    digests, sizes = table.digests_of(range(len(table))), table.sizes_of(range(len(table)))
    views = source.stored_blobs(digests)
    assert [len(view) for view in views] == sizes
    assert [*map(bytes, views)] == [*map(source.read_blob, digests)]


def test_kernels_are_made_when_they_are_asked_for_and_once(loaded):
    """The keys are known before; whoever asks gets the same objects."""
    content = loaded.content
    keys = list(content.kernel_keys)
    kernels = content.kernels
    assert all(one is two for one, two in zip(kernels, content.kernels, strict=True))
    assert [kernel.key for kernel in kernels] == keys == list(content.kernel_keys)
    assert type(kernels) is tuple
