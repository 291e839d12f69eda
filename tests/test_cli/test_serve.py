# SPDX-License-Identifier: Apache-2.0
"""The commands `serve`, `sync` and `prune --keep-days`, as a user calls them; with kernels that
were compiled.
"""

import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

import bundler


@pytest.fixture
def serving(tmp_path):
    """Return a function that starts `serve` with sources and yields the process and its URL; ended
    with the test.
    """
    started = []

    def start(*sources, options=()):
        words = [
            sys.executable,
            "-m",
            "bundler",
            "serve",
            "--listen",
            "127.0.0.1:0",
            *options,
            *map(str, sources),
        ]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(process)
        said = []
        for line in process.stdout:
            said.append(line.strip())
            if line.startswith("serving at "):
                return process, line.split()[2], said
        raise AssertionError(process.stderr.read())

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_bundle_and_a_cache_directory_are_served(packed, serving, cli, cli_json, tmp_path):
    """Both are one store for who reads it; SIGTERM ends it with status 0 and a line that counts."""
    assert cli("restore", packed, "--cache-dir", tmp_path / "cache", "--only", "all").exit_code == 0
    process, url, said = serving(packed, tmp_path / "cache")
    assert said[0] == f"{packed} as {packed.stem}"
    with bundler.Bundle.load(packed) as bundle:
        status, found = cli_json(
            "pull", packed.stem, "-o", tmp_path / "again.tbundle", "--store", f"tb+{url}"
        )
        assert (status, found["digest"]) == (0, bundle.digest)
        # The cache directory holds the same kernels, so that nothing is held twice.
        status, found = cli_json("stats", "--store", f"tb+{url}")
        assert (found["manifests"], found["tags"]) == (1, 1)
    with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
        assert answer.read() == b"ok\n"
    process.send_signal(signal.SIGTERM)
    out, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (0, "")
    assert out.startswith("served ")


def test_a_restore_asks_peers_of_the_environment(packed, cli, cli_json, tmp_path, monkeypatch):
    """The replica's kernels come from the peer: the far store's own are gone, and only its tag and
    manifest are needed.
    """
    far = f"file://{tmp_path}/far"
    assert cli("push", packed, "--store", far, "--tag", "demo").exit_code == 0
    for unit in (tmp_path / "far" / "data" / "v1" / "u").rglob("*"):
        if unit.is_file():
            unit.unlink()
    words = (
        "restore",
        "--tag",
        "demo",
        "--store",
        far,
        "--only",
        "all",
        "--cache-dir",
        tmp_path / "c",
    )
    with bundler.Bundle.load(packed) as bundle, bundler.open_store("memory:") as store:
        store.push(bundle)
        with store.serve("127.0.0.1:0") as server:
            monkeypatch.setenv("TRITON_BUNDLER_PEERS", server.url)
            status, found = cli_json(*words)
        assert (status, len(found["restored"])) == (0, len(bundle.kernels))


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--listen", "nowhere", "."], 1, "expected HOST:PORT"),
        (
            ["--listen", "127.0.0.1:0", "no-such-file"],
            1,
            "there is no bundle, cache directory or store",
        ),
        (["--listen", "127.0.0.1:0", "."], 1, "no kernels in"),
        (["--listen", "127.0.0.1:0", "ftp://host/x"], 1, "not a store"),
        (["--listen", "127.0.0.1:0"], 2, "SOURCE"),
        (["."], 2, "--listen"),
    ],
)
def test_what_cannot_be_served(cli, tmp_path, monkeypatch, words, status, said):
    """Each is one line that names it."""
    monkeypatch.chdir(tmp_path)
    result = cli("serve", *words)
    assert (result.exit_code, said in result.stderr) == (status, True), result.stderr


@pytest.mark.slow
def test_serve_ends_although_a_client_hangs(packed, serving):
    """A client that asks for nothing keeps nobody, and one that takes an answer slowly no longer
    than --drain: then the status is 1.
    """
    for sent, status in ((b"", 0), (b"POST /objects HTTP/1.1\r\nContent-Length: 9\r\n\r\n", 1)):
        process, url, _ = serving(packed, options=["--drain", "1s"])
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as client:
            client.sendall(sent)
            time.sleep(0.2)
            started = time.monotonic()
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=20)
        assert process.returncode == status
        assert time.monotonic() - started < 5


def test_sync_moves_what_is_missing(packed, cli, cli_json, tmp_path):
    """The first run moves, the second finds all there, `--dry-run` and `--delete-tags` do what they
    say.
    """
    source, target = tmp_path / "source", tmp_path / "target"
    for tag in ("demo", "other/x"):
        assert cli("push", packed, "--store", source, "--tag", tag).exit_code == 0
    dry = cli("sync", source, target, "--tags", "other/*", "--dry-run")
    assert dry.exit_code == 0
    assert dry.stdout.startswith("would move  other/x: ")
    assert "would be as in" in dry.stdout
    assert "moved" not in dry.stdout
    first = cli("sync", source, target)
    assert first.stdout.startswith("moved    demo, other/x: ")
    assert f"2 tags of file://{target} are as in file://{source}" in first.stdout
    second = cli("sync", source, target)
    assert second.stdout.startswith("moved  nothing, all of it was there\nkept   demo, other/x\n")
    again = cli("sync", source, target, "--dry-run").stdout
    assert again.startswith("would move  nothing, all of it is there\nwould keep  demo, other/x\n")
    assert cli("tags", "--store", source, "--delete", "demo").exit_code == 0
    status, found = cli_json("sync", source, target, "--delete-tags")
    assert (status, found["deleted"], found["kept"], found["ok"]) == (
        0,
        ["demo"],
        ["other/x"],
        True,
    )


def test_sync_says_what_failed(packed, cli, tmp_path):
    """A tag whose unit is gone is named with its reason, and the status is 1; so is a source that
    is not there.
    """
    source, target = tmp_path / "source", tmp_path / "target"
    assert cli("push", packed, "--store", source, "--tag", "demo").exit_code == 0
    next(
        path for path in sorted((source / "data" / "v1" / "u").rglob("*")) if path.is_file()
    ).unlink()
    result = cli("sync", source, target)
    assert result.exit_code == 1
    assert "error: tag demo: " in result.stderr
    assert "is missing; push the bundle again" in result.stderr
    result = cli("sync", tmp_path / "none", target)
    assert (result.exit_code, "there is no store at this place" in result.stderr) == (1, True)


def test_prune_keeps_days(packed, cli, cli_json, tmp_path):
    """`--keep-days` spares what is younger, as `--older-than` does; both at once are a
    usage error.
    """
    store = tmp_path / "store"
    assert cli("push", packed, "--store", store, "--tag", "demo").exit_code == 0
    assert cli("tags", "--store", store, "--delete", "demo").exit_code == 0
    words = ("prune", "--store", store, "--grace", "0")
    status, found = cli_json(*words, "--keep-days", "2")
    assert (status, found["removed"], found["held"][0]["by"]) == (0, [], "older_than")
    assert cli(*words, "--keep-days", "2", "--older-than", "1d").exit_code == 2
    result = cli("prune", "--store", f"{store}?readonly=1", "--grace", "0")
    assert (result.exit_code, "it is only read here" in result.stderr) == (1, True)
    status, found = cli_json(*words, "--keep-days", "0")
    assert found["kept_bytes"] == 0
