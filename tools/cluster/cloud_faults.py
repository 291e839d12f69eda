# SPDX-License-Identifier: Apache-2.0
"""Says what commands and the plug-in do when an object store fails, and how long it takes them.

    python -m tools.cluster cloud-faults [--settings QUERY] [--only WORDS] [--results DIR] [--page FILE]
    python -m tools.cluster cloud-faults --check [--results DIR] [--page FILE]      exit 1 when the page has another table

For each case of `tools.cluster.fault_cases` a server on this host fails in that way.  A restore by
tag is made there, as commands make it, and then a process compiles one kernel with Triton through
our cache manager: what it lost is the time that its thread was in calls of the store, and that of
its end.  The figures go to docs/results/, and their table into docs/stores.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from tools.cluster.fault_cases import CASES, CREDENTIALS, STORE_URL, Case, failing
from tools.cluster.fault_plugin import KERNEL, TARGET
from tools.shared import example_kernels, measurement, programs
from tools.shared.object_server import ObjectServer
from tools.shared.processes import ROOT, answer, python_path

PAGE = ROOT / "docs" / "stores.md"
RESULT = "cloud-faults"
BEGIN, END = "<!-- begin: cloud-faults -->\n", "<!-- end: cloud-faults -->\n"
COLUMNS = ["what the server does", "a restore by tag", "after"]
COLUMNS += ["the plug-in compiles, and loses", "warnings"]
TAG = "t"
MANAGER = "bundler.integrations.triton:BundlerCacheManager"
LISTED = 100_000
PEAK = """
import json, sys, time
from bundler.backends.cloud import CloudBackend, connect, parse_url
url = sys.argv[1]
backend = CloudBackend(connect(parse_url(url), url))
backend.put({"a": b"1", "b": b"2"})
def peak():
    # Not `getrusage`, whose peak begins with that of the process that forked this one.
    return int(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0])
before, started = peak(), time.perf_counter()
backend.delete(["a"])
print(json.dumps([time.perf_counter() - started, peak() - before]))
"""


def main() -> int:
    """Measure and write, or check the page."""
    options = programs.arguments(
        __doc__,
        check=(False, "measure nothing; exit 1 when the page is stale"),
        settings=("", "what follows the URL: timeout_s=1"),
        only=("", "the cases with these words in their name"),
        results=(measurement.RESULTS, "where the figures go"),
        page=(PAGE, "the page with the table"),
    )
    file = options.results / f"{RESULT}.json"
    if options.check:
        return write_table(options.page, json.loads(file.read_text()), check=True)
    url = f"{STORE_URL}?{options.settings}" if options.settings else STORE_URL
    rows = measure(url, options.only)
    result = {"settings": options.settings, "rows": rows, "listing": listing(url)}
    print(f"written to {measurement.save(RESULT, result, options.results)}")
    write_table(options.page, result, check=False)
    wrong = [row["case"] for row in rows if not row["ok"]]
    print("\n".join(f"wrong: {name}" for name in wrong))
    return 1 if wrong else 0


def measure(url: str, only: str = "") -> list[dict[str, Any]]:
    """Return a row for each case; prints them as they come."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        objects = stored(work)
        for case in CASES:
            if only in case.name:
                row = {"case": case.name, **command(case, objects, work, url)}
                found = plug_in(case, objects, work, url)
                row |= {"lost_s": found["waited_s"] + found["end_s"], "warnings": found["warnings"]}
                row["ok"] = row["ok"] and found["whole"] and len(found["warnings"]) <= 1
                rows.append(row)
                print(
                    f"{case.name:<50} {row['error'] or 'restored':<17} {row['seconds']:6.2f} s;"
                    f" plug-in lost {row['lost_s']:5.2f} s, {len(row['warnings'])} warnings",
                    flush=True,
                )
    return rows


def stored(work: Path) -> dict[str, bytes]:
    """Push a bundle with one kernel under the tag; returns what lies in the bucket then."""
    import bundler

    os.environ |= {**CREDENTIALS, "TRITON_CACHE_DIR": str(work / "recorded")}
    with bundler.recording() as recording:
        example_kernels.load().compile_one(KERNEL, TARGET)
    with ObjectServer().serving() as server, recording.collect() as bundle:
        os.environ["AWS_ENDPOINT_URL"] = server.endpoint
        with bundler.open_store(STORE_URL) as store:
            store.push(bundle, TAG)
        return dict(server.objects)


def command(case: Case, objects: dict[str, bytes], work: Path, url: str) -> dict[str, Any]:
    """Restore by tag as commands do; returns the error, what it says, and the seconds."""
    import bundler

    with failing(case, objects, work) as endpoint, tempfile.TemporaryDirectory(dir=work) as cache:
        os.environ["AWS_ENDPOINT_URL"] = endpoint
        error, said, kernels = "", "", 0
        started = time.perf_counter()
        try:
            with warnings.catch_warnings(), bundler.open_store(url) as store:
                warnings.simplefilter("ignore", bundler.BundlerWarning)
                kernels = len(store.restore(TAG, cache_dir=cache, only="all").restored)
        except bundler.BundlerError as raised:
            error, said = type(raised).__name__, str(raised)
        seconds = time.perf_counter() - started
    names = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
    secret = any(CREDENTIALS[name] in said for name in names)
    right = error == case.says and (kernels > 0) == (not case.says) and not secret
    told = {"error": error, "said": said.replace(endpoint, "ENDPOINT")}
    return {**told, "seconds": seconds, "ok": right}


def plug_in(case: Case, objects: dict[str, bytes], work: Path, url: str) -> dict[str, Any]:
    """Compile a kernel in a process whose store fails; returns its seconds and its warnings."""
    with failing(case, objects, work) as endpoint, tempfile.TemporaryDirectory(dir=work) as cache:
        environment = {
            **CREDENTIALS,
            "AWS_ENDPOINT_URL": endpoint,
            "TRITON_CACHE_MANAGER": MANAGER,
            "TRITON_CACHE_DIR": cache,
            "TRITON_BUNDLER_STORE": url,
        }
        found: dict[str, Any] = answer("tools.cluster.fault_plugin", environment=environment)
    found["warnings"] = [text.replace(endpoint, "ENDPOINT") for text in found["warnings"]]
    return found


def listing(url: str) -> dict[str, float]:
    """Delete an object where a hundred thousand files lie; returns seconds and how much memory that
    took.
    """
    server = ObjectServer()
    server.objects = {f"store/packs/{number:016x}": b"x" for number in range(LISTED)}
    with server.serving():
        found = {"AWS_ENDPOINT_URL": server.endpoint, "PYTHONPATH": python_path()}
        line = [sys.executable, "-c", PEAK, url]
        environment = {**os.environ, **CREDENTIALS, **found}
        said = subprocess.check_output(line, env=environment, text=True, cwd=ROOT)
    seconds, kib = json.loads(said)
    return {"files": LISTED, "seconds": seconds, "peak_mb": kib / 1024}


def table(result: dict[str, Any]) -> str:
    """Return the table, and what a listing took."""
    rows = [
        [
            row["case"],
            f"`{row['error']}`" if row["error"] else "restored",
            f"{row['seconds']:.2f} s",
            f"{row['lost_s']:.1f} s",
            len(row["warnings"]),
        ]
        for row in result["rows"]
    ]
    found = result["listing"]
    return (
        f"{measurement.table(COLUMNS, rows)}\nA prune beside {found['files']:,} files of others took"
        f" {found['seconds']:.1f} s and {found['peak_mb']:.0f} MB; a listing that does not end is"
        " given up after 200,000 files or a minute."
    )


def with_table(page: str, result: dict[str, Any]) -> str:
    """Return the page with the table between its marks."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + table(result) + "\n" + END + rest.partition(END)[2]


def write_table(path: Path, result: dict[str, Any], *, check: bool) -> int:
    """Put the table into the page, or only compare; returns the exit status."""
    text = with_table(path.read_text(), result)
    return measurement.write_page(path, text, "tools.cluster cloud-faults", check=check)
