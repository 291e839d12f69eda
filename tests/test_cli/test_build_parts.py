# SPDX-License-Identifier: Apache-2.0
"""`build` on many machines: shards and their collection, an executor by name, and comparison with
what a warm-up used.
"""

import json
import os
import sys

import pytest

from bundler.compile import module_import
from bundler.format.bundle import Bundle

pytest.importorskip("triton")
MODULE = """
import triton
import triton.language as tl

@triton.jit
def scale(x, FACTOR: tl.constexpr):
    tl.store(x, tl.load(x) * FACTOR)

PREBUILD = [{"kernel": scale, "signature": {"x": "*fp32:16"}, "constants": {"FACTOR": [1, 2, 3, 4, 5, 6]}}]
"""
ENGINE = """
import contextlib, os
from concurrent.futures import ThreadPoolExecutor

def executor():
    return ThreadPoolExecutor(2)

@contextlib.contextmanager
def managed():
    open("entered", "w").close()
    with ThreadPoolExecutor(1) as pool:
        yield pool
    open("left", "w").close()

def failing():
    raise OSError("no cluster here")

number = 3
def nothing():
    return number
"""


@pytest.fixture(autouse=True)
def forgotten_modules(monkeypatch):
    """The modules that a test builds are gone after it."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    module_import.forget()
    sys.modules.pop("engine_of_test", None)


@pytest.fixture
def run(cli):
    """Call the command in this process, and expect an exit status."""

    def call(*words, status=0):
        done = cli(*words)
        assert done.exit_code == status, done.output
        return done

    return call


@pytest.fixture
def run_json(cli_json):
    """Call the command with --json, expect an exit status, and return the object."""

    def call(*words, status=0):
        code, answer = cli_json(*words)
        assert code == status, answer
        return answer

    return call


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with six kernels and an engine."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "six.py").write_text(MODULE)
    (tmp_path / "engine_of_test.py").write_text(ENGINE)
    return tmp_path


BUILD = ("build", "six.py", "--target", "cuda:90", "--jobs", "1")


def test_shards_meet_in_a_store_and_collect_compiles_what_is_missing(run, run_json, here):
    """The bundle is the one that a build without shards makes."""
    whole = run_json(*BUILD, "-o", "whole.tbundle")
    one = run_json(*BUILD, "--store", here / "store", "--shard", "1/3", "--times", "whole.tbundle")
    three = run_json(
        *BUILD, "--store", here / "store", "--shard", "3/3", "--times", "whole.tbundle"
    )
    assert [one["shard"], three["shard"]] == ["1/3", "3/3"]
    assert one["path"] is None
    assert one["compiled"]
    assert not set(one["compiled"]) & set(three["compiled"])
    collected = run_json(*BUILD, "--store", here / "store", "--collect", "-o", "collected.tbundle")
    assert collected["digest"] == whole["digest"]
    missing = {row["key"] for row in collected["missing"]}
    assert (
        missing
        == set(collected["compiled"])
        == set(whole["compiled"]) - {*one["compiled"], *three["compiled"]}
    )
    again = run_json(*BUILD, "--store", here / "store", "--collect", "-o", "again.tbundle")
    assert not again["missing"]
    assert not again["compiled"]


def test_shards_and_what_is_missing_are_told(run, here):
    """How large the part is, where it went, and each kernel that was missing."""
    done = run(*BUILD, "--store", here / "store", "--shard", "2/3")
    assert "shard 2/3: 2 of 6 kernels\n" in done.stdout
    assert f"shard 2/3: 2 kernels in file://{here}/store\n" in done.stdout
    done = run(*BUILD, "--store", here / "store", "--collect", "-o", "all.tbundle")
    assert f"missing in file://{here}/store, compiled now: 4 kernels\n" in done.stdout
    assert done.stdout.count("  scale for cuda:90\n") == 4
    done = run(*BUILD, "--store", here / "store", "--collect", "-o", "all.tbundle")
    assert f"nothing is missing in file://{here}/store\n" in done.stdout


def test_a_part_without_kernels_is_fine(run_json, here):
    """More machines than kernels."""
    answers = [
        run_json(*BUILD, "--store", here / "store", "--shard", f"{n}/9")["compiled"]
        for n in range(1, 10)
    ]
    assert sorted(map(len, answers)) == [0, 0, 0, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--shard", "1/3"], "give --store"),
        (["--collect", "-o", "x"], "give --store"),
        (["--shard", "4/3", "--store", "s"], "expected I/N, such as 3/64"),
        (["--shard", "1/3", "--store", "s", "--collect"], "give one of them"),
        (["--shard", "1/3", "--store", "s", "--tag", "t"], "give it with --collect"),
        (["--shard", "1/3", "--store", "s", "--complete", "x"], "give it with --collect"),
        (["--times", "x", "-o", "y"], "--times is for --shard"),
        (["--exact", "-o", "y"], "--exact is for --complete"),
        (["--check", "--store", "s", "--collect"], "--check compiles nothing"),
        (["--collect", "--store", "s"], "give -o FILE"),
        (["--executor", "a:b", "-o", "y"], "give one"),
    ],
)
def test_options_that_do_not_go_together_are_refused(run, here, words, told):
    """Before anything is read or compiled."""
    done = run(*BUILD, *words, status=2)
    assert told in done.stderr
    assert not list(here.glob("s*e"))


@pytest.mark.slow
def test_an_executor_is_named_by_its_function(run_json, command, here):
    """It is looked for in the working directory; a context manager is left at the end."""
    local = run_json(*BUILD, "-o", "local.tbundle")
    for function in ("executor", "managed"):
        # In a process of its own: threads of an executor are workers, which keep processes for a
        # minute.
        words = ("--executor", f"engine_of_test:{function}", "-o", "x.tbundle", "--json")
        answer = json.loads(command(*BUILD[:-2], *words).stdout)
        assert answer["digest"] == local["digest"]
        assert len(answer["compiled"]) == 6
    assert (here / "entered").exists()
    assert (here / "left").exists()


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("engine_of_test", "expected module:function"),
        ("no_such_module_at_all:f", "No module named 'no_such_module_at_all'"),
        ("engine_of_test:f", "has no attribute 'f'"),
        ("engine_of_test:number", "number is not a function"),
        ("engine_of_test:failing", "the function failed: OSError: no cluster here"),
        ("engine_of_test:nothing", "returned 3; expected a concurrent.futures.Executor"),
    ],
)
def test_an_executor_that_cannot_be_had_is_told(run, here, name, told):
    """In one line, with its name."""
    done = run(*BUILD[:-2], "--executor", name, "-o", "x.tbundle", status=1)
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert not (here / "x.tbundle").exists()


def test_what_was_used_and_is_not_built_fails_by_name(run, run_json, here):
    """Each specialization is named, nothing is written, and --keep-going writes the rest."""
    run_json(*BUILD, "-o", "used.tbundle")
    rewrite(here, MODULE.replace("5, 6", "7"))
    done = run(*BUILD, "-o", "next.tbundle", "--complete", "used.tbundle", status=1)
    with Bundle.load(here / "used.tbundle") as used:
        for factor in (5, 6):
            (kernel,) = (k for k in used.kernels if ("FACTOR", factor) in _constants(k))
            told = (
                f"error: used and not built: scale for cuda:90 (x: *fp32:16; FACTOR={factor};"
                f" num_warps=4, num_stages=3), key {kernel.key}\n"
            )
            assert told in done.stderr
    assert (
        "next.tbundle was not written: 2 of 6 kernels that used.tbundle used are not built"
        in done.stderr
    )
    assert "built and never used: 1 kernel\n" in done.stdout
    assert not (here / "next.tbundle").exists()
    answer = run_json(
        *BUILD, "-o", "next.tbundle", "--complete", "used.tbundle", "--keep-going", status=1
    )
    assert len(answer["complete"]["unbuilt"]) == 2
    assert "FACTOR=7" in next(row["specialization"] for row in answer["complete"]["unused"])
    assert (here / "next.tbundle").exists()


def rewrite(here, text):
    """Change the module, as before another run of the command."""
    (here / "six.py").write_text(text)
    module_import.forget()
    sys.modules.pop("six", None)


def _constants(kernel):
    facts = kernel.launch.require_facts()
    return [(facts.arguments[path[0]].name, value.plain()) for path, value in facts.constants]


def test_what_is_built_and_never_used_fails_when_exact(run, run_json, here):
    """Without --exact it is listed; kernels for other targets than the recorded ones are not looked
    at.
    """
    (here / "six.py").write_text(MODULE.replace("5, 6", "5"))
    run_json(*BUILD, "-o", "used.tbundle")
    rewrite(here, MODULE)
    both = ("--target", "hip:gfx942")
    fine = run_json(*BUILD, *both, "-o", "next.tbundle", "--complete", "used.tbundle")
    assert len(fine["complete"]["unused"]) == 1
    assert fine["complete"]["used"] == 5
    done = run(
        *BUILD, *both, "-o", "exact.tbundle", "--complete", "used.tbundle", "--exact", status=1
    )
    assert "exact.tbundle was not written: 1 kernel built and never used" in done.stderr
    assert not os.path.exists("exact.tbundle")


def test_a_recording_without_kernels_says_nothing(run, here):
    """It would let everything pass."""
    from bundler.format.bundle import MemoryBlobs
    from bundler.format.manifest import Content, Observed

    Bundle(Content(), Observed(), MemoryBlobs({})).save(here / "empty.tbundle")
    done = run(*BUILD, "-o", "x.tbundle", "--complete", "empty.tbundle", status=1)
    assert "the recording has no kernels" in done.stderr


def test_a_build_that_was_interrupted_goes_on(run_json, here):
    """What was compiled before is in the store; only what is missing is compiled."""
    first = run_json(
        "build",
        "six.py",
        "--target",
        "cuda:90",
        "--store",
        here / "store",
        "--shard",
        "1/2",
        "--jobs",
        "1",
    )
    rest = run_json(*BUILD, "--store", here / "store", "-o", "all.tbundle")
    assert sorted(rest["reused"]) == sorted(first["compiled"])
    assert len(rest["compiled"]) == 3
