# SPDX-License-Identifier: Apache-2.0
"""Files that are read outside of stores: whatever lies in their place, reading ends at once and in
little memory.
"""

import contextlib
import os
import signal

import pytest
import support

import bundler
from bundler.errors import BundlerError, LimitExceeded
from bundler.format.bundle_file import open_regular, read_regular
from bundler.lifecycle.kernel_directory import Rejected, read_kernel
from bundler.lifecycle.tuning_directory import Miss, TuningFolder
from tools.fuzz import directory as fuzz_directory

DEADLINE_S = 10
# Ours to refuse: a link is followed where a user names the file.
NO_FILES = ("named pipe", "socket", "link to a device", "directory", "full directory")
NO_FILES_OR_HUGE = (*NO_FILES, "sparse file")


@pytest.fixture(autouse=True)
def in_time():
    """No test here waits; what is blocked in the system is interrupted."""

    def late(number, frame):
        raise AssertionError(f"still busy after {DEADLINE_S} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(DEADLINE_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def named_by_users():
    """Return readers of files that a user names, by what they read: the end of the name, and the
    reader.
    """
    from bundler.cli.bundles.tune import read_winners
    from bundler.compile.declarations import read_build_file
    from bundler.integrations import inductor_generated
    from bundler.runtime.tuning.tuning_winners import LookupTable

    return {
        "bundle": (".tbundle", bundler.Bundle.load),
        "lookup table": (".json", LookupTable.load),
        "build file": (".toml", read_build_file),
        "generated module": (".py", inductor_generated.load_generated),
        "winners of a table": (".json", read_winners),
        "winners of a record": (".tuning", read_winners),
        "winners of Triton's tuner": (".autotune.json", read_winners),
    }


@pytest.mark.parametrize("name", NO_FILES_OR_HUGE)
@pytest.mark.parametrize("what", list(named_by_users()))
def test_a_file_that_a_user_names_is_a_file_or_an_error(tmp_path, what, name):
    """Each reader of a user's file raises a typed error that names it, and does not wait for a pipe
    or read a device.
    """
    suffix, read = named_by_users()[what]
    path = tmp_path / f"x{suffix}"
    fuzz_directory.HOSTILE[name](path)
    if what.startswith("winners") and "directory" in name:
        assert read(str(path)).all == []  # as a cache directory, without records
        return
    with pytest.raises(BundlerError) as raised:
        read(str(path))
    assert str(path) in str(raised.value) or (what, name) == ("bundle", "sparse file")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("named pipe", "it is a named pipe, expected a file"),
        ("socket", "it is a socket or device, expected a file"),
        ("link to a device", "it is a device, expected a file"),
        ("directory", "it is a directory, expected a bundle file"),
    ],
)
def test_the_error_says_what_is_there(tmp_path, name, words):
    """Loading what is no file says what it is instead."""
    path = tmp_path / "x"
    fuzz_directory.HOSTILE[name](path)
    with pytest.raises(BundlerError, match=f"cannot open {path}: {words}"):
        bundler.Bundle.load(path)


def test_a_link_is_followed_only_where_that_is_meant(tmp_path):
    """A user's file may be a link; one in a directory of ours or Triton's is refused."""
    (tmp_path / "file").write_bytes(b"data")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "link", 4) == b"data"
    with pytest.raises(OSError, match="symbolic link"):
        open_regular(tmp_path / "link", links=False)
    with pytest.raises(LimitExceeded, match="4 bytes, over the limit of 3"):
        read_regular(tmp_path / "link", 3)
    assert read_regular("/proc/self/comm", 100).endswith(b"\n")  # its size is said to be nothing


# --------------------------------------------------------- Directories of Triton, Inductor and ours


@pytest.mark.parametrize("name", [name for name in fuzz_directory.HOSTILE if name != "empty file"])
def test_a_kernel_directory_with_something_else_in_it_is_no_kernel(
    planted, small, key, tmp_path, name
):
    """In place of any file of a kernel, the kernel is left out with the reason, and a restore puts
    a whole one in its place.
    """
    for filename in sorted(os.listdir(planted / key)):
        fuzz_directory.replace(planted / key / filename, name)
        found = read_kernel(str(planted / key))
        assert isinstance(found, Rejected)
        with bundler.pack(planted) as packed:
            assert packed.kernels == ()
            assert key in dict(packed.left_out)
        assert [missing for missing, _ in bundler.check(small, str(planted)).missing] == [key]
        assert bundler.restore(small, str(planted)).repaired == (key,)
        assert bundler.check(small, str(planted)).missing == ()


@pytest.mark.parametrize("name", fuzz_directory.HOSTILE)
def test_a_cache_directory_with_something_else_in_it_is_packed_without_it(planted, key, name):
    """Beside kernels, and in place of their directories, anything may lie: what is whole is packed,
    the rest has a reason.
    """
    other = "A" * 52
    fuzz_directory.HOSTILE[name](planted / other)
    fuzz_directory.HOSTILE[name](planted / "triton")
    (planted / ("B" * 52)).mkdir()
    fuzz_directory.HOSTILE[name](planted / ("B" * 52) / "k.autotune.json")
    with contextlib.suppress(BundlerError), bundler.pack(planted) as packed:
        assert [kernel.key for kernel in packed.kernels] == [key]


@pytest.mark.parametrize("name", NO_FILES_OR_HUGE)
def test_a_group_file_that_is_none_is_a_miss(tmp_path, name):
    """Where Triton's program asks for a kernel and its group file is something else, the kernel is
    not there, and nobody waits.
    """
    pytest.importorskip("triton")
    from bundler.toolchain.recording.cache_manager import read_group

    fuzz_directory.HOSTILE[name](tmp_path / "__grp__k.json")
    assert read_group(str(tmp_path), "k.json") is None


@pytest.mark.parametrize("name", NO_FILES_OR_HUGE)
def test_a_record_of_a_child_that_is_no_file_is_a_problem(name):
    """What lies in the spool directory and is no record is told, and the other records count."""
    pytest.importorskip("triton")
    from bundler.toolchain.recording.child_recording import ChildSpool

    with ChildSpool() as spool:
        directory = os.environ["TRITON_BUNDLER_SPOOL"].split(os.pathsep)[0]
        fuzz_directory.HOSTILE[name](support.Path(directory, "1.record"))
        assert spool.events() == []
        assert [record for record, _ in spool.problems] == ["1.record"]


@pytest.mark.parametrize("name", NO_FILES_OR_HUGE)
def test_a_note_of_a_miss_that_is_no_file_is_left_out(tmp_path, name):
    """`explain` reads the notes that are notes."""
    from bundler.integrations import miss_notes
    from bundler.integrations.user_directories import LocalDirectory

    local = LocalDirectory(str(tmp_path / "ours"), print)
    folder = support.Path(local.notes("misses", make=True))
    fuzz_directory.HOSTILE[name](folder / "1-2-3-4.record")
    assert list(miss_notes.read_misses(local)) == []


@pytest.mark.parametrize("name", NO_FILES_OR_HUGE)
def test_a_tuning_record_that_is_no_file_is_a_miss(tmp_path, name):
    """A tuner that finds something else under a record's name measures."""
    folder = TuningFolder(tmp_path)
    os.makedirs(folder.path)
    from bundler.format.candidate_timings import record_id
    from bundler.lifecycle.tuning_directory import file_name

    fuzz_directory.HOSTILE[name](support.Path(folder.path, file_name("add", record_id("add", ()))))
    found = folder.find("add", ())
    assert isinstance(found, Miss)
    assert "cannot be used" in found.reason
    assert list(folder.records()) == []


@pytest.mark.parametrize("name", NO_FILES_OR_HUGE)
def test_a_result_file_that_is_none_is_no_result(tmp_path, monkeypatch, name):
    """Where Triton's tuner keeps its results something else lies: there are none."""
    pytest.importorskip("triton")
    from bundler.toolchain import tuner_toolchain

    class Manager:
        def get_file(self, filename):
            return str(tmp_path / filename)

    monkeypatch.setattr(tuner_toolchain, "_result_cache", lambda *_: Manager())
    monkeypatch.setattr(tuner_toolchain, "results_name", lambda _: "k.autotune.json")
    fuzz_directory.HOSTILE[name](tmp_path / "k.autotune.json")
    assert tuner_toolchain.read_results(None, None, (), ()) is None


@pytest.mark.parametrize("name", NO_FILES)
def test_a_library_that_is_no_file_has_no_digest(tmp_path, name):
    """A path among a compile's options that leads to something else is unreadable in its
    key parts.
    """
    pytest.importorskip("triton")
    from bundler.toolchain import keytext

    fuzz_directory.HOSTILE[name](tmp_path / "x.bc")
    assert keytext._file_digest(str(tmp_path / "x.bc")) == "unreadable"
