# SPDX-License-Identifier: Apache-2.0
"""What the programs for a GPU left in docs/results meets the targets, and what they compare and
compute holds here too.
"""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"


@pytest.mark.parametrize("program", ["bench", "mission", "random-graphs"])
def test_the_committed_results_meet_their_targets(run_tool, program):
    """`--check` of each program says so."""
    done = run_tool(f"codegen {program}", "--check")
    assert done.returncode == 0, done.stdout


def changed(result, change):
    """Return the rows after a change of one graph, by name."""
    from tools.codegen import bench_rows

    graph = next(iter(result["graphs"]))
    change(result["graphs"][graph])
    return {row["work"]: row for row in bench_rows.rows(result)}


@pytest.mark.parametrize(
    ("change", "row"),
    [
        (lambda graph: graph["times"].update(ratio=1.3), "run time, the slowest graph"),
        (
            lambda graph: graph["kernels"].update(ours=9),
            "graphs with more kernels and calls than Inductor's, unless explained",
        ),
        (
            lambda graph: graph["off"].update(ours=99.0),
            "graphs with numbers as far from float64 as Inductor's",
        ),
        (lambda graph: graph.update(error="it failed"), "graphs generated and run on both sides"),
    ],
    ids=["slow", "kernels", "numbers", "failed"],
)
def test_a_graph_that_misses_a_target_is_seen(change, row):
    """One graph that is slow, has more kernels, other numbers, or fails, fails the check."""
    result = json.loads((RESULTS / "codegen-bench.json").read_text())
    assert changed(json.loads(json.dumps(result)), lambda graph: None)[row]["ok"]
    assert not changed(result, change)[row]["ok"]


def test_a_mission_with_other_numbers_is_seen():
    """A result that is off, a graph that was not launched, and an import of torch each miss a
    target.
    """
    from tools.codegen import mission

    result = json.loads((RESULTS / "codegen-mission.json").read_text())
    assert all(row["ok"] for row in mission.rows(result))
    name = next(iter(result["launched"]["graphs"]))
    for place, value in (
        (("compared", name), {"off": 50.0, "off_torch": 1.0}),
        (("launched", name), {"error": "x"}),
    ):
        wrong = json.loads(json.dumps(result))
        wrong[place[0]]["graphs"][place[1]] = value
        assert not all(row["ok"] for row in mission.rows(wrong))
    result["launched"]["imported"] = ["torch"]
    assert not all(row["ok"] for row in mission.rows(result))


def test_bits_of_bfloat16_are_those_of_torch():
    """Inputs that numpy makes for a process without torch are rounded as torch rounds them."""
    torch = pytest.importorskip("torch")
    import numpy as np

    from tools.codegen.plain_inputs import bfloat16_bits

    numbers = np.concatenate(
        [
            np.random.default_rng(1).standard_normal(4096, dtype=np.float32),
            np.array([0.0, -0.0, 1.00390625, 1.01171875, 3.4e38, 1e-40], dtype=np.float32),
        ]
    )
    expected = torch.from_numpy(numbers).to(torch.bfloat16).view(torch.uint16).numpy()
    assert (bfloat16_bits(numbers) == expected).all()
