# SPDX-License-Identifier: Apache-2.0
"""`strip_source`: a bundle that tells nothing of where and from what its kernels were compiled.

What goes and what stays is in docs/trust.md ("Without source").  `pack` and `collect` call it with
`strip="source"`, as do `merge`, `pack` and `run` of the command line.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Literal

import msgspec

from bundler.errors import ConfigError, FormatError
from bundler.format import wire
from bundler.format.binaries.debug_sections import constant_texts, without_debug
from bundler.format.binaries.leaks import absolute_paths, path_spans, source_traces
from bundler.format.bundle import Bundle, FirstBlobs, MemoryBlobs
from bundler.format.candidate_timings import id_of
from bundler.format.digest import digest_text, sha256
from bundler.format.entries import Artifact, Entry, Kernel
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
    return Bundle(
        Content.of(entries, records),
        observed,
        FirstBlobs([MemoryBlobs(changed, verified=True), bundle.blobs]),
        writable=bundle.writable,
        variants_dropped=bundle.variants_dropped,
        left_out=tuple(left_out),
    )


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
    return Kernel(
        kernel.key,
        kernel.name,
        kernel.target,
        tuple(files),
        kernel.toolchain,
        kernel.spec,
        facts,
        parts,
    )


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
