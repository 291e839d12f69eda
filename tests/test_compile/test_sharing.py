# SPDX-License-Identifier: Apache-2.0
"""A service whose compiles go through a store: what is there is not compiled, and what is compiled
is there for others.
"""

import json

import pytest
from service_work import job

from bundler import Bundle, open_store
from bundler.compile.bundle_build import SharedCompiles
from bundler.errors import CompileFailed

RESULT_S = 30


@pytest.fixture
def store(tmp_path):
    """A store in a directory."""
    with open_store(f"file://{tmp_path}/store") as opened:
        yield opened


@pytest.fixture
def keys(compiled):
    """Keys of three kernels that were compiled before."""
    return compiled.keys[:3]


@pytest.fixture
def copies(compiled, keys):
    """Jobs whose workers take kernels that were compiled before, as if they compiled them."""
    return [job(f"copy {compiled.cache} {key}", key=key) for key in keys]


@pytest.fixture
def other_service(service, store, tmp_path):
    """Return a service on another machine: with a cache directory of its own, and the same
    store.
    """

    def make(name):
        folder = tmp_path / name
        folder.mkdir()
        shared = SharedCompiles(store, folder)
        return service(cache_dir=folder, once=shared), shared

    return make


def is_whole(folder, key):
    """Tell whether Triton would find the kernel: its group file names files that are there."""
    (group,) = (folder / key).glob("__grp__*.json")
    paths = json.loads(group.read_text())["child_paths"]
    return bool(paths) and all((folder / key / name).samefile(path) for name, path in paths.items())


def test_what_one_machine_compiled_another_gets(other_service, copies, keys, tmp_path):
    """Kernels that were compiled on one machine come from the store on the next, whole and with
    their facts.
    """
    one, _ = other_service("one")
    made = one.compile_all(copies)
    assert [kernel.key for kernel in made] == keys
    two, _ = other_service("two")
    given = two.compile_all(copies)
    assert [(kernel.key, kernel.hit) for kernel in given] == [(key, True) for key in keys]
    assert (two.counters.hits, two.counters.compiled, two.processes()) == (3, 0, ())
    assert not (tmp_path / "two" / "starts").exists()
    assert all(is_whole(tmp_path / "two", key) for key in keys)


def test_what_a_store_has_comes_in_one_go(other_service, copies, keys, store, compiled, tmp_path):
    """`fetch` places the kernels that the store holds, with what was recorded of them; the rest is
    compiled and published.
    """
    with Bundle.load(compiled.bundle) as bundle:
        store.kernel_records().publish(bundle.select(names="*"))
        facts = {kernel.key: (kernel.facts_bytes, kernel.parts_bytes) for kernel in bundle.kernels}
    service, shared = other_service("one")
    assert shared.fetch([*copies, job("no key")]) == {*keys}
    found = service.compile_all(copies)
    assert [(one.facts, one.parts) for one in found] == [facts[key] for key in keys]
    assert (service.counters.hits, not (tmp_path / "one" / "starts").exists()) == (3, True)


def test_a_job_without_a_known_key_is_compiled_here(other_service):
    """What has no key yet cannot be looked up, and is compiled."""
    service, _ = other_service("one")
    assert service.submit(job("echo x")).result(RESULT_S).key == "x"


def test_a_failed_compile_is_the_jobs_failure(other_service, keys):
    """What the worker's compiler says is raised as without a store."""
    service, _ = other_service("one")
    with pytest.raises(CompileFailed, match="fail here: ValueError: here"):
        service.submit(job("fail here", key=keys[0])).result(RESULT_S)
