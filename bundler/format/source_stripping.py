# SPDX-License-Identifier: Apache-2.0
"""What in a bundle tells where and from what its kernels were compiled: `strip_source` takes it out,
`absolute_paths`, `source_traces`, `user_names` and `words_in` find it.

What goes and what stays is in docs/trust.md ("Without source").  `pack` and `collect` strip with
`strip="source"`, as do `merge`, `pack` and `run` of the command line, which searches the files of a
bundle, too (`bundler/cli/bundles/inspection.py`), so that nobody ships the name of a home directory
without knowing it.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Collection, Iterable, Iterator
from typing import Literal

import msgspec

from bundler.errors import ConfigError, FormatError
from bundler.format import wire
from bundler.format.bundle import Bundle, FirstBlobs, MemoryBlobs, with_parts
from bundler.format.candidate_timings import id_of
from bundler.format.device_elf import WITHOUT_BYTES, ElfSection, content_of, is_elf64, sections
from bundler.format.digest import digest_text, sha256
from bundler.format.entries import Artifact, Entry, Kernel, replace
from bundler.format.manifest import Content, observed_of
from bundler.format.sentinel import Span

Strip = Literal["source"]
UNKNOWN = b"[[stripped]]"
_MASK = b"?"


def check_strip(strip: str | None) -> None:
    """Raise `ConfigError` for a value that `strip` cannot have."""
    if strip not in (None, "source"):
        raise ConfigError(f"strip={strip!r}: expected None or 'source'", got=strip)


def strip_source(bundle: Bundle) -> Bundle:
    """Return the bundle without intermediate representations, debug information, host paths and
    what runs on the CPU.

    Kernels keep their keys, so that Triton hits on them, and what a launch needs; the new bundle
    reads through the old one.

    Args:
        bundle: stays as it is.

    Returns:
        A bundle whose `left_out` names every kernel and file that would still tell a path, and is
        not in it.

    Raises:
        NotFound, DigestMismatch: the stored bytes are damaged.
    """
    changed: dict[bytes, bytes] = {}
    left_out = list(bundle.left_out)
    entries: list[Entry] = []
    for kernel in bundle.kernels:
        try:
            entries.append(_stripped(bundle, kernel, changed, left_out))
        except FormatError as error:
            left_out.append((kernel.key, error.message))
    for file in bundle.tuning_files:
        if absolute_paths(bundle.read(file.artifact)):
            left_out.append((file.path, "it names a path (strip='source')"))
        else:
            entries.append(file)
    for group in (bundle.helpers, bundle.opaque):
        left_out += [(other.path, "it may hold source (strip='source')") for other in group]
    records = [
        record
        for record in bundle.tuning_records
        if not absolute_paths(wire.pack(record.to_wire()))
    ]
    kept = {id_of(record) for record in records}
    kernels = [entry for entry in entries if isinstance(entry, Kernel)]
    observed = observed_of(bundle.observed, kernels)
    observed = replace(
        observed,
        tunings=tuple(tuning for tuning in bundle.observed.tunings if tuning.record in kept),
        environments=tuple(
            tuple(pair for pair in host if not absolute_paths(pair[1].encode()))
            for host in observed.environments
        ),
    )
    blobs = FirstBlobs([MemoryBlobs(changed, verified=True), bundle.blobs])
    return with_parts(bundle, Content.of(entries, records), observed, blobs, tuple(left_out))


def _stripped(
    bundle: Bundle, kernel: Kernel, changed: dict[bytes, bytes], left_out: list[tuple[str, str]]
) -> Kernel:
    """Return the kernel with clean files; raises `FormatError` when one cannot be cleaned."""
    files = []
    for artifact in kernel.launch_set:
        data = bundle.read(artifact)
        if artifact.kind == "json":
            clean, spans = _clean_metadata(data, artifact.spans)
        else:
            clean, spans = _without_paths(without_debug(data)), artifact.spans
        told = absolute_paths(clean) | source_traces(clean)
        if told:
            raise FormatError(
                f"{artifact.filename} still tells {', '.join(sorted(told)[:3])} (strip='source')"
            )
        raw = sha256(clean)
        if clean != data:
            changed[raw] = clean
        files.append(Artifact(artifact.filename, digest_text(raw), len(clean), spans))
    facts = _untold(kernel.facts_bytes, f"{kernel.key}: launch facts", left_out)
    parts = _untold(kernel.parts_bytes, f"{kernel.key}: key parts", left_out)
    return replace(kernel, artifacts=tuple(files), facts_bytes=facts, parts_bytes=parts)


def _untold(data: bytes | None, what: str, left_out: list[tuple[str, str]]) -> bytes | None:
    if data is None or not absolute_paths(data):
        return data
    left_out.append((what, "they name a path (strip='source')"))
    return None


def _clean_metadata(data: bytes, spans: tuple[Span, ...]) -> tuple[bytes, tuple[Span, ...]]:
    """Return metadata in which no path is left but placeholders, which may stand elsewhere now."""
    for path in sorted(absolute_paths(data), key=len, reverse=True):
        spelled = json.dumps(path)[1:-1].encode()
        while (at := data.find(spelled)) >= 0:
            data = data[:at] + UNKNOWN + data[at + len(spelled) :]
            by = len(UNKNOWN) - len(spelled)
            spans = tuple(
                s if s.offset < at else msgspec.structs.replace(s, offset=s.offset + by)
                for s in spans
            )
    return data, spans


def _without_paths(image: bytes) -> bytes:
    """Return a cubin in which asserts do not name their files: a question mark stands for each byte
    of such a path.
    """
    out = bytearray(image)
    for start, end in constant_texts(image):
        texts = image[start:end]
        for first, last in path_spans(texts):
            # A whole text, between zeros; what only looks like a path may be numbers that the
            # kernel reads.
            if texts[last : last + 1] == b"\0" and (first == 0 or texts[first - 1] == 0):
                out[start + first : start + last] = _MASK * (last - first)
    return bytes(out)


# ------------------------------------------------------------------------------- Debug information
#
# A cubin holds the names of source files in `.debug_line` and all of its PTX in
# `.nv_debug_ptx_txt`; an hsaco has DWARF.  A driver loads none of these sections: they are emptied,
# and everything else stays where it is.

_PREFIXES = tuple(
    start + name
    for start in (b"", b".rel", b".rela")
    for name in (b".debug", b".nv_debug", b".zdebug")
)
_TEXTS = b".nv.global.init"
_LOADED = 2  # SHF_ALLOC: a driver puts it into memory
_TABLE_AT, _ROW_BYTES_AT = 40, 58  # e_shoff and e_shentsize
_SIZE_AT = 32  # sh_size in a row


def debug_sections(image: bytes) -> tuple[str, ...]:
    """Return the names of debug sections with something in them; none for what is no ELF file of 64
    bits.

    Raises:
        FormatError: the table of sections is not sound.
    """
    if not is_elf64(image):
        return ()
    return tuple(name.decode("ascii", "replace") for _, name, row in _debug_rows(image) if row.size)


def without_debug(image: bytes) -> bytes:
    """Return a device binary whose debug sections are empty; what a driver loads is the same, at
    the same places.

    Raises:
        FormatError: it is no ELF file of 64 bits, or its table of sections is not sound.
    """
    if not is_elf64(image):
        raise FormatError(
            "the device binary is no ELF file of 64 bits, so that its debug information cannot be"
            " found"
        )
    found = [(number, row) for number, _, row in _debug_rows(image) if row.size]
    if not found:
        return image
    (table,), (stride,) = (
        struct.unpack_from("<Q", image, _TABLE_AT),
        struct.unpack_from("<H", image, _ROW_BYTES_AT),
    )
    kept = [
        row
        for row in sections(image)[0]
        if row not in [gone for _, gone in found] and row.kind != WITHOUT_BYTES
    ]
    # Rows say where other sections lie: one that says the same of debug information would lose its
    # bytes.
    spans = [(row.start, row.start + row.size) for row in kept if row.size]
    spans += [(table, table + stride * len(sections(image)[0])), (0, 64)]
    out = bytearray(image)
    for number, row in found:
        end = row.start + row.size
        if end > len(image) or any(row.start < stop and start < end for start, stop in spans):
            raise FormatError(
                "the device binary has debug information in the place of something else"
            )
        out[row.start : end] = bytes(row.size)
        struct.pack_into("<Q", out, table + stride * number + _SIZE_AT, 0)
    return bytes(out)


def constant_texts(image: bytes) -> tuple[tuple[int, int], ...]:
    """Return where the sections begin and end in which a cubin keeps the texts of its asserts and
    prints; raises as `debug_sections`.
    """
    return tuple(
        (row.start, row.start + row.size) for _, name, row in _named_rows(image) if name == _TEXTS
    )


def _debug_rows(image: bytes) -> Iterator[tuple[int, bytes, ElfSection]]:
    """Yield number, name and row of each section that is debug information, or tells a linker how
    to move it.
    """
    for number, name, row in _named_rows(image):
        if name.startswith(_PREFIXES) and not row.flags & _LOADED:
            yield number, name, row


def _named_rows(image: bytes) -> Iterator[tuple[int, bytes, ElfSection]]:
    rows, names_row = sections(image)
    if names_row >= len(rows):
        raise FormatError("the device binary's sections have no names")
    names = content_of(image, rows[names_row])
    for number, row in enumerate(rows):
        yield number, names[row.name_at : max(names.find(b"\0", row.name_at), row.name_at)], row


# -------------------------------------------------------------------------------- Paths and traces

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
