# SPDX-License-Identifier: Apache-2.0
"""`UnsignedRecords`: the kernels of a store one by one where signatures are required, which these have not: none is taken, new ones are published.

`Store.kernel_records` returns it under a policy that requires signatures for kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from bundler.errors import BundlerError, Untrusted
from bundler.format import names
from bundler.format.bundle import Bundle, Keep, MemoryBlobs
from bundler.format.entries import Kernel
from bundler.format.manifest import Content, Observed
from bundler.store.kernel_records import KernelRecords, LookUp


class UnsignedRecords(KernelRecords):
    """Records that are written and not read; the first look says so, once for each process that asks the store."""

    readable = False

    def look_up(self, keys: Collection[str], keep: Keep = "all") -> LookUp:  # nothing is fetched
        """Return that nothing was found."""
        self.say()
        missing = tuple(dict.fromkeys(map(names.check_kernel_key, keys)))
        return LookUp(Bundle(Content(), Observed(), MemoryBlobs({})), missing)

    def say(self) -> None:
        """Say once that kernels of the store are not used."""
        if not self.quiet:
            self.quiet = True
            self.excuse(
                Untrusted(
                    f"{self.name}: signatures are required, and kernels that were published one by one have none, so that none of them is used; "
                    "push them as a bundle with a key, and fetch its tag"
                )
            )

    def recorded(self, most: int) -> Iterator[Kernel]:  # none
        """Yield nothing."""
        yield from ()

    def excused_by(self, excuse: Callable[[BundlerError], None]) -> KernelRecords:
        """Return the same for somebody who is told of failures instead of the user."""
        return UnsignedRecords(self._backend, self.name, self._limits, excuse)
