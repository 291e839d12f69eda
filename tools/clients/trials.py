# SPDX-License-Identifier: Apache-2.0
"""`Trials`: compiles each kernel of a client with one guess after the other until one is right;
what was found out is kept between runs.

::

    <state>/MODULE@FUNCTION.job             the job that compiled
    <state>/MODULE@FUNCTION.json            how many guesses failed, and why; whether the kernel is refused

`compile.py` runs it, once for each client and target, in a process of its own.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bundler.compile.build_plan import jobs_of
from bundler.compile.compile_job import Compiled, Job
from bundler.compile.service import CompileService
from bundler.errors import BundlerError, CompileTimeout, WorkerDied
from bundler.format.entries import Target
from bundler.toolchain import jit_specialization
from tools.clients.found_kernels import FoundKernel
from tools.clients.guesses import guesses

_REASON_CHARACTERS = 300
# A kernel whose compile took too long or too much memory so often is given up: its further guesses
# would too.
_MOST_COSTLY = 2


@dataclass
class Trials:
    """The trials of one client's kernels for one target.

    Attributes:
        service: what compiles.
        target: for which GPU.
        state: folder with what was found out before.
        compiled: name -> result.
        jobs: name -> the job that gave it.
        refused: name -> Triton's reason for the likeliest call, of kernels for which no guess was
            right.
    """

    service: CompileService
    target: Target
    state: Path
    compiled: dict[str, Compiled] = field(default_factory=dict)
    jobs: dict[str, Job] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    _failed: Counter[str] = field(default_factory=Counter)
    _reasons: dict[str, str] = field(default_factory=dict)
    _costly: Counter[str] = field(default_factory=Counter)

    def run(self, kernels: list[FoundKernel], until: float, wanted: int | None) -> int:
        """Try kernels until the clock says so, or so many are compiled; returns how many need
        another run.
        """
        self.state.mkdir(parents=True, exist_ok=True)
        self._again([one for one in kernels if self._file(one, "job").exists()])
        known = {one.name for one in kernels if self._known(one)}
        waiting = [
            (one, self._jobs(one))
            for one in kernels
            if one.name not in self.compiled and one.name not in known
        ]
        while (
            waiting and time.monotonic() < until and (wanted is None or len(self.compiled) < wanted)
        ):
            # As many at once as keep the workers busy, so that a stop loses little.
            now, later = waiting[: 16 * self.service.workers], waiting[16 * self.service.workers :]
            waiting = later + self._round(now)
        return len({one.name for one in kernels} - self.compiled.keys() - self.refused.keys())

    @property
    def unfinished(self) -> dict[str, str]:
        """Kernels for which a guess was wrong and further ones were not tried yet, with Triton's
        reason.
        """
        done = self.compiled.keys() | self.refused.keys()
        return {name: reason for name, reason in sorted(self._reasons.items()) if name not in done}

    def _again(self, kernels: list[FoundKernel]) -> None:
        """Compile what an earlier run found, which is in the cache directory."""
        jobs = [Job.from_bytes(self._file(one, "job").read_bytes()) for one in kernels]
        for one, job, result in zip(kernels, jobs, self.service.compile_all(jobs), strict=True):
            if isinstance(result, Compiled):
                self.compiled[one.name], self.jobs[one.name] = result, job

    def _known(self, kernel: FoundKernel) -> bool:
        """Read what an earlier run tried; returns whether that was everything."""
        path = self._file(kernel, "json")
        told: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self._failed[kernel.name] = told.get("failures", 0)
        if "reason" in told:
            self._reasons[kernel.name] = told["reason"]
        if told.get("refused"):
            self.refused[kernel.name] = told["reason"]
        return kernel.name in self.refused

    def _round(
        self, trials: list[tuple[FoundKernel, Iterator[Job]]]
    ) -> list[tuple[FoundKernel, Iterator[Job]]]:
        """Compile the next guess of each; returns those that failed and have more guesses."""
        asked, again = [], []
        for kernel, jobs in trials:
            if (job := next(jobs, None)) is not None:
                asked.append((kernel, jobs, job))
        results = self.service.compile_all([job for *_, job in asked])
        for (kernel, jobs, job), result in zip(asked, results, strict=True):
            if isinstance(result, Compiled):
                self.compiled[kernel.name], self.jobs[kernel.name] = result, job
                self._write(kernel, "job", job.to_bytes())
            else:
                self._costly[kernel.name] += isinstance(result, (CompileTimeout, WorkerDied))
                self._fail(kernel, result)
                again.append((kernel, jobs))
        return again

    def _jobs(self, kernel: FoundKernel) -> Iterator[Job]:
        """Yield the job of each guess that Triton can specialize and that did not fail before;
        refuse the kernel after the last.
        """
        calls = itertools.islice(guesses(kernel.kernel), self._failed[kernel.name], None)
        for arguments, keywords in calls:
            if self._costly[kernel.name] >= _MOST_COSTLY:
                break
            try:
                for found in itertools.islice(
                    jit_specialization.specialize(kernel.kernel, arguments, keywords, self.target),
                    1,
                ):
                    yield next(jobs_of(kernel.function.__name__, kernel.source, found, self.target))
            except Exception as error:  # noqa: BLE001  # heuristics of clients and Triton's checks may raise anything
                self._fail(kernel, error)
        self.refused[kernel.name] = self._reasons.get(
            kernel.name, "nothing is known of its arguments"
        )
        self._tell(kernel, refused=True)

    def _fail(self, kernel: FoundKernel, error: Exception) -> None:
        said = (
            error.facts.get("reason") or error.message
            if isinstance(error, BundlerError)
            else repr(error)
        )
        self._reasons.setdefault(kernel.name, " ".join(str(said).split())[:_REASON_CHARACTERS])
        self._failed[kernel.name] += 1
        self._tell(kernel, refused=False)

    def _tell(self, kernel: FoundKernel, *, refused: bool) -> None:
        told = {
            "failures": self._failed[kernel.name],
            "reason": self._reasons.get(kernel.name, ""),
            "refused": refused,
        }
        self._write(kernel, "json", json.dumps(told).encode())

    def _file(self, kernel: FoundKernel, kind: str) -> Path:
        return self.state / f"{kernel.name.replace(':', '@')}.{kind}"

    def _write(self, kernel: FoundKernel, kind: str, data: bytes) -> None:
        path = self._file(kernel, kind)
        temporary = path.with_suffix(".new")
        temporary.write_bytes(data)
        os.replace(temporary, path)
