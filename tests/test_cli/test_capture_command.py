# SPDX-License-Identifier: Apache-2.0
"""`capture` runs a program without a GPU and writes what it would launch, whatever becomes of the
program.
"""

import json
import sys
from pathlib import Path

import pytest

import bundler

pytestmark = pytest.mark.toolchain

KERNEL = """
import sys
import torch, triton
import triton.language as tl

@triton.jit
def add_one(x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i, mask=i < n) + 1, mask=i < n)

def launch(block=64):
    x = torch.randn(1000, device="cuda")
    add_one[(8,)](x, 1000, BLOCK=block)
    return x
"""
LAUNCH = (
    KERNEL + 'print("sum", launch().sum().item(), sys.argv[1:], __name__,'
    " torch.cuda.get_device_capability())\n"
)


@pytest.fixture(autouse=True)
def torch():
    """The programs need torch and Triton."""
    pytest.importorskip("triton")
    pytest.importorskip("torch")


@pytest.fixture
def script(tmp_path):
    """Write a program; returns its path."""

    def write(text=LAUNCH, name="script.py"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def kernels(path):
    """Return (name, target) of each kernel of a bundle."""
    with bundler.Bundle.load(path) as bundle:
        return sorted((kernel.name, str(kernel.target)) for kernel in bundle.kernels)


@pytest.mark.slow
def test_a_script_is_captured(command, script, tmp_path):
    """The script runs as Python runs it, standard output is its own, and the lines that depend on
    data are listed.
    """
    path, output = script(), tmp_path / "b.tbundle"
    done = command(
        "capture",
        "-o",
        output,
        "--target",
        "cuda:90",
        "--",
        sys.executable,
        "-W",
        "ignore",
        path,
        "--steps",
        "3",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "sum 1.0 ['--steps', '3'] __main__ (9, 0)\n"
    assert kernels(output) == [("add_one", "cuda:90")]
    line = 1 + next(number for number, text in enumerate(LAUNCH.splitlines()) if ".item()" in text)
    assert f"script.py:{line}: item, taken: 1.0" in done.stderr
    assert "captured  1 kernel of 1 function, 1 launch" in done.stderr


@pytest.mark.slow
def test_a_program_is_captured_for_several_targets(command, script, tmp_path):
    """The program runs once for each target, and sees each; the bundle has all kernels.  `--json`
    gives one object.
    """
    path, output = script(), tmp_path / "b.tbundle"
    done = command(
        "capture",
        "--json",
        "-o",
        output,
        "--target",
        "cuda:80",
        "--target",
        "hip:gfx942",
        "--",
        path,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert kernels(output) == [("add_one", "cuda:80"), ("add_one", "hip:gfx942")]
    assert [one["target"] for one in told["captures"]] == ["cuda:80", "hip:gfx942"]
    assert [guess["what"] for one in told["captures"] for guess in one["guesses"]] == [
        "item",
        "item",
    ]
    assert "(8, 0)" in done.stderr
    assert "(9, 4)" in done.stderr


@pytest.mark.slow
def test_a_crash_keeps_what_was_captured(command, script, tmp_path):
    """A program that raises: its traceback is shown, what it launched is in the bundle, and the
    status is not 0.
    """
    path, output = (
        script(KERNEL + "launch()\nraise ValueError('no luck')\n"),
        tmp_path / "b.tbundle",
    )
    done = command("capture", "-o", output, "--target", "cuda:90", "--", sys.executable, path)
    assert done.returncode == 1
    traceback = done.stderr[
        done.stderr.index("Traceback") : done.stderr.index("ValueError: no luck")
    ]
    assert "script.py" in traceback
    assert "captured_program" not in traceback
    assert "ended with status 1; what it had launched until then was captured" in done.stderr
    assert kernels(output) == [("add_one", "cuda:90")]


@pytest.mark.slow
def test_the_status_is_the_programs(command, script, tmp_path):
    """What the program gives to `sys.exit` is the status, and its kernels are there."""
    path, output = script(KERNEL + "launch()\nsys.exit(5)\n"), tmp_path / "b.tbundle"
    done = command("capture", "-o", output, "--target", "cuda:90", "--", sys.executable, path)
    assert (done.returncode, kernels(output)) == (5, [("add_one", "cuda:90")])


@pytest.mark.slow
def test_a_kernel_that_does_not_compile_is_listed(command, script, tmp_path):
    """A kernel that Triton refuses is listed with its reason; the others are written, and the
    status is 1.
    """
    path, output = script(KERNEL + "launch()\nlaunch(block=7)\n"), tmp_path / "b.tbundle"
    done = command("capture", "-o", output, "--target", "cuda:90", "--", sys.executable, path)
    assert (done.returncode, kernels(output)) == (1, [("add_one", "cuda:90")])
    assert "not compiled" in done.stderr
    assert "power of 2" in done.stderr


@pytest.mark.slow
def test_a_program_that_dies_is_told(command, script, tmp_path):
    """A program that ends its process leaves nothing, and nothing is written."""
    path, output = script(KERNEL + "launch()\nimport os\nos._exit(9)\n"), tmp_path / "b.tbundle"
    done = command("capture", "-o", output, "--target", "cuda:90", "--", sys.executable, path)
    assert done.returncode == 1
    assert "ended with status 9 before what it had launched for cuda:90 was compiled" in done.stderr
    assert not output.exists()


@pytest.mark.slow
def test_a_program_without_launches_writes_nothing(command, script, tmp_path):
    """Nothing captured is a problem: the message says what is not captured, and an older bundle
    stays.
    """
    path, output = script("print('nothing to do')\n"), tmp_path / "b.tbundle"
    output.write_bytes(b"older")
    done = command("capture", "-o", output, "--target", "cuda:90", "--", sys.executable, path)
    assert done.returncode == 1
    assert "nothing was captured, so no bundle was written" in done.stderr
    assert output.read_bytes() == b"older"


@pytest.mark.slow
def test_modules_and_code_are_captured(command, script, tmp_path):
    """`python -m package` and `python -c code` run as Python runs them."""
    (tmp_path / "app").mkdir()
    script(KERNEL, "app/__init__.py")
    script("from app import launch\nlaunch()\n", "app/__main__.py")
    output = tmp_path / "b.tbundle"
    done = command(
        "capture",
        "-o",
        output,
        "--target",
        "cuda:90",
        "--",
        sys.executable,
        "-m",
        "app",
        cwd=tmp_path,
    )
    assert (done.returncode, kernels(output)) == (0, [("add_one", "cuda:90")]), done.stderr
    output.unlink()
    words = [sys.executable, "-c", "import app; app.launch()"]
    done = command("capture", "-o", output, "--target", "cuda:90", "--", *words, cwd=tmp_path)
    assert (done.returncode, kernels(output)) == (0, [("add_one", "cuda:90")]), done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--target", "cuda:90", "--", "bash", "-c", "true"],
            "only a Python program can be captured",
        ),
        (["--target", "cuda:90", "--", "python"], "give the program to capture"),
        (["--target", "h100", "--", "python", "x.py"], "not a target"),
        (
            ["--target", "cuda:90", "--property", "sm_count=3", "--", "python", "x.py"],
            "expected one of name",
        ),
        (
            ["--target", "cuda:90", "--property", "name", "--", "python", "x.py"],
            "expected NAME=VALUE",
        ),
        (["--", "python", "x.py"], "Missing option '--target'"),
    ],
)
def test_usage_errors(cli, words, said, tmp_path):
    """Each mistake of the command line is told before anything runs."""
    done = cli("capture", "-o", tmp_path / "b.tbundle", *words)
    assert done.exit_code == 2
    assert said in done.output


@pytest.mark.parametrize(
    ("program", "said"),
    [("no-such-file.py", "no such file: no-such-file.py"), (None, "there is no directory")],
)
def test_what_is_missing_is_told(cli, script, program, said, tmp_path):
    """A script or a directory that is not there is a problem, told by name."""
    output = tmp_path / ("b.tbundle" if program else "nowhere/b.tbundle")
    done = cli(
        "capture", "-o", output, "--target", "cuda:90", "--", sys.executable, program or script()
    )
    assert done.exit_code == 1
    assert said in done.output
    assert not Path(output).exists()


def test_a_python_by_relative_path_is_found_from_anywhere(tmp_path, monkeypatch):
    """The Python of a virtual environment is often named by a path from the working directory; its
    link is kept.
    """
    from bundler.cli.builds.capture_command import _interpreter

    (tmp_path / "python3").symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)
    assert _interpreter(["./python3", "warm_up.py"]) == (str(tmp_path / "python3"), ["warm_up.py"])
