# SPDX-License-Identifier: Apache-2.0
"""Restores that are killed, and many at once."""

import json
import os
import subprocess
import sys

import pytest
import support

import bundler

# Restores argv[1] once for each number of argv[3:] into a directory of its own below argv[2]; a
# forked child does it, and kills itself at that call of the file system: before it, or for a write
# after half of the bytes.
_KILLED = """
import itertools, json, os, signal, sys
import bundler
from bundler.lifecycle import kernel_writer
kernel_writer.compiled_writer = lambda: None  # the extension does not go by way of os; the crash matrix stops that one
path, folder, *numbers = sys.argv[1:]
bundle = bundler.Bundle.load(path)

def deadly(name, calls, number):
    real = getattr(os, name)
    def call(*args, **kwargs):
        if next(calls) == number:
            if name == "write":
                real(args[0], bytes(args[1])[: len(args[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)
    setattr(os, name, call)

def restore(number, place):
    pid = os.fork()
    if pid == 0:
        calls = itertools.count()
        for name in ("mkdir", "open", "write", "rename", "link", "unlink", "rmdir"):
            deadly(name, calls, number)
        bundler.restore(bundle, place, only="all")
        os._exit(0)
    return os.waitpid(pid, 0)[1]

found = {number: restore(int(number), os.path.join(folder, number)) for number in numbers}
print(json.dumps(found))
"""

# Restores argv[1] into argv[2] argv[3] times when a line comes in; with "break" as argv[4] it
# breaks a kernel before each.
_RACER = """
import glob, json, os, random, sys
import bundler
path, place, times, role = sys.argv[1:]
chance = random.Random(7)
done = []
with bundler.Bundle.load(path) as bundle:
    keys = sorted(kernel.key for kernel in bundle.kernels)
    print("ready", flush=True)
    sys.stdin.readline()
    for turn in range(int(times)):
        if role == "break":
            for key in chance.sample(keys, 3):
                folder = os.path.join(place, key)
                try:
                    if chance.random() < 0.5:
                        os.unlink(glob.glob(os.path.join(folder, "__grp__*"))[0])
                    else:
                        os.truncate(glob.glob(os.path.join(folder, "*.cubin"))[0], chance.randrange(2000))
                except (OSError, IndexError):
                    pass  # another process has just moved it
        report = bundler.restore(bundle, place, only="all")
        assert report.usable == len(keys) and not report.skipped, report
        done.append(len(report.repaired))
print(json.dumps(done))
"""


@pytest.fixture
def three(bundle, tmp_path):
    """A bundle file of three kernels."""
    path = tmp_path / "three.tbundle"
    bundle.select(target="cuda:90", names="[glr]*_kernel").save(path)
    return path


def check_visible(place, expected):
    """Each visible kernel is whole, with the right bytes, and its group file leads to them; returns
    how many there are.
    """
    visible = (
        [path for path in place.iterdir() if not path.name.startswith("tmp.")]
        if place.exists()
        else []
    )
    for directory in visible:
        assert support.is_whole(directory), f"{directory.name} is visible and not whole"
        for name, data in support.tree(directory).items():
            if not name.startswith(support.GROUP):
                assert data == expected[f"{directory.name}/{name}"]
        children = json.loads(support.group_of(directory).read_text())["child_paths"]
        assert children == {name: str(directory / name) for name in children}
    return len(visible)


def test_a_killed_restore_leaves_no_kernel_half_visible(three, compiled, tmp_path):
    """Killed at any of some thirty file system calls, a restore leaves each kernel absent or whole,
    and the next one completes; slow, and the only test of the order of these calls.
    """
    expected = support.tree(compiled.cache)
    killed = support.answer(_KILLED, three, tmp_path / "killed", *range(0, 60, 2))
    assert sum(status == 9 for status in killed.values()) >= 25, (
        "the restore did fewer calls than the test thinks"
    )
    counts = set()
    for number in killed:
        place = tmp_path / "killed" / number
        counts.add(check_visible(place, expected))
        report = bundler.restore(three, place, only="all")
        assert (report.usable, report.repaired) == (3, ())
        assert check_visible(place, expected) == 3
    assert {0, 1, 2} <= counts


@pytest.mark.toolchain
@pytest.mark.slow
def test_after_a_kill_triton_hits_or_compiles(three, tmp_path):
    """In a cache that a killed restore left, Triton finds the whole kernels, compiles the others,
    and fails on none.
    """
    killed = support.answer(_KILLED, three, tmp_path / "killed", 5, 30, 50)
    assert set(killed.values()) == {9}
    hits = []
    for number in killed:
        place = tmp_path / "killed" / number
        visible = [name for name in os.listdir(place) if not name.startswith("tmp.")]
        heard = support.ask(place, "gelu,layer_norm,row_sum", ["cuda:90"])
        assert len(heard) == 3
        assert sum(hit for *_, hit in heard) == len(visible)
        hits.append(len(visible))
    assert hits[0] == 0 < hits[-1]


def race(path, place, roles, times):
    """Restore in as many processes as there are roles, all starting at once; returns what each
    repaired.
    """
    command = [
        sys.executable,
        "-P",
        "-W",
        "ignore",
        "-c",
        _RACER,
        str(path),
        str(place),
        str(times),
    ]
    processes = [
        subprocess.Popen(
            [*command, role],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for role in roles
    ]
    try:
        for process in processes:
            assert process.stdout.readline() == "ready\n", process.stderr.read()
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        answers = [process.communicate(timeout=100) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                stream.close()
    assert [process.returncode for process in processes] == [0] * len(roles), [
        error for _, error in answers
    ]
    return [json.loads(out) for out, _ in answers]


def test_many_processes_restore_into_one_directory(compiled, tmp_path):
    """Four processes that restore all kernels into one empty directory at once all succeed, and
    leave nothing but kernels.
    """
    place = tmp_path / "there"
    assert race(compiled.bundle, place, ["restore"] * 4, 1) == [[0]] * 4
    assert check_visible(place, support.tree(compiled.cache)) == 22
    assert sorted(os.listdir(place)) == compiled.keys


def test_restores_and_repairs_race_without_harm(three, compiled, tmp_path):
    """Four processes restore fifty times while one keeps breaking kernels: none fails, no temporary
    stays, and at the end a restore finds every kernel whole or repairs it, with no wrong byte;
    slow, for it needs many rounds to collide.
    """
    place = tmp_path / "there"
    repaired = race(three, place, ["restore", "restore", "restore", "break"], 50)
    assert sum(map(sum, repaired)) > 0, "nothing was broken, so nothing was shown"
    bundler.restore(three, place, only="all")
    assert check_visible(place, support.tree(compiled.cache)) == 3
    assert support.temporaries(place) == []
    assert set(bundler.restore(three, place, only="all").present) == {
        path.name for path in place.iterdir() if not path.name.startswith("tmp.")
    }
