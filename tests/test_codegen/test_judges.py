# SPDX-License-Identifier: Apache-2.0
"""All judges at once: shards over GPUs and processors, and one result of each judge."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import NamedTuple

from tools.codegen import judges, models, suites


class Case(NamedTuple):
    """A case of `suites`, without the import of torch's lists, which takes five seconds."""

    suite: str
    operator: str
    dtype: str
    mode: str
    sample: int

    @property
    def name(self):
        return "/".join(map(str, self))


def test_processors_are_divided_among_gpus(tmp_path):
    """Each processor belongs to one GPU; with fewer than GPUs, each has all of them."""
    here = sorted(os.sched_getaffinity(0))
    for count in (1, len(here)):
        shards = judges.divided(count, tmp_path, 1.0)
        assert sorted(one for shard in shards for one in shard.processors) == here
        assert [(shard.number, shard.of) for shard in shards] == [
            (number, count) for number in range(1, count + 1)
        ]
    more = judges.divided(len(here) + 1, tmp_path, 1.0)
    assert all(shard.processors for shard in more)


def test_a_run_without_time_says_what_was_not_run_and_the_next_goes_on(
    monkeypatch, tmp_path, capfd
):
    """A judge that has not asked everything is not at zero; answers that lie there are kept."""
    cases = [Case("op_db", name, "float32", "plain", 0) for name in ("abs", "add", "sub")]
    monkeypatch.setattr(suites, "_listed", lambda _device: (cases, {}))
    for name in ("CODEGEN_SUITES_DEVICE", "OMP_NUM_THREADS", "PYTHONWARNINGS", "TRITON_INTERPRET"):
        monkeypatch.setenv(name, "")
    lines = []

    def run_here(line, **_):
        module, judge, *words = line[line.index("-m") + 1 :]
        assert (module, judge) == ("tools.codegen", "suites")
        lines.append(words)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["suites", *words])
            return subprocess.CompletedProcess(line, suites.main())

    here = SimpleNamespace(run=run_here, STDOUT=subprocess.STDOUT)
    monkeypatch.setattr(judges, "subprocess", here)
    folder = tmp_path / f"{models.sources()}-1"
    folder.mkdir()
    verdict = {"case": "op_db/abs/float32/plain/0", "outcome": "right", "why": ""}
    (folder / "suites.1.json.journal").write_text(json.dumps(verdict) + "\n")
    line = ["judges", "--device", "cpu", "--judge", "suites", "--seconds", "0"]
    monkeypatch.setattr(sys, "argv", [*line, "--results", str(tmp_path)])
    assert judges.main() == 1
    assert "not run in the time that there was" in capfd.readouterr().out
    result = json.loads((folder / "codegen-suites-cpu.json").read_text())
    assert result["counts"]["op_db"]["right"] == 1
    assert result["not_run"] == 2
    assert lines[0][lines[0].index("--shard") :][:2] == ["--shard", "1/1"]
    assert len(lines) == 2
