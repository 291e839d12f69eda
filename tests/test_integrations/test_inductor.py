# SPDX-License-Identifier: Apache-2.0
"""`save` and `load` in place of torch's: what a new process with an empty cache directory then
compiles, measures and launches.

The kernels are Inductor's own, compiled for a GPU that need not be here; `inductor_worker.py` says
what of it is made up.
"""

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import bundler
from bundler.toolchain.events import kernel_hash

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NEVER_RAN = "never_ran"
NOTHING = {"compiles": 0, "measured": 0}

LIMIT_S = 300

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("torch") is None, reason="needs torch, which is not installed"),
    pytest.mark.timeout(2 * LIMIT_S),
]


def worker(*arguments, program="inductor_worker.py"):
    """Run a worker to its end and return what it printed."""
    environment = {
        name: text
        for name, text in os.environ.items()
        if not name.startswith(("TRITON_", "TORCHINDUCTOR_"))
    }
    done = subprocess.run(
        [sys.executable, "-P", str(HERE / program), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**environment, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """What a first process compiled, tuned and saved; its cache directory is renamed away."""
    folder = tmp_path_factory.mktemp("inductor")
    found = worker("make", folder / "first", folder / "all.tbundle")
    (folder / "first").rename(folder / "renamed")
    return {**found, "folder": folder, "bundle": folder / "all.tbundle"}


def effort(found):
    """What a process compiled and measured; finding a kernel in Triton's cache is neither."""
    return {name: found["counts"][name] for name in NOTHING}


def hashes(launched):
    """The hashes of the kernels that were launched."""
    return {found for _, found in launched}


def test_a_new_process_compiles_and_measures_nothing(made, tmp_path):
    """With trust="code" each kernel is launched as the first process tuned it: by choice, by
    descent, by smaller blocks.
    """
    found = worker("use", tmp_path / "second", made["bundle"], "code")
    assert (found["entries"], found["warnings"]) == (1, [])
    assert effort(found) == NOTHING
    assert found["launched"] == made["launched"]
    assert made["counts"]["compiles"] > len(made["launched"])
    assert made["counts"]["measured"] > 0
    # What that process saves has the entry under the same name, that of its content: a tag that all
    # push to does not grow.
    assert found["again"] == made["opaque"]


def test_without_trust_kernels_are_built_again_from_their_source_and_found(made, tmp_path):
    """Without its graph entry torch asks a compile worker for each kernel; nothing is compiled, and
    the winners are the same.
    """
    found = worker("use", tmp_path / "second", made["bundle"], "kernels")
    assert found["entries"] == 0
    assert found["counts"]["compiles"] == 0
    assert found["counts"]["hits"] >= len(made["launched"])
    assert found["launched"] == made["launched"]
    assert ["trust='code'" in text for text in found["warnings"]] == [True]
    assert [name for name, _ in found["skipped"]] == made["opaque"]


def test_a_graph_entry_travels_without_kernels_candidates_and_paths(made):
    """The entry has a tenth of its size, nothing in it names the first cache directory, and its
    kernels are in the bundle.
    """
    assert made["opaque_bytes"] * 10 < made["entry_bytes"]
    with bundler.Bundle.load(made["bundle"]) as bundle:
        (entry,) = bundle.opaque
        content = bundle.read(entry.artifact)
        assert {"json", "cubin"} == {
            artifact.kind for kernel in bundle.kernels for artifact in kernel.artifacts
        }
    assert os.fsencode(made["folder"]) not in content
    assert hashes(made["launched"]) <= {kernel_hash(key) for key in made["kernels"]}


def test_a_kernel_that_never_ran_is_named_and_keeps_its_candidates(made):
    """Its winner is not known: the bundle says so, and torch builds it again from its candidates,
    which travel.
    """
    assert [name for name, _ in made["left_out"]] == [NEVER_RAN]
    with bundler.Bundle.load(made["bundle"]) as bundle:
        assert sum(kernel.name == NEVER_RAN for kernel in bundle.kernels) > 1


@pytest.fixture(scope="module")
def warm(made):
    """What a process saved that found everything in the first one's own cache directory, at its own
    place.
    """
    folder = made["folder"]
    shutil.copytree(folder / "renamed", folder / "first")
    found = worker("warm", folder / "first", folder / "warm.tbundle")
    shutil.rmtree(folder / "first")
    return {**found, "bundle": folder / "warm.tbundle"}


def test_a_warm_process_saves_what_it_launched(warm, tmp_path):
    """Nobody asked Triton for the kernels that torch launches statically; they are saved all the
    same, and suffice.
    """
    assert warm["entries"] == 1
    assert hashes(warm["launched"]) <= {kernel_hash(key) for key in warm["kernels"]}
    again = worker("use", tmp_path / "second", warm["bundle"], "code")
    assert effort(again) == NOTHING
    assert again["launched"] == warm["launched"]


def test_a_recording_of_a_warm_process_holds_what_it_launched(warm):
    """A recording hears nothing of kernels that torch launches statically, and finds them all the
    same.
    """
    assert hashes(warm["launched"]) <= {kernel_hash(key) for key in warm["recorded"]}


def test_a_torch_that_we_do_not_know_is_named_and_its_directory_packed_whole(made, warm):
    """What this torch lacks is in the warning; every kernel of the directory travels, and so does
    the entry, as it is.
    """
    assert ["torch._inductor.codecache:sha256_hash" in text for text in warm["warnings"]] == [True]
    assert set(warm["whole"]) >= {*made["kernels"], *warm["kernels"]}
    assert made["entry_bytes"] in [
        size for path, size in warm["whole_opaque"].items() if path.startswith("fxgraph/")
    ]


def test_winners_only_leaves_out_what_tuning_did_not_choose(made, tmp_path):
    """Of each kernel that has run, the winner travels alone, and a new process still compiles and
    measures nothing.
    """
    saved = worker("make", tmp_path / "first", tmp_path / "winners.tbundle", "winners")
    with bundler.Bundle.load(tmp_path / "winners.tbundle") as bundle:
        names = sorted(kernel.name for kernel in bundle.kernels if kernel.name != NEVER_RAN)
    assert names == sorted(name for name, _ in saved["launched"])
    assert set(saved["kernels"]) < set(made["kernels"])
    found = worker("use", tmp_path / "second", tmp_path / "winners.tbundle", "code")
    assert effort(found) == NOTHING
    assert found["launched"] == saved["launched"]


def test_torch_compile_finds_its_graphs_in_a_new_process(compiled):
    """torch.compile itself, forward and backward: the second process takes both graphs from the
    bundle, and the loss is equal.
    """
    first, second, _ = compiled
    assert first["counters"] == {"fxgraph_cache_miss": 2}
    assert (second["counters"], second["autograd"]) == ({"fxgraph_cache_hit": 2}, 1)
    assert (second["warnings"], second["loss"]) == ([], first["loss"])


def test_another_compiler_than_the_recorded_one_is_named(compiled):
    """torch writes $CXX into the keys of its graphs: a process with another one is told both, when
    it loads.
    """
    *_, second, _ = compiled
    assert ["CXX" in text and "no-such-c++" in text for text in second["other_compiler"]] == [True]


def test_save_before_anything_is_compiled_says_so(compiled):
    """save() in a process in which torch.compile did nothing raises NotFound with the fix, and
    writes nothing.
    """
    *_, second, bundle = compiled
    assert second["error"] == "NotFound"
    assert (
        second["text"]
        == "torch.compile has compiled nothing in this process; call save() after the first"
        " iterations"
    )
    assert not bundle.with_name(bundle.name + ".nothing").exists()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """What two processes found that compiled one function with torch.compile itself, and the bundle
    between them.
    """
    folder = tmp_path_factory.mktemp("graphs")
    first = worker("save", folder / "first", folder / "cpu.tbundle", program="inductor_graphs.py")
    shutil.rmtree(folder / "first")
    return (
        first,
        worker("load", folder / "second", folder / "cpu.tbundle", program="inductor_graphs.py"),
        folder / "cpu.tbundle",
    )
