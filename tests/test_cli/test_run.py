# SPDX-License-Identifier: Apache-2.0
"""`run` records real programs and their children, and behaves like the program it runs."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

import bundler

pytestmark = pytest.mark.toolchain

CHILDREN = """
import subprocess, sys
subprocess.run([sys.executable, sys.argv[1], "gelu", "cuda:90"], check=True)
subprocess.run([sys.executable, sys.argv[1], "row_sum", "hip:gfx942"], check=True)
"""
COMPILE_AND_WAIT = """
import pathlib, runpy, sys, time
program, ready = sys.argv[1:]
sys.argv = [program, "gelu", "cuda:90"]
runpy.run_path(program)
pathlib.Path(ready).touch()
time.sleep(60)
"""
WAIT = """
import pathlib, signal, sys, time
def stop(number, frame):
    print("stopped by", number, flush=True)
    sys.exit(40 + number)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
pathlib.Path(sys.argv[1]).touch()
time.sleep(60)
"""


def kernels(path):
    """Return (name, target) of each kernel of a bundle."""
    with bundler.Bundle.load(path) as bundle:
        return {(kernel.name, str(kernel.target)) for kernel in bundle.kernels}


def test_run_records_a_program(command, program, tmp_path):
    """Run writes what the program compiled, with argument types, and leaves standard output to the
    program.
    """
    output = tmp_path / "b.tbundle"
    done = command("run", "-o", output, "--", sys.executable, program, "gelu", "cuda:90")
    assert (done.returncode, done.stdout) == (0, "compiled gelu\n"), done.stderr
    assert "recorded 1 kernel in 1 process: 1 compile, 0 hits" in done.stderr
    with bundler.Bundle.load(output) as bundle:
        assert [kernel.name for kernel in bundle.kernels] == ["gelu_kernel"]
        assert bundle.kernels[0].launch.require_facts().signature[0][0] == "x_ptr"


@pytest.mark.slow
def test_run_records_children(command, program, tmp_path):
    """Run records what children of the command compile, and what they find in the cache."""
    script = tmp_path / "parent.py"
    script.write_text(CHILDREN)
    words = ("run", "--json", "-o", tmp_path / "b.tbundle", "--", sys.executable, script, program)
    expected = {("gelu_kernel", "cuda:90"), ("row_sum_kernel", "hip:gfx942")}
    for compiles, hits in ((2, 0), (0, 2)):
        done = command(*words)
        told = json.loads(done.stdout)
        assert (done.returncode, told["status"], told["processes"]) == (0, 0, 2)
        assert (told["compiles"], told["hits"]) == (compiles, hits)
        assert kernels(tmp_path / "b.tbundle") == expected
        assert "compiled gelu" in done.stderr


def test_run_keeps_a_failing_status_and_writes(command, program, tmp_path):
    """When the command fails, run writes what it compiled and ends with the command's status."""
    line = f"'{sys.executable}' '{program}' gelu cuda:90; exit 7"
    done = command("run", "-o", tmp_path / "b.tbundle", "--", "sh", "-c", line)
    assert done.returncode == 7
    assert "warning: the command ended with status 7" in done.stderr
    assert kernels(tmp_path / "b.tbundle") == {("gelu_kernel", "cuda:90")}


def test_run_ends_as_the_shell_does_after_a_signal(command, tmp_path):
    """A command that a signal ends gives 128 and the signal's number."""
    done = command("run", "-o", tmp_path / "b.tbundle", "--", "sh", "-c", "kill -9 $$")
    assert done.returncode == 137


@pytest.mark.parametrize(
    ("content", "mode", "status"),
    [
        (None, 0, 127),
        ("", 0o644, 126),
        ("\0garbage", 0o755, 126),
        ("#!/nowhere/interpreter\n", 0o755, 127),
    ],
)
def test_run_ends_as_the_shell_does_when_it_cannot_start_a_program(
    command, tmp_path, content, mode, status
):
    """A program that is not there gives 127, one that cannot be executed 126; nothing is
    written.
    """
    program = tmp_path / "program"
    if content is not None:
        program.write_text(content)
        program.chmod(mode)
    done = command("run", "-o", tmp_path / "b.tbundle", "--", program)
    assert (
        done.returncode,
        len(done.stderr.splitlines()),
        done.stderr.startswith("error: cannot run "),
    ) == (
        status,
        1,
        True,
    )
    assert not (tmp_path / "b.tbundle").exists()


def test_run_of_a_name_that_is_on_no_path(command, tmp_path):
    """A name that PATH does not have gives 127, also as JSON."""
    done = command("run", "--json", "-o", tmp_path / "b", "--", "no-such-program")
    assert (done.returncode, json.loads(done.stdout)["error"]["code"]) == (127, "not-found")


def test_run_keeps_what_was_recorded_before_ctrl_c(program, tmp_path):
    """Ctrl-C ends a program that does not expect it, and run with 130; what the program compiled
    before is written.
    """
    ready, script = tmp_path / "ready", tmp_path / "stopped.py"
    script.write_text(COMPILE_AND_WAIT)
    words = [
        "run",
        "-o",
        str(tmp_path / "b"),
        "--",
        sys.executable,
        str(script),
        str(program),
        str(ready),
    ]
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "bundler", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        deadline = time.monotonic() + 100
        while not ready.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(child.pid, signal.SIGINT)
        _, err = child.communicate(timeout=60)
    assert child.returncode == 130, err
    assert kernels(tmp_path / "b") == {("gelu_kernel", "cuda:90")}
    (summary,) = [line for line in err.splitlines() if line.startswith("recorded ")]
    assert summary.startswith(
        f"recorded 1 kernel in 1 process: 1 compile, 0 hits; wrote {tmp_path}/b: "
    )


def test_run_without_kernels_writes_nothing(command, tmp_path):
    """When nothing was recorded, run says so, ends with 1 and leaves an older bundle alone."""
    output = tmp_path / "b.tbundle"
    output.write_text("older")
    done = command("run", "-o", output, "--", sys.executable, "-c", "print('hello')")
    assert (done.returncode, done.stdout, output.read_text()) == (1, "hello\n", "older")
    assert [line.partition(":")[0] for line in done.stderr.splitlines()] == ["error"]


def test_run_passes_words_on(command, tmp_path):
    """Words of the command that look like options of run are the command's."""
    done = command(
        "run",
        "-o",
        tmp_path / "b",
        sys.executable,
        "-c",
        "import sys; print(sys.argv)",
        "--json",
        "-o",
        "x",
    )
    assert done.stdout == "['-c', '--json', '-o', 'x']\n"


def test_run_leaves_no_spool(command, tmp_path):
    """After run nothing of ours is left among the temporary files."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    command("run", "-o", tmp_path / "b", "--", "true", env={"TMPDIR": str(temporary)})
    assert list(temporary.iterdir()) == []


def test_run_refuses_a_python_without_us(command, tmp_path):
    """A Python that has Triton and cannot import this package is refused before it runs, since
    Triton would fail in it.
    """
    stranger = tmp_path / "python3"
    stranger.write_text("#!/bin/sh\necho 'ModuleNotFoundError: no bundler' >&2\nexit 1\n")
    stranger.chmod(0o755)
    script = tmp_path / "script"
    script.write_text(f"#!{stranger} -u\nprint('ran')\n")
    script.chmod(0o755)
    for program in (stranger, script):
        done = command("run", "-o", tmp_path / "b", "--", program)
        assert (done.returncode, done.stdout) == (1, "")
        assert "ModuleNotFoundError: no bundler" in done.stderr
        assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_run_passes_signals_on(tmp_path, number):
    """A signal sent to run reaches the command, whose own status is run's."""
    ready = tmp_path / "ready"
    script = tmp_path / "wait.py"
    script.write_text(WAIT)
    words = ["run", "-o", str(tmp_path / "b"), "--", sys.executable, str(script), str(ready)]
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "bundler", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        deadline = time.monotonic() + 60
        while not ready.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(child.pid, number)
        out, _ = child.communicate(timeout=60)
    assert (child.returncode, out) == (40 + number, f"stopped by {int(number)}\n")
