# SPDX-License-Identifier: Apache-2.0
"""Whatever is wrong with a store or a directory, the program compiles as without us, and is told
once.
"""

import dataclasses
import json
import re
import socket

import msgspec
import plugged
import pytest

import bundler
from bundler.format.bundle import MemoryBlobs
from bundler.format.digest import digest_text, sha256
from bundler.format.manifest import Content

COMPILE = """
for name in sys.argv[2].split(","):
    compile_one(name)
say(heard)
"""
SOFTMAX = [["softmax_kernel", False]]


def warnings_in(err):
    """Return the texts of our warnings on standard error."""
    return re.findall(r"BundlerWarning: (.*)", err)


def report_of(path):
    return json.loads(path.read_text())


# What is wrong -> (store, other settings, what the warning says)
_WRONG = {
    "no URL": ("nonsense", {}, "not a store"),
    "no store": (None, {}, "TRITON_BUNDLER_STORE is not set"),
    "nobody there": ("redis://127.0.0.1:1", {}, "redis://127.0.0.1:1"),
    "no directory": ("file:///proc/nobody/store", {}, "/proc/nobody/store"),
    "wrong mode": (
        "file://{tmp}/s",
        {"TRITON_BUNDLER_MODE": "both"},
        "TRITON_BUNDLER_MODE='both': expected one of readwrite",
    ),
    "wrong time": (
        "file://{tmp}/s",
        {"TRITON_BUNDLER_TIMEOUT_S": "-1"},
        "TRITON_BUNDLER_TIMEOUT_S='-1': expected seconds",
    ),
    "wrong tag": ("file://{tmp}/s", {"TRITON_BUNDLER_TAG": "no tag"}, "not a tag: 'no tag'"),
    "two managers": (
        "file://{tmp}/s",
        {"TRITON_REMOTE_CACHE_BACKEND": "a:B"},
        "TRITON_REMOTE_CACHE_BACKEND is set",
    ),
    "unknown setting": (
        "file://{tmp}/s",
        {"TRITON_BUNDLER_STROE": "x"},
        "TRITON_BUNDLER_STROE (did you mean TRITON_BUNDLER_STORE?) is no setting",
    ),
    "no bundle": (
        "file://{tmp}/s2",
        {"TRITON_BUNDLER_REGISTERED": "/proc/version"},
        "/proc/version",
    ),
}


@pytest.mark.slow
def test_the_program_is_told_once_and_goes_on(tmp_path):
    """Whatever is wrong, both kernels are compiled, with one warning that names it."""
    cases = [
        {
            "TRITON_CACHE_MANAGER": plugged.MANAGER,
            "TRITON_CACHE_DIR": tmp_path / name,
            **more,
            "TRITON_BUNDLER_STORE": store and store.format(tmp=tmp_path),
        }
        for name, (store, more, _) in _WRONG.items()
    ]
    code = 'sys.argv[2] = "softmax,histogram"\n' + COMPILE
    for (name, (_, _, told)), (answer, err) in zip(
        _WRONG.items(), plugged.run_forks(code, cases, tmp_path / "f"), strict=True
    ):
        assert [kernel for kernel, _ in answer] == ["softmax_kernel", "histogram_kernel"]
        (warning,) = warnings_in(err)
        assert told in warning, name
        assert warning.endswith("the program goes on without it")


@pytest.mark.slow
def test_a_server_that_never_answers_costs_little(tmp_path):
    """It is asked until it has cost its second, and then left alone; kernels are compiled, and the
    near store has them.
    """
    report = tmp_path / "report.json"
    with socket.create_server(("127.0.0.1", 0), backlog=100) as silent:
        far = f"redis://127.0.0.1:{silent.getsockname()[1]}"
        env = plugged.environment(
            f"file://{tmp_path}/near {far}", tmp_path / "cache", TRITON_BUNDLER_REPORT=report
        )
        answer, err = plugged.run(COMPILE, env, "softmax,gelu,cumsum,row_sum")
        told = report_of(report)
        again, _ = plugged.run(
            COMPILE,
            env | {"TRITON_CACHE_DIR": str(tmp_path / "other")},
            "softmax,gelu,cumsum,row_sum",
        )
    assert [hit for _, hit in answer] == [False] * 4
    _, remote = told["tiers"]
    assert remote["timeouts"] + remote["errors"] <= 3
    assert remote["rested"] > 0
    assert len(warnings_in(err)) <= 2
    assert [hit for _, hit in again] == [True] * 4


# What each process does with Triton's directory before it compiles.
_READ_ONLY = """
root = os.environ["TRITON_CACHE_DIR"]
makedirs, access = os.makedirs, os.access
def refuse(path, *args, **kwargs):
    if str(path).startswith(root) and not os.path.isdir(path):
        raise OSError(30, "Read-only file system", path)
    return makedirs(path, *args, **kwargs)
os.makedirs = refuse
os.access = lambda path, *args, **kwargs: not str(path).startswith(root) and access(path, *args, **kwargs)
"""
_DAMAGE = """
import glob
def spoil(pattern, how):
    (path,) = glob.glob(os.path.join(os.environ["TRITON_CACHE_DIR"], "[A-Z2-7]*", pattern))
    os.unlink(path) if how == "remove" else open(path, "w").close()
if "DAMAGE" in os.environ:
    spoil(*os.environ["DAMAGE"].split())
"""
_NAMED = """
for name in os.environ["NAMES"].split():
    compile_one(name)
say([heard, sorted(os.listdir(os.environ["TRITON_CACHE_DIR"])) if os.path.isdir(os.environ["TRITON_CACHE_DIR"]) else None])
"""


@pytest.fixture
def case(store_url, tmp_path):
    """Return a function that returns the environment of one process."""

    def case(names, cache, **more):
        return {
            "NAMES": names,
            "TRITON_CACHE_MANAGER": plugged.MANAGER,
            "TRITON_BUNDLER_STORE": store_url,
            "TRITON_CACHE_DIR": cache,
            "TRITON_BUNDLER_LOCAL": tmp_path / "local",
            **more,
        }

    return case


def test_directories_that_cannot_be_written(case, tmp_path):
    """Kernels go to our directory, said once, where the next process finds them; what was there
    before is read, and no directory made.
    """
    nobody, empty = "/proc/nobody/cache", f"file://{tmp_path}/empty"
    cases = [
        case("softmax histogram", nobody),
        case("softmax", nobody, TRITON_BUNDLER_STORE=empty),
        case("softmax", tmp_path / "cache"),
        case("softmax gelu", tmp_path / "cache", TRITON_BUNDLER_STORE=empty, READ_ONLY=1),
    ]
    code = f"if 'READ_ONLY' in os.environ:\n    exec({_READ_ONLY!r})\n{_NAMED}"
    first, again, filled, read = plugged.run_forks(code, cases, tmp_path / "f")
    assert first[0] == [[["softmax_kernel", False], ["histogram_kernel", False]], None]
    (warning,) = warnings_in(first[1])
    told = f"/proc/nobody/cache cannot be written, kernels go to {tmp_path}/local/kernels"
    assert warning.endswith(told)  # and nothing is lost
    assert again[0] == [[["softmax_kernel", True]], None]
    assert filled[0][0] == [["softmax_kernel", True]]
    assert read[0] == [[["softmax_kernel", True], ["gelu_kernel", False]], filled[0][1]]
    assert len(list((tmp_path / "local" / "kernels").iterdir())) == 3


@pytest.mark.toolchain
def test_broken_directories_are_mended_from_the_store(case, tmp_path):
    """Where Triton alone would fail, launch nothing, or compile again, the kernel is fetched;
    switched off, the store is left alone.
    """
    cases = [
        case("softmax", tmp_path / "cache"),
        *(
            case("softmax", tmp_path / "cache", DAMAGE=damage)
            for damage in ("*.cubin remove", "*.cubin empty", "__grp__* empty")
        ),
        case("softmax", tmp_path / "other", TRITON_BUNDLER_DISABLE=1),
    ]
    answers = [
        answer[0] for answer, _ in plugged.run_forks(_DAMAGE + _NAMED, cases, tmp_path / "f")
    ]
    assert answers == [[["softmax_kernel", hit]] for hit in (False, True, True, True, False)]


def _spoil(url):
    """Replace the one record of a store by one whose metadata Triton could not read."""
    with bundler.open_store(url) as store:
        records = store.kernel_records()
        (kernel,) = records.recorded(10)
        with records.look_up([kernel.key]).bundle as bundle:
            blobs = {sha256(data): data for data in map(bundle.read, kernel.artifacts)}
            bad = b'{"name": "softmax_kernel"}'
            blobs[sha256(bad)] = bad
            metadata = msgspec.structs.replace(
                kernel.metadata, digest=digest_text(sha256(bad)), size=len(bad), spans=()
            )
            others = [artifact for artifact in kernel.artifacts if artifact.kind != "json"]
            other = dataclasses.replace(kernel, artifacts=(*others, metadata))
            records.remove([kernel.key])
            records.publish(
                bundler.Bundle(Content.of([other]), bundle.observed, MemoryBlobs(blobs))
            )


def test_a_kernel_that_triton_could_not_read_is_compiled_and_replaced(store_url, tmp_path):
    """A record with metadata of nothing is told of, removed, and published anew by who
    compiles it.
    """
    plugged.run(COMPILE, plugged.environment(store_url, tmp_path / "a"), "softmax")
    _spoil(store_url)
    answer, err = plugged.run(COMPILE, plugged.environment(store_url, tmp_path / "b"), "softmax")
    assert answer == SOFTMAX
    (warning,) = warnings_in(err)
    assert "of the store cannot be used: softmax_kernel.json is not valid metadata" in warning
    answer, err = plugged.run(COMPILE, plugged.environment(store_url, tmp_path / "c"), "softmax")
    assert (answer, warnings_in(err)) == ([["softmax_kernel", True]], [])
