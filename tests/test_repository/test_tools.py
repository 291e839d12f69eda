# SPDX-License-Identifier: Apache-2.0
"""The programs in tools/ run, and the pages they make agree with the results in the repository."""

import importlib.util
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tools.bench import fresh, page
from tools.shared import measurement

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "package",
    [
        "bench",
        "clients",
        "cluster",
        "codegen",
        "crash",
        "fuzz",
        "gpu",
        "hip",
        "servers",
        "shared_fs",
        "wheels",
    ],
)
def test_each_package_lists_its_programs(run_tool, package):
    """`--help` of a package names each program and says what its docstring begins with, each
    program has a `--help` of its own, and the README has its line.
    """
    programs = importlib.import_module(f"tools.{package}.__main__").PROGRAMS
    listed = run_tool(package, "--help").stdout
    readme = (ROOT / "tools" / "README.md").read_text(encoding="utf-8")
    for program in programs:
        found = ROOT / "tools" / package / f"{program.replace('-', '_')}.py"
        about = found.read_text(encoding="utf-8").partition('"""')[2].partition("\n")[0]
        assert f"  {program:<15} {about}" in listed
        done = run_tool(f"{package} {program}", "--help")
        assert (done.returncode, done.stdout.partition(" [")[0]) == (
            0,
            f"usage: python -m tools.{package} {program}",
        )
        assert f"| `python -m tools.{package} {program}` |" in readme


def test_another_name_is_refused(run_tool):
    """A name that no program has is a mistake of the command line, which names those that there
    are.
    """
    done = run_tool("bench nothing")
    assert done.returncode == 2
    assert "'bundle', 'fresh', 'compile', 'cloud', 'remote', 'scale', 'farm', 'page'" in done.stderr


@pytest.fixture(scope="module")
def quick(run_tool, tmp_path_factory):
    """Return what a quick run of the benchmark printed and wrote."""
    for name in ("triton", "torch"):
        if find_spec(name) is None:
            pytest.skip(f"the benchmark needs {name}, which is not installed")
    folder = tmp_path_factory.mktemp("bench")
    done = run_tool(
        "bench bundle",
        "--quick",
        "--check",
        "--keep",
        folder / "keep",
        "--results",
        folder / "results",
    )
    results = {
        path.stem: json.loads(path.read_text()) for path in (folder / "results").glob("*.json")
    }
    return done, results, folder / "results"


@pytest.mark.slow
def test_the_benchmark_runs(quick):
    """A quick run writes both results, and with --check says which targets it missed, and fails for
    these alone.
    """
    done, results, _ = quick
    assert sorted(results) == ["bench-basics", "bench-bundle"], done.stderr
    missed = [row["work"] for result in results.values() for row in result["rows"] if not row["ok"]]
    said = [line for line in done.stdout.splitlines() if line.startswith("missed: ")]
    assert done.returncode == (1 if missed else 0)
    assert [
        line.removeprefix("missed: ").startswith(work)
        for line, work in zip(said, missed, strict=True)
    ] == [True] * len(missed)


@pytest.mark.slow
def test_the_result_has_its_facts_and_samples(quick):
    """The result names machine, versions and commit, and holds each sample and every promised row."""
    _, results, _ = quick
    result = results["bench-bundle"]
    assert {
        "machine",
        "versions",
        "commit",
        "kernels",
        "rounds",
        "tar",
        "places",
        "rows",
    } <= set(result)
    assert {"python", "triton", "torch", "zstandard"} <= set(result["versions"])
    assert {"_kernel_writer", "_kernel_reader"} <= set(result["machine"]["extensions"])
    for samples in result["places"].values():
        assert {len(found) for found in samples.values()} == {result["rounds"]}
        assert (
            set(samples["collect: kernels"])
            == set(samples["restore all: kernels"])
            == {result["kernels"]}
        )
        assert (
            set(samples["restore launch: kernels"])
            == set(samples["torch load: kernels"])
            == {result["kernels"]}
        )
    rows = " ".join(row["work"] for row in result["rows"])
    for words in (
        "restore everything",
        "restore the launch set",
        "collect and save",
        "times smaller",
        "peak memory",
        "time of each",
    ):
        assert words in rows
    for row in result["rows"]:
        assert {"work", "figure", "unit", "peer", "most", "least", "ok"} <= set(row)


@pytest.mark.slow
def test_the_page_is_made_from_the_results(run_tool, quick, tmp_path):
    """The page can be made from a result, names what is missed, and --check notices when it is
    stale.
    """
    _, results, folder = quick
    page = tmp_path / "page.md"
    arguments = ("--results", folder, "--page", page)
    assert run_tool("bench page", "--check", *arguments).returncode == 1
    assert run_tool("bench page", *arguments).returncode == 0
    assert run_tool("bench page", "--check", *arguments).returncode == 0
    text = page.read_text()
    for heading in (
        "What it costs to have us",
        "Bundle against peers",
        "Sizes",
        "Memory",
        "Not reached",
    ):
        assert f"## {heading}\n" in text
    missed = [row["work"] for result in results.values() for row in result["rows"] if not row["ok"]]
    assert [work in text.partition("## Not reached")[2] for work in missed] == [True] * len(missed)
    page.write_text(text.replace("Figures", "Numbers"))
    assert run_tool("bench page", "--check", *arguments).returncode == 1


@pytest.mark.slow
def test_a_cold_start_is_measured_beside_torch_s_bundler(run_tool, tmp_path):
    """Both put the same kernels back, each sample in a process of its own."""
    pytest.importorskip("torch")
    done = run_tool("bench fresh", "--quick", "--results", tmp_path)
    assert done.returncode == 0, done.stderr
    _, row = json.loads((tmp_path / "bench-fresh.json").read_text())["rows"]
    assert {name: len(found) for name, found in row["samples"].items()} == {"ours": 1, "torch": 1}


@pytest.mark.slow
def test_the_benchmark_of_engines_runs(run_tool, tmp_path):
    """A quick run holds the samples of an engine and of the local pool; the page has its row."""
    if find_spec("triton") is None:
        pytest.skip("the benchmark needs triton, which is not installed")
    done = run_tool("bench farm", "--quick", "--engines", "processes", "--results", tmp_path)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "bench-farm.json").read_text())["rows"]
    assert {side: len(found) for side, found in row["samples"].items()} == {
        "engine": 1,
        "local pool": 1,
    }
    run_tool("bench page", "--results", tmp_path, "--page", tmp_path / "page.md")
    assert f"| {row['work']} |" in (tmp_path / "page.md").read_text()


@pytest.mark.slow
def test_the_benchmark_of_the_service_runs(run_tool, tmp_path):
    """A quick run of all four sides holds every sample and names the targets it missed; the page
    has each row and each stage.
    """
    for name in ("triton", "torch"):
        if find_spec(name) is None:
            pytest.skip(f"the benchmark needs {name}, which is not installed")
    done = run_tool("bench compile", "--quick", "--check", "--results", tmp_path)
    result = json.loads((tmp_path / "bench-compile.json").read_text())
    assert [set(samples) for samples in result["samples"]] == [
        {"serial", "ours", "torch", "again"}
    ], done.stderr
    missed = [row["work"] for row in result["rows"] if not row["ok"]]
    said = [line for line in done.stdout.splitlines() if line.startswith("missed: ")]
    assert (len(said), done.returncode) == (len(missed), 1 if missed else 0)
    assert (
        run_tool("bench page", "--results", tmp_path, "--page", tmp_path / "page.md").returncode
        == 0
    )
    text = (tmp_path / "page.md").read_text()
    assert all(f"| {row['work']} |" in text for row in result["rows"])
    assert (
        {"ttir", "llir", "cubin"}
        <= set(result["stages"])
        == {stage for stage in result["stages"] if f"| {stage} |" in text}
    )


@pytest.mark.slow
def test_the_remote_benchmark_runs(run_tool, quick, tmp_path):
    """A quick run fetches all kernels both ways at each delay, counts exchanges, and names what it
    missed; the page has each row.
    """
    _, _, folder = quick
    done = run_tool(
        "bench remote",
        "--quick",
        "--check",
        "--keep",
        folder.parent / "keep",
        "--results",
        tmp_path,
    )
    result = json.loads((tmp_path / "bench-remote.json").read_text())
    assert list(result["delays"]) == ["0 ms", "1 ms", "10 ms"], done.stderr
    for delay, samples in result["delays"].items():
        for side in ("triton", "ours all", "ours launch"):
            assert samples[f"{side}: kernels"] == [result["kernels"]]
        assert samples["ours all: round trips"] <= [5]
        assert samples["triton"] > [3 * result["kernels"] * float(delay.split()[0]) / 1000]
    assert 0 < result["memory"]["ours"] < result["memory"]["triton"]
    missed = [row["work"] for row in result["rows"] if not row["ok"]]
    said = [line for line in done.stdout.splitlines() if line.startswith("missed: ")]
    assert (len(said), done.returncode) == (len(missed), 1 if missed else 0)
    assert (
        run_tool("bench page", "--results", tmp_path, "--page", tmp_path / "page.md").returncode
        == 0
    )
    text = (tmp_path / "page.md").read_text()
    assert all(f"| {row['work']} |" in text for row in result["rows"])


@pytest.mark.slow
def test_the_benchmark_of_object_stores_runs(run_tool, quick, tmp_path):
    """A quick run fetches all kernels and all files both ways at each delay, and names what it
    missed; the page has each row.
    """
    if find_spec("obstore") is None:
        pytest.skip("the benchmark needs obstore, which is not installed: pip install '.[cloud]'")
    _, _, folder = quick
    done = run_tool(
        "bench cloud", "--quick", "--check", "--keep", folder.parent / "keep", "--results", tmp_path
    )
    result = json.loads((tmp_path / "bench-cloud.json").read_text())
    assert list(result["delays"]) == ["0 ms", "20 ms"], done.stderr
    for samples in result["delays"].values():
        assert (
            samples["ours all: kernels"] == samples["ours launch: kernels"] == [result["kernels"]]
        )
        assert (
            samples["gets, 10 at once: files"]
            == samples["gets, 256 at once: files"]
            == [result["files"]]
        )
    missed = [row["work"] for row in result["rows"] if not row["ok"]]
    said = [line for line in done.stdout.splitlines() if line.startswith("missed: ")]
    assert (len(said), done.returncode) == (len(missed), 1 if missed else 0)
    assert (
        run_tool("bench page", "--results", tmp_path, "--page", tmp_path / "page.md").returncode
        == 0
    )
    text = (tmp_path / "page.md").read_text()
    assert all(f"| {row['work']} |" in text for row in result["rows"])


def test_the_page_in_the_repository_is_not_stale(run_tool):
    """docs/benchmarks.md is what the results in docs/results/ give."""
    done = run_tool("bench page", "--check")
    assert (done.returncode, done.stdout) == (0, "")


def test_a_missed_row_says_by_how_much_it_is_missed():
    """Above a limit or below one; what has no figure says what was found."""
    rows = [
        measurement.row("slow", 3.0, "ms", most=2.0),
        measurement.row("small", 3.0, "x", least=4.0),
        measurement.row("fine", 1.0, "ms", most=2.0),
        measurement.check("bits", False, "other bits"),
    ]
    assert page.not_reached({"rows": rows}) == [
        "**slow**: 3 ms, at most 2 ms: 50 % off.",
        "**small**: 3 x, at least 4 x: 25 % off.",
        "bits: other bits",
    ]


def test_without_cryptography_the_benchmark_leaves_its_rows_out(monkeypatch, capsys):
    """A machine for GPUs has no such package; all other rows are measured there."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert fresh.signature_cost(1) == []
    assert "cryptography" in capsys.readouterr().err


def test_the_fuzzer_may_make_what_the_judged_may_not_load(tmp_path):
    """Two bombs in one bundle need more memory to make than the limit gives; who judges has the
    limit, and all of it.
    """
    program = """
import multiprocessing, sys
from tools.fuzz import bundle, workers
forking = multiprocessing.get_context("fork")
workers.multiprocessing.get_context = lambda name: forking
bundle.MEMORY_BYTES = 1 << 28
make = bundle.Bundles.case
bundle.Bundles.case = lambda self, number: (bytearray(1 << 29), make(self, number))[1]
judged = {0: lambda: "fine", 1: lambda: bytearray(200 << 20) and "fits", 2: lambda: bytearray(1 << 29)}
bundle.structural = lambda number: number
bundle.Judge.judge = lambda self, data, golden, restore, used: judged[used]()
worker = workers.Worker(bundle.Bundles(1), range(3), 0, sys.argv[1])
while worker.numbers:
    if result := worker.receive():
        print(result.number, *result.outcomes, result.problem.splitlines()[-1:])
worker.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "log"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout == "0 fine []\n1 fits []\n2 MemoryError ['MemoryError']\n", done.stderr


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the system says nothing of its pages"
)
def test_a_forked_job_copies_no_page_in_the_midst_of_its_work():
    """What a job writes to is its own before it begins: without that, each of these 16 MB would be
    copied page by page.
    """
    program = (
        "import os, resource\n"
        "from tools.bench.sides import copy_shared_pages\n"
        "faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "shared = bytearray(b'x') * (16 << 20)\n"
        "def copied():\n"
        "    before = faults()\n"
        "    shared[::4096] = bytes(len(shared) // 4096)\n"
        "    return faults() - before\n"
        "for own in (False, True):\n"
        "    if not os.fork():\n"
        "        own and copy_shared_pages()\n"
        "        print(copied(), flush=True)\n"
        "        os._exit(0)\n"
        "    os.wait()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    plain, own = map(int, done.stdout.split())
    if plain > 1000:  # not where the memory is of huge pages
        assert own < plain / 10, done.stderr


def test_the_replay_of_the_gpu_check_imports_nothing_of_ours():
    """It proves that Triton alone finds what we restored; what measures launches is in the same
    program.
    """
    program = (
        "import sys, tools.gpu.check; print([name for name in sys.modules if name.partition('.')[0]"
        " == 'bundler'])"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
