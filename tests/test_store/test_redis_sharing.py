# SPDX-License-Identifier: Apache-2.0
"""Two processes, one Redis: what one compiled and pushed, the other restores and launches without a
compiler.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import redis_server

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs" / "cluster.md"


@pytest.fixture
def server():
    """A server of this test's own."""
    with redis_server.running(redis_server.NAMES[0]) as started:
        yield started


def command(*words):
    """Run triton-bundler in a process of its own; returns what it says as JSON."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "bundler", *map(str, words), "--json"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.mark.toolchain
def test_pushed_in_one_process_and_restored_in_another(server, compiled, tmp_path):
    """A writer pushes, a reader restores by tag with its password in a file, and a process without
    a compiler hits every kernel.
    """
    support = _support()
    urls = {}
    for user in ("writer", "reader"):
        (tmp_path / user).write_text(redis_server.PASSWORDS[user])
        # A machine that runs the whole suite may be slower than the limits for real work.
        settings = f"password_file={tmp_path / user}&timeout_s=20&connect_timeout_s=20"
        urls[user] = f"redis://{user}@127.0.0.1:{server.port}?{settings}"
    pushed = command("push", compiled.bundle, "--store", urls["writer"], "--tag", "demo/all")
    assert pushed["blobs_sent"] > 0
    cache = tmp_path / "there"
    words = ("--tag", "demo/all", "--store", urls["reader"], "--only", "all", "--cache-dir", cache)
    restored = command("restore", *words)
    assert restored["usable"] == len(compiled.keys)
    assert support.hits_without_compiler(cache, tmp_path) == (len(compiled.keys), 0)
    again = command("restore", *words)
    assert again["usable"] == len(compiled.keys)
    assert again["restored"] == []


def _support():
    spec = importlib.util.spec_from_file_location(
        "support", HERE.parent / "test_lifecycle" / "support.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_tells_every_setting_and_its_default():
    """docs/cluster.md lists the settings that there are, with their defaults."""
    from bundler.backends.redis import url_settings

    rows = [
        line.split("|")[1:3] for line in DOCS.read_text().splitlines() if line.startswith("| `")
    ]
    told = {
        name.strip(" `"): default.strip()
        for names, default in rows
        for name in names.split(",")
        if "://" not in names
    }
    assert url_settings._RULES.keys() <= told.keys()
    defaults = {
        "db": 0,
        "namespace": "`tb`",
        "ttl_s": "2592000 (30 days)",
        "connect_timeout_s": 0.25,
        "timeout_s": 0.25,
    }
    assert {name: told[name] for name in defaults} == {
        name: str(value) for name, value in defaults.items()
    }
    assert (url_settings.DEFAULT_TTL_S, url_settings.DEFAULT_NAMESPACE) == (2592000, "tb")
    assert (url_settings.DEFAULT_CONNECT_TIMEOUT_S, url_settings.DEFAULT_TIMEOUT_S) == (0.25, 0.25)
    users = {name.strip(" `") for name, _ in rows} & set(redis_server.PASSWORDS)
    assert users == set(redis_server.PASSWORDS)
