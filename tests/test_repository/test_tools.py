# SPDX-License-Identifier: Apache-2.0
"""The programs in tools/ run, and the pages they make agree with the results in the repository."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ROOT / "tools"


def run_tool(name, *arguments, timeout=110):
    """Run a program of tools/ from the checkout, as `make` does, and return the finished process."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("TRITON_", "TORCHINDUCTOR_"))}
    return subprocess.run(
        [sys.executable, "-P", "-W", "ignore", str(TOOLS / name), *map(str, arguments)],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """Return what a quick run of the benchmark printed and wrote."""
    for name in ("triton", "torch"):
        if find_spec(name) is None:
            pytest.skip(f"the benchmark needs {name}, which is not installed")
    folder = tmp_path_factory.mktemp("bench")
    done = run_tool("bench_bundle.py", "--quick", "--check", "--keep", folder / "keep", "--results", folder / "results")
    results = {path.stem: json.loads(path.read_text()) for path in (folder / "results").glob("*.json")}
    return done, results, folder / "results"


def test_the_benchmark_runs(quick):
    """A quick run writes both results, and with --check says which targets it missed, and fails for these alone."""
    done, results, _ = quick
    assert sorted(results) == ["bench-basics", "bench-bundle"], done.stderr
    missed = [row["work"] for result in results.values() for row in result["rows"] if not row["ok"]]
    said = [line for line in done.stdout.splitlines() if line.startswith("missed: ")]
    assert done.returncode == (1 if missed else 0)
    assert [line.removeprefix("missed: ").startswith(work) for line, work in zip(said, missed, strict=True)] == [
        True
    ] * len(missed)


def test_the_result_has_its_facts_and_samples(quick):
    """The result names machine, versions and commit, and holds each sample, the profiles and every promised row."""
    _, results, _ = quick
    result = results["bench-bundle"]
    assert {"machine", "versions", "commit", "kernels", "rounds", "tar", "places", "profile", "rows"} <= set(result)
    assert {"python", "triton", "torch", "zstandard"} <= set(result["versions"])
    for samples in result["places"].values():
        assert {len(found) for found in samples.values()} == {result["rounds"]}
        assert set(samples["collect: kernels"]) == set(samples["restore all: kernels"]) == {result["kernels"]}
        assert set(samples["restore launch: kernels"]) == set(samples["torch load: kernels"]) == {result["kernels"]}
    assert set(result["profile"]) == {"restore", "collect"}
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


def test_the_page_is_made_from_the_results(quick, tmp_path):
    """The page can be made from a result, names what is missed, and --check notices when it is stale."""
    _, results, folder = quick
    page = tmp_path / "page.md"
    arguments = ("--results", folder, "--page", page)
    assert run_tool("make_benchmarks.py", "--check", *arguments).returncode == 1
    assert run_tool("make_benchmarks.py", *arguments).returncode == 0
    assert run_tool("make_benchmarks.py", "--check", *arguments).returncode == 0
    text = page.read_text()
    for heading in ("What it costs to have us", "Bundle against peers", "Sizes", "Memory", "Not reached"):
        assert f"## {heading}\n" in text
    missed = [row["work"] for result in results.values() for row in result["rows"] if not row["ok"]]
    assert [work in text.partition("## Not reached")[2] for work in missed] == [True] * len(missed)
    page.write_text(text.replace("Figures", "Numbers"))
    assert run_tool("make_benchmarks.py", "--check", *arguments).returncode == 1


def test_the_benchmark_of_the_service_runs(tmp_path):
    """A quick run of all four sides holds every sample and names the targets it missed; the page has each row and each stage."""
    for name in ("triton", "torch"):
        if find_spec(name) is None:
            pytest.skip(f"the benchmark needs {name}, which is not installed")
    done = run_tool("bench_compile.py", "--quick", "--check", "--results", tmp_path)
    result = json.loads((tmp_path / "bench-compile.json").read_text())
    assert [set(samples) for samples in result["samples"]] == [{"serial", "ours", "torch", "again"}], done.stderr
    missed = [row["work"] for row in result["rows"] if not row["ok"]]
    said = [line for line in done.stdout.splitlines() if line.startswith("missed: ")]
    assert (len(said), done.returncode) == (len(missed), 1 if missed else 0)
    assert run_tool("make_benchmarks.py", "--results", tmp_path, "--page", tmp_path / "page.md").returncode == 0
    text = (tmp_path / "page.md").read_text()
    assert all(f"| {row['work']} |" in text for row in result["rows"])
    assert (
        {"ttir", "llir", "cubin"}
        <= set(result["stages"])
        == {stage for stage in result["stages"] if f"| {stage} |" in text}
    )


def test_the_remote_benchmark_runs(quick, tmp_path):
    """A quick run fetches all kernels both ways at each delay, counts exchanges, and names what it missed; the page has each row."""
    _, _, folder = quick
    done = run_tool("bench_remote.py", "--quick", "--check", "--keep", folder.parent / "keep", "--results", tmp_path)
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
    assert run_tool("make_benchmarks.py", "--results", tmp_path, "--page", tmp_path / "page.md").returncode == 0
    text = (tmp_path / "page.md").read_text()
    assert all(f"| {row['work']} |" in text for row in result["rows"])


def test_the_page_in_the_repository_is_not_stale():
    """docs/benchmarks.md is what the results in docs/results/ give."""
    done = run_tool("make_benchmarks.py", "--check")
    assert (done.returncode, done.stdout) == (0, "")
