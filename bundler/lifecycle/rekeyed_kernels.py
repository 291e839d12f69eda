# SPDX-License-Identifier: Apache-2.0
"""Kernels under the keys that this machine's Triton asks for, made of kernels that have other ones.

A kernel of another build of the same Triton is *derived*, one of a function that only moved in its
file is *moved*: Triton's key holds the line on which a function begins, so a comment above it makes
a new key for the same code.  Both have the binary and the IR of the kernel they come from, byte for
byte, and metadata with the new hash, that of a moved one with a mark.  They exist where they are
placed, and in reports; a bundle or a store never holds one.

`restoration.py` calls `derive` for a restore with `rekey`, and `moved_in` for one with `moved`, as a
replay does; sessions ask `moved_kernel` after a miss (`bundler/integrations/kernel_lookup.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from bundler.errors import (
    BundlerError,
    DigestMismatch,
    FormatError,
    NotFound,
    ToolchainMismatch,
)
from bundler.format.bundle import BlobSource, Bundle, FirstBlobs, MemoryBlobs
from bundler.format.digest import check_digest, digest_text, sha256
from bundler.format.entries import Kernel, Toolchain, replace
from bundler.format.keyparts import KeyParts
from bundler.format.launch_spec import LaunchFacts
from bundler.format.manifest import Content, Observed
from bundler.format.metadata import MOVED_FROM
from bundler.lifecycle.compatibility import Machine
from bundler.lifecycle.kernel_placement import planned
from bundler.lifecycle.lifecycle_reports import RestoreReport
from bundler.package_loggers import logger
from bundler.toolchain import identity, instances, rekeyed_key
from bundler.toolchain.events import kernel_hash
from bundler.toolchain.instances import being_imported

# In a device binary: it says where an assert failed by a number of a line, or, on AMD, where a text
# that may hold one is printed.
_TELLS_LINES = {"cuda": b"__assertfail", "hip": b"hidden_hostcall_buffer"}
_log = logger("bundler.lifecycle")


class Rekeyed(NamedTuple):
    """A bundle in which kernels of another build have this machine's keys.

    Attributes:
        bundle: reads through the one it was made of.
        derived_from: this machine's key -> the key of the kernel it was derived from.
        refused: key -> why a kernel of another build was not derived from.
        damaged: keys among `refused` whose bytes in the bundle are damaged.
    """

    bundle: Bundle
    derived_from: dict[str, str]
    refused: dict[str, str]
    damaged: frozenset[str] = frozenset()

    def told(self, report: RestoreReport) -> RestoreReport:
        """Return a restore's report with what was derived from what, and why not."""
        if not (self.derived_from or self.refused or self.damaged):
            return report
        in_place = {*report.restored, *report.present, *report.repaired}
        return replace(
            report,
            rekeyed=tuple(
                sorted(
                    (key, origin) for key, origin in self.derived_from.items() if key in in_place
                )
            ),
            skipped=tuple(
                (
                    name,
                    f"{reason}; not done: {self.refused[name]}" if name in self.refused else reason,
                )
                for name, reason in report.skipped
            ),
            damaged=tuple(sorted({*report.damaged, *self.damaged})),
        )


def derive(bundle: Bundle) -> Rekeyed:
    """Derive kernels where only the hash of Triton's binary, or its install path, stands between a
    kernel and this machine.

    Imports Triton when there is such a kernel.
    """
    machine = Machine()
    kernels = {kernel.key: kernel for kernel in bundle.kernels}
    blobs: dict[bytes, bytes] = {}
    derived_from: dict[str, str] = {}
    refused: dict[str, str] = {}
    damaged: set[str] = set()
    for kernel in bundle.kernels:
        if not machine.other_build(kernel):
            continue
        try:
            derived = _derived(bundle, kernel, blobs)
        except BundlerError as error:
            refused[kernel.key] = error.message
            if isinstance(error, (DigestMismatch, FormatError, NotFound)):
                damaged.add(kernel.key)
            continue
        if derived.key not in kernels:  # the bundle may hold one that was built here
            derived_from[derived.key] = kernel.key
            kernels[derived.key] = derived
        del kernels[kernel.key]
    if not derived_from and len(kernels) == len(bundle.kernels):
        return Rekeyed(bundle, {}, refused, frozenset(damaged))
    rekeyed = _with_kernels(bundle, kernels, derived_from, blobs)
    return Rekeyed(rekeyed, derived_from, refused, frozenset(damaged))


def _derived(bundle: Bundle, kernel: Kernel, blobs: dict[bytes, bytes]) -> Kernel:
    """Return the kernel that this machine's Triton would compile; its metadata goes into `blobs`.

    Raises:
        ToolchainMismatch: something else differs.
        DigestMismatch, FormatError, NotFound: it is damaged.
    """
    facts, recorded = _known(kernel)
    key, parts = rekeyed_key.key_here(kernel.key, facts, recorded, kernel.target)
    data = _with_hash(bundle.read(kernel.metadata), kernel.key, key)
    installed = identity.installed_triton() or Toolchain()
    made, digest = _under_key(kernel, key, parts, data)
    blobs[digest] = data
    return replace(
        made, toolchain=msgspec.structs.replace(kernel.toolchain, binary=installed.binary)
    )


def _known(kernel: Kernel) -> tuple[LaunchFacts, KeyParts]:
    facts, parts = kernel.launch.facts, kernel.parts
    if parts is None or facts is None:
        raise ToolchainMismatch("what its key was made of is not known, since it came by pack")
    return facts, parts


def _under_key(kernel: Kernel, key: str, parts: KeyParts, data: bytes) -> tuple[Kernel, bytes]:
    """Return a kernel with another key and metadata, and the raw digest of that."""
    digest = sha256(data)
    # The new hash is as long as the old one, and what is added stands behind all placeholders of
    # paths: these stay where they are.
    metadata = msgspec.structs.replace(kernel.metadata, digest=digest_text(digest), size=len(data))
    files = tuple(metadata if one is kernel.metadata else one for one in kernel.artifacts)
    return replace(kernel, key=key, artifacts=files, parts_bytes=parts.to_bytes()), digest


def _with_kernels(
    bundle: Bundle,
    kernels: Mapping[str, Kernel],
    made_from: Mapping[str, str],
    metadata: Mapping[bytes, bytes],
) -> Bundle:
    """Return a bundle of these kernels, some of which were made of its own; it reads through it."""
    content = Content.of(
        [*kernels.values(), *bundle.tuning_files, *bundle.helpers, *bundle.opaque],
        bundle.tuning_records,
    )
    seen = bundle.observed.kernels
    more = {key: seen[origin] for key, origin in made_from.items() if origin in seen}
    observed = Observed({**seen, **more}, bundle.observed.environments)
    blobs = FirstBlobs((MemoryBlobs(metadata, verified=True), bundle.blobs))
    return Bundle(content, observed, blobs)


def _with_hash(metadata: bytes, old: str, new: str) -> bytes:
    """Return a kernel's metadata with the hash of another key; raises `FormatError`."""
    before, after = (b'"%s"' % kernel_hash(key).encode() for key in (old, new))
    if metadata.count(before) != 1:
        raise FormatError(
            f"its metadata names its hash {metadata.count(before)} times, expected once", key=old
        )
    return metadata.replace(before, after)


# ----------------------------------------------------------------------------- Functions that moved


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
    facts, parts = _known(kernel)
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
    data = _marked(_with_hash(bytes(contents[wanted.metadata]), kernel.key, key), kernel.key)
    made, digest = _under_key(kernel, key, here, data)
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
    return Moved(_with_kernels(bundle, kernels, moved_from, metadata), moved_from)


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
