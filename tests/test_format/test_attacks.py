# SPDX-License-Identifier: Apache-2.0
"""Each bundle of tests/data/attacks comes to what its index says, and touches nothing elsewhere."""

import importlib.util
import json
import os
import re
import resource
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import zstandard

import bundler
from bundler import errors
from bundler.format.bundle import Bundle
from bundler.format.sentinel import triton_dirs

ROOT = Path(__file__).resolve().parents[2]
ATTACKS = ROOT / "tests" / "data" / "attacks"
INDEX = json.loads((ATTACKS / "index.json").read_text(encoding="utf-8"))
MAX_BYTES = 20_000
CASE_S = 5

# One that fills lists takes seconds to be refused; that it is, is looked at for each.
RESTORED = [
    pytest.param(entry, marks=pytest.mark.slow if "bomb/lists" in entry["attack"] else ())
    for entry in INDEX
]
attack = pytest.mark.parametrize("entry", INDEX, ids=lambda entry: entry["attack"])
restored = pytest.mark.parametrize("entry", RESTORED, ids=lambda entry: entry["attack"])


@pytest.fixture(scope="module")
def make_attacks():
    """The program that made the files."""
    spec = importlib.util.spec_from_file_location(
        "make_attacks", ATTACKS.parent / "make_attacks.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def judged(run_tool):
    """Attack -> (class of the first error, or `accepted`; seconds of a processor), from a process
    with limited memory.

    It also restores each in every way, and ends when a file outside the target is touched, a
    temporary name stays or a kernel is not whole.
    """
    done = run_tool("fuzz bundle", *(ATTACKS / entry["file"] for entry in INDEX))
    assert done.returncode == 0, done.stdout[-300:] + done.stderr[-3000:]
    rows = map(str.split, done.stdout.splitlines())
    return {name: (outcome, float(seconds)) for name, outcome, seconds in rows}


def tree(directory):
    """Return name -> (size, modification time) of everything below a directory."""
    found = {}
    for folder, folders, names in os.walk(directory):
        for name in (*folders, *names):
            status = os.lstat(os.path.join(folder, name))
            found[os.path.relpath(os.path.join(folder, name), directory)] = (
                status.st_size,
                status.st_mtime_ns,
            )
    return found


def opening(path):
    """Return the error that opening a bundle gives, if any."""
    try:
        Bundle.load(path).close()
    except errors.BundlerError as error:
        return error
    return None


@pytest.fixture
def target(tmp_path):
    """An empty directory in a directory with neighbors, which are as they were afterwards."""
    guard = tmp_path / "guard"
    (guard / "a" / "target").mkdir(parents=True)
    for name in ("escape.json", "x.json", "a/escape.json", "a/x.json"):
        (guard / name).write_text("untouched")
    before = tree(guard)
    yield guard / "a" / "target"
    after = {name: seen for name, seen in tree(guard).items() if not name.startswith("a/target")}
    assert after == {name: seen for name, seen in before.items() if not name.startswith("a/target")}


def test_the_index_names_each_file_once_and_the_files_are_small():
    """The folder holds the files of the index and no other, each of less than 20 KB and with a
    sentence.
    """
    assert sorted(path.name for path in ATTACKS.glob("*.tbundle")) == sorted(
        entry["file"] for entry in INDEX
    )
    assert len({entry["attack"] for entry in INDEX}) == len(INDEX)
    assert [
        e["file"]
        for e in INDEX
        if (ATTACKS / e["file"]).stat().st_size >= MAX_BYTES or len(e["what"]) < 10
    ] == []


def test_the_attacks_are_made_again_byte_for_byte(make_attacks):
    """The script beside the folder makes the same files and the same index."""
    pinned = re.search(
        r"^zstandard==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE
    )[1]
    if zstandard.__version__ != pinned:
        pytest.skip(
            f"zstandard {zstandard.__version__} may compress otherwise than the pinned {pinned}"
        )
    # In a process of its own, since the tools find each other by a changed path.
    code = (
        "import importlib.util, sys, pathlib\nspec ="
        " importlib.util.spec_from_file_location('make_attacks', sys.argv[1])\nmodule ="
        " importlib.util.module_from_spec(spec)\nspec.loader.exec_module(module)\nmade ="
        " module.load_attacks()\nprint(*(e['file'] for e in module.index() if (module.HERE /"
        " e['file']).read_bytes() != made[e['attack']].make()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, make_attacks.__file__], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr
    assert make_attacks.index() == INDEX


@attack
def test_an_attack_comes_to_its_one_error(judged, entry):
    """Opening, reading, verifying, merging: the first error is the one of the index, in time and
    memory.
    """
    outcome, seconds = judged[entry["file"]]
    assert outcome == entry["outcome"]
    assert seconds < CASE_S


@restored
def test_an_attack_restores_nothing_that_it_should_not(entry, target):
    """A bundle that cannot be opened restores nothing and says why; one that can leaves out what is
    wrong, with the reason.
    """
    path = ATTACKS / entry["file"]
    refused = opening(path)
    if refused is not None:
        assert (type(refused).__name__, entry["skipped"]) == (entry["outcome"], None)
        with pytest.raises(errors.BundlerError) as caught:
            bundler.restore(path, target, only="all", trust=entry["trust"])
        assert type(caught.value) is type(refused)
        assert os.listdir(target) == []
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = bundler.restore(path, target, only="all", trust=entry["trust"])
    reasons = [reason for _, reason in report.skipped]
    assert entry["skipped"] is None or [reason for reason in reasons if entry["skipped"] in reason]
    assert entry["skipped"] is not None or reasons == []
    assert all(reason.isprintable() and len(reason) < 1000 for reason in reasons)
    assert [
        name
        for name in tree(target)
        if os.path.basename(name).startswith("tmp.bundler.") and "/" not in name
    ] == []
    placed = {*report.restored, *(path.partition("/")[0] for path in report.companions)}
    assert {Path(name).parts[0] for name in tree(target)} <= {*placed, "triton"}


def test_a_long_metadata_file_is_compared_in_linear_time():
    """Looking for Triton's directory in a text of 600,000 slashes takes no longer than
    reading it.
    """
    before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    assert triton_dirs(json.dumps(" /" * 600_000 + "triton/backends/x").encode()) == {
        "/" + " /" * 599_999 + "triton"
    }
    assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - before < CASE_S


def test_devices_that_no_host_has_get_no_directory(target):
    """Of 2,000 devices those are restored to that a host may have."""
    report = bundler.restore(ATTACKS / "device-many.tbundle", target, only="all")
    assert len(report.directories) == 128
    report = bundler.restore(ATTACKS / "device-negative.tbundle", target, only="all")
    assert {os.path.basename(directory) for directory in report.directories} == {"0"}
