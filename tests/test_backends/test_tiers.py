# SPDX-License-Identifier: Apache-2.0
"""Tiers: who is asked and in which order, what goes where, what a dead, full, damaged or read-only
tier changes.
"""

import threading

import pytest

from bundler.backends.backend_errors import (
    BackendDenied,
    BackendFull,
    BackendTimeout,
    BackendUnavailable,
    InvalidKey,
)
from bundler.backends.breaker import ReadOnly
from bundler.backends.local import LocalBackend
from bundler.backends.memory import MemoryBackend
from bundler.backends.tiers import FETCH_S, SLOTS, Rules, SharedFetches, Tier, Tiers, write_order


class Far(MemoryBackend):
    """A store that is far away: it notes what it was asked, and fails when told to."""

    reads_are_cheap = False

    def __init__(self, data=()):
        super().__init__()
        self.calls, self.error = [], None
        MemoryBackend.put(self, dict(data))

    def _noted(self, name, argument=None):
        self.calls.append((name, argument))
        if self.error is not None:
            raise self.error

    def get(self, keys, **how):
        self._noted("get", sorted(keys))
        return super().get(keys, **how)

    def put(self, items):
        self._noted("put", sorted(items))
        return super().put(items)

    def exists(self, keys):
        self._noted("exists", sorted(keys))
        return super().exists(keys)

    def delete(self, keys, unmodified_since_s=None):
        self._noted("delete", sorted(keys))
        return super().delete(keys, unmodified_since_s)

    def touch(self, keys):
        self._noted("touch", sorted(keys))
        super().touch(keys)

    def list(self, prefix=""):
        self._noted("list", prefix)
        return super().list(prefix)

    def read_ref(self, key):
        self._noted("read_ref", key)
        return super().read_ref(key)

    def swap_ref(self, key, expected, value):
        self._noted("swap_ref", key)
        return super().swap_ref(key, expected, value)

    def lease(self, key, ttl_s):
        self._noted("lease", key)
        return super().lease(key, ttl_s)

    def asked(self, name):
        """Return the arguments of the calls with this name."""
        return [argument for called, argument in self.calls if called == name]


class Near(Far):
    """A store that is near, and can do the same."""

    reads_are_cheap = True


TOLD = []


@pytest.fixture(autouse=True)
def told():
    """What was said of tiers, as (tier, cause)."""
    TOLD.clear()
    return TOLD


# Objects are sound when they begin with their key; a ref names the object that is its value.
RULES = Rules(
    is_sound=lambda key, value: value.startswith(key.encode()),
    named_by=lambda key, value: None if value == b"?" else [value.decode()],
    on_failure=lambda tier, cause, message: TOLD.append((tier, cause)),
)
A, B = {"a": b"a1"}, {"b": b"b1"}


def tiers(*backends, **more):
    names = ["near", "middle", "far"] if len(backends) == 3 else ["near", "far"]
    return Tiers(
        [Tier(name, backend, RULES) for name, backend in zip(names, backends, strict=True)], **more
    )


def numbers(opened, name):
    """Return the counters of a tier that are not zero."""
    found = {tier.name: tier for tier in opened.counters}[name]
    return {key: value for key, value in vars(found).items() if value and key != "name"}


# ------------------------------------------------------------------------------------------ Objects


def test_what_is_near_is_not_asked_of_the_far():
    """A hit in the near tier ends the search, key by key."""
    near, far = Near(A), Far(A | B)
    both = tiers(near, far)
    assert both.get(["a", "b"]) == A | B
    assert far.asked("get") == [["b"]]
    assert (numbers(both, "near"), numbers(both, "far")) == (
        {"hits": 1, "misses": 1, "filled": 1},
        {"hits": 1},
    )


def test_a_hit_in_a_far_tier_is_written_to_nearer_writable_ones():
    """What came from far is in every nearer tier that may be written, and is not fetched again."""
    near, fixed, far = Near(), ReadOnly(Near()), Far(A)
    three = tiers(near, fixed, far)
    assert three.get(["a"]) == three.get(["a"]) == A
    assert MemoryBackend.get(near, ["a"]) == A
    assert fixed.inner.asked("put") == []
    assert len(far.asked("get")) == 1


def test_put_goes_to_the_truth_first_and_then_to_nearer_ones():
    """Everything is in all writable tiers, the farthest first."""
    near, far = Near(), Far()
    far.put = lambda items, put=far.put: (near.calls.append(("far has it", None)), put(items))[1]
    assert tiers(near, far).put(A) == {"a"}
    assert [name for name, _ in near.calls] == ["far has it", "put"]


def test_what_the_truth_held_before_is_not_replaced_near():
    """Who loses the race for a key at the truth leaves nothing of its own in the near tier."""
    near, far = Near(), Far({"a": b"a theirs"})
    both = tiers(near, far)
    assert both.put({"a": b"a mine"}) == frozenset()
    assert both.get(["a"]) == {"a": b"a theirs"}


def test_exists_is_what_the_truth_has():
    """A push must send what only a near tier has; what a base below the truth has need not
    be sent.
    """
    assert tiers(Near(A), Far(B)).exists(["a", "b"]) == {"b"}
    assert tiers(Near(A), ReadOnly(Far(B))).exists(["a", "b", "c"]) == {"a", "b"}
    assert tiers(ReadOnly(Near(A)), Far(B)).exists(["a", "b"]) == {"b"}
    assert tiers(ReadOnly(Near(A)), ReadOnly(Far(B))).exists(["a", "b", "c"]) == {"a", "b"}


def test_removing_removes_every_copy():
    """What is deleted is in no writable tier; how old it must be is asked of the truth's clock."""
    near, far = Near(A | B), Far(A | B)
    both = tiers(near, far)
    assert both.delete(["a"]) == {"a"}
    assert both.delete(["b"], unmodified_since_s=far.now_s() - 100) == frozenset()
    assert both.get(["a", "b"]) == B
    assert both.delete(["b"], unmodified_since_s=far.now_s() + 1) == {"b"}
    assert near.get(["a", "b"]) == far.get(["a", "b"]) == {}


def test_listing_shows_the_truth_and_what_is_only_read():
    """Copies near are no further objects; a base is part of what is there."""
    assert {stat.key for stat in tiers(Near(A), Far(B)).list()} == {"b"}
    assert {stat.key for stat in tiers(Near(A), ReadOnly(Far(B))).list()} == {"a", "b"}


@pytest.mark.parametrize("call", ["get", "exists", "touch", "read_ref"])
def test_a_bad_key_is_refused(call):
    """A bad key is the caller's fault, and counts for no tier."""
    both = tiers(Near(), Far())
    with pytest.raises(InvalidKey):
        getattr(both, call)("../a" if call == "read_ref" else ["../a"])
    assert numbers(both, "far") == {}


# ------------------------------------------------------------------------------------------- Damage


def test_a_damaged_near_copy_is_replaced_from_the_far_one(told):
    """Bytes that are not what was stored are a miss where they lie, and never an answer."""
    near, far = Near({"a": b"xxx"}), Far(A)
    both = tiers(near, far)
    assert both.get(["a"]) == A
    assert MemoryBackend.get(near, ["a"]) == A
    assert numbers(both, "near") == {"damaged": 1, "misses": 1, "filled": 1}
    assert told == [("near", "damaged")]


def test_what_is_damaged_everywhere_is_absent():
    """A damaged object is removed wherever that is permitted, so that it can be stored again."""
    near, far = Near({"a": b"xxx"}), Far({"a": b"yyy"})
    both = tiers(near, far)
    assert both.get(["a"]) == {}
    assert both.put(A) == {"a"}
    assert (near.get(["a"]), far.get(["a"])) == (A, A)


def test_what_is_damaged_in_a_base_is_left_there_and_asked_of_the_next():
    """A read-only tier with damage changes nothing but where the bytes come from."""
    base, far = ReadOnly(Near({"a": b"xxx"})), Far(A)
    both = tiers(base, far)
    assert both.get(["a"]) == A
    assert base.inner.asked("delete") == []


def test_damage_on_the_way_is_asked_for_once_more():
    """A value that was damaged once on its way here does not lose its place."""
    far = Far(A)
    answers = [{"a": b"xxx"}]
    far.get = lambda keys, get=far.get, **how: answers.pop() if answers else get(keys, **how)
    assert tiers(Near(), far).get(["a"]) == A
    assert far.asked("delete") == []


# --------------------------------------------------------------------------------------------- Refs


def test_the_truth_says_what_a_ref_is():
    """A near tier's older value gives way to the truth's, as soon as the near tier has what that
    names.
    """
    near, far = Near(A), Far(A)
    near.swap_ref("t", None, b"old")
    far.swap_ref("t", None, b"a")
    both = tiers(near, far)
    assert both.read_ref("t") == b"a"
    assert near.read_ref("t") == b"a"


def test_a_near_ref_never_names_what_the_near_tier_lacks():
    """The near tier keeps the last value that it could serve until what the new one names
    has come.
    """
    near, far = Near(A), Far(A | B)
    near.swap_ref("t", None, b"a")
    far.swap_ref("t", None, b"b")
    both = tiers(near, far)
    assert both.read_ref("t") == b"b"
    assert near.read_ref("t") == b"a"
    assert both.get(["b"]) == B
    assert near.read_ref("t") == b"b"


def test_a_ref_that_cannot_be_understood_stays_far():
    """What a damaged ref names is not known, so nothing near is told of it."""
    near, far = Near(), Far()
    far.swap_ref("t", None, b"?")
    assert tiers(near, far).read_ref("t") == b"?"
    assert near.read_ref("t") is None


def test_a_ref_that_was_removed_is_removed_near():
    """A near tier does not remember what the truth has given up."""
    near, far = Near(A), Far(A)
    both = tiers(near, far)
    assert both.swap_ref("t", None, b"a")
    assert near.read_ref("t") == b"a"
    assert both.swap_ref("t", b"a", None)
    assert near.read_ref("t") is None
    near.swap_ref("t", None, b"a")
    assert both.read_ref("t") is None
    assert near.read_ref("t") is None


def test_compare_and_set_happens_at_the_truth():
    """Of two hosts with near tiers of their own one succeeds, whatever their near tiers say."""
    far = Far(A | B)
    one, two = tiers(Near(A | B), far), tiers(Near(A | B), far)
    assert one.swap_ref("t", None, b"a")
    assert not two.swap_ref("t", None, b"b")
    assert two.swap_ref("t", b"a", b"b")
    assert not one.swap_ref("t", b"a", b"a")
    assert one.read_ref("t") == two.read_ref("t") == b"b"


def test_a_base_shows_through_until_the_truth_says_otherwise():
    """A ref of a read-only base is read, can be changed on top, and cannot be removed."""
    top, base = Near(A | B), Far(A | B)
    base.swap_ref("t", None, b"a")
    both = tiers(top, ReadOnly(base))
    assert (both.read_ref("t"), list(both.list_refs())) == (b"a", ["t"])
    assert not both.swap_ref("t", None, b"b")
    assert not both.swap_ref("t", b"x", b"b")
    with pytest.raises(BackendDenied, match="only read"):
        both.swap_ref("t", b"a", None)
    assert both.swap_ref("t", b"a", b"b")
    assert (both.read_ref("t"), base.read_ref("t")) == (b"b", b"a")
    assert both.swap_ref("t", b"b", None)
    assert both.read_ref("t") == b"a"


# --------------------------------------------------------------------------------------- What fails

FAILURES = {
    "timeout": (BackendTimeout("no answer"), {"timeouts": 1}),
    "unavailable": (BackendUnavailable("refused"), {"errors": 1}),
    "denied": (BackendDenied("no right"), {"errors": 1}),
}


@pytest.mark.parametrize("cause", FAILURES)
def test_reading_goes_on_without_a_tier_that_fails(cause, told):
    """A far tier that fails is told of once for each cause, counted by its cause, and missed; so is
    a near one.
    """
    for place in ("far", "near"):
        near, far = Near(A), Far(A | B)
        near.swap_ref("t", None, b"a")
        both = tiers(near, far)
        broken = far if place == "far" else near
        broken.error = FAILURES[cause][0]
        assert both.get(["a", "b"]) == (A if place == "far" else A | B)
        counted = {k: v for k, v in numbers(both, place).items() if k in {"timeouts", "errors"}}
        assert counted.keys() == FAILURES[cause][1].keys()
        both.get(["a", "b"])
    assert told == [("far", cause), ("near", cause)]


def test_a_ref_is_what_the_near_tier_was_told_last_while_the_truth_is_dead():
    """Reads fall back to the last known value; a ref that nobody knows is an error, since it may
    well be set.
    """
    near, far = Near(A), Far(A)
    both = tiers(near, far)
    both.swap_ref("t", None, b"a")
    far.error = BackendUnavailable("dead")
    assert both.read_ref("t") == b"a"
    with pytest.raises(BackendUnavailable):
        both.read_ref("other")
    assert {stat.key for stat in both.list()} == {"a"}


@pytest.mark.parametrize(
    "call",
    [
        lambda b: b.put({"c": b"c"}),
        lambda b: b.swap_ref("t", None, b"a"),
        lambda b: b.exists(["a"]),
        lambda b: b.touch(["a"]),
        lambda b: b.delete(["a"]),
        lambda b: b.lease("l", 1),
    ],
)
def test_writing_fails_with_the_truth_or_goes_on_as_configured(call, told):
    """By default what cannot be written at the truth is an error, and nothing is written near;
    degraded, near is enough.
    """
    near, far = Near(A), Far(A)
    far.error = BackendUnavailable("dead")
    before = dict(near._objects), dict(near._refs)
    with pytest.raises(BackendUnavailable):
        call(tiers(near, far))
    assert (near._objects, near._refs) == before
    assert told == []
    call(tiers(near, far, when_down="degrade"))
    assert told == [("far", "unavailable")]


def test_what_was_written_while_the_truth_was_dead_stays_near():
    """When the truth answers again it decides; what it never heard of is still there to read, but
    under no ref.
    """
    near, far = Near(), Far(B)
    both = tiers(near, far, when_down="degrade")
    far.error = BackendUnavailable("dead")
    assert both.put(A) == {"a"}
    assert both.swap_ref("t", None, b"a")
    assert both.read_ref("t") == b"a"
    far.error = None
    assert both.read_ref("t") is None
    assert both.get(["a"]) == A


def test_a_near_tier_that_fails_does_not_stop_writing(told):
    """A full disk near costs only the copies."""
    near, far = Near(), Far()
    near.error = BackendFull("full")
    both = tiers(near, far)
    assert both.put(A) == {"a"}
    assert both.swap_ref("t", None, b"a")
    assert both.read_ref("t") == b"a"
    both.touch(["a"])
    both.flush()
    assert both.get(["a"]) == A
    assert told == [("near", "full")]


def test_when_no_tier_answers_reading_is_an_error():
    """Nothing at all is not the same as nothing there."""
    near, far = Near(), Far()
    near.error = far.error = BackendUnavailable("dead")
    both = tiers(near, far)
    for call in (lambda: both.get(["a"]), lambda: both.read_ref("t"), lambda: list(both.list())):
        with pytest.raises(BackendUnavailable):
            call()


def test_tiers_that_are_all_read_only_deny_every_change():
    """There is no truth to change; reading works."""
    fixed = tiers(ReadOnly(Near(A)), ReadOnly(Far(B)))
    assert fixed.get(["a", "b"]) == A | B
    fixed.touch(["a"])
    fixed.flush()
    for call in (
        lambda: fixed.put(A),
        lambda: fixed.swap_ref("t", None, b"a"),
        lambda: fixed.delete(["a"]),
        lambda: fixed.lease("l", 1),
    ):
        with pytest.raises(BackendDenied, match="reading only"):
            call()


# ------------------------------------------------------------------------------ One fetches for all


def test_threads_that_want_the_same_fetch_it_once():
    """Of many that ask at once for the same objects one asks the far tier, and the others read the
    near one.
    """
    items = {f"k{number}": f"k{number}".encode() * 100 for number in range(50)}
    near, far = MemoryBackend(), Far(items)
    slow = threading.Event()
    far.get = lambda keys, get=far.get, **how: (slow.wait(0.2), get(keys, **how))[1]
    results = []
    start = threading.Barrier(8)

    def fetch():
        both = tiers(near, far)
        start.wait()
        results.append(both.get(list(items)))

    threads = [threading.Thread(target=fetch) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == [items] * 8
    assert [len(keys) for keys in far.asked("get")] == [50]


def test_a_late_process_waits_for_the_same_fetch():
    """The key by which a fetch is known is written last, so a process that finds half of the
    objects still waits for the others.
    """
    keys = ["c", "a", "b"]
    assert write_order(keys)[-1] == min(keys)
    near = MemoryBackend()
    fetches = SharedFetches(near)
    with fetches.joined(["a", "b", "c"]) as waited:
        assert not waited
        seen = []
        late = threading.Thread(target=lambda: seen.append(_join(fetches, ["a", "b"])))
        late.start()
        near.put({"c": b"", "a": b""})
        late.join(30)
    assert seen == [True]


def _join(fetches, keys):
    with fetches.joined(keys) as waited:
        return waited


def test_a_fetch_that_finds_nothing_ends_the_wait():
    """When the fetcher found nothing, those who waited ask for themselves, side by side."""
    near, far = MemoryBackend(), Far()
    assert tiers(near, far).get(["a"]) == {}
    assert tiers(near, far).get(["a"]) == {}
    assert far.asked("get") == [["a"], ["a"]]


def test_a_killed_fetcher_is_not_waited_for_for_ever(monkeypatch):
    """A lease that nobody gives back costs the others the time of one fetch, no more."""
    monkeypatch.setattr("bundler.backends.tiers.FETCH_S", 0.2)
    near, far = MemoryBackend(), Far(A)
    for slot in range(SLOTS):
        assert near.lease(f"fetch/{slot:02x}", 600)
    assert tiers(near, far).get(["a"]) == A
    assert FETCH_S < 10


def test_without_leases_everybody_fetches(root):
    """A near tier whose disk is full has no leases and no copies; what is far is read all
    the same.
    """
    near = LocalBackend(str(root))
    near._full_until_s = float("inf")
    with tiers(near, Far(A)) as both:
        assert both.get(["a"]) == A
        assert numbers(both, "near") == {"misses": 1, "errors": 1}
