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


def _one(_: object) -> int:
    return 1


def batches(
    items: Iterable[T],
    most: int,
    most_bytes: float = math.inf,
    size: Callable[[T], int] = _no_bytes,
    *,
    number: Callable[[T], int] = _one,
    most_if_alike: float = math.inf,
) -> Iterator[list[T]]:
    """Yield the items in their order, as many together as fit; one that fits nowhere is a batch of
    its own.

    Args:
        items: what to split; taken one by one, and no sooner than needed.
        most: how many objects a batch may have.
        most_bytes: how many bytes they may have together.
        size: how many bytes an item has.
        number: how many objects an item stands for.
        most_if_alike: how many bytes a batch may have if each of its items had as many as the
            largest.
    """
    if size is _no_bytes and number is _one:
        left = iter(items)
        while some := list(islice(left, most)):
            yield some
        return
    batch: list[T] = []
    objects = total = largest = 0
    for item in items:
        more, item_bytes = number(item), size(item)
        worst = (len(batch) + 1) * max(largest, item_bytes)
        if batch and (
            objects + more > most or total + item_bytes > most_bytes or worst > most_if_alike
        ):
            yield batch
            batch, objects, total, largest = [], 0, 0, 0
        batch.append(item)
        objects, total, largest = objects + more, total + item_bytes, max(largest, item_bytes)
    if batch:
        yield batch
