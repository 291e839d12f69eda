# SPDX-License-Identifier: Apache-2.0
"""`session`, `install` and `register`: the same in code, with counters, and everything given back
at the end.
"""

import dataclasses
import warnings

import plugged
import pytest

import bundler
from bundler.format.bundle import MemoryBlobs
from bundler.format.manifest import Content, Observed
from bundler.integrations.kernel_lookup import RegisteredBundles, SessionOptions
from bundler.integrations.lookup_engine import Engine

_SESSION = """
import dataclasses
import bundler

with bundler.open_store(sys.argv[2]) as store:
    with bundler.session(store, tag="demo/all") as session:
        store_get = store._backend.inner.get
        def no_network(keys):
            raise AssertionError("asked for a kernel that was prefetched")
        store._backend.inner.get = no_network
        for name in filter(None, sys.argv[3].split(",")):
            compile_one(name)
        store._backend.inner.get = store_get
        for name in sys.argv[4:]:
            compile_one(name)
        during = session.counters
    say({**dataclasses.asdict(session.counters), "during": during.hits, "tags": [[tag.name, tag.kernels] for tag in store.tags()]})
"""


def plain(tmp_path, number, **more):
    """Return an environment without a cache manager and a store."""
    return plugged.environment(
        None,
        tmp_path / f"cache{number}",
        TRITON_CACHE_MANAGER=None,
        TRITON_BUNDLER_LOCAL=tmp_path / "local",
        **more,
    )


@pytest.mark.toolchain
def test_a_session_fetches_its_tag_and_adds_to_it(store_url, tmp_path):
    """A first run makes the tag; a second one finds its kernels without asking the store, and adds
    what it compiled besides.
    """
    first, told = plugged.run(_SESSION, plain(tmp_path, 1), store_url, "", "softmax", "gelu")
    assert f"tag 'demo/all' is not in {store_url} yet: this session makes it at its end\n" in told
    assert (first["found"], first["compiles"], first["published"], first["errors"]) == (
        {},
        2,
        2,
        {},
    )
    assert first["tags"] == [["demo/all", 2]]
    second, told = plugged.run(_SESSION, plain(tmp_path, 2), store_url, "softmax,gelu", "row_sum")
    assert "demo/all" not in told
    assert (second["found"], second["misses"], second["compiles"]) == ({"tag": 2}, 1, 1)
    assert second["seconds_saved"] == pytest.approx(first["compile_seconds"])
    assert second["tags"] == [["demo/all", 3]]
    with bundler.open_store(store_url) as store, store.pull("demo/all") as bundle:
        assert sorted(kernel.name for kernel in bundle.kernels) == [
            "gelu_kernel",
            "row_sum_kernel",
            "softmax_kernel",
        ]
        assert all(
            kernel.require_parts().proven and kernel.launch.facts for kernel in bundle.kernels
        )


@pytest.mark.parametrize(
    ("options", "then"),
    [
        ({}, "this session makes it at its end"),
        ({"mode": "write"}, "this session makes it at its end"),
        ({"mode": "read"}, "nothing is fetched"),
        ({"push": None}, "nothing is fetched"),
    ],
)
def test_a_tag_that_is_not_there_is_said(tmp_path, monkeypatch, options, then):
    """A session that finds no such tag says so once, with those that are called almost so, and it
    is never an error.
    """
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    with bundler.open_store("memory:") as store:
        store.push(
            bundler.Bundle(Content(), Observed(), MemoryBlobs({})), "llama3/h200", allow_empty=True
        )
        engine = Engine(
            store,
            SessionOptions(tag="lama3/h200", local=str(tmp_path), **options),
            RegisteredBundles(),
        )
        with pytest.warns(bundler.BundlerWarning) as warned:
            engine.start()
        assert [str(warning.message) for warning in warned] == [
            f"tag 'lama3/h200' is not in {store.name} yet: {then}; did you mean 'llama3/h200'?"
        ]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            engine.start()
            with warnings.catch_warnings(record=True) as none:
                Engine(
                    store,
                    SessionOptions(tag="llama3/h200", local=str(tmp_path), **options),
                    RegisteredBundles(),
                ).start()
    assert (none, engine.tally.snapshot().errors) == ([], {})


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
    """A child's kernel is published; a manager and a listener of the user's work on; closing gives
    environment and manager back.
    """
    answer, _ = plugged.run(_INSTALL, plain(tmp_path, 1), store_url)
    # The child filled the directory that this process uses too.
    assert answer == [{"triton": 1}, 1, 2, [["softmax_kernel", False]]]
    assert recorded(store_url) == ["gelu_kernel", "softmax_kernel"]


_OVERLAPPING = """
import subprocess
import bundler

def compile_in_child(name):
    code = "import importlib.util, sys; spec = importlib.util.spec_from_file_location('kernels', sys.argv[1]); " \\
           "kernels = sys.modules['kernels'] = importlib.util.module_from_spec(spec); spec.loader.exec_module(kernels); " \\
           f"kernels.compile_one({name!r}, 'cuda:90')"
    subprocess.run([sys.executable, "-P", "-c", code, sys.argv[1]], check=True)

before = dict(os.environ)
first = bundler.install(sys.argv[2])
compile_one("gelu")
second = bundler.install(sys.argv[3])
compile_one("softmax")
first.close()
compile_one("row_sum")
compile_in_child("layer_norm")
assert os.environ["TRITON_BUNDLER_STORE"] == sys.argv[3]
second.close()
assert dict(os.environ) == before
assert "manager_class" not in vars(knobs.cache)
compile_one("cumsum")
say([first.counters.compiles, second.counters.compiles])
"""


@pytest.mark.toolchain
def test_sessions_that_overlap_lose_nothing(tmp_path, recorded):
    """The first of two sessions ends first: what each compiled is in its store, the other goes on,
    here and in children, and in the end everything is given back.
    """
    stores = [f"file://{tmp_path}/{name}" for name in ("first", "second")]
    answer, err = plugged.run(_OVERLAPPING, plain(tmp_path, 1), *stores)
    assert answer == [1, 2]
    assert "BundlerWarning" not in err
    assert [recorded(url) for url in stores] == [
        ["gelu_kernel"],
        ["layer_norm_kernel", "row_sum_kernel", "softmax_kernel"],
    ]


_ENDING = """
import bundler
from triton.runtime.cache import FileCacheManager

class Ending(FileCacheManager):
    # The manager behind ours: closes the sessions that it is told to, while Triton compiles.
    to_close = []
    def put(self, *args, **kwargs):
        while Ending.to_close:
            Ending.to_close.pop().close()
        return super().put(*args, **kwargs)

knobs.cache.manager_class = Ending
outer = bundler.install(sys.argv[2])
inner = bundler.install(sys.argv[3])
Ending.to_close = [inner]
compile_one("gelu")
Ending.to_close = [outer]
compile_one("softmax")
assert knobs.cache.manager_class is Ending
say([inner.counters.compiles, outer.counters.compiles])
"""


@pytest.mark.toolchain
def test_a_session_that_ends_during_a_compile(tmp_path, recorded):
    """Its kernel is published by the session that goes on; with none left, the compile ends as
    without us, and nobody is warned.
    """
    stores = [f"file://{tmp_path}/{name}" for name in ("outer", "inner")]
    answer, err = plugged.run(_ENDING, plain(tmp_path, 1), *stores)
    assert answer == [0, 1]
    assert "BundlerWarning" not in err
    with bundler.open_store(stores[0]) as store:
        assert [kernel.name for kernel in store.kernel_records().recorded(10)] == ["gelu_kernel"]


def test_a_manager_in_the_environment_stays_behind_a_session_without_urls(tmp_path, monkeypatch):
    """A store in memory, which children cannot open, is put in front of the manager that the
    environment names.
    """
    pytest.importorskip("triton")
    from triton import knobs
    from triton.runtime.cache import RemoteCacheManager

    monkeypatch.setenv("TRITON_CACHE_MANAGER", "triton.runtime.cache:RemoteCacheManager")
    first, second = bundler.install("memory:"), bundler.install("memory:")
    first.close()
    assert issubclass(knobs.cache.manager_class, RemoteCacheManager)
    assert knobs.cache.manager_class is not RemoteCacheManager
    second.close()
    assert knobs.cache.manager_class is RemoteCacheManager


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
    """Without any store, a process and its child find the kernels of a registered bundle; the file
    is only read.
    """
    refusing, log = plugged.refusing(tmp_path / "bin")
    before = compiled.bundle.read_bytes()
    for number, who in enumerate(("itself", "child")):
        answer, err = plugged.run(
            _REGISTER, plain(tmp_path, number, **refusing), compiled.bundle, who
        )
        assert answer == [["softmax_kernel", True], ["gelu_kernel", True]]
        assert "BundlerWarning" not in err
    assert not log.exists()
    assert compiled.bundle.read_bytes() == before


def test_counters_do_not_change(tmp_path):
    """Counters are a snapshot; arguments that cannot be used are typed errors, and leave nothing
    installed.
    """
    with bundler.install("memory:") as session:
        counters = session.counters
        with pytest.raises(dataclasses.FrozenInstanceError):
            counters.misses = 1
        with pytest.raises(bundler.BundlerError, match="strict='loud'"):
            session.arm_strict("loud")
    for wrong in ({"mode": "both"}, {"strict": "loud"}, {"tag": "no such/ta g"}):
        with pytest.raises(bundler.BundlerError):
            bundler.install(f"file://{tmp_path}/store", **wrong).close()
    with pytest.warns(bundler.BundlerWarning, match="no bundle .*absent"):
        bundler.register(tmp_path / "absent.tbundle")
    bundler.register(
        tmp_path / "absent.tbundle"
    )  # once is enough: a second warning would be an error


def test_a_store_that_was_opened_for_reading_is_as_in_mode_read(tmp_path, monkeypatch):
    """It is asked for no lease, and no tag is pushed to it: neither is worth a warning, at a miss
    or at the end.
    """
    monkeypatch.setenv("TRITON_BUNDLER_LOCAL", str(tmp_path / "local"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    bundle = bundler.Bundle(Content.of([]), Observed(), MemoryBlobs({}))
    with bundler.open_store(f"file://{tmp_path}/store") as writable:
        writable.push(bundle, "t", allow_empty=True)
        assert writable.writable
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with bundler.open_store(f"file://{tmp_path}/store?readonly=1") as store:
            assert not store.writable
            with bundler.session(store, "t") as session:
                engine = session._engine
                turn = engine._may_take_turn("A" * 52)
                assert engine._sources.find("A" * 52, turn=turn) is None
                assert (turn, engine.used) == (False, None)
    assert session.counters.errors == {}
