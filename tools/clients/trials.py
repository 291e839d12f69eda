# SPDX-License-Identifier: Apache-2.0
"""`Trials`: compiles each kernel of a client with one guess after the other until one is right;
what was found out is kept between runs.

::

    <state>/MODULE@FUNCTION.job             the job that compiled
    <state>/MODULE@FUNCTION.json            how the call was known; else what failed, and why the kernel is refused after the last guess

`compile.py` runs it, once for each client and target, in a process of its own.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
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
from tools.clients.guesses import Call, guesses

# (how it is known, call): the likeliest first.
CAPTURED = "captured"
Calls = Callable[[FoundKernel], Iterator[tuple[str, Call]]]
_REASON_CHARACTERS = 300
# A kernel whose compile took too long or too much memory so often is given up: its further guesses
# would too.
_MOST_COSTLY = 2


def guessed(kernel: FoundKernel) -> Iterator[tuple[str, Call]]:
    """Yield guesses, with their numbers."""
    for number, call in enumerate(guesses(kernel.kernel), 1):
        yield f"guess {number}", call


@dataclass
class Trials:
    """The trials of one client's kernels for one target.

    Attributes:
        service: what compiles.
        target: for which GPU.
        state: folder with what was found out before.
        calls: the calls to try of a kernel.
        compiled: name -> result.
        jobs: name -> the job that gave it.
        how: name -> how the call was known.
        refused: name -> Triton's reason for the likeliest call, of kernels for which no guess was
            right.
    """

    service: CompileService
    target: Target
    state: Path
    calls: Calls = guessed
    compiled: dict[str, Compiled] = field(default_factory=dict)
    jobs: dict[str, Job] = field(default_factory=dict)
    how: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    _failed: dict[str, list[str]] = field(default_factory=dict)
    _reasons: dict[str, str] = field(default_factory=dict)
    _costly: Counter[str] = field(default_factory=Counter)

    def run(
        self,
        kernels: list[FoundKernel],
        until: float,
        wanted: int | None = None,
        most: int | None = None,
    ) -> int:
        """Try kernels until the clock says so, so many are compiled, or each was guessed so often;
        returns how many need another run.
        """
        self.state.mkdir(parents=True, exist_ok=True)
        self._again([one for one in kernels if self._file(one, "job").exists()])
        known = {one.name for one in kernels if self._known(one)}
        waiting = [
            (one, self._jobs(one, most))
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
                told = json.loads(self._file(one, "json").read_text())
                self._keep(one, job, result, told["how"])

    def _known(self, kernel: FoundKernel) -> bool:
        """Read what an earlier run tried; returns whether that was everything."""
        path = self._file(kernel, "json")
        told: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self._failed[kernel.name] = told.get("failed", [])
        if "reason" in told:
            self._reasons[kernel.name] = told["reason"]
        if told.get("refused"):
            self.refused[kernel.name] = told["reason"]
        return kernel.name in self.refused

    def _round(
        self, trials: list[tuple[FoundKernel, Iterator[tuple[str, Job]]]]
    ) -> list[tuple[FoundKernel, Iterator[tuple[str, Job]]]]:
        """Compile the next guess of each; returns those that failed and have more guesses."""
        asked, again = [], []
        for kernel, jobs in trials:
            how, job = next(jobs, ("", None))
            if job is not None:
                asked.append((kernel, jobs, how, job))
        results = self.service.compile_all([job for *_, job in asked])
        for (kernel, jobs, how, job), result in zip(asked, results, strict=True):
            if isinstance(result, Compiled):
                self._keep(kernel, job, result, how)
                # The job last: a job without its story would not be understood.
                self._write(kernel, "json", json.dumps({"how": how}).encode())
                self._write(kernel, "job", job.to_bytes())
            else:
                self._costly[kernel.name] += isinstance(result, (CompileTimeout, WorkerDied))
                self._fail(kernel, how, result)
                again.append((kernel, jobs))
        return again

    def _jobs(self, kernel: FoundKernel, most: int | None) -> Iterator[tuple[str, Job]]:
        """Yield the job of each call that Triton can specialize; refuse the kernel after
        the last.
        """
        calls = list(self.calls(kernel))
        for how, (arguments, keywords) in calls[:most]:
            if how in self._failed[kernel.name]:
                continue
            if self._costly[kernel.name] >= _MOST_COSTLY:
                most = None
                break
            # Captured calls have what an autotuner chose.
            callee = kernel.function if how == CAPTURED else kernel.kernel
            try:
                for found in itertools.islice(
                    jit_specialization.specialize(callee, arguments, keywords, self.target), 1
                ):
                    yield (
                        how,
                        next(jobs_of(kernel.function.__name__, kernel.source, found, self.target)),
                    )
            except Exception as error:  # noqa: BLE001  # heuristics of clients and Triton's checks may raise anything
                self._fail(kernel, how, error)
        if most is None or most >= len(calls):
            self.refused[kernel.name] = self._reasons.get(
                kernel.name, "nothing is known of its arguments"
            )
            self._tell(kernel, refused=True)

    def _keep(self, kernel: FoundKernel, job: Job, result: Compiled, how: str) -> None:
        self.compiled[kernel.name], self.jobs[kernel.name], self.how[kernel.name] = result, job, how

    def _fail(self, kernel: FoundKernel, how: str, error: Exception) -> None:
        said = (
            error.facts.get("reason") or error.message
            if isinstance(error, BundlerError)
            else repr(error)
        )
        self._reasons.setdefault(kernel.name, " ".join(str(said).split())[:_REASON_CHARACTERS])
        self._failed[kernel.name].append(how)
        self._tell(kernel, refused=False)

    def _tell(self, kernel: FoundKernel, *, refused: bool) -> None:
        told = {
            "failed": self._failed[kernel.name],
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
