# SPDX-License-Identifier: Apache-2.0
"""Bundles through several stores at once: `--store` given more than once, the nearest first."""

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import pytest

import bundler

HERE = Path(__file__).parent


def _redis_server():
    if "redis_server" not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            "redis_server", HERE.parent / "redis_server.py"
        )
        sys.modules["redis_server"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["redis_server"])
    return sys.modules["redis_server"]


@pytest.fixture
def near(tmp_path):
    return f"file://{tmp_path}/near"


@pytest.fixture
def far(tmp_path):
    return f"file://{tmp_path}/far"


@pytest.fixture
def pushed(cli, packed, far):
    """The far store with all kernels under the tag `demo`."""
    assert cli("push", packed, "--store", far, "--tag", "demo").exit_code == 0
    return far


def files(root):
    return (
        {str(path): path.lstat().st_mtime_ns for path in root.rglob("*")} if root.exists() else None
    )


def test_a_push_to_tiers_is_in_each(cli_json, packed, near, far, tmp_path):
    """What is pushed to two stores can be pulled from either alone."""
    status, report = cli_json("push", packed, "--store", near, "--store", far, "--tag", "demo")
    assert (status, report["store"]) == (0, f"{near} + {far}")
    for number, url in enumerate((near, far)):
        status, pulled = cli_json(
            "pull", "demo", "-o", tmp_path / f"{number}.tbundle", "--store", url
        )
        assert (status, pulled["digest"]) == (0, report["digest"])


def test_a_restore_through_tiers_fills_the_near_one(cli_json, pushed, near, tmp_path):
    """Restored by tag from far, the kernels are near afterwards, and are restored from there when
    far is gone.
    """
    words = ("restore", "--tag", "demo", "--only", "all", "--store", near)
    status, report = cli_json(*words, "--store", pushed, "--cache-dir", tmp_path / "one")
    assert (status, report["store"]) == (0, f"{near} + {pushed}")
    shutil.rmtree(tmp_path / "far")
    status, again = cli_json(*words, "--cache-dir", tmp_path / "two")
    assert (status, again["usable"]) == (0, report["usable"])


def test_check_writes_to_no_tier(cli, pushed, near, tmp_path):
    """`--check` only looks: no near tier is made, and the far one is as it was."""
    before = files(tmp_path / "far")
    words = (
        "restore",
        "--check",
        "--only",
        "all",
        "--tag",
        "demo",
        "--store",
        near,
        "--store",
        pushed,
    )
    assert cli(*words, "--cache-dir", tmp_path / "cache").exit_code == 1
    assert files(tmp_path / "near") is None
    assert files(tmp_path / "far") == before


def test_tags_of_tiers_are_those_of_the_shared_one(cli_json, pushed, near):
    """Listing and removing a tag happens where all share it."""
    stores = ("--store", near, "--store", pushed)
    assert [tag["name"] for tag in cli_json("tags", *stores)[1]["tags"]] == ["demo"]
    assert cli_json("tags", *stores, "--delete", "demo")[1]["deleted"] == "demo"
    assert cli_json("tags", "--store", pushed)[1]["tags"] == []


def test_a_base_is_left_as_it_is(cli, pushed, near, packed, tmp_path):
    """A store with ?readonly=1 can be read and not pushed to."""
    before = files(tmp_path / "far")
    assert (
        cli(
            "push", packed, "--store", near, "--store", f"{pushed}?readonly=1", "--tag", "new"
        ).exit_code
        == 0
    )
    result = cli("push", packed, "--store", f"{pushed}?readonly=1", "--tag", "new")
    assert (result.exit_code, "reading only" in result.stderr) == (1, True)
    assert files(tmp_path / "far") == before


@pytest.mark.parametrize("command", [("stats",), ("prune",), ("verify",)])
def test_tiers_are_looked_after_one_by_one(cli, pushed, near, command):
    """What is done to a whole store says that it takes one, rather than take the last of
    several.
    """
    result = cli(*command, "--store", near, "--store", pushed)
    assert result.exit_code == 2
    assert "expected one store, got 2" in result.stderr


def test_the_farthest_store_must_be_there(cli, near, pushed, tmp_path):
    """A wrong path of the shared store is an error, not an empty store; a near one is made."""
    result = cli("tags", "--store", pushed, "--store", f"file://{tmp_path}/wrong")
    assert result.exit_code == 1
    assert f"no directory {tmp_path}/wrong" in result.stderr
    assert cli("tags", "--store", near, "--store", pushed).exit_code == 0


def test_the_same_store_twice_is_refused(cli, packed, near):
    """It is a mistake, and told as one line."""
    result = cli("push", packed, "--store", near, "--store", near, "--tag", "demo")
    assert result.exit_code == 1
    assert [line.partition(":")[0] for line in result.stderr.splitlines()] == ["error"]
    assert "given twice" in result.stderr


def test_a_directory_before_a_server(cli, command, packed, near, tmp_path):
    """Pushed in one process, restored by tag in another, through a real Redis, whose password
    nobody prints.
    """
    server = _redis_server()
    with server.running(server.NAMES[0]) as started:
        stores = ("--store", near, "--store", started.url(query="timeout_s=5&connect_timeout_s=5"))
        pushed = command("push", packed, *stores, "--tag", "demo")
        assert (pushed.returncode, pushed.stderr) == (0, "")
        there = ("--store", f"file://{tmp_path}/there", *stores[2:])
        words = (
            "restore",
            "--tag",
            "demo",
            *there,
            "--only",
            "all",
            "--json",
            "--cache-dir",
            tmp_path / "cache",
        )
        restored = command(*words)
        listed = cli("tags", *stores)
        # A dead server leaves what is near, with a warning.
        started.kill()
        without = command("restore", *words[1:-1], tmp_path / "again")
    assert restored.returncode == 0
    with bundler.Bundle.load(packed) as bundle:
        assert json.loads(restored.stdout)["usable"] == len(bundle.kernels)
    assert without.returncode == 0
    assert json.loads(without.stdout)["usable"] == json.loads(restored.stdout)["usable"]
    assert "goes on without it" in without.stderr
    said = (
        "".join(r.stdout + r.stderr for r in (pushed, restored, without))
        + listed.stdout
        + listed.stderr
    )
    assert not any(password in said for password in server.PASSWORDS.values())
