# SPDX-License-Identifier: Apache-2.0
"""Tiers, and a store behind a deadline and a breaker, are byte stores like any other: they pass the
contract.
"""

import hypothesis
import pytest
from hypothesis.stateful import run_state_machine_as_test

from bundler.backends.breaker import Guarded
from bundler.backends.local import LocalBackend
from bundler.backends.memory import MemoryBackend
from bundler.backends.testing import BackendContract, state_machine
from bundler.backends.tiers import Rules, Tier, Tiers


def tiers(*backends):
    return Tiers(
        [Tier(f"tier{number}", backend, Rules()) for number, backend in enumerate(backends)]
    )


class TestTiers(BackendContract):
    """A directory near, memory far."""

    @pytest.fixture
    def backend(self, root):
        self.far = MemoryBackend()
        with tiers(LocalBackend(str(root)), self.far) as opened:
            yield opened

    def reopen(self, backend):
        return tiers(LocalBackend(backend._tiers[0].backend.root), self.far)

    def peek(self, backend, key):
        return self.far._objects[key][0] if key in self.far._objects else None

    def poke(self, backend, key, data):
        backend._tiers[0].backend.delete([key])
        self.far._objects[key] = (data, self.far.now_s())


@pytest.mark.serial  # half a second for each operation
class TestGuarded(BackendContract):
    """A directory behind a deadline and a breaker."""

    @pytest.fixture
    def backend(self, root):
        with Guarded(LocalBackend(str(root))) as opened:
            yield opened

    def reopen(self, backend):
        return Guarded(LocalBackend(backend.inner.root))

    def peek(self, backend, key):
        return backend.inner.get([key]).get(key)

    def poke(self, backend, key, data):
        backend.inner.delete([key])
        backend.inner.put({key: data})


def test_states():
    """Any sequence of calls does with two tiers what a dictionary would do."""
    machine = state_machine(lambda: tiers(MemoryBackend(), MemoryBackend()))
    run_state_machine_as_test(machine, settings=hypothesis.settings.get_profile("backends"))
