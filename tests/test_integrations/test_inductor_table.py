# SPDX-License-Identifier: Apache-2.0
"""The table of `python -m tools.gpu torch-compile`: medians beside targets, and a miss is a
miss.
"""

import json

import pytest

from tools.gpu import torch_compile

SECONDS = {
    "cold": 250.0,
    "warm": 14.0,
    "mega-cache": 50.0,
    "moved": 20.0,
    "ours": 8.0,
    "ours-winners": 8.0,
}
BYTES = {"ours": 4_000_000, "ours-winners": 1_000_000, "mega-cache": 120_000_000}


def table(folder, **changed):
    """Write samples of max-autotune, with changes to those of `ours`, and make the table; (status,
    rows by work).
    """
    samples = folder / "samples"
    samples.mkdir(parents=True)
    for variant, seconds in SECONDS.items():
        for number in range(3):
            sample = {
                "mode": "max-autotune",
                "variant": variant,
                "round": number,
                "total_s": seconds + number,
                "load_s": 1.0,
                "first_s": seconds - 1,
                "losses": ["0x1p+3"],
                "compiles": 0,
                "compiles_in_parent": 0,
                "ptxas": 0,
                "machine": {},
                "versions": {},
                "commit": None,
                "saved": (
                    {name: {"bytes": size} for name, size in BYTES.items()}
                    if variant == "cold"
                    else None
                ),
            }
            sample |= changed if variant == "ours" else {}
            (samples / f"max-autotune.{variant}.{number}.json").write_text(json.dumps(sample))
    status = torch_compile.write(samples, folder)
    result = json.loads((folder / "gpu-torch-compile.json").read_text())
    assert len(result["samples"]) == 3 * len(SECONDS)
    return status, {row["work"]: row for row in result["rows"]}


def test_medians_and_ratios_stand_beside_their_targets(tmp_path):
    """Times are medians of the samples, and each promise is a row with its bound."""
    status, rows = table(tmp_path)
    assert status == 0
    assert rows["max-autotune, ours: load and first iteration"]["figure"] == SECONDS["ours"] + 1
    assert rows["max-autotune: ours, load and first iteration"]["most"] == 10
    assert rows["max-autotune: ours, times faster than the mega-cache"]["figure"] == pytest.approx(
        51 / 9
    )
    assert rows["max-autotune, ours: bundle, of the mega-cache"]["figure"] == pytest.approx(4 / 120)


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        ({"compiles": 1}, "max-autotune, ours: Triton compiles, at most"),
        ({"ptxas": 1}, "max-autotune, ours: ptxas calls, at most"),
        (
            {"losses": ["0x1p+4"]},
            "max-autotune: samples of ours whose losses differ from the warm run's",
        ),
        ({"total_s": 30.0}, "max-autotune: ours, times faster than the mega-cache"),
        ({"error": "no"}, "max-autotune: samples that failed"),
    ],
)
def test_a_missed_target_fails(tmp_path, changed, missed):
    """One compile, another loss, too much time or a sample that failed: the row is not ok, and the
    status says so.
    """
    status, rows = table(tmp_path, **changed)
    assert status == 1
    assert not rows[missed]["ok"]
