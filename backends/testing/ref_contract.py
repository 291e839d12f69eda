# SPDX-License-Identifier: Apache-2.0
"""`RefContract`: the contract of refs, and of several handles on one store; a part of
`BackendContract`.
"""

from __future__ import annotations

from functools import partial

import pytest

from bundler.backends.port import Backend
from bundler.backends.testing.contract_hooks import THREADS, ContractHooks, count, in_threads

ALL_BYTES = bytes(range(256))


class RefContract(ContractHooks):
    """What a store does with refs."""

    def test_a_ref_changes_only_from_what_it_is(self, backend: Backend) -> None:
        """A swap succeeds when it expects the value that is set, and only then."""
        assert backend.read_ref("t") is None
        assert not backend.swap_ref("t", b"something", b"1")
        assert backend.swap_ref("t", None, b"1")
        assert not backend.swap_ref("t", None, b"2")
        assert not backend.swap_ref("t", b"0", b"2")
        assert backend.read_ref("t") == b"1"
        assert backend.swap_ref("t", b"1", b"1")
        assert backend.swap_ref("t", b"1", b"2")
        assert backend.read_ref("t") == b"2"

    def test_refs_are_removed_and_set_again(self, backend: Backend) -> None:
        """A removed ref is not set and not listed, and can be set anew."""
        assert backend.swap_ref("t", None, None)
        for _ in range(3):
            assert backend.swap_ref("t", None, b"1")
            assert list(backend.list_refs()) == ["t"]
            assert not backend.swap_ref("t", b"2", None)
            assert backend.swap_ref("t", b"1", None)
            assert backend.read_ref("t") is None
            assert list(backend.list_refs()) == []
            assert not backend.swap_ref("t", b"1", b"2")

    def test_an_empty_value_is_a_value(self, backend: Backend) -> None:
        """Set to nothing and not set are different."""
        assert backend.swap_ref("t", None, b"")
        assert backend.read_ref("t") == b""
        assert list(backend.list_refs()) == ["t"]
        assert not backend.swap_ref("t", None, b"1")
        assert backend.swap_ref("t", b"", None)
        assert not backend.swap_ref("t", b"", b"1")

    @pytest.mark.parametrize("value", [b"\0", ALL_BYTES, ALL_BYTES * 256], ids=len)
    def test_refs_hold_any_bytes(self, backend: Backend, value: bytes) -> None:
        """The value of a ref comes back as it was."""
        assert backend.swap_ref("t", None, value)
        assert backend.read_ref("t") == value
        assert backend.swap_ref("t", value, value[::-1])
        assert backend.read_ref("t") == value[::-1]

    def test_refs_do_not_wear_out(self, backend: Backend) -> None:
        """A ref takes any number of changes, and is one ref all the time."""
        for number in range(200):
            assert backend.swap_ref("t", b"%d" % (number - 1) if number else None, b"%d" % number)
        assert (backend.read_ref("t"), list(backend.list_refs())) == (b"199", ["t"])

    def test_a_ref_may_begin_like_another(self, backend: Backend) -> None:
        """A ref whose key is the beginning of another's is a ref of its own."""
        for key in ("a", "a/b", "a/b/c"):
            assert backend.swap_ref(key, None, key.encode())
        assert backend.swap_ref("a/b", b"a/b", None)
        assert [backend.read_ref(key) for key in ("a", "a/b", "a/b/c")] == [b"a", None, b"a/b/c"]
        assert sorted(backend.list_refs("a")) == ["a", "a/b/c"]

    def test_objects_and_refs_do_not_share_keys(self, backend: Backend) -> None:
        """An object and a ref of one key know nothing of each other."""
        backend.put({"a": b"object"})
        assert backend.read_ref("a") is None
        assert backend.swap_ref("a", None, b"ref")
        assert backend.get(["a"]) == {"a": b"object"}
        assert backend.delete(["a"]) == {"a"}
        assert backend.read_ref("a") == b"ref"
        assert list(backend.list()) == []
        assert backend.exists(["a"]) == frozenset()

    # -------------------------------------------------------------------------- handles and threads

    def test_handles_see_one_store(self, backend: Backend) -> None:
        """What one handle does, another sees at once."""
        with self.reopen(backend) as other:
            backend.put({"a": b"1"})
            assert other.put({"a": b"2"}) == frozenset()
            assert other.get(["a"]) == {"a": b"1"}
            assert other.swap_ref("t", None, b"1")
            assert not backend.swap_ref("t", None, b"2")
            assert backend.delete(["a"]) == {"a"}
            assert other.exists(["a"]) == frozenset()
            assert backend.swap_ref("t", b"1", b"3")
            assert other.read_ref("t") == b"3"

    def test_closing_twice_is_fine(self, backend: Backend) -> None:
        """A handle may be closed again, and what was stored stays."""
        other = self.reopen(backend)
        other.put({"a": b"1"})
        other.flush()
        other.close()
        other.close()
        with self.reopen(backend) as third:
            assert third.get(["a"]) == {"a": b"1"}

    @pytest.mark.parametrize("handles", [1, THREADS])
    def test_counters_lose_nothing(self, backend: Backend, handles: int) -> None:
        """Threads that count in one ref, on one handle or on several, count to the exact total."""
        opened = [backend if handles == 1 else self.reopen(backend) for _ in range(THREADS)]
        in_threads([partial(count, mine, "counter", 20) for mine in opened])
        assert backend.read_ref("counter") == b"%d" % (20 * THREADS)
        for mine in opened:
            mine.close()

    def test_one_of_many_swaps_from_a_value_succeeds(self, backend: Backend) -> None:
        """Of threads that swap a ref from the same value exactly one succeeds, and its value is
        set.
        """
        for turn in range(10):
            before = backend.read_ref("t")
            values = [b"%d by %d" % (turn, number) for number in range(THREADS)]
            won = in_threads([partial(backend.swap_ref, "t", before, value) for value in values])
            assert [value for value, mine in zip(values, won, strict=True) if mine] == [
                backend.read_ref("t")
            ]
