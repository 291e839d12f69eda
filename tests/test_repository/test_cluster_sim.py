# SPDX-License-Identifier: Apache-2.0
"""The cluster simulator runs against real servers, notices what it should, and docs/scaling.md is
made from its results.
"""

import copy
import functools
import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tools.cluster import simulation

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "scaling.md"


@pytest.fixture(scope="module")
def run_sim(run_tool):
    """Run the simulator from the checkout, and return the finished process."""
    return functools.partial(run_tool, "cluster simulation", timeout=100)


@pytest.fixture(scope="module")
def quick(run_sim, compiled, tmp_path_factory):
    """What a quick run printed, what it wrote, and where."""
    folder = tmp_path_factory.mktemp("sim")
    done = run_sim(
        "--quick", "--check", "--processes", 2, "--bundle", compiled.bundle, "--results", folder
    )
    assert (done.returncode, done.stderr if done.returncode else "") == (0, ""), done.stdout
    return done.stdout, json.loads((folder / "cluster-sim.json").read_text()), folder


def points(result):
    return {point["name"]: point for point in result["points"]}


@pytest.mark.slow
def test_every_kernel_is_compiled_once_while_leases_live(quick):
    """By the log of compiles each kernel is compiled once, as nobody's lease expired, and every
    rank gets every kernel.
    """
    _, result, _ = quick
    for name in ("growth", "hosts"):
        point = points(result)[name]
        cold, pairs = point["cold"], point["ranks"] * point["kernels"]
        assert (cold["compiles"], cold["duplicates"], cold["expired"]) == (point["kernels"], 0, 0)
        assert cold["error_count"] == 0
        assert sum(cold["how"].values()) == pairs
        assert cold["how"]["compiled"] == point["kernels"]
        assert sum(point["warm"]["how"].values()) == pairs


@pytest.mark.slow
def test_a_killed_process_costs_no_more_compiles_than_leases(quick):
    """Leases of a killed process expire on the server, and only what they stood for is compiled
    again.
    """
    _, result, _ = quick
    killed = points(result)["killed"]["cold"]
    assert killed["expired"] >= 1
    assert killed["duplicates"] <= killed["expired"]
    assert killed["not_compiled"] == 0


@pytest.mark.slow
def test_costs_are_the_servers_own(quick):
    """The server counts one login a connection; what it read agrees with the round trips seen at
    the sockets.
    """
    _, result, _ = quick
    for point in result["points"]:
        for phase in (point[name] for name in ("cold", "warm") if name in point):
            if not point["fault"]:
                assert phase["calls"]["auth"] == phase["connections"] >= point["ranks"]
                assert phase["round_trips"] <= phase["reads"]
                assert phase["sent_bytes"] > 0 < phase["cpu_s"]


@pytest.mark.slow
def test_ranks_of_a_host_fetch_once(quick):
    """With a near directory the server sends a host's kernels once, not once for each rank."""
    _, result, _ = quick
    alone, together = (points(result)[name]["warm"] for name in ("growth", "hosts"))
    assert together["sent_bytes"] < alone["sent_bytes"] / 2


@pytest.mark.slow
def test_ranks_in_one_moment_are_answered(quick):
    """A recorded conversation is answered on each connection; who only reads, runs no script on the
    server.
    """
    _, result, _ = quick
    for herd in result["herds"]:
        assert (herd["failed"], herd["failures"], herd["connections"]) == (0, [], herd["ranks"])
        assert ("evalsha" in herd["calls"]) == (not herd["read_only"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda point: point["cold"].update(duplicates=1), "compiles beside the first"),
        (lambda point: point["cold"].update(not_compiled=1), "nobody compiled"),
        (lambda point: point["warm"].update(error_count=1), "met an error"),
        (lambda point: point["warm"].update(round_trips=7 * point["ranks"]), "round trips"),
        (lambda point: point.update(fault="kill"), "leases that expired"),
    ],
)
def test_missed_targets_are_named(quick, change, said):
    """A duplicate without an expired lease, a lost kernel, an error, a seventh round trip, a fault
    that hit nobody: all are missed.
    """
    _, result, _ = quick
    changed = copy.deepcopy(points(result)["growth"])
    change(changed)
    (missed,) = [row["work"] for row in simulation.rows([changed]) if not row["ok"]]
    assert said in missed


@pytest.mark.slow
def test_the_page_is_made_from_the_results(run_sim, quick, tmp_path):
    """Figures and plot come from the result, what stands between them stays, and --check notices
    what is stale.
    """
    _, _, folder = quick
    page = tmp_path / "scaling.md"
    page.write_text(PAGE.read_text())
    arguments = ("--document", "--results", folder, "--page", page)
    assert run_sim(*arguments, "--check").returncode == 1
    assert run_sim(*arguments).returncode == 0
    assert run_sim(*arguments, "--check").returncode == 0
    text = page.read_text()
    assert "| growth | 8 | 6 | 6 | 0 | 0 |" in text
    assert "## Settings for 10,000 ranks\n" in text
    picture = ET.parse(folder / "cluster-sim.svg").getroot()
    lines = [element for element in picture.iter() if element.tag.endswith("polyline")]
    assert len(lines) == 7
    page.write_text(text.replace("| growth | 8 | 6 | 6 |", "| growth | 8 | 6 | 5 |"))
    assert run_sim(*arguments, "--check").returncode == 1


@pytest.mark.slow
def test_a_page_without_marks_is_refused(run_sim, quick, tmp_path):
    """A document that lacks a mark is left alone, with the line that is missing."""
    page = tmp_path / "scaling.md"
    page.write_text(PAGE.read_text().replace("<!-- end of cold -->\n", ""))
    done = run_sim("--document", "--results", quick[2], "--page", page)
    assert done.returncode == 1
    assert "<!-- end of cold -->" in done.stderr


def test_the_page_in_the_repository_is_not_stale(run_sim):
    """docs/scaling.md and its plot are what docs/results/cluster-sim.json gives."""
    done = run_sim("--document", "--check")
    assert (done.returncode, done.stdout) == (0, "")
