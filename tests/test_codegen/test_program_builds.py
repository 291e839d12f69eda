# SPDX-License-Identifier: Apache-2.0
"""The mission on a machine without a GPU: generate, build for two targets, carry the bundle, launch it with neither torch nor Triton."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed"),
]
TARGETS = ("cuda:90", "hip:gfx942")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The path of a bundle with a softmax and a transposition, and what was generated."""
    import torch

    from bundler.codegen.program import GenerateOptions, generate

    def function(a, b):
        return torch.softmax(a, -1), (a + b.t()).relu()

    folder = tmp_path_factory.mktemp("program")
    options = GenerateOptions(sources=str(folder / "sources"))
    program = generate(function, [torch.randn(48, 64), torch.randn(64, 48)], options=options)
    bundle = program.build(TARGETS)
    bundle.save(folder / "program.tbundle")
    return folder / "program.tbundle", program, bundle


def replay(path, backend):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "TORCH"))}
    done = subprocess.run(
        [sys.executable, "-P", str(HERE / "replay_worker.py"), str(path), backend],
        env=clean, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_kernel_is_built_for_every_target(built):
    """The bundle has each kernel for each target, and the plan says with which blocks."""
    _, program, bundle = built
    assert {str(kernel.target) for kernel in bundle.kernels} == set(TARGETS)
    assert len(bundle.kernels) == len(TARGETS) * len(program.kernels)


@pytest.mark.parametrize("backend", ["cuda", "hip"])
def test_a_bundle_is_launched_without_torch_and_triton(built, backend):
    """Parameters are the addresses of inputs and outputs, then the sizes; the grid covers the problem."""
    path, program, _ = built
    report = replay(path, backend)
    assert report["imported"] == []
    assert [launch["kernel"] for launch in report["launches"]] == list(program.kernels)
    for launch, kernel in zip(report["launches"], program.kernels.values(), strict=True):
        pointers = [address for address in launch["parameters"] if address in report["addresses"]]
        assert len(pointers) == sum(1 for parameter in kernel.text.parameters if parameter.type.startswith("*"))
        assert min(launch["grid"]) > 0
    # Two results, each in memory of its own.
    assert len(set(report["outputs"])) == 2
    assert set(report["outputs"]) <= set(report["addresses"])


def test_text_does_not_depend_on_the_hash_seed(built):
    """Another process with another hash seed generates the same text."""
    code = (
        "import torch, hashlib\nfrom bundler.codegen.program import generate\n"
        "def function(a, b):\n    return torch.softmax(a, -1), (a + b.t()).relu()\n"
        "program = generate(function, [torch.randn(48, 64), torch.randn(64, 48)])\n"
        "print(hashlib.sha256(repr((program.sources, program.plan)).encode()).hexdigest())\n"
    )
    found = {
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True,
            text=True, check=True, timeout=100,
        ).stdout
        for seed in ("1", "4242")
    }  # fmt: skip
    assert len(found) == 1
    assert re.fullmatch(r"[0-9a-f]{64}\n", found.pop())
