# SPDX-License-Identifier: Apache-2.0
"""The shipped contract: where it can be imported, and that it notices a store that breaks it."""

import subprocess
import sys
import time

import hypothesis
import pytest
from hypothesis.stateful import run_state_machine_as_test

from bundler.backends.backend_errors import BackendDenied
from bundler.backends.breaker import Guarded, ReadOnly
from bundler.backends.memory import MemoryBackend
from bundler.backends.testing import BackendContract, state_machine
from bundler.backends.tiers import Rules, Tier, Tiers

# Importing a name that is mapped to None is an ImportError, as if it were not installed.
_WITHOUT = """
import sys
sys.modules[sys.argv[1]] = None
try:
    import bundler.backends.testing
except ImportError as error:
    print(error.name, error)
"""


@pytest.mark.parametrize("missing", ["pytest", "hypothesis"])
def test_the_contract_says_what_it_needs(missing):
    """Without pytest or hypothesis the import is an ImportError that names the extra."""
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT, missing], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(
        f"{missing} bundler.backends.testing needs pytest and hypothesis, and {missing} is not"
    )
    assert "pip install 'triton-bundler[contract]'" in done.stdout


def test_stores_do_not_import_the_contract():
    """Using a store loads neither the contract nor what it needs."""
    code = (
        "import sys, bundler, bundler.backends.local, bundler.backends.memory,"
        " bundler.lifecycle.machine_store\nprint([m for m in sys.modules if"
        " m.startswith(('bundler.backends.testing', 'pytest', 'hypothesis'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_store_without_leases_refuses_them():
    """A store that does not say how to take a lease denies it, also behind a guard and as a
    tier.
    """
    plain = ReadOnly(MemoryBackend())
    for store in (plain, Guarded(plain)):
        with pytest.raises(BackendDenied, match="ReadOnly has no leases"):
            store.lease("k", 60)


def test_wrappers_pass_on_what_a_store_can_do():
    """Whether a store can be changed, and compares digests, is asked of the store, through whatever
    wraps it.
    """
    memory = MemoryBackend()
    checking = Tiers([Tier("one", memory, Rules(is_sound=lambda key, value: True))])
    plain = Tiers([Tier("one", ReadOnly(memory), Rules())])
    assert [
        store.writable
        for store in (memory, Guarded(memory), ReadOnly(memory), Guarded(ReadOnly(memory)))
    ] == [
        True,
        True,
        False,
        False,
    ]
    assert [
        store.verified for store in (memory, checking, plain, ReadOnly(checking), Guarded(checking))
    ] == [
        False,
        True,
        False,
        True,
        True,
    ]
    assert (checking.writable, plain.writable) == (True, False)
    assert (memory.counters, [tier.name for tier in checking.counters]) == ((), ["one"])


class Overwriting(MemoryBackend):
    """A store that replaces what is there."""

    def put(self, items):
        self.delete(list(items))
        return super().put(items)


class Prefixing(MemoryBackend):
    """A store that takes a prefix for the beginning of a text."""

    def list(self, prefix=""):
        return (stat for stat in super().list() if stat.key.startswith(prefix))


class Confusing(MemoryBackend):
    """A store for which an empty value is no value."""

    def read_ref(self, key):
        return super().read_ref(key) or None


@pytest.mark.parametrize("broken", [Overwriting, Prefixing, Confusing])
def test_the_state_machine_finds_a_broken_store(broken):
    """A store with a fault does not pass."""
    settings = hypothesis.settings(
        hypothesis.settings.get_profile("backends"),
        max_examples=300,
        derandomize=True,
        database=None,
        phases=[hypothesis.Phase.generate],
        print_blob=False,
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(state_machine(broken), settings=settings)


class Losing(MemoryBackend):
    """A store that compares and sets in two steps."""

    def swap_ref(self, key, expected, value):
        if self.read_ref(key) != expected:
            return False
        time.sleep(0.0001)
        return super().swap_ref(key, self.read_ref(key), value)


def test_the_contract_finds_a_store_that_loses_updates():
    """Swapping in two steps does not pass."""
    contract = BackendContract()
    with pytest.raises(AssertionError):
        for _ in range(20):
            contract.test_one_of_many_swaps_from_a_value_succeeds(Losing())


def test_a_subclass_must_say_how_to_open_a_store():
    """The contract itself has no store."""
    contract = BackendContract()
    for call in (
        lambda: contract.reopen(MemoryBackend()),
        lambda: contract.peek(MemoryBackend(), "a"),
        lambda: contract.poke(MemoryBackend(), "a", b""),
    ):
        with pytest.raises(NotImplementedError):
            call()
