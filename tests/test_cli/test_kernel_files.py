# SPDX-License-Identifier: Apache-2.0
"""`triton-bundler tune export --as kernels`: the kernels that won, as files for programs in C++."""

import json
import sys
from pathlib import Path

import pytest

import bundler
from bundler.runtime import Config, DryDriver, TextGrid, TunerOptions

pytestmark = pytest.mark.toolchain
RUNTIME_TESTS = str(Path(__file__).resolve().parents[1] / "test_runtime")


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A bundle of a vector add, tuned on a GPU that is not there, with every stage of its
    kernels.
    """
    pytest.importorskip("triton")
    folder, driver = tmp_path_factory.mktemp("tuned"), DryDriver()

    def bench(fn, quantiles):
        fn()
        return [1.0 + abs(driver.launches[-1].grid[0] - 8)] * 3

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(folder / "cache"))
        patch.setattr(sys, "path", [RUNTIME_TESTS, *sys.path])
        import launch_calls as calls
        import launch_kernels

        options = TunerOptions(driver=driver, workers=1)
        listed = [Config({"BLOCK": block}) for block in (64, 128)]
        kernel = bundler.autotune(listed, ["n"], do_bench=bench, options=options)(
            launch_kernels.add
        )
        with bundler.recording() as recording:
            kernel[TextGrid("-(-n // BLOCK)")](calls.X, calls.Y, calls.OUT, 1024)
        recording.collect().save(folder / "t.tbundle")
    return folder / "t.tbundle"


def test_the_winner_is_written_with_its_stages_and_a_grid(cli, tuned, tmp_path):
    """Of two kernels the one that won; the grid's names are arguments, parameters of the config are
    numbers.
    """
    done = cli(
        "tune",
        "export",
        tuned,
        "--as",
        "kernels",
        "--grid",
        "max(-(-n // BLOCK), 1), 2",
        "-o",
        tmp_path / "out",
    )
    assert (done.exit_code, done.stdout) == (0, f"wrote 1 kernel to {tmp_path / 'out'}\n")
    (parameters,) = (tmp_path / "out").glob("*.json")
    facts = json.loads(parameters.read_text())
    assert (facts["config"]["kwargs"], facts["grid"]["expressions"]) == (
        {"BLOCK": 128},
        ["max(-(-n // 128), 1)", "2", "1"],
    )
    assert sorted(path.suffix for path in (tmp_path / "out").iterdir()) == [
        ".cubin",
        ".h",
        ".json",
        ".llir",
        ".ptx",
        ".source",
        ".ttgir",
        ".ttir",
    ]


def test_without_a_grid_the_header_says_so(cli, tuned, tmp_path):
    """And the report names the headers."""
    done = cli(
        "tune",
        "export",
        tuned,
        "--as",
        "kernels",
        "--kernel",
        "add",
        "-o",
        tmp_path / "out",
        "--json",
    )
    (header,) = json.loads(done.stdout)["headers"]
    assert "There is no add_grid: nobody gave a grid" in Path(header).read_text()


def test_a_kernel_that_is_not_in_the_bundle_is_left_out(cli, tuned, tmp_path):
    """A bundle of records alone has no kernel to write."""
    assert cli("tune", "export", tuned, "-o", tmp_path / "winners.json").exit_code == 0
    assert (
        cli("tune", "import", tmp_path / "winners.json", "-o", tmp_path / "r.tbundle").exit_code
        == 0
    )
    done = cli("tune", "export", tmp_path / "r.tbundle", "--as", "kernels", "-o", tmp_path / "out")
    assert (done.exit_code, done.stdout) == (0, f"wrote 0 kernels to {tmp_path / 'out'}\n")
    assert "left out add" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--as", "kernels", "--grid", "1,2,3,4"], "expected one to three expressions, got 4"),
        (["--as", "kernels", "--grid", "__import__('os')"], "not an expression over sizes"),
        (["--grid", "n"], "--grid is about --as kernels"),
    ],
)
def test_wrong_grids_are_refused_before_anything_is_written(cli, tuned, tmp_path, words, said):
    """With the reason, and a status."""
    done = cli("tune", "export", tuned, "-o", tmp_path / "out", *words)
    assert (done.exit_code != 0, said in done.stderr) == (True, True)
    assert not (tmp_path / "out").exists()
