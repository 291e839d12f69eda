# SPDX-License-Identifier: Apache-2.0
"""Properties that are worked out once: the same for all who ask, and no lock that a forked child
would wait for.
"""

import os
import signal
import threading

import pytest

from bundler.format.cached_properties import cached_property

PATIENCE_S = 20


class Slow:
    """Works its value out when it may."""

    def __init__(self):
        self.made, self.asked, self.may_answer = [], threading.Event(), threading.Event()

    @cached_property
    def value(self):
        """What it is worth."""
        self.asked.set()
        assert self.may_answer.wait(PATIENCE_S)
        self.made.append(object())
        return self.made[-1]


def test_a_value_is_made_once_and_can_be_forgotten():
    slow = Slow()
    slow.may_answer.set()
    assert slow.value is slow.value
    assert len(slow.made) == 1
    del slow.value
    assert slow.value is slow.made[1]
    assert Slow.value.__doc__ == "What it is worth."


def test_an_error_is_not_remembered():
    slow = Slow()
    slow.asked = None
    for _ in range(2):
        with pytest.raises(AttributeError):
            _ = slow.value


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_that_is_forked_amid_the_work_asks_another_object():
    """A thread of the parent is working a value out; the child does not wait for it."""
    slow, other = Slow(), Slow()
    other.may_answer.set()
    thread = threading.Thread(target=lambda: slow.value)
    thread.start()
    assert slow.asked.wait(PATIENCE_S)
    child = os.fork()
    if not child:
        signal.alarm(PATIENCE_S)  # ends a child that hangs
        os._exit(0 if other.value is other.made[0] else 1)
    _, status = os.waitpid(child, 0)
    slow.may_answer.set()
    thread.join()
    assert status == 0
    assert slow.value is slow.made[0]
