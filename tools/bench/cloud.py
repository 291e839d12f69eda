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

import importlib.metadata
import os
from pathlib import Path
from typing import Any

from tools.bench import tables
from tools.bench.jobs import aws_environment
from tools.bench.sides import Samples, Turn, arguments, concluded, sides, take_turns, working_folder
from tools.shared import measurement
from tools.shared.kernel_variants import cache_of
from tools.shared.measurement import median, ratio_row, shown, table
from tools.shared.object_server import BUCKET
from tools.shared.processes import listening, said

KERNELS, ROUNDS = (300, 12), (5, 1)
DELAYS_S = (0.0, 0.02)
# `aws s3 sync` fetches ten files at once unless it is configured otherwise; more are faster until
# the processors are busy.
AWS_AT_ONCE = 10
AT_ONCE = (AWS_AT_ONCE, 32, 128, 256)
# It takes several seconds each time, most of them its own start and its one interpreter.
AWS_ROUNDS = 1

_AWS = "aws s3 sync"
# How many times faster than files fetched as `aws s3 sync` does, by how late each answer comes.
FASTER_TARGETS = {"20 ms": 10.0}
SECTION = """`python -m tools.bench cloud`. {kernels:,} kernels, compiled by Triton for sm_90 and recorded, {files:,} files, in a bucket of a stand-in for S3 on
this host that gives each answer so much later; everything goes into an empty directory, on {place}. {rounds} rounds, the sides in turn, each
piece of work in a process of its own, forked from one that has done its imports. obstore {client}; load of the machine by other work
before the run: {load_before}. The stand-in is a process of Python that answers some thousand requests a second, and takes part of the
processors from both sides; without a delay it is what the many requests of the peer wait for.

* *ours*: `open_store`, `Store.restore` by tag, `close`. Every digest is checked.
* *gets*: obstore itself fetches and writes every file of the cache, whose names are known, so many at once, and verifies nothing.
  `aws s3 sync` has ten at once unless it is configured otherwise, so the target is set beside ten. The other numbers show how far
  obstore comes when it is given more, until the two processors are busy: beside the fastest of them there is no target.
* *aws s3 sync*: the program {aws}, where it is installed, one run.
"""

BUCKET_URL = f"s3://{BUCKET}"
STORE_URL = f"{BUCKET_URL}/store?timeout_s=60"
# By which clients find the stand-in, which looks at no signature.
SETTINGS = {
    "AWS_ACCESS_KEY_ID": "bench",
    "AWS_SECRET_ACCESS_KEY": "none-is-needed",
    "AWS_REGION": "us-east-1",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_ALLOW_HTTP": "true",
}


def main() -> int:
    """Measure, print a table, write the samples."""
    options = arguments(__doc__, KERNELS, ROUNDS)
    kernels, rounds = options.kernels, options.rounds
    cache = cache_of(kernels, options.keep)
    files = [
        path.relative_to(cache).as_posix() for path in sorted(cache.rglob("*")) if path.is_file()
    ]
    load = os.getloadavg()[0]
    os.environ |= SETTINGS
    with working_folder(measurement.fast_directory() or options.keep) as work:
        (work / "names").write_text("\n".join(files))
        delays = {
            f"{delay * 1000:g} ms": measure(delay, kernels, rounds, cache, work)
            for delay in DELAYS_S
        }
    result: dict[str, Any] = {
        "kernels": kernels,
        "rounds": rounds,
        "files": len(files),
        "place": "tmpfs" if measurement.fast_directory() else "disk",
        "load_before": round(load, 2),
        "client": importlib.metadata.version("obstore"),
        "aws": aws_version(),
        "delays": delays,
    }
    result["rows"] = rows_of(result)
    return concluded("bench-cloud", result, options)


def measure(delay_s: float, kernels: int, rounds: int, cache: Path, work: Path) -> Samples:
    """Run every job in turn; returns samples by what was done."""
    samples: Samples = {}
    out, bundle, names = work / "out", work / "bundle", work / "names"
    with listening("tools.shared.object_server", str(delay_s), str(cache)) as port:
        # What is started now finds the stand-in by this.
        os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{port}"
        with sides(ours=("obstore", "bundler", STORE_URL), plain=("obstore",)) as serving:
            if not bundle.exists():
                recorded = serving["ours"].do("record", kernels, cache, bundle)
                assert recorded["kernels"] == kernels, recorded
            samples["push"] = [serving["ours"].do("push", STORE_URL, bundle)["push"]]
            turns: list[Turn] = [
                ("ours", f"ours {keep}", "pull", (STORE_URL, out, keep), "pull and restore")
                for keep in ("all", "launch")
            ]
            turns += [
                ("plain", _gets(count), "fetch", (BUCKET_URL, names, out, count), "get")
                for count in AT_ONCE
            ]
            by_aws: Turn = ("plain", _AWS, "aws", (BUCKET_URL, out, "store/*"), "get")
            for number in range(rounds):
                again = [by_aws] if number < AWS_ROUNDS and aws_version() else []
                take_turns([*turns, *again], samples, serving, out)
    return samples


def aws_version() -> str:
    """Return what the program `aws` says that it is, empty where it is not installed."""
    told = said("aws", "--version", env=aws_environment())
    return (told or "").partition(" ")[0]


def rows_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of every delay."""
    rows = []
    for delay, samples in result["delays"].items():
        best = min(AT_ONCE, key=lambda count: median(samples[_gets(count)]))
        for work, ours, peer, least in (
            (
                "everything: how much faster",
                "ours all",
                _gets(AWS_AT_ONCE),
                FASTER_TARGETS.get(delay),
            ),
            ("everything: how much faster than the fastest number", "ours all", _gets(best), None),
            ("the launch set: how much faster", "ours launch", _gets(AWS_AT_ONCE), None),
            ("everything: how much faster than aws", "ours all", _AWS, None),
        ):
            if peer in samples:
                # The program `aws` runs fewer times than the others.
                mine, theirs = samples[ours][: len(samples[peer])], samples[peer]
                name, whole = f"{delay}: restore {work}", {"ours_ms": median(samples[ours]) * 1e3}
                rows.append(ratio_row(name, mine, theirs, peer, faster=True, least=least) | whole)
    return rows


def _gets(count: int) -> str:
    return f"gets, {count} at once"


def section(result: dict[str, Any]) -> str:
    """Return the section of the page."""
    delays = result["delays"]
    names = ["push", "ours all", "ours launch", *map(_gets, AT_ONCE)]
    steps = [
        [name, *(shown(median(samples[name]) * 1e3, "ms") for samples in delays.values())]
        for name in [*names, *([_AWS] if result["aws"] else [])]
    ]
    parts = [
        f"## A start from S3\n\n{SECTION.format(**{**result, 'aws': result['aws'] or '`aws`'})}",
        tables.of_times(result["rows"], "each answer late by: work"),
        table(["step", *delays], steps),
    ]
    return "\n".join(parts)
