# SPDX-License-Identifier: Apache-2.0
"""A command that made nothing writes and publishes nothing, and an empty bundle is used for nothing
unless that is asked for.
"""

import json
from pathlib import Path

import pytest

import bundler
from bundler.errors import EmptyBundle
from bundler.format.bundle import Bundle, MemoryBlobs
from bundler.format.manifest import Content, Observed

GOLDEN = Path(__file__).parents[1] / "data"
KEY = "A" * 52


@pytest.fixture
def empty(tmp_path):
    """A bundle file with nothing in it, as 0.1.0 wrote it after a failed build."""
    path = tmp_path / "empty.tbundle"
    Bundle(Content(), Observed(), MemoryBlobs({})).save(path)
    return path


@pytest.fixture
def good(tmp_path):
    """A file that was there before, which no failure may cost."""
    path = tmp_path / "good.tbundle"
    path.write_bytes(b"what was there")
    return path


@pytest.fixture
def url(tmp_path):
    """A store in which `before` names an empty bundle, since somebody wanted that."""
    with bundler.open_store(f"file://{tmp_path}/store") as store:
        store.push(Bundle(Content(), Observed(), MemoryBlobs({})), "before", allow_empty=True)
    return f"file://{tmp_path}/store"


def broken_cache(folder):
    """Make a cache directory of one kernel directory with nothing of a kernel in it."""
    (folder / "cache" / KEY).mkdir(parents=True)
    return folder / "cache"


def unwritten(cli, output, *words):
    """Run a command that fails; returns what it says, after a look that the file is what it was."""
    result = cli(*words)
    assert (result.exit_code, output.read_bytes()) == (1, b"what was there"), result.output
    return result.stderr


def test_an_empty_bundle_is_not_pushed(cli, cli_json, empty, url):
    """Push refuses it and leaves the tag alone; with --allow-empty it is pushed."""
    words = ("push", empty, "--store", url, "--tag")
    refused = cli(*words, "t")
    assert (refused.exit_code, "--allow-empty" in refused.stderr) == (1, True)
    status, told = cli_json(*words, "t")
    assert (status, told["error"]["code"]) == (1, "empty")
    with bundler.open_store(url) as store:
        assert [tag.name for tag in store.tags()] == ["before"]
    assert cli(*words, "t", "--allow-empty").exit_code == 0
    with bundler.open_store(url) as store:
        assert [tag.name for tag in store.tags()] == ["before", "t"]


@pytest.mark.parametrize("check", [(), ("--check",)])
def test_an_empty_bundle_is_not_restored(cli, empty, url, tmp_path, check):
    """By file and by tag restore refuses it, and --check says so before; --allow-empty takes it for
    fine.
    """
    for source in ((empty,), ("--tag", "before", "--store", url)):
        words = ("restore", *source, "--cache-dir", tmp_path / "cache", *check)
        refused = cli(*words)
        assert (refused.exit_code, "the bundle is empty" in refused.stderr) == (1, True)
        assert cli(*words, "--allow-empty").exit_code == 0


def test_code_is_refused_as_the_command_is(empty, url, tmp_path):
    """`restore`, `check` and a store's `push` and `restore` raise `EmptyBundle`, and do not with
    `allow_empty`.
    """
    with Bundle.load(empty) as bundle, bundler.open_store(url) as store:
        for call in (
            lambda **more: bundler.restore(bundle, tmp_path / "cache", **more),
            lambda **more: bundler.check(bundle, tmp_path / "cache", **more),
            lambda **more: store.restore("before", cache_dir=tmp_path / "cache", **more),
            lambda **more: store.push(bundle, "before", "replace", **more),
        ):
            with pytest.raises(EmptyBundle):
                call()
            call(allow_empty=True)


def test_pack_of_broken_kernels_alone_writes_nothing(cli, cli_json, good, tmp_path):
    """Where nothing could be taken, the reasons are told and the file stays."""
    cache = broken_cache(tmp_path)
    assert "good.tbundle was not written" in unwritten(cli, good, "pack", cache, "-o", good)
    status, told = cli_json("pack", cache, "-o", good)
    assert (status, [name for name, _ in told["error"]["left_out"]]) == (1, [KEY])


def test_merge_and_pull_of_nothing_write_nothing(cli, empty, url, good):
    """A union of empty bundles is no bundle, and neither is what an empty tag names."""
    assert "is empty" in unwritten(cli, good, "merge", empty, empty, "-o", good)
    assert "is empty" in unwritten(cli, good, "pull", "before", "-o", good, "--store", url)


def test_tuning_records_that_are_not_there_write_nothing(cli, empty, good, packed):
    """Import and export without a record say so: also into a bundle, which would only be copied."""
    for words in (
        ("import", empty),
        ("import", empty, "--into", packed),
        ("export", empty, "--as", "winners"),
        ("export", packed, "--as", "winners"),
        ("export", empty),
    ):
        assert "no tuning record" in unwritten(cli, good, "tune", *words, "-o", good)


def test_records_alone_are_something(cli, tmp_path):
    """A bundle of tuning records and no kernel is not empty: it is made, pushed and restored."""
    table = {
        "tuning": [{"kernel": "k", "parts": [["arguments", "n"]], "config": {"kwargs": {"B": 1}}}]
    }
    (tmp_path / "t.json").write_text(json.dumps(table))
    out, store = tmp_path / "t.tbundle", f"file://{tmp_path}/store"
    for words in (
        ("tune", "import", tmp_path / "t.json", "-o", out),
        ("push", out, "--store", store, "--tag", "t"),
        ("restore", out, "--cache-dir", tmp_path / "cache"),
    ):
        assert cli(*words).exit_code == 0


def test_a_command_that_compiled_nothing_writes_no_bundle(command, good):
    """`run` of a program without a kernel keeps the file that is there."""
    done = command("run", "-o", good, "--", "true")
    assert (done.returncode, good.read_bytes()) == (1, b"what was there"), done.stderr


def test_a_session_that_compiled_nothing_is_no_error(url, tmp_path, monkeypatch, recwarn):
    """A session whose tag names nothing, and that compiles nothing, says that the tag is new, and
    does not touch it.
    """
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_BUNDLER_LOCAL", str(tmp_path / "local"))
    with bundler.open_store(url) as store:
        before = store.tags()
        with bundler.session(store, tag="before") as session:
            pass
        assert (session.counters.errors, store.tags()) == ({}, before)
        with bundler.session(store, tag="new"):
            pass
        assert store.tags() == before
    (said,) = (str(warning.message) for warning in recwarn)
    assert said.startswith("tag 'new' is not in ")
