# SPDX-License-Identifier: Apache-2.0
"""Kernels whose bytes in the bundle are damaged: whoever compares the digests, they are left out,
named, and nothing of them is seen.
"""

import dataclasses
import os

import msgspec
import pytest
import support

import bundler
from bundler.format.bundle import MemoryBlobs
from bundler.format.digest import digest_raw, digest_text, sha256
from bundler.format.manifest import Content
from bundler.lifecycle import kernel_writer
from bundler.lifecycle.cache_directory import CacheDirectory, PlacementQueue
from bundler.lifecycle.kernel_placement import Placement, localized, planned, read

FILES = {"k.ttir": b"module", "k.cubin": b"\x7fELF", "k.json": b"{}"}


@pytest.fixture(params=["compiled", "plain", "python"])
def way(request, monkeypatch):
    """The extension, the extension where it found no SHA-256, or Python."""
    if request.param == "python":
        support.write_in_python(monkeypatch)
        return
    extension = pytest.importorskip(
        "bundler.lifecycle._kernel_writer", reason="the extension was not built here"
    )
    if request.param == "plain":
        monkeypatch.setattr(extension, "COMPARES_DIGESTS", 0)


def blobs_of(bundle):
    """Digest -> bytes of everything in a bundle."""
    return {
        digest_raw(a.digest): bundle.read(a) for kernel in bundle.kernels for a in kernel.artifacts
    }


def changed(bundle, *artifacts):
    """A bundle in which these files have other bytes of the same length."""
    blobs = blobs_of(bundle)
    for artifact in artifacts:
        data = blobs[digest_raw(artifact.digest)]
        blobs[digest_raw(artifact.digest)] = data[:-1] + bytes([data[-1] ^ 1])
    return bundler.Bundle(bundle.content, bundle.observed, MemoryBlobs(blobs))


@pytest.mark.parametrize("kind", ["cubin", "ptx", "json", "llir"])
def test_a_damaged_file_costs_its_kernel_and_no_other(bundle, key, tmp_path, way, kind):
    """Whichever file it is: the report names the kernel, the file and both digests, and the other
    kernels are there whole.
    """
    (victim,) = [kernel for kernel in bundle.kernels if kernel.key == key]
    (artifact,) = [artifact for artifact in victim.artifacts if artifact.kind == kind]
    report = bundler.restore(changed(bundle, artifact), tmp_path / "there", only="all")
    assert report.damaged == (key,)
    ((name, reason),) = report.skipped
    assert (
        name,
        reason.startswith(f"{artifact.filename}: expected {artifact.digest}, got sha256:"),
    ) == (key, True)
    assert len(report.restored) == 21
    assert sorted(os.listdir(tmp_path / "there")) == sorted(report.restored)
    assert all(support.is_whole(path) for path in (tmp_path / "there").iterdir())


def test_only_what_is_wanted_is_compared(bundle, key, tmp_path, way):
    """Of the launch set nobody reads the intermediate code, damaged or not."""
    (victim,) = [kernel for kernel in bundle.kernels if kernel.key == key]
    damaged = changed(
        bundle, *[artifact for artifact in victim.artifacts if artifact.kind == "ptx"]
    )
    report = bundler.restore(damaged, tmp_path / "there", keep="launch", only="all")
    assert (report.damaged, len(report.restored)) == ((), 22)


def test_a_kernel_that_is_there_already_does_not_hide_the_damage(bundle, key, tmp_path, way):
    """Its bytes are compared with their digests before they are compared with what is there, which
    stays.
    """
    bundler.restore(bundle, tmp_path / "there", only="all")
    before = support.tree(tmp_path / "there")
    (victim,) = [kernel for kernel in bundle.kernels if kernel.key == key]
    report = bundler.restore(changed(bundle, victim.binary), tmp_path / "there", only="all")
    assert (report.damaged, len(report.present)) == ((key,), 21)
    assert support.tree(tmp_path / "there") == before


def test_every_kernel_may_be_damaged(bundle, tmp_path, way):
    with pytest.warns(
        bundler.errors.BundlerWarning, match="nothing in this bundle can be used here"
    ):
        report = bundler.restore(
            changed(bundle, *[kernel.binary for kernel in bundle.kernels]),
            tmp_path / "there",
            only="all",
        )
    assert (len(report.damaged), report.usable, os.listdir(tmp_path / "there")) == (22, 0, [])


def test_a_binary_that_lost_its_end_is_refused(bundle, key, tmp_path, way):
    """Its digest is right, since it was packed so: its headers say that there was more."""
    blobs, kernels = blobs_of(bundle), []
    for kernel in bundle.kernels:
        if kernel.key == key:
            data = blobs[digest_raw(kernel.binary.digest)][:-8]
            blobs[sha256(data)] = data
            short = msgspec.structs.replace(
                kernel.binary, digest=digest_text(sha256(data)), size=len(data)
            )
            kernels.append(
                dataclasses.replace(
                    kernel,
                    artifacts=tuple(
                        short if a.filename == short.filename else a for a in kernel.artifacts
                    ),
                )
            )
        else:
            kernels.append(kernel)
    torn = bundler.Bundle(Content.of(kernels), bundle.observed, MemoryBlobs(blobs))
    report = bundler.restore(torn, tmp_path / "there", only="all")
    assert report.skipped == ((key, "gelu_kernel.cubin is truncated"),)
    assert not (tmp_path / "there" / key).exists()
    assert len(report.restored) == 21


def test_damage_shows_as_well_when_the_digest_fits_the_first_look(tmp_path, monkeypatch, way):
    """Memory that changes under the writer is not written, and the error tells so."""
    contents = tuple(FILES.values())
    sound = Placement(
        "K",
        tuple(FILES),
        tuple(map(sha256, contents)),
        sum(map(len, contents)),
        contents=contents,
        checked=True,
    )
    monkeypatch.setattr(
        kernel_writer,
        "compiled_writer",
        lambda: lambda _root, kernels, _threads: lambda: [kernel_writer.DAMAGED] * len(kernels),
    )
    queue = PlacementQueue(MemoryBlobs({}))
    queue.add(CacheDirectory(str(tmp_path / "there")), sound)
    queue.finish()
    ((key, reason),) = queue.skipped
    assert (key, queue.damaged) == ("K", ["K"])
    assert "changed in memory" in reason
    assert os.listdir(tmp_path / "there") == []


@pytest.mark.parametrize("kept_in", ["file", "memory", "verified memory", "store"])
def test_each_file_is_compared_once(small, tmp_path, kept_in):
    """The one who writes compares what nobody has compared before: bytes in memory that were
    compared already are left alone.
    """
    blobs = blobs_of(small)
    with bundler.open_store(f"file://{tmp_path}/store") as store:
        store.push(small, "t")
        small.save(tmp_path / "file.tbundle")
        sources = {
            "file": lambda: bundler.Bundle.load(tmp_path / "file.tbundle").blobs,
            "memory": lambda: MemoryBlobs(blobs),
            "verified memory": lambda: MemoryBlobs(blobs, verified=True),
            "store": lambda: store.pull("t").blobs,
        }
        kernel = planned(small.kernels[0], "all")
        read(sources[kept_in](), [kernel])
        kernel = localized(kernel, str(tmp_path / "there"), None)
        left = kernel.new_kernel("tmp", "")[4]
    assert bool(left) == (kept_in != "verified memory")
    assert set(left) <= set(blobs)
