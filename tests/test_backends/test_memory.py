# SPDX-License-Identifier: Apache-2.0
"""The store in memory passes the contract, and survives a fork."""

import os
import signal
import time

import hypothesis
import pytest
from hypothesis.stateful import run_state_machine_as_test

from bundler.backends.memory import MemoryBackend
from bundler.backends.testing import BackendContract, state_machine


class TestMemoryBackend(BackendContract):
    """The contract, for a dictionary."""

    @pytest.fixture
    def backend(self):
        """A store that is empty."""
        with MemoryBackend() as opened:
            yield opened

    def reopen(self, backend):
        """There is one handle on a process's memory."""
        return backend

    def peek(self, backend, key):
        """Look into the dictionary."""
        return backend._objects[key][0] if key in backend._objects else None

    def poke(self, backend, key, data):
        """Write into the dictionary."""
        backend._objects[key] = (data, time.time())


def test_states():
    """Any sequence of calls does what a dictionary would do."""
    run_state_machine_as_test(
        state_machine(MemoryBackend), settings=hypothesis.settings.get_profile("backends")
    )


def test_memory_has_no_disk():
    """Reading back is cheap, and flushing does nothing."""
    with MemoryBackend() as backend:
        assert backend.reads_are_cheap
        backend.flush()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_fork_while_the_lock_is_held_does_not_block_the_child():
    """A child that was forked while a thread of its parent was at work has a store that answers."""
    backend = MemoryBackend()
    backend.put({"a": b"1"})
    with backend._lock:
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            os._exit(
                0 if backend.get(["a"]) == {"a": b"1"} and backend.put({"b": b"2"}) == {"b"} else 1
            )
    assert os.waitpid(child, 0)[1] == 0
    assert backend.exists(["b"]) == frozenset()
