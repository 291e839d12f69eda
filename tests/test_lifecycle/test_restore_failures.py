# SPDX-License-Identifier: Apache-2.0
"""Disks that are full, directories that cannot be written, bundles that are damaged."""

import contextlib
import errno
import itertools
import os
import subprocess
from dataclasses import replace

import msgspec
import pytest
import support

import bundler
from bundler.errors import AccessDenied, BundlerWarning, NotFound, StoreFull
from bundler.format.bundle import MemoryBlobs
from bundler.format.digest import digest_raw, digest_text, sha256
from bundler.format.manifest import Content
from bundler.format.sentinel import Span
from bundler.lifecycle import cache_directory


def failing(monkeypatch, name, number, code):
    """Let a function of os fail from its nth call on."""
    support.write_in_python(monkeypatch)
    real, calls = getattr(os, name), itertools.count()

    def call(*args, **kwargs):
        # Opening to read goes on, since removing what was half-written needs it.
        if name == "open" and not args[1] & os.O_CREAT:
            return real(*args, **kwargs)
        if next(calls) >= number:
            raise OSError(code, os.strerror(code))
        return real(*args, **kwargs)

    monkeypatch.setattr(os, name, call)


def check_half_done(report, there, compiled):
    """What is there is whole, named in the report, and nothing else is there."""
    assert support.temporaries(there) == []
    assert sorted(os.listdir(there)) == sorted(report.restored)
    assert all(support.is_whole(path) for path in there.iterdir())
    expected = support.tree(compiled.cache)
    assert all(
        data == expected[name]
        for name, data in support.tree(there).items()
        if support.GROUP not in name
    )


@pytest.mark.parametrize("number", [0, 1, 5, 30, 60, 100])
def test_a_disk_that_fills_up_is_store_full(compiled, tmp_path, monkeypatch, number):
    """When the disk is full in the middle: StoreFull, no temporary, whole kernels only, and the
    report names them.
    """
    failing(monkeypatch, "write", number, errno.ENOSPC)
    with pytest.raises(StoreFull, match="No space left on device; free some space") as caught:
        bundler.restore(compiled.bundle, tmp_path / "there", only="all")
    monkeypatch.undo()
    check_half_done(caught.value.report, tmp_path / "there", compiled)
    assert caught.value.report.usable < 22


def test_a_quota_that_is_used_up_is_store_full_too(compiled, tmp_path, monkeypatch):
    """EDQUOT is a full disk like any other."""
    failing(monkeypatch, "write", 12, errno.EDQUOT)
    with pytest.raises(StoreFull):
        bundler.restore(compiled.bundle, tmp_path / "there", only="all")


def test_the_report_of_a_failure_has_what_was_published_with_it(bundle, tmp_path, monkeypatch):
    """Kernels that were written before one failed, and those of its batch, are in the error's
    report as well.
    """
    first = bundle.kernels[0].key
    real = cache_directory.begin_writing

    def begin(root, kernels, threads):
        codes = real(root, tuple(kernel for kernel in kernels if kernel[1] != first), threads)()
        return lambda: [errno.ENOSPC if key == first else codes.pop(0) for _, key, *_ in kernels]

    monkeypatch.setattr(cache_directory, "begin_writing", begin)
    with pytest.raises(StoreFull, match=f"{first}: No space left on device") as caught:
        bundler.restore(bundle, tmp_path / "there", only="all")
    assert sorted(caught.value.report.restored) == sorted(os.listdir(tmp_path / "there"))
    assert len(caught.value.report.restored) >= 15


@pytest.mark.parametrize("call", ["write", "open", "mkdir", "rename"])
def test_an_input_output_error_is_typed(compiled, tmp_path, monkeypatch, call):
    """A disk that fails at any call is a BundlerError that names the place, with the kernels before
    it in the report.
    """
    (tmp_path / "there").mkdir()
    with bundler.Bundle.load(compiled.bundle) as opened:
        failing(monkeypatch, call, 4, errno.EIO)
        with pytest.raises(bundler.BundlerError, match="Input/output error") as caught:
            bundler.restore(opened, tmp_path / "there", only="all")
        monkeypatch.undo()
    check_half_done(caught.value.report, tmp_path / "there", compiled)


@pytest.mark.toolchain
def test_what_was_published_before_the_disk_was_full_hits(compiled, tmp_path, monkeypatch):
    """Triton finds the kernels that were published before the disk was full, and the next restore
    completes.
    """
    failing(monkeypatch, "write", 90, errno.ENOSPC)
    with pytest.raises(StoreFull) as caught:
        bundler.restore(compiled.bundle, tmp_path / "there")
    monkeypatch.undo()
    heard = support.ask(tmp_path / "there", env={"TRITON_CACHE_DIR": tmp_path / "there"})
    assert sum(hit for *_, hit in heard) == caught.value.report.usable > 0
    assert bundler.restore(compiled.bundle, tmp_path / "there").usable == 22


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 KiB; skipped aloud where we may not mount."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True)
    except OSError as error:
        pytest.skip(f"no small file system to fill up: {error}")
    if done.returncode:
        pytest.skip(f"no small file system to fill up: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_really_full_disk_is_store_full(compiled, small_disk):
    """On a real file system without room: StoreFull, no temporary, whole kernels, and room again
    after deleting them.
    """
    with pytest.raises(StoreFull) as caught:
        bundler.restore(compiled.bundle, small_disk, only="all")
    check_half_done(caught.value.report, small_disk, compiled)
    (small_disk / "filler").write_bytes(b"")


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.EPERM])
def test_a_directory_that_cannot_be_written_is_access_denied(compiled, tmp_path, monkeypatch, code):
    """A read-only cache directory is AccessDenied, and nothing is there afterwards."""
    (tmp_path / "there").mkdir()
    failing(monkeypatch, "mkdir", 0, code)
    with pytest.raises(AccessDenied, match="check its owner and permissions") as caught:
        bundler.restore(compiled.bundle, tmp_path / "there", only="all")
    assert isinstance(caught.value, PermissionError)
    assert caught.value.report.usable == 0
    assert os.listdir(tmp_path / "there") == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_really_read_only_directory_is_access_denied(compiled, tmp_path):
    """A cache directory without write permission is AccessDenied."""
    (tmp_path / "there").mkdir(mode=0o555)
    with pytest.raises(AccessDenied):
        bundler.restore(compiled.bundle, tmp_path / "there", only="all")


def test_a_read_only_cache_with_every_kernel_is_fine(small, planted, key, monkeypatch):
    """Where every kernel is in place already nothing has to be written, so a read-only directory is
    no error.
    """
    for call in ("mkdir", "rename", "write", "link"):
        failing(monkeypatch, call, 0, errno.EROFS)
    assert bundler.restore(small, planted, only="all").present == (key,)


def test_a_file_in_place_of_the_cache_is_an_error(compiled, tmp_path):
    """A cache_dir that is a file, or lies in one, is an error that names it."""
    (tmp_path / "file").write_text("x")
    for place in (tmp_path / "file", tmp_path / "file" / "cache"):
        with pytest.raises(bundler.BundlerError, match=str(place)):
            bundler.restore(compiled.bundle, place, only="all")


def test_a_bundle_that_is_not_there_is_not_found(tmp_path):
    """Restoring a file that does not exist is NotFound, and makes no directory."""
    with pytest.raises(NotFound):
        bundler.restore(tmp_path / "none.tbundle", tmp_path / "there")
    assert not (tmp_path / "there").exists()


def test_one_damaged_frame_costs_only_its_kernels(compiled, tmp_path):
    """With a bit flipped in any one frame, kernels with bytes in it are skipped with the reason,
    and all others restored.
    """
    data = compiled.bundle.read_bytes()
    expected = support.tree(compiled.cache)
    with bundler.Bundle.load(compiled.bundle) as opened:
        ranges = [
            (section.offset, section.stored_bytes)
            for section in opened.blobs.sections
            if section.blobs
        ]
    skipped = set()
    for number, (offset, size) in enumerate(ranges):
        damaged = bytearray(data)
        damaged[offset + size // 2] ^= 0x10
        there = tmp_path / str(number)
        with bundler.Bundle.from_bytes(bytes(damaged)) as opened, warnings_of_nothing_usable():
            report = bundler.restore(opened, there, only="all")
        assert report.skipped, "the damage was not noticed"
        assert len(report.restored) + len(report.skipped) == 22
        assert {key for key, _ in report.skipped} == set(compiled.keys) - set(report.restored)
        assert all(why for _, why in report.skipped)
        assert support.temporaries(there) == []
        found = support.tree(there)
        assert all(
            data == expected[name] for name, data in found.items() if support.GROUP not in name
        )
        assert {name.partition("/")[0] for name in found} == set(report.restored)
        skipped |= {key for key, _ in report.skipped}
    assert skipped == set(compiled.keys)


@contextlib.contextmanager
def warnings_of_nothing_usable():
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BundlerWarning)
        yield


def forged(bundle, key, change):
    """A bundle in which the metadata artifact of one kernel was changed, with a right digest, by
    whoever made it.
    """
    blobs = {digest_raw(a.digest): bundle.read(a) for k in bundle.kernels for a in k.artifacts}
    kernels = []
    for kernel in bundle.kernels:
        if kernel.key == key:
            artifact, data = change(kernel.metadata, bundle.read(kernel.metadata))
            blobs[digest_raw(artifact.digest)] = data
            kernel = replace(  # noqa: PLW2901
                kernel,
                artifacts=tuple(artifact if a.kind == "json" else a for a in kernel.artifacts),
            )
        kernels.append(kernel)
    return bundler.Bundle(Content.of(kernels), bundle.observed, MemoryBlobs(blobs))


def test_a_span_that_leads_nowhere_skips_its_kernel(bundle, key, tmp_path):
    """A bundle whose path sentinels are wrong loses that kernel, with the reason; the others are
    restored.
    """
    wrong = forged(
        bundle,
        key,
        lambda artifact, data: (msgspec.structs.replace(artifact, spans=(Span(3, 0, 0),)), data),
    )
    report = bundler.restore(wrong, tmp_path / "there", only="all")
    ((skipped, why),) = report.skipped
    assert (skipped, len(report.restored)) == (key, 21)
    assert why.startswith("no sentinel at offset 3")
    assert not (tmp_path / "there" / key).exists()


def test_a_companion_with_a_wrong_span_is_skipped(planted, tmp_path, key):
    """A tuning file whose path sentinels are wrong is skipped with the reason, and the kernels are
    restored.
    """
    (planted / ("B" * 52)).mkdir()
    (planted / ("B" * 52) / "gelu_kernel.autotune.json").write_text("{}")
    with bundler.pack(planted) as packed:
        (tuning,) = packed.tuning_files
        wrong = msgspec.structs.replace(
            tuning, artifact=msgspec.structs.replace(tuning.artifact, spans=(Span(1, 0, 0),))
        )
        forgery = bundler.Bundle(
            Content.of([*packed.kernels, wrong]), packed.observed, packed.blobs
        )
        report = bundler.restore(forgery, tmp_path / "there", only="all")
    assert report.restored == (key,)
    assert [name for name, _ in report.skipped] == [tuning.path]


@pytest.mark.parametrize("data", [b"{", b"[]", b'{"hash": "00", "name": "gelu_kernel"}'])
def test_a_kernel_that_triton_could_not_read_is_never_published(bundle, key, tmp_path, data):
    """A bundle whose metadata is no metadata, or of another kernel, with a right digest: that
    kernel is skipped, since Triton would fail on it in the user's program.
    """
    artifact = {"digest": digest_text(sha256(data)), "size": len(data), "spans": ()}
    wrong = forged(bundle, key, lambda old, _: (msgspec.structs.replace(old, **artifact), data))
    report = bundler.restore(wrong, tmp_path / "there", only="all")
    assert (len(report.restored), [skipped for skipped, _ in report.skipped]) == (21, [key])
    assert not (tmp_path / "there" / key).exists()


@pytest.mark.parametrize("data", [b"{", b'{"hash": "00", "name": "gelu_kernel"}'])
def test_a_kernel_is_checked_also_where_it_is_present(bundle, key, tmp_path, data):
    """What a restore says is there could be read by Triton from the bundle too: whoever places it
    elsewhere need not ask again.
    """
    artifact = {"digest": digest_text(sha256(data)), "size": len(data), "spans": ()}
    wrong = forged(bundle, key, lambda old, _: (msgspec.structs.replace(old, **artifact), data))
    bundler.restore(bundle, tmp_path / "there", only="all")
    report = bundler.restore(wrong, tmp_path / "there", only="all")
    assert (len(report.present), [skipped for skipped, _ in report.skipped]) == (21, [key])


def test_an_interrupt_leaves_no_temporary(small, tmp_path, monkeypatch):
    """Control-C in the middle of a kernel leaves nothing half-written."""

    def interrupted(*args):
        raise KeyboardInterrupt

    support.write_in_python(monkeypatch)
    monkeypatch.setattr(os, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bundler.restore(small, tmp_path / "there", only="all")
    assert os.listdir(tmp_path / "there") == []
