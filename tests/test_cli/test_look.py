# SPDX-License-Identifier: Apache-2.0
"""`inspect`, `verify`, `diff` and `merge` on kernels that Triton compiled."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

import bundler
from bundler.format.manifest import Content
from bundler.lifecycle.binary_resources import read_resources

pytestmark = pytest.mark.toolchain
KERNELS = Path(bundler.__file__).parent / "cli" / "demo_kernels.py"


def rebuilt(packed, path, change):
    """Save a bundle in which each kernel is `change(kernel)`."""
    with bundler.Bundle.load(packed) as bundle:
        content = Content.of([change(kernel) for kernel in bundle.kernels])
        bundler.Bundle(content, bundle.observed, bundle.blobs).save(path)
    return path


def test_inspect_lists_kernels(cli, packed):
    """Inspect prints digest, format and a row for each kernel."""
    result = cli("inspect", packed)
    assert (result.exit_code, result.stderr) == (0, "")
    with bundler.Bundle.load(packed) as bundle:
        assert bundle.digest in result.stdout
    lines = result.stdout.splitlines()
    assert "format       2.0" in lines
    assert [line.split()[:2] for line in lines if "_kernel" in line] == [
        ["gelu_kernel", "cuda:90"],
        ["row_sum_kernel", "cuda:90"],
        ["gelu_kernel", "hip:gfx942"],
        ["row_sum_kernel", "hip:gfx942"],
    ]
    assert lines[-1] == "4 kernels"


def test_inspect_json(cli_json, packed):
    """Inspect --json has each kernel with its files, and the lists beside them."""
    status, told = cli_json("inspect", packed)
    assert status == 0
    assert set(told) == {
        "path",
        "digest",
        "format",
        "size_bytes",
        "counts",
        "kernels",
        "tuning_files",
        "helpers",
        "opaque",
        "environments",
    }
    kernel = told["kernels"][0]
    assert set(kernel) == {
        "key",
        "name",
        "target",
        "warps",
        "shared_bytes",
        "binary_bytes",
        "ir_bytes",
        "facts",
        "static_only",
        "devices",
        "compile_ms",
        "toolchain",
        "files",
        "stages",
        "constants",
        "signature",
        "attributes",
        "options",
    }
    assert (kernel["warps"], kernel["stages"], kernel["facts"], kernel["constants"]) == (
        4,
        3,
        False,
        None,
    )
    assert {file["kind"] for file in kernel["files"]} >= {"cubin", "json", "ptx"}


def test_inspect_selects_kernels(cli_json, cli, packed):
    """Inspect --kernel takes a glob over names and keys, and says when nothing matches."""
    _, told = cli_json("inspect", packed, "--kernel", "gelu*")
    assert {kernel["name"] for kernel in told["kernels"]} == {"gelu_kernel"}
    _, told = cli_json("inspect", packed, "--kernel", told["kernels"][0]["key"])
    assert len(told["kernels"]) == 1
    result = cli("inspect", packed, "--kernel", "nothing*")
    assert (result.exit_code, len(result.stderr.splitlines())) == (1, 1)


def test_inspect_leaks_names_the_source(cli, cli_json, packed):
    """Inspect --leaks finds the path of the kernels' source, in texts and in debug information."""
    _, told = cli_json("inspect", packed, "--leaks")
    leaks = {leak["path"]: leak for leak in told["leaks"]["paths"]}
    assert {"ttir", "ptx"} <= set(leaks[str(KERNELS)]["in"])
    assert "cubin" in leaks[str(KERNELS.parent)]["in"]
    assert str(KERNELS) in cli("inspect", packed, "--leaks").stdout


def test_inspect_leaks_tells_what_was_taken_out(cli_json, packed):
    """Inspect --leaks counts files whose paths are placeholders, and does not list those paths."""
    _, told = cli_json("inspect", packed, "--leaks")
    assert told["leaks"]["placeholders"].keys() <= {"cache_dir", "triton_dir"}
    assert sum(told["leaks"]["placeholders"].values()) > 0
    assert not any("libdevice" in leak["path"] for leak in told["leaks"]["paths"])


def test_verify_says_what_it_checked(cli, cli_json, packed):
    """Verify of a sound bundle says how many files and kernels it checked, and that it is sound."""
    result = cli("verify", packed)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "the metadata of 4 kernels" in result.stdout
    status, told = cli_json("verify", packed)
    assert (status, told["ok"], told["problems"], told["checked"]["kernels"]) == (0, True, [], 4)


def test_verify_finds_damage(cli, packed, tmp_path):
    """Verify of a bundle with a flipped bit in its content exits with 1, lists problems and gives
    one error line.
    """
    data = bytearray(packed.read_bytes())
    data[len(data) // 3] ^= 1
    damaged = tmp_path / "damaged.tbundle"
    damaged.write_bytes(data)
    result = cli("verify", damaged)
    assert result.exit_code == 1
    assert [line.split(":")[0] for line in result.stderr.splitlines()] == ["error"]
    assert result.stdout.startswith("  ")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"name": "another"}, "name: the metadata says"),
        ({"key": "A" * 52}, "the metadata is of another kernel"),
    ],
)
def test_verify_compares_metadata_with_the_manifest(cli_json, packed, tmp_path, change, reason):
    """Verify finds a kernel whose metadata speaks of another one."""
    with bundler.Bundle.load(packed) as bundle:
        key = bundle.kernels[0].key
    path = rebuilt(
        packed,
        tmp_path / "b.tbundle",
        lambda k: dataclasses.replace(k, **change) if k.key == key else k,
    )
    status, told = cli_json("verify", path)
    assert (status, told["ok"], len(told["problems"])) == (1, False, 1)
    assert told["problems"][0]["reason"].startswith(reason)


@pytest.mark.parametrize(
    "said",
    [{"name": {"a": 1}}, {"name": [2**70]}, {"target": {"backend": [], "arch": {}}}, {"target": 3}],
)
def test_verify_takes_metadata_that_says_anything(cli_json, tmp_path, said):
    """Whatever stands in a kernel's metadata, verify lists it as a problem."""
    from tools.fuzz import container as fuzz_container

    made = fuzz_container.draft()
    made.kernels[0].file("json").data = json.dumps(fuzz_container.metadata("one") | said).encode()
    (tmp_path / "b.tbundle").write_bytes(made.join())
    status, told = cli_json("verify", tmp_path / "b.tbundle")
    assert (status, told["ok"]) == (1, False)
    assert made.kernels[0].key in {problem["name"] for problem in told["problems"]}


def test_verify_compares_the_release(cli_json, packed, tmp_path):
    """Verify finds kernels whose manifest names another Triton than their metadata."""
    other = bundler.Toolchain(release="1.0")
    path = rebuilt(
        packed, tmp_path / "b.tbundle", lambda kernel: dataclasses.replace(kernel, toolchain=other)
    )
    status, told = cli_json("verify", path)
    assert (status, len(told["problems"])) == (1, 4)


def test_diff_says_what_was_added_and_removed(cli, packed, halves):
    """Diff lists what only one side has, and exits with 0 unless --exit-code is given."""
    result = cli("diff", packed, halves[0])
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == "0 added, 2 removed, 0 changed, 2 the same"
    assert [line.split()[:3] for line in result.stdout.splitlines() if line.startswith("-")] == [
        ["-", "gelu_kernel", "hip:gfx942"],
        ["-", "row_sum_kernel", "hip:gfx942"],
    ]
    assert (
        cli("diff", halves[0], packed).stdout.splitlines()[-1]
        == "2 added, 0 removed, 0 changed, 2 the same"
    )
    assert cli("diff", "--exit-code", halves[0], packed).exit_code == 1


def test_diff_of_a_bundle_with_itself(cli, cli_json, packed):
    """A bundle does not differ from itself, with --exit-code too."""
    assert cli("diff", "--exit-code", packed, packed).exit_code == 0
    assert cli_json("diff", packed, packed) == (
        0,
        {"same": 4, "added": [], "removed": [], "changed": []},
    )


def test_diff_says_what_changed(cli_json, packed, tmp_path):
    """Diff names what is otherwise in a kernel that both have."""
    with bundler.Bundle.load(packed) as bundle:
        bundle.select(keep="launch").save(tmp_path / "launch.tbundle")
    _, told = cli_json("diff", packed, tmp_path / "launch.tbundle")
    assert len(told["changed"]) == 4
    assert (
        "gelu_kernel.ttir"
        in next(k for k in told["changed"] if k["name"] == "gelu_kernel")["changes"]
    )


def test_merge_is_the_union(cli, cli_json, packed, halves, tmp_path):
    """Merge of the two halves is the whole, and drops nothing."""
    result = cli("merge", *halves, "-o", tmp_path / "m.tbundle")
    assert result.exit_code == 0
    assert "dropped 0 variants" in result.stdout
    assert "4 kernels of 2 bundles" in result.stdout
    assert cli("diff", "--exit-code", packed, tmp_path / "m.tbundle").exit_code == 0
    _, told = cli_json("merge", *halves, "-o", tmp_path / "m.tbundle")
    assert (told["counts"]["kernels"], told["variants_dropped"], len(told["sources"])) == (4, 0, 2)


def test_merge_onto_one_of_its_sources(cli, packed, halves):
    """Merge may write over a bundle that it reads."""
    assert cli("merge", *halves, "-o", halves[0]).exit_code == 0
    assert cli("diff", "--exit-code", packed, halves[0]).exit_code == 0


def test_merge_counts_variants(cli, packed, program, tmp_path):
    """Kernels of the same source in another place are variants: merge keeps one build of each, and
    says how many it dropped.
    """
    moved = tmp_path / "elsewhere" / "kernels.py"
    moved.parent.mkdir()
    moved.write_bytes(KERNELS.read_bytes())
    text = program.read_text().replace(str(KERNELS), str(moved))
    subprocess.run(
        [sys.executable, "-P", "-c", text, "gelu", "cuda:90"], check=True, stdout=subprocess.DEVNULL
    )
    assert cli("pack", tmp_path / "triton-cache", "-o", tmp_path / "moved.tbundle").exit_code == 0
    result = cli("merge", packed, tmp_path / "moved.tbundle", "-o", tmp_path / "m.tbundle")
    assert "dropped 1 variant:" in result.stdout
    assert "4 kernels of 2 bundles" in result.stdout


def test_json_is_one_document(cli, packed):
    """With --json standard output is one JSON object and standard error is empty."""
    for words in (("inspect", packed), ("verify", packed), ("diff", packed, packed)):
        result = cli(*words, "--json")
        assert isinstance(json.loads(result.stdout), dict)
        assert result.stderr == ""


def test_inspect_resources_lists_what_each_kernel_takes(cli, cli_json, packed):
    """Inspect --resources has a row for each kernel, of NVIDIA's and of AMD's, with the figures of
    its binary.
    """
    status, told = cli_json("inspect", packed, "--resources")
    assert (status, set(told)) == (0, {"path", "digest", "kernels"})
    assert len(told["kernels"]) == 4
    with bundler.Bundle.load(packed) as bundle:
        for kernel, facts in zip(bundle.kernels, told["kernels"], strict=True):
            read = read_resources(bundle.read(kernel.binary), kernel.spec.entry)
            assert (facts["key"], facts["problem"]) == (kernel.key, None)
            assert facts["resources"]["registers"] == read.registers > 0
            assert facts["resources"]["scalar_registers"] == read.scalar_registers
            assert facts["resources"]["constant_bytes"] == {
                str(bank): size for bank, size in read.constant_bytes
            }
            assert (facts["dynamic_shared_bytes"], facts["binary_bytes"]) == (
                kernel.spec.shared_bytes,
                kernel.binary.size,
            )
    result = cli("inspect", packed, "--resources", "--kernel", "gelu*")
    assert (result.exit_code, result.stderr) == (0, "")
    rows = [line.split() for line in result.stdout.splitlines() if "_kernel" in line]
    assert [row[:4] for row in rows] == [
        [facts["name"], facts["target"], str(facts["warps"]), str(facts["resources"]["registers"])]
        for facts in told["kernels"]
        if facts["name"] == "gelu_kernel"
    ]
    assert result.stdout.splitlines()[-1] == "2 kernels"


def test_inspect_resources_names_a_binary_that_cannot_be_read(cli, cli_json, packed, tmp_path):
    """A kernel whose binary holds no such function is told with the reason, the others have their
    figures, and the exit status is 1.
    """
    path = rebuilt(packed, tmp_path / "renamed.tbundle", _with_another_entry)
    status, told = cli_json("inspect", path, "--resources")
    assert status == 1
    for facts in told["kernels"]:
        unknown = facts["name"] == "gelu_kernel"
        assert (facts["resources"] is None, facts["problem"] is not None) == (unknown, unknown)
    result = cli("inspect", path, "--resources")
    assert result.exit_code == 1
    assert (
        "error: the binaries of 2 kernels cannot be read: another: the device binary has no kernel"
        " of that name" in result.stderr
    )


def _with_another_entry(kernel):
    if kernel.name != "gelu_kernel":
        return kernel
    return dataclasses.replace(kernel, spec=dataclasses.replace(kernel.spec, entry="another"))


def test_inspect_answers_one_question_at_a_time(cli, packed):
    """--leaks, --show and --resources exclude each other."""
    for words in (
        ("--leaks", "--show", "ptx"),
        ("--leaks", "--resources"),
        ("--show", "ptx", "--resources"),
    ):
        result = cli("inspect", packed, *words)
        assert (result.exit_code, "are two questions; ask one" in result.stderr) == (2, True)


@pytest.mark.parametrize("command", ["merge", "diff"])
def test_of_several_files_the_one_that_is_no_bundle_is_named(command, cli, packed, tmp_path):
    """Whichever of them it is."""
    (tmp_path / "none.tbundle").write_text("not a bundle at all")
    more = ("-o", tmp_path / "out.tbundle") if command == "merge" else ()
    for files in ((packed, tmp_path / "none.tbundle"), (tmp_path / "none.tbundle", packed)):
        result = cli(command, *files, *more)
        assert result.exit_code == 1
        assert f"{tmp_path}/none.tbundle: not a bundle" in result.stderr
