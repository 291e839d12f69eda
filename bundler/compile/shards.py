# SPDX-License-Identifier: Apache-2.0
"""`Shard`: which part of a plan a machine builds, equal on each machine that plans the same.

Shards meet in a store and know nothing of each other: the command `build --shard 3/64` takes its
part, `build --collect` what is there.
"""

from __future__ import annotations

import heapq
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from bundler.compile.compile_job import Job
from bundler.errors import ConfigError
from bundler.format.bundle import Bundle
from bundler.format.digest import digest_text, sha256

_MICROSECOND = 1e-6
# Where nothing was recorded every kernel is taken for as long as any other one.
_UNKNOWN_S = 1.0


@dataclass(frozen=True)
class Shard:
    """One part of so many; the first is number 1."""

    number: int
    of: int

    @staticmethod
    def parse(text: str) -> Shard:
        """Read `3/64`.

        Raises:
            ConfigError: it is not like that, or there is no such part.
        """
        found = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text)
        number, of = (int(found[1]), int(found[2])) if found is not None else (0, 0)
        if not 1 <= number <= of:
            raise ConfigError(
                f"shard {text!r}: expected I/N, such as 3/64, with I from 1 to N", got=text
            )
        return Shard(number, of)

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def part(self, jobs: Iterable[Job], times: RecordedTimes | None = None) -> list[Job]:
        """Return the jobs of this part.

        Each job is in one part.  Which one depends on the jobs, on `times` and on nothing else:
        neither on the order of the jobs nor on where their sources lie.  The jobs that take longest
        are dealt out first, each to the part that has least to do.

        Args:
            jobs: all jobs of the plan.
            times: how long kernels took before; None takes them for equal.
        """
        known = times or RecordedTimes({}, {})
        ranked = sorted(
            ((-known.seconds(job), identity(job), job) for job in jobs), key=lambda one: one[:2]
        )
        loads = [(0.0, number) for number in range(1, self.of + 1)]
        mine: list[Job] = []
        for less_s, _, job in ranked:
            load_s, number = loads[0]
            heapq.heapreplace(loads, (load_s - less_s, number))
            if number == self.number:
                mine.append(job)
        return mine


@dataclass(frozen=True)
class RecordedTimes:
    """How long kernels took to compile, as a bundle has it.

    Attributes:
        by_key: kernel key -> seconds.
        by_name: (name, backend) -> seconds in the middle of those kernels.
    """

    by_key: Mapping[str, float]
    by_name: Mapping[tuple[str, str], float]

    @staticmethod
    def of(bundle: Bundle) -> RecordedTimes:
        """Return the times of the kernels of a bundle that were compiled when it was made."""
        by_key: dict[str, float] = {}
        named: dict[tuple[str, str], list[float]] = defaultdict(list)
        seen = bundle.observed.kernels
        for kernel in bundle.kernels:
            observation = seen.get(kernel.key)
            spent = sum(time for _, time in observation.times_us) if observation is not None else 0
            if spent:
                by_key[kernel.key] = spent * _MICROSECOND
                named[kernel.name, kernel.target.backend].append(spent * _MICROSECOND)
        return RecordedTimes(
            by_key, {name: statistics.median(times) for name, times in named.items()}
        )

    def seconds(self, job: Job) -> float:
        """Return how long a job will take: as its kernel did, else as others of its name, else as
        most.
        """
        known = self.by_key.get(job.key)
        if known is None:
            known = self.by_name.get((job.name, job.target.backend))
        return self._middle_s if known is None else known

    @property
    def _middle_s(self) -> float:
        return statistics.median(self.by_name.values()) if self.by_name else _UNKNOWN_S


def identity(job: Job) -> str:
    """Return a digest of what a job makes, without places of sources and libraries, which differ
    from machine to machine.
    """
    # What is built from IR has no key before it is compiled, but the IR.
    what = (job.name, str(job.target), job.key, sha256(job.source.data).hex())
    return digest_text(sha256("\0".join(what).encode()))
