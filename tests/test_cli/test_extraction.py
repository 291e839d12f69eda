# SPDX-License-Identifier: Apache-2.0
"""One kernel chosen by name, glob or the beginning of its key; its texts on the terminal, its files
in a directory.
"""

import dataclasses
import importlib.util
import json
import os
from pathlib import Path

import pytest

import bundler

_SPEC = importlib.util.spec_from_file_location(
    "extraction_builders", Path(__file__).parents[1] / "test_format" / "builders.py"
)
build = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(build)

ADD, ADD_TOO, MUL = "a" * 63 + "1", "a" * 63 + "2", "b" * 64
TEXT = "//\n.visible .entry add\t()\x1b[2J\n"


@pytest.fixture
def bundle(tmp_path):
    """Two kernels called add, whose keys begin alike, and one called mul."""
    files = build.Files()
    made = [(ADD, "add", "one"), (ADD_TOO, "add", "two"), (MUL, "mul", "three")]
    kernels = [
        dataclasses.replace(
            files.kernel(name=name, source=source, extra={f"{name}.ptx": TEXT.encode()}), key=key
        )
        for key, name, source in made
    ]
    files.bundle(*kernels).save(tmp_path / "b.tbundle")
    return tmp_path / "b.tbundle"


def tree(folder):
    """Return the relative paths of all files and directories below a folder, hidden ones too."""
    return {
        os.path.relpath(os.path.join(root, name), folder)
        for root, dirs, files in os.walk(folder)
        for name in (*dirs, *files)
    }


@pytest.mark.parametrize(
    ("wanted", "keys"),
    [
        ("add", [ADD, ADD_TOO]),
        ("a*", [ADD, ADD_TOO]),
        ("mu", [MUL]),
        ("bbb", [MUL]),
        (ADD, [ADD]),
        ("bbbbbbbbbbbb…", [MUL]),
        (ADD[:60] + "*", [ADD, ADD_TOO]),
        ("*", [ADD, ADD_TOO, MUL]),
    ],
)
def test_kernels_are_chosen_by_names_and_beginnings(cli_json, bundle, wanted, keys):
    """A name, a glob over names and keys, the beginning of a name, or that of one key, as tables
    show it.
    """
    status, told = cli_json("inspect", bundle, "--kernel", wanted)
    assert (status, [kernel["key"] for kernel in told["kernels"]]) == (0, keys)


def test_an_ambiguous_key_lists_the_candidates(cli_json, cli, bundle):
    """The beginning of two keys is refused, with both, as far as they have to be told apart."""
    status, told = cli_json("inspect", bundle, "--kernel", "aa")
    assert (status, told["error"]["code"], told["error"]["candidates"]) == (
        1,
        "config",
        [ADD, ADD_TOO],
    )
    (line,) = cli(
        "extract", bundle, "--kernel", "aa", "-o", bundle.parent / "o"
    ).stderr.splitlines()
    assert f"{ADD}… (add), {ADD_TOO}… (add); give more of the key" in line


def test_no_kernel_is_an_error_that_names_those_there(cli, bundle):
    """What matches nothing is not found, in every command that takes --kernel."""
    for words in (
        ("inspect",),
        ("extract", "-o", bundle.parent / "o"),
        ("inspect", "--show", "ptx"),
    ):
        done = cli(*words, bundle, "--kernel", "div")
        assert (done.exit_code, done.stdout) == (1, "")
        assert done.stderr == f"error: no kernel in {bundle} matches 'div'; it has add, mul\n"
    assert cli("inspect", bundle, "--kernel", "").exit_code == 1
    assert (
        "matches 'mull'; did you mean 'mul'?" in cli("inspect", bundle, "--kernel", "mull").stderr
    )


def test_a_text_is_shown_without_what_commands_a_terminal(cli, cli_json, bundle):
    """--show prints the file of that kind and nothing else; --json has it unchanged."""
    assert cli("inspect", bundle, "--kernel", "mul", "--show", "ptx").stdout == TEXT.replace(
        "\x1b", "\\x1b"
    )
    status, told = cli_json("inspect", bundle, "--kernel", "mul", "--show", "ptx")
    assert (status, told["text"]) == (0, TEXT)
    assert (told["key"], told["name"], told["target"], told["kind"], told["file"]) == (
        MUL,
        "mul",
        "cuda:90",
        "ptx",
        "mul.ptx",
    )


def test_a_text_that_is_not_there_names_those_that_are(cli, cli_json, bundle, tmp_path):
    """The error says what can be shown, and when the bundle holds launch sets alone."""
    done = cli("inspect", bundle, "--kernel", "mul", "--show", "source")
    assert (
        done.stderr
        == f"error: mul (bbbbbbbbbbbb…) has no source in {bundle}; it can be shown as ttir, ptx,"
        " sass\n"
    )
    with bundler.Bundle.load(bundle) as opened:
        opened.select(keep="launch").save(tmp_path / "launch.tbundle")
    done = cli("inspect", tmp_path / "launch.tbundle", "--kernel", "mul", "--show", "ptx")
    assert done.exit_code == 1
    assert (
        "it holds what a launch needs alone (--keep launch); it can be shown as sass" in done.stderr
    )
    _, told = cli_json("inspect", bundle, "--kernel", "mul", "--show", "llir")
    assert (told["error"]["code"], told["error"]["kinds"]) == (
        "not-found",
        ["ttir", "ptx", "cubin", "json"],
    )


def test_one_text_is_shown_at_a_time(cli, bundle):
    """Of several kernels none is shown; the error names their keys."""
    done = cli("inspect", bundle, "--kernel", "add", "--show", "ptx")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "2 kernels" in done.stderr
    assert ADD in done.stderr
    assert cli("inspect", bundle, "--show", "ptx", "--leaks").exit_code == 2


def test_extract_writes_the_files_of_one_kernel(cli, bundle, tmp_path):
    """Each file under its name, byte for byte, and nothing else."""
    done = cli("extract", bundle, "--kernel", "mul", "-o", tmp_path / "o")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].startswith(f"wrote 4 files of 1 kernel to {tmp_path}/o: ")
    with bundler.Bundle.load(bundle) as opened:
        (kernel,) = [kernel for kernel in opened if kernel.name == "mul"]
        expected = {artifact.filename: opened.read(artifact) for artifact in kernel.artifacts}
    assert {name: (tmp_path / "o" / name).read_bytes() for name in tree(tmp_path / "o")} == expected


def test_extract_writes_several_kernels_apart(cli, bundle, tmp_path):
    """Each to a directory named by its key; --json lists all that was written."""
    told = json.loads(
        cli("extract", bundle, "--kernel", "add", "-o", tmp_path / "o", "--json").stdout
    )
    files = {os.path.relpath(path, tmp_path / "o") for path in told["files"]}
    assert tree(tmp_path / "o") == files | {ADD, ADD_TOO}
    assert {kernel["key"] for kernel in told["kernels"]} == {ADD, ADD_TOO}
    assert all(Path(path).is_file() for path in told["files"])


def test_extract_overwrites_nothing_unless_forced(cli, bundle, tmp_path):
    """One file that is there already keeps all from being written; --force replaces it, and leaves
    others alone.
    """
    folder = tmp_path / "o"
    folder.mkdir()
    (folder / "mul.ptx").write_text("mine")
    (folder / "notes").write_text("mine")
    done = cli("extract", bundle, "--kernel", "mul", "-o", folder)
    assert (done.exit_code, tree(folder), (folder / "mul.ptx").read_text()) == (
        1,
        {"mul.ptx", "notes"},
        "mine",
    )
    assert (
        f"{folder}/mul.ptx would be overwritten; give another directory, or --force" in done.stderr
    )
    assert cli("extract", bundle, "--kernel", "mul", "-o", folder, "--force").exit_code == 0
    assert (folder / "mul.ptx").read_bytes() == TEXT.encode()
    assert tree(folder) == {"mul.ptx", "mul.ttir", "mul.cubin", "mul.json", "notes"}


def test_extract_of_a_damaged_bundle_leaves_nothing(cli, bundle, tmp_path, monkeypatch):
    """A file that cannot be read, and the directory and what was written before it is gone."""
    read, read_before = bundler.Bundle.read, []

    def failing(self, artifact):
        if len(read_before) == 2:
            raise bundler.errors.DigestMismatch(f"{artifact.filename} is damaged")
        read_before.append(artifact)
        return read(self, artifact)

    monkeypatch.setattr(bundler.Bundle, "read", failing)
    done = cli("extract", bundle, "--kernel", "mul", "-o", tmp_path / "deep" / "o")
    assert (done.exit_code, "is damaged" in done.stderr) == (1, True)
    assert tree(tmp_path / "deep") == set()
    (tmp_path / "there").mkdir()
    assert cli("extract", bundle, "--kernel", "mul", "-o", tmp_path / "there").exit_code == 1
    assert tree(tmp_path / "there") == set()


def test_extract_says_why_it_cannot_write(cli, bundle):
    """A file where the directory should be is one error line."""
    done = cli("extract", bundle, "--kernel", "mul", "-o", bundle)
    assert (done.exit_code, len(done.stderr.splitlines())) == (1, 1)
    assert str(bundle) in done.stderr
    assert cli("extract", bundle, "-o", "x").exit_code == 2


@pytest.mark.toolchain
def test_machine_code_of_a_real_kernel(cli, compiled):
    """--show sass disassembles a cubin with what Triton's wheel brings; other texts are what the
    compiler wrote.
    """
    key = compiled.keys_of("gelu_kernel")[0]
    shown = {
        kind: cli("inspect", compiled.bundle, "--kernel", key[:12], "--show", kind).stdout
        for kind in ("sass", "ptx", "source")
    }
    assert ".text.gelu_kernel" in shown["sass"]
    assert "EXIT" in shown["sass"]
    assert shown["ptx"] == (compiled.cache / key / "gelu_kernel.ptx").read_text()
    assert "tt.func public @gelu_kernel" in shown["source"]
