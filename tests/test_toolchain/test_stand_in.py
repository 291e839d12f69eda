# SPDX-License-Identifier: Apache-2.0
"""A child process that does not have this package compiles as if its parent had none either, and is
told so.
"""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bundler.toolchain.recording.child_recording import ChildSpool
from bundler.toolchain.recording.manager_environment import STAND_IN, Active, manager_environment

HERE = Path(__file__).parent
MINE = """
from triton.runtime.cache import FileCacheManager
class Mine(FileCacheManager):
    pass
"""
# argv is the file of kernels.
COMPILE = """
import importlib.util, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.cache import get_cache_manager
spec = importlib.util.spec_from_file_location("kernels_for_tests", sys.argv[1])
kernels = importlib.util.module_from_spec(spec); spec.loader.exec_module(kernels)
signature = {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32", "BLOCK": "constexpr"}
for block in (64, 128):
    source = triton.compiler.ASTSource(kernels.add, signature, {"BLOCK": block})
    triton.compile(source, target=GPUTarget("cuda", 90, 32))
print(type(get_cache_manager("ab" * 32)).__name__)
"""
TOLD = "RuntimeWarning: triton-bundler is not installed for"


@pytest.fixture
def elsewhere(tmp_path, monkeypatch, cache):
    """Make a path with Triton and without this package, as of another environment, that of
    children; return it.
    """
    triton = pytest.importorskip("triton")
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "triton").symlink_to(Path(triton.__file__).parent)
    for file in importlib.metadata.files("triton"):
        if file.name == "entry_points.txt":
            described = Path(file.locate()).parent
            (folder / described.name).symlink_to(described)
    (folder / "mine.py").write_text(MINE)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


def run(*flags, code=COMPILE):
    """Run a child that finds nothing but the standard library and what PYTHONPATH has."""
    line = [sys.executable, "-S", "-P", *flags, "-c", code, str(HERE / "kernels_for_tests.py")]
    done = subprocess.run(line, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr.count(TOLD)


@pytest.mark.release
@pytest.mark.toolchain
def test_a_child_without_this_package_compiles_in_a_recording(elsewhere):
    """Triton's own manager does the work, or the user's, with one warning; afterwards nothing is
    left to warn of.
    """
    before = dict(os.environ)
    with ChildSpool() as spool:
        assert run() == ("FileCacheManager", 1)
        assert spool.events() == []
    assert dict(os.environ) == before
    assert run() == ("FileCacheManager", 0)


@pytest.mark.toolchain
def test_warnings_that_are_errors_break_no_child(elsewhere, monkeypatch):
    """Also where warnings are errors, and with a session and a manager of the user's behind the
    recording.
    """
    monkeypatch.setenv("TRITON_CACHE_MANAGER", "mine:Mine")
    session = Active(session={"TRITON_BUNDLER_STORE": "memory:"})
    manager_environment.add(session)
    try:
        with ChildSpool():
            assert run("-W", "error::RuntimeWarning") == ("Mine", 1)
    finally:
        manager_environment.remove(session)


@pytest.mark.parametrize("cwd", ["here", "with a folder of that name"])
def test_it_steps_aside(cwd, tmp_path):
    """Where the package can be found it is loaded, whatever else has its name."""
    (tmp_path / "bundler").mkdir()
    code = (
        "import bundler, bundler.toolchain.recording.spool_records as records; print(bundler.__file__,"
        " records.__name__, bundler.RecordReport.__name__)"
    )
    path = [STAND_IN, *([str(tmp_path)] if cwd != "here" else []), *filter(None, sys.path)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    import bundler

    assert done.stdout.split() == [
        bundler.__file__,
        "bundler.toolchain.recording.spool_records",
        "RecordReport",
    ]


def test_it_has_nothing_else(tmp_path):
    """Without the package, what is no cache manager is missing as it would be without us."""
    code = """
import importlib
for name in ("bundler.store", "bundler.toolchain.recording.spool_records", "bundler.integrations.triton.other"):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        print(error.name)
try:
    from bundler.toolchain.recording.spool_manager import Other
except ImportError as error:
    print("ImportError")
"""
    env = {**os.environ, "PYTHONPATH": STAND_IN}
    done = subprocess.run(
        [sys.executable, "-S", "-P", "-c", code], env=env, capture_output=True, text=True
    )
    assert (done.stdout.split(), done.stderr) == (
        [
            "bundler.store",
            "bundler.toolchain.recording.spool_records",
            "bundler.integrations.triton.other",
            "ImportError",
        ],
        "",
    )


def test_the_directory_holds_nothing_else():
    """Nothing in it could hide a module of a child."""
    assert [name for name in os.listdir(STAND_IN) if name != "__pycache__"] == ["bundler.py"]
