# SPDX-License-Identifier: Apache-2.0
"""`state_machine`: a Hypothesis state machine that compares a byte store with a plain dictionary.

The authors of byte stores run it in their tests, as `backends/testing/__init__.py` shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from bundler.backends.port import Backend


# a rule for each method
def state_machine(open_backend: Callable[[], Backend]) -> type[RuleBasedStateMachine]:  # noqa: C901
    """Return a Hypothesis state machine that compares a store with a plain dictionary.

    Args:
        open_backend: opens a new, empty store; closed by the machine.
    """
    keys_in_use = ("a", "b", "a/b", "a/b/c", "ab", "v1/t/x")
    names = st.sampled_from(keys_in_use)
    batches = st.lists(names, max_size=6)
    values = st.sampled_from([b"", b"\0"]) | st.binary(max_size=20)
    maybe = st.none() | values

    def below(keys: Any, prefix: str) -> list[str]:
        wanted = prefix.split("/") if prefix else []
        return sorted(key for key in keys if key.split("/")[: len(wanted)] == wanted)

    class ContractMachine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.backend = open_backend()
            self.objects: dict[str, bytes] = {}
            self.refs: dict[str, bytes] = {}
            self.times: dict[str, float] = {}

        @rule(items=st.dictionaries(names, values, max_size=6))
        def put(self, items: dict[str, bytes]) -> None:
            new = {key: data for key, data in items.items() if key not in self.objects}
            assert self.backend.put(items) == set(new)
            self.objects.update(new)

        @rule(keys=batches)
        def get(self, keys: list[str]) -> None:
            assert self.backend.get(keys) == {
                key: self.objects[key] for key in keys if key in self.objects
            }

        @rule(keys=batches)
        def exists(self, keys: list[str]) -> None:
            assert self.backend.exists(keys) == {key for key in keys if key in self.objects}

        @rule(keys=batches)
        def delete(self, keys: list[str]) -> None:
            assert self.backend.delete(keys) == {key for key in keys if key in self.objects}
            self._forget(keys)

        @rule(keys=batches, everything=st.booleans())
        def delete_unmodified(self, keys: list[str], everything: bool) -> None:
            there = {key for key in keys if key in self.objects and everything}
            since_s = self.backend.now_s() + (3600 if everything else -3600)
            assert self.backend.delete(keys, unmodified_since_s=since_s) == there
            self._forget(there)

        @rule(keys=batches)
        def touch(self, keys: list[str]) -> None:
            self.backend.touch(keys)

        @rule()
        def listing(self) -> None:
            for prefix in ("", *keys_in_use):
                found = {stat.key: stat.size_bytes for stat in self.backend.list(prefix)}
                assert found == {key: len(self.objects[key]) for key in below(self.objects, prefix)}
                assert sorted(self.backend.list_refs(prefix)) == below(self.refs, prefix)

        @rule(key=names, expected=maybe, value=maybe)
        def swap(self, key: str, expected: bytes | None, value: bytes | None) -> None:
            assert self.backend.swap_ref(key, expected, value) == (self.refs.get(key) == expected)
            if self.refs.get(key) == expected:
                self._set(key, value)

        @rule(key=names, value=maybe)
        def change(self, key: str, value: bytes | None) -> None:
            assert self.backend.swap_ref(key, self.refs.get(key), value)
            self._set(key, value)
            assert self.backend.read_ref(key) == value

        @rule(key=names)
        def read(self, key: str) -> None:
            assert self.backend.read_ref(key) == self.refs.get(key)

        @rule()
        def flush(self) -> None:
            self.backend.flush()

        @invariant()
        def times_do_not_go_back(self) -> None:
            now = {stat.key: stat.modified_s for stat in self.backend.list()}
            assert all(now[key] >= before for key, before in self.times.items() if key in now)
            self.times = now

        def teardown(self) -> None:
            self.backend.close()

        def _forget(self, keys: Any) -> None:
            for key in keys:
                self.objects.pop(key, None)
                self.times.pop(key, None)

        def _set(self, key: str, value: bytes | None) -> None:
            self.refs.pop(key, None)
            if value is not None:
                self.refs[key] = value

    return ContractMachine
