# SPDX-License-Identifier: Apache-2.0
"""One compiles for all: who does, who waits, what a killed, frozen or failing compiler and a dying
store change.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest

import bundler
from bundler.backends.backend_errors import BackendUnavailable
from bundler.backends.memory import MemoryBackend
from bundler.errors import BundlerWarning, CompileFailed, ConfigError, NotFound, UnsafeName
from bundler.lifecycle.compiled_once import (
    BLIND_LEASE_S,
    LEAST_BLIND_LEASE_S,
    AlreadyThere,
    CompileLease,
    CompileLeases,
)
from bundler.lifecycle.machine_store import Store
from bundler.store.kernel_records import KernelRecords

HERE = Path(__file__).parent
BUILDERS = HERE.parent / "test_format"


def _load(name, path):
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


build = _load("once_builders", BUILDERS / "builders.py")
redis_server = _load("redis_server", HERE.parent / "redis_server.py")
KEY = build.key("A")


def refuse():
    """A compile that must not happen."""
    raise AssertionError("compiled")


def one(source="a.py", **more):
    return build.one("A", source=source, **more)


def files(bundle):
    return build.read_all(bundle)


@pytest.fixture
def store():
    with bundler.open_store("memory:") as opened:
        yield opened


# -------------------------------------------------------------------------------------- One process


def test_a_kernel_is_compiled_once_and_then_found(store):
    """The first call compiles and publishes, the second is a hit with the same bytes."""
    first = bundler.compile_once(store, KEY, one)
    second = bundler.compile_once(store, KEY, refuse)
    assert (first.how, first.published, second.how, second.published) == (
        "compiled",
        True,
        "found",
        True,
    )
    assert files(first.bundle) == files(second.bundle) == files(one())
    assert [kernel.key for kernel in second.bundle.kernels] == [KEY]


def test_threads_that_ask_at_once_share_one_compile(store):
    """Of eight threads one compiles, the others get its bytes."""
    compiles, results, start = [], [], threading.Barrier(8)

    def compile_slowly():
        compiles.append(1)
        time.sleep(0.1)
        return one(f"{threading.get_ident()}.py")

    def ask():
        start.wait()
        results.append(bundler.compile_once(store, KEY, compile_slowly))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(compiles) == 1
    assert sorted(result.how for result in results)[0] == "compiled"
    assert {result.how for result in results} <= {"compiled", "waited", "found"}
    assert all(files(result.bundle) == files(results[0].bundle) for result in results)


def test_only_the_kernel_that_was_asked_for_is_published(store):
    """What else the compile made is not said to be everybody's."""
    compiled = bundler.compile_once(store, KEY, build.several)
    assert [kernel.key for kernel in compiled.bundle.kernels] == [KEY]
    assert store.kernel_records().look_up([build.key("B")]).missing == (build.key("B"),)


def test_a_compile_without_the_kernel_is_an_error(store):
    """A bundle that lacks the kernel is a NotFound, and the lease is given back."""
    with pytest.raises(NotFound, match="gave no kernel"):
        bundler.compile_once(store, KEY, lambda: build.one("B"))
    assert bundler.compile_once(store, KEY, one).how == "compiled"


@pytest.mark.parametrize("settings", [{"lease_s": 0}, {"wait_s": -1}, {"lease_s": float("nan")}])
def test_times_that_make_no_sense_are_refused(store, settings):
    """A lease lasts, a wait is no shorter than nothing."""
    with pytest.raises(ConfigError, match="expected seconds"):
        bundler.compile_once(store, KEY, refuse, **settings)


def test_a_key_that_triton_does_not_make_is_refused(store):
    """Keys name places in the store."""
    with pytest.raises(UnsafeName):
        bundler.compile_once(store, "../../etc", refuse)


def test_a_failing_compile_is_raised_as_it_is(store):
    """The caller gets the compiler's own error; nobody is told to stay away."""

    def fail():
        raise ZeroDivisionError("of the compiler's")

    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="of the compiler's"):
            bundler.compile_once(store, KEY, fail)
    assert bundler.compile_once(store, KEY, one).how == "compiled"


def test_a_wrong_clock_never_matters(store, monkeypatch):
    """Whatever the time of day does while somebody waits: one compile, one set of bytes."""
    real, hours = time.time, iter(range(0, 1000, 7))
    monkeypatch.setattr(time, "time", lambda: real() + 3600 * (next(hours) % 50 - 25))
    test_threads_that_ask_at_once_share_one_compile(store)


# ---------------------------------------------------- Where the compiler is called by somebody else


def test_begin_gives_a_turn_then_a_hit(store):
    """Who begins first has the turn, publishes later, and everybody after that has a hit."""
    once = CompileLeases(store.kernel_records())
    turn = once.begin(KEY)
    assert isinstance(turn, CompileLease)
    assert turn.holds
    assert turn.publish(one()).how == "compiled"
    hit = once.begin(KEY)
    assert isinstance(hit, AlreadyThere)
    assert files(hit.there.bundle) == files(one())


@pytest.mark.parametrize(
    ("expected_s", "lease_s"),
    [
        (None, BLIND_LEASE_S),
        (2.0, 6.0),
        (1000.0, BLIND_LEASE_S),
        (0.001, LEAST_BLIND_LEASE_S),
    ],
)
def test_a_blind_lease_is_short(store, monkeypatch, expected_s, lease_s):
    """It lasts three times the recorded compile, a minute at most; nobody waits longer than
    that.
    """
    asked, slept = [], []
    grant = MemoryBackend.lease

    def lease(backend, key, ttl_s):
        asked.append(ttl_s)
        return grant(backend, key, ttl_s)

    monkeypatch.setattr(MemoryBackend, "lease", lease)
    once = CompileLeases(store.kernel_records())
    holder = once.begin(KEY, expected_s)
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(
        time, "sleep", lambda seconds: (slept.append(seconds), now.__setitem__(0, now[0] + seconds))
    )
    # The memory's leases are on that clock too, so that the holder's would end in the same moment.
    monkeypatch.setattr(MemoryBackend, "lease", lambda backend, key, ttl_s: asked.append(ttl_s))
    waiter = once.begin(KEY, expected_s)
    monkeypatch.undo()
    assert set(asked) == {lease_s}
    assert isinstance(waiter, CompileLease)
    assert (holder.holds, waiter.holds) == (True, False)
    assert sum(slept) == pytest.approx(lease_s)
    assert max(slept) <= 0.5
    holder.close()


def test_a_blind_lease_is_never_renewed(store):
    """Whoever was silent for its time is taken for dead; what it publishes late changes nothing."""
    once = CompileLeases(store.kernel_records())
    silent = once.begin(KEY, 0.001)
    started = time.monotonic()
    other = once.begin(KEY, 0.001)
    assert isinstance(other, CompileLease)
    assert time.monotonic() - started < 20
    first = other.publish(one("first.py"))
    late = silent.publish(one("late.py"))
    assert (first.how, late.how) == ("compiled", "late")
    assert files(late.bundle) == files(first.bundle) == files(one("first.py"))


def test_a_recorded_time_is_found_in_what_is_left_of_a_kernel(store, monkeypatch):
    """When the kernel's bytes were evicted its record still says how long the compile took."""
    from bundler.format.manifest import Observation, Observed

    timed = build.Files()
    bundle = timed.bundle(
        timed.kernel("A"), observed=Observed({KEY: Observation(times_us=(("cubin", 4_000_000),))})
    )
    store.kernel_records().publish(bundle)
    units = [stat.key for stat in store._backend.list("v1/u")]
    store._backend.delete(units)
    asked = []
    grant = MemoryBackend.lease
    monkeypatch.setattr(
        MemoryBackend, "lease", lambda b, key, ttl_s: (asked.append(ttl_s), grant(b, key, ttl_s))[1]
    )
    turn = CompileLeases(store.kernel_records()).begin(KEY)
    turn.close()
    assert asked == [12.0]


def test_a_turn_that_is_given_up_is_the_next_ones(store):
    """Closing without publishing lets the next one compile at once."""
    once = CompileLeases(store.kernel_records())
    with once.begin(KEY) as turn:
        assert turn.holds
    assert once.begin(KEY).holds


# --------------------------------------------------------------------------------- Stores that fail


class Failing(MemoryBackend):
    """Fails at some calls."""

    def __init__(self, *broken):
        super().__init__()
        self.broken = set(broken)

    def _may(self, name):
        if name in self.broken or "all" in self.broken:
            raise BackendUnavailable(f"no {name}")

    def get(self, keys, **how):
        self._may("get")
        return super().get(keys, **how)

    def put(self, items):
        self._may("put")
        return super().put(items)

    def lease(self, key, ttl_s):
        self._may("lease")
        return super().lease(key, ttl_s)


@pytest.mark.parametrize("broken", ["get", "lease", "put", "all"])
def test_a_store_that_cannot_be_used_is_done_without(broken):
    """Whatever fails, the kernel is compiled here, with one warning for all that the store fails
    at.
    """
    backend = Failing(broken)
    with Store(backend, "failing") as store:
        with pytest.warns(BundlerWarning, match="without the store") as caught:
            result = bundler.compile_once(store, KEY, one)
        assert len(caught) == 1
        assert result.how == "compiled"
        assert result.published == (broken in {"lease", "get"})
        assert files(result.bundle) == files(one())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert bundler.compile_once(store, KEY, one).bundle.digest == one().digest


def test_a_store_without_leases_is_done_without():
    """Where nobody can be told to wait, each compiles, and the first result is still
    everybody's.
    """
    from bundler.backends.breaker import ReadOnly

    class Plain(ReadOnly):
        def put(self, items):
            return self.inner.put(items)

    with Store(Plain(MemoryBackend()), "plain") as store:
        with pytest.warns(BundlerWarning, match="no leases"):
            assert bundler.compile_once(store, KEY, one).how == "compiled"
        assert bundler.compile_once(store, KEY, refuse).how == "found"


# ---------------------------------------------------------------------------------------- Processes


class CompileWorkers:
    """Worker processes that ask for one kernel; all are killed at the end."""

    def __init__(self, folder, *urls):
        self.folder, self.urls, self.started = folder, urls, []

    def start(self, behavior="slow", lease_s=30, wait_s=60):
        line = [
            sys.executable,
            "-P",
            str(HERE / "once_worker.py"),
            str(self.folder),
            str(BUILDERS),
            behavior,
            "A",
            str(lease_s),
            str(wait_s),
            *self.urls,
        ]
        process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.started.append(process)
        return process

    @staticmethod
    def hear(word, *processes):
        """Wait until each has said it."""
        for process in processes:
            while (line := process.stdout.readline()) != f"{word}\n":
                assert line != ""

    def go(self, *processes):
        """Let processes begin, all at once."""
        self.hear("ready", *processes)
        self.go_on(*processes)

    @staticmethod
    def go_on(*processes):
        for process in processes:
            process.stdin.write("\n")
            process.stdin.flush()

    @staticmethod
    def answer(process):
        said = process.communicate(timeout=60)[0].splitlines()
        assert process.returncode == 0
        return json.loads(said[-1])

    def compiles(self):
        return len((self.folder / "compiles").read_text().split())

    def end(self):
        for process in self.started:
            process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def server():
    with redis_server.running(redis_server.NAMES[0]) as started:
        yield started


@pytest.fixture(params=["local", "redis"])
def workers(request, tmp_path, server):
    """Workers with a store of each kind."""
    server.client().flushall()
    patient = server.url(query="timeout_s=5&connect_timeout_s=5")
    made = CompileWorkers(
        tmp_path, {"local": f"file://{tmp_path}/store", "redis": patient}[request.param]
    )
    yield made
    made.end()


@pytest.fixture
def small(tmp_path):
    """Workers with a directory."""
    made = CompileWorkers(tmp_path, f"file://{tmp_path}/store")
    yield made
    made.end()


def test_a_holder_that_is_killed_is_taken_over_from(workers):
    """Within the lease time a waiter compiles in its place."""
    holder, *waiters = [
        workers.start("hang", lease_s=1),
        workers.start(lease_s=1),
        workers.start(lease_s=1),
    ]
    workers.go(holder)
    workers.hear("compiling", holder)
    workers.go(*waiters)
    workers.hear("waiting", *waiters)
    holder.kill()
    answers = [workers.answer(waiter) for waiter in waiters]
    assert sorted(answer[0] for answer in answers) == ["compiled", "waited"]
    assert len({answer[1] for answer in answers}) == 1
    assert workers.compiles() == 2
    assert all(answer[2] < 20 for answer in answers)


def test_a_holder_that_wakes_late_changes_nothing(workers):
    """Stopped past its lease and woken, the holder gets the bytes that everybody has got
    meanwhile.
    """
    holder, waiter, after = workers.start("freeze", lease_s=0.5), workers.start(), workers.start()
    workers.go(holder)
    workers.hear("compiling", holder)
    _, status = os.waitpid(holder.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    workers.go(waiter)
    taken = workers.answer(waiter)
    os.kill(holder.pid, signal.SIGCONT)
    late = workers.answer(holder)
    workers.go(after)
    found = workers.answer(after)
    assert [taken[0], late[0], found[0]] == ["compiled", "late", "found"]
    assert taken[1] == late[1] == found[1]
    assert workers.compiles() == 2


@pytest.mark.serial
def test_a_renewed_lease_outlasts_a_long_compile(small):
    """While a holder lives, nobody takes its place, however long it compiles."""
    holder, waiter = small.start("pause", lease_s=0.5), small.start(lease_s=0.5)
    small.go(holder)
    small.hear("compiling", holder)
    small.go(waiter)
    time.sleep(1.2)
    assert small.compiles() == 1
    small.go_on(holder)
    assert [small.answer(holder)[0], small.answer(waiter)[0]] == ["compiled", "waited"]
    assert small.compiles() == 1


def test_who_waits_long_enough_compiles_itself(small):
    """After the deadline a waiter goes on without the lease; the first result is still
    everybody's.
    """
    holder, waiter = small.start("pause"), small.start(wait_s=0.3)
    small.go(holder)
    small.hear("compiling", holder)
    small.go(waiter)
    first = small.answer(waiter)
    small.go_on(holder)
    second = small.answer(holder)
    assert [first[0], second[0]] == ["compiled", "late"]
    assert first[1] == second[1]
    assert 0.3 <= first[2] < 20


def test_a_failed_compile_is_told_to_those_who_wait(workers):
    """Waiters raise what the compiler said, and do not compile; who comes afterwards tries anew."""
    holder, after, *waiters = [
        workers.start("fail"),
        workers.start(),
        workers.start(),
        workers.start(),
    ]
    workers.go(holder)
    workers.hear("compiling", holder)
    workers.go(*waiters)
    workers.hear("waiting", *waiters)
    workers.go_on(holder)
    assert workers.answer(holder) == ["failed", "ValueError: ptxas fatal: so it says"]
    for waiter in waiters:
        assert workers.answer(waiter) == ["told", "ValueError: ptxas fatal: so it says"]
    assert workers.compiles() == 1
    workers.go(after)
    assert workers.answer(after)[0] == "compiled"


@pytest.mark.serial
def test_an_old_failure_is_not_told(store):
    """Who begins to wait after a failure was told waits for the compile that runs now, not for that
    one.
    """
    records = store.kernel_records()
    records.tell_failure(KEY, "of yesterday")
    turn = CompileLeases(records).begin(KEY)
    results = []
    waiter = threading.Thread(target=lambda: results.append(bundler.compile_once(store, KEY, one)))
    waiter.start()
    time.sleep(0.1)
    turn.close()
    waiter.join(30)
    assert results[0].how == "compiled"


@pytest.mark.serial
def test_a_told_failure_can_be_pickled_and_says_what_the_compiler_said(store):
    """The error is typed, and holds the message as a fact."""
    import pickle

    records = store.kernel_records()
    turn = CompileLeases(records).begin(KEY)
    errors = []

    def wait():
        try:
            bundler.compile_once(store, KEY, refuse)
        except CompileFailed as error:
            errors.append(pickle.loads(pickle.dumps(error)))

    waiter = threading.Thread(target=wait)
    waiter.start()
    time.sleep(0.2)
    turn.tell_failure(RuntimeError("x" * 5000 + "the end \udcff"))
    turn.close()
    waiter.join(30)
    assert (errors[0].key, errors[0].reason[-6:-2]) == (KEY, " end"[0:4])


def test_a_store_that_dies_while_they_wait(tmp_path):
    """Everybody compiles for itself, with a warning, and ends."""
    with redis_server.running(redis_server.NAMES[0]) as mortal:
        made = CompileWorkers(tmp_path, mortal.url())
        try:
            holder, *waiters = [made.start("pause"), made.start(), made.start()]
            made.go(holder)
            made.hear("compiling", holder)
            made.go(*waiters)
            made.hear("waiting", *waiters)
            mortal.kill()
            answers = [made.answer(waiter) for waiter in waiters]
            made.go_on(holder)
            answers.append(made.answer(holder))
        finally:
            made.end()
    assert [answer[0] for answer in answers] == ["compiled"] * 3
    assert [answer[3:] for answer in answers] == [[False, 1]] * 3
    assert made.compiles() == 3


# ------------------------------------------------------------------------------------------ Records


def test_records_are_read_in_batches(store):
    """N kernels take one question for the records, one for their units, one to mark them as
    used.
    """
    files_ = build.Files()
    bundle = files_.bundle(*(files_.kernel(seed) for seed in range(30)))
    records = store.kernel_records()
    assert len(records.publish(bundle).created) == 30
    calls = []

    class Counting(MemoryBackend):
        def get(self, keys, **how):
            calls.append("get")
            return store._backend.get(keys, **how)

        def touch(self, keys):
            calls.append("touch")

    keys = [kernel.key for kernel in bundle.kernels]
    found = KernelRecords(Counting(), "counting").look_up([*keys, build.key(99)])
    assert calls == [
        "get",
        "get",
        "get",
        "touch",
    ]  # the last get asks which bundle has the missing one
    assert files(found.bundle) == files(bundle)
    assert (found.missing, found.damaged) == ((build.key(99),), {})
    calls.clear()
    launch = KernelRecords(Counting(), "counting").look_up(keys, keep="launch")
    assert {a.kind for kernel in launch.bundle.kernels for a in kernel.artifacts} == {
        "cubin",
        "json",
    }
    assert len(files(launch.bundle)) == 60


@pytest.mark.parametrize("kind", ["k", "u"])
@pytest.mark.parametrize("harm", ["flip", "drop", "foreign"])
def test_a_damaged_kernel_is_a_miss_and_can_be_published_anew(store, kind, harm):
    """Record or unit, damaged, gone or another's: never wrong bytes; the next build takes its
    place.
    """
    records = store.kernel_records()
    records.publish(build.one("B"))
    records.publish(one())
    backend = store._backend.inner
    own = (
        backend.list(f"v1/{kind}")
        if kind == "u"
        else [s for s in backend.list("v1/k") if KEY in s.key]
    )
    theirs = {s.key for s in backend.list(f"v1/{kind}")} - {f"v1/k/{KEY}"}
    for key in [stat.key for stat in own]:
        value, when = backend._objects[key]
        if harm == "drop":
            del backend._objects[key]
        elif harm == "flip":
            backend._objects[key] = (value[:-5] + bytes([value[-5] ^ 1]) + value[-4:], when)
        else:
            other = next(k for k in sorted(theirs) if k != key)
            backend._objects[key] = (backend._objects[other][0], when)
    found = records.look_up([KEY])
    assert found.missing == (KEY,)
    assert (KEY in found.damaged) == (harm != "drop" or kind == "u")
    again = records.publish(one("new.py"))
    assert again.created == {KEY}
    assert files(records.look_up([KEY]).bundle) == files(one("new.py"))


def test_a_record_of_a_newer_version_is_left_alone(store):
    """What we cannot read is a miss for us, and stays for those who can."""
    from bundler.format import wire
    from bundler.store import store_layout

    store._backend.put({f"v1/k/{KEY}": store_layout.encode_object(wire.pack([2, b"", b""]))})
    assert store.kernel_records().look_up([KEY]).missing == (KEY,)
    assert bundler.compile_once(store, KEY, one).how == "compiled"
    assert store._backend.exists([f"v1/k/{KEY}"])


def test_a_record_of_schema_1_is_a_miss_that_the_next_build_replaces(store):
    """Nobody reads it any more: the session compiles, and its record takes the place."""
    from bundler.format import wire
    from bundler.format.manifest import Observed
    from bundler.store import store_layout

    rows = wire.pack([1, [], [], [], [], [], []])
    value = store_layout.encode_object(wire.pack([1, rows, Observed().encode()]))
    store._backend.put({f"v1/k/{KEY}": value})
    found = store.kernel_records().look_up([KEY])
    assert found.missing == (KEY,)
    assert "schema 1, expected 2" in found.damaged[KEY]
    store._backend.put({f"v1/k/{KEY}": value})
    assert bundler.compile_once(store, KEY, one).how == "compiled"
    assert bundler.compile_once(store, KEY, one).how == "found"
    assert files(store.kernel_records().look_up([KEY]).bundle) == files(one())


def test_the_first_of_two_builds_is_everybodys(store):
    """Publishing another build of a key changes nothing, and returns the one that is there."""
    records = store.kernel_records()
    first, second = records.publish(one("one.py")), records.publish(one("two.py"))
    assert (first.created, second.created) == ({KEY}, frozenset())
    assert files(second.bundle) == files(first.bundle) == files(one("one.py"))


def test_a_damaged_bundle_is_not_published(store):
    """Bytes that are not what their digest says never become everybody's."""
    from bundler.errors import DigestMismatch
    from bundler.format.bundle import Bundle, MemoryBlobs

    sound = one()
    blobs = {digest: sound.blobs.read_blob(digest) for digest, _ in sound.content.blobs}
    worst = max(blobs, key=lambda digest: len(blobs[digest]))
    blobs[worst] = blobs[worst][:-1] + b"?"
    with pytest.raises(DigestMismatch):
        store.kernel_records().publish(Bundle(sound.content, sound.observed, MemoryBlobs(blobs)))
    assert list(store._backend.list()) == []


def test_units_come_before_the_record_that_names_them():
    """Stopped at any call of a publication, nobody finds a record without its units."""
    for at in range(3):
        backend = Failing()
        calls = []

        def put(items, backend=backend, calls=calls, at=at):
            if len(calls) == at:
                raise BackendUnavailable("stopped")
            calls.append(sorted(items))
            return MemoryBackend.put(backend, items)

        backend.put = put
        records = KernelRecords(backend, "stopping")
        try:
            records.publish(one())
        except bundler.BundlerError:
            assert at < 2
        assert (records.look_up([KEY]).missing, records.look_up([KEY]).damaged) == (
            () if at == 2 else (KEY,),
            {},
        )
