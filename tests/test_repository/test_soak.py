# SPDX-License-Identifier: Apache-2.0
"""The soak runs, and its judges can fail: a lost kernel, wrong bytes and what grows are found."""

import json
import xml.etree.ElementTree as ET
from importlib.util import find_spec

import pytest

import bundler
from tools.soak import growth
from tools.soak.ledger import ABSENT, Ledger


@pytest.fixture
def service(tmp_path, monkeypatch):
    """Return a service with two kernels and a store in a directory."""
    if find_spec("triton") is None:
        pytest.skip("the soak needs triton, which is not installed")
    from tools.shared import kernel_variants
    from tools.soak.service import Service

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "none"))  # put back at the end
    settings = {"number": 0, "seed": 0, "life": 0, "ledger": [], "grace_s": 60.0, "full": None}
    made = Service(
        {
            **settings,
            "folder": str(tmp_path),
            "journal": str(tmp_path / "journal"),
            "urls": {"directory": f"file://{tmp_path}/store"},
            "cache": str(kernel_variants.cache_of(2, tmp_path)),
            "kernels": 2,
        }
    )
    yield made
    made.close()


@pytest.mark.slow
def test_a_short_soak_loses_nothing(run_tool, tmp_path):
    """Twenty seconds with kills and restarts keep every promise; result and picture are written."""
    for name in ("triton", "redis"):
        if find_spec(name) is None:
            pytest.skip(f"the soak needs {name}, which is not installed")
    done = run_tool("soak", "--minutes", 0.34, "--check", "--results", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "soak.json").read_text())
    assert (result["problems"], result["seed"]) == ([], 0)
    assert {"push", "pull", "restore", "record", "prune", "sync"} <= set(result["counts"])
    assert result["counts"]["kills of a service"] >= 1
    assert result["counts"]["restarts of the server"] >= 1
    assert {"lookup", "replay", "push redis", "restore directory"} <= {
        name for sample in result["samples"] for name in sample["latencies"]
    }
    assert ET.parse(tmp_path / "soak.svg").getroot().tag.endswith("svg")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:nothing in this bundle:bundler.errors.BundlerWarning")
@pytest.mark.parametrize("harm", ["units", "tag"])
def test_a_lost_kernel_is_found(service, tmp_path, harm):
    """A unit or a tag that goes behind the service's back is a problem of the next restore."""
    while service.ledger.possible("directory", "w0/0") == {ABSENT}:
        service.act("push")
        assert service.problems == []
    service.restore_tag("directory", "w0/0")
    assert service.problems == []
    if harm == "tag":
        service.stores["directory"].delete_tag("w0/0")
    else:
        for path in (tmp_path / "store" / "data" / "v1" / "u").rglob("*"):
            if path.is_file():
                path.unlink()
    service.restore_tag("directory", "w0/0")
    assert "lost: 0 kernels, expected" in service.problems[0]


@pytest.mark.slow
def test_wrong_bytes_and_half_a_kernel_are_found(service, tmp_path):
    """A byte that changed, a file that is missing and a kernel that nobody pushed are said."""
    there = tmp_path / "there"
    bundler.restore(service.bundle, there, only="all")
    items = [(0, 0), (1, 0)]
    assert list(service.right.wrong(there, items)) == []
    first, second = sorted(there.iterdir())
    (changed,) = first.glob("*.cubin")
    changed.write_bytes(changed.read_bytes()[:-1] + b"x")
    assert list(service.right.wrong(there, items)) == [
        f"{first.name} has wrong bytes, or lacks files"
    ]
    next(second.glob("*.ptx")).unlink()
    assert len(list(service.right.wrong(there, items))) == 2
    assert list(service.right.wrong(there, items[:1]))[1].endswith("kernels that were pushed")


@pytest.mark.slow
def test_an_untyped_error_is_found(service):
    """An exception that is no BundlerError is a problem, and the service goes on."""
    service.acts["push"] = (1, lambda: 1 // 0)
    service.act("push")
    assert "not typed" in service.problems[0]
    assert "ZeroDivisionError" in service.problems[0]


@pytest.mark.parametrize("name", ["store_files", "memory_mib", "descriptors", "temporary_files"])
def test_what_grows_is_found(name):
    """A line that rises misses its target, that alone; one that goes up and down misses none."""
    steady = [
        {"time_s": 10.0 * n, "changes": 7 + n % 3, **dict.fromkeys(growth.LIMITS, 50 + n % 2)}
        for n in range(100)
    ]
    assert [line["work"] for line in growth.growth_rows(steady) if not line["ok"]] == []
    rising = [{**sample, name: 50 + n} for n, sample in enumerate(steady)]
    (missed,) = [line for line in growth.growth_rows(rising) if not line["ok"]]
    assert missed["work"] == f"{name}: growth over the second half"
    assert missed["figure"] == pytest.approx(49, rel=0.01)
    assert missed["peer"].startswith("+360")


def test_what_a_store_has_for_the_work_that_is_done_is_no_growth():
    """A machine that has less to do beside a run does more of it; what is left beyond that shows."""
    changes = [20 + 3 * (n // 60) * (n - 60) for n in range(100)]
    base = dict.fromkeys(growth.LIMITS, 50)
    busier = [
        {"time_s": 10.0 * n, "changes": work, **base, "redis_keys": 5 * work}
        for n, work in enumerate(changes)
    ]
    assert [line["work"] for line in growth.growth_rows(busier) if not line["ok"]] == []
    leaking = [{**one, "redis_keys": one["redis_keys"] + 4 * n} for n, one in enumerate(busier)]
    (missed,) = [line for line in growth.growth_rows(leaking) if not line["ok"]]
    assert missed["work"].startswith("redis_keys")
    assert missed["figure"] == pytest.approx(4 * 49, rel=0.01)


def test_a_short_run_is_not_judged_for_growth():
    """In less than two minutes a half nothing was pruned yet."""
    rising = [
        {"time_s": float(n), "changes": n, **dict.fromkeys(growth.LIMITS, n)} for n in range(20)
    ]
    assert {line["most"] for line in growth.growth_rows(rising)} == {None}


def test_the_ledger_knows_what_may_have_happened():
    """Before and after are possible until a change is acknowledged; a copy of a tag that may be
    absent may have been left alone.
    """
    ledger = Ledger()
    one, two = frozenset({(0, 0)}), frozenset({(1, 7)})
    ledger.hear({"changes": [["redis", "t", "replace", [[0, 0]]]]})
    assert ledger.possible("redis", "t") == {ABSENT, one}
    ledger.hear({"acknowledged": True})
    assert ledger.possible("redis", "t") == {one}
    ledger.hear({"changes": [["redis", "t", "merge", [[1, 7]]]]})
    assert ledger.possible("redis", "t") == {one, one | two}
    again = Ledger(json.loads(json.dumps(ledger.to_json())))
    assert again.possible("redis", "t") == {one, one | two}
    again.begin([("redis", "t", "delete", None)])
    again.begin([("directory", "t", "copy", "redis")])
    again.acknowledge()
    assert again.possible("directory", "t") == {ABSENT, one, one | two}
    again.begin([("redis", "all", "at least", [(1, 7)])])
    assert again.possible("redis", "all") == {ABSENT}
