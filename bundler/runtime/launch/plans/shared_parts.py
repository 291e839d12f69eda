# SPDX-License-Identifier: Apache-2.0
"""`SharedParts`: what was made of an object that many kernels share, found again by the object
itself.

`plan_builder` and `launchers` keep by it what follows from a signature or a list of parameters
alone, which kernels that differ in their constants share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class SharedParts(Generic[K, V]):
    """Values by the identity of an object: comparing signatures costs more than all else that is
    done with one.

    Any thread may use it; two that miss at once make a value twice.

    Args:
        limit: so many objects are kept; then all are forgotten.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        # The object is kept beside the value, so that no other gets its number.
        self._kept: dict[int, tuple[K, V]] = {}

    def get(self, key: K, make: Callable[[K], V]) -> V:
        """Return the value of an object, made by `make` when there is none."""
        found = self._kept.get(id(key))
        if found is None:
            if len(self._kept) >= self._limit:
                self._kept.clear()
            found = self._kept[id(key)] = key, make(key)
        return found[1]
