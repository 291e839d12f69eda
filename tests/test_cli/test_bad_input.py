# SPDX-License-Identifier: Apache-2.0
"""Whatever is wrong with the input: exit status 1 and one clear line, the old state intact; wrong
usage: status 2.
"""

import json
import os
import struct

import pytest

pytestmark = pytest.mark.toolchain

READERS = (
    ("inspect", "{}"),
    ("verify", "{}"),
    ("restore", "{}", "--cache-dir", "{tmp}/out"),
    ("diff", "{}", "{good}"),
    ("diff", "{good}", "{}"),
    ("merge", "{good}", "{}", "-o", "{tmp}/merged.tbundle"),
)


def missing(path, good):
    return path / "nothing.tbundle"


def directory(path, good):
    (path / "directory.tbundle").mkdir()
    return path / "directory.tbundle"


def written(name, make):
    def bad(path, good):
        (path / name).write_bytes(make(good))
        return path / name

    bad.__name__ = name
    return bad


def flipped(place):
    def make(good):
        data = bytearray(good)
        data[place % len(data)] ^= 0x10
        return bytes(data)

    return make


def newer_major(good):
    return good[:8] + struct.pack("<H", 99) + good[10:]


BAD = (
    missing,
    directory,
    written("empty", lambda good: b""),
    written("garbage", lambda good: b"PK\x03\x04" * 1000),
    written("text", lambda good: b"#!/bin/sh\necho hello\n"),
    written("short", lambda good: good[:20]),
    written("truncated", lambda good: good[: len(good) * 2 // 3]),
    written("longer", lambda good: good + b"\0"),
    written("flipped-magic", flipped(1)),
    written("flipped-header", flipped(28)),
    written("flipped-end", flipped(-3)),
    written("newer", newer_major),
)


def one_error(result, status=1):
    """Assert that a result is a problem told in one line, and return the line."""
    assert result.exit_code == status
    lines = result.stderr.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["error"], result.stderr
    assert result.stdout == ""
    return lines[0]


@pytest.mark.parametrize("words", READERS, ids=lambda words: "-".join(words[:2]))
@pytest.mark.parametrize("make", BAD, ids=lambda make: make.__name__)
def test_a_bad_bundle_is_one_error(cli, packed, tmp_path, words, make):
    """Each command that reads a bundle answers each kind of bad bundle with one error line and
    writes nothing.
    """
    bad = make(tmp_path, packed.read_bytes())
    before = sorted(tmp_path.iterdir())
    line = one_error(cli(*(word.format(bad, good=packed, tmp=tmp_path) for word in words)))
    assert len(line) > len("error: ")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("make", BAD, ids=lambda make: make.__name__)
def test_a_bad_bundle_in_json(cli, packed, tmp_path, make):
    """With --json the error is an object with code and message, and the message is that of the
    error line.
    """
    result = cli("inspect", "--json", make(tmp_path, packed.read_bytes()))
    error = json.loads(result.stdout)["error"]
    assert result.exit_code == 1
    assert result.stderr == f"error: {error['message']}\n"
    assert error["code"] in {
        "not-found",
        "format",
        "truncated",
        "unsupported-version",
        "digest-mismatch",
        "error",
    }


def test_damaged_content_is_not_merged(cli, packed, tmp_path):
    """Merge of a bundle with a flipped bit in a kernel is one error, and no file is left."""
    (tmp_path / "damaged").write_bytes(flipped(len(packed.read_bytes()) // 3)(packed.read_bytes()))
    one_error(cli("merge", tmp_path / "damaged", "-o", tmp_path / "m.tbundle"))
    assert [path.name for path in tmp_path.iterdir()] == ["damaged"]


def test_damaged_content_is_not_restored(cli, packed, tmp_path):
    """Restore of a bundle whose kernels are damaged exits with 1 and a warning, and publishes none
    of them.
    """
    (tmp_path / "damaged").write_bytes(flipped(200)(packed.read_bytes()))
    result = cli("restore", tmp_path / "damaged", "--cache-dir", tmp_path / "out", "--only", "all")
    assert result.exit_code == 1
    assert result.stderr.startswith("warning: nothing in this bundle can be used here: ")
    assert not list(tmp_path.glob("out/*/*"))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("pack", "{tmp}/nothing", "-o", "{tmp}/b"), "No such file or directory"),
        (("pack", "{good}", "-o", "{tmp}/b"), "irectory"),
        (("pack", "{empty}", "-o", "{tmp}/b"), "no kernels in"),
        (("pack", "{cache}", "-o", "{empty}"), "it is a directory"),
        (("pack", "{cache}", "-o", "{tmp}/nothing/b"), "No such file or directory"),
        (("merge", "{good}", "-o", "{empty}"), "it is a directory"),
        (("restore", "{good}", "--only", "all", "--cache-dir", "{good}"), ""),
        (("run", "-o", "{empty}", "--", "true"), "it is a directory"),
        (("run", "-o", "{tmp}/nothing/b", "--", "true"), "there is no directory"),
        (("run", "-o", "{tmp}/b", "--", "no-such-program"), "no such program"),
    ],
)
def test_a_bad_place_is_one_error(cli, packed, cache, tmp_path, words, expected):
    """A directory that is not there, empty or a file, and an output that cannot be written, are one
    error line each.
    """
    empty = tmp_path / "empty"
    empty.mkdir()
    status = 127 if expected == "no such program" else 1
    line = one_error(
        cli(*(word.format(tmp=tmp_path, good=packed, cache=cache, empty=empty) for word in words)),
        status,
    )
    assert expected in line
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


@pytest.mark.parametrize(
    "words", [("pack", "{cache}", "-o", "{closed}/b"), ("run", "-o", "{closed}/b", "--", "true")]
)
def test_an_unwritable_output_is_one_error(cli, cache, tmp_path, words):
    """A directory that may not be written is one error line that says so."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    if os.access(closed, os.W_OK):
        pytest.skip("this user may write everywhere")
    assert "writ" in one_error(cli(*(word.format(cache=cache, closed=closed) for word in words)))


def test_a_full_disk_leaves_the_old_bundle(cli, cache, packed, tmp_path, monkeypatch):
    """When the disk is full, pack is one error line, the bundle that was there stays, and no
    temporary file is left.
    """
    output = tmp_path / "b.tbundle"
    output.write_bytes(packed.read_bytes())

    def full(descriptor):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    assert "free some space" in one_error(cli("pack", cache, "-o", output))
    assert output.read_bytes() == packed.read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["b.tbundle"]


@pytest.mark.parametrize(
    "words",
    [
        ("nonsense",),
        ("pack",),
        ("pack", "somewhere"),
        ("pack", "a", "-o", "b", "--keep", "some"),
        ("restore", "b", "--device", "-1"),
        ("restore", "b", "--only", "none"),
        ("merge", "-o", "c"),
        ("diff", "a"),
        ("inspect", "a", "--nonsense"),
        ("run", "-o", "b"),
        ("demo", "--target", "tpu:5"),
        ("demo", "--target", "cuda:ninety"),
        (),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_status_2(cli, words):
    """A word that a command does not know, or one that it misses, is status 2; with --json also an
    object.
    """
    assert cli(*words).exit_code == 2
    if words and words[0] != "nonsense":
        result = cli(words[0], "--json", *words[1:])
        assert (result.exit_code, json.loads(result.stdout)["error"]["code"]) == (2, "usage")


@pytest.mark.parametrize("group", ["tune", "oci", "key", "config"])
def test_wrong_usage_of_a_command_in_a_group_is_one_object(cli, group):
    """With --json one object is printed, by the program alone, not by the group too."""
    name = {"tune": "show", "oci": "tags", "key": "list", "config": "show"}[group]
    result = cli(group, name, "--json", "--nonsense")
    assert (result.exit_code, json.loads(result.stdout)["error"]["code"]) == (2, "usage")
