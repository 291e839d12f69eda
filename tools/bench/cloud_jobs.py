# SPDX-License-Identifier: Apache-2.0
"""The pieces of work of the benchmark of object stores, each in a process of its own, forked from
one that has done the imports.

python -m tools.bench.cloud_jobs SIDE         reads one JSON line a job, [name, arguments], and answers each with one
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tools.bench import sides
from tools.bench.remote_jobs import record
from tools.shared.object_server import BUCKET

TAG, STORE = "bench/cloud", "store"
PATIENCE_S = 60
# `aws s3 sync` fetches ten files at once unless it is configured otherwise; more are faster until
# the processors are busy.
AWS_AT_ONCE = 10
AT_ONCE = (AWS_AT_ONCE, 32, 128, 256)


def serve(side: str) -> None:
    """Answer jobs until standard input ends."""
    import obstore  # noqa: F401  # both speak by it

    if side == "ours":
        import bundler

        _ = bundler.Bundle, bundler.restore
        # Nothing is sent before the first call.
        os.environ |= cloud_environment("http://127.0.0.1:1")
        bundler.open_store(f"s3://{BUCKET}/{STORE}").close()
    sides.answer(JOBS)


def cloud_environment(endpoint: str) -> dict[str, str]:
    """Return the settings by which clients find the stand-in, which looks at no signature."""
    return {
        "AWS_ACCESS_KEY_ID": "bench",
        "AWS_SECRET_ACCESS_KEY": "none-is-needed",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ENDPOINT_URL": endpoint,
    }


def aws_environment(endpoint: str) -> dict[str, str]:
    """Return the environment of the program `aws`, which has Python packages of its own."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return inherited | cloud_environment(endpoint)


def push(endpoint: str, file: str) -> dict[str, float]:
    """Push a bundle into an empty store."""
    os.environ |= cloud_environment(endpoint)
    import bundler

    with bundler.Bundle.load(file) as bundle, bundler.open_store(_store()) as store:
        started = time.perf_counter()
        store.push(bundle, TAG)
        return {"push": time.perf_counter() - started}


def restore(endpoint: str, into: str, keep: Any) -> dict[str, float]:
    """Open the store, restore by tag, close."""
    os.environ |= cloud_environment(endpoint)
    import bundler

    started = time.perf_counter()
    with bundler.open_store(_store()) as store:
        report = store.restore(TAG, cache_dir=into, keep=keep)
    return {"seconds": time.perf_counter() - started, "count": len(report.restored)}


def _store() -> str:
    return f"s3://{BUCKET}/{STORE}?timeout_s={PATIENCE_S}"


def gets(endpoint: str, names: str, into: str, at_once: str) -> dict[str, float]:
    """Fetch and write files whose names are known, so many at once; nothing is verified, and
    nothing is listed before.
    """
    os.environ |= cloud_environment(endpoint)
    import obstore
    from obstore.store import from_url

    wanted = Path(names).read_text().split("\n")
    started = time.perf_counter()
    store = from_url(f"s3://{BUCKET}", client_options={"allow_http": True})
    for folder in {name.rpartition("/")[0] for name in wanted}:
        os.makedirs(f"{into}/{folder}", exist_ok=True)

    def fetch(name: str) -> int:
        data = obstore.get(store, name).bytes()
        with open(f"{into}/{name}", "wb") as file:
            return file.write(data)

    # Threads: obstore's coroutines were a little slower at each number.
    with ThreadPoolExecutor(int(at_once)) as pool:
        written = list(pool.map(fetch, wanted))
    return {"seconds": time.perf_counter() - started, "count": len(written), "bytes": sum(written)}


def aws(endpoint: str, into: str) -> dict[str, float]:
    """Let the program `aws` fetch the files into an empty directory."""
    environment = aws_environment(endpoint)
    line = ["aws", "s3", "sync", "--only-show-errors", f"s3://{BUCKET}/", into]
    line += ["--exclude", f"{STORE}/*"]
    started = time.perf_counter()
    subprocess.run(line, check=True, env=environment, stdout=subprocess.DEVNULL)
    return {"seconds": time.perf_counter() - started}


JOBS: dict[str, Callable[..., dict[str, float]]] = {
    job.__name__: job for job in (record, push, restore, gets, aws)
}

if __name__ == "__main__":
    serve(sys.argv[1])
