# SPDX-License-Identifier: Apache-2.0
"""The way of one kernel key through the cache manager: which modules of ours run for it, and which are imported at all."""

import re
from pathlib import Path

import plugged
import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST_MODULES = 12
# Compiles one kernel, and says which modules of ours have run in `get_group` meanwhile.
_COUNTING = """
from bundler.toolchain.cache_manager import KeptCacheManager
ran, get_group = set(), KeptCacheManager.get_group

def note(frame, event, _):
    ran.add(frame.f_globals.get("__name__", ""))

def counted(self, filename):
    sys.setprofile(note)
    try:
        return get_group(self, filename)
    finally:
        sys.setprofile(None)

def modules_of(name):
    KeptCacheManager.get_group = counted
    ran.clear()
    compile_one(name)
    KeptCacheManager.get_group = get_group
    # Which of the two knows the rows of a manifest depends on its format.
    return sorted({module.replace("content_tables", "content_rows") for module in ran if module.startswith("bundler.")})
"""
_FOUND = "compile_one('gelu'); say([modules_of('gelu'), modules_of('softmax')])"
# The session begins with the first kernel; its directory is another one for the second, as Inductor sets it for each device.
_PLACED = """
compile_one("gelu")
knobs.cache.dir = sys.argv[2]
compile_one("gelu")  # the new directory is looked at once
say([modules_of("softmax"), [hit for _, hit in heard]])
"""


@pytest.fixture
def tagged(store_url, tmp_path):
    """The environment of a process whose kernels are in a tag."""
    settings = {"TRITON_BUNDLER_TAG": "t", "TRITON_BUNDLER_LOCAL": tmp_path / "ours"}
    plugged.run(
        "compile_one('gelu'); compile_one('softmax')", plugged.environment(store_url, tmp_path / "a", **settings)
    )
    return plugged.environment(store_url, tmp_path / "b", **settings)


def _listed():
    """Return the modules that docs/architecture.md lists for the journey of a key."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = text.partition("### The journey of one key")[2].partition("\n## ")[0]
    return {f"bundler.{path.replace('/', '.')}" for path in re.findall(r"^\| `([a-z_/]+)\.py` \|", table, re.MULTILINE)}


@pytest.mark.toolchain
def test_a_kernel_of_the_tag_is_placed_by_the_modules_that_are_documented(tagged, tmp_path):
    """A key that is not in Triton's directory and in the tag goes through twelve modules at most, those that the page lists."""
    (modules, hits), _ = plugged.run(_COUNTING + _PLACED, tagged, tmp_path / "c")
    assert hits == [True] * 3
    assert set(modules) == _listed()
    assert len(modules) <= MOST_MODULES


@pytest.mark.toolchain
def test_a_kernel_that_is_there_goes_through_fewer(tagged):
    """A key in Triton's directory asks for nothing that would place it."""
    (first, second), _ = plugged.run(_COUNTING + _FOUND, tagged)
    assert first == second
    assert set(first) < _listed() | {"bundler.format.bundle_file"}
    assert len(first) <= MOST_MODULES // 2
