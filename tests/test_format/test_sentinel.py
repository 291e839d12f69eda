# SPDX-License-Identifier: Apache-2.0
"""Paths leave JSON and come back: to the original place byte for byte, to another one and nothing
else changes.
"""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bundler.errors import FormatError
from bundler.format.sentinel import (
    CACHE_DIR,
    TRITON_DIR,
    Span,
    from_sentinels,
    to_sentinels,
    triton_dirs,
)

HERE = "/tmp/c"
PLACES = [(CACHE_DIR, HERE)]
COMPONENT = st.text(
    st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=6
).filter(lambda name: name not in {".", ".."})
PATHS = st.lists(COMPONENT, min_size=1, max_size=3).map(lambda parts: "/" + "/".join(parts))
LITERALS = st.sampled_from(
    ["[[cache_dir]]", "[[triton_dir]]", "\ud800", "\\", '"', "\\u002f", "é", "/", "\x7f", "😀"]
)


def texts(path):
    """Texts with the path inside, before and behind what may be part of it or not."""
    piece = st.one_of(st.just(path), st.just(path + "/"), LITERALS, st.text(max_size=4))
    return st.lists(piece, max_size=4).map("".join)


def documents(path):
    """JSON data whose strings and keys hold the path."""
    leaf = texts(path) | st.integers() | st.floats() | st.booleans() | st.none()
    return st.recursive(
        leaf,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts(path), inner, max_size=3),
        max_leaves=6,
    )


def encodings(document):
    """The ways in which encoders write a document."""
    utf8 = json.dumps(document, ensure_ascii=False)
    found = [json.dumps(document), json.dumps(document, indent=1)]
    if utf8.encode("utf-8", "replace").decode() == utf8:
        found.append(utf8)
    return [text.encode() for plain in found for text in (plain, plain.replace("/", r"\/"))]


def strings(data):
    """Return every string and key of a document, in order."""
    found = []
    queue = [
        json.loads(data, object_pairs_hook=lambda pairs: [item for pair in pairs for item in pair])
    ]
    while queue:
        item = queue.pop()
        if isinstance(item, str):
            found.append(item)
        elif isinstance(item, list):
            queue += reversed(item)
    return found


def moved(text, old, new):
    """Return a text with `new` in place of the path `old`: slowly, and without regular
    expressions.
    """
    out, at = [], 0
    while at < len(text):
        before, after = text[at - 1 : at] if at else "", text[at + len(old) : at + len(old) + 1]
        in_name = (
            before.isalnum() or "\ud800" <= before <= "\udfff" or (before and before in "_.@~+/-")
        )
        if (
            text.startswith(old, at)
            and not in_name
            and (not after or after.isspace() or after in "/\"',;:)]")
        ):
            out.append(new)
            at += len(old)
        else:
            out.append(text[at])
            at += 1
    return "".join(out)


@given(data=st.data())
def test_restoring_to_the_original_place_gives_the_original_bytes(data):
    """With the same path, the bytes come back, whatever the JSON, its encoder and the characters of
    the path.
    """
    path = data.draw(PATHS)
    for original in encodings(data.draw(documents(path))):
        stored, spans = to_sentinels(original, [(CACHE_DIR, path)])
        assert from_sentinels(stored, spans, {CACHE_DIR: path}) == original
        assert from_sentinels(stored, spans, {}) == stored


@given(data=st.data())
def test_restoring_elsewhere_changes_the_path_and_nothing_else(data):
    """With another path, each decoded string has the new path where the old one stood, and all else
    is as it was.
    """
    path, other = data.draw(PATHS), data.draw(PATHS)
    for original in encodings(data.draw(documents(path))):
        stored, spans = to_sentinels(original, [(CACHE_DIR, path)])
        there = from_sentinels(stored, spans, {CACHE_DIR: other})
        assert strings(there) == [moved(text, path, other) for text in strings(original)]


@pytest.mark.parametrize(
    ("text", "stored"),
    [
        ("/tmp/c", "[[cache_dir]]"),
        ("/tmp/c/K/k.cubin", "[[cache_dir]]/K/k.cubin"),
        ("/tmp/c/", "[[cache_dir]]/"),
        ("-I /tmp/c:/tmp/c/x", "-I [[cache_dir]]:[[cache_dir]]/x"),
        ("path=/tmp/c", "path=[[cache_dir]]"),
        ("('/tmp/c',)", "('[[cache_dir]]',)"),
        ("/tmp/c;é", "[[cache_dir]];é"),
        ("/tmp/cache", "/tmp/cache"),
        ("/tmp/c.d", "/tmp/c.d"),
        ("/tmp/c-1", "/tmp/c-1"),
        ("/tmp/cé", "/tmp/cé"),
        ("/data/tmp/c", "/data/tmp/c"),
        ("/données/é/tmp/c", "/données/é/tmp/c"),
        ("./tmp/c", "./tmp/c"),
        ("-L/tmp/c", "-L/tmp/c"),
        ("~/tmp/c", "~/tmp/c"),
        ("/tmp//c", "/tmp//c"),
    ],
)
@pytest.mark.parametrize("ascii_only", [True, False])
def test_a_path_is_found_at_the_borders_of_components(text, stored, ascii_only):
    """The path is found where a component ends, and not inside another name."""
    found, spans = to_sentinels(json.dumps([text], ensure_ascii=ascii_only).encode(), PLACES)
    assert json.loads(found) == [stored]
    assert len(spans) == stored.count("[[cache_dir]]")


def test_keys_and_nested_values_count():
    """A path is found in keys and at any depth."""
    original = json.dumps(
        {"/tmp/c": [{"x": {"/tmp/c/y": ["/tmp/c/z", 1]}}], "inf": math.inf}
    ).encode()
    stored, spans = to_sentinels(original, PLACES)
    assert len(spans) == 3
    assert b"/tmp/c" not in stored
    assert b"Infinity" in stored


def test_a_literal_placeholder_in_the_data_survives():
    """A document that contains the text of a placeholder keeps it, beside one that stands for a
    path.
    """
    original = b'["[[cache_dir]]/a", "/tmp/c/b", "[[triton_dir]]"]'
    stored, spans = to_sentinels(original, PLACES)
    assert [span.offset for span in spans] == [stored.index(b"[[cache_dir]]/b")]
    assert (
        from_sentinels(stored, spans, {CACHE_DIR: "/new"})
        == b'["[[cache_dir]]/a", "/new/b", "[[triton_dir]]"]'
    )


def test_every_spelling_of_a_symlinked_directory_is_found():
    """Several spellings of one place are found, the longest first, each once."""
    places = [
        (CACHE_DIR, "/link"),
        (CACHE_DIR, "/link/to/real"),
        (CACHE_DIR, "/real/"),
        (TRITON_DIR, "/real/triton"),
    ]
    stored, spans = to_sentinels(
        b'["/link/a", "/link/to/real/b", "/real/c", "/real/triton/d"]', places
    )
    assert json.loads(stored) == [
        "[[cache_dir]]/a",
        "[[cache_dir]]/b",
        "[[cache_dir]]/c",
        "[[triton_dir]]/d",
    ]
    assert [span.place for span in spans] == [CACHE_DIR, CACHE_DIR, CACHE_DIR, TRITON_DIR]


def test_two_places_with_one_path_always_give_the_same_answer():
    """When two places have one path, the answer does not depend on the order in which they are
    named.
    """
    places = [(TRITON_DIR, "/x"), (CACHE_DIR, "/x")]
    assert to_sentinels(b'["/x/a"]', places) == to_sentinels(b'["/x/a"]', places[::-1])
    assert to_sentinels(b'["/x/a"]', places)[1][0].place == CACHE_DIR


@pytest.mark.parametrize("root", ["cuda", "a/cache", "./cache", "../c"])
def test_a_relative_spelling_counts_only_as_the_beginning_of_a_path(root):
    """A relative spelling is found where a slash follows it; as a word of its own it may be
    anything.
    """
    original = json.dumps([f"{root}/k.json", root, f"{root} is / a word", "/x"]).encode()
    stored, spans = to_sentinels(original, [(CACHE_DIR, root)])
    assert json.loads(stored) == ["[[cache_dir]]/k.json", root, f"{root} is / a word", "/x"]
    assert from_sentinels(stored, spans, {CACHE_DIR: root}) == original


@pytest.mark.parametrize("root", ["", "/", ".", "//", "./"])
def test_a_root_that_is_everywhere_is_not_looked_for(root):
    """The root directory and the current one are no cache directories that could be taken out of
    text.
    """
    assert to_sentinels(b'["/a", "./b", "."]', [(CACHE_DIR, root)]) == (b'["/a", "./b", "."]', ())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff\xfe",
        b'["/tmp/c"',
        b"['/tmp/c']",
        b'"/tmp/c\x00"',
        b'{"a": "/tmp/c",}',
        b"[" * 100_000 + b'"/tmp/c"',
        b'["/tmp/c\xe9"]',
        '["/tmp/c/a"]'.encode("utf-16-le"),
        '["/tmp/c/a"]'.encode("utf-16"),
        '["/tmp/c/a"]'.encode("utf-32-be"),
        '\ufeff["/tmp/c/a"]'.encode(),
    ],
    ids=[
        "empty",
        "binary",
        "open",
        "quotes",
        "control",
        "comma",
        "deep",
        "latin-1",
        "utf-16le",
        "utf-16",
        "utf-32",
        "bom",
    ],
)
def test_what_is_not_json_in_utf8_is_left_alone(data):
    """Bytes that are not a JSON document in UTF-8 stay as they are."""
    assert to_sentinels(data, PLACES) == (data, ())


@pytest.mark.parametrize(
    "path", ["/tmp/c", "/tmp/é", "/tmp/😀", '/tmp/"q"', "/tmp/a\\b", "/tmp/a b"]
)
@pytest.mark.parametrize("style", range(4))
def test_each_style_is_kept(path, style):
    """A path in UTF-8 or ASCII, with or without escaped slashes, is restored as it was written."""
    text = json.dumps([path + "/x"], ensure_ascii=not style & 1)
    original = (text.replace("/", r"\/") if style & 2 else text).encode()
    stored, spans = to_sentinels(original, [(CACHE_DIR, path)])
    assert len(spans) == 1
    assert from_sentinels(stored, spans, {CACHE_DIR: path}) == original


def test_a_path_that_is_not_utf8_is_written_with_escapes():
    """A directory whose name is not UTF-8 is restored as Python's JSON writes it."""
    path = "/tmp/\udcff"
    original = json.dumps([path + "/x"]).encode()
    stored, spans = to_sentinels(original, [(CACHE_DIR, path)])
    assert from_sentinels(stored, spans, {CACHE_DIR: path}) == original
    stored, spans = to_sentinels('["/tmp/é/x"]'.encode(), [(CACHE_DIR, "/tmp/é")])
    assert json.loads(from_sentinels(stored, spans, {CACHE_DIR: path})) == [path + "/x"]


@pytest.mark.parametrize("written", [r"\u002ftmp/c", r"/tm\u0070/c"])
def test_an_unusual_spelling_comes_back_with_the_same_value(written):
    """A path in escapes that no common encoder writes is found, and restored with the same
    value.
    """
    stored, spans = to_sentinels(f'["{written}/x"]'.encode(), PLACES)
    assert stored == b'["[[cache_dir]]/x"]'
    assert from_sentinels(stored, spans, {CACHE_DIR: HERE}) == b'["/tmp/c/x"]'


@pytest.mark.parametrize(
    "span",
    [
        Span(1, 0, 0),
        Span(-2, 0, 0),
        Span(99, 0, 0),
        Span(2, 1, 0),
        Span(2, 9, 0),
        Span(2, 0, 4),
        Span(2**63, 0, 0),
    ],
)
def test_a_span_must_point_at_its_placeholder(span):
    """A span that points elsewhere, or has an unknown place or style, is refused."""
    with pytest.raises(FormatError, match="sentinel"):
        from_sentinels(b'["[[cache_dir]]"]', (span,), {CACHE_DIR: "/x"})


def test_spans_must_not_overlap():
    """Two spans at one placeholder are refused."""
    with pytest.raises(FormatError, match="no sentinel at offset 2"):
        from_sentinels(b'["[[cache_dir]]"]', (Span(2, 0, 0), Span(2, 0, 0)), {CACHE_DIR: "/x"})


def test_triton_directories_are_found_in_metadata():
    """The install directories of Triton that a metadata document names are found; what only looks
    so is not.
    """
    data = json.dumps(
        [
            "/a/site-packages/triton/backends/nvidia/lib/libdevice.10.bc",
            "/b/triton/backend/x",
            "x/c/triton/backends/y",
            '("l", "/d e/triton/backends/amd/lib")',
            "/my-triton/backends/x",
            "/triton/backends/z",
        ]
    ).encode()
    assert triton_dirs(data) == {"/a/site-packages/triton", "/d e/triton", "/triton"}
    assert triton_dirs(b"not JSON") == set()
