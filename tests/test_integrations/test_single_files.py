# SPDX-License-Identifier: Apache-2.0
"""Files that belong to no kernel travel too: libraries that Triton builds with a C compiler, and
results of its tuner.
"""

import shutil
from pathlib import Path

import plugged
import pytest

import bundler
from bundler.errors import UnsafeName
from bundler.format.bundle import MemoryBlobs
from bundler.format.digest import digest_text, sha256
from bundler.format.entries import Artifact, HelperLibrary
from bundler.format.manifest import Content, Observed
from bundler.toolchain import helper_libraries, identity
from bundler.toolchain.events import kernel_key

pytestmark = pytest.mark.toolchain

_LIBRARY = """
from triton.runtime.build import compile_module_from_src

SOURCE = '''
#include <Python.h>
static PyObject *answer(PyObject *self, PyObject *args) { return PyLong_FromLong(42); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, 0}, {0}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "helper", 0, -1, methods};
PyMODINIT_FUNC PyInit_helper(void) { return PyModule_Create(&definition); }
'''
include_dirs = [sys.argv[2]]
try:
    say(compile_module_from_src(SOURCE, "helper", include_dirs=include_dirs).answer())
except Exception as error:
    say(type(error).__name__)
"""


@pytest.mark.release
@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no gcc to build a library with")
def test_a_library_is_built_once_and_loaded_only_with_trust(store_url, tmp_path):
    """Without a compiler, with another include directory, it is found by what it is built of;
    without trust it is not.
    """
    built, _ = plugged.run(
        _LIBRARY, plugged.environment(store_url, tmp_path / "a"), tmp_path / "include a"
    )
    assert built == 42
    without, tried = plugged.failing_compiler(tmp_path / "bin")
    env = plugged.environment(store_url, tmp_path / "b", **without)
    assert plugged.run(_LIBRARY, env, tmp_path / "include b")[0] == "CalledProcessError"
    assert tried.exists()
    tried.unlink()
    trusting = plugged.environment(
        store_url, tmp_path / "c", TRITON_BUNDLER_TRUST="code", **without
    )
    assert plugged.run(_LIBRARY, trusting, tmp_path / "include b")[0] == 42
    assert not tried.exists()


_TUNE = """
import math
from triton.runtime.driver import driver

class Driver:
    def get_current_target(self):
        return triton.backends.compiler.GPUTarget("cuda", 90, 32)

driver.set_active(Driver())

def tuner(**more):
    configs = [triton.Config({"BLOCK": block}, **more) for block in (16, 32)]
    return triton.runtime.Autotuner(kernels.softmax_kernel, ["n"], configs, ["n"], None, None, cache_results=True)

def time_it(one):
    def bench():
        timed.append(one)
        one.configs_timings = dict(zip(one.configs, ([1.0, 2.0], [math.inf])))
        one.cache[("key",)] = one.configs[0]
    one.check_disk_cache(("key",), one.configs, bench)
    return str(one.cache[("key",)])

timed = []
saved, hooked = tuner(), tuner(pre_hook=lambda args: None)
best = [time_it(saved), time_it(hooked)]
say([len(timed), timed[-1] is hooked, best])
"""


def test_results_of_the_tuner_travel(store_url, tmp_path):
    """A second process does not time again, though a timing is Infinity; that Triton writes none
    with a pre_hook is reported.
    """
    answers = []
    for number in range(2):
        report = tmp_path / f"report{number}.json"
        env = plugged.environment(
            store_url, tmp_path / f"cache{number}", TRITON_BUNDLER_REPORT=report
        )
        answers.append(plugged.run(_TUNE, env)[0])
        assert '"tuning_not_saved": [\n    "softmax_kernel"\n  ]' in report.read_text()
    (first, _, best), (second, only_hooked, same) = answers
    assert (first, second, only_hooked) == (2, 1, True)
    assert best == same


def pushed(cache, store_url):
    """Push what a Triton directory holds, as an operator would who packs an image."""
    with bundler.open_store(store_url) as store, bundler.pack(cache) as bundle:
        store.push(bundle, "from-a-directory")


def test_results_of_the_tuner_in_a_pushed_bundle_are_found(store_url, tmp_path):
    """No tag is named, and the first machine had no store."""
    cache = tmp_path / "cache0"
    alone = plugged.environment(None, cache, TRITON_CACHE_MANAGER=None)
    (first, _, best), _ = plugged.run(_TUNE, alone)
    pushed(cache, store_url)
    env = plugged.environment(store_url, tmp_path / "cache1")
    (second, only_hooked, same), _ = plugged.run(_TUNE, env)
    assert (first, second, only_hooked) == (2, 1, True)
    assert best == same


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no gcc to build a library with")
def test_a_library_in_a_pushed_bundle_is_found_with_trust(store_url, tmp_path):
    """By its place, which is the same where the machine is: a bundle does not say what it was built
    of.
    """
    cache, include = tmp_path / "a", tmp_path / "include"
    alone = plugged.environment(None, cache, TRITON_CACHE_MANAGER=None)
    assert plugged.run(_LIBRARY, alone, include)[0] == 42
    pushed(cache, store_url)
    without, tried = plugged.failing_compiler(tmp_path / "bin")
    env = plugged.environment(store_url, tmp_path / "b", **without)
    assert plugged.run(_LIBRARY, env, include)[0] == "CalledProcessError"
    tried.unlink()
    trusting = plugged.environment(
        store_url, tmp_path / "c", TRITON_BUNDLER_TRUST="code", **without
    )
    assert plugged.run(_LIBRARY, trusting, include)[0] == 42
    assert not tried.exists()


def test_a_name_that_is_no_file_is_refused(store_url):
    """Nothing is stored under a name that could leave its directory; what is damaged is a miss."""
    with bundler.open_store(store_url) as store:
        files = store.file_records()
        with pytest.raises(UnsafeName):
            files.publish("file x", "../escape", b"")
        assert files.look_up("file x") is None
        assert files.publish("file x", "x.autotune.json", b"{}")
        assert not files.publish("file x", "x.autotune.json", b"other")
        assert files.look_up("file x") == b"{}"
    (stored,) = [
        path for path in (store_path(store_url)).rglob("*") if path.is_file() and "/s/" in str(path)
    ]
    stored.write_bytes(stored.read_bytes()[:-1])
    with bundler.open_store(store_url) as store:
        assert store.file_records().look_up("file x") is None


def store_path(url):
    """Return the directory of a store."""
    return Path(url.removeprefix("file://"))


@pytest.fixture
def key_by_triton(monkeypatch):
    """Return a function that has Triton's own build compute the key of cuda_utils; directories are
    those of no machine.
    """
    from triton.backends.nvidia import driver
    from triton.runtime import build

    asked = []
    source = Path(driver.dirname, "driver.c").read_text()
    monkeypatch.setattr(driver, "library_dirs", lambda: ["/opt/lib"])
    places = {
        "library_dirs": ["/opt/lib"],
        "include_dirs": driver.include_dirs,
        "libraries": driver.libraries,
    }

    class Asked(Exception):
        pass

    def note(key):
        asked.append(key)
        raise Asked

    monkeypatch.setattr(build, "get_cache_manager", note)

    def key():
        build.platform_key.cache_clear()
        with pytest.raises(Asked):
            build.compile_module_from_src(source, "cuda_utils", **places)
        return kernel_key(asked[-1])

    yield key
    build.platform_key.cache_clear()


@pytest.mark.skipif(shutil.which("file") is None, reason="there is no program `file` to do without")
def test_a_restored_library_is_found_where_the_program_file_is_missing(
    key_by_triton, monkeypatch, tmp_path
):
    """cuda_utils of a bundle is put under each key that Triton's own build may ask for here, and
    only if the source is the same.
    """
    filename, release = (
        f"cuda_utils{identity.extension_suffix()}",
        identity.installed_triton().release,
    )
    with_file = key_by_triton()
    monkeypatch.setenv("PATH", str(tmp_path))
    without = key_by_triton()
    assert with_file != without
    assert helper_libraries.other_keys(with_file, filename, release) == {without}
    assert helper_libraries.other_keys(without, filename, release) == {with_file}
    assert helper_libraries.other_keys("A" * 52, filename, "1.0") == frozenset()
    assert helper_libraries.other_keys(with_file, "other.so", release) == frozenset()
    library = Artifact(filename, digest_text(sha256(b"library")), len(b"library"))
    entry = HelperLibrary(f"{with_file}/{filename}", library, identity.machine())
    with bundler.Bundle(
        Content.of([entry]), Observed({}), MemoryBlobs({sha256(b"library"): b"library"})
    ) as bundle:
        report = bundler.restore(bundle, tmp_path / "cache", trust="code")
    keys = {with_file, *helper_libraries.other_keys(with_file, filename, None)}
    assert set(report.companions) == {f"{key}/{filename}" for key in keys}
