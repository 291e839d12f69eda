# SPDX-License-Identifier: Apache-2.0
"""Triton's hash of its own files is computed once for an installation, and again once a file of it
was written to.
"""

import functools
import os
import types

import pytest

from bundler.codegen import triton_hash

HASH = "3.6.0" + "-".join(["ab" * 32] * 3)


@pytest.fixture
def process(tmp_path, monkeypatch):
    """Return what starts a process with an installation of Triton; it returns the hash that keys
    begin with, and whether it was computed.
    """
    installed = tmp_path / "triton"
    (installed / "_C").mkdir(parents=True)
    for name in ("__init__.py", "_C/libtriton.so", "notes.txt"):
        (installed / name).write_text(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(triton_hash, "triton_dir", lambda: str(installed))
    # Files that were there for long, as those of an installation are.
    monkeypatch.setattr(triton_hash, "_SETTLED_S", -60.0)

    def run(text=HASH):
        computed = []

        @functools.lru_cache
        def triton_key():
            computed.append(text)
            return text

        cache = types.SimpleNamespace(triton_key=triton_key)
        monkeypatch.setattr(triton_hash.importlib, "import_module", lambda _: cache)
        triton_hash.remember()
        triton_hash.remember()
        return cache.triton_key(), bool(computed)

    run.installed, run.kept = installed, tmp_path / "cache" / "triton-bundler" / "triton"
    return run


def test_a_second_process_reads_it(process):
    """From a directory of the user's."""
    assert process() == (HASH, True)
    assert process("another") == (HASH, False)


@pytest.mark.parametrize("name", ["__init__.py", "_C/libtriton.so"])
def test_it_is_computed_again_where_a_file_changed(process, name):
    """Also one of the same size, whose time of writing was put back."""
    process()
    path = process.installed / name
    before = path.stat()
    path.write_text(path.read_text()[::-1])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert process("another") == ("another", True)
    assert process("yet another") == ("another", False)


def test_it_is_computed_again_where_a_file_is_new(process):
    """But for what Triton does not read."""
    process()
    (process.installed / "more.txt").write_text("")
    assert process("another") == (HASH, False)
    (process.installed / "_C" / "more.py").write_text("")
    assert process("another") == ("another", True)


def test_it_is_not_kept_of_files_that_were_just_written(process, monkeypatch):
    """They may be written to again in the same moment."""
    monkeypatch.setattr(triton_hash, "_SETTLED_S", 3600.0)
    assert process() == (HASH, True)
    assert process() == (HASH, True)


@pytest.mark.parametrize("damage", [b"", b"a\nb\nc", None])
def test_a_damaged_file_is_a_miss(process, damage):
    """So is one whose text is not what was written."""
    process()
    (path,) = process.kept.iterdir()
    right = path.read_bytes()
    path.write_bytes(right.replace(b"abab", b"acab") if damage is None else damage)
    assert process("another") == ("another", True)


def test_a_directory_that_others_write_to_is_not_read(process):
    """A hash that is not this Triton's would find other kernels."""
    process()
    process.kept.chmod(0o777)
    assert process("another") == ("another", True)


def test_what_is_computed_already_stays(process, monkeypatch):
    """Nothing is read or written then."""
    known = functools.lru_cache(lambda: "known")
    known()
    cache = types.SimpleNamespace(triton_key=known)
    monkeypatch.setattr(triton_hash.importlib, "import_module", lambda _: cache)
    triton_hash.remember()
    assert cache.triton_key is known
    assert not process.kept.exists()


def test_programs_of_a_gpu_need_it(monkeypatch):
    """Those of the CPU look no kernel up."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    backend = pytest.importorskip("bundler.codegen.torch_backend")
    asked = []
    monkeypatch.setattr(triton_hash, "remember", lambda: asked.append(1))
    on_cpu, on_gpu = (
        backend.program_of_graph(backend_trace(torch, device)) for device in (None, "cuda")
    )
    assert "on the CPU" in backend._why_not(on_cpu)
    assert asked == []
    assert backend._why_not(on_gpu) is None
    assert asked == [1]


def backend_trace(torch, device):
    from bundler.codegen.trace import trace

    return trace(lambda x: x.sin(), (torch.ones(64),), device=device)
