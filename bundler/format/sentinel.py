# SPDX-License-Identifier: Apache-2.0
"""Paths inside JSON, taken out when a file is stored and put back when it is restored.

Triton writes absolute paths into metadata.  Two of them are known to be places that differ from
machine to machine: the cache directory and Triton's own install directory.  Each is found *by
value*, in the decoded strings of the JSON, and replaced in the original bytes by a placeholder; a
`Span` remembers where.  Because the offsets decide, not the text, a file that happens to contain
the placeholder's text survives unchanged.

Restoring to the original spelling of the path gives the original bytes: a span keeps the style in
which the path was written (ASCII escapes, as `json.dumps` writes; plain UTF-8; escaped slashes).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

import msgspec
from msgspec import Struct

from bundler.errors import FormatError
from bundler.format.summary import count

CACHE_DIR = 0
TRITON_DIR = 1
PLACEHOLDERS = {CACHE_DIR: b"[[cache_dir]]", TRITON_DIR: b"[[triton_dir]]"}

# A style is a set of flags: other characters than ASCII as they are, and a backslash before each
# slash.
STYLE_ASCII, STYLE_UTF8, STYLE_ESCAPED_SLASH = 0, 1, 2
_STYLES = (STYLE_ASCII, STYLE_UTF8, STYLE_ESCAPED_SLASH, STYLE_UTF8 | STYLE_ESCAPED_SLASH)

# A quote never occurs in JSON outside a string, so in a valid document these are exactly its
# strings.
_STRING = rb'(?s:"((?:[^"\\]|\\.)*)")'
# One character of the decoded value.
_UNIT = r"(?s:\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\.|.)"
# Letters of every script; the last range is how Python shows a byte that is not UTF-8.
_NAME_CHARACTER = r"[\w.@~+/\ud800-\udfff-]"
_PATH_BEGINS = r"(?<!" + _NAME_CHARACTER + r")/"
_TRITON_INSIDE = "/triton/backends/"
# A restore writes the same few paths into every kernel.
_PATHS_REMEMBERED = 64
_DECODER = msgspec.json.Decoder()


# A part of a stored file that is another on this machine: where it begins, its bytes there, and its
# bytes here.
Edit = tuple[int, bytes, bytes]


class Span(Struct, frozen=True, gc=False):
    """One placeholder: byte offset in the stored file, which place it stands for, and how it was
    written.
    """

    offset: int
    place: int
    style: int


def to_sentinels(data: bytes, places: Sequence[tuple[int, str]]) -> tuple[bytes, tuple[Span, ...]]:
    """Replace known paths in a JSON document by placeholders.

    Args:
        data: the bytes of the document.
        places: pairs of a place and a spelling of its path; the longest spelling that matches wins.

    Returns:
        The stored bytes and their spans; `data` itself and no spans when nothing matched or it is
        not JSON.
    """
    spellings, matcher = _matcher(frozenset(places))
    if (
        matcher is None
        or not _may_name(data, [path for path, _ in spellings])
        or not _is_json(data)
    ):
        return data, ()
    out: list[bytes] = []
    spans: list[Span] = []
    copied = size = 0
    for start, end, name, raw in _matches(data, matcher):
        path, place = spellings[int(name[1:])]
        out += [data[copied:start], PLACEHOLDERS[place]]
        size += start - copied
        spans.append(Span(size, place, _style_of(path, raw)))
        size += len(PLACEHOLDERS[place])
        copied = end
    return (b"".join([*out, data[copied:]]), tuple(spans)) if spans else (data, ())


@lru_cache(_PATHS_REMEMBERED)
def _matcher(
    places: frozenset[tuple[int, str]],
) -> tuple[list[tuple[str, int]], re.Pattern[str] | None]:
    """Return the spellings of paths and what finds them; None when there is nothing to find."""
    spellings = sorted(
        {(path.rstrip("/"), place) for place, path in places}, key=lambda s: (-len(s[0]), *s)
    )
    pattern = "|".join(
        f"(?P<p{n}>{_spelling(path)})"
        for n, (path, _) in enumerate(spellings)
        if path not in {"", "."}
    )
    return spellings, re.compile(
        rf"(?<!{_NAME_CHARACTER})(?:{pattern})(?![^/\s\"',;:)\]])"
    ) if pattern else None


def from_sentinels(data: bytes, spans: Sequence[Span], paths: Mapping[int, str]) -> bytes:
    """Put paths back.

    Args:
        data: stored bytes.
        spans: where the placeholders are.
        paths: place -> path.  A place that is missing keeps its placeholder: the fact is unknown
            here.

    Raises:
        FormatError: a span does not point at its placeholder.
    """
    edits = edits_of(spans, paths)
    check_edits(data, edits)
    return edited(data, edits)


def edits_of(spans: Sequence[Span], paths: Mapping[int, str]) -> tuple[Edit, ...]:
    """Return what `from_sentinels` changes in a file, which nobody has looked at yet; raises
    `FormatError` for spans of no file.
    """
    edits: list[Edit] = []
    copied = 0
    for span in spans:
        placeholder = PLACEHOLDERS.get(span.place)
        if placeholder is None or span.style not in _STYLES:
            raise FormatError(
                f"unknown sentinel place {span.place} or style {span.style}", span=span
            )
        if span.offset < copied:
            raise FormatError(
                f"no sentinel at offset {span.offset}: another one ends at {copied}", span=span
            )
        path = paths.get(span.place)
        edits.append(
            (span.offset, placeholder, placeholder if path is None else _write(path, span.style))
        )
        copied = span.offset + len(placeholder)
    return tuple(edits)


def check_edits(data: bytes | memoryview, edits: Sequence[Edit]) -> None:
    """Raise `FormatError` unless a file holds what is to be changed."""
    for offset, old, _ in edits:
        if data[offset : offset + len(old)] != old:
            raise FormatError(
                f"no sentinel at offset {offset} of a file of {count(len(data), 'byte')}",
                offset=offset,
            )


def holds(data: bytes | memoryview, edits: Sequence[Edit]) -> bool:
    """Tell whether a file holds what is to be changed, one behind the other."""
    end = 0
    for offset, old, _ in edits:
        if not end <= offset <= len(data) or data[offset : offset + len(old)] != old:
            return False
        end = offset + len(old)
    return True


def edited(data: bytes | memoryview, edits: Sequence[Edit]) -> bytes:
    """Return a file with what is to be changed changed."""
    out: list[bytes | memoryview] = []
    copied = 0
    for offset, old, new in edits:
        out += [data[copied:offset], new]
        copied = offset + len(old)
    return b"".join([*out, data[copied:]])


def triton_dirs(data: bytes) -> set[str]:
    """Return the Triton install directories that a metadata document names (`…/triton` before
    `/backends/`).
    """
    if not _may_name(data, [_TRITON_INSIDE]) or not _is_json(data):
        return set()
    # No path holds a zero, so what is between zeros has one path at most: from where a path first
    # begins to the last place that looks like Triton's.  One expression for both would go over a
    # long text again from each slash.
    return {
        found
        for value in json_strings(data)
        for text in value.split("\0")
        if (found := _triton_dir_in(text)) is not None
    }


def _triton_dir_in(text: str) -> str | None:
    end = text.rfind(_TRITON_INSIDE)
    begins = re.search(_PATH_BEGINS, text) if end >= 0 else None
    if begins is None or begins.start() > end:
        return None
    return text[begins.start() : end + len("/triton")]


def json_strings(data: bytes) -> Iterator[str]:
    """Yield each string of a valid JSON document that could hold a path, decoded."""
    for _, raw in _tokens(data):
        yield _decoded(raw)


def _tokens(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield offset and bytes, between the quotes, of each string that could hold a path."""
    if b"\\" in data:
        yield from (
            (t.start(1), t[1]) for t in re.finditer(_STRING, data) if b"/" in t[1] or b"\\" in t[1]
        )
        return
    # Without a backslash each quote begins or ends a string, and a slash is always in one; few
    # strings hold any.
    slash = data.find(b"/")
    while slash >= 0:
        start, end = data.rfind(b'"', 0, slash) + 1, data.find(b'"', slash)
        yield start, data[start:end]
        slash = data.find(b"/", end)


def _decoded(raw: bytes) -> str:
    if b"\\" not in raw:
        return raw.decode("utf-8")
    import json

    value: str = json.loads(b'"%s"' % raw)
    return value


def _spelling(path: str) -> str:
    # A relative path may be a plain word, such as `cuda`: it is a path only where something follows
    # it.
    return re.escape(path) if path.startswith("/") else re.escape(path) + "(?=/)"


def _may_name(data: bytes, texts: Sequence[str]) -> bool:
    """Tell whether a JSON document may hold one of these texts: without a backslash it does so byte
    for byte.
    """
    return b"\\" in data or any(text.encode("utf-8", "surrogatepass") in data for text in texts)


@lru_cache(1)  # a document is asked about for one kind of path after the other
def _is_json(data: bytes) -> bool:
    with contextlib.suppress(ValueError, msgspec.MsgspecError, RecursionError):
        _DECODER.decode(data)
        return True
    # Python reads some documents that msgspec does not.
    import json

    try:
        # Decoded first: json.loads would also take bytes in UTF-16, where offsets mean something
        # else.
        json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError):
        return False
    return True


def _matches(data: bytes, matcher: re.Pattern[str]) -> Iterator[tuple[int, int, str, str]]:
    """Yield byte range, group name and raw text of every match of `matcher` in a decoded string."""
    for offset, raw in _tokens(data):
        found = list(matcher.finditer(_decoded(raw)))
        if not found:
            continue
        units = re.findall(_UNIT, raw.decode("utf-8"))
        for match in found:
            start = offset + len("".join(units[: match.start()]).encode())
            text = "".join(units[match.start() : match.end()])
            yield start, start + len(text.encode()), str(match.lastgroup), text


def _style_of(path: str, raw: str) -> int:
    for style in _STYLES:
        if _write(path, style) == raw.encode():
            return style
    # A spelling that no common encoder writes, such as /: restored with the same value, in plain
    # ASCII.
    return STYLE_ASCII


@lru_cache(_PATHS_REMEMBERED)
def _write(path: str, style: int) -> bytes:
    text = json_text(path, ensure_ascii=not style & STYLE_UTF8)
    if style & STYLE_ESCAPED_SLASH:
        text = text.replace("/", "\\/")
    try:
        return text.encode()
    except UnicodeEncodeError:  # a path with bytes that are not UTF-8 can only be written escaped
        return json_text(path).encode()


def json_text(text: str, *, ensure_ascii: bool = True) -> str:
    """Return a text as `json.dumps` writes it, without the quotes."""
    if text.isascii() and text.isprintable() and '"' not in text and "\\" not in text:
        return text
    import json  # most paths need none of it

    return json.dumps(text, ensure_ascii=ensure_ascii)[1:-1]
