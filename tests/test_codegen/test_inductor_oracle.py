# SPDX-License-Identifier: Apache-2.0
"""Kernels beside those that Inductor generates for the same graphs: no more of them, and as much
known of each; `tools/codegen` counts them.
"""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMITTED = ROOT / "docs" / "results" / "codegen-counts.json"
# A row that is held whole by fewer lanes than a warp has keeps its mask: 32 lanes for Inductor on
# an NVIDIA GPU, 64 for us, whose text is also for AMD's.
THEIR_WARP, OUR_WARP = 32, 64


def known_reason(kernel, other):
    """Whether masks differ by the two rules that differ, and nothing else does."""
    missing, extra = (
        set(other["full"]) - set(kernel["full"]),
        set(kernel["full"]) - set(other["full"]),
    )
    hints, held = kernel["size_hints"], kernel["kind"] == "persistent_reduction"
    short = all(name == "r0_" and held and THEIR_WARP <= hints[name] < OUR_WARP for name in missing)
    # A size hint is the power of two at or above the size, and no block is larger: of a power of
    # two every block is full.
    return (
        short
        and not (held and "r0_" in extra)
        and all(kernel[name] == other[name] for name in ("unaligned", "ones"))
    )


def problems(rows):
    """Return what is wrong in rows, by graph."""
    found = {}
    for row in rows:
        ours, theirs = row["ours"], row["inductor"]
        if ours["launches"] > theirs["launches"] and "explained" not in row:
            found[row["graph"]] = f"{ours['launches']} launches, Inductor {theirs['launches']}"
        for line in row["differs"]:
            sizes = line.partition(":")[0]
            if ": types " in line:
                if "parameters" not in row:
                    found[row["graph"]] = line
                continue
            pair = [
                next(k for k in side["kernels"] if sizes == label(k)) for side in (ours, theirs)
            ]
            if not known_reason(*pair):
                found[row["graph"]] = line
    return found


def label(kernel):
    return (
        f"{kernel['kind']}"
        f" {' '.join(f'{name}={size}' for name, size in sorted(kernel['size_hints'].items()))}"
    )


@pytest.mark.skipif(not COMMITTED.exists(), reason="docs/results is not part of this checkout")
def test_the_committed_result_has_no_more_kernels_than_inductors():
    """Every graph of the committed result has at most as many launches as Inductor's, and masks
    differ for known reasons alone.
    """
    rows = json.loads(COMMITTED.read_text())["rows"]
    assert len(rows) >= 40
    assert problems(rows) == {}


def test_a_graph_with_more_kernels_is_named():
    """The comparison fails where we launch one kernel more, where a mask stays, where an attribute
    is missing, and where parameters differ without a reason.
    """
    kernel = {
        "kind": "pointwise",
        "size_hints": {"x": 1 << 20},
        "full": ["x"],
        "unaligned": 0,
        "ones": 0,
    }
    side = {"launches": 1, "kernels": [kernel]}
    row = {"graph": "sum", "ours": side, "inductor": side, "differs": []}
    assert problems([row]) == {}
    assert problems([row | {"ours": {**side, "launches": 2}}]) == {"sum": "2 launches, Inductor 1"}
    line = f"{label(kernel)}: types ['i32'], Inductor []"
    assert problems([row | {"differs": [line]}]) == {"sum": line}
    assert problems([row | {"differs": [line], "parameters": "for a reason"}]) == {}
    for change in ({"full": []}, {"unaligned": 1}, {"ones": 1}):
        ours = {"launches": 1, "kernels": [kernel | change]}
        line = f"{label(kernel)}: differs"
        assert problems([row | {"ours": ours, "differs": [line]}]) == {"sum": line}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_inductor_generates_no_fewer_kernels(run_tool, tmp_path):
    """What both generate now, for every graph, and for the same launches as the committed result
    says.
    """
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("triton") is None:
        pytest.skip("torch or Triton is not installed")
    done = run_tool("codegen counts", "--results", tmp_path, timeout=380)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = json.loads((tmp_path / COMMITTED.name).read_text())["rows"]
    assert len(rows) >= 40
    assert problems(rows) == {}
    if COMMITTED.exists():
        committed = json.loads(COMMITTED.read_text())["rows"]
        assert [(row["graph"], row["ours"]["launches"]) for row in rows] == [
            (row["graph"], row["ours"]["launches"]) for row in committed
        ]
