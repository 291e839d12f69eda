# SPDX-License-Identifier: Apache-2.0
"""`BundleUnits`: the units of a bundle that is pulled, its launch sets first; the others are made
when somebody needs them.

`BundleStore` makes one for each pull.  A restore of launch sets fetches nothing else: to make the
other units, and their keys, is left to `Marks` there, which does it while kernels are written.
"""

from __future__ import annotations

from collections.abc import Sequence

from bundler.format.lazy_kernel import blobs_of_files
from bundler.format.manifest import Content
from bundler.store.store_layout import Unit, units_of


class BundleUnits:
    """The units of one bundle.

    Safe under threads, without a lock, which another thread could hold at the moment of a fork: two
    may make the same units.

    Args:
        content: of the bundle.

    Attributes:
        launch: those of the launch sets of its kernels.
    """

    def __init__(self, content: Content) -> None:
        self._content = content
        self._all: Sequence[Unit] | None = None
        # Thousands have few targets, each of them one object, which its kernels keep: so no other
        # one has its `id`.
        kernels = content.kernels
        targets = {id(kernel.target): kernel.target for kernel in kernels}
        families = {known: f"{target}/launch" for known, target in targets.items()}
        self.launch: Sequence[Unit] = [
            Unit(tuple(sorted({*blobs_of_files(kernel, "launch")})), families[id(kernel.target)])
            for kernel in kernels
        ]

    def all(self) -> Sequence[Unit]:
        """Return all of them."""
        if self._all is None:
            self._all = [*self.launch, *units_of(self._content, launch=False)]
        return self._all
