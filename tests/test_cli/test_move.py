# SPDX-License-Identifier: Apache-2.0
"""`pack` and `restore` on kernels that Triton compiled."""

import dataclasses
import os
import shutil

import pytest

import bundler
from bundler.format.manifest import Content

pytestmark = pytest.mark.toolchain


def tree(directory):
    """Return the files of a cache directory but the group files, which name their own place."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and not path.name.startswith("__grp__")
    }


@pytest.fixture
def foreign(packed, tmp_path):
    """The same kernels, said to be of another Triton."""
    path = tmp_path / "foreign.tbundle"
    with bundler.Bundle.load(packed) as bundle:
        other = bundler.Toolchain(release="3.0.0", binary="0" * 64)
        kernels = [dataclasses.replace(kernel, toolchain=other) for kernel in bundle.kernels]
        bundler.Bundle(Content.of(kernels), bundle.observed, bundle.blobs).save(path)
    return path


def test_pack_tells_what_went_in(cli, cache, tmp_path):
    """Pack prints kernels by target, sizes and the digest, and writes the bundle it speaks of."""
    result = cli("pack", cache, "-o", tmp_path / "b.tbundle")
    assert (result.exit_code, result.stderr) == (0, "")
    with bundler.Bundle.load(tmp_path / "b.tbundle") as bundle:
        assert result.stdout.splitlines()[-1].endswith(bundle.digest)
        assert len(bundle.kernels) == 4
    rows = [line.split() for line in result.stdout.splitlines()]
    assert [row[:2] for row in rows if row and row[0] in {"cuda:90", "hip:gfx942"}] == [
        ["cuda:90", "2"],
        ["hip:gfx942", "2"],
    ]


def test_pack_json(cli_json, cache, tmp_path):
    """Pack --json gives digest, counts, targets, path and size."""
    status, told = cli_json("pack", cache, "-o", tmp_path / "b.tbundle")
    assert status == 0
    assert set(told) == {"digest", "counts", "targets", "path", "size_bytes", "left_out"}
    assert told["counts"] == {
        "kernels": 4,
        "tuning_files": 0,
        "helpers": 0,
        "opaque": 0,
        "tuning_records": 0,
    }
    assert told["size_bytes"] == os.path.getsize(tmp_path / "b.tbundle")
    assert {target["target"] for target in told["targets"]} == {"cuda:90", "hip:gfx942"}


def test_pack_keeps_the_launch_set_alone(cli_json, cache, tmp_path):
    """Pack --keep launch takes no intermediate texts."""
    _, told = cli_json("pack", cache, "-o", tmp_path / "b.tbundle", "--keep", "launch")
    assert sum(target["ir_bytes"] for target in told["targets"]) == 0


def test_pack_compresses_as_hard_as_it_is_told(cli, cli_json, cache, tmp_path):
    """A low level is a larger file with the same bundle; a level that there is not is a
    wrong use.
    """
    (_, fast), (_, small) = (
        cli_json("pack", cache, "-o", tmp_path / f"{n}", "--level", n) for n in (1, 19)
    )
    assert fast["digest"] == small["digest"]
    assert fast["size_bytes"] > small["size_bytes"]
    assert cli("pack", cache, "-o", tmp_path / "none", "--level", 23).exit_code == 2
    assert not (tmp_path / "none").exists()


def test_pack_groups_what_it_left_out(cli, cache, tmp_path):
    """Pack names each reason once, with how many, and puts every file into --json."""
    copy = tmp_path / "copy"
    shutil.copytree(cache, copy)
    groups = sorted(copy.glob("*/__grp__*"))
    for group in groups[:2]:
        group.unlink()
    result = cli("pack", copy, "-o", tmp_path / "b.tbundle")
    assert result.exit_code == 0
    assert result.stdout.count("  2 x no group file") == 1
    assert "left out: 2" in result.stdout


def test_restore_puts_everything_back(cli, cache, packed, tmp_path):
    """Restore writes each file as it was, into the directory it was told."""
    result = cli("restore", packed, "--cache-dir", tmp_path / "out", "--only", "all")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1].startswith("4 of 4 kernels in place; ")
    restored, original = tree(tmp_path / "out"), tree(cache)
    assert restored.keys() == original.keys()
    same = {name for name in original if restored[name] == original[name]}
    assert {name for name in original if not name.endswith(".json")} <= same


def test_restore_without_a_directory_goes_where_triton_looks(cli, packed, tmp_path):
    """Restore without --cache-dir writes to this process's Triton cache."""
    assert cli("restore", packed, "--only", "all").exit_code == 0
    assert len(os.listdir(tmp_path / "triton-cache")) == 4


def test_restore_json_tells_restored_then_present_then_repaired(cli_json, packed, tmp_path):
    """Restore --json has the report's keys: first all is restored, then present, then one is
    repaired.
    """
    words = ("restore", packed, "--cache-dir", tmp_path / "out", "--only", "all")
    status, first = cli_json(*words)
    assert status == 0
    fields = {field.name for field in dataclasses.fields(bundler.RestoreReport)}
    assert set(first) == fields | {"bundle", "digest", "counts", "usable"}
    assert len(first["restored"]) == first["usable"] == 4
    _, second = cli_json(*words)
    assert (second["restored"], len(second["present"])) == ([], 4)
    next((tmp_path / "out" / first["restored"][0]).glob("*.json")).write_text("{")
    _, third = cli_json(*words)
    assert (third["repaired"], len(third["present"])) == ([first["restored"][0]], 3)


def test_restore_keeps_the_launch_set_alone(cli, packed, tmp_path):
    """Restore --keep launch writes binary, metadata and group file of each kernel."""
    assert (
        cli(
            "restore", packed, "--cache-dir", tmp_path / "out", "--only", "all", "--keep", "launch"
        ).exit_code
        == 0
    )
    kinds = {path.suffix for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert kinds == {".cubin", ".hsaco", ".json"}


def test_restore_of_another_toolchain_is_no_silent_success(cli, foreign, tmp_path):
    """A bundle of another Triton gives a warning that says so, exit status 1, and nothing in the
    directory.
    """
    result = cli("restore", foreign, "--cache-dir", tmp_path / "out")
    assert result.exit_code == 1
    assert result.stderr.startswith(
        "warning: nothing in this bundle can be used here: compiled by Triton 3.0.0;"
    )
    assert len(result.stderr.splitlines()) == 1
    assert "  4 x compiled by Triton 3.0.0" in result.stdout
    assert not list(tmp_path.glob("out/*"))


def test_restore_of_another_toolchain_in_json(cli_json, foreign, tmp_path):
    """The same in --json: nothing usable, each kernel skipped with its reason, the warning beside
    it.
    """
    status, told = cli_json("restore", foreign, "--cache-dir", tmp_path / "out")
    assert (status, told["usable"], len(told["skipped"]), len(told["warnings"])) == (1, 0, 4, 1)


def test_restore_of_everything_does_not_ask(cli, foreign, tmp_path):
    """Restore --only all restores the kernels of another Triton, and is fine."""
    assert cli("restore", foreign, "--cache-dir", tmp_path / "out", "--only", "all").exit_code == 0
