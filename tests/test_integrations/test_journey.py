# SPDX-License-Identifier: Apache-2.0
"""The way of one kernel key through the cache manager: which modules of ours run for it, and which
are imported at all.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import plugged
import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST_MODULES = 12
# Compiles one kernel, and says which modules of ours have run in `get_group` meanwhile.
_COUNTING = """
from bundler.toolchain.recording.cache_manager import DelegatingCacheManager
ran, get_group = set(), DelegatingCacheManager.get_group

def note(frame, event, _):
    ran.add(frame.f_globals.get("__name__", ""))

def counted(self, filename):
    sys.setprofile(note)
    try:
        return get_group(self, filename)
    finally:
        sys.setprofile(None)

def modules_of(name):
    DelegatingCacheManager.get_group = counted
    ran.clear()
    compile_one(name)
    DelegatingCacheManager.get_group = get_group
    return sorted({module for module in ran if module.startswith("bundler.")})
"""
_FOUND = "compile_one('gelu'); say([modules_of('gelu'), modules_of('softmax')])"
# The session begins with the first kernel; its directory is another one for the second, as Inductor
# sets it for each device.
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
        "compile_one('gelu'); compile_one('softmax')",
        plugged.environment(store_url, tmp_path / "a", **settings),
    )
    return plugged.environment(store_url, tmp_path / "b", **settings)


def _listed():
    """Return the modules that docs/architecture.md lists for the journey of a key."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = text.partition("### The journey of one key")[2].partition("\n## ")[0]
    return {
        f"bundler.{path.replace('/', '.')}"
        for path in re.findall(r"^\| `([a-z_/]+)\.py` \|", table, re.MULTILINE)
    }


@pytest.mark.toolchain
def test_a_kernel_of_the_tag_is_placed_by_the_modules_that_are_documented(tagged, tmp_path):
    """A key that is not in Triton's directory and in the tag goes through twelve modules at most,
    those that the page lists.
    """
    for cache in "cd":  # the second time the tag's kernels are in Triton's directory already
        (modules, hits), _ = plugged.run(_COUNTING + _PLACED, tagged, tmp_path / cache)
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


# What no kernel that is there, and no restore, needs: it would take longer to import than the work
# itself.
_HEAVY = {
    "asyncio",
    "concurrent.futures.thread",
    "ctypes",
    "difflib",
    "filelock",
    "importlib.metadata",
    "multiprocessing",
    "pathlib",
    "shutil",
    "sysconfig",
    "zipfile",
}
_WRITERS = {"bundler.lifecycle.bundle_builder", "bundler.lifecycle.recorder"}
_KEYS = {
    "bundler.toolchain.compile_call",
    "bundler.toolchain.jit_specialization",
    "bundler.toolchain.rekeyed_key",
}
_STORES = {
    "bundler.store.kernel_records",
    "bundler.store.store_urls",
    "bundler.backends.port",
    "bundler.backends.redis",
}
_FORMAT = {"bundler.format.bundle", "bundler.format.manifest", "msgspec", "zstandard"}
_SESSION = {"bundler.integrations.lookup_engine", "bundler.integrations.sessions"}
_NOTHING_MORE = _HEAVY | _WRITERS | _KEYS


def _new_modules(code, *, before=""):
    """Return what a fresh interpreter imports in a piece of code, and not in what comes before."""
    program = (
        f"import sys, json\n{before}\nhad ="
        f" set(sys.modules)\n{code}\nprint(json.dumps(sorted(set(sys.modules) - had)))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env=environment,
        capture_output=True,
        check=True,
        text=True,
    )
    assert done.stderr == ""  # nor says anything at its end
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.toolchain
def test_importing_the_manager_opens_no_store():
    """Triton imports the plug-in for the name of a class: what a session is made of comes with the
    first kernel.
    """
    new = _new_modules(
        "from bundler.integrations.triton import BundlerCacheManager",
        before="import triton.knobs, triton.runtime.cache",
    )
    assert "bundler.toolchain.recording.cache_manager" in new
    assert new & (_NOTHING_MORE | _STORES | _FORMAT | _SESSION) == set()


@pytest.mark.toolchain
def test_a_recording_childs_manager_opens_no_store():
    """A child of a recording has the same manager, and no session."""
    new = _new_modules(
        "from bundler.toolchain.recording.spool_manager import SpoolCacheManager",
        before="import triton.knobs, triton.runtime.cache",
    )
    assert new & (_WRITERS | _KEYS | _STORES | _SESSION) == set()


def test_a_first_restore_imports_no_more_than_it_needs(tmp_path):
    """Loading a bundle and restoring it imports neither writers, keys, stores nor what is slow in
    the standard library.
    """
    bundle = ROOT / "tests" / "data" / "v2.0" / "triton-3.7.1.tbundle"
    new = _new_modules(
        f"import bundler\nwith bundler.Bundle.load({str(bundle)!r}) as b: bundler.restore(b,"
        f" {str(tmp_path)!r}, 'launch', only='all')"
    )
    assert {"bundler.lifecycle.restoration", "bundler.format.bundle"} <= new
    assert os.listdir(tmp_path)
    assert new & (_NOTHING_MORE | _STORES | {"triton", "torch"}) == set()


@pytest.mark.toolchain
def test_a_hit_in_the_tag_imports_neither_locks_nor_writers(store_url, tagged):
    """A session that reads its tag, and finds a kernel there, imports nothing that only a compile
    or a publication needs.
    """
    code = "compile_one('gelu'); say(sorted(sys.modules))"
    found, _ = plugged.run(code, {**tagged, "TRITON_BUNDLER_MODE": "read"})
    assert (
        set(found)
        & {
            *_WRITERS,
            *_KEYS,
            "filelock",
            "bundler.lifecycle.compiled_once",
            "bundler.backends.redis.redis_backend",
        }
        == set()
    )
