# SPDX-License-Identifier: Apache-2.0
"""Content: what kernels share stands in it once, in one way alone, and whatever else is in a table
is refused.
"""

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bundler.errors import FormatError, LimitExceeded, UnsafeName
from bundler.format.bundle import Bundle
from bundler.format.bundle_union import merge
from bundler.format.lazy_kernel import BlobTable, Pieces
from bundler.format.limits import DEFAULT_LIMITS, Limits
from bundler.format.manifest import Content
from bundler.format.table_encoder import MAX_CUT_BYTES, PieceWriter, cut

(
    DIGESTS,
    SIZES,
    NAMES,
    TARGETS,
    TOOLCHAINS,
    SPECS,
    LISTS,
    PIECES,
    KERNELS,
    TUNING,
    HELPERS,
    OPAQUE,
    RECORDS,
) = range(1, 14)
REFERENCES = 6
BLOBS, SPANS, FACTS, PARTS = range(4)


@pytest.fixture
def document(build):
    """The decoded content of a bundle with every kind of entry, and launch facts."""
    files = build.Files()
    kernels = [
        files.kernel("A", facts_bytes=build.facts()),
        files.kernel("B", "other", facts_bytes=build.facts(source_kind="ir")),
        files.kernel("C", "k", build.HIP, toolchain=build.Toolchain("3.7.1", "ab", "12.9")),
    ]
    bundle = files.bundle(
        *kernels,
        files.tuning("t/k.autotune.json"),
        files.helper("h/u.so", b"1"),
        files.opaque("o/x"),
    )
    return build.Parts.of(bundle.to_bytes()).document()


def refused(document, kind, *words, limits=None):
    """Assert that decoding a content fails with exactly this class and these words."""
    with pytest.raises(kind) as caught:
        Content.decode(msgpack.packb(document), *([limits] if limits else []))
    assert type(caught.value) is kind
    for word in words:
        assert word in str(caught.value)


def first_references(document):
    """Return the references of the first kernel."""
    return document[KERNELS][0][REFERENCES]


def test_the_document_is_sound(document):
    """What the tests below make wrong is accepted as it is."""
    content = Content.decode(msgpack.packb(document))
    assert content.encode() == msgpack.packb(document)
    assert [kernel.facts_bytes is None for kernel in content.kernels] == [False, False, True]


@pytest.mark.parametrize("position", range(1, 6))
@pytest.mark.parametrize("number", [3, 99, 2**64 - 1])
def test_a_number_beyond_its_table_is_refused(document, position, number):
    """A kernel that refers beyond a table is refused, with its key."""
    document[KERNELS][0][position] = number
    refused(document, FormatError, document[KERNELS][0][0], "a number beyond its table")


@pytest.mark.parametrize("table", [NAMES, TARGETS, TOOLCHAINS, SPECS, LISTS])
def test_a_table_holds_each_thing_once_and_in_order(document, table):
    """What nobody refers to, what is there twice, and another order are refused: the same content
    would have two digests.
    """
    rows = document[table]
    for wrong in ([*rows, rows[0]], [rows[0], rows[0], *rows[1:]]):
        document[table] = wrong
        refused(document, FormatError, "is not what kernels refer to, once and in that order")
    document[table] = rows
    if len(rows) > 1:
        position = {NAMES: 1, TARGETS: 2, TOOLCHAINS: 3, SPECS: 4, LISTS: 5}[table]
        document[table] = [rows[1], rows[0], *rows[2:]]
        for kernel in document[KERNELS]:
            kernel[position] = {0: 1, 1: 0}.get(kernel[position], kernel[position])
        refused(document, FormatError, "is not what kernels refer to, once and in that order")


def test_a_piece_is_in_use_and_there_once(document):
    """A piece that is in no document, or is there twice, is refused."""
    pieces = document[PIECES]
    for wrong in ([*pieces, b"more"], [*pieces[:-1], pieces[0]]):
        document[PIECES] = wrong
        refused(document, FormatError, "the pieces are not those of the kernels, each once")


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        ([0], "expected pairs"),
        ([0, 0], "a run of 0 pieces from 0"),
        ([0, 99], "a run of 99 pieces"),
        ([1, 1], "0 of them named"),
        ([2**64 - 1, 2], "a run of 2 pieces"),
        ([0, -1], ">= 0"),
        ([0, "1"], "`int`"),
        ("x", "array"),
    ],
)
def test_runs_that_are_none_are_refused(document, runs, words):
    """Runs come in pairs, are not empty, stay in the table, and first name the pieces in their
    order.
    """
    first_references(document)[FACTS] = runs
    refused(document, FormatError, words)


def test_documents_are_bounded_one_and_all(document):
    """A piece of a kilobyte must not become a document of a gigabyte, nor many documents of a
    megabyte.
    """
    for kernel in document[KERNELS]:
        kernel[REFERENCES][FACTS] = kernel[REFERENCES][PARTS] = None
    document[PIECES] = [b"x" * 1000]
    first_references(document)[FACTS] = [0, 1] * 1049
    refused(document, LimitExceeded, "1049000 is over the limit of 1048576 (facts_bytes)")
    first_references(document)[FACTS] = first_references(document)[PARTS] = [0, 1] * 10
    limits = Limits(all_facts_bytes=19_999)
    refused(
        document, LimitExceeded, "20000 is over the limit of 19999 (all_facts_bytes)", limits=limits
    )


def test_the_digests_are_one_for_each_size(document):
    """Digests that are cut, or more or fewer than the sizes, are refused, naming both."""
    sizes, digests = document[SIZES], document[DIGESTS]
    for wrong in (digests[:-1], digests[:-32], digests + b"\xff" * 32, b""):
        document[DIGESTS] = wrong
        refused(
            document,
            FormatError,
            f"digests of {len(wrong)} bytes for {len(sizes)} sizes, expected 32 for each",
        )


def test_a_kernel_has_a_blob_for_each_file(document):
    """Fewer or more blobs than files are refused, naming both."""
    first_references(document)[BLOBS].pop()
    refused(document, FormatError, "2 blobs for 3 files")


@pytest.mark.parametrize(
    "spans",
    [[1], [2, 0, 0], [3, 0, 0, 0], [-1, 0, 0, 0], [2, 0, 0, 0, 1, 0, 0, 0], [2**64 - 1, 0, 0, 0]],
)
def test_spans_of_a_kernel_come_in_fours(document, spans):
    """Each has the position of its file and three numbers, in the order of the files."""
    first_references(document)[SPANS] = spans
    refused(document, FormatError, f"{len(spans)} span numbers for 3 files")


@pytest.mark.parametrize("spans", [[1], [1, 0], [1, 0, 0, 1]])
@pytest.mark.parametrize("table", [TUNING, HELPERS, OPAQUE])
def test_spans_of_other_files_come_in_threes(document, table, spans):
    """A span array whose length is no multiple of three is refused."""
    document[table][0][2] = spans
    refused(document, FormatError, f"{len(spans)} span numbers")


@pytest.mark.parametrize("item", ["**.ttir", "k*.ttir", "../*", "/*", ""])
def test_the_star_stands_at_the_beginning_alone(document, item):
    """A star anywhere else is no character of a file name."""
    document[LISTS][0][0] = item
    refused(document, UnsafeName, "unsafe file name")


@pytest.mark.parametrize("name", ["../k", "k/", "", ".", "k" * 200])
def test_a_name_that_makes_an_unsafe_file_name_is_refused(document, name):
    """A kernel may be called anything, but its files may not."""
    document[LISTS][0][0] = "*"
    document[NAMES][0] = name
    refused(document, UnsafeName, "unsafe file name")


def test_what_is_decoded_late_is_bounded_early(document):
    """References, file lists and spans that are too long are refused before they are decoded."""
    for where, position, long in (
        (first_references(document), BLOBS, [0] * 70_000),
        (document[OPAQUE][0], 2, [0] * 70_000),
        (document, LISTS, [["x" * 200] * 30_000]),
    ):
        sound, where[position] = where[position], long
        refused(document, LimitExceeded, "bytes")
        where[position] = sound
    for table in (NAMES, TARGETS, KERNELS, OPAQUE):
        sound, document[table] = document[table], [None] * 100_001
        refused(document, LimitExceeded, "100001 is over the limit of 100000 (kernels)")
        document[table] = sound


@pytest.mark.parametrize("position", [KERNELS, OPAQUE, NAMES])
def test_numbers_have_their_shortest_form(build, position):
    """A number that takes more bytes than it needs is refused, wherever it stands: the same content
    would have two digests.
    """
    data = msgpack.packb(build.Parts.of(build.several().to_bytes()).document())
    document = msgpack.unpackb(data)
    packed = msgpack.packb(document[position])
    longer = {
        KERNELS: packed.replace(b"\x00\x00\x00\x00", b"\x00\xcc\x00\x00\x00", 1),
        OPAQUE: packed.replace(b"\x90", b"\xdc\x00\x00", 1),
        NAMES: packed.replace(b"\xa1k", b"\xd9\x01k", 1),
    }[position]
    assert longer != packed
    with pytest.raises(FormatError, match="shortest form"):
        Content.decode(data.replace(packed, longer, 1))


@pytest.mark.parametrize("which", [0, 1, 2])
def test_the_references_of_each_kernel_are_canonical(document, which):
    """One more field is refused in whichever kernel of a run it stands, though all of them are
    compared at once.
    """
    document[KERNELS][which][REFERENCES].append(0)
    refused(
        document, FormatError, "references of a kernel", "the fields of this version and no other"
    )


@given(data=st.data())
def test_another_encoder_writes_the_same(drawn, other_encoder, data):
    """The fuzzer's encoder, written from the page too, puts back what it took out of the tables."""
    entries, records, _ = data.draw(drawn.contents())
    packed = Content.of(entries, records).encode()
    rows = other_encoder.to_rows(msgpack.unpackb(packed))
    assert [row[0] for row in rows[2]] == [entry.key for entry in Content.of(entries).kernels]
    assert msgpack.packb(other_encoder.to_tables(rows)) == packed


@given(data=st.data())
def test_a_short_content_is_the_same_table_by_table(drawn, data):
    """It is decoded at once under the default limits, and table by table under others."""
    entries, records, _ = data.draw(drawn.contents())
    packed = Content.of(entries, records).encode()
    at_once, by_table = Content.decode(packed), Content.decode(packed, Limits(kernels=99_999))
    assert at_once == by_table
    assert at_once.blobs == by_table.blobs
    assert at_once.encode() == by_table.encode() == packed


@given(
    st.binary(max_size=200)
    | st.lists(st.lists(st.integers() | st.text(max_size=5))).map(repr).map(str.encode)
)
def test_pieces_of_anything_are_that_again(document):
    """Whatever bytes are cut, their pieces joined are the bytes."""
    assert b"".join(cut(document)) == document


@given(st.lists(st.none() | st.lists(st.lists(st.booleans(), max_size=3), max_size=4), max_size=5))
def test_documents_come_back_from_their_runs(documents):
    """Any documents come back, each piece is kept once, and their runs are as few as there
    can be.
    """
    packed = [None if document is None else msgpack.packb(document) for document in documents]
    writer = PieceWriter()
    runs = [writer.runs(document) for document in packed]
    pieces = Pieces(writer.table, DEFAULT_LIMITS)
    for numbers, document in zip(runs, packed, strict=True):
        pieces.check(None if numbers is None else tuple(numbers), "key")
        assert pieces.join(numbers) == document
        ends = [
            at + number
            for at, number in zip((numbers or [])[::2], (numbers or [])[1::2], strict=True)
        ]
        assert not {*zip(ends, (numbers or [])[2::2], strict=False)} & {(end, end) for end in ends}
    pieces.check_used()


def test_a_document_is_cut_at_its_members_and_theirs():
    """As the specification says; what is large, or no array, is one piece."""
    document = msgpack.packb(["a", ["b", ["c", "d"]], "e", [], [["f"]]])
    assert cut(document) == [
        b"\x95\xa1a",
        b"\x92\xa1b",
        b"\x92\xa1c\xa1d",
        b"\xa1e",
        b"\x90",
        b"\x91\x91\xa1f",
    ]
    large = msgpack.packb(["x" * MAX_CUT_BYTES, 1])
    for whole in (
        large,
        b"",
        b"\xc1",
        b"\x92\x01",
        b"\xdd\xff\xff\xff\xff",
        b"\x80",
        msgpack.packb("text"),
        b"\x90\x90",
    ):
        assert cut(whole) == [whole]


def test_what_kernels_share_takes_room_once(build):
    """A hundred kernels with the same facts and key parts take little more than one."""
    files, parts = (
        build.Files(),
        msgpack.packb([True, [[f"part.{n}", "text" * 9] for n in range(40)]]),
    )
    kernels = [files.kernel(n, facts_bytes=build.facts(), parts_bytes=parts) for n in range(100)]
    one, all_of_them = (
        len(files.bundle(*kernels[:number]).content.encode()) for number in (1, 100)
    )
    assert (all_of_them - one) / 99 < 130


def test_a_loaded_bundle_keeps_its_digest(build, tmp_path):
    """Saved again it has the same bytes; selected from as a whole or merged with itself, the
    digest.
    """
    made = build.several()
    made.save(tmp_path / "b.tbundle")
    with Bundle.load(tmp_path / "b.tbundle") as loaded:
        assert loaded.to_bytes() == (tmp_path / "b.tbundle").read_bytes()
        chosen = loaded.select(), merge([loaded]), merge([loaded, loaded])
        assert {one.digest for one in chosen} == {made.digest}


def test_the_blob_table_is_a_sequence(build):
    """The table of a loaded bundle is read like that of one in memory."""
    content = build.several().content
    table = Content.decode(content.encode()).blobs
    assert isinstance(table, BlobTable)
    assert table == content.blobs
    assert (list(table), table[-1], table[1:3]) == (
        list(content.blobs),
        content.blobs[-1],
        content.blobs[1:3],
    )
    assert list(Content.decode(content.encode()).blobs.sizes) == list(content.blobs.sizes)
    with pytest.raises(IndexError):
        _ = table[len(table)]
