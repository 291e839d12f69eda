# SPDX-License-Identifier: Apache-2.0
"""What the HIP driver takes for granted is what AMD's headers declare, here and in the committed
result.
"""

import json
from pathlib import Path

import pytest

from bundler.runtime.launch.drivers import hip_api
from tools.hip import headers

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def found():
    """What the headers declare that come with the Triton that is installed."""
    try:
        return headers.of_headers(headers.of_triton())
    except RuntimeError as error:
        pytest.skip(f"there are no headers, or they cannot be compiled: {error}")


@pytest.mark.release
@pytest.mark.toolchain
def test_the_installed_headers_declare_what_we_use(found):
    """Every number, place and prototype but the one that the headers have no name for."""
    rows = headers.compared(found)
    assert [row for row in rows if row["ok"] is False] == []
    assert [row["what"] for row in rows if row["ok"] is None] == [
        "hipLaunchAttributeClusterDimension"
    ]
    assert len(rows) == len(hip_api.NAMES) + 20 + len(hip_api.SIGNATURES) + 4


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("WARP_SIZE", 10, "hipDeviceAttributeWarpSize"),
        ("ARCH_AT", 396, "hipDeviceProp_tR0600.gcnArchName"),
        ("PROPERTIES_BYTES", 1024, "hipDeviceProp_tR0600"),
        ("SIGNATURES", {"hipGetDevice": ()}, "hipGetDevice"),
    ],
)
def test_what_differs_is_told(found, monkeypatch, name, value, what):
    """A number of CUDA's, a place of an older release, too little room, a forgotten argument."""
    monkeypatch.setattr(hip_api, name, value)
    assert [row["what"] for row in headers.compared(found) if row["ok"] is False] == [what]


def test_what_is_gone_is_told(found):
    """A release without a function that the driver cannot do without would not be passed over."""
    del found.arguments["hipModuleUnload"], found.numbers["hipErrorInvalidDevice"]
    wrong = [row["what"] for row in headers.compared(found) if row["ok"] is False]
    assert wrong == ["hipErrorInvalidDevice", "hipModuleUnload"]


def test_what_we_use_is_what_other_releases_declare():
    """Of four releases the committed result has what each declares; HIP 5 lacks a function without
    which no library is opened.
    """
    result = json.loads((ROOT / "docs" / "results" / "hip-headers.json").read_text())
    for hip in ("7.1", "6.4", "7.2", "7.15"):
        found = headers.Declared()
        for row in result["rows"]:
            if row["hip"] == hip and row["theirs"] is not None:
                getattr(found, row["kind"])[row["what"]] = row["theirs"]
        rows = [row for row in headers.compared(found) if row["theirs"] is not None]
        assert len(rows) > 30
        assert [row for row in rows if not row["ok"]] == []
    (refused,) = [row for row in result["rows"] if row["hip"] == "5.2"]
    assert set(refused["theirs"]) <= set(hip_api.SIGNATURES)
