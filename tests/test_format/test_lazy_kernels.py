# SPDX-License-Identifier: Apache-2.0
"""A kernel of a loaded bundle is like any other, and makes only what it is asked for."""

import copy
import pickle
from dataclasses import replace

import pytest

from bundler.format.bundle import Bundle
from bundler.format.bundle_union import diff, merge
from bundler.format.digest import digest_raw
from bundler.format.entries import Kernel, check_kernel
from bundler.format.keyparts import KeyParts
from bundler.format.launch_spec import LaunchFacts
from bundler.format.lazy_kernel import LazyKernel, blobs_of_files
from bundler.format.manifest import Observation, Observed
from bundler.format.sentinel import Span

MADE_LATER = {"artifacts", "spec", "facts_bytes", "parts_bytes"}


@pytest.fixture
def bundle(build):
    """A bundle in memory with facts, path sentinels and files in every order."""
    files = build.Files()
    parts = KeyParts((("a", "1"), ("b", "2")), True).to_bytes()
    path = b'{"name": "k", "num_warps": 4, "shared": 0, "x": "[[cache_dir]]"}'
    kernels = [
        files.kernel(
            "A",
            facts_bytes=build.facts(),
            parts_bytes=parts,
            extra={"k.source": b"s", "k.dat": b"d"},
        ),
        files.kernel("B", "other", facts_bytes=build.facts(), metadata={"name": "entry"}),
        files.kernel("C"),
    ]
    marked = files.add("k.json", path, spans=[Span(path.index(b"[["), 0, 0)])
    kernels[2] = replace(kernels[2], artifacts=(*kernels[2].artifacts[:-1], marked))
    seen = Observed({build.key("A"): Observation((0,), ("triton",), (("ttir", 1),))})
    return files.bundle(*kernels, observed=seen)


@pytest.fixture
def loaded(bundle):
    """The same, loaded."""
    with Bundle.from_bytes(bundle.to_bytes()) as opened:
        yield opened


def test_a_loaded_kernel_makes_nothing_before_it_is_asked(loaded):
    """Loading makes neither artifacts nor launch specs, and joins no facts."""
    for kernel in loaded.kernels:
        assert isinstance(kernel, LazyKernel)
        assert not MADE_LATER & vars(kernel).keys()


def test_a_loaded_kernel_equals_the_one_that_was_saved(bundle, loaded):
    """In both directions, as a member of sets and dictionaries, and field by field."""
    for mine, theirs in zip(bundle.kernels, loaded.kernels, strict=True):
        assert mine == theirs
        assert theirs == mine
        assert {mine: 1}[theirs] == 1
        assert mine in loaded
        for name in (
            "artifacts",
            "spec",
            "launch",
            "parts",
            "facts_bytes",
            "parts_bytes",
            "size",
            "files_digest",
            "layout",
        ):
            assert getattr(mine, name) == getattr(theirs, name)
        assert mine != replace(mine, name="another")
        assert theirs != replace(theirs, facts_bytes=b"\x90")
        assert theirs != theirs.key


def test_its_files_are_those_of_its_artifacts(bundle, loaded):
    """`files` yields them in Triton's order, with raw digests, from both kinds of kernel, and makes
    no artifact.
    """
    for mine, theirs in zip(bundle.kernels, loaded.kernels, strict=True):
        for keep, artifacts in (("all", mine.artifacts), ("launch", mine.launch_set)):
            wanted = [(a.filename, digest_raw(a.digest), a.size, a.spans) for a in artifacts]
            assert list(mine.files(keep)) == list(theirs.files(keep)) == wanted
        assert not MADE_LATER & vars(theirs).keys()
        assert theirs.layout.binary == [a.filename for a in mine.artifacts].index(
            mine.binary.filename
        )
    assert any(spans for kernel in loaded.kernels for *_, spans in kernel.files())


def test_replacing_a_field_gives_a_plain_kernel(loaded):
    """What `dataclasses.replace` makes has fields of its own, and the files that it was given."""
    kernel = loaded.kernels[0]
    other = replace(kernel, artifacts=kernel.launch_set)
    assert type(other) is Kernel
    assert [name for name, *_ in other.files()] == [
        artifact.filename for artifact in kernel.launch_set
    ]
    assert check_kernel(other) is other


def test_a_selection_stays_lazy(loaded):
    """The launch set alone, with everything else as it was, undecoded."""
    for kernel, whole in zip(loaded.select(keep="launch").kernels, loaded.kernels, strict=True):
        assert not {"spec", "facts_bytes", "parts_bytes"} & vars(kernel).keys()
        assert kernel == replace(whole, artifacts=whole.launch_set)
        assert [name for name, *_ in kernel.files()] == [a.filename for a in whole.launch_set]
        assert kernel.size == sum(artifact.size for artifact in whole.launch_set)
        assert len(kernel.layout.order) == 2


def test_copies_and_pickles_are_plain_kernels(loaded):
    """A kernel may go to another process, without its manifest."""
    for kernel in loaded.kernels:
        for other in (copy.copy(kernel), copy.deepcopy(kernel), pickle.loads(pickle.dumps(kernel))):
            assert type(other) is Kernel
            assert other == kernel


def test_facts_and_parts_are_decoded_only_when_asked_for(bundle, loaded, monkeypatch):
    """Comparing, selecting, merging, saving and listing never decode launch facts or key parts."""

    def fail(data):
        raise AssertionError("decoded")

    monkeypatch.setattr(LaunchFacts, "from_bytes", staticmethod(fail))
    monkeypatch.setattr(KeyParts, "from_bytes", staticmethod(fail))
    assert not diff(bundle, loaded)
    assert merge([loaded, bundle]).digest == merge([loaded]).digest == bundle.digest
    assert loaded.select(names="k").to_bytes()
    assert loaded.to_bytes() == bundle.to_bytes()
    assert repr(loaded.kernels)
    with pytest.raises(AssertionError, match="decoded"):
        _ = loaded.kernels[0].launch


def test_verifying_keeps_nothing_decoded(loaded):
    """Of a hundred thousand kernels the decoded facts and parts would take gigabytes."""
    loaded.verify()
    for kernel in loaded.kernels:
        assert not {"launch", "parts", "facts_bytes", "parts_bytes"} & vars(kernel).keys()


def test_blobs_are_those_of_the_files(loaded):
    """A store lists digests and sizes without making an artifact of each file; a kernel with other
    files has those of these.
    """
    for kernel in loaded.kernels:
        found = list(blobs_of_files(kernel))
        assert "artifacts" not in vars(kernel)
        assert found == [(digest_raw(one.digest), one.size) for one in kernel.artifacts]
        fewer = kernel.with_artifacts(kernel.launch_set)
        assert list(blobs_of_files(fewer)) == [
            (digest_raw(one.digest), one.size) for one in kernel.launch_set
        ]
        assert list(blobs_of_files(replace(kernel))) == found
