# SPDX-License-Identifier: Apache-2.0
"""Inductor's generated modules run on this runtime: the recorded ones load, compile, and get the
configs that torch chose.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bundler.errors import FormatError, NotFound

HERE = Path(__file__).resolve().parent
# A quarter of a minute on a machine that has nothing else to do.
LIMIT_S = 280
pytestmark = [pytest.mark.timeout(LIMIT_S + 20), pytest.mark.slow]
RANGE = re.compile(r"tt\.make_range \{end = (\d+)")
SAME = ("num_warps", "num_stages", "num_ctas", "debug", "enable_fp_fusion", "ranges")


def start(*args, **env):
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TRITON_", "TORCHINDUCTOR_"))
    }
    done = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", *args],
        env=clean | env,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def cache(unpacked):
    """The recorded cache."""
    return unpacked("inductor-transformer-h200")


@pytest.fixture(scope="module")
def loaded(cache, tmp_path_factory):
    """What the program made of every module."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed, and generated kernels call its helper functions")
    program, out = str(HERE / "generated_corpus.py"), str(tmp_path_factory.mktemp("compiled"))
    return start(program, str(cache), out, TRITON_CACHE_DIR=out)


@pytest.fixture(scope="module")
def recorded(cache):
    """What torch compiled on the H200: kernel name -> [(key, metadata, sizes of its ranges)]."""
    found = {}
    for path in sorted(cache.glob("triton/0/*/*.ttir")):
        metadata = json.loads(path.with_suffix(".json").read_text())
        sizes = sorted({int(size) for size in RANGE.findall(path.read_text())})
        found.setdefault(path.stem, []).append((path.parent.name, metadata, sizes))
    return found


def test_all_modules_load_and_what_was_patched_is_put_back(loaded):
    """42 kernel modules and the 29 and 13 kernels inside the two wrappers load without a GPU; torch
    is as it was.
    """
    assert len(loaded["modules"]) == 42
    assert sorted(len(wrapper["names"]) for wrapper in loaded["wrappers"]) == [13, 29]
    assert loaded["undone"]
    assert loaded["left"] == []
    kinds = [module["kind"] for module in loaded["modules"]]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {
        "pointwise": 15,
        "reduction": 10,
        "persistent_reduction": 17,
    }


def test_the_wrappers_hold_the_same_kernels_as_the_modules(loaded):
    """Each kernel in a wrapper has a module with the same candidates."""
    modules = sorted((module["name"], module["shown"]) for module in loaded["modules"])
    inside = sorted(
        (name, shown)
        for wrapper in loaded["wrappers"]
        for name, shown in zip(wrapper["names"], wrapper["lists"], strict=True)
    )
    assert inside == modules


def test_every_kernel_compiles_for_the_gpu_that_is_not_here(loaded):
    """Each compiles for cuda:90, with a device binary, and what its config and metadata say reaches
    the compiler.
    """
    for module in loaded["modules"]:
        found, first = module["compiled"], module["configs"][0]
        assert found["target"] == "cuda:90"
        assert ".cubin" in found["files"]
        assert (found["num_warps"], found["num_stages"]) == (
            first["num_warps"],
            first["num_stages"],
        )
    assert len({module["compiled"]["key"] for module in loaded["modules"]}) == 42


def test_the_candidates_are_those_that_torch_compiled(loaded, recorded):
    """Torch compiled a variant for each candidate, with its warps and stages; one of them has the
    first candidate's tile.
    """
    assert (
        sum(len(module["configs"]) for module in loaded["modules"])
        == 57
        == sum(map(len, recorded.values()))
    )
    for module in loaded["modules"]:
        variants = recorded[module["name"]]
        ours = sorted((config["num_warps"], config["num_stages"]) for config in module["configs"])
        assert ours == sorted(
            (metadata["num_warps"], metadata["num_stages"]) for _, metadata, _ in variants
        )
        alike = [metadata | {"ranges": sizes} for _, metadata, sizes in variants]
        mine = [module["compiled"][name] for name in SAME]
        assert mine in [[variant[name] for name in SAME] for variant in alike], module["name"]


def test_the_winners_that_torch_measured_are_among_the_candidates(loaded, recorded, cache):
    """Each winner that torch kept beside a module is one of its candidates, chosen from our list by
    torch's own hash of it.
    """
    by_folder = {module["folder"]: module for module in loaded["modules"]}
    winners = sorted(cache.glob("??/*.best_config"))
    assert len(winners) == 15
    for path in winners:
        best, module = json.loads(path.read_text()), by_folder[path.parent.name]
        configs = [
            {**config["kwargs"], **{name: config[name] for name in ("num_warps", "num_stages")}}
            for config in module["configs"]
        ]
        assert {name: best[name] for name in configs[0]} in configs
        assert best["configs_hash"] == module["hash"]
        keys = {key: metadata for key, metadata, _ in recorded[module["name"]]}
        assert keys[best["triton_cache_hash"]]["num_warps"] == best["num_warps"]
    # The others had one candidate, and nothing to choose from.
    assert {module["folder"] for module in loaded["modules"] if len(module["configs"]) > 1} == {
        p.parent.name for p in winners
    }


def test_a_generated_kernel_is_exported_with_torchs_metadata(loaded):
    """The grid as text gives what was launched; torch's metadata is plain data, the device and sets
    in it, too.
    """
    found = {
        module["name"]: module["exported"] for module in loaded["modules"] if module["exported"]
    }
    assert len(found) == 4
    for name, exported in found.items():
        assert exported["grid"] == exported["launched"], name
        assert {"ptx", "ttgir", "ttir"} <= set(exported["stages"])
        assert f"static inline int {name}_grid(" in exported["header"]
        triton_meta, inductor_meta = (
            exported["metadata"]["triton_meta"],
            exported["metadata"]["inductor_meta"],
        )
        assert (triton_meta["device"]["type"], triton_meta["device"]["multi_processor_count"]) == (
            "cuda",
            132,
        )
        assert (inductor_meta["kernel_name"], inductor_meta["grid_type"][:4]) == (name, "Grid")


def test_a_generated_kernel_is_launched_with_its_arguments_alone(loaded):
    """Called as Inductor's wrappers call it: two candidates are measured, each with its grid, and
    the winner is launched.
    """
    grids = {module["name"]: module["grids"] for module in loaded["modules"] if module["grids"]}
    assert grids == {
        "triton_poi_fused_embedding_dense_backward_26": [[4096, 1, 1], [8192, 1, 1], [4096, 1, 1]],
        "triton_red_fused_sum_view_6": [[256, 1, 1]],
        "triton_per_fused__to_copy_mul_sum_view_4": [[8, 1, 1]],
        "triton_per_fused__log_softmax__to_copy_nll_loss_forward_sub_view_12": [[1, 1, 1]],
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1\n", "neither a kernel module"),
        ("def f(:\n", "not a Python module"),
        ("x = '\0'\n", "not a Python module"),
        ("kernel = async_compile.triton(name, source)\n", "neither a kernel module"),
    ],
)
def test_what_is_no_generated_module_is_refused_without_running(tmp_path, text, words):
    """A file that is neither a kernel module nor a wrapper is never imported."""
    from bundler.integrations.inductor_generated import load_generated

    marker = tmp_path / "ran"
    path = tmp_path / "module.py"
    path.write_text(f"open({str(marker)!r}, 'w')\n{text}")
    with pytest.raises(FormatError, match=words):
        load_generated(path)
    assert not marker.exists()


def test_files_that_cannot_be_read_are_typed_errors(tmp_path):
    """A missing file, and bytes that are no text."""
    from bundler.integrations.inductor_generated import load_generated

    with pytest.raises(NotFound):
        load_generated(tmp_path / "none.py")
    (tmp_path / "bytes.py").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FormatError, match="not a Python module"):
        load_generated(tmp_path / "bytes.py")


MODULE = """
import triton
import triton.language as tl
from torch._inductor.runtime import triton_helpers, triton_heuristics
from torch._inductor.runtime.hints import DeviceProperties, ReductionHint
triton_helpers.set_driver_to_gpu()

@triton_heuristics.{kind}(
    size_hints={hints},
    filename=__file__,
    triton_meta={{'signature': {{'in_ptr0': '*fp32', 'out_ptr0': '*fp32', 'xnumel': 'i32', 'XBLOCK': 'constexpr'}}, 'constants': {{}}{device}}},
    inductor_meta={meta},
)
@triton.jit
def kernel(in_ptr0, out_ptr0, xnumel, XBLOCK: tl.constexpr):
    x = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    tl.store(out_ptr0 + x, 2 * tl.load(in_ptr0 + x, x < xnumel), x < xnumel)
"""
DEVICE = (
    ", 'device': DeviceProperties(type='cuda', index=0, multi_processor_count=132, cc=90, major=9)"
)


def module(
    tmp_path, kind="pointwise", hints="{'x': 1024}", device=DEVICE, meta="{'grid_type': 'Grid1D'}"
):
    """A generated module, written by hand."""
    path = tmp_path / "module.py"
    path.write_text(MODULE.format(kind=kind, hints=hints, device=device, meta=meta))
    return path


TRY = """
import json, sys, torch
from torch._inductor.runtime import triton_helpers, triton_heuristics
import torch._inductor.runtime as package
from bundler.errors import BundlerError
from bundler.integrations.inductor_generated import load_generated
before = triton_heuristics, triton_helpers.set_driver_to_gpu
found = []
for path in sys.argv[1:]:
    try:
        (kernel,) = load_generated(path).values()
        found.append([str(config) for config in kernel.configs])
    except BundlerError as error:
        found.append([type(error).__name__, str(error)])
undone = before == (package.triton_heuristics, triton_helpers.set_driver_to_gpu)
(kernel,) = load_generated(sys.argv[1]).values()
x, out = torch.arange(1000.0), torch.zeros(1000)
kernel.run(x, out, 1000, stream=0)
print(json.dumps([found, undone, float((out - 2 * x).abs().max()), kernel.arguments]))
"""
CASES = {
    "good": {},
    "kind": {"kind": "no_such_heuristic"},
    "hints": {"hints": "{'x': 1000}"},
    "device": {"device": ""},
    "grid": {"meta": "{}"},
    "odd": {"meta": "{'grid_type': 'Grid1D', 'num_load': 1, 'autotune_hints': 5}"},
}


@pytest.fixture(scope="module")
def tried(tmp_path_factory):
    """What came of each case, whether torch was put back, and what the good one computed in the
    interpreter.
    """
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed, and generated kernels call its helper functions")
    paths = [module(tmp_path_factory.mktemp(name), **change) for name, change in CASES.items()]
    found, *rest = start("-c", TRY, *map(str, paths), TRITON_INTERPRET="1")
    return dict(zip(CASES, found, strict=True)), *rest


def test_modules_that_cannot_be_understood_are_typed_errors(tried):
    """An unknown heuristic, odd sizes, no device, no grid: each is named, and torch is put back as
    it was.
    """
    found, undone = tried[:2]
    assert undone
    assert found["good"] == [
        "XBLOCK=256, num_warps=4, num_stages=1",
        "XBLOCK=128, num_warps=4, num_stages=1",
    ]
    assert [found[name][0] for name in list(CASES)[1:]] == ["CompileFailed", *["ConfigError"] * 4]
    assert "no_such_heuristic" in found["kind"][1]
    assert "x is 1000" in found["hints"][1]
    assert "no device" in found["device"][1]
    assert "no grid_type" in found["grid"][1]
    assert "odd" in found["odd"][1]


def test_a_generated_kernel_gives_right_numbers_in_the_interpreter(tried):
    """It is called as Inductor's wrappers call it, without blocks and grid."""
    error, arguments = tried[2:]
    assert error == 0
    assert arguments == ["in_ptr0", "out_ptr0", "xnumel"]


TWICE = """
import json, sys, torch
from bundler.integrations.inductor_generated import load_generated
kernels = load_generated(sys.argv[1])
found = []
for name, kernel in kernels.items():
    x, out = torch.arange(64.0), torch.zeros(64)
    kernel.run(x, out, 64, stream=0)
    found.append([name, kernel.__name__, float((out / x.clamp(min=1))[1:].mean())])
print(json.dumps(found))
"""


def test_kernels_of_one_function_are_told_apart_by_what_the_wrapper_calls_them(tmp_path):
    """A wrapper compiles a user's function once for each signature: all have the function's name,
    and each a variable.
    """
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed, and generated kernels call its helper functions")
    texts = [generated("scale"), generated("scale", ("2 * tl.load", "3 * tl.load"))]
    path = tmp_path / "wrapper.py"
    path.write_text(
        "\n".join(
            f"scale_{number} = async_compile.triton('scale', '''{text}''', device_str='cuda')"
            for number, text in enumerate(texts)
        )
    )
    assert start("-c", TWICE, str(path), TRITON_INTERPRET="1") == [
        ["scale_0", "scale", 2.0],
        ["scale_1", "scale", 3.0],
    ]


SIGNATURE = (
    "'signature': {'in_ptr0': '*fp32', 'out_ptr0': '*fp32', 'xnumel': 'i32', 'XBLOCK':"
    " 'constexpr'}, 'constants': {}"
)
ALIGNED = (
    ", 'configs': [{(0,): [['tt.divisibility', 16]], (1,): [['tt.divisibility', 16]], (2,):"
    " [['tt.divisibility', 16]]}]"
)


def generated(name, *changes):
    """The text of a generated kernel module, with `changes` (what, by what) in it."""
    text = MODULE.format(
        kind="pointwise",
        hints="{'x': 4096}",
        device=DEVICE + ALIGNED,
        meta="{'grid_type': 'Grid1D'}",
    )
    for before, after in (("def kernel(", f"def {name}("), *changes):
        assert before in text
        text = text.replace(before, after)
    return text


def test_all_kernels_of_a_wrapper_are_compiled_in_workers(tmp_path):
    """Each candidate of each kernel is compiled once, in a worker; calls find them; a broken kernel
    fails under its own name.
    """
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed, and generated kernels call its helper functions")
    constant = SIGNATURE.replace("'xnumel': 'i32'", "'xnumel': 'constexpr'").replace(
        "{}", "{'xnumel': 1}"
    )
    one_pointer = constant.replace("'out_ptr0': '*fp32', ", "")
    sources = {
        "triton_poi_double": generated("triton_poi_double"),
        "triton_poi_first": generated(
            "triton_poi_first",
            (SIGNATURE, one_pointer),
            ("in_ptr0, out_ptr0", "in_ptr0"),
            ("out_ptr0 +", "in_ptr0 +"),
            (ALIGNED, ALIGNED[: ALIGNED.index(", (1,)")] + "}]"),
        ),
        "triton_poi_broken": generated(
            "triton_poi_broken", ("2 * tl.load", "no_such_name * tl.load")
        ),
    }
    calls = [
        f"{name} = async_compile.triton('{name}', '''{text}''', device_str='cuda')"
        for name, text in sources.items()
    ]
    path = tmp_path / "wrapper.py"
    path.write_text("\n".join(calls))
    found = start(
        str(HERE / "generated_service.py"), str(path), TRITON_CACHE_DIR=str(tmp_path / "cache")
    )
    assert found["kernels"] == ["triton_poi_double", "triton_poi_first"]
    assert "triton_poi_broken does not compile" in found["broken"]
    assert "no_such_name" in found["broken"]
    assert (found["compiled"], found["failed"]) == (4, 2)
    assert found["hits"] == [True] * 4
    assert found["grids"] == [[16, 1, 1], [1, 1, 1]]
