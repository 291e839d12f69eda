# SPDX-License-Identifier: Apache-2.0
"""What the page says of a missed target: the floor is the sum of what cannot be left out, and
follows from the raw result alone.
"""

import importlib.util
from pathlib import Path

import pytest

import bundler
from bundler.lifecycle import restoration
from tools.bench import floors, fresh, page, scale
from tools.bench.floors import IN_THREADS, THREADS, bare_steps
from tools.shared.measurement import row

DATA = Path(__file__).resolve().parents[1] / "data"
STEPS = {
    "manifest: zstd": 0.001,
    "manifest: decode its MessagePack": 0.003,
    "reader: zstd": 0.010,
    "reader: read": 0.002,
    "writer: write": 0.050,
    "writer: rename": 0.010,
    IN_THREADS: 0.036,
    THREADS: 2,
}


@pytest.fixture
def bundle():
    """A bundle of format 2, with CUDA and HIP kernels."""
    with bundler.Bundle.load(DATA / "v2.0" / "triton-3.7.1.tbundle") as loaded:
        yield loaded


def result(cores, ours_ms, **target):
    """The result of a benchmark with one row, of which the peer took 96 ms."""
    name = (
        "load and restore everything: how much faster"
        if "least" in target
        else "restore everything, digests verified"
    )
    figure = 96 / ours_ms if "least" in target else ours_ms / 96
    line = row(
        f"tmpfs: {name}", figure, "x", ours_ms=ours_ms, peer_ms=96.0, peer="a peer, 96 ms", **target
    )
    return {"rows": [line], "floor": {"all": STEPS, "launch": STEPS}, "machine": {"cores": cores}}


@pytest.mark.parametrize(
    ("cores", "whole", "expected"),
    [
        (
            2,
            False,
            0.036 + 0.012 / 2,
        ),  # the writers use both, so the reader takes its time from theirs
        (2, True, 0.036 + 0.012 / 2 + 0.004),
        (16, False, 0.036),  # beside each other
        (16, True, 0.040),
    ],
)
def test_the_floor_is_what_cannot_be_left_out(cores, whole, expected):
    """Manifest, then writers and reader, beside each other where there are processors for both."""
    assert floors.floor(STEPS, cores, whole=whole) == pytest.approx(expected)


def test_a_reader_that_takes_longer_than_the_writers_is_the_floor():
    """With many processors the longer of both decides."""
    assert floors.floor({**STEPS, "reader: zstd": 0.098}, 16, whole=False) == pytest.approx(0.1)


def test_a_missed_row_says_whether_its_floor_meets_the_target():
    """42 ms of 96 are 0.437 x: a target of 0.4 is beyond that, one of 0.5 is not."""
    beyond, within = (
        floors.told(found["rows"][0], found)
        for found in (result(2, 60, most=0.4), result(2, 60, most=0.5))
    )
    assert "42 ms of our 60 ms, which would be 0.437 x: even that misses the target" in beyond
    assert "0.437 x: that meets the target" in within
    faster = result(2, 60, least=3.0)
    assert "46 ms of our 60 ms, which would be 2.09 x: even that misses" in floors.told(
        faster["rows"][0], faster
    )


def test_a_row_without_a_floor_says_nothing_of_one():
    """Of other places, of other work, and in results of before."""
    found = result(2, 60, most=0.4)
    assert (
        floors.told(
            {**found["rows"][0], "work": "disk: restore everything, digests verified"}, found
        )
        == ""
    )
    assert floors.told(found["rows"][0], {"rows": found["rows"], "machine": found["machine"]}) == ""
    assert floors.table({"rows": found["rows"], "machine": found["machine"]}, "A title") == ""


def test_the_table_has_each_step_in_the_order_of_a_restore():
    """The file of a result is in the order of the alphabet."""
    shown = floors.table(result(2, 60, most=0.4), "A title")
    assert shown.startswith("### A title")
    places = [
        shown.index(f"| {name} | ")
        for name in ("manifest: zstd", "reader: read", "reader: zstd", "writer: rename")
    ]
    assert places == sorted(places)
    assert "**76 ms**" in shown
    assert "| 60 ms | 42 ms | 0.625 x | 0.437 x | at most 0.4 x |" in shown


def test_not_reached_names_the_floor():
    """The line of the page, behind the reason."""
    (line,) = page.not_reached("bench-bundle", {**result(2, 60, most=0.4), "profile": {}})
    assert line.startswith(
        "**tmpfs: restore everything, digests verified**: 0.625 x, at most 0.4 x: 56 % off. Why: "
    )
    assert line.endswith("even that misses the target.")
    assert "Its floor, which the page shows call by call" in line


def test_every_bare_step_has_a_place_in_the_table(bundle, tmp_path):
    """What the job finds of a real bundle is what the table shows, and the kernels are written."""
    file = tmp_path / "kernels.tbundle"
    bundle.save(file)
    found = bare_steps(str(file), str(tmp_path / "there"), "launch")
    assert {*found} - {IN_THREADS, THREADS} <= {*floors.ORDER}
    assert {name.partition(":")[0] for name in found} == {
        "manifest",
        "reader",
        "writer",
        "together",
        THREADS,
    }
    assert all(spent >= 0 for spent in found.values())
    assert len([*(tmp_path / "there").iterdir()]) == 2 * len(bundle.kernels)


def test_the_parts_of_a_restores_memory(bundle, tmp_path):
    """Each kind of mapping is counted, and the columns stand in the order of their size."""
    before = restoration._report
    found = scale.parts_of(
        lambda: bundler.restore(bundle, tmp_path / "there", only="all"), restoration
    )
    assert restoration._report is before
    assert {*found} == {
        scale.FRAMES,
        scale.LIBRARIES,
        scale.STACKS_AND_HEAP,
        scale.OBJECTS,
    }
    assert found[scale.OBJECTS] > 8 * len(bundle.kernels)
    shown = scale.parts_table(
        {"many": [found], "one": [found]}, {"one": "1 kernel", "many": "100 kernels"}
    )
    assert "| part | 1 kernel | 100 kernels |" in shown
    assert scale.parts_table({}, {}) == ""
    line = row("restore 100 launch sets beside 1: peak memory", 2.0, "x", most=1.3)
    more = {**found, scale.FRAMES: found[scale.FRAMES] + 2e6}
    assert f"{scale.FRAMES} 2 MB, " in scale.told(line, {"parts": {"one": [found], "many": [more]}})
    assert scale.told(line, {}) == ""
    assert (
        scale.told(
            {**line, "work": "load 100 kernels: peak memory"},
            {"parts": {"one": [found], "many": [more]}},
        )
        == ""
    )


def test_without_cryptography_the_benchmark_leaves_its_rows_out(monkeypatch, capsys):
    """A machine for GPUs has no such package; all other rows are measured there."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert fresh.signature_cost(1) == ([], {})
    assert "cryptography" in capsys.readouterr().err
