# SPDX-License-Identifier: Apache-2.0
"""Kernels of real clients, fetched from the package index, are compiled, bundled, and found
elsewhere without a compile.
"""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from bundler.format.entries import Target
from tools.clients import found_kernels, guesses, table, wheels
from tools.shared.wheel_files import NoIndex

# (client, folders of its package, how many of its kernels)
SAMPLE = (
    ("fla", ("modules", "ops/utils", "ops/gla", "ops/rwkv7"), 110),
    ("liger", ("ops",), 25),
    ("conch", ("kernels",), 15),
)
_PATIENCE_S = 400

_PACKAGE = """
import triton
import triton.language as tl

@triton.jit
def helper(x_ptr, places):
    return tl.load(x_ptr + places)

@triton.heuristics({"EVEN": lambda args: args["n"] % 16 == 0})
@triton.autotune([triton.Config({"BLOCK": 64}, num_warps=2), triton.Config({"BLOCK": 128})], key=["n"])
@triton.jit
def kernel(source, out, labels, n, stride, eps, KIND: tl.constexpr, ACT: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    places = tl.program_id(0) * stride + tl.arange(0, BLOCK)
    where = source + 4
    value = helper(where, places) + eps
    if ACT == "relu":
        value = tl.maximum(value, 0)
    tl.store(out + places, value.to(KIND), mask=places < tl.load(labels))

def run(x):
    kernel[(1,)](x)
"""


@pytest.fixture
def found(tmp_path, monkeypatch):
    """What is found in a package with a kernel, its helper, and a file that cannot be imported."""
    pytest.importorskip("triton")
    package = tmp_path / "root" / "client_of_tests"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "kernels.py").write_text(_PACKAGE)
    (package / "broken.py").write_text(
        "import triton\n@triton.jit\ndef k(x): ...\nraise OSError('no such thing')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "root"))
    return found_kernels.find(tmp_path / "root", [Path("client_of_tests")], Target("cuda", "90"))


def test_kernels_are_told_from_helpers_and_from_what_cannot_be_imported(found):
    """A kernel is what is launched; a file that raises is told with what it raised."""
    assert list(found.kernels) == ["client_of_tests.kernels:kernel"]
    assert (found.helpers, found.files) == (1, 2)
    (reason,) = found.refused.values()
    assert "OSError: no such thing" in reason


def test_a_guess_says_what_the_text_says(found):
    """Pointers, also those that only a helper reads, sizes, types, texts; what tuners and
    heuristics give is left to them.
    """
    import triton.language as tl

    specs, constants = next(guesses.guesses(found.kernels["client_of_tests.kernels:kernel"].kernel))
    assert specs == {
        "source": "*fp16:16",
        "out": "*fp16:16",
        "labels": "*i32:16",
        "n": "i32",
        "stride": "i32:16",
        "eps": "fp32",
    }
    assert constants == {"KIND": tl.float16, "ACT": "relu"}


def test_each_guess_is_another_one(found):
    """No call is tried twice."""
    kernel = found.kernels["client_of_tests.kernels:kernel"].kernel
    calls = list(map(repr, guesses.guesses(kernel)))
    assert len(calls) == len(set(calls)) > 4


def test_results_of_earlier_runs_are_put_together(run_tool, tmp_path):
    """`check --merge` runs nothing: it adds up what is there, fails where a target is missed, and
    the page shows it.
    """
    again = {"restored": 3, "asked": 3, "hits": 3, "compiles": 0, "ptxas_calls": 1, "failed": {}}
    told = {
        "client": "fla",
        "version": "0.6.0",
        "target": "cuda:90",
        "root": "/x",
        "files": 2,
        "files_refused": {},
        "helpers": 1,
        "found": 5,
        "tried": 4,
        "compiled": 3,
        "keys": 3,
        "left_out": {},
        "refused": {"m:k": "no /x/m.py or /usr/lib/site-packages/triton/x.py"},
        "unfinished": {"m:l": "why"},
    }
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "fla-cuda-90.json").write_text(json.dumps(told))
    (tmp_path / "results" / "fla-cuda-90.restored").write_text(json.dumps(again))
    (tmp_path / "results" / "liger-cuda-90.json").write_text(json.dumps(told))
    done = run_tool("clients check", "--merge", "--folder", tmp_path, "--results", tmp_path)
    assert done.returncode == 1, done.stderr
    result = json.loads((tmp_path / "clients.json").read_text())
    assert [(row["figure"], row["ok"]) for row in result["rows"]] == [
        (3, False),
        (3, True),
        (1, False),
        (0, False),
        (0, True),
        (0, True),
    ]
    assert result["clients"][0]["refused"] == {"m:k": "no m.py or triton/x.py"}
    assert "root" not in result["clients"][0]
    assert "| fla 0.6.0 | cuda:90 | 5 | 4 | 3 | 3 | 1 | 1 | 3 | 3 | 1 |" in table.section(result)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the wheels of the sample, unpacked."""
    for name in ("triton", "torch"):
        if find_spec(name) is None:
            pytest.skip(f"kernels of clients need {name}, which is not installed")
    folder = tmp_path_factory.mktemp("clients")
    try:
        for client, _, _ in SAMPLE:
            wheels.unpacked(wheels.CLIENTS[client], folder)
    except NoIndex as error:
        pytest.skip(f"kernels of clients need a package index: {error}")
    return folder


def _compiled(run_tool, folder, client, *options):
    path = folder / "result" / f"{client}.json"
    done = run_tool(
        "clients compile",
        client,
        "cuda:90",
        "--folder",
        folder,
        "--result",
        path,
        *options,
        timeout=_PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text()), path


@pytest.mark.slow
@pytest.mark.timeout(_PATIENCE_S)
@pytest.mark.parametrize(
    ("client", "parts", "wanted"), SAMPLE, ids=[client for client, _, _ in SAMPLE]
)
def test_kernels_of_clients_are_found_elsewhere_without_a_compile(
    run_tool, folder, client, parts, wanted
):
    """150 in all: compiled, bundled, restored to another path; another process, whose ptxas
    refuses, finds each under its key.
    """
    told, path = _compiled(run_tool, folder, client, "--part", *parts, "--wanted", wanted)
    assert (told["compiled"] >= wanted, told["left_out"]) == (True, {}), told
    done = run_tool("clients restore", path, "--folder", folder, timeout=_PATIENCE_S)
    assert done.returncode == 0, done.stderr
    again = json.loads(path.with_suffix(".restored").read_text())
    assert again == {
        "restored": told["keys"],
        "asked": told["compiled"],
        "hits": told["compiled"],
        "compiles": 0,
        "ptxas_calls": 0,
        "failed": {},
    }
