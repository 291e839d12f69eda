# SPDX-License-Identifier: Apache-2.0
"""`InflightJob`: a job that is under way in a service, and the futures of those who wait for it; used by the service alone.

`attempt` turns whatever a compile raises into an error of ours, `result_of` waits for a future, `raised` raises an error that was returned,
`timing` says where the time went.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any

from bundler.compile.compile_job import Compiled, Job
from bundler.compile.job_futures import CompileFuture
from bundler.compile.pool_tasks import TaskOutcome
from bundler.compile.service_progress import JobTiming
from bundler.compile.worker_messages import as_failure
from bundler.errors import BundlerError, CompileFailed


@dataclass(eq=False)
class InflightJob:
    """A job that is under way, and the futures that wait for it.

    Attributes:
        job: the job.
        key: equal for equal jobs.
        submitted_s: when its first future was made.
        waiting: the futures that get its result.
        inner: the pool's future, once it has one.
        outcome: what a worker said.
        given_up: every future was cancelled.
    """

    job: Job
    key: str
    submitted_s: float
    waiting: list[CompileFuture[Compiled]] = field(default_factory=list)
    inner: Future[Any] | None = None
    outcome: TaskOutcome | None = None
    given_up: bool = False


def attempt(job: Job, function: Callable[[], Compiled]) -> Compiled | BundlerError | None:
    """Return what a compile gives or why it gives nothing; None when it was cancelled."""
    try:
        return function()
    except CancelledError:
        return None
    except (Exception, SystemExit) as error:  # noqa: BLE001  # the future raises whatever the compiler or `once` raised
        return as_failure(job.name, error, "")


def result_of(future: CompileFuture[Compiled]) -> Compiled | BundlerError:
    """Wait for a future; returns the kernel, or why there is none."""
    try:
        return future.result()
    except BundlerError as error:
        return error
    except CancelledError:
        return CompileFailed(
            f"{future.name}: cancelled", name=future.name, reason="cancelled", line=None, words=""
        )


def raised(outcome: Compiled | BundlerError) -> Compiled:
    """Return a compiled kernel; raises why there is none."""
    if isinstance(outcome, BundlerError):
        raise outcome
    return outcome


def timing(inflight: InflightJob, result: Compiled | BundlerError, now_s: float) -> JobTiming:
    """Return where the time of a job went that ends now."""
    outcome = inflight.outcome
    compiled = isinstance(result, Compiled)
    return JobTiming(
        inflight.job.name,
        "failed" if not compiled else "hit" if result.hit else "compiled",
        outcome.queued_s if outcome is not None else 0.0,
        outcome.worker_s if outcome is not None else 0.0,
        now_s - inflight.submitted_s,
        result.stages if compiled else (),
    )
