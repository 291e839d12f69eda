# SPDX-License-Identifier: Apache-2.0
"""What the tests of the kernel generator share: programs that run in Triton's interpreter, which
has to be chosen before Triton is imported.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture
def interpreted():
    """Run a program of this folder in the interpreter, with the other modules here importable."""

    def run(program, *arguments, timeout=280):
        environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(HERE)}
        command = [sys.executable, str(HERE / program), *map(str, arguments)]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=timeout
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    return run


@pytest.fixture
def compile_for(tmp_path, monkeypatch):
    """Compile a function of a file for a target, given the types of its arguments by name and its
    constants; return the binary.
    """
    triton = pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))

    def build(path, name, types, constants, target):
        spec = importlib.util.spec_from_file_location(Path(path).stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        from triton.backends.compiler import GPUTarget

        backend, arch = target.split(":")
        gpu = GPUTarget("cuda", int(arch), 32) if backend == "cuda" else GPUTarget("hip", arch, 64)
        function = getattr(module, name)
        places = {(function.arg_names.index(key),): value for key, value in constants.items()}
        signature = {key: types.get(key, "constexpr") for key in function.arg_names}
        built = triton.compile(triton.compiler.ASTSource(function, signature, places), target=gpu)
        return built.asm["cubin" if backend == "cuda" else "hsaco"]

    return build


@pytest.fixture
def beside(monkeypatch):
    """Import a module of this folder, which is gone again after the test."""
    monkeypatch.syspath_prepend(str(HERE))
    made = []

    def load(name):
        made.append(name)
        return importlib.import_module(name)

    yield load
    for name in made:
        sys.modules.pop(name, None)
