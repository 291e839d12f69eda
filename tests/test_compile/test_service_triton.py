# SPDX-License-Identifier: Apache-2.0
"""The service with real compiles: each kernel once on a host, keys and errors as in one process."""

import json
import os
import shutil
import stat
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.toolchain
COUNT = 4
_KERNELS = """import triton
import triton.language as tl


@triton.jit
def scale(a, n, BLOCK: tl.constexpr, FACTOR: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(a + at, tl.load(a + at, mask=at < n) * FACTOR, mask=at < n)


@triton.jit
def wrong(a, n, BLOCK: tl.constexpr, FACTOR: tl.constexpr):
    tl.store(a, no_such_name)
"""
_BUILD = """
import json, os, sys
from bundler.compile.compile_job import Job, SourceRef
from bundler.compile.service import CompileService
from bundler.errors import BundlerError
from bundler.format.entries import Target
from bundler.toolchain.encoding import encode_value
text, cache, workers, count = sys.argv[1:]

def job(function, factor):
    kinds = {"a": "*fp32", "n": "i32", "BLOCK": "constexpr", "FACTOR": "constexpr"}
    constants = (((2,), encode_value(128)), ((3,), encode_value(factor)))
    return Job(f"{function} {factor}", SourceRef("text", function, data=open(text, "rb").read()),
               tuple((name, encode_value(kind)) for name, kind in kinds.items()), constants,
               (((0,), encode_value([["tt.divisibility", 16]])),), (), Target("cuda", "90"))

with CompileService(int(workers), cache_dir=cache) as service:
    service.warm_up(60)
    of_server = {os.path.realpath(f"/proc/{int(open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()[1])}")
                 for pid in service.processes()}
    threads = [len(os.listdir(f"{process}/task")) for process in of_server]
    jobs = [job("scale", factor) for factor in range(1, int(count) + 1)] + [job("wrong", 1)]
    print("ready", flush=True)
    sys.stdin.readline()
    results = service.compile_all(jobs)
    counters = service.counters
*kernels, wrong = results
print(json.dumps({"keys": [kernel.key for kernel in kernels], "hits": counters.hits, "compiled": counters.compiled,
                  "here": all(os.path.isdir(kernel.directory) for kernel in kernels), "threads": threads,
                  "stages": [len(timing.stages) for timing in service.timings if timing.happened == "compiled"],
                  "error": [type(wrong).__name__, str(wrong), wrong.line], "triton here": "triton" in sys.modules}))
"""


def counted_ptxas(folder):
    """Make wrappers for ptxas that note each kernel; returns the variables that bring Triton to
    them, and the notes.
    """
    tools = Path(find_spec("triton").origin).parent / "backends" / "nvidia" / "bin"
    notes, variables = folder / "assembled", {}
    for name, variable in (
        ("ptxas", "TRITON_PTXAS_PATH"),
        ("ptxas-blackwell", "TRITON_PTXAS_BLACKWELL_PATH"),
    ):
        wrapper = folder / name
        wrapper.write_text(
            f'#!/bin/sh\n[ "$1" = --version ] || echo kernel >> {notes}\nexec {tools / name} "$@"\n'
        )
        wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)
        variables[variable] = str(wrapper)
    return variables, lambda: len(notes.read_text().splitlines()) if notes.exists() else 0


def start(folder, workers, variables):
    """Start a program that builds the list when it is told to."""
    (folder / "kernels.txt").write_text(_KERNELS)
    return subprocess.Popen(
        [
            sys.executable,
            "-W",
            "ignore",
            "-c",
            _BUILD,
            *map(str, (folder / "kernels.txt", folder / "cache", workers, COUNT)),
        ],
        env=os.environ | variables | {"PYTHONPATH": os.pathsep.join(sys.path)},
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish(process, go="go\n"):
    """Let a program build, and return what it says."""
    out, error = process.communicate(go, timeout=110)
    assert process.returncode == 0, error
    return json.loads(out.splitlines()[-1])


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Return what two programs say that built one list at once, then one that did so in process;
    and the calls of ptxas.
    """
    if find_spec("triton") is None or shutil.which("sh") is None:
        pytest.skip("triton is not installed")
    folder = tmp_path_factory.mktemp("two")
    variables, assembled = counted_ptxas(folder)
    both = [start(folder, 2, variables) for _ in range(2)]
    for process in both:
        assert process.stdout.readline() == "ready\n"
    for process in both:
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [finish(process, "") for process in both]
    calls = assembled()
    return answers, calls, finish(start(folder, 1, variables)), assembled()


def test_two_processes_compile_each_kernel_once(built):
    """Two programs that build the same list at the same time share the work: ptxas is called once a
    kernel.
    """
    (one, two), calls, _, _ = built
    assert calls == COUNT
    assert one["compiled"] + two["compiled"] == COUNT
    assert one["hits"] + two["hits"] == COUNT
    assert one["here"]
    assert two["here"]


@pytest.mark.release
def test_workers_and_one_process_give_the_same_keys(built):
    """What workers compiled is what a compile in this process asks for: it finds all of it."""
    (one, two), calls, alone, calls_after = built
    assert one["keys"] == two["keys"] == alone["keys"]
    assert (len(set(alone["keys"])), alone["hits"], calls_after) == (COUNT, COUNT, calls)


def test_the_program_itself_does_not_import_triton(built):
    """Only workers do; the process that forks them has one thread, so that forking it is safe."""
    (one, two), _, alone, _ = built
    assert [answer["triton here"] for answer in (one, two, alone)] == [False, False, True]
    assert one["threads"] == two["threads"] == [1]


@pytest.mark.release
def test_each_compile_is_timed_by_stage(built):
    """The timing of a compile names the compiler's stages."""
    (one, two), _, _, _ = built
    assert [count > 3 for count in one["stages"] + two["stages"]] == [True] * COUNT


def test_a_kernel_that_does_not_compile_names_its_line(built):
    """The compiler's message comes from the worker with the kernel's name and the line of the
    source.
    """
    (one, _), _, alone, _ = built
    kind, message, line = one["error"]
    assert (kind, line) == (
        "CompileFailed",
        _KERNELS.splitlines().index("    tl.store(a, no_such_name)") + 1,
    )
    assert "wrong does not compile" in message
    assert "no_such_name is not defined" in message
    assert one["error"] == alone["error"]
