# SPDX-License-Identifier: Apache-2.0
"""Kernels of another build of the same Triton, under the keys that this machine's Triton will ask
for.

A derived kernel has the binary and the IR of the one it comes from, byte for byte, and metadata in
which the hash is the new one. It exists where it is restored, and in the report; a bundle never
holds one.

`restoration.py` calls `derive` for a restore with `rekey`, and `Rekeyed` completes its report.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import msgspec

from bundler.errors import BundlerError, DigestMismatch, FormatError, NotFound, ToolchainMismatch
from bundler.format.bundle import Bundle, FirstBlobs, MemoryBlobs
from bundler.format.digest import digest_text, sha256
from bundler.format.entries import Kernel, Toolchain
from bundler.format.manifest import Content, Observed
from bundler.lifecycle.compatibility import Machine
from bundler.lifecycle.lifecycle_reports import RestoreReport
from bundler.toolchain import identity


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
    content = Content.of(
        [*kernels.values(), *bundle.tuning_files, *bundle.helpers, *bundle.opaque],
        bundle.tuning_records,
    )
    seen = bundle.observed.kernels
    more = {key: seen[origin] for key, origin in derived_from.items() if origin in seen}
    observed = Observed({**seen, **more}, bundle.observed.environments)
    rekeyed = Bundle(content, observed, FirstBlobs((MemoryBlobs(blobs), bundle.blobs)))
    return Rekeyed(rekeyed, derived_from, refused, frozenset(damaged))


def _derived(bundle: Bundle, kernel: Kernel, blobs: dict[bytes, bytes]) -> Kernel:
    """Return the kernel that this machine's Triton would compile; its metadata goes into `blobs`.

    Raises:
        ToolchainMismatch: something else differs.
        DigestMismatch, FormatError, NotFound: it is damaged.
    """
    if kernel.parts is None or kernel.launch.facts is None:
        raise ToolchainMismatch("what its key was made of is not known, since it came by pack")
    # Every restore imports this module, and hardly one derives a key.
    from bundler.toolchain import rekeyed_key

    key, parts = rekeyed_key.key_here(kernel.key, kernel.launch.facts, kernel.parts, kernel.target)
    data = with_hash(bundle.read(kernel.metadata), kernel.key, key)
    digest = sha256(data)
    blobs[digest] = data
    # The hash is as long as the other, so the placeholders of paths stay where they are.
    metadata = msgspec.structs.replace(kernel.metadata, digest=digest_text(digest))
    installed = identity.installed_triton() or Toolchain()
    return Kernel(
        key,
        kernel.name,
        kernel.target,
        tuple(
            metadata if artifact is kernel.metadata else artifact for artifact in kernel.artifacts
        ),
        msgspec.structs.replace(kernel.toolchain, binary=installed.binary),
        kernel.spec,
        kernel.facts_bytes,
        parts.to_bytes(),
    )


def with_hash(metadata: bytes, old: str, new: str) -> bytes:
    """Return a kernel's metadata with the hash of another key; raises `FormatError`."""
    from bundler.toolchain.events import kernel_hash

    before, after = (b'"%s"' % kernel_hash(key).encode() for key in (old, new))
    if metadata.count(before) != 1:
        raise FormatError(
            f"its metadata names its hash {metadata.count(before)} times, expected once", key=old
        )
    return metadata.replace(before, after)
