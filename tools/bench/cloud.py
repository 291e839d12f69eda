# SPDX-License-Identifier: Apache-2.0
"""Measures a start from S3 beside fetching the same files in parallel, as `aws s3 sync` does.

    python -m tools.bench cloud [--check] [--kernels N] [--rounds N] [--quick] [--results DIR] [--keep DIR]

N real kernels lie in a bucket of a stand-in for S3 on this host (`tools.shared.object_server`, a
process of its own, which gives every answer 0 or 20 ms late): as the files of Triton's cache, and
as a push puts them.  Each round fetches them into an empty directory, in memory where there is such
a place: our restore by tag, and GETs of every file by obstore itself, as many at once as `aws s3
sync` has by default, and more.  Where the program `aws` is installed, it runs too.  `--check` exits
1 when a target is missed, and names it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from tools.bench import cloud_jobs
from tools.bench.bundle import finish, working_folder
from tools.bench.cloud_jobs import AT_ONCE
from tools.bench.cloud_rows import rows_of
from tools.bench.sides import Side, arguments, sides
from tools.shared import measurement
from tools.shared.kernel_variants import cache_of
from tools.shared.processes import ROOT, command

KERNELS, ROUNDS = 300, 5
QUICK_KERNELS, QUICK_ROUNDS = 12, 1
DELAYS_S = (0.0, 0.02)
# It takes several seconds each time, most of them its own start and its one interpreter.
AWS_ROUNDS = 1

Samples = dict[str, list[float]]


def main() -> int:
    """Measure, print a table, write the samples."""
    options = arguments(__doc__, KERNELS, ROUNDS)
    kernels = options.kernels or (QUICK_KERNELS if options.quick else KERNELS)
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    cache = cache_of(kernels, options.keep.resolve())
    files = [
        path.relative_to(cache).as_posix() for path in sorted(cache.rglob("*")) if path.is_file()
    ]
    load = os.getloadavg()[0]
    with ExitStack() as stack:
        work = stack.enter_context(working_folder(measurement.fast_directory() or options.keep))
        serving = stack.enter_context(sides(cloud_jobs.__name__, "ours", "plain"))
        (work / "names").write_text("\n".join(files))
        recorded = serving["ours"].do("record", kernels, cache, work / "bundle")
        assert recorded["kernels"] == kernels, recorded
        delays = {
            f"{delay * 1000:g} ms": measure(delay, rounds, cache, work, serving)
            for delay in DELAYS_S
        }
    result = {
        "kernels": kernels,
        "rounds": rounds,
        "files": len(files),
        "place": "tmpfs" if measurement.fast_directory() else "disk",
        "load_before": round(load, 2),
        "client": importlib.metadata.version("obstore"),
        "aws": aws_version(),
        "delays": delays,
    }
    missed = finish("bench-cloud", {**result, "rows": rows_of(result)}, options.results)
    for line in missed:
        print(
            f"missed: {line['work']}: {measurement.shown(line['figure'], line['unit'])},"
            f" {measurement.target(line)}"
        )
    return 1 if options.check and missed else 0


@contextlib.contextmanager
def served(delay_s: float, folder: Path) -> Iterator[str]:
    """Serve a bucket with the files of a folder, from a process of its own; yields the endpoint."""
    line = command("tools.shared.object_server", str(delay_s), str(folder))
    process = subprocess.Popen(
        line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.communicate()


def measure(
    delay_s: float, rounds: int, cache: Path, work: Path, serving: dict[str, Side]
) -> Samples:
    """Run every job in turn; returns samples by what was done."""
    samples: Samples = {}
    out = work / "out"
    with served(delay_s, cache) as endpoint:
        pushed = serving["ours"].do("push", endpoint, work / "bundle")
        samples["push"] = [pushed["push"]]
        for number in range(rounds):
            for side, name, job, words in (
                *(
                    ("ours", f"ours {keep}", "restore", (endpoint, out, keep))
                    for keep in ("all", "launch")
                ),
                *(
                    (
                        "plain",
                        f"gets, {count} at once",
                        "gets",
                        (endpoint, work / "names", out, count),
                    )
                    for count in AT_ONCE
                ),
            ):
                found = serving[side].do(job, *words)
                samples.setdefault(name, []).append(found["seconds"])
                samples.setdefault(
                    f"{name}: {'kernels' if side == 'ours' else 'files'}", []
                ).append(found["count"])
                shutil.rmtree(out)
            if number < AWS_ROUNDS and aws_version():
                found = serving["plain"].do("aws", endpoint, out)
                samples.setdefault("aws s3 sync", []).append(found["seconds"])
                shutil.rmtree(out)
    return samples


def aws_version() -> str:
    """Return what the program `aws` says that it is, empty where it is not installed."""
    if shutil.which("aws") is None:
        return ""
    environment = cloud_jobs.aws_environment("")
    said = subprocess.run(
        ["aws", "--version"], capture_output=True, text=True, check=False, env=environment
    ).stdout
    return said.partition(" ")[0]
