# SPDX-License-Identifier: Apache-2.0
"""One store, many processes and threads: nothing is lost, nothing is half there."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import oracle
import pytest

import bundler
from bundler.backends.testing.backend_contract import in_threads

HERE = Path(__file__).parent
MANY = 8

# Python runs a module of this name when it starts. A swap that should have been refused is said to
# have succeeded.
_LINKS_THAT_LIE = """
import os, sys
_link = os.link
def link(old, new, **more):
    if "+gen" not in os.fspath(new) or int(os.path.basename(new)) % 3:
        _link(old, new, **more)
if "--step" in sys.argv:
    os.link = link
"""
# Kernel directories appear before all their files are there.
_RENAMES_THAT_COPY = """
import os, shutil, sys
_rename = os.rename
def rename(old, new, **more):
    if "tmp.bundler" not in os.fspath(old) or os.path.lexists(new):
        return _rename(old, new, **more)
    shutil.copytree(old, new, ignore=shutil.ignore_patterns("*.ttgir"))
    shutil.rmtree(old)
if "--step" in sys.argv:
    os.rename = rename
    sys.modules["bundler.lifecycle._kernel_writer"] = None  # it renames without Python
"""


@pytest.fixture
def started():
    """Return a function that starts a worker process; what still runs at the end is killed."""
    processes = []

    def start(*arguments):
        command = [
            sys.executable,
            "-P",
            "-W",
            "ignore",
            str(HERE / "worker.py"),
            *map(str, arguments),
        ]
        processes.append(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def go(processes):
    """Let processes start their work together, and return what each said last."""
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    answers = []
    for process in processes:
        output, _ = process.communicate(timeout=100)
        assert process.returncode == 0
        answers.append(json.loads(output.splitlines()[-1]))
    return answers


@pytest.fixture
def sixteen(tmp_path):
    """The path of a bundle of sixteen kernels."""
    path = tmp_path / "b.tbundle"
    oracle.bundle(*range(16)).save(path)
    return path


def test_eight_processes_push_to_one_tag(local, url, sixteen, started):
    """However their pushes interleave, in the end the tag holds what everybody pushed, and each
    kernel once.
    """
    parts = [[f"{n},{(n + 8) % 16}", f"{n + 4},{n + 5}"] for n in range(MANY)]
    processes = [started("push", url, sixteen, "t", *part) for part in parts]
    digests = go(processes)
    with bundler.Bundle.load(sixteen) as bundle, local.pull("t") as pulled:
        assert oracle.contents(pulled) == oracle.contents(bundle)
        assert pulled.digest == bundle.digest
    assert bundle.digest in digests
    assert local.verify().sound
    assert local.stats().units == 32
    assert os.listdir(Path(url[7:]) / "tmp") == []


def test_eight_processes_restore_at_once(local, url, real, compiled, tmp_path, started):
    """Processes that restore one tag into one directory all find every kernel in place, and it is
    there once.
    """
    local.push(real, "t")
    processes = [
        started("restore", url, compiled.bundle, "t", tmp_path / "cache") for _ in range(4)
    ]
    assert go(processes) == [len(real.kernels)] * 4
    assert len(list((tmp_path / "cache").iterdir())) == len(real.kernels)


def test_killed_pushes_leave_a_store_that_is_sound(local, url, sixteen, started):
    """Whenever a push is killed, the store verifies, and the tag names one of the two bundles,
    whole.
    """
    for turn in range(5):
        process = started("push_for_ever", url, sixteen, "t")
        process.stdin.write("\n")
        process.stdin.flush()
        for _ in range(1 + turn):
            assert process.stdout.readline()
        process.kill()
        process.communicate()
        report = local.verify()
        assert report.sound, report
        assert len(local.pull("t").kernels) in {0, 16}
        oracle.contents(local.pull("t"))
        oracle.age(local, 2 * oracle.DAY_S)
        local.prune()
        assert local.verify().sound
    with bundler.Bundle.load(sixteen) as bundle:
        local.push(bundle, "t", "replace")
        assert oracle.contents(local.pull("t")) == oracle.contents(bundle)


def test_threads_share_one_store(store):
    """Threads that push to one tag and read it on one handle lose nothing and see nothing
    half-done.
    """
    seen, done = [], threading.Event()

    def push(number):
        for turn in range(3):
            store.push(oracle.bundle(10 * number + turn), "t")

    def read():
        while not done.is_set():
            try:
                with store.pull("t") as pulled:
                    seen.append(len(oracle.contents(pulled)))
            except bundler.errors.NotFound:
                continue

    reader = threading.Thread(target=read)
    reader.start()
    try:
        in_threads([lambda number=number: push(number) for number in range(MANY)])
    finally:
        done.set()
        reader.join(60)
    expected = oracle.bundle(*(10 * number + turn for number in range(MANY) for turn in range(3)))
    assert oracle.contents(store.pull("t")) == oracle.contents(expected)
    assert seen == sorted(seen)
    assert store.verify().sound


def test_threads_share_one_pulled_bundle(store, monkeypatch):
    """Threads that read one pulled bundle, more than fits into its memory, all read the right
    bytes.
    """
    monkeypatch.setattr("bundler.store.blob_source.CACHED_BYTES", 2000)
    bundle = oracle.bundle(*range(20))
    store.push(bundle, "t")
    right = oracle.contents(bundle)
    with store.pull("t") as pulled:
        assert in_threads([lambda: oracle.contents(pulled)] * MANY) == [right] * MANY


@pytest.mark.parametrize("kind", ["memory", "local"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_fork_with_an_open_store(kind, opened, url, memory):
    """Parent and child both go on with a store, and a pulled bundle, that were open before the
    fork.
    """
    store = memory if kind == "memory" else opened(url)
    store.push(oracle.bundle("A", "B"), "t")
    right = oracle.contents(oracle.bundle("A", "B"))
    with store.pull("t") as pulled:
        pulled.read(pulled.kernels[0].binary)
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            fine = oracle.contents(pulled) == right
            store.push(oracle.bundle("C"), "child")
            os._exit(0 if fine and oracle.kernels(store.pull("child")) == oracle.keys("C") else 1)
        assert oracle.contents(pulled) == right
        store.push(oracle.bundle("D"), "t")
        assert os.waitpid(child, 0)[1] == 0
    assert oracle.kernels(store.pull("t")) == oracle.keys("A", "B", "D")
    # Memory is copied at a fork; a directory is not.
    assert [info.name for info in store.tags()] == (["t"] if kind == "memory" else ["child", "t"])
    assert store.verify().sound


@pytest.fixture
def race(run_tool, few, tmp_path):
    """Return a function that runs the race on a few kernels, and returns the finished process and
    what it wrote.
    """

    def run(*arguments, first=""):
        done = run_tool(
            "cluster race",
            "--bundle",
            few,
            "--results",
            tmp_path,
            *arguments,
            first=first,
            timeout=100,
        )
        return done, json.loads((tmp_path / "race-store.json").read_text())

    return run


@pytest.fixture
def few(real, tmp_path):
    """The path of a bundle of six compiled kernels."""
    from bundler.format.manifest import Content

    path = tmp_path / "few.tbundle"
    bundler.Bundle(Content.of(real.kernels[::4]), real.observed, real.blobs).save(path)
    return path


@pytest.mark.slow
def test_a_sample_of_the_race(race):
    """Eight processes that restore, push, name, prune, look and verify at once meet no exception
    and no wrong or partial kernel.
    """
    done, result = race("--rounds", 8, "--seed", 1)
    assert done.returncode == 0, done.stderr
    assert (result["rounds"], result["processes"], result["problem_count"], result["problems"]) == (
        8,
        8,
        0,
        [],
    )
    assert {
        "restore",
        "push",
        "push loose",
        "prune",
        "look",
        "kernels restored",
        "units sent",
    } <= result["acts"].keys()
    assert "8 rounds of 8 processes" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sabotage", "problem"),
    [(_LINKS_THAT_LIE, "team/all"), (_RENAMES_THAT_COPY, "is partial, without")],
)
def test_the_race_can_be_lost(race, tmp_path, sabotage, problem):
    """With a file system that does not do what it says the race finds what goes wrong."""
    (tmp_path / "sitecustomize.py").write_text(sabotage)
    done, result = race("--rounds", 3, first=tmp_path)
    assert done.returncode == 1
    assert result["problem_count"] > 0
    assert problem in done.stderr
