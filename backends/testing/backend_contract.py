# SPDX-License-Identifier: Apache-2.0
"""`BackendContract`: the contract of byte stores, as tests: of objects, of refs and several handles
on one store, and of leases.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ClassVar

import pytest

from bundler.backends.backend_errors import InvalidKey
from bundler.backends.port import BEGINNING_BYTES, Backend, Lease, Stat, Unread

MANY = 1000
ALL_BYTES = bytes(range(256))
MIB = 1024 * 1024
THREADS = 8

_VALID = "a A _ 0 a. a..b Ab.c_d-e a/b/c/d/e/f/g/h a/a tmp data/refs CON"
VALID_KEYS = (
    *_VALID.split(),
    "x" * 128,
    "v1/u/" + "0" * 64,
    "/".join(["k" * 128, "k" * 128, "k" * 128, "k" * 13]),
)
_INVALID = "/ /a a/ a//b . .. ../a a/../b a/.b .a -a a/-b a\\b a:b a+b a* é a/b/c/d/e/f/g/h/i"
INVALID_KEYS = (
    *_INVALID.split(),
    *("", "a b", " a", "a\n", "\n", "a\0", "\u0660"),
    "x" * 129,
    "/".join(["k" * 128, "k" * 128, "k" * 128, "k" * 14]),
)
# Every way to hand a key to a store.
CALLS: dict[str, Callable[[Backend, str], Any]] = {
    "get": lambda backend, key: backend.get([key]),
    "get within": lambda backend, key: backend.get_within({key: 1}),
    "put": lambda backend, key: backend.put({key: b"x"}),
    "exists": lambda backend, key: backend.exists([key]),
    "delete": lambda backend, key: backend.delete([key]),
    "delete unmodified": lambda backend, key: backend.delete([key], unmodified_since_s=0.0),
    "touch": lambda backend, key: backend.touch([key]),
    "claim": lambda backend, key: backend.claim([key]),
    "read_ref": lambda backend, key: backend.read_ref(key),
    "swap_ref": lambda backend, key: backend.swap_ref(key, None, b"x"),
    "remove ref": lambda backend, key: backend.swap_ref(key, None, None),
}
LISTINGS: dict[str, Callable[[Backend, str], Any]] = {
    "list": lambda backend, prefix: list(backend.list(prefix)),
    "list_refs": lambda backend, prefix: list(backend.list_refs(prefix)),
}


class BackendContract:
    """What every byte store must do; a subclass defines how the contract opens a store, and looks
    into it without using it, and is run by pytest.

    Tests of leases are skipped for a store that has none.

    Attributes:
        clock_step_s: modification times closer together than this may be equal.
        lease_s: a lease that tests wait for; long enough that no pause of the machine lets it
            expire too early.
    """

    clock_step_s: ClassVar[float] = 0.02
    lease_s: ClassVar[float] = 1.0

    @pytest.fixture
    def backend(self) -> Iterator[Backend]:
        """Yield an empty store."""
        raise NotImplementedError

    def reopen(self, backend: Backend) -> Backend:
        """Return another handle on the same store, or, where there can be only one, the same."""
        raise NotImplementedError

    def peek(self, backend: Backend, key: str) -> bytes | None:
        """Return what is really stored as an object, None for nothing, without using the code under
        test.
        """
        raise NotImplementedError

    def poke(self, backend: Backend, key: str, data: bytes) -> None:
        """Store an object, over whatever is there, without using the code under test."""
        raise NotImplementedError

    @pytest.fixture
    def leasing(self, backend: Backend) -> Backend:
        """The store, if it has leases."""
        if type(backend).lease is Backend.lease:
            pytest.skip(f"{type(backend).__name__} has no leases")
        return backend

    def later(self) -> None:
        """Wait until the store's clock has moved on."""
        time.sleep(2 * self.clock_step_s)

    # -------------------------------------------------------------------------------------- objects

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

    # ----------------------------------------------------------------------------------------- refs

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

    # --------------------------------------------------------------------------------------- leases

    def test_a_lease_is_exclusive(self, backend: Backend, leasing: Backend) -> None:
        """While a lease is held nobody gets it, on any handle; others are free, and it is when
        given back.
        """
        mine = granted(leasing.lease("k", 60))
        assert leasing.lease("k", 60) is None
        with self.reopen(backend) as other:
            assert other.lease("k", 60) is None
            assert granted(other.lease("k/other", 60)).release()
            assert mine.release()
            assert granted(other.lease("k", 60)).release()

    def test_a_lease_given_back_is_gone(self, leasing: Backend) -> None:
        """It is given back once, and not prolonged afterwards."""
        mine = granted(leasing.lease("k", 60))
        assert mine.renew(60)
        assert [mine.release(), mine.release(), mine.renew(60)] == [True, False, False]

    def test_a_lease_expires(self, leasing: Backend) -> None:
        """When its time is over, somebody else gets it."""
        assert leasing.lease("k", self.clock_step_s) is not None
        assert eventually(lambda: leasing.lease("k", 60)) is not None

    def test_a_late_holder_disturbs_nobody(self, leasing: Backend) -> None:
        """Who wakes after the expiry can neither prolong nor give back the next holder's lease."""
        late = granted(leasing.lease("k", self.clock_step_s))
        mine = granted(eventually(lambda: leasing.lease("k", 60)))
        assert [late.renew(60), late.release()] == [False, False]
        assert leasing.lease("k", 60) is None
        assert mine.release()

    def test_a_renewed_lease_lasts_longer(self, leasing: Backend) -> None:
        """Renewing counts from now, for longer or for shorter."""
        mine = granted(leasing.lease("k", self.lease_s))
        assert mine.renew(60)
        time.sleep(self.lease_s)
        assert leasing.lease("k", 60) is None
        assert mine.renew(self.clock_step_s)
        assert eventually(lambda: leasing.lease("k", 60)) is not None

    def test_one_of_many_gets_a_lease(self, leasing: Backend) -> None:
        """Of threads that ask for one lease at once exactly one gets it."""
        leases = in_threads([lambda: leasing.lease("k", 60)] * THREADS)
        assert sum(lease is not None for lease in leases) == 1

    def test_leases_have_keys_too(self, leasing: Backend) -> None:
        """A lease is called by a key."""
        assert [
            key for key in INVALID_KEYS if not is_refused(partial(leasing.lease, key, 60))
        ] == []

    def test_leases_that_are_held_are_listed(self, leasing: Backend) -> None:
        """Where a store knows its leases, each is listed with its key, holder and time left as long
        as it is held.
        """
        mine = granted(leasing.lease("v1/c/A", 60))
        held = list(leasing.leases())
        if type(leasing).leases is Backend.leases:
            assert held == []
            return
        ((key, holder, left_s),) = held
        assert (key, holder.rpartition(":")[2]) == ("v1/c/A", str(os.getpid()))
        assert left_s is not None
        assert left_s > 0
        assert mine.release()
        assert list(leasing.leases()) == []

    def test_leases_do_not_share_keys(self, backend: Backend, leasing: Backend) -> None:
        """A lease, an object and a ref of one key know nothing of each other."""
        mine = granted(leasing.lease("a", 60))
        assert (list(backend.list()), list(backend.list_refs())) == ([], [])
        assert backend.put({"a": b"1"}) == {"a"}
        assert backend.swap_ref("a", None, b"2")
        assert mine.release()
        assert (backend.get(["a"]), backend.read_ref("a")) == ({"a": b"1"}, b"2")


def in_threads(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Call all at once, each in a thread of its own; returns their results in order, or raises what
    one raised.
    """
    start = threading.Barrier(len(calls))

    def run(call: Callable[[], Any]) -> Any:
        start.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


def is_refused(call: Callable[[], Any]) -> bool:
    """Tell whether a call raises `InvalidKey`."""
    try:
        call()
    except InvalidKey:
        return True
    return False


def count(backend: Backend, key: str, times: int) -> None:
    """Add one to the number in a ref, `times` times, whoever else does the same."""
    done = 0
    while done < times:
        before = backend.read_ref(key)
        done += backend.swap_ref(key, before, b"%d" % (int(before or b"0") + 1))


def granted(lease: Lease | None) -> Lease:
    """Return a lease that must have been granted."""
    assert lease is not None
    return lease


def eventually(ask: Callable[[], Lease | None]) -> Lease | None:
    """Ask again and again until there is an answer; None after half a minute."""
    until = time.monotonic() + 30
    while (answer := ask()) is None and time.monotonic() < until:
        time.sleep(0.01)
    return answer
