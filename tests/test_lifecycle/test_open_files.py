# SPDX-License-Identifier: Apache-2.0
"""A file that a live process has open is replaced, never rewritten: the open file keeps its inode
and its bytes.

vLLM's snapshots, for one, compare a fingerprint of each file that was open with what is there
later.
"""

import ast
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

import bundler
from bundler.cli.app import app
from bundler.format.candidate_timings import Timing, Tuning, id_of
from bundler.format.launch_spec import TuningRecord
from bundler.integrations.miss_notes import ProcessNote
from bundler.integrations.user_directories import LocalDirectory
from bundler.lifecycle.tuning_directory import TuningFolder
from bundler.runtime import Config
from bundler.runtime.tuning.tuning_winners import named_of

PACKAGE = Path(bundler.__file__).parent
# (file, what it does): writes to what is there already, or to what is in no directory of others.
NOT_REPLACED = {
    ("cli/demo_program.py", "write_text"): "the demo's own temporary directory",
    (
        "cli/demo_kernels.py",
        "write_text",
    ): "what an example program was asked to print, into a file",
    ("cli/demo.py", "write_text"): "the demo's own temporary directory",
    ("cli/bundles/extraction.py", "write_bytes"): "a stage, whose files are renamed",
    (
        "compile/captured_program.py",
        "open w",
    ): "a report in the temporary directory of the command that started it",
    ("compile/compile_worker.py", "open wb"): "/proc",
    ("compile/program_capture.py", "open wb"): "a pipe",
    ("runtime/tuning/tuner_reports.py", "open a"): "a log that the user asked for grows at its end",
    ("toolchain/compile_call.py", "write_bytes"): "a worker's own temporary directory",
    (
        "trust/signing_keys.py",
        "open wb",
    ): "the descriptor of a new file, which is linked to its name",
    (
        "backends/oci/registry.py",
        "truncate",
    ): "begins again with a file that the caller made for this download",
    ("images/image_pull.py", "open wb"): "into a temporary folder of this call",
    (
        "images/kernel_cache_images.py",
        "open wb",
    ): "a descriptor of a file that is created here, in a temporary folder",
}
_CREATES = {"O_EXCL"}
_WRITES = {"O_WRONLY", "O_RDWR", "O_APPEND", "O_TRUNC"}


class Held:
    """Every regular file below some directories, open, and what was in it."""

    def __init__(self, *roots):
        self._files = {}
        for root in roots:
            for path in Path(root).rglob("*"):
                if path.is_file():
                    fd = os.open(path, os.O_RDONLY)
                    self._files[path] = fd, os.fstat(fd).st_ino, path.read_bytes()

    def changed(self):
        """Close all; returns the names of those whose path leads to another file, having checked
        that each open one is as it was.
        """
        replaced = set()
        for path, (fd, inode, content) in self._files.items():
            with open(fd, "rb") as file:
                assert (os.fstat(fd).st_ino, file.read()) == (inode, content), (
                    f"{path} was rewritten"
                )
            if not path.exists() or path.stat().st_ino != inode:
                replaced.add(path.name)
            else:
                assert path.read_bytes() == content
        return replaced


@pytest.fixture
def bundle_file(small, tmp_path):
    """A bundle of one kernel, and its path."""
    small.save(tmp_path / "b.tbundle")
    return tmp_path / "b.tbundle"


def test_restoring_a_damaged_kernel_leaves_open_files_alone(small, key, tmp_path):
    """The directory is renamed aside, and a new one takes its place."""
    cache = tmp_path / "cache"
    bundler.restore(small, cache)
    (binary,) = (cache / key).glob("*.cubin")
    inode = binary.stat().st_ino
    binary.write_bytes(b"damaged")  # in place, as this package never does
    assert binary.stat().st_ino == inode
    held = Held(cache)
    assert bundler.restore(small, cache).repaired == (key,)
    assert binary.name in held.changed()
    assert binary.read_bytes() != b"damaged"


def test_restoring_again_touches_no_file(small, tmp_path):
    """What is there and sound stays the same file."""
    bundler.restore(small, tmp_path / "cache")
    held = Held(tmp_path / "cache")
    bundler.restore(small, tmp_path / "cache")
    assert held.changed() == set()


def test_saving_over_a_bundle_that_is_open(small, bundle_file):
    """A reader of the old bundle goes on reading it."""
    held = Held(bundle_file.parent)
    with bundler.Bundle.load(bundle_file) as before:
        small.save(bundle_file, level=1)
        assert (
            len(before.read(before.kernels[0].artifacts[0])) == before.kernels[0].artifacts[0].size
        )
    assert held.changed() == {bundle_file.name}


def _tuned(block):
    record = TuningRecord(
        "add", (("arguments", "1"),), named_of(Config({"BLOCK": block})), "autotune"
    )
    return record, Tuning(id_of(record), (Timing(record.config, "", block),))


def test_a_winner_that_takes_the_place_of_another(tmp_path):
    """A tuner that reads the older record reads it whole."""
    folder = TuningFolder(tmp_path)
    folder.put(*_tuned(64))
    held = Held(tmp_path)
    path = folder.put(*_tuned(32))
    assert held.changed() == {Path(path).name}


def test_a_tag_that_is_set_anew(bundle, small, tmp_path):
    """In a directory store, objects stay and refs are replaced."""
    with bundler.open_store(str(tmp_path / "store")) as store:
        store.push(small, tag="t")
        held = Held(tmp_path / "store")
        store.push(bundle, tag="t", mode="replace")
        assert store.pull("t").digest == bundle.digest
    held.changed()


def test_commands_that_write_over_files(bundle_file, tmp_path):
    """`extract --force` replaces each file; what other commands write goes through the function
    that `save` uses.
    """
    runner, out = CliRunner(), tmp_path / "out"
    words = ["extract", str(bundle_file), "--kernel", "gelu_kernel", "-o", str(out)]
    assert runner.invoke(app, words).exit_code == 0
    held = Held(out)
    assert runner.invoke(app, [*words, "--force"]).exit_code == 0
    assert held.changed() == {path.name for path in out.iterdir()} != set()


def test_notes_of_a_process_that_are_written_again(tmp_path):
    """What `explain` reads is the older or the newer note, whole."""
    local = LocalDirectory(str(tmp_path), pytest.fail)
    ProcessNote(1, 2).write(local)
    held = Held(tmp_path)
    ProcessNote(1, 2, hits=3, compiled=4).write(local)
    assert len(held.changed()) == 1


def _openings(tree):
    """Yield what each call in a module does that writes to a file which may be there already."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = (
            node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        )
        modes = [
            value.value
            for value in [*node.args[1:2], *(k.value for k in node.keywords if k.arg == "mode")]
            if isinstance(value, ast.Constant) and isinstance(value.value, str)
        ]
        if name in {"open", "fdopen"} and isinstance(node.func, ast.Name):
            # An open descriptor was opened by os.open, which is looked at by its flags.
            ours = isinstance(node.args[0], ast.Name) and node.args[0].id in {"handle", "fd"}
            yield from (f"open {mode}" for mode in modes if set(mode) & set("wa+") and not ours)
        elif name in {
            "write_text",
            "write_bytes",
            "truncate",
            "ftruncate",
            "pwrite",
            "copyfile",
            "copy",
            "copy2",
        }:
            yield name


def test_no_writer_of_the_package_opens_a_file_that_is_there():
    """Each call that could rewrite a file is known, with the reason why that is none of a live
    process.
    """
    found, flags = set(), set()
    for folder, _, files in os.walk(PACKAGE, followlinks=True):
        for path in (Path(folder, name) for name in files if name.endswith(".py")):
            where = path.relative_to(PACKAGE).as_posix()
            if where.startswith("backends/testing/"):
                continue
            tree = ast.parse(path.read_text(encoding="utf-8"))
            found |= {(where, what) for what in _openings(tree)}
            for node in ast.walk(tree):
                if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
                    used = {name.attr for name in ast.walk(node) if isinstance(name, ast.Attribute)}
                    if used & _WRITES and not used & _CREATES and "O_CLOEXEC" in used:
                        flags.add((where, node.lineno))
    known = {(where, what) for where, what in found if what not in {"copy", "ftruncate"}}
    assert known == set(NOT_REPLACED)
    assert flags == set()
    # `ftruncate` empties the pipe-like output of a worker, and `copy` is a method of data.
    assert {where for where, what in found if what == "ftruncate"} <= {"compile/compile_worker.py"}
