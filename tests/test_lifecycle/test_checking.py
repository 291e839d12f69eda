# SPDX-License-Identifier: Apache-2.0
"""`check` says what `restore` would do, and touches nothing."""

import os
from dataclasses import replace

import msgspec
import pytest
import support

import bundler
from bundler.errors import BundlerWarning, ConfigError, DigestMismatch, NotFound
from bundler.format.bundle import BlobSource, Bundle
from bundler.format.manifest import Content, Observation, Observed


def state(directory):
    """Return what a write would change: every name below, its inode, size and both times."""
    found = {}
    for folder, folders, names in os.walk(directory):
        for name in [".", *folders, *names]:
            path = os.path.join(folder, name)
            facts = os.lstat(path)
            found[os.path.relpath(path, directory)] = (
                facts.st_ino,
                facts.st_size,
                facts.st_mtime_ns,
                facts.st_ctime_ns,
            )
    return found


class Counted(BlobSource):
    """A source of blobs that counts what it is asked for, and may damage it."""

    def __init__(self, blobs, error=None):
        self.blobs, self.error, self.read = blobs, error, []

    def read_blob(self, digest):
        self.read.append(digest)
        if self.error is not None:
            raise self.error
        return self.blobs.read_blob(digest)

    def prefetch(self, digests):
        self.read += digests

    def close(self):
        pass


def reading_through(bundle, blobs):
    return Bundle(bundle.content, bundle.observed, blobs)


@pytest.mark.toolchain
def test_nothing_is_there_and_nothing_is_made(compiled, tmp_path):
    """Where nothing was restored every kernel is missing; no directory is made, and not one time
    changes.
    """
    before = state(tmp_path)
    report = bundler.check(compiled.bundle, tmp_path / "not" / "there", only="all")
    assert [key for key, _ in report.missing] == compiled.keys
    assert {reason for _, reason in report.missing} == {f"not in {tmp_path / 'not' / 'there'}"}
    assert (report.present, report.skipped, report.complete) == ((), (), False)
    assert report.directories == (str(tmp_path / "not" / "there"),)
    assert state(tmp_path) == before


@pytest.mark.toolchain
def test_after_a_restore_all_is_there(compiled, tmp_path):
    """What restore put in place is present, by the same choices, and stays untouched."""
    restored = bundler.restore(compiled.bundle, tmp_path / "there")
    before = state(tmp_path)
    report = bundler.check(compiled.bundle, tmp_path / "there")
    assert (report.present, report.missing, report.complete) == (restored.restored, (), True)
    assert report.unchecked == restored.unchecked
    assert state(tmp_path) == before


def test_without_a_directory_it_looks_where_triton_looks(small, cache, key):
    """cache_dir=None is this process's Triton cache."""
    assert bundler.check(small, only="all").directories == (str(cache),)
    bundler.restore(small, only="all")
    assert bundler.check(small, only="all").present == (key,)


def test_the_launch_set_is_enough(small, tmp_path, key):
    """A kernel restored as its launch set is no more missing for a check than for a restore."""
    bundler.restore(small, tmp_path / "there", only="all", keep="launch")
    for keep in ("launch", "all"):
        assert bundler.check(small, tmp_path / "there", keep, only="all").present == (key,)


@pytest.mark.parametrize("case", support.BROKEN)
def test_what_a_restore_would_repair_is_missing(small, planted, key, case):
    """A directory that is broken in any way is missing, with the reason, and stays as broken as it
    is.
    """
    breaks, reason = support.BROKEN[case]
    breaks(planted / key)
    before = state(planted)
    report = bundler.check(small, planted, only="all")
    assert [name for name, _ in report.missing] == [key]
    assert report.missing[0][1].startswith(f"broken in {planted}: ")
    assert reason in report.missing[0][1]
    assert state(planted) == before
    assert bundler.restore(small, planted, only="all").repaired == (key,)


def test_a_group_file_that_leads_elsewhere_is_broken(small, planted, key, tmp_path):
    """A kernel that Triton would read from another place is missing here."""
    support.name_group(planted / key, tmp_path / "old place")
    report = bundler.check(small, planted, only="all")
    assert report.missing == ((key, f"broken in {planted}: its group file names files elsewhere"),)


def test_another_kernel_under_the_same_key_is_missing(small, planted, key):
    """A complete directory whose metadata differs is not this kernel."""
    path = support.one(planted / key, ".json")
    path.write_text(path.read_text().replace('"num_warps": 4', '"num_warps": 8'))
    assert "its metadata differs" in bundler.check(small, planted, only="all").missing[0][1]


def test_another_complete_build_counts(small, planted, key):
    """Another build of the same kernel is what a restore leaves alone, so nothing is missing."""
    path = support.one(planted / key, ".ttir")
    path.write_bytes(path.read_bytes() + b"\n// compiled elsewhere\n")
    assert bundler.check(small, planted, only="all").present == (key,)


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_cache_directory_that_is_none_holds_nothing(small, tmp_path, key, kind):
    """A file, or a link to nowhere, in the place of the cache directory is an answer, not
    an error.
    """
    place = tmp_path / "place"
    if kind == "file":
        place.write_text("a file")
    else:
        place.symlink_to(tmp_path / "nowhere")
    report = bundler.check(small, place, only="all")
    assert [name for name, _ in report.missing] == [key]


def test_what_cannot_be_used_is_skipped_and_said(small, tmp_path, key):
    """Kernels of another Triton are skipped, not missing, and the one warning leads to the
    caller.
    """
    kernels = [
        replace(k, toolchain=msgspec.structs.replace(k.toolchain, release="3.5.9"))
        for k in small.kernels
    ]
    other = Bundle(Content.of(kernels), small.observed, small.blobs)
    with pytest.warns(BundlerWarning, match="here: compiled by Triton 3.5.9") as caught:
        report = bundler.check(other, tmp_path / "there")
    assert (report.missing, report.present, report.complete) == ((), (), True)
    assert [name for name, _ in report.skipped] == [key]
    assert caught[0].filename == __file__


def test_a_kernel_must_be_in_every_directory_it_belongs_to(small, tmp_path, key):
    """A kernel of Inductor's that is there for one device only is missing for the other."""
    seen = Observed({key: Observation((0, 2), ("inductor",))})
    both = Bundle(small.content, seen, small.blobs)
    bundler.restore(both, tmp_path / "there", devices=[0], only="all")
    report = bundler.check(both, tmp_path / "there", only="all")
    assert report.missing == ((key, f"not in {tmp_path / 'there' / 'triton' / '2'}"),)
    assert report.present == ()
    assert bundler.check(both, tmp_path / "there", devices=[0], only="all").present == (key,)


@pytest.fixture
def accompanied(compiled, key, tmp_path):
    """A bundle of a kernel and a tuning result."""
    cache = support.plant(compiled.cache, tmp_path / "accompanied", [key])
    (cache / ("D" * 52)).mkdir()
    (cache / ("D" * 52) / "gelu_kernel.autotune.json").write_text('{"best": 1}')
    (cache / ("B" * 52)).mkdir()
    (cache / ("B" * 52) / "launcher.so").write_text("code")
    with bundler.pack(cache) as packed:
        yield packed


def test_files_beside_the_kernels(accompanied, tmp_path, key):
    """A tuning result is missing, then present; where another is there it is skipped, as a restore
    would; code needs trust.
    """
    there, tuned = tmp_path / "there", f"{'D' * 52}/gelu_kernel.autotune.json"
    report = bundler.check(accompanied, there, only="all")
    assert [name for name, _ in report.missing] == sorted([key, tuned])
    assert [name for name, _ in report.skipped] == [f"{'B' * 52}/launcher.so"]
    bundler.restore(accompanied, there, only="all")
    assert bundler.check(accompanied, there, only="all").present == tuple(sorted([key, tuned]))
    (there / tuned).write_text("another")
    report, restored = (
        bundler.check(accompanied, there, only="all"),
        bundler.restore(accompanied, there, only="all"),
    )
    assert (report.present, report.missing) == ((key,), ())
    assert report.skipped == restored.skipped
    trusted = bundler.check(accompanied, there, only="all", trust="code")
    assert [name for name, _ in trusted.missing] == [f"{'B' * 52}/launcher.so"]


def test_only_what_is_compared_is_read(small, tmp_path):
    """Where nothing is in place nothing of the bundle is read; where a kernel is, its metadata
    alone.
    """
    blobs = Counted(small.blobs)
    counted = reading_through(small, blobs)
    bundler.check(counted, tmp_path / "there", only="all")
    assert blobs.read == []
    bundler.restore(small, tmp_path / "there", only="all")
    bundler.check(counted, tmp_path / "there", only="all")
    assert len(set(blobs.read)) == 1


def test_a_kernel_that_cannot_be_compared_is_missing(small, planted, key):
    """Where the bundle's own metadata is damaged, the kernel is missing with that reason, since
    nobody can tell.
    """
    broken = reading_through(small, Counted(small.blobs, DigestMismatch("the blob is damaged")))
    report = bundler.check(broken, planted, only="all")
    assert [name for name, _ in report.missing] == [key]
    assert report.missing[0][1].endswith("the blob is damaged")


def test_wrong_arguments_are_errors(small, tmp_path):
    """The choices are those of restore, and so are the errors; a path that is no bundle is one."""
    for wrong in (
        {"keep": "some"},
        {"only": "none"},
        {"trust": "me"},
        {"devices": []},
        {"cache_dir": ""},
    ):
        with pytest.raises(ConfigError):
            bundler.check(small, **({"cache_dir": tmp_path} | wrong))
    with pytest.raises(NotFound):
        bundler.check(tmp_path / "nothing.tbundle", tmp_path)
