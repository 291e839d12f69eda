# SPDX-License-Identifier: Apache-2.0
"""Exports of tuned kernels: their files, and a real program in C++ that loads and launches one."""

import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import compiling
import launch_calls as calls
import pytest

import bundler
from bundler.errors import NotFound
from bundler.format.constant_values import encode
from bundler.format.launch_spec import LaunchFacts
from bundler.runtime import Config, DryDriver, TextGrid, TunerOptions, heuristics
from bundler.runtime.heuristics.facts import Device, Setting
from bundler.runtime.heuristics.launch_grids import FixedGrid
from bundler.runtime.tuning.autotuned_kernel import TunedCall
from bundler.runtime.tuning.kernel_export import ExportNotes, compiled_in, export_kernel, plain

pytestmark = pytest.mark.toolchain
ROOT = Path(__file__).resolve().parents[2]
X, Y, OUT = calls.X, calls.Y, calls.OUT
GRID = TextGrid("-(-n // BLOCK)")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture
def add(launch_kernels, monkeypatch, compiled):
    """A vector add with one config, on a GPU that is not there."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(compiled))
    options = TunerOptions(driver=DryDriver(), workers=1, record=False)
    return bundler.autotune([Config({"BLOCK": 128})], ["n"], options=options)(launch_kernels.add)


def test_a_constant_of_no_argument_is_refused():
    """Launch facts of a bundle that somebody else made may name any argument."""
    facts = LaunchFacts("ast", (), (("n", encode("i32")),), (((1,), encode(7)),), (), ())
    kernel = SimpleNamespace(key="K", launch=SimpleNamespace(require_facts=lambda: facts))
    with pytest.raises(
        bundler.CannotLaunchStatically, match=r"constants of arguments \[1\], and it has 1"
    ):
        compiled_in(kernel)


def test_an_export_has_every_stage_and_the_grid(add, tmp_path):
    """Binary, stages as the compiler left them, parameters with what the compiler took for granted,
    and the grid in two forms.
    """
    exported = add.export(tmp_path / "out", X, Y, OUT, 1024, grid=GRID)
    facts = json.loads(exported.parameters.read_text())
    assert sorted(exported.stages) == ["llir", "ptx", "source", "ttgir", "ttir"]
    assert ".target sm_90" in exported.stages["ptx"].read_text()
    assert "tt.func public @add" in exported.stages["ttir"].read_text()
    assert facts["stages"] == {kind: path.name for kind, path in exported.stages.items()}
    assert facts["grid"] == {
        "sizes": ["n"],
        "expressions": ["-(-n // 128)", "1", "1"],
        "positive": False,
        "cpp": ["bundler_ceildiv(n, INT64_C(128), &bundler_bad)", "INT64_C(1)", "INT64_C(1)"],
    }
    assert [(p["name"], p["divisible_by"], p["hidden"]) for p in facts["parameters"]][2:5] == [
        ("out", 16, False),
        ("n", 16, False),
        ("global_scratch", 1, True),
    ]
    assert (facts["compiled_in"], facts["schema"], facts["header"]) == (
        {"BLOCK": 128},
        1,
        exported.header.name,
    )
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        exported.binary.name,
        exported.parameters.name,
        exported.header.name,
        *facts["stages"].values(),
    }


def test_a_grid_that_is_no_text_is_left_out_with_the_reason(add, tmp_path):
    """A function or a tuple says nothing of other sizes, so neither file has a grid that would be
    wrong for them.
    """
    for grid in (lambda meta: (-(-meta["n"] // meta["BLOCK"]),), (8,), None):
        exported = add.export(tmp_path / "out", X, Y, OUT, 1024, grid=grid)
        facts = json.loads(exported.parameters.read_text())
        assert facts["grid"]["expressions"] is None
        assert "TextGrid('-(-n // BLOCK)')" in facts["grid"]["why"]
        assert "There is no add_grid: " in exported.header.read_text()
        assert "int add_grid" not in exported.header.read_text()


def test_a_text_grid_launches_as_a_function_does(add):
    """The same grid, from the call's arguments and the config."""
    add[GRID](X, Y, OUT, 1000)
    assert add.options.driver.launches[-1].grid == (8, 1, 1)
    assert add[GRID](X, Y, OUT, 0) is None
    assert len(add.options.driver.launches) == 1


def test_a_heuristic_kernel_is_exported_with_its_grid_and_metadata(
    launch_kernels, monkeypatch, compiled, tmp_path
):
    """Its grid is known as text without being written so; sizes that only the grid needs are
    parameters of its function.
    """
    monkeypatch.setenv("TRITON_CACHE_DIR", str(compiled))
    options = TunerOptions(driver=DryDriver(), workers=1, record=False)
    setting = Setting(Device("cuda", 132))
    kernel = heuristics.user_autotune(
        [{"BLOCK": 64}],
        setting,
        grid=FixedGrid(("-(-n // BLOCK)", "_grid_1", 1)),
        options=options,
        extra_arguments=("_grid_1",),
    )(launch_kernels.add)
    kernel.tuned.metadata = {
        "inductor_meta": {"hints": {"b", "a"}, "device": Device("cuda", 132), 3: (1, None)}
    }
    facts = json.loads(kernel.export(tmp_path / "out", X, Y, OUT, 1024, 2).parameters.read_text())
    assert (facts["grid"]["sizes"], facts["grid"]["expressions"]) == (
        ["n", "_grid_1"],
        ["-(-n // 64)", "_grid_1", "1"],
    )
    assert facts["metadata"]["inductor_meta"]["hints"] == ["a", "b"]
    assert facts["metadata"]["inductor_meta"]["3"] == [1, None]


def test_metadata_is_plain():
    """What JSON does not know becomes what it does, the same in every process."""
    from bundler.runtime.heuristics.facts import ReductionHint

    assert plain({"a": ReductionHint.INNER, "b": (float("-inf"), 0.5, {2: None})}) == {
        "a": "INNER",
        "b": ["-inf", 0.5, {"2": None}],
    }


def test_a_kernel_of_any_name_stays_in_the_directory(add, tmp_path):
    """A bundle from elsewhere may call its kernel a path; files are called after the binary's, and
    the header has a name of C++.
    """
    exported = add.export(tmp_path / "first", X, Y, OUT, 1024, grid=GRID)
    call = TunedCall(None, (X, Y, OUT, 1024), {})
    made = add._compile(add.ready(), add.configs[0], call)
    odd = replace(made.kernel, name="../../out")
    again = export_kernel(
        odd, made.image, made.bundle, ExportNotes(add.configs[0]), tmp_path / "second"
    )
    assert again.binary.parent == tmp_path / "second"
    assert again.binary.name == exported.binary.name
    assert "static const bundler_kernel ______out_kernel = {" in again.header.read_text().replace(
        "k______", "______"
    )


def test_a_place_that_cannot_be_written_is_a_typed_error(add, tmp_path):
    """A file where the directory should be."""
    (tmp_path / "file").write_text("")
    with pytest.raises(bundler.BundlerError):
        add.export(tmp_path / "file" / "out", X, Y, OUT, 1024, grid=GRID)
    assert issubclass(NotFound, bundler.BundlerError)


@pytest.mark.slow
def test_a_program_in_cpp_launches_an_exported_kernel(add, tmp_path):
    """`examples/exported_kernel.cpp` over a driver that adds as the kernel would: right numbers,
    and just the calls of a launch.
    """
    exported = add.export(tmp_path / "out", X, Y, OUT, 1024, grid=GRID)
    program, library, log = tmp_path / "program", tmp_path / "libadding.so", tmp_path / "log"
    source = Path(__file__).parent / "drivers" / "adding_driver.c"
    subprocess.run(
        [
            compiling.compiler(),
            "-shared",
            "-fPIC",
            "-Wall",
            "-Wextra",
            "-Werror",
            source,
            "-o",
            library,
        ],
        check=True,
    )
    command = [
        compiling.cxx_compiler(),
        "-std=c++17",
        "-O1",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-include",
        exported.header,
    ]
    subprocess.run(
        [*command, ROOT / "examples" / "exported_kernel.cpp", "-ldl", "-o", program], check=True
    )

    def run(*words):
        log.unlink(missing_ok=True)
        told = {**os.environ, "ADDING_DRIVER_LOG": str(log), "ADDING_DRIVER_BLOCK": "128"}
        done = subprocess.run(
            [program, tmp_path / "out", *words], capture_output=True, text=True, env=told
        )
        return done, log.read_text().splitlines() if log.exists() else []

    done, heard = run("10000", library)
    assert (done.returncode, done.stderr, done.stdout.splitlines()[:2]) == (
        0,
        "",
        ["grid 79 1 1", "0 of 10000 wrong"],
    )
    assert heard[4:12] == [
        "cuModuleLoadData binary",
        "cuModuleGetFunction add",
        "cuFuncGetAttribute 1",
        "cuMemAlloc 40000",
        "cuMemAlloc 40000",
        "cuMemAlloc 40000",
        "cuMemcpyHtoD 40000",
        "cuMemcpyHtoD 40000",
    ]
    launch = (
        "cuLaunchKernelEx 0xf0 grid 79 1 1 block 128 1 1 shared 0 stream 0 attributes 0 extra 0"
        " scratch 0"
    )
    assert heard[12] == launch
    assert heard.count(launch) == 101
    # Nothing to do is no launch, and a size without a grid reaches no driver.
    assert not any("Launch" in line for line in run("0", library)[1])
    done, heard = run(str(2**62), library)
    assert (done.returncode, done.stderr, heard) == (1, "more blocks than a device takes\n", [])
    shutil.move(exported.binary, tmp_path / "elsewhere")
    done, _ = run("10000", library)
    assert (done.returncode, done.stderr) == (1, f"{exported.binary.name}: not there, or empty\n")
