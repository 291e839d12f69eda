# SPDX-License-Identifier: Apache-2.0
"""What happens when processes die: each job fails alone, nothing is left behind, and nobody waits
for ever.
"""

import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from service_work import HERE, is_alive, job
from waiting import until

from bundler.compile import worker_pool, worker_processes
from bundler.compile.worker_messages import JobEnvironment
from bundler.compile.worker_processes import Task
from bundler.errors import CompileFailed, CompileTimeout, WorkerDied

# Longer than a lease lasts.
RESULT_S = 60


def said(future):
    """Return what a job's worker said."""
    return future.result(RESULT_S).key


def server_of(worker):
    """Return the process that forked a worker."""
    return int(re.search(r"PPid:\t(\d+)", Path(f"/proc/{worker}/status").read_text())[1])


@pytest.mark.parametrize(
    ("command", "how"),
    [
        ("crash", "it was ended by SIGSEGV"),
        ("exit 3", "it exited with status 3"),
        ("exit 0", "it exited with status 0"),
        ("kill", "it was ended by SIGKILL, which the system also sends when it has no memory left"),
        ("close_everything", "it was ended by SIGKILL"),
    ],
)
def test_a_job_that_kills_its_worker_fails_alone(service, starts, command, how):
    """Such a job is tried twice, then fails with the kernel's name and how its worker ended; the
    others are done.
    """
    one = service()
    fatal, others = (
        one.submit(job(command)),
        [one.submit(job(f"echo {number}")) for number in range(10)],
    )
    with pytest.raises(
        WorkerDied,
        match=re.escape(
            f"{command}: compiling it ended 2 workers, so it is not tried again: {how}"
        ),
    ):
        said(fatal)
    assert [said(future) for future in others] == [str(number) for number in range(10)]
    assert starts().count(command) == 2
    with pytest.raises(WorkerDied, match="not tried again"):
        said(one.submit(job(command)))
    assert starts().count(command) == 2


def test_the_last_words_of_a_worker_are_in_the_error(service):
    """The error shows what the worker printed during this job, with the stack where it crashed, and
    nothing of other jobs.
    """
    one = service(1)
    said(one.submit(job("echo before")))
    with pytest.raises(WorkerDied) as caught:
        said(one.submit(job("crash")))
    assert caught.value.name == "crash"
    assert caught.value.words.startswith("about to crash\nFatal Python error: Segmentation fault")
    assert "in crash\n" in caught.value.words
    assert caught.value.words in str(caught.value)


def test_a_job_whose_worker_died_once_is_done(service):
    """A worker may die through no fault of its job, so the job gets a second one."""
    one = service(1)
    assert said(one.submit(job("once_fatal mark"))) == "survived"
    assert one.counters.retried == 1


def test_an_exit_in_a_job_is_its_failure(service):
    """A module that calls sys.exit fails to compile; the worker goes on."""
    one = service(1)
    before = said(one.submit(job("pid")))
    with pytest.raises(CompileFailed, match="leave: SystemExit: 3"):
        said(one.submit(job("leave")))
    one.forget()
    assert said(one.submit(job("pid"))) == before


def test_a_worker_that_is_killed_is_replaced(service):
    """SIGKILL for a worker that runs a job: another one does it; for one that is idle: nobody
    notices.
    """
    one = service(1)
    future = one.submit(job("rendezvous a go"))
    until(future.running)
    (first,) = one.processes()
    os.kill(first, signal.SIGKILL)
    until(lambda: one.processes() not in {(), (first,)})
    (Path(one.cache_dir) / "go").touch()
    assert said(future) == "a"
    (second,) = one.processes()
    os.kill(second, signal.SIGKILL)
    until(lambda: one.processes() == ())
    assert said(one.submit(job("echo x"))) == "x"


def test_a_server_that_is_killed_is_replaced(service):
    """When the process that forks workers dies, its workers die too, and a new one has all jobs
    done.
    """
    one = service()
    futures = [one.submit(job(f"rendezvous {name} go")) for name in "ab"]
    for future in futures:
        until(future.running)
    workers = one.processes()
    os.kill(server_of(workers[0]), signal.SIGKILL)
    until(lambda: not any(map(is_alive, workers)))
    (Path(one.cache_dir) / "go").touch()
    assert [said(future) for future in futures] == ["a", "b"]


def test_a_job_that_takes_too_long_fails_alone(service, cache):
    """At its time-out the job fails, and its worker is ended with the programs that it started;
    others go on.
    """
    one = service(timeout_s=1.0)
    future, other = one.submit(job("with_child 300")), one.submit(job("echo x"))
    with pytest.raises(CompileTimeout, match="with_child 300: not compiled within 1 s") as caught:
        said(future)
    assert isinstance(caught.value, TimeoutError)
    child = int((cache / "child").read_text())
    until(lambda: not is_alive(child))
    assert (said(other), said(one.submit(job("echo y")))) == ("x", "y")


def test_time_in_the_queue_does_not_count(service):
    """The time-out is for the compile alone: a job that waited longer than that in the queue is
    done.
    """
    one = service(1, timeout_s=0.6)
    assert [
        said(one.submit(job(command))) for command in ("sleep 0.4", "sleep 0.41", "sleep 0.42")
    ] == ["slept"] * 3


def test_a_job_that_takes_too_much_memory_fails_alone(service, starts):
    """A worker has a limit of memory; over it the job fails with the limit, once, and others are
    done.
    """
    one = service(memory_bytes=256 << 20)
    future, other = one.submit(job("eat 1000")), one.submit(job("eat 10"))
    with pytest.raises(WorkerDied, match=r"eat 1000: compiling it needs more memory .*\(256 MiB\)"):
        said(future)
    assert said(other) == str(10 << 20)
    assert starts().count("eat 1000") == 1


def test_interrupts_of_the_terminal_do_not_reach_workers(service):
    """Ctrl-C is for the program, which may close the service; a worker does not end by it."""
    one = service(1)
    assert said(one.submit(job("interrupt"))) == "None"


@pytest.mark.parametrize("held", [False, True])
def test_nothing_outlives_a_killed_program(tmp_path, held):
    """After SIGKILL for the program its workers end, and what these started, even where a forked
    child holds the sockets.
    """
    program = """
import os, sys, time
from service_work import job
from bundler.compile.service import CompileService
service = CompileService(2, cache_dir=sys.argv[1], perform="service_work:perform", preload="", isolate=True)
futures = [service.submit(job("with_child 300")), service.submit(job("sleep 300"))]
while not (all(future.running() for future in futures) and os.path.exists(os.path.join(sys.argv[1], "child"))):
    time.sleep(0.005)
import ctypes
# A fork as a program in C makes it, which runs no handlers of Python.
child = ctypes.CDLL(None).fork() if sys.argv[2] == "True" else 0
if child == 0 and sys.argv[2] == "True":
    time.sleep(300)
print(child, *service.processes(), flush=True)
time.sleep(300)
"""
    started = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path), str(held)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])},
        stdout=subprocess.PIPE,
        text=True,
    )
    with started:
        holder, *workers = map(int, started.stdout.readline().split())
        until(lambda: (tmp_path / "child").read_text() != "")
        left = [*workers, server_of(workers[0]), int((tmp_path / "child").read_text())]
        assert all(map(is_alive, left))
        started.kill()
        try:
            until(lambda: not any(map(is_alive, left)))
        finally:
            if holder:
                os.kill(holder, signal.SIGKILL)


def test_nothing_runs_while_there_is_nothing_to_do(service):
    """After the idle time neither process nor thread is left; the next job starts them again."""
    one = service(idle_s=0.2)
    worker = int(said(one.submit(job("pid"))))
    server = server_of(worker)
    until(lambda: not is_alive(worker) and not is_alive(server))
    until(lambda: "bundler-compile" not in {thread.name for thread in threading.enumerate()})
    assert one.processes() == ()
    assert said(one.submit(job("echo x"))) == "x"


def test_no_process_before_the_first_job(service):
    """Making a service starts nothing, and neither does closing it."""
    one = service()
    one.close()
    assert one.processes() == ()


def test_warm_quiet_and_awake(service):
    """Warming up starts all workers; quiesce ends them but for the server, so that they come back
    without its start.
    """
    one = service(3)
    assert one.warm_up(RESULT_S)
    warm = one.processes()
    assert len(warm) == 3
    server = server_of(warm[0])
    one.quiesce()
    until(lambda: not any(map(is_alive, warm)))
    assert is_alive(server)
    assert one.warm_up(RESULT_S)
    assert {server_of(worker) for worker in one.processes()} == {server}


@pytest.mark.slow
def test_a_start_that_takes_longer_than_the_idle_time_is_waited_for(service):
    """The idle time begins when the workers stand ready, so that warming up does not end itself."""
    assert service(idle_s=2.0, preload="service_work:start_slowly").warm_up(RESULT_S)


def test_a_quiesced_service_finishes_what_it_has(service):
    """Quiesce waits for jobs, running and queued, and ends workers as they run out of them."""
    one = service(1)
    futures = [one.submit(job("sleep 0.2")), one.submit(job("echo x"))]
    one.quiesce()
    assert [said(future) for future in futures] == ["slept", "x"]
    until(lambda: one.processes() == ())


def test_closing_leaves_no_process(service):
    """After close no process of the service is left, also when it had to end a job."""
    one = service()
    future = one.submit(job("sleep 300"))
    until(future.running)
    worker = one.processes()[0]
    server = server_of(worker)
    one.close(cancel=True)
    assert (is_alive(worker), is_alive(server), future.cancelled()) == (False, False, True)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"preload": "service_work:fail_to_start"}, "RuntimeError: no compiler on this machine"),
        ({"perform": "no_such_module:perform"}, "No module named 'no_such_module'"),
    ],
)
def test_a_server_that_cannot_start_says_why(service, settings, reason):
    """Every job then fails with the reason; nobody waits for ever."""
    one = service(**settings)
    futures = [one.submit(job(f"echo {number}")) for number in range(3)]
    for future in futures:
        with pytest.raises(WorkerDied, match=reason):
            said(future)
    assert not one.warm_up(RESULT_S)


def test_an_interpreter_that_is_not_there_says_so(service, monkeypatch):
    """Where this program's interpreter cannot be started, jobs fail with the system's reason."""
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with pytest.raises(WorkerDied, match=r"cannot be started: .*No such file"):
        said(service().submit(job("echo x")))


def test_a_server_of_another_release_is_refused(service, monkeypatch):
    """When the package was replaced under a running program, jobs fail with that reason instead of
    nonsense.
    """
    monkeypatch.setattr(worker_processes, "VERSION", "0.0.0")
    with pytest.raises(WorkerDied, match=r"expected 0\.0\.0 .*start it again"):
        said(service().submit(job("echo x")))


def test_answers_of_a_server_of_another_release_do_not_count(cache, monkeypatch):
    """However slowly this process reads: the server forks, and its worker answers, before its
    version is read.
    """
    monkeypatch.setattr(worker_processes, "VERSION", "0.0.0")
    monkeypatch.syspath_prepend(str(HERE))
    processes = worker_processes.WorkerProcesses(
        worker_processes.WorkerPlan("service_work:perform", "", str(cache), 0)
    )
    try:
        worker = processes.fork(0)
        sent = job("echo x")
        environment = JobEnvironment.now()
        processes.send(worker, Task("x", "x", "", sent.to_bytes(), environment, None))
        assert select.select([worker.channel], [], [], RESULT_S)[0]
        (event,) = processes.wait(RESULT_S)
    finally:
        processes.close()
    assert isinstance(event, worker_processes.ServerLost)
    assert event.never_ready


def test_a_server_that_never_gets_ready_is_given_up(service, monkeypatch):
    """A start that hangs ends with an error."""
    monkeypatch.setattr(worker_pool, "START_TIMEOUT_S", 0.5)
    with pytest.raises(WorkerDied, match=r"not started within 0\.5 s"):
        said(service(preload="service_work:hang").submit(job("echo x")))


def test_output_of_workers_is_bounded(service):
    """What workers print stays out of the program's output, and the file that keeps it does not
    grow for ever.
    """
    one = service(1)
    for number in range(5):
        said(one.submit(job(f"say {number} 700000")))
    (worker,) = one._pool._processes.workers.values()
    assert os.fstat(worker.output.fileno()).st_size <= 1_400_002


def test_a_lost_lease_delays_nobody_for_long(service):
    """A job whose lease another process holds waits while other jobs are done, and is done when the
    lease is free.
    """
    one, two = service(1), service(1)
    first = one.submit(job("rendezvous a go"))
    until(first.running)
    second, other = two.submit(job("rendezvous a go")), two.submit(job("echo other"))
    assert said(other) == "other"
    assert not second.running()
    (Path(one.cache_dir) / "go").touch()
    assert (said(first), said(second)) == ("a", "a")


def test_jobs_of_one_service_never_wait_for_a_lease_of_its_own(service, monkeypatch):
    """Leases share a few names; these two jobs wait for each other, so that both have to run at
    once.
    """
    monkeypatch.setattr("bundler.compile.service.SLOTS", 1)
    one = service(2)
    futures = [one.submit(job("rendezvous a b")), one.submit(job("rendezvous b a"))]
    assert [said(future) for future in futures] == ["a", "b"]


@pytest.mark.serial
def test_leases_are_renewed(service, monkeypatch, starts):
    """A compile that takes longer than a lease lasts keeps it."""
    monkeypatch.setattr("bundler.compile.worker_pool.LEASE_S", 0.3)
    one, two = service(1), service(1)
    first = one.submit(job("rendezvous a go"))
    until(first.running)
    second = two.submit(job("rendezvous a go"))
    time.sleep(0.8)
    assert (second.running(), starts()) == (False, ["rendezvous a go"])
    (Path(one.cache_dir) / "go").touch()
    assert (said(first), said(second)) == ("a", "a")


def test_a_dead_holder_of_a_lease_is_forgotten(service, monkeypatch, starts):
    """Who holds a lease and is gone delays the others by no more than the lease."""
    monkeypatch.setattr("bundler.compile.worker_pool.LEASE_S", 0.3)
    one, two = service(1), service(1)
    first = one.submit(job("rendezvous a go"))
    until(first.running)
    monkeypatch.setattr(one._pool._leases, "renew", lambda task, now_s: None)
    second = two.submit(job("rendezvous a go"))
    until(lambda: len(starts()) == 2)
    (Path(one.cache_dir) / "go").touch()
    assert (said(first), said(second)) == ("a", "a")


def test_a_queued_job_goes_to_the_worker_that_has_nothing_to_do(service):
    """A job that was queued while all workers work is done by the one that is free first."""
    one = service(2)
    slow, quick = one.submit(job("rendezvous a go")), one.submit(job("rendezvous b other"))
    for future in (slow, quick):
        until(future.running)
    queued = [one.submit(job(f"echo {number}")) for number in range(2)]
    (Path(one.cache_dir) / "other").touch()
    assert [said(future) for future in queued] == ["0", "1"]
    assert not slow.done()
    (Path(one.cache_dir) / "go").touch()
    assert (said(slow), said(quick)) == ("a", "b")


def test_a_job_behind_one_that_ends_its_worker_is_not_blamed(service):
    """Jobs behind ones that end their worker are done, however often that happens."""
    one = service(1)
    fatal, innocent = [], []
    for number in range(3):
        fatal.append(one.submit(job(f"exit {number + 1}")))
        innocent.append(one.submit(job(f"echo {number}")))
    assert [said(future) for future in innocent] == ["0", "1", "2"]
    assert [type(future.exception(RESULT_S)) for future in fatal] == [WorkerDied] * 3


def test_workers_that_die_before_they_begin_end_the_attempts(service):
    """Where every worker dies at once, the job fails after a few, instead of never."""
    one = service(1)
    one._pool._plan = worker_processes.WorkerPlan(
        "service_work:perform", "service_work:poison_workers", one.cache_dir, 0
    )
    with pytest.raises(WorkerDied, match="workers died before they began"):
        said(one.submit(job("echo x")))


def test_what_is_printed_while_a_job_fails_is_in_its_error(service):
    """What LLVM and MLIR tell standard error alone becomes the reason; nothing that an earlier job
    printed does.
    """
    one = service(1)
    said(one.submit(job("say x 10")))
    with pytest.raises(CompileFailed) as caught:
        said(one.submit(job("refuse")))
    error = caught.value
    assert error.printed == "error: invalid instruction\n  this is none"
    assert error.reason == "RuntimeError: PassManager::run failed: error: invalid instruction"
    assert str(error) == f"refuse: {error.reason}"


def test_a_long_text_of_a_compiler_keeps_beginning_and_end(service):
    """A fact holds a megabyte: more than that loses its middle, and says how much."""
    with pytest.raises(CompileFailed) as caught:
        said(service(1).submit(job(f"refuse {3 << 20}")))
    printed = caught.value.printed
    assert (printed[:26], printed[-12:]) == ("error: invalid instruction", "this is none")
    assert (len(printed) <= 1 << 20, "x\n... 2097258 bytes ...\nx" in printed) == (True, True)
