# SPDX-License-Identifier: Apache-2.0
"""What the page says of a missed target is of that row: its own words, its own steps, or
nothing.
"""

import json
from pathlib import Path

import pytest

from tools.bench import hits, page
from tools.bench.page import REASONS, not_reached
from tools.shared.measurement import row

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
EXPLAINED = sorted(REASONS)
STEPS = {
    "store hit": {"read: files": 0.0003, "read: names": 0.0002, "bare: the loop": -0.0001},
    "restore": {"load: it": 1.0},
}


def line_of(name, work, **more):
    (line,) = not_reached(
        name, {"rows": [row(work, 2.0, "ms", most=1.0)], "profile": STEPS, **more}
    )
    return line


def test_a_row_has_its_own_words_and_steps():
    """Steps of one actor are told together."""
    line = line_of("bench-basics", "a hit in a store in a directory, above writing the files")
    assert "Why: the record and the units of the kernel are read from files of their own" in line
    assert line.endswith(" Alone: read 0.5 ms, bare -0.1 ms.")


def test_a_row_without_steps_has_words_alone():
    """As in a result of before."""
    line = line_of("bench-basics", "judging a signature, first restore of a process (CPU)")
    assert "Why: our modules and the package cryptography are imported" in line
    assert "Alone" not in line


@pytest.mark.parametrize(
    ("name", "work"),
    [
        ("bench-basics", "recording, added to each compile call"),
        ("bench-basics", "judging a signature, later restores (CPU)"),
        ("bench-basics", "tmpfs: restore the launch set"),  # a name of another result
        ("bench-bundle", "judging a signature, first restore of a process (CPU)"),
        ("bench-bundle", "restore 1,000 kernels, 104 MB: peak memory above a bare interpreter"),
        ("bench-bundle", "tmpfs: pull and restore everything"),
        ("bench-compile", "tmpfs: restore everything, digests verified"),
    ],
)
def test_a_row_that_nobody_explained_has_no_words_of_another(name, work):
    """Whatever words their names have in common."""
    assert line_of(name, work) == f"**{work}**: 2 ms, at most 1 ms: 100 % off."


@pytest.mark.parametrize("name", EXPLAINED)
def test_each_reason_is_of_a_row_and_of_steps_that_there_are(name):
    """In the committed results: none is left of a row that is called something else now, and no row
    has two.
    """
    result = json.loads((RESULTS / f"{name}.json").read_text())
    works = [line["work"] for line in result["rows"]]
    shown = {*page.STEPS, *page.BASICS, "start", "start all"}
    for reason in REASONS[name]:
        assert any(page.matches(reason, work) for work in works), (
            f"{name} has no row for {reason.work!r}"
        )
        assert reason.profile in {*shown, ""}
    for work in works:
        assert sum(page.matches(reason, work) for reason in REASONS[name]) <= 1, work


def test_steps_of_a_hit_add_up(monkeypatch):
    """What one function spends in another counts there, the rest is told, and the functions are as
    before in the end.
    """
    clock = iter(range(0, 1_000_000_000, 1_000_000))
    monkeypatch.setattr(hits.time, "perf_counter_ns", lambda: next(clock))

    class Owner:
        def outer(self):
            return self.inner() + 1

        def inner(self):
            return 1

        @classmethod
        def made(cls, number):
            return number

    plain = dict(vars(Owner))
    here = f"{__name__}:Owner"
    monkeypatch.setitem(globals(), "Owner", Owner)
    monkeypatch.setattr(
        hits,
        "STEPS",
        {"a: out": (f"{here}.outer",), "b: in": (f"{here}.inner", f"{here}.made")},
    )
    clocks = hits.HitSteps()
    with clocks.running():
        assert (Owner().outer(), Owner.made(7)) == (2, 7)
        clocks.hit(9000.0)
        clocks.hit(5.0)
    assert {name: vars(Owner)[name] for name in plain} == plain
    assert clocks.samples == [
        {"a: out": 2000.0, "b: in": 2000.0, hits.REST: 5000.0},
        {"a: out": 0.0, "b: in": 0.0, hits.REST: 5.0},
    ]
    assert hits.seconds_of(clocks.samples[:1], [1000.0])[hits.BARE] == -0.001


def test_the_functions_of_a_hits_steps_are_there():
    """Clocks go around each of them, also when they were renamed."""
    clocks = hits.HitSteps()
    with clocks.running():
        clocks.hit(5.0)
    assert clocks.samples == [dict.fromkeys(hits.STEPS, 0.0) | {hits.REST: 5.0}]
