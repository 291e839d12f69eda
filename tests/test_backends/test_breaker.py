# SPDX-License-Identifier: Apache-2.0
"""A store that may be slow or dead: deadlines, the breaker, what a dead one costs in all, and how
it comes back.
"""

import contextlib
import os
import signal
import socket
import threading
import time

import pytest
from waiting import until

from bundler.backends.backend_errors import (
    BackendDenied,
    BackendFull,
    BackendSuspended,
    BackendTimeout,
    BackendUnavailable,
    InvalidKey,
)
from bundler.backends.breaker import FAILURES_IN_A_ROW, JITTER, Deadlines, Guarded, ReadOnly
from bundler.backends.memory import MemoryBackend
from bundler.backends.tiers import Rules, Tier, Tiers

pytestmark = pytest.mark.serial

OPERATIONS = 200
QUICK = Deadlines(deadline_s=0.05, budget_s=0.2, probe_s=0.05)


class Moody(MemoryBackend):
    """Hangs, raises, or does its work."""

    def __init__(self):
        super().__init__()
        self.hangs, self.error, self.calls = None, None, 0

    def exists(self, keys):
        self.calls += 1
        if self.hangs is not None:
            self.hangs.wait(20)
        if self.error is not None:
            raise self.error
        return super().exists(keys)


@pytest.fixture
def moody():
    """A store whose hanging calls all end with the test."""
    store = Moody()
    yield store
    if store.hangs is not None:
        store.hangs.set()


def opened(guarded):
    """Fail until the breaker is open."""
    for _ in range(FAILURES_IN_A_ROW):
        with pytest.raises(BackendUnavailable):
            guarded.exists(["a"])
    with pytest.raises(BackendSuspended):
        guarded.exists(["a"])


def test_a_call_that_overstays_is_left_behind(moody):
    """No call takes longer than its deadline, whatever the store does; the program goes on."""
    guarded = Guarded(moody, QUICK)
    moody.hangs = threading.Event()
    started = time.monotonic()
    with pytest.raises(BackendTimeout, match=r"no answer within 0\.20 s"):
        guarded.exists(["a"])
    assert time.monotonic() - started < 5


def test_the_deadline_grows_with_the_bytes():
    """Large values get the time that a slow line needs for them."""
    guarded = Guarded(
        MemoryBackend(), Deadlines(deadline_s=0.5, bytes_per_s=1000, bytes_per_key=500)
    )
    allowed = []
    guarded._breaker.allowed_s = lambda seconds: (allowed.append(seconds), seconds)[1]
    guarded.put({"a": b"x" * 2000})
    guarded.get(["a", "b"])
    guarded.exists(["a", "b"])
    assert allowed == [2.5, 1.5, 0.5]


def test_failures_in_a_row_open_the_breaker(moody):
    """A store that keeps failing is left alone; the refusal says why, and for how long."""
    guarded = Guarded(moody)
    moody.error = BackendUnavailable("refused")
    opened(guarded)
    with pytest.raises(
        BackendSuspended, match=r"^refused; it is left alone, and asked again in \d+ s"
    ):
        guarded.exists(["a"])
    assert moody.calls == FAILURES_IN_A_ROW
    assert "open" in repr(guarded)


def test_a_success_between_failures_keeps_it_closed(moody):
    """Only failures in a row count."""
    guarded = Guarded(moody)
    for _ in range(4):
        for moody.error in (BackendUnavailable("now and then"), BackendUnavailable("again"), None):
            with contextlib.suppress(BackendUnavailable):
                guarded.exists(["a"])
    assert moody.calls == 12


@pytest.mark.parametrize("error", [BackendFull("full"), BackendDenied("denied"), InvalidKey("bad")])
def test_an_answer_that_is_no_is_an_answer(moody, error):
    """A store that is full, or refuses us, is alive."""
    guarded = Guarded(moody)
    moody.error = error
    for _ in range(3 * FAILURES_IN_A_ROW):
        with pytest.raises(type(error)):
            guarded.exists(["a"])
    assert moody.calls == 3 * FAILURES_IN_A_ROW


def test_it_is_asked_again_in_the_background_and_comes_back(moody):
    """After a while one question is asked in a thread; the program waits for none, and an answer
    closes the breaker.
    """
    guarded = Guarded(moody, QUICK)
    moody.error = BackendUnavailable("refused")
    opened(guarded)
    time.sleep(QUICK.probe_s * (1 + JITTER))
    calls = moody.calls
    with pytest.raises(BackendSuspended):
        guarded.exists(["a"])  # due: this call starts the probe, and does not wait for it
    until(lambda: moody.calls == calls + 1)
    moody.error = None
    time.sleep(QUICK.probe_s * (1 + JITTER))

    def answers():
        with contextlib.suppress(BackendSuspended):
            return guarded.exists(["a"]) == frozenset()
        return False

    until(answers)


def test_a_probe_that_hangs_is_the_only_one(moody):
    """While a probe is under way no other is started."""
    guarded = Guarded(moody, Deadlines(deadline_s=5, probe_s=0.01))
    moody.error = BackendUnavailable("refused")
    opened(guarded)
    moody.hangs = threading.Event()
    time.sleep(0.02)
    calls = moody.calls
    for _ in range(50):
        with pytest.raises(BackendSuspended):
            guarded.exists(["a"])
        time.sleep(0.001)
    assert moody.calls == calls + 1


def test_when_it_is_asked_again_differs_between_processes(moody):
    """A thousand processes that lost their server together do not come back together."""
    moments = set()
    for _ in range(20):
        guarded = Guarded(moody, Deadlines(probe_s=30))
        moody.error = BackendUnavailable("refused")
        opened(guarded)
        moments.add(guarded._breaker._probe_at_s - time.monotonic())
    assert len(moments) == 20
    assert all(30 * (1 - JITTER) - 1 < moment < 30 * (1 + JITTER) + 1 for moment in moments)


def test_a_lease_that_comes_too_late_is_given_back():
    """A lease that is granted after we stopped waiting would keep everybody from it."""
    inner, go_on = MemoryBackend(), threading.Event()
    grant = inner.lease
    inner.lease = lambda key, ttl_s: (go_on.wait(20), grant(key, ttl_s))[1]
    guarded = Guarded(inner, QUICK)
    with pytest.raises(BackendTimeout):
        guarded.lease("k", 600)
    go_on.set()
    until(lambda: (lease := grant("k", 600)) is not None and lease.release())


def test_leases_go_through():
    """A guarded store has the leases of the inner one; one without them says so."""
    guarded = Guarded(MemoryBackend())
    lease = guarded.lease("k", 60)
    assert guarded.lease("k", 60) is None
    assert lease.renew(60)
    assert lease.release()
    guarded.inner = ReadOnly(MemoryBackend())
    with pytest.raises(BackendDenied, match="no leases"):
        guarded.lease("k", 60)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_fork_while_a_call_hangs(moody):
    """A child that was forked meanwhile has a store with a deadline of its own."""
    guarded = Guarded(moody, QUICK)
    moody.hangs = threading.Event()
    hanging = threading.Thread(target=_ignore, args=(guarded,))
    hanging.start()
    until(lambda: moody.calls == 1)
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        moody.hangs = None
        fine = guarded.put({"a": b"1"}) == {"a"} and guarded.exists(["a"]) == {"a"}
        os._exit(0 if fine else 1)
    assert os.waitpid(child, 0)[1] == 0
    hanging.join(20)


def _ignore(guarded):
    with contextlib.suppress(BackendUnavailable):
        guarded.exists(["a"])


# -------------------------------------------------------------------------- What a dead store costs


class Spoken(MemoryBackend):
    """A store behind a socket: a byte out, a byte back, with no time-out of its own."""

    reads_are_cheap = False

    def __init__(self, port):
        super().__init__()
        self.port = port

    def get(self, keys, **how):
        try:
            with socket.create_connection(("127.0.0.1", self.port)) as connection:
                connection.sendall(b"?")
                if connection.recv(1) != b"!":
                    raise BackendUnavailable("hung up")
        except OSError as error:
            raise BackendUnavailable(str(error)) from error
        return super().get(keys, **how)

    exists = get


@pytest.fixture
def black_hole():
    """A port that accepts and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(30)
        held = []

        def accept():
            with contextlib.suppress(OSError):
                while True:
                    held.append(listening.accept()[0])

        thread = threading.Thread(target=accept)
        thread.start()
        yield listening.getsockname()[1]
        listening.shutdown(socket.SHUT_RDWR)
        thread.join(40)
        for connection in held:
            connection.shutdown(socket.SHUT_RDWR)
            connection.close()


@pytest.fixture
def refused():
    """A port where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def test_a_call_that_was_given_up_closes_what_it_opened():
    """A call that overstays is left behind with its socket, and closes it when the store hangs up,
    after the test here.
    """
    listening = socket.create_server(("127.0.0.1", 0))
    store = Spoken(listening.getsockname()[1])
    ended, get = threading.Event(), store.get

    def noted(keys):
        try:
            return get(keys)
        finally:
            ended.set()

    store.get = noted
    guarded = Guarded(store, QUICK)
    with pytest.raises(BackendTimeout):
        guarded.get(["a"])
    connection, _ = listening.accept()
    assert not ended.is_set()

    def hang_up():
        listening.close()
        connection.close()

    threading.Timer(0.2, hang_up).start()


@pytest.mark.parametrize("place", ["black_hole", "refused"])
def test_a_dead_store_costs_a_second_in_all(request, place):
    """Two hundred reads through tiers with a dead far one lose about a second together, and each is
    answered.
    """
    far = Guarded(Spoken(request.getfixturevalue(place)))
    near = MemoryBackend()
    near.put({"a": b"1"})
    told = []
    rules = Rules(on_failure=lambda tier, cause, message: told.append((tier, cause)))
    both = Tiers([Tier("near", near, rules), Tier("far", far, rules)])
    started = time.monotonic()
    for number in range(OPERATIONS):
        assert both.get(["a", f"b{number}"]) == {"a": b"1"}
    assert time.monotonic() - started < 2.5  # one second by design; flights and a busy machine
    lost = both.counters[1]
    assert lost.timeouts + lost.errors <= FAILURES_IN_A_ROW
    assert lost.rested == OPERATIONS - lost.timeouts - lost.errors
    assert told == [("far", "timeout" if place == "black_hole" else "unavailable")]
    assert (lost.hits, lost.misses) == (0, 0)
