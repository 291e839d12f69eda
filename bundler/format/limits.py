# SPDX-License-Identifier: Apache-2.0
"""How large anything in a bundle may be.  A reader checks sizes before it allocates.

`Limits` are the bounds, `DEFAULT_LIMITS` those that hold unless a caller passes others.  Readers of
bundles, stores and cache directories keep to them; users pass their own to `Bundle.load` and to
`open_store`.
"""

from __future__ import annotations

from msgspec import Struct

from bundler.errors import LimitExceeded

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
# Of Triton's metadata, which has 1 to 3 KB; parsed, JSON takes up to thirty times its size.
METADATA_BYTES = MIB


class Limits(Struct, frozen=True):
    """Upper bounds; the defaults are far above what real caches hold.  Sizes are in bytes."""

    manifest_bytes: int = 64 * MIB
    # What is decoded whole: a table of contents, tuning records.
    document_bytes: int = 16 * MIB
    observed_bytes: int = 32 * MIB
    # Launch facts or key parts of one kernel, and those of all, joined from pieces that they share.
    facts_bytes: int = 1 * MIB
    all_facts_bytes: int = 512 * MIB
    kernels: int = 100_000
    files_per_kernel: int = 64
    file_bytes: int = 64 * MIB
    kernel_bytes: int = 256 * MIB
    raw_bytes: int = 16 * GIB
    ratio: int = 256
    ratio_applies_above_bytes: int = 1 * MIB
    window_bytes: int = 32 * MIB
    frame_bytes: int = 64 * MIB
    depth: int = 16
    array_items: int = 1_000_000
    string_bytes: int = 4 * KIB

    def check(self, name: str, got: int, what: str) -> None:
        """Raise `LimitExceeded` when `got` is over the limit called `name`."""
        limit: int = getattr(self, name)
        if got > limit:
            raise LimitExceeded(
                f"{what}: {got} is over the limit of {limit} ({name}); "
                "if you trust this bundle, pass Limits with a larger value",
                what=what,
                limit=limit,
                got=got,
            )


DEFAULT_LIMITS = Limits()


def check_metadata_size(size: int, what: str) -> None:
    """Raise `LimitExceeded` when a metadata file is too long to be one."""
    if size > METADATA_BYTES:
        raise LimitExceeded(
            f"{what}: {size} bytes of metadata, over the limit of {METADATA_BYTES}",
            limit=METADATA_BYTES,
            got=size,
        )
