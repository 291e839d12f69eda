# SPDX-License-Identifier: Apache-2.0
"""Which store a command works on: a URL, a path, what the environment names, with the password that
it names.
"""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

import bundler

pytestmark = pytest.mark.toolchain


@pytest.fixture
def url(tmp_path):
    """A store that nobody made yet."""
    return f"file://{tmp_path}/store"


@pytest.fixture
def pushed(cli, packed, url):
    """The same store with all kernels under the tag `llama3/h200`."""
    assert cli("push", packed, "--store", url, "--tag", "llama3/h200").exit_code == 0
    return url


def test_every_command_takes_the_store_of_the_environment(cli, packed, url, tmp_path, monkeypatch):
    """With TRITON_BUNDLER_STORE no command needs --store; what --store says wins."""
    monkeypatch.setenv("TRITON_BUNDLER_STORE", url)
    out = tmp_path / "p.tbundle"
    for words in (
        ("push", packed, "--tag", "demo"),
        ("pull", "demo", "-o", out),
        ("tags",),
        ("stats",),
        ("verify",),
        ("prune", "--dry-run"),
        ("restore", "--tag", "demo", "--only", "all"),
        ("restore", "--tag", "demo", "--only", "all", "--check"),
        ("tags", "--delete", "demo"),
    ):
        result = cli(*words)
        assert (result.exit_code, result.stderr) == (0, ""), words
    other = cli("tags", "--store", f"file://{tmp_path}/other")
    assert (other.exit_code, f"no directory {tmp_path}/other" in other.stderr) == (1, True)
    # A bundle that is given is what is meant.
    for words in (("restore", packed, "--only", "all"), ("verify", packed)):
        assert cli(*words).exit_code == 0


def test_build_looks_into_the_store_of_the_environment(cli, packed, url, tmp_path, monkeypatch):
    """Build --check needs no --store where the environment names one."""
    words = ("build", "--from", packed, "--target", "cuda:90", "--check")
    assert "give --store" in cli(*words).stderr
    monkeypatch.setenv("TRITON_BUNDLER_STORE", url)
    assert f"no directory {tmp_path}/store" in cli(*words).stderr


def test_several_stores_of_the_environment(cli, pushed, tmp_path, monkeypatch):
    """They are tiers for a command that reads through them, and a usage error for one that looks
    after a single store.
    """
    monkeypatch.setenv("TRITON_BUNDLER_STORE", f"{tmp_path}/near {pushed}")
    assert "llama3/h200" in cli("tags").stdout
    for words in (("stats",), ("prune",), ("verify",)):
        result = cli(*words)
        assert (result.exit_code, "TRITON_BUNDLER_STORE names 2 stores" in result.stderr) == (
            2,
            True,
        )


def test_a_path_is_a_store(cli, packed, tmp_path, monkeypatch):
    """A directory's path, absolute or from here, is the store that its URL names."""
    monkeypatch.chdir(tmp_path)
    for place in (
        tmp_path / "store",
        "store",
        "./store",
        "../" + tmp_path.name + "/store",
        f"file://{tmp_path}/store",
    ):
        result = cli("push", packed, "--store", place, "--tag", "demo")
        assert (result.exit_code, f"demo in file://{tmp_path}/store is" in result.stdout) == (
            0,
            True,
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store"]
    assert cli("push", packed, "--store", "shared?mode=group", "--tag", "demo").exit_code == 0
    assert (tmp_path / "shared").stat().st_mode & 0o7777 == 0o2770
    monkeypatch.setenv("TRITON_BUNDLER_STORE", str(tmp_path / "store"))
    assert "demo" in cli("tags").stdout


def test_a_digest_may_be_short_and_a_tag_almost_right(cli, cli_json, packed, pushed, tmp_path):
    """Eight digits of a digest name the bundle; for an unknown tag the one that was meant is
    offered, where it is deleted too.
    """
    with bundler.Bundle.load(packed) as bundle:
        digest = bundle.digest
    for name in (digest[:15], digest.removeprefix("sha256:")[:8]):
        assert (
            cli_json("pull", name, "-o", tmp_path / "p", "--store", pushed)[1]["digest"] == digest
        )
        assert (
            cli_json("restore", "--tag", name, "--only", "all", "--store", pushed)[1]["usable"] == 4
        )
    for words in (
        ("pull", "lama3/h200", "-o", tmp_path / "q"),
        ("restore", "--tag", "lama3/h200"),
        ("tags", "--delete", "lama3/h200"),
    ):
        result = cli(*words, "--store", pushed)
        assert (
            result.stderr == f"error: {pushed}: no tag 'lama3/h200'; did you mean 'llama3/h200'?\n"
        )
    result = cli("sync", pushed, tmp_path / "mirror", "--tags", "lama3/h200")
    assert (
        result.stderr
        == f"error: {pushed}: no tag matches lama3/h200; did you mean 'llama3/h200'?\n"
    )


def _redis_server():
    if "redis_server" not in sys.modules:
        path = Path(__file__).parent.parent / "redis_server.py"
        spec = importlib.util.spec_from_file_location("redis_server", path)
        sys.modules["redis_server"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["redis_server"])
    return sys.modules["redis_server"]


def test_the_password_file_works_in_every_command(cli, packed, tmp_path, monkeypatch):
    """With TRITON_BUNDLER_PASSWORD_FILE each command reaches a real Redis that wants a password;
    without it none does.
    """
    server = _redis_server()
    monkeypatch.setenv("TRITON_BUNDLER_TIMEOUT_S", "20")
    with server.running(server.NAMES[0]) as started:
        store = (
            "--store",
            started.url(scheme="redis").replace(f":{server.PASSWORDS['writer']}@", "@"),
        )
        commands = (
            ("push", packed, "--tag", "demo"),
            ("pull", "demo", "-o", tmp_path / "p"),
            ("tags",),
            ("stats",),
            ("verify",),
            ("prune", "--dry-run"),
            ("restore", "--tag", "demo", "--only", "all"),
            ("explain", "--name", "*"),
        )
        for words in commands:
            refused = cli(*words, *store)
            assert (refused.exit_code, refused.stderr.count("redis://")) == (1, 1), words
        (tmp_path / "word").write_text(server.PASSWORDS["writer"] + "\n")
        monkeypatch.setenv("TRITON_BUNDLER_PASSWORD_FILE", str(tmp_path / "word"))
        for words in commands[:-1]:
            result = cli(*words, *store)
            assert (result.exit_code, result.stderr) == (0, ""), words
        asked = cli(*commands[-1], *store)
        assert (
            "redis://" not in asked.stderr
        )  # kernels of the pushed bundle are found by their keys
        with bundler.session(
            store[1], tag="demo", push=None
        ) as session:  # a session is no command, and reads it too
            assert session.counters.errors == {}
        # A password in a URL is for that one.
        assert cli("tags", "--store", started.url(scheme="redis")).exit_code == 0
        with bundler.session(started.url(scheme="redis"), tag="demo", push=None) as session:
            assert session.counters.errors == {}
        monkeypatch.setenv("TRITON_BUNDLER_PASSWORD_FILE", str(tmp_path / "nothing"))
        assert cli("tags", "--store", started.url(scheme="redis")).exit_code == 0


def test_a_url_is_said_once(cli, packed, tmp_path):
    """Whatever is wrong with a store, its URL stands in the error once, and so it does in a tier's
    warning.
    """
    (tmp_path / "file").touch()
    (tmp_path / "open").mkdir(mode=0o777)
    (tmp_path / "open").chmod(0o777)
    for place in (
        "redis://127.0.0.1:1",
        "redis://me:word@127.0.0.1:1/3",
        "redis://host/0?x=1",
        "unix:///nope",
        "rediss://me@host",
        f"file://{tmp_path}/open",
        f"file://{tmp_path}/file",
        f"file://{tmp_path}/nothing",
    ):
        said = cli("tags", "--store", place).stderr
        once = str(tmp_path) if place.startswith("file:") else "://"
        assert (said.count(once), said.count("\n")) == (1, 1), said
    assert cli("push", packed, "--store", tmp_path / "near", "--tag", "demo").exit_code == 0
    warned = cli("tags", "--store", "redis://127.0.0.1:1", "--store", tmp_path / "near").stderr
    assert warned.count("redis://") == 1


def test_unknown_variables_are_named_by_commands_that_read_settings(
    cli, cli_json, pushed, monkeypatch
):
    """One warning names a misspelled variable, in JSON too; a command that reads no settings does
    not mention it.
    """
    monkeypatch.setenv("TRITON_BUNDLER_STROE", "x")
    sentence = (
        "TRITON_BUNDLER_STROE (did you mean TRITON_BUNDLER_STORE?) is no setting of triton-bundler"
        " and changes nothing"
    )
    assert cli("tags", "--store", pushed).stderr == f"warning: {sentence}\n"
    assert cli_json("tags", "--store", pushed)[1]["warnings"] == [sentence]
    assert cli("key", "list").stderr == f"warning: {sentence}\n"
    assert cli("tags", "--help").stderr == ""


def test_messages_use_the_commands_words(cli, cli_json, packed, pushed, tmp_path):
    """What an option does is said as the option: in errors, in reasons, in text and in JSON."""
    other = tmp_path / "other.tbundle"
    with bundler.Bundle.load(packed) as bundle:
        bundle.select(target="cuda:90").save(other)
    refused = cli("push", other, "--store", pushed, "--tag", "llama3/h200", "--mode", "create")
    assert "use --mode merge or --mode replace" in refused.stderr
    empty = cli("restore", packed, "--cache-dir", "")
    assert "--cache-dir is empty; give a directory, or leave it out" in empty.stderr
    folder = tmp_path / "torch"
    (folder / "fxgraph").mkdir(parents=True)
    (folder / "fxgraph" / "graph").write_bytes(b"x")
    (folder / "triton" / "0").mkdir(parents=True)
    bundle = tmp_path / "torch.tbundle"
    assert cli("pack", folder, "-o", bundle).exit_code == 0
    words = ("restore", bundle, "--only", "all", "--cache-dir", tmp_path / "to")
    assert "pass --trust code if you trust who made the bundle" in cli(*words).stdout
    assert "pass --trust code if" in json.dumps(cli_json(*words)[1]["skipped"])
