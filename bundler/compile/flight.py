# SPDX-License-Identifier: Apache-2.0
"""`Flight`: a job that is under way in a service, who waits for it, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any

from bundler.compile.futures import CompileFuture
from bundler.compile.job import Compiled, Job
from bundler.compile.messages import as_failure
from bundler.compile.progress import Timing
from bundler.compile.tasks import Outcome
from bundler.errors import BundlerError, CompileFailed


@dataclass(eq=False)
class Flight:
    """A job that is under way, and who waits for it.

    Attributes:
        job: the job.
        key: equal for equal jobs.
        submitted_s: when the first of those who wait handed it in.
        waiting: their futures.
        inner: the pool's future, once it has one.
        outcome: what a worker said.
        given_up: nobody waits any more.
    """

    job: Job
    key: str
    submitted_s: float
    waiting: list[CompileFuture[Compiled]] = field(default_factory=list)
    inner: Future[Any] | None = None
    outcome: Outcome | None = None
    given_up: bool = False


def attempt(job: Job, function: Callable[[], Compiled]) -> Compiled | BundlerError | None:
    """Return what a compile gives or why it gives nothing; None when it was cancelled."""
    try:
        return function()
    except CancelledError:
        return None
    except (Exception, SystemExit) as error:  # noqa: BLE001  # what the compiler or `once` raises belongs to the future
        return as_failure(job.name, error, "")


def forked(job: Job) -> BundlerError:
    """Return why a job of the parent has no result in a forked child."""
    message = f"{job.name}: the parent of this forked process compiles it; submit it again here"
    return CompileFailed(message, name=job.name, reason="forked", line=None, words="")


def result_of(future: CompileFuture[Compiled]) -> Compiled | BundlerError:
    """Wait for a future; returns the kernel, or why there is none."""
    try:
        return future.result()
    except BundlerError as error:
        return error
    except CancelledError:
        return CompileFailed(f"{future.name}: cancelled", name=future.name, reason="cancelled", line=None, words="")


def timing(flight: Flight, result: Compiled | BundlerError, now_s: float) -> Timing:
    """Return where the time of a flight went that ends now."""
    outcome = flight.outcome
    compiled = isinstance(result, Compiled)
    return Timing(
        flight.job.name,
        "failed" if not compiled else "hit" if result.hit else "compiled",
        outcome.queued_s if outcome is not None else 0.0,
        outcome.worker_s if outcome is not None else 0.0,
        now_s - flight.submitted_s,
        result.stages if compiled else (),
    )
