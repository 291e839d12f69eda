# SPDX-License-Identifier: Apache-2.0
"""Short jobs go to an engine several in a message: which go together, and what becomes of the
others where one of them fails, ends its worker, is refused or is cancelled.
"""

import pytest
from service_work import PATIENCE_S, Held, job
from waiting import until

from bundler.compile import executor_pool
from bundler.compile.compile_job import Compiled
from bundler.compile.engine_worker import (
    Done,
    EngineMessage,
    Outcomes,
    Refusal,
    read_answer,
    run_job,
)
from bundler.compile.executor_pool import JobGroups
from bundler.errors import CompileFailed, FormatError, ToolchainMismatch, WorkerDied
from bundler.format import wire
from bundler.format.limits import DEFAULT_LIMITS

FILLERS = 8  # so many messages are out before an answer is waited for


def names(message):
    """Return which jobs a message has."""
    return [one.name for one in EngineMessage.from_bytes(message).jobs]


def answered(call, *keys):
    """Answer a message as a worker does whose jobs took a millisecond each."""
    done = [Done(Compiled(key, "", 0.0, (), hit=False).to_bytes(), b"", 0.001) for key in keys]
    call[1].set_result(wire.pack(Outcomes("host:1", done)))


class Group:
    """Three jobs that went in one message to an engine whose calls a test answers."""

    def __init__(self, service, commands):
        self.service, self.held = service, service.held
        fillers = [service.submit(job(f"echo filler {number}")) for number in range(FILLERS)]
        until(lambda: len(self.held.calls) == FILLERS)
        # Of twice as many jobs half go together, while one worker was heard of.
        more = [f"echo more {number}" for number in range(3)]
        self.futures = [service.submit(job(command)) for command in (*commands, *more)][:3]
        answered(self.held.calls[0], "filler")
        until(lambda: len(self.held.calls) > FILLERS)
        self.call = self.held.calls[FILLERS]
        assert names(self.call[0]) == list(commands)
        assert fillers[0].result(PATIENCE_S).key == "filler"

    def alone(self):
        """Return the messages that followed for these jobs, by name."""
        until(lambda: len(self.held.calls) >= FILLERS + 4)
        return {names(call[0])[0]: call for call in self.held.calls[FILLERS + 1 :]}


@pytest.fixture
def group(on, monkeypatch):
    """Make a group of three jobs."""
    monkeypatch.setattr(executor_pool, "PATIENCE_S", 10.0 * PATIENCE_S)

    def make(*commands):
        held = Held()
        service = on(held)
        service.held = held
        return Group(service, commands)

    return make


def test_short_jobs_go_several_in_a_message(group, engine):
    """Each comes back as its own job."""
    made = group("echo a", "echo b", "echo c")
    made.call[1].set_result(engine.submit(run_job, made.call[0]).result())
    assert [future.result(PATIENCE_S).key for future in made.futures] == ["a", "b", "c"]


def test_kernels_of_one_message_are_all_placed(engine, group, compiled, cache):
    """One bundle has them, and each result names its own directory."""
    made = group(*(f"copy {compiled.cache} {key}" for key in compiled.keys[:3]))
    made.call[1].set_result(engine.submit(run_job, made.call[0]).result())
    for key, future in zip(compiled.keys, made.futures, strict=False):
        result = future.result(PATIENCE_S)
        assert result.key == key
        assert result.directory == str(cache / key)
        assert (cache / key).is_dir()


def test_a_job_that_fails_in_a_group_fails_alone(group, engine):
    """With its own words; the others are done."""
    made = group("echo a", "fail no such thing", "crash")
    made.call[1].set_result(engine.submit(run_job, made.call[0]).result())
    assert made.futures[0].result(PATIENCE_S).key == "a"
    with pytest.raises(CompileFailed, match=r"^fail no such thing: .*no such thing"):
        made.futures[1].result(PATIENCE_S)
    until(lambda: "crash" in {names(call[0])[0] for call in made.held.calls[FILLERS + 1 :]})
    crashed = next(c for c in made.held.calls[FILLERS + 1 :] if names(c[0]) == ["crash"])
    crashed[1].set_result(engine.submit(run_job, crashed[0]).result())
    with pytest.raises(WorkerDied, match=r"^crash: compiling it ended 2 workers"):
        made.futures[2].result(PATIENCE_S)


def test_jobs_whose_worker_is_lost_are_tried_alone(group):
    """Which of them ended it shows then, and it is reported by its own name; that they were lost
    together counts for none.
    """
    made = group("echo a", "echo b", "echo c")
    made.call[1].set_exception(ConnectionError("worker gone"))
    alone = made.alone()
    answered(alone["echo a"], "a")
    answered(alone["echo c"], "c")
    assert made.futures[0].result(PATIENCE_S).key == "a"
    assert made.futures[2].result(PATIENCE_S).key == "c"
    alone["echo b"][1].set_exception(ConnectionError("worker gone"))
    until(lambda: [names(call[0]) for call in made.held.calls].count(["echo b"]) == 2)
    last = [call for call in made.held.calls if names(call[0]) == ["echo b"]][-1]
    last[1].set_exception(ConnectionError("worker gone"))
    with pytest.raises(WorkerDied, match=r"^echo b: its worker was lost 2 times"):
        made.futures[1].result(PATIENCE_S)
    assert made.service.counters.retried == 4


def test_jobs_that_a_worker_refuses_are_each_refused_twice(group):
    """By two workers, each for itself."""
    made = group("echo a", "echo b", "echo c")
    made.call[1].set_result(wire.pack(Refusal("host:1", [b"Triton 1, expected 2"])))
    for call in made.alone().values():
        call[1].set_result(wire.pack(Refusal("other:2", [b"Triton 3, expected 2"])))
    for name, future in zip("abc", made.futures, strict=True):
        with pytest.raises(ToolchainMismatch, match=f"^echo {name}: .*Triton 1.*Triton 3"):
            future.result(PATIENCE_S)


def test_a_job_that_is_cancelled_leaves_the_others_of_its_message(group, engine):
    """The message is given up with its last job."""
    made = group("echo a", "echo b", "echo c")
    assert made.futures[1].cancel()
    made.call[1].set_result(engine.submit(run_job, made.call[0]).result())
    assert made.futures[0].result(PATIENCE_S).key == "a"
    assert made.futures[2].result(PATIENCE_S).key == "c"
    other = group("sleep 60", "sleep 61", "sleep 62")
    reply = engine.submit(run_job, other.call[0])
    assert all(future.cancel() for future in other.futures)
    until(other.call[1].cancelled)
    assert wire.unpack(reply.result(PATIENCE_S), "answer")[2][0][0] == "failed"


def test_an_answer_about_other_jobs_is_none(group):
    """As many outcomes as jobs are expected."""
    made = group("echo a", "echo b", "echo c")
    answered(made.call, "a", "b")
    with pytest.raises(FormatError, match="expected the outcomes of 3 jobs, got 2"):
        made.futures[0].result(PATIENCE_S)


@pytest.mark.parametrize(
    "answer",
    [
        Refusal("x" * 5000, []),
        Outcomes("host:1", [Done(b"", bytes(DEFAULT_LIMITS.manifest_bytes + 1), 0.0)]),
        [*"refused"],
        ["outcomes", "host:1", [["done", b"", b"", "soon"]]],
    ],
)
def test_what_is_no_answer_is_refused(answer):
    """Members of another kind, and such as are over the limits."""
    with pytest.raises(FormatError, match="answer of an engine's worker"):
        read_answer(wire.pack(answer))


def filled(count, seconds, workers=1):
    """Return groups with so many jobs, after answers of so many workers."""
    groups = JobGroups()
    for number in range(workers):
        groups.note(f"host:{number}", [seconds] * 8)
    for number in range(count):
        groups.add(number, "kind")
    return groups


def test_long_jobs_go_one_by_one_and_all_at_once():
    """So an engine sees how much there is."""
    groups = filled(50, 1.0)
    assert [groups.take(out) for out in range(51)] == [*([number] for number in range(50)), []]


def test_groups_are_bounded_by_number_time_and_share():
    """16 of a millisecond, 5 of 50 ms; half of what waits, shared among the workers."""
    assert len(filled(500, 0.001).take(0)) == 16
    assert len(filled(500, 0.05).take(0)) == 5
    assert len(filled(10, 0.001).take(0)) == 5
    assert len(filled(40, 0.001, workers=4).take(0)) == 5
    assert len(filled(1, 0.001).take(0)) == 1
    assert len(JobGroups().take(0)) == 0


def test_short_jobs_with_long_ones_among_them_are_not_grouped():
    """So no worker has a message of seconds while others have nothing to do."""
    groups = filled(100, 0.001)
    groups.note("host:0", [5.0])
    assert len(groups.take(0)) == 1
    assert not groups.take(8)


def test_jobs_of_two_kinds_do_not_go_together():
    """They need another compiler, module or environment of their worker."""
    groups = filled(0, 0.001)
    for number in range(20):
        groups.add(number, number // 3)
    assert groups.take(0) == [0, 1, 2]


def test_no_more_messages_are_out_than_keep_workers_busy(monkeypatch):
    """Until nothing was heard for a while."""
    now = [100.0]
    monkeypatch.setattr(executor_pool.time, "monotonic", lambda: now[0])
    groups = filled(500, 0.001)
    assert groups.take(7)
    assert not groups.take(8)
    assert groups.pause_s() == executor_pool.PATIENCE_S
    now[0] += executor_pool.PATIENCE_S
    assert groups.take(8)
    assert groups.take(15)
    assert not groups.take(16)
    assert filled(500, 0.001, workers=10).take(39)
    assert not filled(500, 0.001, workers=10).take(40)
    assert JobGroups().pause_s() is None
