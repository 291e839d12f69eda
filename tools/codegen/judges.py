# SPDX-License-Identifier: Apache-2.0
"""The three judges of generated programs, on all GPUs of a machine at once: `models`,
`random-programs` and `suites`, a shard a GPU, then one result of each.

    python -m tools.codegen judges --seconds 1500 --results OUT
    python -m tools.codegen judges --judge suites --device cpu --results OUT
        in Triton's interpreter, which `models` is too slow for

A run goes on where the last one in OUT ended, as long as what generates is the same, and the number
of GPUs: answers lie in a folder named after both.  A judge begins on a GPU when the one before is done there.  Exit status 1:
something is wrong, raises or was not run.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.codegen import models
from tools.codegen.command_line import parser
from tools.shared.processes import ROOT, command, python_path, said

JUDGES = ("models", "random-programs", "suites")
# What a model may take where every processor works: torch takes minutes to trace some.
_LIMIT_S = 900.0


@dataclasses.dataclass(frozen=True)
class Shard:
    """What runs on one GPU, and on which processors.

    Attributes:
        number, of: its place among the shards, from 1.
        processors: that its processes run on.
        folder: of answers.
        until: of `time.monotonic`; nothing begins after it.
    """

    number: int
    of: int
    processors: tuple[int, ...]
    folder: Path
    until: float

    def run(self, judges: Sequence[str], device: str) -> None:
        """Run the shard of each judge to its end, one after the other."""
        os.sched_setaffinity(0, self.processors)  # of this thread, and of what it starts
        for judge in judges:
            common = ["--shard", f"{self.number}/{self.of}", "--drawn-candidates"]
            self._run(judge, device, [*common, *self._options(judge)], self.number - 1)
        if "models" in judges and device == "cuda" and self.number == self.of > 1:
            words = ["--kind", "multi-gpu", *self._options("models")]
            self._run("models", device, words, self.number - 2, self.number - 1)

    def _options(self, judge: str) -> list[str]:
        count = str(len(self.processors))
        if judge == "random-programs":
            return ["--processes", count, "--no-smaller", "--results", str(self.folder)]
        limit = ["--limit", f"{_LIMIT_S:.0f}"] if judge == "models" else []
        out = self.folder / f"{judge}.{self.number}.json"
        return ["--workers", count, *limit, "--out", str(out)]

    def _run(self, judge: str, device: str, words: list[str], *gpus: int) -> None:
        left = f"{max(self.until - time.monotonic(), 0):.0f}"
        line = [judge, "--device", device, "--resume", "--seconds", left, *words]
        variables = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        if device == "cuda":
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
        with (self.folder / f"{judge}.{self.number}.log").open("a") as log:
            _ran(line, variables, log)  # the result of all shards says what is wrong


def main() -> int:
    """Run the shards, and put their answers together; 1 when a judge is not at zero."""
    line = parser(__doc__, "device seconds results", device="cuda", seconds=1500.0)
    line.add_argument(
        "--judge", action="append", choices=JUDGES, help="repeatable; without one all"
    )
    options = line.parse_args()
    judges = options.judge or [one for one in JUDGES if options.device == "cuda" or one != "models"]
    count = _gpus() if options.device == "cuda" else 1
    folder = options.results.absolute() / f"{models.sources()}-{count}"
    folder.mkdir(parents=True, exist_ok=True)
    shards = divided(count, folder, options.seconds)
    with concurrent.futures.ThreadPoolExecutor(len(shards)) as pool:
        for done in [pool.submit(shard.run, judges, options.device) for shard in shards]:
            done.result()
    return max(together(judge, options.device, shards) for judge in judges)


def _gpus() -> int:
    listed = said("nvidia-smi", "--list-gpus") or ""
    if not listed:
        raise SystemExit("judges: expected a GPU, and nvidia-smi lists none; or --device cpu")
    return len(listed.splitlines())


def divided(count: int, folder: Path, seconds: float) -> list[Shard]:
    """Return the shards of so many GPUs; each has as many of this machine's processors."""
    processors, until = sorted(os.sched_getaffinity(0)), time.monotonic() + seconds
    each = max(len(processors) // count, 1)
    return [
        Shard(
            number,
            count,
            tuple(processors[(number - 1) * each : number * each] or processors),
            folder,
            until,
        )
        for number in range(1, count + 1)
    ]


def together(judge: str, device: str, shards: Sequence[Shard]) -> int:
    """Put the answers of a judge's shards together, print them; 1 when it is not at zero."""
    folder, name = shards[0].folder, {"models": "codegen-models"}.get(judge, f"codegen-{judge}")
    print(f"== {judge}", flush=True)
    if judge == "models":
        found = [str(path) for path in sorted(folder.glob("models.*.json"))]
        out = ["--out", str(folder / f"{name}.json")]
        calls = [["--merge", *found, *out], ["--check", *out]]
    elif judge == "suites":
        found = [str(folder / f"suites.{shard.number}.json.journal") for shard in shards]
        out = ["--out", str(folder / f"{name}-{device}.json")]
        calls = [["--device", device, "--merge", *found, *out]]
    else:
        merge = ["--merge"] if len(shards) > 1 else ["--check"]
        calls = [["--device", device, *merge, "--results", str(folder)]]
    status = 0
    for words in calls:
        status = _ran([judge, *words])
    return status


def _ran(line: Sequence[str], variables: Mapping[str, str] | None = None, log: Any = None) -> int:
    """Run a judge, which writes into a log or where this program writes; returns its status."""
    return subprocess.run(
        command("tools.codegen", *line),
        env={**os.environ, "PYTHONPATH": python_path(), **(variables or {})},
        cwd=ROOT,
        stdout=log,
        stderr=log and subprocess.STDOUT,
        check=False,
    ).returncode


if __name__ == "__main__":
    raise SystemExit(main())
