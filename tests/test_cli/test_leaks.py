# SPDX-License-Identifier: Apache-2.0
"""Absolute paths are found in texts and binaries, and little else is."""

import json
import pickle
import random

import msgpack
import pytest

import bundler
from bundler.format.sentinel import TRITON_DIR, to_sentinels
from bundler.format.source_stripping import absolute_paths

HOME = "/home/somebody/model.py"


@pytest.mark.parametrize(
    "text",
    [
        '#loc = loc("/home/somebody/model.py":12:0)',
        '.file\t1 "/home/somebody/model.py"',
        "# see /home/somebody/model.py.",
        "(/home/somebody/model.py)",
        "MODEL=/home/somebody/model.py:x",
        "file:///home/somebody/model.py",
        "/home/somebody/model.py",
        json.dumps({"path": HOME}),
    ],
)
def test_paths_in_text(text):
    """A path is found in IR, PTX, comments, settings, URLs of files and JSON."""
    assert absolute_paths(text.encode()) == {HOME}


@pytest.mark.parametrize("length", range(10, 130))
def test_paths_in_pickles_and_msgpack(length):
    """A path is found in a pickle and in msgpack whatever its length, which stands before it as a
    byte.
    """
    path = "/home/" + "n" * (length - 6)
    assert absolute_paths(pickle.dumps({"n": 1000, "path": path, "x": None})) == {path}
    assert absolute_paths(msgpack.packb({"n": 1 << 20, "path": path, "x": None})) == {path}


def test_paths_in_debug_information():
    """A path that stands between zero bytes is found."""
    assert absolute_paths(b"\x7fELF\0\0.debug_str\0/home/somebody\0model.py\0") == {
        "/home/somebody"
    }


def test_paths_with_letters_of_other_languages():
    """A name in UTF-8 is a name."""
    assert absolute_paths('"/home/jürgen/модель.py"'.encode()) == {"/home/jürgen/модель.py"}


@pytest.mark.parametrize(
    "text",
    [
        "<a></b/c> <br/>",
        "and/or/both",
        "https://host/a/b",
        "../relative/path/file",
        "//host/share/x",
        "a = b / c / d",
        "/tmp",
        "1/2/3",
        "// a comment",
        "/* another */",
        "application/json",
        "[[triton_dir]]/backends/nvidia/lib/libdevice.10.bc",
        "",
    ],
)
def test_what_is_no_path(text):
    """Tags, fractions, relative paths, URLs, comments and what follows a placeholder are no
    absolute paths.
    """
    assert absolute_paths(text.encode()) == set()


def test_a_path_that_became_a_placeholder_is_not_found():
    """A path for which a sentinel stands does not travel, and is not found."""
    data = json.dumps(
        {"libs": "/opt/site-packages/triton/backends/nvidia/lib/libdevice.10.bc"}
    ).encode()
    stored, spans = to_sentinels(data, [(TRITON_DIR, "/opt/site-packages/triton")])
    assert len(spans) == 1
    assert absolute_paths(stored) == set()


def test_random_bytes_hold_few_paths():
    """A megabyte of noise gives no path: what looks like one by chance is short, or no word."""
    noise = random.Random(0).randbytes(1 << 20)
    assert absolute_paths(noise) == set()


def test_the_commands_strip(cli, packed, tmp_path):
    """`merge --strip source` makes a clean file of one that is there; `inspect --leaks` agrees
    about both.
    """
    made = cli("merge", packed, "--strip", "source", "-o", tmp_path / "c.tbundle")
    assert made.exit_code == 0, made.output
    before, after = (
        cli("inspect", path, "--leaks").stdout for path in (packed, tmp_path / "c.tbundle")
    )
    assert "debug information" in before
    assert "nor anything that tells of users, machines or source" in after
    with bundler.Bundle.load(packed) as whole, bundler.Bundle.load(tmp_path / "c.tbundle") as read:
        assert read.digest == bundler.strip_source(whole).digest


def test_pack_strips(cli, cache, packed, tmp_path):
    """`pack --strip source` writes what `merge --strip source` makes of it later."""
    assert cli("pack", cache, "--strip", "source", "-o", tmp_path / "c.tbundle").exit_code == 0
    with bundler.Bundle.load(packed) as whole, bundler.Bundle.load(tmp_path / "c.tbundle") as read:
        assert read.digest == bundler.strip_source(whole).digest
