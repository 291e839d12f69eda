# SPDX-License-Identifier: Apache-2.0
"""Kernels of functions that only moved in their files, under the keys that Triton asks for now.

Triton's key holds the line on which a function begins, so a comment above it makes a new key for
the same code.  A moved kernel has the binary and the IR of the one it comes from, byte for byte;
its metadata has the new hash, and a mark.  It exists where it is placed, and in reports; a bundle
or a store never holds one.

Sessions ask `moved_kernel` after a miss (`bundler/integrations/kernel_lookup.py`), a restore with
`moved` and a replay call `moved_in`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec

from bundler.errors import BundlerError, FormatError, ToolchainMismatch
from bundler.format.bundle import BlobSource, Bundle, FirstBlobs, MemoryBlobs
from bundler.format.digest import check_digest, digest_text, sha256
from bundler.format.entries import Kernel
from bundler.format.manifest import Content, Observed
from bundler.format.metadata import MOVED_FROM
from bundler.lifecycle.kernel_placement import planned
from bundler.lifecycle.lifecycle_reports import RestoreReport
from bundler.lifecycle.rekeyed_kernels import with_hash
from bundler.package_loggers import logger
from bundler.toolchain import instances, rekeyed_key
from bundler.toolchain.instances import being_imported

# In a device binary: it says where an assert failed by a number of a line, or, on AMD, where a text
# that may hold one is printed.
_TELLS_LINES = {"cuda": b"__assertfail", "hip": b"hidden_hostcall_buffer"}
_log = logger("bundler.lifecycle")


class MovedKernel(NamedTuple):
    """A kernel under the key that is asked for now.

    Attributes:
        kernel: it, with that key.
        metadata: its metadata, by raw digest; all else is in the place it comes from.
        origin: the key under which it was recorded.
    """

    kernel: Kernel
    metadata: dict[bytes, bytes]
    origin: str

    def source(self, source: BlobSource) -> BlobSource:
        """Return where its bytes are, given where those of the recorded kernel are."""
        return FirstBlobs((MemoryBlobs(self.metadata, verified=True), source))


class Moved(NamedTuple):
    """A bundle in which kernels of functions that moved are under their new keys too.

    Attributes:
        bundle: reads through the one it was made of.
        moved_from: new key -> the key of the kernel in the bundle that it comes from.
    """

    bundle: Bundle
    moved_from: dict[str, str]

    def told(self, report: RestoreReport) -> RestoreReport:
        """Return a restore's report with what moved."""
        in_place = {*report.restored, *report.present, *report.repaired}
        placed = [(key, origin) for key, origin in self.moved_from.items() if key in in_place]
        return replace(report, moved=tuple(sorted(placed)))


def moved_kernel(
    source: BlobSource, kernel: Kernel, function: Any, asked: str | None = None
) -> MovedKernel:
    """Return a recorded kernel under the key that this process's Triton makes of its function.

    Args:
        source: where its bytes are.
        kernel: as it was recorded.
        function: the JIT function, which only moved since.
        asked: the key that Triton asks for; None for whichever it makes.

    Raises:
        ToolchainMismatch: more than lines differs, or it has texts that hold lines.
        DigestMismatch, FormatError, NotFound: its bytes are damaged.
        StoreUnavailable: they cannot be read now.
    """
    parts, facts = kernel.parts, kernel.launch.facts
    if parts is None or facts is None:
        raise ToolchainMismatch("what its key was made of is not known, since it came by pack")
    key, here = rekeyed_key.key_moved(kernel.key, facts, parts, kernel.target, function)
    if key == kernel.key or asked not in (None, key):
        raise ToolchainMismatch("more than lines differs: Triton asks for another key", key=asked)
    wanted = planned(kernel, "launch")
    source.prefetch(wanted.digests)
    contents = source.view_blobs(wanted.digests)
    if not source.verified:
        for name, data, expected in zip(wanted.names, contents, wanted.digests, strict=True):
            check_digest(data, expected, name)
    text = _TELLS_LINES.get(kernel.target.backend)
    if text is None or text in bytes(contents[wanted.binary]):
        raise ToolchainMismatch("its device asserts, or what it prints, tell lines of its source")
    data = _marked(with_hash(bytes(contents[wanted.metadata]), kernel.key, key), kernel.key)
    digest = sha256(data)
    # What is added stands behind all placeholders of paths.
    metadata = msgspec.structs.replace(kernel.metadata, digest=digest_text(digest), size=len(data))
    made = Kernel(
        key,
        kernel.name,
        kernel.target,
        tuple(metadata if one is kernel.metadata else one for one in kernel.artifacts),
        kernel.toolchain,
        kernel.spec,
        kernel.facts_bytes,
        here.to_bytes(),
    )
    return MovedKernel(made, {digest: data}, kernel.key)


def moved_in(bundle: Bundle) -> Moved:
    """Return a bundle with kernels under new keys where functions of this process only moved since.

    Looks at functions that are here already; imports nothing of the user's.
    """
    functions: dict[str, list[Any]] = {}
    for function in instances.instances(instances.JIT_FUNCTION):
        # Of a module that is being imported a helper may be missing, and Triton would keep the hash
        # without it.
        if not being_imported(function.module):
            functions.setdefault(function.__name__, []).append(function)
    kernels = {kernel.key: kernel for kernel in bundle.kernels}
    metadata: dict[bytes, bytes] = {}
    moved_from: dict[str, str] = {}
    for kernel in bundle.kernels:
        for made in _moved_of(bundle.blobs, kernel, functions):
            if made.kernel.key not in kernels:
                kernels[made.kernel.key] = made.kernel
                metadata |= made.metadata
                moved_from[made.kernel.key] = made.origin
    if not moved_from:
        return Moved(bundle, {})
    content = Content.of(
        [*kernels.values(), *bundle.tuning_files, *bundle.helpers, *bundle.opaque],
        bundle.tuning_records,
    )
    seen = bundle.observed.kernels
    more = {key: seen[origin] for key, origin in moved_from.items() if origin in seen}
    observed = Observed({**seen, **more}, bundle.observed.environments)
    blobs = FirstBlobs((MemoryBlobs(metadata, verified=True), bundle.blobs))
    return Moved(Bundle(content, observed, blobs), moved_from)


def _moved_of(
    source: BlobSource, kernel: Kernel, functions: dict[str, list[Any]]
) -> Iterable[MovedKernel]:
    if not functions or kernel.parts is None or kernel.parts.moved_key is None:
        return
    parts = dict(kernel.parts.parts)
    for function in functions.get(parts.get("source.name", kernel.name), ()):
        if not rekeyed_key.only_moved(kernel.parts, function):
            continue
        try:
            yield moved_kernel(source, kernel, function)
        except BundlerError as error:
            _log.info("%s (%s) is not taken as moved: %s", kernel.name, kernel.key, error)


def _marked(metadata: bytes, origin: str) -> bytes:
    if not metadata.endswith(b"}"):
        raise FormatError("its metadata is no JSON object as Triton writes it", key=origin)
    return b'%s, "%s": "%s"}' % (metadata[:-1], MOVED_FROM.encode(), origin.encode())
