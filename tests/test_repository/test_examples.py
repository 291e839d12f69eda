# SPDX-License-Identifier: Apache-2.0
"""The examples run as their readers run them: as programs, in processes of their own, knowing
nothing of us.
"""

import ast
import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TARGETS = ("cuda:90", "hip:gfx942")

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="the examples need triton, which is not installed"
)


def run_python(cache_dir, *arguments, **environment):
    """Run Python with these arguments and an empty Triton cache, and return the finished
    process.
    """
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TRITON_", "PYTHON"))
    }
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=clean | {"TRITON_CACHE_DIR": str(cache_dir)} | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=110,
    )


def in_examples(code):
    """Return code that runs as a program of the examples folder would."""
    return f"import sys; sys.path.insert(0, {str(EXAMPLES)!r})\n{code}"


def kernels_in(cache_dir):
    """Return how many kernels a cache directory holds; other things that Triton builds have no
    group file.
    """
    return len(list(cache_dir.glob("*/__grp__*.json")))


@pytest.mark.release
@pytest.mark.toolchain
def test_kernels_compile_for_both_targets_without_a_gpu(tmp_path):
    """examples/kernels.py compiles at least six kernels for each target and writes a checksum for
    each.
    """
    listing = tmp_path / "kernels.json"
    targets = [word for target in TARGETS for word in ("--target", target)]
    done = run_python(tmp_path / "cache", EXAMPLES / "kernels.py", "--json", listing, *targets)
    assert (done.returncode, done.stderr if done.returncode else "") == (0, "")
    checksums = json.loads(listing.read_text())
    names = {
        target: {key.split("/")[0] for key in checksums if key.endswith(target)}
        for target in TARGETS
    }
    assert names[TARGETS[0]] == names[TARGETS[1]]
    assert len(names[TARGETS[0]]) >= 6
    assert kernels_in(tmp_path / "cache") == len(checksums)


@pytest.mark.toolchain
def test_kernels_are_importable_without_torch(tmp_path):
    """Kernels can be compiled from another program that cannot import torch, the autotuned one in
    all its configurations.
    """
    code = (
        "sys.modules['torch'] = None\nimport kernels\nprint(len(kernels.compile_one('swiglu',"
        " 'cuda:90')))"
    )
    done = run_python(tmp_path, "-c", in_examples(code))
    assert (done.stdout, done.returncode) == ("4\n", 0), done.stderr


@pytest.mark.toolchain
@pytest.mark.slow
def test_child_compiles_in_three_processes(tmp_path):
    """examples/child.py says from three processes what they compiled, and their kernels are
    different ones.
    """
    done = run_python(tmp_path, EXAMPLES / "child.py")
    assert done.returncode == 0, done.stderr
    said = re.findall(
        r"^(.+) \(process (\d+)\): compiled (\d+) for cuda:90: ", done.stdout, re.MULTILINE
    )
    assert [who for who, _, _ in said] == ["parent", "child program", "pool worker"]
    assert len({process for _, process, _ in said}) == 3
    assert kernels_in(tmp_path) == sum(int(count) for _, _, count in said)


def test_an_unknown_target_is_a_usage_error(tmp_path):
    """examples/kernels.py answers a target it does not know with one line and status 2."""
    done = run_python(tmp_path, EXAMPLES / "kernels.py", "--target", "tpu:5")
    assert done.returncode == 2
    assert "unknown target 'tpu:5'" in done.stderr.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("torch") is None or find_spec("numpy") is None,
    reason="Triton's interpreter needs torch and numpy",
)
def test_kernels_compute_what_torch_computes_in_the_interpreter(tmp_path):
    """Each kernel's numbers agree with torch's; slow, and the only check of the numbers that needs
    no GPU.
    """
    code = """
import kernels
kernels.swiglu_kernel._do_bench = lambda call, quantiles: call() or (1.0, 1.0, 1.0)  # no GPU, no clock
sys.exit(not kernels.launch_and_check("cpu")[0])
"""
    done = run_python(tmp_path, "-c", in_examples(code), TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("  ok\n") == 8


@pytest.mark.gpu
def test_kernels_compute_what_torch_computes_on_the_gpu(tmp_path):
    """On a GPU examples/kernels.py launches each kernel, finds its numbers right, and finds the
    same bits again.
    """
    code = "import kernels; sys.exit(not kernels.gpu_is_visible())"
    if run_python(tmp_path, "-c", in_examples(code)).returncode:
        pytest.skip("torch sees no GPU")
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    for listing in (first, second):
        done = run_python(tmp_path / "cache", EXAMPLES / "kernels.py", "--json", listing)
        assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(first.read_text()) == json.loads(second.read_text())


def test_examples_know_nothing_of_us():
    """kernels.py and child.py import nothing of triton-bundler."""
    imported = set()
    for name in ("kernels.py", "child.py"):
        for node in ast.walk(ast.parse((EXAMPLES / name).read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add((node.module or "").split(".")[0])
    assert "bundler" not in imported
