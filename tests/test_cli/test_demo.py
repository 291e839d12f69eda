# SPDX-License-Identifier: Apache-2.0
"""`demo` proves what it says, and would say so if it were not true."""

import json
import re
import shutil
from pathlib import Path

import pytest

import bundler
from bundler.cli import demo as demo_module

pytestmark = pytest.mark.toolchain


@pytest.fixture(autouse=True)
def _kernels(program):
    """Skip where there is no Triton."""


@pytest.mark.release
def test_demo_recompiles_nothing(command, tmp_path):
    """Demo compiles for both targets, ends with the line that counts zero, and leaves no files."""
    done = command("demo", env={"TMPDIR": str(tmp_path)})
    assert (done.returncode, done.stderr) == (0, "")
    match = re.fullmatch(r"recompiled 0 of (\d+) kernels", done.stdout.splitlines()[-1])
    assert int(match[1]) >= 12
    for target in ("cuda:90", "hip:gfx942"):
        assert (
            len(re.findall(rf"^\w+_kernel +{target} .* ms +[\d.]+ ms$", done.stdout, re.MULTILINE))
            >= 6
        )
    assert "asked to assemble 0 times" in done.stdout
    assert "deleted demo.tbundle and the restored directory; --keep-dir keeps them" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_demo_is_not_disturbed_by_settings(command, tmp_path):
    """Demo works where the environment tells Triton to compile always, and where to; and uses no
    cache of the user's.
    """
    env = {
        "TRITON_ALWAYS_COMPILE": "1",
        "TRITON_CACHE_DIR": str(tmp_path / "mine"),
        "TMPDIR": str(tmp_path),
    }
    done = command("demo", "--target", "hip:gfx942", env=env)
    assert (done.returncode, (tmp_path / "mine").exists()) == (0, False), done.stderr


@pytest.mark.slow
def test_demo_json(command, tmp_path):
    """Demo --json has the counts, the evidence and a row for each kernel; --keep-dir keeps bundle
    and directory, --report a page.
    """
    page = tmp_path / "report.html"
    done = command(
        "demo",
        "--json",
        "--keep-dir",
        "--report",
        page,
        "--target",
        "cuda:90",
        env={"TMPDIR": str(tmp_path)},
    )
    told = json.loads(done.stdout)
    assert (done.returncode, told["recompiled"], told["compiles"], told["targets"]) == (
        0,
        0,
        0,
        ["cuda:90"],
    )
    assert told["total"] == told["hits"] == told["restored"] == len(told["kernels"]) >= 6
    assert told["ptxas"]["asked_to_assemble"] == 0
    assert told["ptxas"]["asked_for_version"] >= 1
    assert set(told["kernels"][0]) == {
        "key",
        "name",
        "target",
        "binary_bytes",
        "compile_ms",
        "hit_ms",
    }
    with bundler.Bundle.load(f"{told['directory']}/demo.tbundle") as bundle:
        assert bundle.digest == told["digest"]
    assert told["report"] == str(page)
    assert told["digest"] in page.read_text()


@pytest.mark.slow
def test_demo_says_where_it_keeps_its_bundle(cli, tmp_path, monkeypatch):
    """With --keep-dir the place that is named holds the bundle, also after a failure."""
    done = cli("demo", "--keep-dir", "--target", "hip:gfx942")
    place = re.search(
        r"^kept demo.tbundle and the restored directory in (.+)$", done.stdout, re.MULTILINE
    )[1]
    assert (Path(place) / "demo.tbundle").is_file()
    monkeypatch.setattr(demo_module.PtxasWatch, "calls", lambda self: (0, 0))
    failed = cli("demo", "--keep-dir", "--target", "cuda:90")
    place = re.search(r"^kept in (.+)$", failed.stdout, re.MULTILINE)[1]
    assert (failed.exit_code, (Path(place) / "demo.tbundle").is_file()) == (1, True)


def without(prefix):
    """Return a restore that loses the kernels for one target."""
    whole = bundler.restore

    def restore(bundle, directory, **options):
        report = whole(bundle, directory, **options)
        for kernel in bundle.kernels:
            if str(kernel.target).startswith(prefix):
                shutil.rmtree(directory / kernel.key)
        return report

    return restore


@pytest.mark.slow
def test_demo_counts_what_is_compiled_again(cli, monkeypatch):
    """If kernels were lost on the way, demo counts them, says so in its last line, and exits with
    1.
    """
    monkeypatch.setattr(demo_module.bundler, "restore", without("hip"))
    result = cli("demo", "--target", "hip:gfx942")
    assert result.exit_code == 1
    match = re.fullmatch(r"recompiled (\d+) of (\d+) kernels", result.stdout.splitlines()[-1])
    assert match[1] == match[2] != "0"


@pytest.mark.slow
def test_demo_has_no_ptxas_for_the_second_process(cli, monkeypatch):
    """If a kernel for an NVIDIA GPU were lost, the second process could not compile it: one error,
    status 1.
    """
    monkeypatch.setattr(demo_module.bundler, "restore", without("cuda"))
    result = cli("demo", "--target", "cuda:90")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: compiling again failed with status 1: ")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.slow
def test_demo_notices_an_unwatched_ptxas(cli, monkeypatch):
    """If Triton used another ptxas than the one that refuses, demo does not pretend to have proven
    anything.
    """
    monkeypatch.setattr(demo_module.PtxasWatch, "calls", lambda self: (0, 0))
    result = cli("demo", "--target", "cuda:90")
    assert result.exit_code == 1
    assert "so it was not watched" in result.stderr


def test_demo_of_a_target_that_the_compiler_refuses(cli):
    """A target that Triton cannot compile for is one error with the compiler's last words."""
    result = cli("demo", "--target", "hip:gfx000")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: compiling for hip:gfx000 failed with status ")


def test_demo_tells_what_ptxas_says(cli):
    """What ptxas says is the error, not the command that would say it again."""
    result = cli("demo", "--target", "cuda:999")
    assert re.search(
        r"failed with status 1: ptxas\S* fatal: Value 'sm_999a?' is not defined", result.stderr
    )
