# SPDX-License-Identifier: Apache-2.0
"""`Store.restore`: kernels go from a store into a cache directory; what is damaged is left out, and
said.
"""

import os
import shutil
import subprocess
import warnings

import oracle
import pytest

import bundler
from bundler.backends.backend_errors import BackendUnavailable
from bundler.errors import AccessDenied, BundlerWarning, ConfigError, DigestMismatch, NotFound
from bundler.lifecycle import kernel_writer
from bundler.store import blob_source
from bundler.store.store_layout import units_of


@pytest.fixture
def pushed(local, real):
    """A local store with the compiled kernels under the tag t."""
    local.push(real, "t")
    return local


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """This process's Triton cache."""
    place = tmp_path / "cache"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(place))
    return place


def tree(directory):
    """Return {relative path: bytes} of a directory."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def test_restoring_from_a_store_is_restoring_the_bundle(pushed, real, cache):
    """The same files as from the bundle itself, and the same report."""
    expected = bundler.restore(real, only="all")
    right = tree(cache)
    shutil.rmtree(cache)
    report = pushed.restore("t", only="all")
    assert tree(cache) == right
    assert (report.restored, report.files, report.bytes) == (
        expected.restored,
        expected.files,
        expected.bytes,
    )
    assert (report.skipped, report.damaged, report.directories) == ((), (), (str(cache),))
    assert pushed.restore("t", only="all").present == report.restored


def test_by_digest_and_into_any_directory(pushed, real, tmp_path):
    """A digest names a bundle, and `cache_dir` where it goes."""
    report = pushed.restore(real.digest, cache_dir=tmp_path / "here", only="all")
    assert len(report.restored) == len(real.kernels)
    assert len(list((tmp_path / "here").iterdir())) == len(real.kernels)


def test_only_what_is_needed_is_fetched(pushed, real, tmp_path):
    """With the launch set alone the intermediate texts stay in the store."""
    noting = oracle.wrapped(pushed, oracle.Noting)
    report = noting.restore("t", cache_dir=tmp_path / "c", only="all", keep="launch")
    fetched = {key for keys in noting._backend.inner.named("get") for key in keys}
    launch = {
        oracle.unit_of(pushed, real, number, k.binary.kind) for number, k in enumerate(real.kernels)
    }
    assert fetched == launch | {oracle.manifest_of(pushed, "t")}
    assert report.files == 3 * len(real.kernels)


def test_units_are_fetched_in_batches(pushed, real, tmp_path):
    """A restore asks the store once for each run of kernels, not once for each file."""
    noting = oracle.wrapped(pushed, oracle.Noting)
    noting.restore("t", cache_dir=tmp_path / "c", only="all")
    calls = noting._backend.inner.named("get")
    assert len(calls) - 1 <= len(real.kernels) / 4
    assert sum(map(len, calls)) == len({key for keys in calls for key in keys})


def test_a_first_run_may_have_nothing(local, cache):
    """Without the tag a restore raises, or with `missing_ok` does nothing."""
    for name in ("t", "sha256:" + "0" * 64):
        with pytest.raises(NotFound):
            local.restore(name)
        assert local.restore(name, missing_ok=True) == bundler.RestoreReport()
        assert local.restore(name, True).usable == 0
    assert not cache.exists()


def test_missing_ok_forgives_only_what_is_missing(pushed, cache):
    """A damaged manifest is no first run; once it was removed it is one, as a dangling tag is a
    miss.
    """
    oracle.flip(pushed, oracle.manifest_of(pushed, "t"))
    with pytest.raises(DigestMismatch):
        pushed.restore("t", missing_ok=True)
    assert pushed.restore("t", missing_ok=True) == bundler.RestoreReport()


@pytest.mark.parametrize("harm", [oracle.flip, oracle.drop], ids=["damaged", "missing"])
@pytest.mark.parametrize("keep", ["all", "launch"])
def test_a_damaged_kernel_is_left_out(pushed, real, cache, harm, keep):
    """A kernel whose bytes are damaged or gone is skipped with the reason; the others are restored;
    a push repairs it.
    """
    number, kernel = next((n, k) for n, k in enumerate(real.kernels) if k.name == "softmax_kernel")
    key = oracle.unit_of(pushed, real, number, kernel.binary.kind)
    harm(pushed, key)
    report = pushed.restore("t", only="all", keep=keep)
    assert report.damaged == (kernel.key,)
    ((name, reason),) = report.skipped
    assert (name, key in reason) == (kernel.key, True)
    assert ("is missing; push the bundle again" in reason) == (harm is oracle.drop)
    assert ("expected sha256:" in reason) == (harm is oracle.flip)
    assert not (cache / kernel.key).exists()
    assert len(report.restored) == len(real.kernels) - 1
    assert pushed.push(real, "t").blobs_sent == 1
    again = pushed.restore("t", only="all", keep=keep)
    assert (again.restored, again.damaged, again.skipped) == ((kernel.key,), (), ())
    assert pushed.verify().sound


def test_wrong_bytes_are_never_restored(pushed, real, cache):
    """With every unit of the store damaged nothing is published, and each kernel says why."""
    for key in oracle.of_kind(pushed, "u"):
        oracle.flip(pushed, key)
    with pytest.warns(BundlerWarning, match="nothing in this bundle can be used here"):
        report = pushed.restore("t", only="all")
    assert set(report.damaged) == {kernel.key for kernel in real.kernels}
    assert (report.usable, list(cache.iterdir())) == (0, [])


def test_restores_keywords_are_restores(pushed, tmp_path, real):
    """Bad keywords are refused as `bundler.restore` refuses them."""
    for bad in (
        {"keep": "some"},
        {"only": "none"},
        {"trust": "nobody"},
        {"devices": []},
        {"cache_dir": ""},
    ):
        with pytest.raises(ConfigError):
            pushed.restore("t", **bad)
    report = pushed.restore("t", cache_dir=tmp_path / "c", only="usable")
    assert report.usable + len({name for name, _ in report.skipped}) == len(real.kernels)


@pytest.mark.parametrize(
    ("opened_with", "asked", "restored"),
    [("kernels", None, 0), ("code", None, 1), ("kernels", "code", 1), ("code", "kernels", 0)],
)
def test_trust_is_the_stores_unless_told_otherwise(
    url, opened, compiled, tmp_path, opened_with, asked, restored
):
    """Shared libraries are restored when the store was opened with that trust, or the call
    has it.
    """
    with bundler.pack(compiled.cache) as packed:
        source = tmp_path / "source"
        shutil.copytree(compiled.cache / packed.kernels[0].key, source / packed.kernels[0].key)
    library = source / ("T" * 52) / "cuda_utils.cpython-311-x86_64-linux-gnu.so"
    library.parent.mkdir()
    library.write_bytes(b"\x7fELF" + bytes(60))
    with bundler.pack(source) as bundle:
        if not bundle.helpers:
            pytest.skip("this library was not taken for a helper")
        store = opened(url, trust=opened_with)
        store.push(bundle, "t")
        report = store.restore("t", cache_dir=tmp_path / "c", only="all", trust=asked)
    assert len(report.companions) == restored
    assert len(report.restored) == 1


def test_a_store_that_we_may_only_read_can_be_restored_from(pushed, real, root, tmp_path, opened):
    """On a read-only file system restoring works, nothing is marked, and nothing is asked of the
    store but bytes.
    """
    place = tmp_path / "mounted"
    place.mkdir()
    try:
        done = subprocess.run(
            ["mount", "--bind", str(root), str(place)], capture_output=True, text=True
        )
        if done.returncode == 0:
            done = subprocess.run(
                ["mount", "-o", "remount,ro,bind", str(place)], capture_output=True, text=True
            )
            mounted = True
        else:
            mounted = False
    except FileNotFoundError:
        pytest.skip("there is no mount command here")
    try:
        if done.returncode:
            pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")
        store = opened(f"file://{place}")
        report = store.restore("t", cache_dir=tmp_path / "c", only="all")
        assert len(report.restored) == len(real.kernels)
        assert store.verify().sound
        assert [info.name for info in store.tags()] == ["t"]
        assert store.push(real, "t").blobs_sent == 0
        with pytest.raises(bundler.BundlerError, match="Read-only"):
            store.push(oracle.bundle("A"), "t")
    finally:
        if mounted:
            subprocess.run(["umount", str(place)], check=True)


def test_a_pulled_bundle_may_be_restored_saved_and_merged(pushed, real, tmp_path):
    """What was pulled is a bundle like any other."""
    with pushed.pull("t") as pulled:
        pulled.save(tmp_path / "b.tbundle")
        with bundler.Bundle.load(tmp_path / "b.tbundle") as saved:
            assert saved.digest == real.digest
            assert bundler.merge([pulled, saved]).digest == real.digest
        small = pulled.select(target="cuda:90", keep="launch")
        assert len(bundler.restore(small, tmp_path / "c", only="all").restored) == len(
            small.kernels
        )


def test_a_real_cache_goes_through_a_store(local, real_cache, tmp_path):
    """A model's cache, pushed and restored with trust, is there again, but for what a compile there
    would write anew.
    """
    with bundler.pack(real_cache) as bundle:
        local.push(bundle, "t")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            report = local.restore("t", cache_dir=tmp_path / "c", only="all", trust="code")
        assert report.usable == len(bundle.kernels)
        assert len(report.companions) == len(
            (*bundle.tuning_files, *bundle.helpers, *bundle.opaque)
        )
        assert (report.skipped, report.damaged) == ((), ())
    assert os.listdir(tmp_path / "c")


# ------------------------------------------------------------ what is done while kernels are placed


def in_use(store, tag):
    """Return the keys that a pull of this tag marks: its manifest and its units."""
    with store.pull(tag, read_only=True) as pulled:
        return sorted(
            {oracle.manifest_of(store, tag), *(unit.key for unit in units_of(pulled.content))}
        )


@pytest.mark.parametrize("keep", ["all", "launch"])
def test_a_restore_marks_all_that_it_pulled_once(pushed, tmp_path, keep):
    """Also what it does not fetch; in a thread of its own, which has ended when the restore has."""
    far = oracle.wrapped(pushed, oracle.Noting, cheap=False)
    far.restore("t", cache_dir=tmp_path / "c", only="all", keep=keep)
    (touched,) = far._backend.inner.named("touch")
    assert sorted(set(touched)) == in_use(pushed, "t")
    names = [name for name, _ in far._backend.inner.calls]
    assert names.index("touch") > names.index("get", names.index("get") + 1)


def test_a_restore_that_fetches_nothing_marks_what_it_pulled(pushed, tmp_path):
    """A directory that cannot be made is an error before anything is fetched; the bundle is in use
    all the same.
    """
    (tmp_path / "file").write_text("in the way")
    far = oracle.wrapped(pushed, oracle.Noting, cheap=False)
    with pytest.raises((AccessDenied, NotFound)):
        far.restore("t", cache_dir=tmp_path / "file" / "c", only="all")
    (touched,) = far._backend.inner.named("touch")
    assert sorted(set(touched)) == in_use(pushed, "t")


class Untouchable(oracle.Wrapped):
    """Reads, and does not answer when it is asked to touch."""

    def around(self, name, call, argument):
        if name == "touch":
            raise BackendUnavailable("no answer")
        return call(argument)


def test_marks_that_fail_harm_no_restore(pushed, real, tmp_path):
    """Everything is placed, and nothing raised."""
    far = oracle.wrapped(pushed, Untouchable, cheap=False)
    assert len(far.restore("t", cache_dir=tmp_path / "c", only="all").restored) == len(real.kernels)


@pytest.mark.parametrize("writer", ["where it was built", "in Python"])
@pytest.mark.parametrize("kind", ["cubin", "json"])
def test_a_unit_of_other_bytes_is_found_by_who_writes_it_and_removed(
    local, tmp_path, monkeypatch, kind, writer
):
    """Sealed by whoever changed it, it is what was stored; the digests of its files tell, before
    anybody sees the kernel.
    """
    if writer == "in Python":
        monkeypatch.setattr(kernel_writer, "compiled_writer", lambda: None)
    bundle = oracle.restorable("A", "B")
    local.push(bundle, "t")
    kernel, other = bundle.kernels
    launch = sorted(kernel.launch_set, key=lambda artifact: artifact.digest)
    key = oracle.unit_of(local, bundle)
    changed = [
        oracle.flipped(bundle.read(artifact)) if artifact.kind == kind else bundle.read(artifact)
        for artifact in launch
    ]
    oracle.overwrite(local, key, oracle.sealed(b"".join(changed)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BundlerWarning)
        report = local.restore("t", cache_dir=tmp_path / "c", only="all")
    assert (report.damaged, report.restored) == ((kernel.key,), (other.key,))
    assert os.listdir(tmp_path / "c") == [other.key]
    assert key not in oracle.raw(local)
    assert local.push(bundle, "t").blobs_sent == 1
    assert len(local.restore("t", cache_dir=tmp_path / "c", only="all").restored) == 1


def test_what_was_fetched_ahead_takes_bounded_memory(pushed, real, monkeypatch):
    """More than that is forgotten, and fetched again when it is read."""
    monkeypatch.setattr(blob_source, "CACHED_BYTES", 10_000)
    with pushed.pull("t") as pulled:
        pulled.blobs.prefetch([digest for digest, _ in pulled.content.blobs])
        kept = pulled.blobs._fetched.sizes()
        assert sum(size for _, size in kept) <= 10_000
        assert oracle.contents(pulled) == oracle.contents(real)
