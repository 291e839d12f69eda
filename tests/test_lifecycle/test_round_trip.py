# SPDX-License-Identifier: Apache-2.0
"""Recorded here, restored there, found by Triton in a process that cannot compile."""

import json
import os
import shutil
from pathlib import Path

import pytest
import support

import bundler

pytestmark = pytest.mark.toolchain

_RECORD = """
import importlib.util, sys
import bundler
spec = importlib.util.spec_from_file_location("kernels", sys.argv[1])
kernels = sys.modules["kernels"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernels)
with bundler.recording() as recording:
    for name in sys.argv[3].split(","):
        for target in sys.argv[4:]:
            kernels.compile_one(name, target)
bundle = recording.collect()
assert bundle.left_out == (), bundle.left_out
bundle.save(sys.argv[2])
"""


def record(
    cache,
    path,
    names="gelu",
    targets=support.TARGETS,
    cwd=None,
    kernels=support.KERNELS,
    env=None,
):
    """Compile with recording on in a new process and save the bundle."""
    support.run(
        _RECORD,
        kernels,
        path,
        names,
        *targets,
        env={"TRITON_CACHE_DIR": cache, **(env or {})},
        cwd=cwd,
    )
    return path


@pytest.mark.release
@pytest.mark.parametrize("keep", ["all", "launch"])
def test_every_kernel_hits_elsewhere_without_a_compiler(compiled, tmp_path, keep):
    """All kernels, recorded and restored elsewhere, whole or as the launch set, are hits in a
    process whose ptxas refuses.
    """
    report = bundler.restore(compiled.bundle, tmp_path / "there", keep=keep)
    assert (len(report.restored), report.skipped, report.usable) == (22, (), 22)
    assert support.hits_without_compiler(tmp_path / "there", tmp_path / "ptxas") == (22, 0)


def test_a_bundle_saved_as_the_launch_set_hits(compiled, bundle, tmp_path):
    """A bundle file that has device binaries and metadata alone is enough for hits."""
    bundle.select(keep="launch").save(tmp_path / "launch.tbundle")
    bundler.restore(tmp_path / "launch.tbundle", tmp_path / "there")
    assert support.hits_without_compiler(tmp_path / "there", tmp_path / "ptxas") == (22, 0)
    assert {Path(name).suffix for name in support.tree(tmp_path / "there")} == {
        ".json",
        ".cubin",
        ".hsaco",
    }


def test_an_empty_cache_does_not_hit(tmp_path):
    """Without a restore the same question finds the refusing ptxas, so a hit above is no
    accident.
    """
    environment, log = support.refusing(tmp_path / "ptxas")
    done = support.run(
        support._ASK,
        support.KERNELS,
        "gelu",
        "cuda:90",
        env={"TRITON_CACHE_DIR": tmp_path / "c", **environment},
        check=False,
    )
    assert done.returncode != 0
    assert log.read_text().startswith("ptxas")


@pytest.mark.release
def test_restored_to_the_original_place_every_byte_is_the_original(compiled, tmp_path):
    """Recorded, deleted and restored to the same directory, the cache is byte for byte what Triton
    left, group files included.
    """
    cache = tmp_path / "cache"
    path = record(cache, tmp_path / "b.tbundle", "gelu,swiglu")
    before = support.tree(cache)
    shutil.rmtree(cache)
    report = bundler.restore(path, cache)
    assert support.tree(cache) == before
    assert report.files == len(before)


@pytest.mark.release
def test_elsewhere_only_path_prefixes_differ(compiled, tmp_path):
    """Restored elsewhere, each file is the original or, if it holds the cache's path, the original
    with the new path.
    """
    bundler.restore(compiled.bundle, tmp_path / "there")
    before, after = support.tree(compiled.cache), support.tree(tmp_path / "there")
    moved = {
        name: data.replace(str(compiled.cache).encode(), str(tmp_path / "there").encode())
        for name, data in before.items()
    }
    assert after == moved
    assert {name for name in before if before[name] != after[name]} == {
        name for name in before if support.GROUP in name
    }


@pytest.mark.parametrize(
    "name",
    [
        "キャッシュ",
        'quote"back\\slash',
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("Zwischen Räume", "emoji 🚀 dir", "dots.and-dashes_", "[[cache_dir]]")
        ),
    ],
)
def test_any_directory_name_works(tmp_path, name):
    """Caches whose path has blanks, quotes or letters of any script are recorded, restored byte for
    byte, and hit.
    """
    here, there = tmp_path / f"{name} 1", tmp_path / f"{name} 2"
    path = record(here, tmp_path / "b.tbundle", targets=["cuda:90"])
    before = support.tree(here)
    bundler.restore(path, there)
    assert support.hits_without_compiler(there, tmp_path / "ptxas", "gelu", ["cuda:90"]) == (1, 0)
    shutil.rmtree(here)
    bundler.restore(path, here)
    assert support.tree(here) == before


def test_a_cache_reached_through_a_link_is_restored_anywhere(tmp_path):
    """Recorded through a symbolic link, the bundle holds no path of that machine, and hits through
    another link.
    """
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    path = record(tmp_path / "link", tmp_path / "b.tbundle", targets=["cuda:90"])
    (tmp_path / "real there").mkdir()
    (tmp_path / "link there").symlink_to("real there")
    report = bundler.restore(path, tmp_path / "link there")
    assert (len(report.restored), report.directories) == (1, (str(tmp_path / "link there"),))
    assert support.hits_without_compiler(
        tmp_path / "link there", tmp_path / "p1", "gelu", ["cuda:90"]
    ) == (1, 0)
    assert support.hits_without_compiler(
        tmp_path / "real there", tmp_path / "p2", "gelu", ["cuda:90"]
    ) == (1, 0)
    with bundler.Bundle.load(path) as loaded:
        stored = [
            loaded.read(a)
            for kernel in loaded.kernels
            for a in kernel.artifacts
            if a.kind == "json"
        ]
    assert all(str(tmp_path).encode() not in data for data in stored)


def test_a_relative_cache_directory_works(tmp_path):
    """With a relative TRITON_CACHE_DIR, recorded in one working directory and restored in another,
    Triton hits.
    """
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    path = record("some/cache", tmp_path / "b.tbundle", targets=["cuda:90"], cwd=tmp_path / "here")
    (kernel,) = (tmp_path / "here" / "some" / "cache").iterdir()
    code = "import bundler, json, sys; print(json.dumps(bundler.restore(sys.argv[1]).directories))"
    found = support.answer(
        code, path, env={"TRITON_CACHE_DIR": "some/cache"}, cwd=tmp_path / "there"
    )
    assert found == [str(tmp_path / "there" / "some" / "cache")]
    assert (tmp_path / "there" / "some" / "cache" / kernel.name).is_dir()
    assert support.hits_without_compiler(
        "some/cache", tmp_path / "ptxas", "gelu", ["cuda:90"], cwd=tmp_path / "there"
    ) == (1, 0)


def test_a_relative_argument_is_the_directory_it_names_now(compiled, tmp_path, monkeypatch):
    """cache_dir may be relative; the group files are absolute, so that a later change of directory
    does no harm.
    """
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    report = bundler.restore(compiled.bundle, "cache")
    assert report.directories == (str(tmp_path / "work" / "cache"),)
    monkeypatch.chdir(tmp_path)
    assert all(support.is_whole(path) for path in (tmp_path / "work" / "cache").iterdir())


@pytest.mark.release
def test_triton_reads_the_restored_files_and_no_others(compiled, tmp_path):
    """After a move each path in each group file lies in the new directory, and the old one may be
    gone.
    """
    bundler.restore(compiled.bundle, tmp_path / "there")
    for directory in (tmp_path / "there").iterdir():
        paths = json.loads(support.group_of(directory).read_text())["child_paths"]
        assert paths == {name: os.path.join(directory, name) for name in paths}
        assert set(paths) == {path.name for path in directory.iterdir()} - {
            support.group_of(directory).name
        }


def test_save_and_load_keep_the_digest(compiled, full_cache, tmp_path):
    """A bundle is the same after a save and a load, and after a restore and a pack its kernels'
    files are.
    """
    with bundler.Bundle.load(compiled.bundle) as bundle:
        bundler.restore(bundle, tmp_path / "there")
        with bundler.pack(tmp_path / "there") as packed:
            assert [(k.key, k.artifacts) for k in packed.kernels] == [
                (k.key, k.artifacts) for k in bundle.kernels
            ]
        bundle.save(tmp_path / "again.tbundle")
        assert (tmp_path / "again.tbundle").read_bytes() == compiled.bundle.read_bytes()
