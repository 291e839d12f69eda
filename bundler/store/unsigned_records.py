# SPDX-License-Identifier: Apache-2.0
"""`UnsignedRecords`: the kernels of a store by their keys where signatures are required, which
kernels that were published one by one have not.

Of these none is taken, new ones are published; kernels of bundles are taken where the signature of
their bundle counts. `Store.kernel_records` returns it under a policy that requires signatures for
kernels.
"""

from __future__ import annotations

from collections.abc import Collection

from bundler.errors import Untrusted
from bundler.format.bundle import Keep
from bundler.store.kernel_records import KernelRecords, LookUp, StoredKernel


class UnsignedRecords(KernelRecords):
    """Records that are written and not read; the first look that finds no signed kernel says so,
    once for each process that asks the store.
    """

    readable = False

    def look_up(self, keys: Collection[str], keep: Keep = "all") -> LookUp:
        """Return the kernels that a signed bundle of the store has."""
        found = super().look_up(keys, keep)
        if found.missing:
            self.say()
        return found

    def find(self, key: str, keep: Keep = "all") -> StoredKernel | None:
        """Return a kernel that a signed bundle of the store has."""
        found = super().find(key, keep)
        if found is None:
            self.say()
        return found

    def say(self) -> None:
        """Say once that kernels of the store are not used."""
        if not self.quiet:
            self.quiet = True
            self.report_failure(
                Untrusted(
                    f"{self.name}: signatures are required, and kernels that were published one by"
                    " one have none, so that none of them is used; push them as a bundle with"
                    " a key"
                )
            )
