# SPDX-License-Identifier: Apache-2.0
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bundler.errors import FormatError
from bundler.format.entries import Target, Toolchain
from bundler.format.keyparts import KeyParts
from bundler.format.launch_spec import LaunchFacts
from bundler.toolchain.recording import child_recording, spool_records
from bundler.toolchain.recording.child_recording import ChildSpool, check_interpreter
from bundler.toolchain.recording.manager_environment import SPOOL_MANAGER, STAND_IN
from bundler.toolchain.recording.spool_records import SpooledEvent, SpooledFile

HERE = Path(__file__).parent
CHILD = """
import importlib.util, os, signal, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
spec = importlib.util.spec_from_file_location("kernels_for_tests", sys.argv[1])
kernels = importlib.util.module_from_spec(spec); spec.loader.exec_module(kernels)
signature = {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32", "BLOCK": "constexpr"}
def compile_add(block):
    source = ASTSource(kernels.add, signature, {"BLOCK": block})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32))
"""
SINGLE_FILES = """
from triton.runtime.cache import get_cache_manager
manager = get_cache_manager("ab" * 32)
library = manager.put(b"library", "launcher.so")
assert manager.get_file("launcher.so") == library
manager.put("{}", "add.autotune.json", binary=False)
manager.put("text", "notes.txt", binary=False)
"""


@pytest.fixture(autouse=True)
def clean(cache, monkeypatch):
    for name in ("TRITON_BUNDLER_SPOOL", "TRITON_BUNDLER_SPOOL_INNER"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def run_child(tmp_path):
    pytest.importorskip("triton")

    def run_child(code, *, prelude=CHILD, cwd=None, status=0, **more):
        script = tmp_path / "child.py"
        script.write_text(prelude + code)
        done = subprocess.run(
            [sys.executable, str(script), str(HERE / "kernels_for_tests.py")],
            capture_output=True,
            text=True,
            timeout=100,
            cwd=cwd,
            **more,
        )
        assert done.returncode == status, done.stderr
        return done

    return run_child


def kernel_record(**more):
    values = {
        "key": "A" * 52,
        "hash": "00" * 32,
        "directory": "/cache/" + "A" * 52,
        "name": "add",
        "target": Target("cuda", "90"),
        "device": 1,
        "stage_times_us": (("ttir", 5),),
        "cache_hit": False,
        "facts_bytes": b"facts",
        "parts_bytes": b"parts",
        "toolchain": Toolchain("3.9.0", "ab", None),
        "pid": 7,
    }
    return SpooledEvent(**{**values, **more})


@pytest.mark.parametrize(
    "record",
    [
        kernel_record(),
        kernel_record(
            target=None, device=None, facts_bytes=None, parts_bytes=None, toolchain=Toolchain()
        ),
        kernel_record(target=Target("hip", "gfx942", 64), stage_times_us=()),
        SpooledFile("/cache/KEY", "launcher.so", 7),
    ],
    ids=["full", "empty", "hip", "file"],
)
def test_records_survive_their_encoding(record):
    """What is written is what is read."""
    decoded = spool_records.decode(spool_records.encode(record))
    assert decoded == record
    assert getattr(getattr(decoded, "target", None), "warp_size", None) == (
        record.target.warp_size if getattr(record, "target", None) else None
    )


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", b"\x90", b"\x80", spool_records.encode(kernel_record())[:-3]]
)
def test_a_broken_record_is_a_format_error(data):
    """Anything else than a record is refused as such."""
    with pytest.raises(FormatError):
        spool_records.decode(data)


def test_a_record_of_another_version_is_refused():
    """A record that a newer package wrote is not guessed at."""
    data = bytearray(spool_records.encode(SpooledFile("/d", "f.so", 1)))
    data[1] = spool_records.VERSION + 1
    with pytest.raises(FormatError, match="unknown version"):
        spool_records.decode(bytes(data))


def test_a_failed_write_leaves_nothing(tmp_path):
    """When the record cannot be put in its place, no temporary file stays."""
    (tmp_path / "name.record").mkdir()
    with pytest.raises(OSError, match="directory"):
        spool_records.write(str(tmp_path), "name", kernel_record())
    assert [path.name for path in tmp_path.iterdir()] == ["name.record"]


def test_the_environment_comes_back_exactly(monkeypatch):
    """Values are restored, and variables that were not there are gone."""
    monkeypatch.setenv("TRITON_CACHE_MANAGER", "mine:Manager")
    before = dict(os.environ)
    with ChildSpool():
        assert os.environ["TRITON_CACHE_MANAGER"] == SPOOL_MANAGER
        assert spool_records.owner(os.environ["TRITON_BUNDLER_SPOOL"]) == os.getpid()
        assert os.environ["TRITON_BUNDLER_SPOOL_INNER"] == "mine:Manager"
        with ChildSpool():
            assert os.environ["TRITON_BUNDLER_SPOOL_INNER"] == "mine:Manager"
    assert dict(os.environ) == before


def test_environ_changes_nothing_here():
    """The environment for one child is a copy; closing removes the spool, twice is fine, and
    records stay readable.
    """
    before = dict(os.environ)
    spool = ChildSpool()
    environ = spool.environ()
    assert dict(os.environ) == before
    assert {name: environ[name] for name in before if name != "PYTHONPATH"} == {
        name: value for name, value in before.items() if name != "PYTHONPATH"
    }
    directory = Path(environ["TRITON_BUNDLER_SPOOL"])
    assert directory.stat().st_mode & 0o077 == 0
    spool_records.write(str(directory), "1", kernel_record())
    spool.close()
    spool.close()
    assert not directory.exists()
    assert spool.events() == [kernel_record()]


def test_a_spool_that_was_never_used_leaves_no_directory(tmp_path, monkeypatch):
    """Making and closing a spool that nobody asked for touches no file."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    spool = ChildSpool()
    assert spool.events() == []
    spool.close()
    assert list(tmp_path.iterdir()) == []


def test_unreadable_records_are_problems():
    """A record that cannot be read is named with its reason; half-written ones do not count; others
    are read.
    """
    with ChildSpool() as spool:
        directory = Path(os.environ["TRITON_BUNDLER_SPOOL"])
        spool_records.write(str(directory), "2", kernel_record(pid=2))
        spool_records.write(str(directory), "1", kernel_record(pid=1))
        (directory / "3.record").write_bytes(b"garbage")
        (directory / ".4.tmp").write_bytes(b"half")
        assert [event.pid for event in spool.events()] == [1, 2]
        assert [event.pid for event in spool.events()] == [1, 2]
    ((name, reason),) = spool.problems
    assert name == "3.record"
    assert "cannot be read" in reason


@pytest.mark.release
@pytest.mark.toolchain
def test_a_subprocess_is_recorded(run_child, compile_add, events, parts_of, cache):
    """A child's miss and hit are recorded with the same facts and parts as a compile that this
    process hears itself.
    """
    with ChildSpool() as spool:
        run_child("compile_add(64); compile_add(64)")
    miss, hit = spool.events()
    kernel = compile_add(block=64)
    assert (miss.cache_hit, hit.cache_hit, events[0].cache_hit) == (False, True, True)
    for event in (miss, hit):
        assert event.hash == kernel.hash
        assert event.directory == str(cache / event.key) == events[0].directory
        assert (event.name, event.target, event.device) == ("add", Target("cuda", "90"), None)
        assert KeyParts.from_bytes(event.parts_bytes) == parts_of(events[0])
        assert KeyParts.from_bytes(event.parts_bytes).proven
        assert LaunchFacts.from_bytes(event.facts_bytes).arguments[0].name == "x"
        assert " V" in event.toolchain.ptxas
        assert event.pid != os.getpid()
    assert spool.problems == []


@pytest.mark.toolchain
def test_the_recording_process_does_not_spool_itself(run_child):
    """The process that owns the spool listens itself; only others write."""
    code = """
from bundler.toolchain.recording.child_recording import ChildSpool
with ChildSpool() as spool:
    compile_add(64)
    assert type(triton.runtime.cache.get_cache_manager("ab" * 32)).__name__ == "SpoolCacheManager"
assert spool.events() == []
compile_add(64)
assert type(triton.runtime.cache.get_cache_manager("ab" * 32)).__name__ == "FileCacheManager"
"""
    run_child(code)


@pytest.mark.release
@pytest.mark.toolchain
def test_recordings_nest(run_child):
    """A child's kernel is in each recording that was in force, also when the inner one ran in a
    recorded child itself.
    """
    code = """
import subprocess
from bundler.toolchain.recording.child_recording import ChildSpool
compile_add(16)
if len(sys.argv) == 2:
    with ChildSpool() as spool:
        compile_add(32)
        subprocess.run([sys.executable, *sys.argv, "grandchild"], check=True)
    assert len(spool.events()) == 1, spool.events()  # the grandchild's hit; what this process compiled it hears itself
"""
    with ChildSpool() as outer, ChildSpool() as inner:
        run_child(code)
    assert [event.cache_hit for event in outer.events()] == [False, False, True]
    assert outer.events() == inner.events()


def test_a_foreign_directory_is_no_spool(tmp_path):
    """Only a directory that a recording process made, and whose owner its name tells, is written
    to.
    """
    assert spool_records.owner(str(tmp_path)) is None
    assert spool_records.owner("") is None


@pytest.mark.toolchain
def test_one_record_for_many_repeats(run_child):
    """A child that looks up one kernel again and again leaves one record of a miss and one of a
    hit.
    """
    with ChildSpool() as spool:
        run_child("for _ in range(20): compile_add(64)")
    assert [event.cache_hit for event in spool.events()] == [False, True]


@pytest.mark.toolchain
def test_single_files_are_recorded(run_child, cache):
    """Helper libraries and tuning files are recorded once; other files are not."""
    with ChildSpool() as spool:
        run_child(SINGLE_FILES)
    assert [file.filename for file in spool.files()] == ["launcher.so", "add.autotune.json"]
    assert {Path(file.directory).parent for file in spool.files()} == {cache}
    assert spool.events() == []


@pytest.mark.toolchain
def test_a_killed_child_still_has_its_record(run_child):
    """A child that is killed right after a compile was stored has been recorded."""
    with ChildSpool() as spool:
        run_child("compile_add(64); os.kill(os.getpid(), signal.SIGKILL)", status=-signal.SIGKILL)
    assert [event.name for event in spool.events()] == ["add"]


@pytest.mark.release
@pytest.mark.toolchain
def test_a_forked_child_is_recorded(run_child):
    """A child that was forked from the recording process writes to the spool; the parent's own
    compiles do not go there.
    """
    code = """
from bundler.toolchain.recording.child_recording import ChildSpool
from bundler.toolchain.recording.compile_listener import listening
heard = []; hear = heard.append
with ChildSpool() as spool:
    listening.attach(hear)
    compile_add(32)
    child = os.fork()
    if child == 0:
        compile_add(64)
        os._exit(0 if len(heard) == 1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    listening.detach(hear)
(event,) = spool.events()
assert event.pid == child and not event.cache_hit
assert len(heard) == 1 and heard[0].key != event.key
"""
    run_child(code)


WORKER = (
    CHILD
    + """
from concurrent.futures import ProcessPoolExecutor
import multiprocessing

def work(block):
    return compile_add(block).hash

if __name__ == "__main__":
    from bundler.toolchain.recording.child_recording import ChildSpool
    with ChildSpool() as spool:
        with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
            hashes = set(pool.map(work, [16, 32, 64, 128]))
    assert {event.hash for event in spool.events()} == hashes and len(hashes) == 4
    assert os.getpid() not in {event.pid for event in spool.events()}
"""
)


@pytest.mark.release
@pytest.mark.toolchain
def test_a_spawned_pool_is_recorded(run_child):
    """Workers of a process pool that were spawned inside the recording are recorded."""
    run_child("", prelude=WORKER)


INNER = """
from triton.runtime.cache import FileCacheManager

class Counting(FileCacheManager):
    calls = []

    def put_group(self, filename, group):
        Counting.calls.append(filename)
        return super().put_group(filename, group)
"""


@pytest.mark.release
@pytest.mark.toolchain
def test_an_inner_manager_is_kept(run_child, tmp_path, monkeypatch):
    """The cache manager that the user had configured does the work, and what it makes is an
    instance of it.
    """
    (tmp_path / "mymanager.py").write_text(INNER)
    monkeypatch.setenv("TRITON_CACHE_MANAGER", "mymanager:Counting")
    code = """
compile_add(64)
import mymanager
assert mymanager.Counting.calls == ["add.json"], mymanager.Counting.calls
assert isinstance(triton.runtime.cache.get_cache_manager("ab" * 32), mymanager.Counting)
"""
    with ChildSpool() as spool:
        run_child(code)
    assert [event.name for event in spool.events()] == ["add"]


@pytest.mark.toolchain
def test_an_inner_manager_that_changes_is_followed(run_child, tmp_path):
    """Two recordings in one process, with another user's manager each, use the right one
    each time.
    """
    (tmp_path / "mymanager.py").write_text(INNER)
    code = """
from bundler.toolchain.recording.child_recording import ChildSpool
from triton.runtime.cache import get_cache_manager
import mymanager
with ChildSpool():
    assert not isinstance(get_cache_manager("ab" * 32), mymanager.Counting)
os.environ["TRITON_CACHE_MANAGER"] = "mymanager:Counting"
with ChildSpool():
    assert isinstance(get_cache_manager("ab" * 32), mymanager.Counting)
"""
    run_child(code)


@pytest.mark.toolchain
@pytest.mark.parametrize("harm", ["removed", "read-only", "a file"])
def test_a_spoiled_spool_does_not_reach_the_user(run_child, harm):
    """A spool that is gone or cannot be written costs the record, never the compile."""
    code = {
        "removed": "import shutil; shutil.rmtree(os.environ['TRITON_BUNDLER_SPOOL'])",
        "read-only": (
            "import bundler.toolchain.recording.spool_records as r; r.write = lambda *a: (_ for _ in"
            " ()).throw(PermissionError())"
        ),
        "a file": (
            "import shutil; d = os.environ['TRITON_BUNDLER_SPOOL']; shutil.rmtree(d); open(d,"
            " 'w').close()"
        ),
    }[harm]
    with ChildSpool() as spool:
        done = run_child(
            f"import logging; logging.basicConfig()\ncompile_add(64)\n{code}\nfor b in (32, 16):"
            " assert compile_add(b).hash"
        )
        directory = Path(os.environ["TRITON_BUNDLER_SPOOL"])
        if directory.is_file():
            directory.unlink()
            directory.mkdir()
    assert len(spool.events()) <= 1
    assert done.stderr.count("a compile was not recorded") == (harm == "read-only")


@pytest.mark.toolchain
def test_a_child_that_outlives_the_spool(run_child):
    """A child whose spool was closed goes on compiling as if nobody had recorded."""
    spool = ChildSpool()
    environ = spool.environ()
    spool.close()
    run_child("assert compile_add(64).hash", env=environ)


@pytest.mark.release
@pytest.mark.toolchain
def test_user_errors_stay_the_users(run_child):
    """An error of the inner manager is the one that the user would see without us."""
    with ChildSpool() as spool:
        os.environ["TRITON_BUNDLER_SPOOL_INNER"] = "no_such_module:Manager"
        done = run_child("compile_add(64)", status=1)
        del os.environ["TRITON_BUNDLER_SPOOL_INNER"]
    assert "No module named 'no_such_module'" in done.stderr
    assert spool.events() == []


@pytest.mark.toolchain
def test_a_child_without_our_package_on_its_path_finds_it(run_child, tmp_path, monkeypatch):
    """A program that found this package only through its own sys.path has children that find it
    too.
    """
    parent = str(Path(child_recording.__file__).parents[2])
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with ChildSpool() as spool:
        run_child("compile_add(64)", cwd=tmp_path)
        settings = os.environ["PYTHONPATH"].split(os.pathsep)
    assert len(spool.events()) == 1
    assert settings in ([STAND_IN], [parent, STAND_IN])


def test_this_interpreter_can_record():
    """The Python of this program can import what a recorded child needs."""
    with ChildSpool() as spool:
        assert check_interpreter(sys.executable, spool.environ()) is None


def test_a_wrong_interpreter_is_detected(tmp_path):
    """A Python that has Triton but cannot import this package is refused with a sentence that names
    it.
    """
    (tmp_path / "triton.py").touch()
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} -S "$@"\n')
    wrapper.chmod(0o755)
    reason = check_interpreter(str(wrapper), dict(os.environ))
    assert str(wrapper) in reason
    assert "No module named" in reason
    (tmp_path / "triton.py").unlink()
    assert check_interpreter(str(wrapper), dict(os.environ)) is None
    assert "cannot be run" in check_interpreter(str(tmp_path / "absent"), dict(os.environ))


def test_children_import_no_triton(run_python):
    """Preparing the environment of children imports neither Triton nor torch."""
    code = """
import sys
from bundler.toolchain.recording.child_recording import ChildSpool
with ChildSpool() as spool:
    spool.events()
assert not {"triton", "torch"} & set(sys.modules)
"""
    run_python(code)


TORCH_POOL = (
    CHILD
    + """
import torch
from torch._inductor.compile_worker.subproc_pool import SubprocKind, SubprocPool

def main():
    from bundler.toolchain.recording.child_recording import ChildSpool
    import worker_module
    with ChildSpool() as spool:
        for kind in SubprocKind:
            pool = SubprocPool(2, kind=kind)
            futures = [pool.submit(worker_module.work, sys.argv[1], block) for block in (16, 32)]
            hashes = {future.result(timeout=90) for future in futures}
            pool.shutdown()
            assert len(hashes) == 2 and hashes <= {event.hash for event in spool.events()}, spool.problems
    assert os.getpid() not in {event.pid for event in spool.events()}
    assert {event.cache_hit for event in spool.events()} == {False, True}

if __name__ == "__main__":
    main()
"""
)


@pytest.mark.slow
@pytest.mark.toolchain
def test_torchs_compile_workers_are_recorded(run_child, tmp_path):
    """Workers of torch's own pool, forked and spawned, are recorded, though they run neither exit
    handlers nor finalizers.
    """
    pytest.importorskip("torch")
    body = "\n".join("    " + line for line in CHILD.splitlines())
    (tmp_path / "worker_module.py").write_text(
        f"def work(path, block):\n    import sys\n    sys.argv = ['', path]\n{body}\n    return"
        " compile_add(block).hash\n"
    )
    run_child("", prelude=TORCH_POOL)
