# SPDX-License-Identifier: Apache-2.0
"""Real kernels, compiled once a session, and a way to call the command."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import bundler
from bundler.cli.app import app


def _load(path):
    # Tests are imported by path, so a module beside them has to be put where `import` finds it.
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check_printed = _load(Path(__file__).parents[1] / "json_schemas.py").check_printed
KERNELS = Path(bundler.__file__).parent / "cli" / "demo_kernels.py"
TARGETS = ("cuda:90", "hip:gfx942")

PROGRAM = f"""
import importlib.util, os, subprocess, sys
spec = importlib.util.spec_from_file_location("kernels", {str(KERNELS)!r})
kernels = sys.modules["kernels"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernels)
name = sys.argv[1]
for target in sys.argv[2:]:
    kernels.compile_one(name, target)
print("compiled", name, flush=True)
"""


def clean_environment(**more):
    """Return an environment without what this machine's user has set for Triton, torch, us and
    terminals.
    """
    prefixes = ("TRITON_", "TORCHINDUCTOR_", "COLUMNS", "NO_COLOR", "FORCE_COLOR", "TTY_")
    return {
        name: value for name, value in os.environ.items() if not name.startswith(prefixes)
    } | more


@pytest.fixture(autouse=True)
def environment(tmp_path, monkeypatch):
    """Each test has an empty Triton cache of its own, and piped output."""
    for name in set(os.environ) - set(clean_environment()):
        monkeypatch.delenv(name)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton-cache"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor-cache"))


@pytest.fixture
def cli():
    """Call the command in this process: `cli("pack", directory, "-o", output).exit_code`."""

    def call(*words):
        result = CliRunner().invoke(app, [str(word) for word in words], prog_name="triton-bundler")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        check_printed(words, result.stdout)
        return result

    return call


@pytest.fixture
def cli_json(cli):
    """Call the command with --json and return (exit status, the object)."""

    def call(*words):
        result = cli(words[0], "--json", *words[1:])
        return result.exit_code, json.loads(result.stdout)

    return call


@pytest.fixture
def command():
    """Call the command in a process of its own."""

    def call(*words, **more):
        options = {
            "env": clean_environment(**more.pop("env", {})),
            "capture_output": True,
            "text": True,
            "timeout": 110,
        }
        line = [sys.executable, "-P", "-m", "bundler", *map(str, words)]
        done = subprocess.run(line, stdin=subprocess.DEVNULL, **(options | more))
        check_printed(words, done.stdout or "")
        return done

    return call


@pytest.fixture(scope="session")
def program(made_once):
    """A program that knows nothing of us: `program.py KERNEL TARGET...` compiles."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    return (
        made_once("program", lambda folder: (folder / "program.py").write_text(PROGRAM))
        / "program.py"
    )


@pytest.fixture(scope="session")
def cache(made_once, program):
    """A Triton cache directory with two kernels for two targets, filled by Triton alone; do not
    write to it.
    """

    def fill(folder):
        env = clean_environment(TRITON_CACHE_DIR=str(folder / "cache"))
        for name in ("gelu", "row_sum"):
            subprocess.run(
                [sys.executable, program, name, *TARGETS],
                env=env,
                check=True,
                stdout=subprocess.DEVNULL,
            )

    return made_once("filled", fill) / "cache"


@pytest.fixture(scope="session")
def packed(cache, made_once):
    """The bundle of `cache`; do not write to it."""
    return (
        made_once("packed", lambda folder: bundler.pack(cache).save(folder / "packed.tbundle"))
        / "packed.tbundle"
    )


@pytest.fixture
def halves(packed, tmp_path):
    """Two bundles: the kernels for one target, and for the other."""
    paths = tmp_path / "cuda.tbundle", tmp_path / "hip.tbundle"
    with bundler.Bundle.load(packed) as bundle:
        bundle.select(target="cuda:90").save(paths[0])
        bundle.select(target="hip:gfx942").save(paths[1])
    return paths
