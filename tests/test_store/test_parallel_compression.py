# SPDX-License-Identifier: Apache-2.0
"""Units that threads compress come out as if one thread had done it, also when there are many, and
when one fails.
"""

import os
import threading

import pytest

from bundler.format import frames
from bundler.store import bundle_store
from bundler.store.bundle_store import ParallelCompression
from bundler.store.store_layout import Unit


def units(count, size=10):
    """Return units with payloads of their own."""
    return [(Unit(((b"%032d" % number, size),)), b"%d" % number * size) for number in range(count)]


@pytest.fixture(autouse=True)
def _two_processors(monkeypatch):
    monkeypatch.setattr(bundle_store, "processors", lambda most: 2)


@pytest.mark.parametrize("count", [0, 1, 7, 8, 300, 1000])
def test_values_come_in_the_order_of_the_units(count):
    """Whoever compressed them, and however many are under way."""
    given = units(count)
    with ParallelCompression(
        lambda unit, payload: unit.key.encode() + payload, count
    ) as compressing:
        assert list(compressing.values(given)) == [
            (unit.key, unit.key.encode() + payload) for unit, payload in given
        ]


def test_only_so_much_is_read_ahead(monkeypatch):
    """A push of any size has a bounded part of it in memory."""
    monkeypatch.setattr(bundle_store, "BATCH_BYTES", 1000)
    read = []

    def payloads():
        for unit, payload in units(100, 100):
            read.append(unit)
            yield unit, payload

    with ParallelCompression(lambda unit, payload: payload, 100) as compressing:
        values = compressing.values(payloads())
        next(values)
        assert len(read) == 11
        assert len(list(values)) == 99


def test_an_error_in_a_thread_is_the_callers(monkeypatch):
    """And the units that no thread had begun are left alone."""
    begun, gate = [], threading.Event()

    def encode(unit, payload):
        begun.append(unit)
        if len(begun) == 1:
            raise MemoryError("none left")
        assert gate.wait(10)
        return payload

    with (
        pytest.raises(MemoryError, match="none left"),
        ParallelCompression(encode, 100) as compressing,
    ):
        list(compressing.values(units(100)))
    gate.set()
    assert len(begun) <= 4


def test_threads_are_as_many_as_this_process_may_use(monkeypatch):
    """Up to eight."""
    monkeypatch.undo()
    for available, expected in ((1, 1), (3, 3), (64, 8)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, n=available: set(range(n)))
        assert frames.processors(bundle_store._MOST_THREADS) == expected
