# SPDX-License-Identifier: Apache-2.0
"""One kernel placed for Triton's cache manager: verified, whole, in whatever state the directory
is, and without looking further.
"""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import support

from bundler.format.bundle import Bundle, MemoryBlobs
from bundler.format.digest import digest_raw
from bundler.format.manifest import Content, Observed
from bundler.lifecycle import compatibility
from bundler.lifecycle.cache_directory import CacheDirectory, place_kernel
from bundler.lifecycle.kernel_directory import Rejected
from bundler.lifecycle.kernel_placement import NEEDS_TRUST
from bundler.toolchain import identity


def _place(bundle, directory, *, keep="all", trust="kernels"):
    (kernel,) = bundle.kernels
    return place_kernel(
        bundle.blobs, kernel, directory, keep=keep, trust=trust, triton_dir=identity.triton_dir()
    )


@pytest.fixture
def there(tmp_path):
    return CacheDirectory(str(tmp_path / "there"))


@pytest.mark.parametrize("keep", ["all", "launch"])
def test_a_kernel_is_placed_as_triton_would_have_left_it(small, key, compiled, there, keep):
    """Its files are those of the cache that it was recorded in, and the group file names the new
    place.
    """
    outcome, placed = _place(small, there, keep=keep)
    directory = Path(there.path, key)
    files = [path for path in directory.iterdir() if not path.name.startswith(support.GROUP)]
    assert outcome == "restored"
    assert placed.size_bytes == sum(path.stat().st_size for path in files)
    assert sorted(placed.names) == sorted(path.name for path in files)
    assert support.is_whole(directory)
    assert {
        (compiled.cache / key / path.name).read_bytes() == path.read_bytes() for path in files
    } == {True}


def test_what_is_there_stays(small, key, planted):
    """A kernel that Triton left there meanwhile is found, and nothing is written."""
    before = support.tree(planted)
    assert _place(small, CacheDirectory(str(planted)))[0] == "present"
    assert support.tree(planted) == before


def test_who_loses_the_race_finds_the_kernel_present(small, key, planted, tmp_path, there):
    """A kernel that came after the directory was listed is left alone, and no temporary directory
    stays.
    """
    shutil.copytree(planted / key, os.path.join(there.path, key))
    support.name_group(tmp_path / "there" / key)
    assert _place(small, there)[0] == "present"
    assert support.temporaries(tmp_path / "there") == []


def test_a_broken_directory_is_replaced(small, key, planted, tmp_path):
    """Half a kernel, which came after the directory was listed, is renamed aside as a whole."""
    directory = CacheDirectory(str(planted))
    support.one(planted / key, ".cubin").write_bytes(b"torn")
    assert _place(small, directory)[0] == "repaired"
    assert support.is_whole(planted / key)


def test_a_cache_that_was_removed_is_made_again(small, key, there):
    """A program may remove its whole cache while it runs."""
    shutil.rmtree(there.path)
    assert _place(small, there)[0] == "restored"
    assert os.listdir(there.path) == [key]


def test_damaged_bytes_are_rejected(small, there):
    """A binary whose digest does not match is never written."""
    (kernel,) = small.kernels
    blobs = {digest_raw(artifact.digest): small.read(artifact) for artifact in kernel.artifacts}
    blobs[digest_raw(kernel.binary.digest)] = b"not these"
    damaged = Bundle(small.content, Observed({}), MemoryBlobs(blobs))
    assert isinstance(_place(damaged, there), Rejected)
    assert os.listdir(there.path) == []


def test_a_kernel_with_a_library_needs_trust(small, there):
    """Triton would load the library from the kernel's directory."""
    (kernel,) = small.kernels
    library = msgspec.structs.replace(kernel.binary, filename=f"{kernel.name}.so")
    bundle = Bundle(
        Content.of([replace(kernel, artifacts=(*kernel.artifacts, library))]),
        Observed({}),
        small.blobs,
    )
    assert _place(bundle, there) == Rejected(NEEDS_TRUST)
    assert isinstance(_place(bundle, there, trust="code"), tuple)


def test_neither_the_machine_nor_the_directory_is_looked_at_for_each_kernel(
    bundle, there, monkeypatch
):
    """The key says that this machine can use the kernel, and a cache may hold thousands of
    others.
    """

    def never(*_args, **_kwargs):
        raise AssertionError("asked for")

    monkeypatch.setattr(compatibility.Machine, "__init__", never)
    with monkeypatch.context() as patched:
        patched.setattr(os, "listdir", never)
        patched.setattr(os, "scandir", never)
        placed = [
            place_kernel(bundle.blobs, kernel, there, keep="all", trust="kernels", triton_dir=None)
            for kernel in bundle.kernels
        ]
    assert {outcome for outcome, _ in placed} == {"restored"}
