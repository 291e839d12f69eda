# SPDX-License-Identifier: Apache-2.0
"""`ObjectContract`: the contract of objects: batches, keys, listings and times; a part of
`BackendContract`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from bundler.backends.backend_errors import InvalidKey
from bundler.backends.port import BEGINNING_BYTES, Backend, Stat, Unread
from bundler.backends.testing.contract_hooks import (
    CALLS,
    INVALID_KEYS,
    LISTINGS,
    THREADS,
    VALID_KEYS,
    ContractHooks,
    in_threads,
    is_refused,
)

MANY = 1000
ALL_BYTES = bytes(range(256))
MIB = 1024 * 1024


class ObjectContract(ContractHooks):
    """What a store does with objects."""

    @pytest.mark.parametrize(
        "data", [b"", b"\0", ALL_BYTES, ALL_BYTES * (3 * MIB // 256) + b"end"], ids=len
    )
    def test_what_is_put_is_stored_and_read_back(self, backend: Backend, data: bytes) -> None:
        """Bytes of any value and size come back as they were."""
        assert backend.put({"a/b": data}) == {"a/b"}
        assert self.peek(backend, "a/b") == data
        assert backend.get(["a/b"]) == {"a/b": data}
        assert [stat.size_bytes for stat in backend.list()] == [len(data)]

    def test_what_lies_in_the_store_is_found(self, backend: Backend) -> None:
        """An object that somebody else stored is got, listed, and counts as there."""
        self.poke(backend, "a/b", b"theirs")
        assert backend.get(["a/b"]) == {"a/b": b"theirs"}
        assert backend.exists(["a/b"]) == {"a/b"}
        assert [(stat.key, stat.size_bytes) for stat in backend.list()] == [("a/b", 6)]

    @pytest.mark.parametrize("size", [3000, 300_000])
    def test_of_an_object_over_its_limit_the_beginning_comes(
        self, backend: Backend, size: int
    ) -> None:
        """It comes as `Unread`, one of just that size comes whole, and both are there."""
        items = {"a": b"x" * size, "b": b"y" * (size + 1), "c": b""}
        backend.put(items)
        found = backend.get_within(dict.fromkeys(items, size))
        assert {key for key, value in found.items() if isinstance(value, Unread)} == {"b"}
        assert found == items | {"b": b"y" * BEGINNING_BYTES}
        assert backend.get_within(dict.fromkeys(items, size + 1)) == items
        assert backend.exists(items) == items.keys()

    def test_put_creates_and_never_overwrites(self, backend: Backend) -> None:
        """An object that exists stays as it is, whatever is put; only what was created is
        reported.
        """
        assert backend.put({"a": b"first", "b": b""}) == {"a", "b"}
        assert backend.put({"a": b"second", "b": b"x", "c": b"new"}) == {"c"}
        assert [self.peek(backend, key) for key in "abc"] == [b"first", b"", b"new"]
        assert backend.put({"a": b"first"}) == frozenset()

    def test_objects_are_deleted_once(self, backend: Backend) -> None:
        """Deleting reports what was there, and the key is free again."""
        backend.put({"a": b"1", "a/b": b"2"})
        assert backend.delete(["a", "absent"]) == {"a"}
        assert backend.delete(["a"]) == frozenset()
        assert backend.exists(["a", "a/b"]) == {"a/b"}
        assert self.peek(backend, "a") is None
        assert backend.put({"a": b"other"}) == {"a"}
        assert backend.get(["a"]) == {"a": b"other"}

    def test_deleting_what_is_unmodified_spares_what_was_touched(self, backend: Backend) -> None:
        """With a time, only objects go that nobody touched after it, however often that is
        asked.
        """
        backend.put({"old": b"1", "touched": b"2"})
        (before_s,) = {max(stat.modified_s for stat in backend.list())}
        self.later()
        backend.touch(["touched"])
        backend.put({"young": b"3"})
        everything = ["old", "touched", "young", "absent"]
        assert backend.delete(everything, unmodified_since_s=before_s) == {"old"}
        assert backend.delete(everything, unmodified_since_s=before_s) == frozenset()
        assert backend.get(everything) == {"touched": b"2", "young": b"3"}
        assert backend.delete(everything, unmodified_since_s=backend.now_s() + 3600) == {
            "touched",
            "young",
        }

    def test_empty_batches_do_nothing(self, backend: Backend) -> None:
        """Every batched call takes an empty batch."""
        backend.put({"a": b"1"})
        backend.touch([])
        answers = [backend.put({}), backend.exists([]), backend.delete([]), backend.delete([], 0.0)]
        assert (backend.get([]), set(answers)) == ({}, {frozenset()})
        assert backend.get(["a"]) == {"a": b"1"}

    def test_large_batches_are_whole(self, backend: Backend) -> None:
        """A thousand keys in one call are all done, and listed once each."""
        items = {f"v1/u/{number:064x}": b"%d" % number for number in range(MANY)}
        absent = [f"absent/{number}" for number in range(MANY)]
        assert backend.put(items) == items.keys()
        assert backend.get([*items, *absent]) == items
        assert backend.exists([*absent, *items]) == items.keys()
        assert sorted(stat.key for stat in backend.list("v1/u")) == sorted(items)
        backend.touch([*items, *absent])
        assert backend.delete([*absent, *items]) == items.keys()
        assert list(backend.list()) == []

    def test_keys_may_repeat_and_be_absent(self, backend: Backend) -> None:
        """A batch may name a key twice, or one that is not there, in any kind of collection."""
        backend.put({"a": b"1"})
        assert backend.get(["a", "a", "b", "b"]) == {"a": b"1"}
        assert backend.get({"a": None, "b": None}.keys()) == {"a": b"1"}
        assert backend.exists(("a", "b", "a")) == {"a"}
        backend.touch(["a", "a", "b"])
        assert backend.delete(frozenset("ab")) == {"a"}
        assert backend.delete(["a", "a"]) == frozenset()

    def test_no_more_is_read_than_is_asked_for(self, backend: Backend) -> None:
        """An object up to its size comes whole, of a larger one the beginning and why; one without
        limit is not touched by that.
        """
        data = ALL_BYTES * 40
        backend.put({"a": data, "b": data, "c": b"", "d": data})
        found = backend.get_within(
            {"a": len(data), "b": len(data) - 1, "c": 0, "d": 0, "absent": 5}
        )
        assert found.keys() == {"a", "b", "c", "d"}
        assert (found["a"], found["c"]) == (data, b"")
        assert {type(found["a"]), type(found["c"])} == {bytes}
        for key, most in (("b", len(data) - 1), ("d", 0)):
            value = found[key]
            assert isinstance(value, Unread)
            assert value[:] == data[:BEGINNING_BYTES]
            assert (value.size_bytes, value.max_bytes) == (len(data), most)
            assert f"{len(data):,} bytes, expected at most {most:,}" in value.why
        assert backend.get_within({}) == {}
        assert self.peek(backend, "b") == data

    def test_answers_are_of_the_promised_types(self, backend: Backend) -> None:
        """Values are bytes, sets are frozen, listings are statistics."""
        created = backend.put({"a": b"1"})
        assert type(backend.get(["a"])["a"]) is bytes
        assert {type(found) for found in (created, backend.exists(["a"]), backend.delete([]))} == {
            frozenset
        }
        assert {type(stat) for stat in backend.list()} == {Stat}
        assert type(backend.reads_are_cheap) is bool

    # ----------------------------------------------------------------------------------------- keys

    def test_keys_of_the_grammar_are_different_objects_and_refs(self, backend: Backend) -> None:
        """Every valid key works, and no two mean the same."""
        items = {key: f"value of {key}".encode() for key in VALID_KEYS}
        assert backend.put(items) == items.keys()
        assert all(backend.swap_ref(key, None, b"ref of " + key.encode()) for key in VALID_KEYS)
        assert backend.get(VALID_KEYS) == items
        assert sorted(stat.key for stat in backend.list()) == sorted(VALID_KEYS)
        assert {key: backend.read_ref(key) for key in VALID_KEYS} == {
            k: b"ref of " + k.encode() for k in VALID_KEYS
        }
        assert sorted(backend.list_refs()) == sorted(VALID_KEYS)

    @pytest.mark.parametrize("call", CALLS)
    def test_other_keys_are_refused(self, backend: Backend, call: str) -> None:
        """Each call raises `InvalidKey`, which is a ValueError, for what is not a key."""
        assert [
            key for key in INVALID_KEYS if not is_refused(partial(CALLS[call], backend, key))
        ] == []
        assert issubclass(InvalidKey, ValueError)

    @pytest.mark.parametrize("call", LISTINGS)
    def test_other_prefixes_are_refused(self, backend: Backend, call: str) -> None:
        """A listing takes a key as prefix, or nothing."""
        assert [
            key for key in INVALID_KEYS if not is_refused(partial(LISTINGS[call], backend, key))
        ] == [""]

    def test_a_batch_with_a_bad_key_changes_nothing(self, backend: Backend) -> None:
        """Keys are checked before anything is done."""
        backend.put({"a": b"1"})
        changes: list[Callable[[], Any]] = [
            lambda: backend.put({"b": b"2", "../c": b"3"}),
            lambda: backend.delete(["a", "../c"]),
            lambda: backend.delete(["a", "../c"], backend.now_s() + 3600),
        ]
        for change in changes:
            with pytest.raises(InvalidKey):
                change()
        assert [stat.key for stat in backend.list()] == ["a"]

    # --------------------------------------------------------------------------- listings and times

    @pytest.mark.parametrize(
        ("prefix", "found"),
        [
            ("", ["a", "a/b", "a/b/c", "a/bc", "ab", "b/a"]),
            ("a", ["a", "a/b", "a/b/c", "a/bc"]),
            ("a/b", ["a/b", "a/b/c"]),
            ("a/b/c", ["a/b/c"]),
            ("b", ["b/a"]),
            ("a/b/c/d", []),
            ("absent", []),
        ],
    )
    def test_prefixes_end_between_components(
        self, backend: Backend, prefix: str, found: list[str]
    ) -> None:
        """A listing includes the key that is the prefix and what begins with it and a slash,
        nothing else.
        """
        keys = ["a", "a/b", "a/b/c", "a/bc", "ab", "b/a"]
        backend.put(dict.fromkeys(keys, b"x"))
        assert all(backend.swap_ref(key, None, b"x") for key in keys)
        assert sorted(stat.key for stat in backend.list(prefix)) == found
        assert sorted(backend.list_refs(prefix)) == found

    def test_nothing_is_listed_in_an_empty_store(self, backend: Backend) -> None:
        """A new store lists nothing and has nothing."""
        assert (list(backend.list()), list(backend.list_refs()), backend.get(["a"])) == ([], [], {})

    def test_objects_may_come_and_go_while_they_are_listed(self, backend: Backend) -> None:
        """A listing survives changes; what stays all the time is in it."""
        backend.put({f"a/{number}": b"x" for number in range(50)})
        seen = set()
        for stat in backend.list():
            seen.add(stat.key)
            backend.delete([f"a/{number}" for number in range(0, 50, 2)])
            backend.put({"b": b"y"})
        assert {f"a/{number}" for number in range(1, 50, 2)} <= seen

    def test_times_are_on_the_clock_of_the_store(self, backend: Backend) -> None:
        """An object that is put now has about the time that the store says it is."""
        before_s = backend.now_s()
        backend.put({"a": b"1"})
        after_s = backend.now_s()
        (stat,) = backend.list("a")
        assert before_s - self.clock_step_s <= stat.modified_s <= after_s + self.clock_step_s

    def test_touch_moves_time_forward(self, backend: Backend) -> None:
        """Touching sets the time to now, changes nothing else, and creates nothing."""
        backend.put({"a": b"1", "b": b"2"})
        before = {stat.key: stat for stat in backend.list()}
        self.later()
        backend.touch(["a", "absent"])
        after = {stat.key: stat for stat in backend.list()}
        assert after["a"].modified_s > before["a"].modified_s
        assert after == {"a": Stat("a", 1, after["a"].modified_s), "b": before["b"]}
        assert backend.get(["a", "b"]) == {"a": b"1", "b": b"2"}

    def test_claiming_touches_and_says_what_is_there(self, backend: Backend) -> None:
        """A claim moves times as a touch does, and answers as `exists` does."""
        backend.put({"a": b"1", "b": b"2"})
        before = {stat.key: stat for stat in backend.list()}
        self.later()
        assert backend.claim(["a", "absent"]) == {"a"}
        after = {stat.key: stat for stat in backend.list()}
        assert after["a"].modified_s > before["a"].modified_s
        assert after["b"] == before["b"]
        assert backend.claim([]) == frozenset()

    def test_putting_again_does_not_touch(self, backend: Backend) -> None:
        """Only `touch` moves the time of what exists."""
        backend.put({"a": b"1"})
        before = list(backend.list())
        self.later()
        backend.put({"a": b"1"})
        assert list(backend.list()) == before

    def test_one_of_many_creates_an_object(self, backend: Backend) -> None:
        """Of threads that put the same key exactly one creates it, and all read what that
        one put.
        """
        for turn in range(10):
            values = [b"%d" % number * 1000 for number in range(THREADS)]
            created = in_threads([partial(backend.put, {f"k/{turn}": value}) for value in values])
            (winner,) = [value for value, mine in zip(values, created, strict=True) if mine]
            assert backend.get([f"k/{turn}"]) == {f"k/{turn}": winner}

    def test_readers_see_whole_values(self, backend: Backend) -> None:
        """While an object comes and goes, readers see all of it or nothing."""
        value, done = ALL_BYTES * 1024, threading.Event()

        def write() -> list[bytes]:
            for _ in range(30):
                backend.put({"a": value})
                backend.delete(["a"])
            done.set()
            return []

        def read() -> list[bytes]:
            seen: list[bytes] = []
            while not done.is_set():
                seen += backend.get(["a"]).values()
            return seen

        assert {seen for found in in_threads([write, read, read]) for seen in found} <= {value}
