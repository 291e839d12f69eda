# SPDX-License-Identifier: Apache-2.0
"""`SeedStream`: the seeds of a program's random numbers, a tensor of int64 for each call.

One seed decides all of them, by SHA-256 of the seed, the number of the call and the place, so that
a program that is replayed without torch draws the same numbers in every process.  `run` makes one
for each runner; a program that torch runs has torch's generator in its place.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from bundler.errors import ConfigError
from bundler.format.digest import sha256

# From how many seeds to a tensor that holds them.
SeedSource = Callable[[int], Any]
_BYTES = 8


class IntegerMemory(Protocol):
    """What puts numbers where kernels read them."""

    def integers(self, numbers: Sequence[int]) -> Any:
        """Return a new int64 tensor that holds these numbers."""


class SeedStream:
    """Returns other seeds in each call, and the same ones in the same order for the same seed.

    Args:
        memory: where they are put.
        seed: any integer; None takes one from the operating system.
    """

    def __init__(self, memory: Any, seed: int | None = None) -> None:
        self._memory = memory
        self._seed = int.from_bytes(os.urandom(_BYTES), "little") if seed is None else seed
        self._calls = itertools.count()

    def __call__(self, count: int) -> Any:
        """Return a tensor of `count` seeds.

        Raises:
            ConfigError: the memory has no `integers`.
        """
        integers = getattr(self._memory, "integers", None)
        if integers is None:
            raise ConfigError(
                "the program draws random numbers: expected a memory with a method integers, got"
                f" {type(self._memory).__name__}",
                got=type(self._memory).__name__,
            )
        return integers(seed_numbers(self._seed, next(self._calls), count))


def seed_numbers(seed: int, call: int, count: int) -> list[int]:
    """Return the seeds of one call, as int64."""
    texts = (f"{seed}:{call}:{place}".encode() for place in range(count))
    return [int.from_bytes(sha256(text)[:_BYTES], "little", signed=True) for text in texts]
