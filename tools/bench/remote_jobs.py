# SPDX-License-Identifier: Apache-2.0
"""The pieces of work of the remote benchmark, each in a process of its own, forked from one that
has done the imports.

python -m tools.bench.remote_jobs SIDE         reads one JSON line a job, [name, arguments], and answers each with one
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.bench import jobs, sides
from tools.bench.bare_steps import bare_start, pipelined
from tools.bench.step_profiles import start_steps

TAG = "bench/remote"
PATIENCE_S = 20.0


def serve(side: str) -> None:
    """Answer jobs until standard input ends."""
    import redis  # noqa: F401  # all of them speak to a server

    if side == "ours":
        import bundler

        _ = bundler.Bundle, bundler.restore
        bundler.open_store("redis://127.0.0.1").close()  # nothing is sent before the first call
    elif side == "triton":
        import triton  # noqa: F401
    sides.answer(JOBS)


def record(count: str, cache: str, file: str) -> dict[str, float]:
    """Record the kernels of a cache directory as hits, so that they have launch facts and key parts
    as real ones do.
    """
    os.environ["TRITON_CACHE_DIR"] = cache
    import bundler
    from tools.shared.kernel_variants import compile_part

    with bundler.recording() as recording:
        compile_part(int(count), 0, 1)
    with recording.collect() as bundle:
        bundle.save(file)
        return {"kernels": len(bundle.kernels), "hits": recording.report.hits}


def push(url: str, file: str) -> dict[str, float]:
    """Push a bundle into an empty store, and once more."""
    import bundler

    with (
        bundler.Bundle.load(file) as bundle,
        bundler.open_store(url, timeout_s=PATIENCE_S) as store,
    ):
        return jobs.pushed_twice(store, bundle, TAG)


def restore(url: str, into: str, keep: Any) -> dict[str, float]:
    """Open the store, restore by tag, close."""
    import bundler
    from bundler.backends.redis import server_exchange

    exchanges, run = 0, server_exchange.run

    def counted(*given: Any, **named: Any) -> Any:
        nonlocal exchanges
        exchanges += 1
        return run(*given, **named)

    server_exchange.run = counted
    watch = sides.Watch()
    with bundler.open_store(url, timeout_s=PATIENCE_S) as store:
        report = store.restore(TAG, cache_dir=into, keep=keep)
    watch.lap("restore")
    return {
        **watch.seconds,
        "kernels": len(report.restored),
        "files": report.files,
        "round trips": exchanges,
    }


def stored(url: str, file: str) -> dict[str, float]:
    """Push a bundle into an empty store; returns the stored bytes of its units, by how they can be
    compressed.
    """
    import bundler

    with bundler.Bundle.load(file) as bundle:
        with bundler.open_store(url, timeout_s=PATIENCE_S) as store:
            store.push(bundle, TAG)
            shared = store.stats()
        with bundler.open_store("memory:") as store:
            store.push(bundle, TAG)
            alone = store.stats()
    return {
        "alone": alone.unit_bytes,
        "shared": shared.unit_bytes + shared.dictionary_bytes,
        "dictionaries": shared.dictionary_bytes,
        "manifest": shared.manifest_bytes,
        "file": os.path.getsize(file),
    }


def triton_put(port: str, cache: str, into: str) -> dict[str, float]:
    """Let Triton's manager put the kernels of a cache directory on a server, as a compile does."""
    manager = _triton(port, into)
    kernels = jobs.read_cache(cache)
    for key, files in kernels.items():
        one = manager(key)
        paths = {
            name: one.put(data, name)
            for name, data in files.items()
            if not name.startswith("__grp__")
        }
        one.put_group(_metadata(files), paths)
    return {"kernels": len(kernels)}


def triton_get(port: str, cache: str, into: str) -> dict[str, float]:
    """Let Triton's manager find every kernel on the server, as a hit does."""
    manager = _triton(port, into)
    wanted = [
        (key, _metadata(files), len(files) - 1) for key, files in jobs.read_cache(cache).items()
    ]
    watch = sides.Watch()
    for key, name, count in wanted:
        group = manager(key).get_group(name)
        assert group is not None
        assert len(group) == count
    watch.lap("get")
    return {**watch.seconds, "kernels": len(wanted)}


def _triton(port: str, into: str) -> Any:
    os.environ |= {
        "TRITON_CACHE_DIR": into,
        "TRITON_REDIS_HOST": "127.0.0.1",
        "TRITON_REDIS_PORT": port,
        "TRITON_REMOTE_CACHE_BACKEND": "triton.runtime.cache:RedisRemoteCacheBackend",
    }
    from triton import knobs
    from triton.runtime.cache import RemoteCacheManager

    # In some releases its backend looks for a setting in a place where it is not.
    if not hasattr(knobs.cache_knobs, "redis"):
        knobs.cache_knobs.redis = knobs.redis
    return RemoteCacheManager


def _metadata(files: dict[str, bytes]) -> str:
    return next(name for name in files if name.endswith(".json") and not name.startswith("__grp__"))


def gets(port: str, password: str, names: str) -> dict[str, float]:
    """The limit: fetch values whose names are known, pipelined, and do nothing with them."""
    keys = Path(names).read_text().split()
    watch = sides.Watch()
    size = sum(map(len, pipelined(port, password, keys)))
    watch.lap("get")
    return {**watch.seconds, "bytes": size}


_OURS = (record, push, restore, stored, start_steps, bare_start)
JOBS: dict[str, Callable[..., dict[str, float]]] = {
    job.__name__: job for job in (*_OURS, triton_put, triton_get, gets, jobs.write_loop)
}

if __name__ == "__main__":
    serve(sys.argv[1])
