# SPDX-License-Identifier: Apache-2.0
"""What does not change a bundle's digest, and what two compiles of one kernel become when they are
merged.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
import support

import bundler

pytestmark = pytest.mark.toolchain

_RECORD = """
import importlib.util, json, os, sys
import bundler
from types import SimpleNamespace
spec = importlib.util.spec_from_file_location("kernels", sys.argv[1])
kernels = sys.modules["kernels"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kernels)
if sys.argv[3] != "none":
    from triton.runtime.driver import driver
    driver.set_active(SimpleNamespace(get_current_device=lambda: int(sys.argv[3])))
with bundler.recording() as recording:
    for name in ("gelu", "swiglu"):
        for target in sys.argv[4:]:
            kernels.compile_one(name, target)
bundle = recording.collect()
bundle.save(sys.argv[2])
print(json.dumps([bundle.digest, recording.report.compiles, recording.report.hits,
                  sorted({device for seen in bundle.observed.kernels.values() for device in seen.devices})]))
"""


def record(cache, path, device="none", targets=support.TARGETS, kernels=support.KERNELS, env=None):
    """Record in a new process; returns digest, compiles, hits and devices seen."""
    return support.answer(
        _RECORD, kernels, path, device, *targets, env={"TRITON_CACHE_DIR": cache, **(env or {})}
    )


@pytest.mark.release
def test_a_compile_and_a_hit_give_one_digest(tmp_path):
    """Recorded twice, first as compiles, then as hits, the digest is the same."""
    first = record(tmp_path / "cache", tmp_path / "1")
    second = record(tmp_path / "cache", tmp_path / "2")
    assert (first[1:3], second[1:3]) == ([10, 0], [0, 10])
    assert first[0] == second[0]


@pytest.mark.slow
def test_another_cache_directory_gives_the_same_digest(tmp_path):
    """Where the cache lies is no part of what a bundle is."""
    assert (
        record(tmp_path / "one", tmp_path / "1")[0]
        == record(tmp_path / "two" / "ü", tmp_path / "2")[0]
    )


@pytest.mark.slow
def test_the_device_is_observed_and_no_part_of_the_digest(tmp_path):
    """Compiled under device 0 or 1, the digest is the same, and the device is written down beside
    it.
    """
    zero = record(tmp_path / "zero", tmp_path / "0", device=0)
    one = record(tmp_path / "one", tmp_path / "1", device=1)
    assert (zero[3], one[3]) == ([0], [1])
    assert zero[0] == one[0]


@pytest.mark.slow
def test_inductors_directories_of_two_devices_give_one_digest(tmp_path):
    """Under Inductor's layout, a kernel compiled for device 0 or for device 1 is the same kernel
    with another device.
    """
    root = tmp_path / "inductor" / "triton"
    zero = record(root / "0", tmp_path / "0")
    one = record(root / "1", tmp_path / "1")
    assert (zero[3], one[3]) == ([0], [1])
    assert zero[0] == one[0]
    with bundler.pack(tmp_path / "inductor") as packed:
        assert packed.observed.devices == (0, 1)
        assert len(packed.kernels) == 10
        assert packed.variants_dropped == 0


def test_listing_order_does_not_matter(full_cache, monkeypatch):
    """In whatever order the file system lists names, a packed directory gives the same bytes."""
    with bundler.pack(full_cache) as packed:
        expected = packed.to_bytes()
    listdir, scandir = os.listdir, os.scandir

    class Backwards:
        def __init__(self, *args):
            with scandir(*args) as entries:
                self.entries = sorted(entries, key=lambda entry: entry.name, reverse=True)

        def __enter__(self):
            return iter(self.entries)

        def __exit__(self, *_):
            pass

    support.read_in_python(monkeypatch)
    monkeypatch.setattr(os, "listdir", lambda *args: sorted(listdir(*args), reverse=True))
    monkeypatch.setattr(os, "scandir", Backwards)
    with bundler.pack(full_cache) as packed:
        assert packed.to_bytes() == expected


def test_merging_a_bundle_with_itself_changes_nothing(compiled):
    """The union of a bundle and itself has its digest and drops no variant."""
    with bundler.Bundle.load(compiled.bundle) as one, bundler.Bundle.load(compiled.bundle) as two:
        merged = bundler.merge([one, two])
        assert (merged.digest, merged.variants_dropped) == (one.digest, 0)


class Place:
    """A checkout of the kernels, and a Triton that believes to be installed beside it."""

    def __init__(self, root):
        import triton

        self.root = root
        self.kernels = root / "checkout" / "kernels.py"
        self.kernels.parent.mkdir(parents=True)
        shutil.copy(support.KERNELS, self.kernels)
        site = root / "site"
        site.mkdir()
        package = Path(triton.__file__).parent
        for found in [package, *package.parent.glob("triton-*.dist-info")]:
            (site / found.name).symlink_to(found)
        self.env = {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
        }


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    pytest.importorskip("triton")
    return [Place(tmp_path_factory.mktemp("places") / name) for name in ("here", "over there")]


@pytest.fixture(scope="module")
def two_bundles(places, tmp_path_factory):
    """The same kernels compiled from two checkouts with Triton at two prefixes."""
    folder = tmp_path_factory.mktemp("bundles")
    for number, place in enumerate(places):
        record(
            place.root / "cache", folder / f"{number}.tbundle", kernels=place.kernels, env=place.env
        )
    with (
        bundler.Bundle.load(folder / "0.tbundle") as one,
        bundler.Bundle.load(folder / "1.tbundle") as two,
    ):
        yield one, two


@pytest.mark.slow
def test_two_checkouts_at_two_prefixes_are_variants(two_bundles, tmp_path):
    """Two checkouts with two Triton prefixes compile to one key each for CUDA; merge says how many
    variants it dropped.
    """
    one, two = (bundle.select(target="cuda:90") for bundle in two_bundles)
    assert [kernel.key for kernel in one.kernels] == [kernel.key for kernel in two.kernels]
    assert one.digest != two.digest  # debug information names the source file
    merged, swapped = bundler.merge([one, two]), bundler.merge([two, one])
    assert (len(merged.kernels), merged.variants_dropped) == (5, 5)
    assert merged.digest == swapped.digest
    assert len(bundler.diff(one, two).changed) == 5
    assert [k.parts for k in one.kernels] == [k.parts for k in two.kernels]
    assert [k.launch for k in one.kernels] == [k.launch for k in two.kernels]


@pytest.mark.release
def test_the_merged_bundle_hits_in_both_places(two_bundles, places, tmp_path):
    """The union of two checkouts' bundles, for both vendors, is all a process of either place
    needs.
    """
    merged = bundler.merge(two_bundles)
    merged.save(tmp_path / "merged.tbundle")
    restore = (
        "import bundler, json, sys; print(json.dumps(bundler.restore(sys.argv[1],"
        " sys.argv[2]).skipped))"
    )
    for place in places:
        cache = place.root / "restored"
        skipped = support.answer(restore, tmp_path / "merged.tbundle", cache, env=place.env)
        # Those of the other place could never hit here.
        assert {why.partition(";")[0] for _, why in skipped} <= {
            "its key holds the path where Triton was installed"
        }
        found = support.hits_without_compiler(
            cache, place.root / "ptxas", "gelu,swiglu", kernels=place.kernels, env=place.env
        )
        assert found == (10, 0)


def test_the_merged_bundle_holds_each_amd_kernel_of_both_places(two_bundles):
    """Where Triton's key has its install path, as for AMD before 3.9, the union has both kernels;
    else one is dropped.
    """
    one, two = (bundle.select(target="hip:gfx942") for bundle in two_bundles)
    shared = {kernel.key for kernel in one.kernels} & {kernel.key for kernel in two.kernels}
    merged = bundler.merge([one, two])
    assert len(merged.kernels) == 10 - len(shared)
    assert merged.variants_dropped == len(shared)
    assert len(shared) in {0, 5}


def test_no_path_of_the_recording_machine_is_in_metadata(two_bundles, places):
    """Stored metadata names neither the cache nor the prefix of Triton, of whichever machine."""
    for bundle in two_bundles:
        for kernel in bundle.kernels:
            data = bundle.read(kernel.metadata)
            assert str(places[0].root.parent).encode() not in data
            assert json.loads(data)["name"] == kernel.name


def test_restored_metadata_names_this_triton(two_bundles, places, tmp_path):
    """What a restore writes names the Triton that is installed where it runs, not the one that
    compiled.
    """
    two_bundles[0].select(target="cuda:90").save(tmp_path / "b.tbundle")
    code = "import bundler, sys; bundler.restore(sys.argv[1], sys.argv[2])"
    support.run(code, tmp_path / "b.tbundle", tmp_path / "there", env=places[1].env)
    texts = [
        data.decode()
        for name, data in support.tree(tmp_path / "there").items()
        if name.endswith(".json")
    ]
    assert not any(str(places[0].root / "site") in text for text in texts)
    stored = [
        two_bundles[0].read(k.metadata)
        for k in two_bundles[0].kernels
        if k.target.backend == "cuda"
    ]
    named = any(b"[[triton_dir]]" in data for data in stored)
    assert any(str(places[1].root / "site" / "triton") in text for text in texts) == named
