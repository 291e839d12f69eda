# SPDX-License-Identifier: Apache-2.0
"""A sample of the crash matrix, its shim, and that it can fail; `make crash` runs all of it."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import support

SHIM = support.ROOT / "tools" / "crash" / "shim.c"
COMPILERS = ("cc", "gcc", "clang")

pytestmark = [
    pytest.mark.skipif(
        not sys.platform.startswith("linux"), reason="the shim knows Linux's system calls"
    ),
    pytest.mark.skipif(
        not any(map(shutil.which, COMPILERS)),
        reason="there is no C compiler for the shim, e.g. gcc",
    ),
]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)

# Makes a directory with a file of ten bytes in it, in seven calls, and says which error stopped it.
_WRITER = """
import os, sys
try:
    os.mkdir(sys.argv[1] + "/d")
    folder = os.open(sys.argv[1] + "/d", os.O_RDONLY)
    fd = os.open("new", os.O_WRONLY | os.O_CREAT, dir_fd=folder)
    written = os.write(fd, b"0123456789")
    os.fsync(fd)
    os.close(fd)
    os.rename("new", "file", src_dir_fd=folder, dst_dir_fd=folder)
    os.unlink(sys.argv[1] + "/d/file") if written < 10 else print(written)
except OSError as error:
    print(error.strerror)
"""
# Python runs a module of this name when it starts: renames and links are no longer one step.
_TORN_PACKAGE = """
import os, shutil, sys
sys.modules["bundler.lifecycle._kernel_writer"] = None  # it renames without Python
_rename = os.rename
def rename(old, new, **more):
    shutil.copytree(old, new) if "tmp.bundler" in os.fspath(old) and os.path.isdir(old) else _rename(old, new, **more)
def link(old, new, **more):
    shutil.copyfile(old, new)
os.rename, os.link = rename, link
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    """The compiled shim."""
    built = tmp_path_factory.mktemp("shim") / "shim.so"
    compiler = next(filter(None, map(shutil.which, COMPILERS)))
    warnings = ["-Wall", "-Wextra", "-Werror"]
    subprocess.run([compiler, *warnings, "-shared", "-fPIC", "-O1", "-o", built, SHIM], check=True)
    return built


@pytest.fixture
def write_under(shim, tmp_path):
    """Return a function that runs the writer with one fault and returns exit status, output, calls
    and what is left.
    """
    root, log = tmp_path.resolve() / "root", tmp_path / "log"
    root.mkdir()

    def run(fault="", at=0):
        environment = {
            "LD_PRELOAD": shim,
            "CRASH_ROOT": root,
            "CRASH_LOG": log,
            "CRASH_FAULT": fault,
            "CRASH_AT": at,
        }
        done = subprocess.run(
            [sys.executable, "-P", "-c", _WRITER, root],
            env={**os.environ, **{name: str(value) for name, value in environment.items()}},
            capture_output=True,
            text=True,
            timeout=60,
        )
        return (
            done.returncode,
            done.stdout.strip(),
            log.read_text().splitlines(),
            support.tree(root),
        )

    return run


@pytest.fixture
def matrix(run_tool, tmp_path):
    """Return a function that runs the tool and returns its status, its errors and its
    result file.
    """

    def run(*arguments, first=""):
        done = run_tool("crash matrix", "--results", tmp_path, *arguments, first=first)
        result = tmp_path / "crash-matrix.json"
        return (
            done.returncode,
            done.stderr,
            json.loads(result.read_text()) if result.exists() else {},
        )

    return run


def test_the_shim_counts_the_calls_that_change_files(write_under):
    """A dry run lists each call on what lies below the directory, by name, and disturbs none."""
    status, said, calls, left = write_under()
    assert [call.split()[0] for call in calls] == [
        "mkdirat",
        "openat",
        "write",
        "fsync",
        "close",
        "renameat",
    ]
    assert (status, said, left) == (0, "10", {"d/file": b"0123456789"})


@pytest.mark.parametrize(
    ("fault", "at", "left"),
    [
        ("kill", 1, {}),
        ("kill", 3, {"d/new": b""}),
        ("killed-after", 3, {"d/new": b"0123456789"}),
        ("torn", 3, {"d/new": b"01234"}),
        ("torn", 6, {"d/new": b"0123456789"}),
        ("killed-after", 6, {"d/file": b"0123456789"}),
    ],
)
def test_the_shim_kills_at_the_named_call(write_under, fault, at, left):
    """The process dies at that call, before it, after it or in its midst, and what it had written
    stays.
    """
    status, _, calls, found = write_under(fault, at)
    assert (status, found) == (-signal.SIGKILL, left)
    assert [call.startswith("* ") for call in calls] == [False] * (at - 1) + [True]


@pytest.mark.parametrize(
    ("fault", "at", "said", "hits"),
    [
        ("enospc", 3, "No space left on device", 1),
        ("eio", 5, "Input/output error", 1),
        ("eio-from", 1, "Input/output error", 1),
        ("short", 3, "", 1),
    ],
)
def test_the_shim_refuses_the_named_call(write_under, fault, at, said, hits):
    """The call fails with that error, or writes half, and the program goes on."""
    status, output, calls, _ = write_under(fault, at)
    assert (status, output) == (0, said)
    assert sum(call.startswith("* ") for call in calls) == hits


@pytest.mark.slow
@needs_triton
def test_a_sample_of_the_crash_matrix_finds_nothing(matrix):
    """Sixty seeded cells, of every entry point and fault: nothing partial, no wrong byte, only
    typed errors, and the next run completes and sweeps; slow, since it compiles kernels and runs
    each cell three times.
    """
    status, errors, result = matrix("--sample", 60, "--seed", 4)
    assert (status, errors) == (0, "")
    assert (result["runs"], result["problems"]) == (60, 0)
    assert {row["entry"] for row in result["rows"]} == {
        "restore",
        "save",
        "put",
        "push",
        "tag",
        "prune",
    }
    assert sum(result["lookups_by_triton"].values()) > 0


@pytest.mark.slow
@needs_triton
def test_the_crash_matrix_can_fail(matrix, tmp_path):
    """Where publishing is not one step, the matrix reports partial kernels and objects, and the
    status is 1.
    """
    (tmp_path / "sitecustomize.py").write_text(_TORN_PACKAGE)
    cells = ("--sample", 40, "--seed", 3, "--cases", "restore/absent,put/absent")
    status, errors, result = matrix(*cells, first=tmp_path)
    assert status == 1, errors
    assert {row["entry"] for row in result["rows"] if row["partial"]} == {"restore", "put"}
