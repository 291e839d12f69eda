# SPDX-License-Identifier: Apache-2.0
"""`session`, `install` and `register`: the same in code, with counters, and everything given back at the end."""

import dataclasses

import plugged
import pytest

import bundler

_SESSION = """
import dataclasses
import bundler

with bundler.open_store(sys.argv[2]) as store:
    with bundler.session(store, tag="demo/all") as session:
        store_get = store._backend.get
        def no_network(keys):
            raise AssertionError("asked for a kernel that was prefetched")
        store._backend.get = no_network
        for name in filter(None, sys.argv[3].split(",")):
            compile_one(name)
        store._backend.get = store_get
        for name in sys.argv[4:]:
            compile_one(name)
        during = session.counters
    say({**dataclasses.asdict(session.counters), "during": during.hits, "tags": [[tag.name, tag.kernels] for tag in store.tags()]})
"""


def plain(tmp_path, number, **more):
    """Return an environment without a cache manager and a store."""
    return plugged.environment(
        None, tmp_path / f"cache{number}", TRITON_CACHE_MANAGER=None, TRITON_BUNDLER_LOCAL=tmp_path / "local", **more
    )


@pytest.mark.toolchain
def test_a_session_fetches_its_tag_and_adds_to_it(store_url, tmp_path):
    """A first run makes the tag; a second one finds its kernels without asking the store, and adds what it compiled besides."""
    first, _ = plugged.run(_SESSION, plain(tmp_path, 1), store_url, "", "softmax", "gelu")
    assert (first["found"], first["compiles"], first["published"], first["errors"]) == ({}, 2, 2, {})
    assert first["tags"] == [["demo/all", 2]]
    second, _ = plugged.run(_SESSION, plain(tmp_path, 2), store_url, "softmax,gelu", "row_sum")
    assert (second["found"], second["misses"], second["compiles"]) == ({"tag": 2}, 1, 1)
    assert second["seconds_saved"] == pytest.approx(first["compile_seconds"])
    assert second["tags"] == [["demo/all", 3]]
    with bundler.open_store(store_url) as store, store.pull("demo/all") as bundle:
        assert sorted(kernel.name for kernel in bundle.kernels) == ["gelu_kernel", "row_sum_kernel", "softmax_kernel"]
        assert all(kernel.require_parts().proven and kernel.launch.facts for kernel in bundle.kernels)


_INSTALL = """
import subprocess
import bundler
from triton.runtime.cache import FileCacheManager

class Previous(FileCacheManager):
    made = []
    def __init__(self, key, override=False, dump=False):
        super().__init__(key, override=override, dump=dump)
        Previous.made.append(key)

def raising(**facts):
    heard.append([facts["metadata"]["name"], facts["cache_hit"]])
    raise RuntimeError("the listener's own")

before = dict(os.environ)
session = bundler.install(sys.argv[2])
child = "import importlib.util, sys; spec = importlib.util.spec_from_file_location('kernels', sys.argv[1]); " \\
        "kernels = sys.modules['kernels'] = importlib.util.module_from_spec(spec); spec.loader.exec_module(kernels); " \\
        "kernels.compile_one('gelu', 'cuda:90')"
subprocess.run([sys.executable, "-P", "-c", child, sys.argv[1]], check=True)
session.close()
session.close()
assert dict(os.environ) == before

knobs.cache.manager_class, knobs.compilation.listener = Previous, raising
session = bundler.install(sys.argv[2])
try:
    compile_one("softmax")
except RuntimeError as error:
    assert str(error) == "the listener's own"
assert session.flush(timeout_s=30)
knobs.compilation.listener = None
compile_one("gelu")
session.close()
assert knobs.cache.manager_class is Previous
counters = session.counters
say([dict(counters.found), counters.compiles, len(Previous.made), heard])
"""


@pytest.mark.toolchain
def test_install_reaches_children_and_leaves_everybody_else_working(store_url, tmp_path, recorded):
    """A child's kernel is published; a manager and a listener of the user's work on; closing gives environment and manager back."""
    answer, _ = plugged.run(_INSTALL, plain(tmp_path, 1), store_url)
    # The child filled the directory that this process uses too.
    assert answer == [{"triton": 1}, 1, 2, [["softmax_kernel", False]]]
    assert recorded(store_url) == ["gelu_kernel", "softmax_kernel"]


_REGISTER = """
import subprocess
import bundler

bundler.register(sys.argv[2])
if sys.argv[3] == "child":
    line = [sys.executable, "-P", *sys.orig_argv[sys.orig_argv.index("-c"):-1], "again"]
    subprocess.run(line, check=True)
else:
    compile_one("softmax")
    compile_one("gelu")
    say(heard)
"""


def test_a_library_registers_its_kernels(compiled, tmp_path):
    """Without any store, a process and its child find the kernels of a registered bundle; the file is only read."""
    refusing, log = plugged.refusing(tmp_path / "bin")
    before = compiled.bundle.read_bytes()
    for number, who in enumerate(("itself", "child")):
        answer, err = plugged.run(_REGISTER, plain(tmp_path, number, **refusing), compiled.bundle, who)
        assert answer == [["softmax_kernel", True], ["gelu_kernel", True]]
        assert "BundlerWarning" not in err
    assert not log.exists()
    assert compiled.bundle.read_bytes() == before


def test_counters_do_not_change(tmp_path):
    """Counters are a snapshot; arguments that cannot be used are typed errors, and leave nothing installed."""
    with bundler.install("memory:") as session:
        counters = session.counters
        with pytest.raises(dataclasses.FrozenInstanceError):
            counters.misses = 1
        with pytest.raises(bundler.BundlerError, match="strict='loud'"):
            session.arm_strict("loud")
    for wrong in ({"mode": "both"}, {"strict": "loud"}, {"tag": "no such/ta g"}):
        with pytest.raises(bundler.BundlerError):
            bundler.install(f"file://{tmp_path}/store", **wrong).close()
    with pytest.raises(bundler.errors.NotFound, match="no bundle"):
        bundler.register(tmp_path / "absent.tbundle")
