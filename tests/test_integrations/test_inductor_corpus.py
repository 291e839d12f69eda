# SPDX-License-Identifier: Apache-2.0
"""A real Inductor cache from a GPU machine, restored for devices that it was not made for.  Skipped
aloud where it is not.
"""

import json
import tarfile
from pathlib import Path

import pytest

import bundler

ARCHIVE = (
    Path(__file__).resolve().parents[3] / "shared" / "corpus" / "inductor-transformer-h200.tar.xz"
)
KERNELS = 57
DEVICES = (0, 1)


@pytest.fixture(scope="module")
def restored(tmp_path_factory):
    """The cache, packed and restored under two devices; (original, bundle file, new directory,
    report).
    """
    if not ARCHIVE.is_file():
        pytest.skip(
            f"the archive of a real cache is not here: {ARCHIVE.name}, beside the checkout's parent"
        )
    folder = tmp_path_factory.mktemp("corpus")
    with tarfile.open(ARCHIVE) as tar:
        tar.extractall(folder, filter="data")
    (root,) = folder.iterdir()
    with bundler.pack(root) as packed:
        packed.save(folder / "one.tbundle")
    root.rename(folder / "renamed")
    report = bundler.restore(
        folder / "one.tbundle", folder / "there", devices=DEVICES, only="all", trust="code"
    )
    return folder / "renamed", folder / "one.tbundle", folder / "there", report


def test_every_group_of_both_devices_is_inside_the_new_path(restored):
    """Each kernel has a group file under each device, whose children are the files beside it."""
    original, _, there, report = restored
    assert (report.usable, report.skipped) == (KERNELS, ())
    for device in DEVICES:
        groups = sorted((there / "triton" / str(device)).glob("*/__grp__*.json"))
        assert len(groups) == KERNELS
        for group in groups:
            children = json.loads(group.read_text())["child_paths"]
            before = json.loads(
                (original / "triton" / "0" / group.parent.name / group.name).read_text()
            )["child_paths"]
            assert children == {name: str(group.parent / name) for name in before}
            assert all((group.parent / name).is_file() for name in children)


def test_one_copy_is_stored_for_all_devices(restored):
    """A cache that holds every kernel under two devices makes the bundle of a cache that holds it
    under one.
    """
    _, path, there, _ = restored
    with bundler.Bundle.load(path) as one, bundler.pack(there) as two:
        assert two.kernels == one.kernels
        assert two.content.blobs == one.content.blobs
        assert two.digest == one.digest
        assert {seen.devices for seen in one.observed.kernels.values()} == {(0,)}
        assert {seen.devices for seen in two.observed.kernels.values()} == {DEVICES}


def test_what_is_no_kernel_is_there_once_byte_for_byte(restored):
    """Generated modules, tuning results and graph entries are at the same place under the new
    directory, once.
    """
    original, _, there, _ = restored
    beside = {
        path.relative_to(original)
        for path in original.rglob("*")
        if path.is_file() and path.relative_to(original).parts[0] != "triton"
    }
    assert {path.suffix for path in beside} == {".py", ".best_config", ""}
    found = {
        path.relative_to(there)
        for path in there.rglob("*")
        if path.is_file() and path.relative_to(there).parts[0] != "triton"
    }
    assert found == beside
    assert all((there / name).read_bytes() == (original / name).read_bytes() for name in beside)
