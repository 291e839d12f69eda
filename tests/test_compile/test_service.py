# SPDX-License-Identifier: Apache-2.0
"""The service as its user sees it: futures, memory, progress, cancelling, closing, forks; workers
only do as they are told.
"""

import os
import subprocess
import sys
import threading
from concurrent.futures import CancelledError, as_completed, wait
from pathlib import Path

import pytest
from service_work import HERE, job
from waiting import until

from bundler.compile.compile_job import SourceRef
from bundler.compile.service import CompileService
from bundler.errors import CompileFailed, ConfigError, LimitExceeded

RESULT_S = 30


def said(future):
    """Return what a job's worker said."""
    return future.result(RESULT_S).key


def test_a_job_gives_its_result(service):
    """Each future has the result of its own job, whatever the order in which workers end."""
    futures = [
        service().submit(job("sleep 0.1")),
        *(service().submit(job(f"echo {number}")) for number in range(5)),
    ]
    assert [said(future) for future in futures] == ["slept", *map(str, range(5))]


def test_a_result_is_computed_once(service, starts):
    """Asking a future again gives the very same object, and the job ran once."""
    future = service().submit(job("echo x"))
    assert future.result(RESULT_S) is future.result(RESULT_S)
    assert starts() == ["echo x"]


def test_equal_jobs_at_once_run_once(service, starts):
    """Two who submit equal jobs each get a future, and one worker compiles for both."""
    one = service()
    first, second = one.submit(job("sleep 0.2")), one.submit(job("sleep 0.2"))
    assert first is not second
    assert (said(first), said(second)) == ("slept", "slept")
    assert starts() == ["sleep 0.2"]
    assert (
        one.counters.submitted,
        one.counters.compiled,
        one.counters.joined,
        one.counters.done,
    ) == (2, 1, 1, 2)


def test_results_are_remembered(service, starts):
    """A job that was done is answered from memory, without a worker."""
    one = service()
    assert said(one.submit(job("echo x"))) == said(one.submit(job("echo x")))
    assert (starts(), one.counters.remembered) == (["echo x"], 1)
    one.forget()
    assert said(one.submit(job("echo x"))) == "x"
    assert starts() == ["echo x"] * 2


def test_a_result_whose_kernel_is_gone_is_not_remembered(service, starts, cache):
    """When somebody removes the kernel's directory, the job is done again."""
    one = service()
    one.submit(job("echo x")).result(RESULT_S)
    cache.rename(cache.with_name("away"))
    one.submit(job("echo x")).result(RESULT_S)
    assert starts() == ["echo x"]


def test_failures_are_not_remembered(service, starts):
    """A job that failed is tried again when it is submitted again: the user may have mended the
    cause.
    """
    one = service()
    for _ in range(2):
        with pytest.raises(CompileFailed, match="fail no such type: ValueError: no such type"):
            said(one.submit(job("fail no such type")))
    assert starts() == ["fail no such type"] * 2


def test_workers_see_the_environment_of_now(service, monkeypatch):
    """A job finds the variables as they are when it is submitted, also those set or removed after
    the workers started.
    """
    one = service(1)
    assert said(one.submit(job("env TRITON_OF_TEST"))) == "unset"
    monkeypatch.setenv("TRITON_OF_TEST", "1")
    assert said(one.submit(job("env TRITON_OF_TEST"))) == "1"
    monkeypatch.delenv("TRITON_OF_TEST")
    assert said(one.submit(job("env TRITON_OF_TEST"))) == "unset"


def test_workers_see_the_import_path_of_now(service, monkeypatch):
    """A job can import what its program could when it was submitted."""
    one = service(1)
    one.submit(job("echo x")).result(RESULT_S)
    monkeypatch.syspath_prepend("/a/new/place")
    assert said(one.submit(job("path"))).split(os.pathsep)[0] == "/a/new/place"


def test_a_changed_module_gets_a_new_worker(service, tmp_path):
    """When the file of a kernel's module changes, the job is done again, by a worker that has not
    imported the old one.
    """
    file = tmp_path / "module.py"
    file.write_text("a = 1")
    one, asked = service(1), job("pid", source=SourceRef("module", "f", "module", str(file)))
    before = said(one.submit(asked))
    one.forget()
    assert said(one.submit(asked)) == before
    file.write_text("a = 22")
    assert said(one.submit(asked)) != before


def test_the_queue_is_bounded(service):
    """Who submits more than the queue holds waits until a worker takes something."""
    one = service(1, queue_limit=1)
    running = one.submit(job("rendezvous a b"))
    until(running.running)
    queued, done = one.submit(job("echo queued")), []
    thread = threading.Thread(target=lambda: done.append(one.submit(job("echo last"))))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    (Path(one.cache_dir) / "b").touch()
    thread.join(RESULT_S)
    assert [said(future) for future in (running, queued, done[0])] == [
        "a",
        "queued",
        "last",
    ]


def test_a_thousand_jobs_half_of_them_cancelled(service, starts):
    """Of 1,000 queued jobs 500 are cancelled: none of these runs, and all others give their
    results.
    """
    one = service()
    blocking = [one.submit(job("rendezvous a go")), one.submit(job("rendezvous b go"))]
    for future in blocking:
        until(future.running)
    futures = [one.submit(job(f"echo {number}")) for number in range(1000)]
    assert all(future.cancel() for future in futures[::2])
    (Path(one.cache_dir) / "go").touch()
    finished, unfinished = wait(futures, RESULT_S)
    assert (len(finished), len(unfinished)) == (1000, 0)
    assert len(list(as_completed(futures, RESULT_S))) == 1000
    assert [said(future) for future in futures[1::2]] == [
        str(number) for number in range(1, 1000, 2)
    ]
    assert [future.cancelled() for future in futures[::2]] == [True] * 500
    started, wanted = starts()[2:], {f"echo {number}" for number in range(1, 1000, 2)}
    assert sorted(started) == sorted(wanted)
    assert (one.counters.cancelled, one.counters.compiled) == (500, 502)


def test_a_running_job_can_be_cancelled(service):
    """Cancelling a job that runs ends its worker, and the next job gets another one."""
    one = service(1)
    future = one.submit(job("sleep 300"))
    until(future.running)
    assert future.cancel()
    assert (future.cancelled(), future.running(), future.cancel()) == (True, False, True)
    with pytest.raises(CancelledError):
        future.result(0)
    assert said(one.submit(job("echo next"))) == "next"


def test_who_cancels_does_not_cancel_for_others(service, starts):
    """A job that two wait for goes on when one of them gives up."""
    one = service()
    first, second = (one.submit(job("rendezvous a go")) for _ in range(2))
    until(first.running)
    assert first.cancel()
    (Path(one.cache_dir) / "go").touch()
    assert said(second) == "a"
    assert starts() == ["rendezvous a go"]
    assert not second.cancel()


def test_progress_tells_everything_in_order(service):
    """Whoever listens hears of each job's submission, start and end, with counters and an estimate
    of the time left.
    """
    heard = []
    one = service(1, on_progress=heard.append)
    one.compile_all([job("sleep 0.05"), job("hit"), job("fail here"), job("sleep 0.05")])
    assert [(event.name, event.happened) for event in heard if event.happened == "submitted"] == [
        ("sleep 0.05", "submitted"),
        ("hit", "submitted"),
        ("fail here", "submitted"),
        ("sleep 0.05", "submitted"),
    ]
    ends = [event for event in heard if event.happened in {"compiled", "hit", "failed"}]
    assert [(event.name, event.happened) for event in ends] == [
        ("sleep 0.05", "compiled"),
        ("hit", "hit"),
        ("fail here", "failed"),
    ]
    assert next(event.running for event in heard if event.happened == "started") == ("sleep 0.05",)
    assert "ValueError: here" in ends[-1].error
    assert heard[0].left_s is None
    assert ends[0].left_s > 0.05
    assert (ends[-1].left_s, ends[-1].counters.done, ends[-1].counters.submitted) == (0, 4, 4)


def test_a_listener_that_raises_stops_nothing(service, caplog):
    """A progress bar with a fault is logged, and the kernels come."""

    def fault(progress):
        raise ZeroDivisionError

    assert said(service(on_progress=fault).submit(job("echo x"))) == "x"
    assert "on_progress raised" in caplog.text


def test_timings_say_where_the_time_went(service):
    """For each job: how long it was queued, how long the worker took, and the compiler's stages."""
    one = service(1)
    wait([one.submit(job("sleep 0.1")), one.submit(job("echo x"))], RESULT_S)
    until(lambda: len(one.timings) == 2)
    slow, quick = one.timings
    assert (slow.name, slow.happened, slow.stages) == ("sleep 0.1", "compiled", (("stage", 0.5),))
    assert slow.worker_s >= 0.1
    assert quick.queued_s >= 0.1 > quick.worker_s
    assert quick.total_s >= quick.queued_s


def test_one_worker_runs_in_process(service):
    """With one worker jobs run in this process, done when submit returns; failures are in the
    future all the same.
    """
    one = service(1, isolate=False)
    futures = [one.submit(job(command)) for command in ("pid", "fail here", "leave")]
    assert all(future.done() for future in futures)
    assert said(futures[0]) == str(os.getpid())
    with pytest.raises(CompileFailed, match="ValueError: here"):
        said(futures[1])
    with pytest.raises(CompileFailed, match="SystemExit: 3"):
        said(futures[2])
    assert (one.in_process, one.processes(), one.counters.failed) == (True, (), 2)


def test_a_service_that_was_closed_takes_nothing(service):
    """Closing waits for what was submitted; after it submit says so."""
    one = service()
    future = one.submit(job("sleep 0.1"))
    one.close()
    one.close()
    assert (future.done(), said(future)) == (True, "slept")
    with pytest.raises(ConfigError, match="closed; make another one"):
        one.submit(job("echo x"))


def test_an_error_in_the_block_cancels(service):
    """Leaving the block with an error does not wait for what is queued."""
    with pytest.raises(ZeroDivisionError), service(1) as one:
        futures = [one.submit(job("sleep 300")), one.submit(job("echo never"))]
        raise ZeroDivisionError
    assert [future.cancelled() for future in futures] == [True, True]


def test_a_forked_child_has_a_service_of_its_own(tmp_path):
    """In a forked child inherited futures fail, the service works anew, and the parent notices
    nothing.
    """
    program = """
import os, sys, time
from service_work import job
from bundler.compile.service import CompileService
from bundler.errors import CompileFailed
if __name__ == "__main__":
    service = CompileService(2, cache_dir=sys.argv[1], perform="service_work:perform", preload="", isolate=True)
    mine = [service.submit(job("sleep 0.5")), *(service.submit(job(f"sleep 0.1{n}")) for n in range(8))]
    while not mine[0].running():
        time.sleep(0.005)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            for future in mine:
                assert isinstance(future.exception(0), CompileFailed), future
                assert "forked" in str(future.exception(0))
            assert service.counters.submitted == 0
            server = service.submit(job("server")).result(30).key
            assert server != sys.argv[2] and os.getpid() != os.getppid()
            print("child", service.submit(job("echo hello")).result(30).key, flush=True)
            service.close()
            status = 0
        finally:
            os._exit(status)
    print("child's status", os.waitpid(child, 0)[1], flush=True)
    print("parent", *(future.result(30).key for future in mine))
    service.close()
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program, str(tmp_path), "0"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["child hello", "child's status 0", "parent" + " slept" * 9]


def test_what_wraps_compiles_is_asked_for_each(service, starts):
    """`once` decides whether a job is compiled here; what it raises is in the future."""

    def once(asked, compile_here):
        if asked.name == "fail elsewhere":
            raise ValueError("elsewhere")
        return compile_here()

    one = service(once=once)
    assert said(one.submit(job("echo here"))) == "here"
    with pytest.raises(CompileFailed, match="fail elsewhere: ValueError: elsewhere"):
        said(one.submit(job("fail elsewhere")))
    assert starts() == ["echo here"]


def test_a_job_too_large_for_a_message_fails_alone(service):
    """A job, or a result, over the limit of a message is refused with its size; others are done."""
    one = service(1)
    large = one.submit(job("echo", source=SourceRef("text", "f", data=b"x" * (16 << 20))))
    answer = one.submit(job(f"large {17 << 20}"))
    for future in (large, answer):
        with pytest.raises(LimitExceeded, match="over the limit of 16777216"):
            said(future)
    assert said(one.submit(job("echo small"))) == "small"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"workers": 0}, "workers=0: expected a number of processes"),
        ({"timeout_s": 0}, "timeout_s=0: expected more than 0"),
        ({"queue_limit": 0}, "queue_limit=0"),
        ({"idle_s": -1}, "idle_s=-1"),
        ({"memory_bytes": 1000}, "memory_bytes=1000"),
    ],
)
def test_bad_arguments_are_refused(given, message, cache):
    """An argument that cannot be used is named, with what is expected."""
    with pytest.raises(ConfigError, match=message):
        CompileService(**({"workers": 2, "cache_dir": cache} | given))
