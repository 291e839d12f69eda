# SPDX-License-Identifier: Apache-2.0
"""Units that threads compress come out as if one thread had done it, also when there are many, and
when one fails.
"""

import os
import threading

import pytest

from bundler.store import unit_sealing
from bundler.store.store_layout import Unit
from bundler.store.unit_sealing import Sealing


def units(count, size=10):
    """Return units with payloads of their own."""
    return [(Unit(((b"%032d" % number, size),)), b"%d" % number * size) for number in range(count)]


@pytest.fixture(autouse=True)
def _two_processors(monkeypatch):
    monkeypatch.setattr(unit_sealing, "_processors", lambda: 2)


@pytest.mark.parametrize("count", [0, 1, 7, 8, 300, 1000])
def test_values_come_in_the_order_of_the_units(count):
    """Whoever compressed them, and however many are under way."""
    given = units(count)
    with Sealing(lambda unit, payload: unit.key.encode() + payload, count) as sealing:
        assert list(sealing.values(given)) == [
            (unit.key, unit.key.encode() + payload) for unit, payload in given
        ]


def test_only_so_much_is_read_ahead(monkeypatch):
    """A push of any size has a bounded part of it in memory."""
    monkeypatch.setattr(unit_sealing, "BATCH_BYTES", 1000)
    read = []

    def payloads():
        for unit, payload in units(100, 100):
            read.append(unit)
            yield unit, payload

    with Sealing(lambda unit, payload: payload, 100) as sealing:
        values = sealing.values(payloads())
        next(values)
        assert len(read) == 11
        assert len(list(values)) == 99


def test_an_error_in_a_thread_is_the_callers(monkeypatch):
    """And the units that no thread had begun are left alone."""
    begun, gate = [], threading.Event()

    def seal(unit, payload):
        begun.append(unit)
        if len(begun) == 1:
            raise MemoryError("none left")
        assert gate.wait(10)
        return payload

    with pytest.raises(MemoryError, match="none left"), Sealing(seal, 100) as sealing:
        list(sealing.values(units(100)))
    gate.set()
    assert len(begun) <= 4


def test_threads_are_as_many_as_this_process_may_use(monkeypatch):
    """Up to eight."""
    monkeypatch.undo()
    for available, expected in ((1, 1), (3, 3), (64, 8)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, n=available: set(range(n)))
        assert unit_sealing._processors() == expected
