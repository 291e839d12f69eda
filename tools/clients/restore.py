# SPDX-License-Identifier: Apache-2.0
"""Restores a client's bundle to a new path, and asks Triton for each of its kernels, with sources
at another path too and a ptxas that refuses.

`check.py` starts it, in a process that has seen nothing of the one that compiled.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from bundler.compile.compile_job import Compiled, Job
from bundler.compile.service import CompileService
from bundler.format import wire
from bundler.lifecycle.restoration import restore
from tools.clients import stand_ins
from tools.clients.compile import PREPARE
from tools.clients.wheels import CLIENTS, unpacked
from tools.shared import measurement, programs

# Beside the result of `compile`.
RESTORED = ".restored"


def main() -> int:
    """Restore and ask."""
    parser = programs.parser(
        __doc__, folder=(Path, "where the wheels are"), workers=(2, "processes that ask")
    )
    beside = "the result of `compile`; beside it are the bundle and the jobs"
    parser.add_argument("compiled", type=Path, help=beside)
    options = parser.parse_args()
    if options.folder is None:
        parser.error("--folder is missing")
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="elsewhere-") as elsewhere:
        found = restored(
            options.compiled, options.folder.absolute(), Path(elsewhere), options.workers
        )
    options.compiled.with_suffix(RESTORED).write_text(json.dumps(found, indent=1))
    return 0


def restored(compiled: Path, folder: Path, elsewhere: Path, workers: int) -> dict[str, Any]:
    """Return how many kernels were restored, how many Triton found, and what it compiled
    instead.
    """
    told = json.loads(compiled.read_text())
    cache = elsewhere / "cache"
    report = restore(
        compiled.with_suffix(".tbundle"), cache_dir=cache, only="all", allow_empty=True
    )
    moved = {}
    for number, root in enumerate(unpacked(CLIENTS[told["client"]], folder)):
        moved[str(root)] = str(elsewhere / f"sources-{number}")
        shutil.copytree(root, moved[str(root)], copy_function=os.link)
    sys.path[:0] = moved.values()
    stand_ins.install()
    packed = wire.unpack(compiled.with_suffix(".jobs").read_bytes(), "jobs")
    jobs = [_moved(Job.from_bytes(data), moved) for data in packed]
    refusing, log = measurement.refusing_ptxas(elsewhere)
    os.environ.update(refusing)
    with CompileService(workers, cache_dir=cache, isolate=True, preload=PREPARE) as service:
        results = service.compile_all(jobs)
    found = [
        (job, one) for job, one in zip(jobs, results, strict=True) if isinstance(one, Compiled)
    ]
    calls = log.read_text().splitlines() if log.exists() else []
    return {
        "restored": report.usable,
        "asked": len(jobs),
        "hits": sum(one.hit and one.key == job.key for job, one in found),
        "compiles": sum(not one.hit for _, one in found),
        "ptxas_calls": len(calls),
        "failed": {
            job.name: str(one)[:300]
            for job, one in zip(jobs, results, strict=True)
            if not isinstance(one, Compiled)
        },
    }


def _moved(job: Job, moved: dict[str, str]) -> Job:
    """Return the job for the same module at its new path."""
    root = moved[job.source.root]
    return replace(
        job,
        source=replace(
            job.source, root=root, path=job.source.path.replace(job.source.root, root, 1)
        ),
    )
