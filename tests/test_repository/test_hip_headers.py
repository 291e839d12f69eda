# SPDX-License-Identifier: Apache-2.0
"""What the HIP driver takes for granted is what AMD's headers declare, here and in the committed
result.
"""

import importlib.util
import json
from pathlib import Path

import pytest

from bundler.runtime.launch.drivers import hip_api
from tools.hip import headers

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def found():
    """What the headers declare that come with the Triton that is installed."""
    triton = importlib.util.find_spec("triton")
    if triton is None:
        pytest.skip("triton is not installed, so there are no headers")
    try:
        return headers.of_headers(Path(triton.origin).parent / "backends" / "amd" / "include")
    except RuntimeError as error:
        pytest.skip(f"the headers cannot be compiled: {error}")


@pytest.mark.release
@pytest.mark.toolchain
def test_the_installed_headers_declare_what_we_use(found):
    """Every number, place and prototype but the one that the headers have no name for."""
    rows = headers.compared("installed", found)
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
    assert [row["what"] for row in headers.compared("installed", found) if row["ok"] is False] == [
        what
    ]


def test_what_is_gone_is_told(found):
    """A release without a function that the driver cannot do without would not be passed over."""
    del found.arguments["hipModuleUnload"], found.numbers["hipErrorInvalidDevice"]
    wrong = [row["what"] for row in headers.compared("installed", found) if row["ok"] is False]
    assert wrong == ["hipErrorInvalidDevice", "hipModuleUnload"]


def test_the_committed_result_is_of_what_we_use():
    """Five releases, each row as the driver has it today, and none that differs."""
    result = json.loads((ROOT / "docs" / "results" / f"{headers.RESULT}.json").read_text())
    assert [source["sha256"] for source in result["sources"]] == [
        source.digest for source in headers.SOURCES
    ]
    own = headers.ours()
    for hip in ("7.1", "6.4", "7.2", "7.15"):
        rows = {(row["kind"], row["what"]): row for row in result["rows"] if row["hip"] == hip}
        for kind in ("numbers", "places", "arguments"):
            told = {what: row["ours"] for (of, what), row in rows.items() if of == kind}
            assert told == getattr(own, kind)
    assert {row["ok"] for row in result["rows"]} == {True, None}
    (refused,) = [row for row in result["rows"] if row["hip"] == "5.2"]
    assert refused["theirs"] == ["hipGetDevicePropertiesR0600"]


def test_another_file_than_the_pinned_one_is_refused(tmp_path):
    """What the index sends has to be what was looked at."""
    source = headers.SOURCES[0]
    (tmp_path / f"triton-{source.version}-none.whl").write_bytes(b"something else")
    with pytest.raises(SystemExit, match="was expected"):
        headers.unpacked(source, tmp_path)
