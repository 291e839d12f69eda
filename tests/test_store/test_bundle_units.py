# SPDX-License-Identifier: Apache-2.0
"""The units of a bundle that is pulled: launch sets at once, the others when somebody needs
them.
"""

import oracle
import pytest
import store_builders as build

from bundler.format.manifest import Content
from bundler.store import blob_source
from bundler.store.blob_source import BundleUnits, StoreBlobs
from bundler.store.store_layout import units_of


@pytest.fixture
def content():
    """As it is decoded: three kernels, two of which share a file, and a tuning file."""
    files = build.Files()
    same = {"k.llir": b"the same"}
    (key,) = oracle.real_keys("A")
    entries = [files.kernel("A", extra=same), files.kernel("B", extra=same), files.kernel("C")]
    plain = files.bundle(*entries, files.tuning(f"{key}/1.autotune.json", b"{}")).content
    return plain, Content.decode(plain.encode())


def test_the_units_are_those_of_the_content(content):
    """The launch sets first, and each unit with the family that it has elsewhere, whether kernels
    were decoded or made.
    """
    for one in content:
        units = BundleUnits(one)
        expected = [(unit.key, unit.family) for unit in units_of(one)]
        assert sorted((unit.key, unit.family) for unit in units.all()) == sorted(expected)
        assert [unit.key for unit in units.launch] == [
            key for key, family in expected if family.endswith("/launch")
        ]
        assert list(units.all()[: len(units.launch)]) == list(units.launch)
        assert units.all() is units.all()


def test_the_others_are_made_when_a_blob_of_theirs_is_asked_for(content, memory, monkeypatch):
    """A restore of launch sets makes none of them; each blob of the bundle is found all the
    same.
    """
    plain, decoded = content
    made = []
    monkeypatch.setattr(
        blob_source, "units_of", lambda *args, **how: made.append(how) or units_of(*args, **how)
    )
    units = BundleUnits(decoded)
    blobs = StoreBlobs(memory._backend, units, memory._limits)
    launched = {digest for unit in units.launch for digest, _ in unit.blobs}
    assert {unit.key for unit in units.launch} == blobs._lacking(launched).keys()
    assert made == []
    every = {digest for digest, _ in plain.blobs}
    assert {digest for unit in blobs._lacking(every).values() for digest, _ in unit.blobs} == every
    assert made == [{"launch": False}]
