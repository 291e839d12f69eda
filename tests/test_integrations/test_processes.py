# SPDX-License-Identifier: Apache-2.0
"""Kernels reach the store whatever becomes of the process that compiled them, and nobody waits for
one that cannot be compiled.
"""

import signal
import time

import plugged
import pytest

pytestmark = pytest.mark.toolchain

COMPILE_AND_STAY = """
compile_one(sys.argv[2])
say("compiled")
time.sleep(600)
"""
# The spawned process has nothing of ours imported by its parent, and its end runs nothing.
_CHILDREN = """
import multiprocessing, pathlib, runpy

script = pathlib.Path(sys.argv[2])
script.write_text(f'''
import importlib.util, os, sys
spec = importlib.util.spec_from_file_location("kernels", {sys.argv[1]!r})
kernels = sys.modules["kernels"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernels)
kernels.compile_one("gelu", "cuda:90")
os._exit(0)
''')
spawned = multiprocessing.get_context("spawn").Process(target=runpy.run_path, args=(str(script),))
spawned.start()
for name in ("softmax", "layer_norm"):
    pid = os.fork()
    if pid == 0:
        compile_one(name)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    compile_one("row_sum")  # from now on the parent has a session, a thread and a queue
spawned.join()

"""


def test_children_of_every_kind_publish_what_they_compile(store_url, tmp_path, recorded):
    """Children that are forked, before and after their parent compiled, and spawned, end without a
    word: all is in the store.
    """
    plugged.run(
        _CHILDREN, plugged.environment(store_url, tmp_path / "cache"), tmp_path / "script.py"
    )
    assert recorded(store_url) == [
        "gelu_kernel",
        "layer_norm_kernel",
        "row_sum_kernel",
        "softmax_kernel",
    ]


@pytest.mark.serial
def test_a_signal_loses_nothing_that_is_two_seconds_old(store_url, redis_url, tmp_path, recorded):
    """Processes that are killed, in either way, two seconds after a compile leave the kernel in the
    store, of either kind.
    """
    signals = {"gelu": signal.SIGTERM, "softmax": signal.SIGKILL}
    processes = {
        (url, name): plugged.start(
            COMPILE_AND_STAY, plugged.environment(url, tmp_path / f"cache{number}"), name
        )
        for number, url in enumerate((store_url, redis_url))
        for name in signals
    }
    try:
        for process in processes.values():
            assert process.stdout.readline() == '"compiled"\n'
        time.sleep(2)
        for (_, name), process in processes.items():
            process.send_signal(signals[name])
            assert process.wait(plugged.PATIENCE_S) == -signals[name]
    finally:
        for process in processes.values():
            process.kill()
            process.communicate()
    for url in (store_url, redis_url):
        assert recorded(url) == ["gelu_kernel", "softmax_kernel"]


_REFUSED = """
import triton
import triton.language as tl

@triton.jit
def refused(x, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK < 8, "too large a block")
    tl.store(x + tl.arange(0, BLOCK), 1.0)

def compile_one(name, target):
    source = triton.compiler.ASTSource(refused, {"x": "*fp32", "BLOCK": "constexpr"}, {"BLOCK": 16})
    triton.compile(source, target=triton.backends.compiler.GPUTarget("cuda", 90, 32))
"""
_TRY = """
errors = []
for attempt in range(2):
    try:
        compile_one("refused")
    except Exception as error:
        errors.append(error)  # as a test runner would: whatever the error refers to lives on
say([[type(error).__name__, "too large a block" in str(error)] for error in errors])
"""


@pytest.mark.slow
def test_a_kernel_that_does_not_compile_fails_in_each_process_and_delays_none(store_url, tmp_path):
    """Four processes that ask for a kernel with a failing static_assert, twice each, all see
    Triton's own error.
    """
    (tmp_path / "refused.py").write_text(_REFUSED)
    started = time.monotonic()
    processes = [
        plugged.start(
            _TRY,
            plugged.environment(store_url, tmp_path / f"cache{number}"),
            kernels=tmp_path / "refused.py",
        )
        for number in range(4)
    ]
    try:
        answers = [process.communicate(timeout=plugged.PATIENCE_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * 4, answers[0][1]
    assert [out.strip() for out, _ in answers] == [
        '[["CompileTimeAssertionFailure", true], ["CompileTimeAssertionFailure", true]]'
    ] * 4
    # A lease lasts 15 seconds where nobody gives it back.
    assert time.monotonic() - started < plugged.PATIENCE_S / 2
