# SPDX-License-Identifier: Apache-2.0
"""Finds absolute paths inside files, so that nobody ships the name of a home directory without
knowing it, and what tells of the source.

The command line calls `absolute_paths`, `source_traces`, `user_names` and `words_in` on the files
of a bundle (`bundler/cli/bundles/inspection.py`); `source_stripping.py` looks with them whether anything
is left.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from bundler.errors import FormatError
from bundler.format.binaries.debug_sections import debug_sections

# A name as people and tools give it; bytes of a well-formed UTF-8 character count as letters.
_NAME = rb"(?:[A-Za-z0-9._@%+~-]|[\xc3-\xdf][\x80-\xbf]|[\xe1-\xef][\x80-\xbf]{2}|\xf0[\x90-\xbf][\x80-\xbf]{2})+"
# What may stand before a path: anything but a part of a name, of a relative path, of a closing tag,
# or the end of one of our placeholders, whose rest is relative.  `file://` is followed by a path
# all the same.
_BEFORE = rb"(?<=file://)|(?<![A-Za-z0-9._@%+~\])}</-])"
_NO_LETTER_BEFORE = rb"(?<![\x80-\xff])"
# In pickle and msgpack a text follows its length, and a length may look like a letter.
_AFTER_LENGTH = rb"(?<=\x8c[\x00-\xff])|(?<=\xd9[\x00-\xff])|(?<=\xda[\x00-\xff]{2})"
_PATH = rb"/" + _NAME + rb"(?:/+" + _NAME + rb")+"
_IN_TEXT = re.compile(rb"(?:" + _BEFORE + rb")" + _NO_LETTER_BEFORE + _PATH)
_IN_BINARY = re.compile(rb"(?:" + _BEFORE + rb"|" + _AFTER_LENGTH + rb")" + _PATH)
# Machine code holds slashes by chance.  A path worth telling about begins with a word and has some
# length.
_PLAUSIBLE = re.compile(r"/[A-Za-z][\w@%+~-]+[\w.@%+~-]*/")
_SHORTEST_IN_BINARY = 8
# Folders that carry the name of a user: homes, and the temporary ones of Inductor.
_HOME = re.compile(r"/(?:home|Users)/([^/]+)|^/(root)(?:/|$)|/torchinductor_([^/]+)")
_TRACES = {
    "places in source files": re.compile(
        rb'\bloc\("[^"\n]+":\d|^\s*\.file\s+\d+\s+"|!DIFile\(|^\s*\.loc\s', re.MULTILINE
    ),
    "names of variables": re.compile(rb'\bloc\("[^"\n]*"\(#|!DILocalVariable\('),
    "lines of Python": re.compile(
        rb"^[ \t]*(?:def \w+\(.*|import \w+.*|from [\w.]+ import .*|@triton\.\w+.*)$", re.MULTILINE
    ),
}


def absolute_paths(data: bytes) -> set[str]:
    """Return the POSIX absolute paths of at least two components that stand in a file, text or
    binary.

    Finds them in JSON, in Triton's intermediate texts, and as strings in debug information, pickles
    and msgpack.

    Does not find: a path of one component (`/tmp`); what follows a space inside a path, of which
    the part before the space is returned; paths whose slashes or letters are written as escapes, or
    that are compressed or not UTF-8; Windows paths; names that stand apart from their directory, as
    DWARF's line tables have them (the directory is found).  A text that only looks like a path,
    such as a URL's path after a space, is returned too.
    """
    binary = not _is_text(data)
    found = set()
    for match in (_IN_BINARY if binary else _IN_TEXT).finditer(data):
        path = match[0].decode("utf-8", "replace").rstrip(".-~%@")
        if path.rstrip("/").count("/") > 1 and (not binary or _is_plausible(path)):
            found.add(path)
    return found


def _is_text(data: bytes) -> bool:
    if b"\0" in data:
        return False
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _is_plausible(path: str) -> bool:
    return len(path) >= _SHORTEST_IN_BINARY and _PLAUSIBLE.match(path) is not None


def path_spans(data: bytes) -> list[tuple[int, int]]:
    """Return where in a binary the paths of `absolute_paths` begin and end."""
    found = [(match, match[0].decode("utf-8", "replace")) for match in _IN_BINARY.finditer(data)]
    return [match.span() for match, path in found if _is_plausible(path)]


def source_traces(data: bytes) -> set[str]:
    """Return what a file tells of the source that it was compiled from, each kind as a few words:
    debug information, places, names, lines.

    Finds them in MLIR, LLVM's and PTX's texts, in Python files and in ELF files of 64 bits.  Does
    not find: names of arguments in launch facts, of kernels in symbols, and messages of asserts and
    prints, without which the kernel would be another; what is compressed or escaped.
    """
    try:
        if debug_sections(data):
            return {"debug information"}
    except FormatError:
        return set()  # not one that a driver would load; `verify` tells of those
    if not _is_text(data):
        return set()
    return {what for what, pattern in _TRACES.items() if pattern.search(data)}


def user_names(paths: Iterable[str]) -> set[str]:
    """Return the names of users that paths tell."""
    found = [match for path in paths for match in _HOME.finditer(path)]
    return {name for match in found for name in match.groups() if name}


def words_in(data: bytes, words: Collection[str]) -> set[str]:
    """Return those of some names that stand in a file, in whatever case, with no letter or digit
    beside them.
    """
    lowered = data.lower()
    return {
        word
        for word in words
        if re.search(
            rb"(?<![a-z0-9])" + re.escape(word.lower().encode()) + rb"(?![a-z0-9])", lowered
        )
    }
