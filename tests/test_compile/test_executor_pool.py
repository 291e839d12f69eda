# SPDX-License-Identifier: Apache-2.0
"""`CompileService(executor=...)`: what goes to an engine and comes back, lost workers, refusals,
cancelling, and what is left.

The engine is Python's own pool of processes; `test_engines.py` has the real ones.
"""

import glob
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import BrokenExecutor, Executor

import pytest
from msgspec.structs import replace
from service_work import HERE, PATIENCE_S, Held, Seen, is_alive, job, prepend, processes
from waiting import until

from bundler.compile import executor_pool
from bundler.compile.compile_job import SourceRef
from bundler.compile.engine_worker import Compiler, EngineMessage, compiler_variables, run_job
from bundler.compile.service import CompileService
from bundler.compile.worker_pool import LEAST_SHARE_BYTES, memory_share
from bundler.errors import (
    CompileFailed,
    CompileTimeout,
    ConfigError,
    ToolchainMismatch,
    WorkerDied,
)
from bundler.format import wire


def told(path):
    """Return what a worker writes into a file, as soon as it did."""
    until(lambda: path.exists() and path.read_text())
    return path.read_text()


def answer(engine, held, number=0):
    """Have a call that is held done by a real worker."""
    message, future = held.calls[number]
    future.set_result(engine.submit(run_job, message).result())


def client_directories():
    return set(glob.glob(os.path.join(tempfile.gettempdir(), "triton-bundler-client-*")))


def test_jobs_come_back_from_an_engine(on, engine):
    """Jobs are done by the engine's machines, and what they made comes back in order."""
    seen = []
    service = on(engine, on_progress=seen.append)
    results = service.compile_all([job(f"echo {number}") for number in range(20)])
    assert [result.key for result in results] == [str(number) for number in range(20)]
    assert service.counters.compiled == 20
    assert seen[-1].machines == 1
    assert seen[-1].rate > 0


def test_an_engine_gets_one_function_and_bytes(on, engine):
    """What an engine pickles is a reference to one public function, and bytes that are msgpack."""
    spy = Seen(engine)
    on(spy).compile_all([job("echo a")])
    ((function, arguments, keywords),) = spy.calls
    assert function is run_job
    assert not keywords
    assert [type(argument) for argument in arguments] == [bytes]
    assert pickle.dumps(function) == pickle.dumps(run_job)
    assert b"bundler.compile.engine_worker" in pickle.dumps(function)
    assert isinstance(EngineMessage.from_bytes(arguments[0]), EngineMessage)


def test_a_job_that_ends_its_process_is_tried_elsewhere_once(on, engine, tmp_path):
    """The second try may succeed, and is counted."""
    spy = Seen(engine)
    service = on(spy)
    assert service.submit(job(f"once_fatal_at {tmp_path}/mark")).result().key == "survived"
    assert len(spy.calls) == 2
    assert service.counters.retried == 1


def test_a_job_that_ends_every_process_is_reported_by_its_name(on, engine):
    """It fails after the second try, with what it printed last; other jobs notice nothing."""
    spy = Seen(engine)
    service = on(spy)
    good, bad = service.submit(job("echo fine")), service.submit(job("crash"))
    with pytest.raises(WorkerDied, match=r"^crash: compiling it ended 2 workers") as caught:
        bad.result(PATIENCE_S)
    assert "SIGSEGV" in caught.value.reason
    assert "about to crash" in caught.value.words
    assert good.result(PATIENCE_S).key == "fine"
    assert len(spy.calls) == 3


def test_what_the_compiler_says_comes_back(on, engine):
    """An error of the compiler is no lost worker: it is not tried again."""
    spy = Seen(engine)
    with pytest.raises(CompileFailed, match="no such thing") as caught:
        on(spy).submit(job("fail no such thing")).result(PATIENCE_S)
    assert not isinstance(caught.value, WorkerDied)
    assert len(spy.calls) == 1


def test_time_and_memory_are_bounded_in_workers(on, engine):
    """A worker ends what takes too long or too much memory, with the words of the local pool."""
    with pytest.raises(CompileTimeout, match=r"sleep 60: not compiled within 0\.5 s"):
        on(engine, timeout_s=0.5).submit(job("sleep 60")).result(PATIENCE_S)
    with pytest.raises(WorkerDied, match="needs more memory than a worker may have"):
        on(engine, memory_bytes=256 << 20).submit(job("eat 2048")).result(PATIENCE_S)


def test_a_share_of_the_machine_is_the_bound_by_default():
    """Workers have equal shares of the machine's memory, but never less than a large kernel
    needs.
    """
    assert memory_share(1) > memory_share(2) or memory_share(1) == LEAST_SHARE_BYTES
    assert memory_share(10_000) == LEAST_SHARE_BYTES


@pytest.mark.parametrize(
    ("part", "named"),
    [("python", "Python"), ("triton", "Triton"), ("ptxas", "ptxas")],
)
def test_a_worker_of_another_compiler_refuses(on, engine, monkeypatch, part, named):
    """The job fails before it is compiled, and the error names the worker and what it has
    otherwise.
    """
    here = Compiler.here(job("echo").target)
    wanted = replace(here, **{part: "1.2.3"})
    monkeypatch.setattr(executor_pool.Compiler, "here", lambda target: wanted)
    spy = Seen(engine)
    with pytest.raises(ToolchainMismatch) as caught:
        on(spy).submit(job("echo never")).result(PATIENCE_S)
    told = str(caught.value)
    assert told.startswith("echo never: not compiled")
    assert f"{named} {getattr(here, part)}, expected 1.2.3" in told
    assert any(f":{process} has" in told for process in engine._processes)
    assert len(spy.calls) == 2


def test_another_triton_on_a_worker_is_seen(on, tmp_path):
    """The worker's own installation is looked at, not what the program believes of it."""
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("__version__ = '3.1.0'\n")
    with (
        processes(1, initializer=prepend, initargs=(str(tmp_path),)) as executor,
        pytest.raises(ToolchainMismatch, match=r"Triton 3\.1\.0, expected "),
    ):
        on(executor).submit(job("echo never")).result(PATIENCE_S)


def test_a_message_of_another_release_is_refused():
    """A worker answers that it is of another release, and reads nothing else of the message."""
    answer = wire.unpack(run_job(wire.pack([1, "9.9.9", "whatever"])), "answer")
    assert answer[0] == "refused"
    assert b"expected 9.9.9" in answer[2][0]


def test_a_module_that_differs_on_the_worker_is_refused(on, tmp_path):
    """A worker compiles only the module that the build was planned with."""
    module = tmp_path / "kernels.py"
    module.write_text("one = 1\n")
    held = Held()
    source = SourceRef("module", "one", "kernels", str(module), str(tmp_path))
    future = on(held).submit(job("echo never", source=source))
    until(lambda: held.calls)
    module.write_text("one = 2\n")
    held.calls[0][1].set_result(run_job(held.calls[0][0]))
    until(lambda: len(held.calls) == 2)
    module.unlink()
    held.calls[1][1].set_result(run_job(held.calls[1][0]))
    with pytest.raises(ToolchainMismatch) as caught:
        future.result(PATIENCE_S)
    assert f"another {module} than the build was planned with" in str(caught.value)
    assert f"no file {module} (No such file or directory)" in str(caught.value)


@pytest.mark.parametrize("lost", [ConnectionError("worker gone"), RuntimeError(), None])
def test_a_lost_worker_is_tried_elsewhere_once(on, engine, lost):
    """Whatever an engine raises for a lost worker, and a future that it cancels, count as one."""
    held = Held()
    service = on(held)
    future = service.submit(job("echo again"))
    for number in range(2):
        until(lambda number=number: len(held.calls) > number)
        inner = held.calls[number][1]
        if number:
            answer(engine, held, number)
        elif lost is None:
            inner.cancel()
            inner.set_running_or_notify_cancel()
        else:
            inner.set_exception(lost)
    assert future.result(PATIENCE_S).key == "again"
    assert service.counters.retried == 1


def test_a_job_that_is_lost_twice_is_reported_by_its_name(on):
    """With what the engine said."""
    held = Held()
    future = on(held).submit(job("echo gone"))
    for number in range(2):
        until(lambda number=number: len(held.calls) > number)
        held.calls[number][1].set_exception(ConnectionError("worker gone"))
    with pytest.raises(WorkerDied, match=r"^echo gone: its worker was lost 2 times.*worker gone"):
        future.result(PATIENCE_S)


def test_an_executor_that_broke_is_made_again(on):
    """A function that makes the executor is called again, and no job is counted as guilty."""
    made = []

    def make():
        # Not processes that are killed: what Python has of those may never end.
        made.append(processes() if made else Held())
        return made[-1]

    service = on(make)
    futures = [service.submit(job(f"sleep 0.{number}")) for number in range(1, 6)]
    until(lambda: made and len(made[0].calls) == 5)
    for _, call in list(made[0].calls):
        call.set_exception(BrokenExecutor("a process died"))
    assert [future.result(PATIENCE_S).key for future in futures] == ["slept"] * 5
    assert len(made) == 2
    service.close()
    with pytest.raises(RuntimeError):
        made[1].submit(int)


def test_an_executor_that_broke_fails_by_name_where_no_function_makes_it(on):
    """The error says what to give instead."""
    held = Held()
    future = on(held).submit(job("echo gone"))
    until(lambda: held.calls)
    held.calls[0][1].set_exception(BrokenExecutor("a process died"))
    with pytest.raises(WorkerDied, match="give a function that makes one"):
        future.result(PATIENCE_S)


def test_executors_that_break_one_after_the_other_are_given_up(on):
    """Three in a row, without a job done between them."""
    made = []

    class Broken(Executor):
        def submit(self, function, message):
            raise BrokenExecutor("cannot start")

    future = on(lambda: made.append(1) or Broken()).submit(job("echo gone"))
    with pytest.raises(WorkerDied, match="3 executors broke one after the other: BrokenExecutor"):
        future.result(PATIENCE_S)
    assert len(made) == 3


def test_a_cancelled_job_ends_in_its_worker(on, engine, tmp_path):
    """With the programs that it started; the worker does the next job."""
    service = on(engine)
    future = service.submit(job(f"with_child_at {tmp_path} 300"))
    child = int(told(tmp_path / "child"))
    assert future.cancel()
    until(lambda: not is_alive(child))
    assert service.submit(job("echo next")).result(PATIENCE_S).key == "next"


def test_closing_at_once_leaves_nothing(on, engine, tmp_path):
    """What runs on this machine ends, what waits is cancelled, and no directory is left."""
    before = client_directories()
    service = on(engine)
    running = service.submit(job(f"with_child_at {tmp_path} 300"))
    waiting = [service.submit(job(f"sleep {60 + number}")) for number in range(10)]
    child = int(told(tmp_path / "child"))
    service.close(cancel=True)
    assert running.cancelled()
    assert all(future.cancelled() for future in waiting)
    until(lambda: not is_alive(child))
    assert client_directories() == before
    with pytest.raises(ConfigError, match="was closed"):
        service.submit(job("echo late"))


def test_closing_waits_for_what_was_submitted(on, engine):
    """As a pool of this machine's processes does."""
    service = on(engine)
    future = service.submit(job("sleep 0.5"))
    service.close()
    assert future.done()
    assert future.result().key == "slept"


def test_submit_waits_while_too_many_jobs_are_under_way(on, engine):
    """`queue_limit` bounds what an engine is given."""
    held = Held()
    service = on(held, queue_limit=2)
    for number in range(2):
        service.submit(job(f"echo {number}"))
    third = threading.Thread(target=lambda: service.submit(job("echo 3")), daemon=True)
    third.start()
    until(lambda: len(held.calls) == 2)
    time.sleep(0.1)
    assert len(held.calls) == 2
    answer(engine, held)
    until(lambda: len(held.calls) == 3)
    third.join(PATIENCE_S)
    assert not third.is_alive()


def test_equal_jobs_are_sent_once(on, engine):
    """Jobs that are equal share one call of the engine, and a result is remembered."""
    held = Held()
    service = on(held)
    futures = [service.submit(job("echo same")) for _ in range(3)]
    until(lambda: held.calls)
    answer(engine, held)
    assert {future.result(PATIENCE_S).key for future in futures} == {"same"}
    assert len(held.calls) == 1


def test_a_worker_has_the_compilers_settings_and_no_others(on, engine, monkeypatch):
    """What decides what a compiler makes goes to workers; a password does not."""
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    monkeypatch.setenv("DATABASE_PASSWORD", "secret")
    results = on(engine).compile_all(
        [job("env TRITON_DEFAULT_FP_FUSION"), job("env DATABASE_PASSWORD")]
    )
    assert [result.key for result in results] == ["0", "unset"]
    named = [
        (b"TRITON_CACHE_DIR", b"/x"),
        (b"TRITON_HOME", b"/x"),
        (b"TRITON_PTXAS_PATH", b"/x"),
        (b"TRITON_DEBUG", b"1"),
    ]
    assert compiler_variables(named) == ((b"TRITON_DEBUG", b"1"),)


def test_a_forked_child_has_an_engine_of_nobody(on, engine):
    """Its futures have failed, and its service is closed."""
    held = Held()
    service = on(held)
    future = service.submit(job("echo parent"))
    until(lambda: held.calls)
    child = os.fork()
    if child == 0:
        try:
            error = future.exception(5)
            with pytest.raises(ConfigError):
                service.submit(job("echo child"))
            os._exit(0 if "forked" in str(error) else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    answer(engine, held)
    assert future.result(PATIENCE_S).key == "parent"


@pytest.mark.parametrize("wrong", [3, "a.b:c"])
def test_what_is_no_executor_is_refused(wrong):
    """With what is expected instead."""
    with pytest.raises(ConfigError, match=r"expected a concurrent\.futures\.Executor"):
        CompileService(executor=wrong)


def test_a_function_that_makes_no_executor_is_refused(on):
    """As soon as it is called."""
    with pytest.raises(ConfigError, match="the function that makes the executor returned 3"):
        on(lambda: 3).submit(job("echo"))


PROGRAM = """
import sys
from concurrent.futures import Executor, Future
from service_work import job
from bundler.compile.service import CompileService
class Other(Executor):
    def submit(self, function, message):
        open(sys.argv[2] + "/message.part", "wb").write(message)
        import os
        os.rename(sys.argv[2] + "/message.part", sys.argv[2] + "/message")
        return Future()
service = CompileService(executor=Other(), cache_dir=sys.argv[1], perform="service_work:perform", preload="")
service.submit(job(f"with_child_at {sys.argv[2]} 300")).result()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_program_that_is_gone_leaves_nothing_running(engine, cache, tmp_path, number):
    """A worker that another machine's user keeps ends the job of a program that was killed or
    interrupted.
    """
    before = client_directories()
    (tmp_path / "program.py").write_text(PROGRAM)
    program = subprocess.Popen(
        [sys.executable, str(tmp_path / "program.py"), str(cache), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, sys.path)])},
        stderr=subprocess.DEVNULL,
    )
    try:
        until((tmp_path / "message").exists)
        reply = engine.submit(run_job, (tmp_path / "message").read_bytes())
        child = int(told(tmp_path / "child"))
        program.send_signal(number)
        program.wait(PATIENCE_S)
    finally:
        program.kill()
        program.wait()
    until(lambda: not is_alive(child))
    (outcome,) = wire.unpack(reply.result(PATIENCE_S), "answer")[2]
    assert outcome[0] == "failed"
    until(lambda: client_directories() == before)


def test_a_worker_that_is_killed_leaves_no_process(cache, tmp_path, monkeypatch):
    """The processes that compile end with the engine's worker."""
    monkeypatch.syspath_prepend(str(HERE))
    executor = processes(1)
    held = Seen(executor)
    with CompileService(
        executor=held, cache_dir=cache, perform="service_work:perform", preload=""
    ) as service:
        future = service.submit(job(f"with_child_at {tmp_path} 300"))
        child = int(told(tmp_path / "child"))
        os.kill(next(iter(executor._processes)), signal.SIGKILL)
        until(lambda: not is_alive(child))
        with pytest.raises(WorkerDied, match="the executor broke"):
            future.result(PATIENCE_S)
    executor.shutdown()
