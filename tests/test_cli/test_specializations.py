# SPDX-License-Identifier: Apache-2.0
"""`inspect` tells kernels of one name apart: constants, signature, stages, and whatever else
differs.
"""

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest

import bundler
from bundler.cli.bundles.specializations import specialization_of, told
from bundler.format.constant_values import encode
from bundler.format.launch_spec import Argument, LaunchFacts

_SPEC = importlib.util.spec_from_file_location(
    "cli_builders", Path(__file__).parents[1] / "test_format" / "builders.py"
)
build = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(build)


def facts(types, constants, aligned=(), **options):
    """Return launch facts: argument -> type, constant -> value, and the arguments whose values 16
    divides.
    """
    names = [*types, *constants]
    arguments = tuple(Argument(name, "", None, name in constants, False, False) for name in names)
    signature = tuple((name, encode(types.get(name, "constexpr"))) for name in names)
    hints = tuple(((names.index(name),), encode([["tt.divisibility", 16]])) for name in aligned)
    chosen = {"num_stages": 3, "num_warps": 4} | options
    return LaunchFacts(
        "ast",
        arguments,
        signature,
        tuple(((names.index(name),), encode(value)) for name, value in constants.items()),
        hints,
        tuple((name, encode(value)) for name, value in sorted(chosen.items())),
    )


def bundle_of(*many, parts=None, name="k"):
    """Return a bundle with a kernel of one name for each of these facts."""
    files = build.Files()
    return files.bundle(
        *(
            files.kernel(
                number,
                name=name,
                facts_bytes=one if one is None else one.to_bytes(),
                parts_bytes=parts and bundler.KeyParts(parts[number], proven=True).to_bytes(),
            )
            for number, one in enumerate(many)
        )
    )


def cells(bundle):
    """Return what the table says of each kernel."""
    return told(bundle.kernels, [specialization_of(bundle, kernel)[0] for kernel in bundle])


X = {"x": "*fp32", "y": "*fp32", "n": "i32"}


def test_a_kernel_with_a_name_of_its_own_is_told_whole():
    """Every constant, and the types with what divides them, equal neighbors once."""
    (row,) = cells(bundle_of(facts(X, {"BLOCK": 64, "EPS": 1e-6}, aligned=("x", "y"))))
    assert (row.stages, row.constants, row.signature, row.other) == (
        "3",
        "BLOCK=64, EPS=1e-06",
        "*fp32:16 x2, i32",
        "",
    )


@pytest.mark.parametrize(
    ("one", "two", "differ"),
    [
        (
            facts(X, {"A": 1, "B": 2}),
            facts(X, {"A": 1, "B": 4}),
            [("B=2", "*fp32 x2, i32", ""), ("B=4", "*fp32 x2, i32", "")],
        ),
        (
            facts(X, {"A": 1}),
            facts({**X, "y": "*fp16"}, {"A": 1}),
            [("A=1", "y: *fp32", ""), ("A=1", "y: *fp16", "")],
        ),
        (facts(X, {}, aligned=("n",)), facts(X, {}), [("-", "n: i32:16", ""), ("-", "n: i32", "")]),
        (
            facts(X, {"A": 1}),
            facts(X, {"A": 1}, maxnreg=64),
            [("A=1", "*fp32 x2, i32", ""), ("A=1", "*fp32 x2, i32", "maxnreg=64")],
        ),
        (facts(X, {"A": 1}), facts(X, {"A": 1}, num_stages=4), [("A=1", "*fp32 x2, i32", "")] * 2),
        (
            facts({"x": "i32"}, {"n": 1}),
            facts({"x": "i32", "n": "i32"}, {}),
            [("n=1", "-", ""), ("-", "n: i32", "")],
        ),
    ],
)
def test_of_kernels_that_share_a_name_what_differs_is_told(one, two, differ):
    """Only the constants and arguments that differ, and options where nothing else does; stages
    have a column.
    """
    rows = cells(bundle_of(one, two))
    assert [(row.constants, row.signature, row.other) for row in rows] == differ
    assert len({dataclasses.astuple(row) for row in rows}) == 2


def test_kernels_alike_in_everything_differ_by_the_parts_of_their_keys():
    """Another source text, another line: what the key was made of says it."""
    same = facts(X, {"A": 1})
    parts = [
        (("source.text", f"{n}" * 64), ("source.line", f"{n}1"), ("backend.name", "cuda"))
        for n in (1, 2)
    ]
    rows = cells(bundle_of(same, same, parts=parts))
    assert [row.other for row in rows] == ["source=11111111…, line=11", "source=22222222…, line=21"]


def test_other_targets_and_names_are_compared_apart():
    """What differs between targets, as every option does, tells nothing about a kernel."""
    files = build.Files()
    one = files.kernel(1, facts_bytes=facts(X, {"A": 1}).to_bytes())
    two = files.kernel(2, target=build.HIP, facts_bytes=facts(X, {"A": 1}, kpack=1).to_bytes())
    assert [(row.constants, row.other) for row in cells(files.bundle(one, two))] == [
        ("A=1", "")
    ] * 2


def test_of_a_packed_kernel_the_metadata_tells_the_stages():
    """Constants and signature are not known; stages and other options stand in Triton's
    metadata.
    """
    files = build.Files()
    kernels = [
        files.kernel(
            n, metadata={"num_stages": n, "maxnreg": 32, "shared": 0}, extra={f"{n}.ptx": b""}
        )
        for n in (2, 5)
    ]
    bundle = files.bundle(*kernels)
    assert [(row.stages, row.constants, row.signature) for row in cells(bundle)] == [
        ("2", "-", "-"),
        ("5", "-", "-"),
    ]
    known, _ = specialization_of(bundle, bundle.kernels[0])
    assert known.options == {"num_stages": 2, "num_warps": 4, "maxnreg": 32}


def test_json_has_all_of_a_specialization(cli_json, tmp_path):
    """Constants that JSON has no number for are texts, and an argument's tuple is named by its
    indices.
    """
    one = facts({"x": "*fp32", "t": ("i32", "i32")}, {"INF": float("inf"), "B": 2}, aligned=("x",))
    one = dataclasses.replace(one, constants=(*one.constants, ((1, 0), encode(1))))
    bundle_of(one).save(tmp_path / "b.tbundle")
    status, seen = cli_json("inspect", tmp_path / "b.tbundle")
    (kernel,) = seen["kernels"]
    assert (status, kernel["stages"]) == (0, 3)
    assert kernel["constants"] == {"INF": "inf", "B": 2, "t[0]": 1}
    assert kernel["signature"] == {"x": "*fp32", "t": ["i32", "i32"]}
    assert kernel["attributes"] == {"x": {"tt.divisibility": 16}}
    assert kernel["options"] == {"num_stages": 3, "num_warps": 4}


def test_a_damaged_metadata_file_hides_nothing_else(cli, tmp_path):
    """The kernel is listed without what its metadata would say, and a warning says why."""
    files = build.Files()
    kernel = files.kernel("A", extra={"k.json": b"no JSON"})
    artifacts = tuple({artifact.filename: artifact for artifact in kernel.artifacts}.values())
    files.bundle(dataclasses.replace(kernel, artifacts=artifacts)).save(tmp_path / "b.tbundle")
    done = cli("inspect", tmp_path / "b.tbundle")
    assert (done.exit_code, "1 kernel" in done.stdout) == (0, True)
    assert done.stderr.startswith(
        "warning: the metadata of 1 kernel cannot be read: metadata is not valid JSON"
    )


def test_hostile_constants_are_harmless(cli, tmp_path):
    """Names and values that would command a terminal are printed as escapes, in the table and for
    one kernel alone.
    """
    bad = "\x1b]0;title\x07"
    bundle_of(facts({bad: bad}, {f"{bad}C": bad}), facts({bad: bad}, {f"{bad}C": "b"})).save(
        tmp_path / "b.tbundle"
    )
    for words in ((), ("--kernel", "0" * 63 + "1")):
        done = cli("inspect", tmp_path / "b.tbundle", *words)
        assert done.exit_code == 0
        assert "\x1b" not in done.stdout
        assert "\\x1b]0;title\\x07C" in done.stdout


@pytest.mark.toolchain
def test_every_row_of_real_kernels_is_another(cli, cli_json, compiled):
    """Four specializations of swiglu, of which two have as many warps and bytes, are told apart in
    a terminal of 80 columns.
    """
    done = cli("inspect", compiled.bundle, "--kernel", "swiglu_kernel")
    rows = [
        line.split()[:6] for line in done.stdout.splitlines() if line.startswith("swiglu_kernel")
    ]
    assert len({tuple(row) for row in rows}) == len(rows) == 8
    assert {row[4] for row in rows} == {"BLOCK=256", "BLOCK=512", "BLOCK=1024", "BLOCK=2048"}
    _, seen = cli_json("inspect", compiled.bundle, "--kernel", "swiglu_kernel")
    told_apart = [
        json.dumps([k["target"], k["warps"], k["stages"], k["constants"], k["signature"]])
        for k in seen["kernels"]
    ]
    assert len(set(told_apart)) == 8


@pytest.mark.toolchain
def test_a_kernel_alone_is_shown_whole(cli, compiled):
    """Its key, constants, types by name, options and files."""
    key = compiled.keys_of("matmul_kernel")[0]
    lines = cli("inspect", compiled.bundle, "--kernel", key[:10] + "…").stdout.splitlines()
    shown = {line.split()[0]: line.split(None, 1)[1] for line in lines if line.split()[1:]}
    assert shown["key"] == key
    assert shown["constants"] == "BLOCK_M=64, BLOCK_N=64, BLOCK_K=32"
    assert shown["signature"].startswith(
        "a_ptr: *fp16:16, b_ptr: *fp16:16, out_ptr: *fp16:16, m: i32:16"
    )
    assert "num_stages=3" in shown["options"]
    assert "matmul_kernel.cubin" in shown["files"]
