# SPDX-License-Identifier: Apache-2.0
"""Two environment variables: what one process compiled, the next one finds."""

import json
import subprocess
import sys

import plugged
import pytest

from bundler.toolchain.recording.child_recording import ChildSpool

pytestmark = pytest.mark.toolchain

COMPILE = """
for name in sys.argv[2].split(","):
    compile_one(name)
say(heard)
"""


@pytest.mark.release
def test_a_second_process_compiles_nothing(any_store_url, tmp_path):
    """examples/kernels.py runs again with an empty Triton cache and a ptxas that refuses: every
    kernel is a hit.
    """
    refusing, log = plugged.refusing(tmp_path / "bin")
    reports = []
    for number, more in enumerate(({}, refusing)):
        report = tmp_path / f"report{number}.json"
        env = plugged.environment(
            any_store_url, tmp_path / f"cache{number}", TRITON_BUNDLER_REPORT=report, **more
        )
        program = [
            sys.executable,
            "-P",
            "-W",
            "error::UserWarning:bundler",
            str(plugged.KERNELS),
            "--target",
            "cuda:90",
        ]
        done = subprocess.run(
            program, env=env, capture_output=True, text=True, timeout=plugged.PATIENCE_S
        )
        assert done.returncode == 0, done.stderr
        reports.append(json.loads(report.read_text()))
        numbers = [reports[-1][name] for name in ("hits", "misses", "compiles", "seconds_saved")]
        summary = "triton-bundler: hits {}, misses {}, compiles {}, seconds saved {:.1f}".format(
            *numbers
        )
        # Triton 3.9 gives a warning of its own, for its users.
        ours = [
            line
            for line in done.stderr.splitlines()
            if "bundler" in line and "site-packages/triton" not in line
        ]
        assert ours == [f"{summary}; report in {report}"]
    assert not log.exists(), log.read_text()
    cold, warm = reports
    assert (cold["hits"], cold["compiles"], cold["published"], cold["errors"]) == (0, 11, 11, {})
    assert (warm["found"], warm["misses"], warm["compiles"], warm["errors"]) == (
        {"store": 11},
        0,
        0,
        {},
    )
    assert (cold["hits_of"], len(warm["hits_of"]), set(warm["hits_of"].values())) == ({}, 11, {1})
    assert set(warm["hits_of"]) == {
        path.name for path in (tmp_path / "cache1").iterdir() if len(path.name) == 52
    }
    assert warm["seconds_saved"] == pytest.approx(cold["compile_seconds"])
    assert warm["bytes_fetched"] >= cold["bytes_sent"] > 0


def test_a_kernel_appears_whole_where_triton_looks(store_url, tmp_path):
    """What is fetched is a directory as Triton leaves it: the same files, and a group file that
    names them here.
    """
    plugged.run(COMPILE, plugged.environment(store_url, tmp_path / "a"), "softmax")
    plugged.run(COMPILE, plugged.environment(store_url, tmp_path / "b"), "softmax")
    (here,), (there,) = (list((tmp_path / name).iterdir()) for name in "ab")
    assert here.name == there.name
    assert {path.name for path in here.iterdir()} == {path.name for path in there.iterdir()}
    (group,) = there.glob("__grp__*")
    children = json.loads(group.read_text())["child_paths"]
    assert set(children.values()) == {str(there / name) for name in children}


_BOTH = """
from triton.runtime.cache import FileCacheManager, get_cache_manager
compile_one("gelu")
manager = type(get_cache_manager("ab" * 32))
ours = [one.__name__ for one in manager.__mro__ if one.__module__.startswith("bundler.")]
say([ours, len(manager.sources), issubclass(manager, FileCacheManager), heard])
"""


@pytest.mark.release
def test_a_recording_and_a_session_share_one_manager(store_url, tmp_path, monkeypatch):
    """In a recorded child that has a session one manager has both delegates: what the store has is
    fetched, and recorded as found.
    """
    plugged.run("compile_one('gelu')", plugged.environment(store_url, tmp_path / "a"))
    for name, value in plugged.environment(store_url, tmp_path / "b").items():
        monkeypatch.setenv(name, value)
    with ChildSpool() as spool:
        said, _ = plugged.run(_BOTH, spool.environ())
        assert said[:3] == [
            ["SpoolCacheManager", "DelegatingCacheManager", "LazyFileManager"],
            2,
            True,
        ]
        assert [hit for _, hit in said[3]] == [True]
        (event,) = spool.events()
    assert (event.name, event.cache_hit, event.directory) == (
        "gelu_kernel",
        True,
        str(tmp_path / "b" / event.key),
    )


@pytest.mark.release
def test_a_kernel_is_recorded_and_published_by_one_manager(
    store_url, tmp_path, monkeypatch, recorded
):
    """What such a child compiles is in the recording and in the store."""
    for name, value in plugged.environment(store_url, tmp_path / "b").items():
        monkeypatch.setenv(name, value)
    with ChildSpool() as spool:
        plugged.run("compile_one('gelu')", spool.environ())
        assert [(event.name, event.cache_hit) for event in spool.events()] == [
            ("gelu_kernel", False)
        ]
    assert recorded(store_url) == ["gelu_kernel"]
