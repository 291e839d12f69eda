# SPDX-License-Identifier: Apache-2.0
"""`batches`: splits what is sent or fetched into exchanges of bounded number and size.

Called by the Redis backend for its commands, and by the store for its calls of a backend.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TypeVar

T = TypeVar("T")


def _no_bytes(_: object) -> int:
    return 0


def batches(
    items: Iterable[T],
    most: int,
    most_bytes: float = math.inf,
    size: Callable[[T], int] = _no_bytes,
    *,
    most_if_alike: float = math.inf,
) -> Iterator[list[T]]:
    """Yield the items in their order, as many together as fit; one that fits nowhere is a batch of
    its own.

    Args:
        items: what to split; taken one by one, and no sooner than needed.
        most: how many items a batch may have.
        most_bytes: how many bytes they may have together.
        size: how many bytes an item has.
        most_if_alike: how many bytes a batch may have if each of its items had as many as the
            largest.
    """
    if size is _no_bytes:
        left = iter(items)
        while some := list(islice(left, most)):
            yield some
        return
    batch: list[T] = []
    total = largest = 0
    for item in items:
        item_bytes = size(item)
        worst = (len(batch) + 1) * max(largest, item_bytes)
        if batch and (
            len(batch) >= most or total + item_bytes > most_bytes or worst > most_if_alike
        ):
            yield batch
            batch, total, largest = [], 0, 0
        batch.append(item)
        total, largest = total + item_bytes, max(largest, item_bytes)
    if batch:
        yield batch
