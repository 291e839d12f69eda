# SPDX-License-Identifier: Apache-2.0
"""Futures made of futures, namespaces of them, and kernels that are given as text."""

import os
import sys
import threading
import time
from concurrent.futures import CancelledError, Future, as_completed

import pytest
from service_work import job
from waiting import until

from bundler.compile.job_futures import JoinedFuture
from bundler.errors import BundlerError, CompileFailed, CompileTimeout, ConfigError, StoreFull

RESULT_S = 30
_TEXT = """import triton
import triton.language as tl


@triton.jit
def scale(a, n, BLOCK: tl.constexpr, FACTOR: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(a + at, tl.load(a + at, mask=at < n) * FACTOR, mask=at < n)


@triton.jit
def wrong(a, n, BLOCK: tl.constexpr, FACTOR: tl.constexpr):
    tl.store(a, no_such_name)
"""
_SIGNATURE = {"a": "*fp32", "n": "i32", "BLOCK": "constexpr", "FACTOR": "constexpr"}
META = {
    "signature": _SIGNATURE,
    "constants": {"BLOCK": 128, "FACTOR": 3},
    "attributes": {"a": 16},
    "options": {"num_warps": 2},
    "target": "cuda:90",
}


def ready(value, name="part"):
    future = Future()
    future.name = name
    if isinstance(value, BaseException):
        future.set_exception(value)
    else:
        future.set_result(value)
    return future


def test_what_is_made_of_parts_is_made_once_by_who_asks(service):
    """A joined future is done with its parts; what it makes of them is made in the asking thread,
    and only once.
    """
    one, made = service(), []

    def make(outcomes):
        made.append(threading.current_thread())
        return [outcome.key for outcome in outcomes]

    parts = [one.submit(job("sleep 0.2")), one.submit(job("echo x"))]
    joined = JoinedFuture("both", parts, make)
    assert not joined.done()
    assert list(as_completed([joined], RESULT_S)) == [joined]
    assert made == []
    assert joined.result() is joined.result()
    assert (joined.result(), joined.exception(), made) == (
        ["slept", "x"],
        None,
        [threading.current_thread()],
    )
    assert JoinedFuture("none", [], list).result(0) == []


def test_errors_of_parts_are_given_to_who_makes_the_result(service):
    """It decides whether a failed part is a failure; what it raises is raised each time."""
    parts = [
        service().submit(job("fail no such thing")),
        ready(ValueError("odd"), "other"),
        ready(7),
    ]
    joined = JoinedFuture("three", parts, lambda outcomes: outcomes)
    failed, odd, seven = joined.result(RESULT_S)
    assert (type(failed), type(odd), seven) == (CompileFailed, CompileFailed, 7)
    assert "other: ValueError: odd" in str(odd)

    def refuse(outcomes):
        raise outcomes[0]

    refused = JoinedFuture("three", parts, refuse)
    assert refused.exception(RESULT_S) is failed or isinstance(refused.exception(), CompileFailed)
    with pytest.raises(CompileFailed, match="no such thing"):
        refused.result()


def test_a_joined_future_waits_no_longer_than_it_is_told_and_cancels_its_parts(service):
    """Time-outs are as those of other futures; cancelling stops the jobs."""
    one = service()
    part = one.submit(job("sleep 60"))
    until(part.running)
    joined = JoinedFuture("long", [part], list)
    assert joined.running()
    with pytest.raises(TimeoutError, match=r"long: not compiled within 0\.01 s"):
        joined.result(0.01)
    assert joined.cancel()
    assert (part.cancelled(), joined.cancelled()) == (True, True)
    with pytest.raises(CancelledError):
        joined.result()


def test_in_a_forked_child_joined_futures_fail_too(service):
    """The child has nobody who compiles; who asks there gets the reason, also of futures inside
    futures, and never waits.
    """
    one = service()
    part = one.submit(job("sleep 60"))
    until(part.running)
    joined = JoinedFuture(
        "outer",
        [JoinedFuture("inner", [part], lambda outcomes: outcomes[0])],
        lambda outcomes: outcomes[0],
    )
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, str(joined.result(RESULT_S)).encode())
            one.wait({"joined": joined, "number": 5}, timeout_s=RESULT_S)
            os.write(write, b"; waited")
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read()
    assert b"the parent of this forked process compiles it" in said
    assert said.endswith(b"; waited")
    os.waitpid(child, 0)
    joined.cancel()


def test_a_namespace_gets_results_in_the_place_of_futures(service):
    """Everything else stays; each future is told about when it is done; one that stands there twice
    is resolved twice.
    """
    one, heard = service(), []
    slow = one.submit(job("sleep 0.3"))
    scope = {
        "slow": slow,
        "quick": one.submit(job("echo x")),
        "text": "text",
        "again": slow,
        "other": ready(5),
    }
    one.wait(scope, on_progress=heard.append)
    assert (scope["slow"].key, scope["quick"].key, scope["text"], scope["other"]) == (
        "slept",
        "x",
        "text",
        5,
    )
    assert scope["again"] is scope["slow"]
    assert [(progress.done, progress.total) for progress in heard] == [(1, 3), (2, 3), (3, 3)]
    assert {progress.name for progress in heard} == {"slow", "quick", "other"}
    one.wait(scope)  # nothing is left to wait for


@pytest.mark.parametrize(
    ("bad", "kind", "words"),
    [
        (lambda one: one.submit(job("fail badly")), CompileFailed, "fail badly: .*badly"),
        (lambda _: ready(KeyError("x"), "somebody's"), CompileFailed, "somebody's: KeyError"),
        (
            lambda _: ready(StoreFull("the disk is full"), "of_kernel"),
            StoreFull,
            "of_kernel: the disk is full",
        ),
    ],
)
def test_the_first_failure_is_raised_with_the_kernels_name(service, bad, kind, words):
    """It is not waited for the others, which stay futures."""
    one = service()
    scope = {"good": one.submit(job("sleep 60")), "bad": bad(one)}
    with pytest.raises(kind, match=words):
        one.wait(scope)
    assert isinstance(scope["bad"], Future)
    assert not scope["good"].done()
    scope["good"].cancel()
    with pytest.raises(BundlerError):
        one.wait(scope)


def test_a_wait_that_takes_too_long_names_who_is_late(service):
    """What is done is in place, the rest goes on."""
    one = service()
    scope = {"late": one.submit(job("sleep 60")), "quick": ready(1)}
    started = time.monotonic()
    with pytest.raises(CompileTimeout, match=r"^late: not compiled within 0.2 s"):
        one.wait(scope, timeout_s=0.2)
    assert time.monotonic() - started < RESULT_S
    assert (scope["quick"], scope["late"].done()) == (1, False)
    scope["late"].cancel()
    with pytest.raises(CompileFailed, match="sleep 60: cancelled"):
        one.wait(scope)


# ------------------------------------------------------------------- Kernels that are given as text


@pytest.mark.toolchain
def test_source_goes_in_and_a_kernel_comes_out(cache):
    """What is known of the kernel reaches the compiler; the same text again is answered from
    memory; errors name the line.
    """
    pytest.importorskip("triton")
    from bundler.compile.service import CompileService
    from bundler.runtime import DryDriver, handles_on

    driver, before = DryDriver("cuda"), set(sys.modules)
    with CompileService(2, cache_dir=cache) as service:
        scope = {
            "compiled": service.source("scale", _TEXT, META),
            "handle": service.source("scale", _TEXT, META, finish=handles_on(driver)),
            "other": service.source(
                "twice", _TEXT, {**META, "function": "scale", "options": {"num_warps": 8}}
            ),
        }
        broken = service.source("wrong", _TEXT, META)
        service.wait(scope)
        assert service.counters.joined + service.counters.remembered == 1
        with pytest.raises(CompileFailed, match="no_such_name") as caught:
            broken.result(RESULT_S)
        assert caught.value.line == 13
    plan = scope["handle"].plan
    assert plan.key == scope["compiled"].key != scope["other"].key
    assert (plan.kernel, plan.block_threads, str(plan.target)) == ("scale", 64, "cuda:90")
    assert [parameter.name for parameter in plan.arguments] == ["a", "n"]
    scope["handle"].launch(4, 1, 1, 9, 0x7F00_0000_0000, 512)
    assert (driver.launches[-1].grid, driver.launches[-1].stream) == ((4, 1, 1), 9)
    text = next((cache / scope["compiled"].key).glob("*.ttir")).read_text()
    assert "tt.divisibility = 16" in text
    new = set(sys.modules) - before
    assert not any(name.startswith("bundler_source_") for name in new)


@pytest.mark.toolchain
def test_a_kernel_of_another_target_has_no_handle_here(cache):
    """What is compiled for AMD cannot be loaded by CUDA's driver, and the future says so."""
    pytest.importorskip("triton")
    from bundler.compile.service import CompileService
    from bundler.errors import ToolchainMismatch
    from bundler.runtime import DryDriver, handles_on

    with CompileService(1, cache_dir=cache) as service:
        future = service.source(
            "scale", _TEXT, {**META, "target": "hip:gfx942"}, finish=handles_on(DryDriver("cuda"))
        )
        with pytest.raises(ToolchainMismatch):
            future.result(RESULT_S)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"signature": 5}, "signature is not of its type"),
        ({"target": "h200"}, "scale: not a target: 'h200'"),
        ({"constants": {"WIDTH": 1}}, "'WIDTH' is not in the signature"),
        ({"constants": {"BLOCK": object()}}, "the value of 'BLOCK' cannot be sent"),
        ({"signature": {**_SIGNATURE, "n": 32}}, "a type is a text such as"),
        (
            {"warps": 4},
            (
                r"meta has \['attributes', .*'warps'\]; expected signature, target, and perhaps"
                r" attributes"
            ),
        ),
        ({"options": ["num_warps"]}, "options is not of its type"),
    ],
)
def test_what_is_said_of_a_source_is_checked_before_anything_is_compiled(service, change, words):
    """Each mistake is named; nothing starts."""
    with pytest.raises(ConfigError, match=words):
        service().source("scale", _TEXT, META | change)
