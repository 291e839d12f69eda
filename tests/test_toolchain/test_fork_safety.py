# SPDX-License-Identifier: Apache-2.0
"""What objects are told in a forked child."""

import gc
import os

from bundler import fork_safety
from bundler.fork_safety import ForkSafeLock, after_fork


class Told:
    """Notes each call in a list that its test has."""

    def __init__(self, calls, name):
        self.calls, self.name = calls, name
        after_fork(self.note)

    def note(self):
        self.calls.append(self.name)
        if self.name == "bad":
            raise ValueError(self.name)


def in_child(verdict):
    """Fork; the child ends with 0 when the verdict is true."""
    child = os.fork()
    if child == 0:
        os._exit(0 if verdict() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_living_objects_are_told_in_order_and_one_fault_stops_nobody():
    """Of three, the one that is gone is not called, and the one that raises does not keep the last
    from being called.
    """
    calls = []
    told = [Told(calls, name) for name in ("gone", "bad", "good")]
    del told[0]
    gc.collect()
    assert in_child(lambda: calls == ["bad", "good"])
    assert calls == []


def test_objects_that_are_gone_leave_nothing_behind():
    """A program may make any number of services: what a fork has to do does not grow with those
    that ended.
    """
    before = len(fork_safety._HANDLERS._methods)
    kept = Told([], "kept")
    for _ in range(100):
        Told([], "short")
    gc.collect()
    assert len(fork_safety._HANDLERS._methods) == before + 1
    assert kept.name == "kept"


def test_a_lock_that_was_held_is_free_in_the_child():
    """The parent forks while it holds the lock; the block of the child ends well, and others get
    the new lock.
    """
    holder = ForkSafeLock()
    with holder.lock:
        assert in_child(lambda: holder.lock.acquire(blocking=False))
    with holder.lock:
        pass
