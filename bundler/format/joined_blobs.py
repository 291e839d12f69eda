# SPDX-License-Identifier: Apache-2.0
"""`FirstBlobs`: the blobs of several bundles as one source; `merge` and the derivation of kernels
under other keys read through it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from bundler.errors import NotFound
from bundler.format.bundle import BlobSource
from bundler.format.digest import check_digest, digest_text


class FirstBlobs(BlobSource):
    """Blobs of several sources; the first that has one answers.

    The sources belong to the bundles they came from, which close them.
    """

    verified = True

    def __init__(self, sources: Iterable[BlobSource]) -> None:
        self._sources = tuple(sources)
        self.waits = any(source.waits for source in self._sources)

    def read_blob(self, digest: bytes) -> bytes:
        """Return the verified bytes of a blob; raises as `view_blob`."""
        return bytes(self.view_blob(digest))

    def view_blob(self, digest: bytes) -> bytes | memoryview:
        """Return the verified bytes of a blob; raises `NotFound`, `DigestMismatch`, and what the
        source raises.
        """
        for source in self._sources:
            try:
                data = source.view_blob(digest)
            except NotFound:
                continue
            if not source.verified:
                check_digest(data, digest, "blob")
            return data
        raise NotFound(f"no blob {digest_text(digest)}", digest=digest_text(digest))

    def prefetch(self, digests: Collection[bytes]) -> None:
        """Tell every source; each ignores what it does not have."""
        for source in self._sources:
            source.prefetch(digests)
