# SPDX-License-Identifier: Apache-2.0
"""The pieces of work that are timed, each in a process of its own, forked from one that has done
the imports.

    python -m tools.bench.jobs MODULE|URL ...       reads one JSON line a job, [name, arguments], and answers each with one

A forked process begins with the state of a fresh one, and leaves none behind; the imports, which
would drown everything else, are paid once.  What it shares with its parent it copies before the
work begins.  The words say what is imported, and of which kind of store the client.
"""

from __future__ import annotations

import importlib
import os
import pickle
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.bench import sides
from tools.bench.sides import TAG, Watch
from tools.shared.redis_server import admin_of

if TYPE_CHECKING:
    from bundler.format.bundle import Keep

TAR_LEVEL = 3
LAUNCH_SUFFIXES = (".cubin", ".json")
# So many GETs before their answers are read.
PIPELINED = 512


def serve(*words: str) -> None:
    """Answer jobs until standard input ends."""
    for word in words:
        if "://" not in word:
            importlib.import_module(word)
    if "bundler" in words:
        import bundler

        _ = bundler.Bundle, bundler.open_store, bundler.pack, bundler.restore
        for url in (word for word in words if "://" in word):
            bundler.open_store(url).close()  # nothing is sent before the first call
    sides.answer(JOBS)


def collect(cache: str, file: str) -> dict[str, float]:
    """Make a bundle of a cache directory and save it."""
    import bundler

    watch = Watch()
    bundle = bundler.pack(cache)
    watch.lap("collect")
    bundle.save(file)
    watch.lap("save")
    return {**watch.seconds, "bytes": os.path.getsize(file), "kernels": len(bundle.kernels)}


def restore(file: str, into: str, keep: Keep) -> dict[str, float]:
    """Load a bundle and restore it."""
    import bundler

    watch = Watch()
    bundle = bundler.Bundle.load(file)
    watch.lap("load")
    report = bundler.restore(bundle, into, keep=keep)
    watch.lap("restore")
    return {**watch.seconds, "bytes": report.bytes, "kernels": len(report.restored)}


def push(url: str, file: str) -> dict[str, float]:
    """Push a bundle into an empty store, and once more."""
    import bundler

    with bundler.Bundle.load(file) as bundle, bundler.open_store(url) as store:
        watch = Watch()
        first = store.push(bundle, TAG)
        watch.lap("push")
        store.push(bundle, TAG)
        watch.lap("push again")
    return {**watch.seconds, "bytes": first.bytes_sent}


def pull(url: str, into: str, keep: Keep) -> dict[str, float]:
    """Open a store, restore by tag, close."""
    import bundler

    watch = Watch()
    with bundler.open_store(url) as store:
        report = store.restore(TAG, cache_dir=into, keep=keep)
    watch.lap("pull and restore")
    return {**watch.seconds, "bytes": report.bytes, "kernels": len(report.restored)}


def pull_counted(url: str, into: str, keep: Keep) -> dict[str, float]:
    """Do the same, and count the exchanges with a Redis server."""
    from bundler.backends.redis import server_exchange

    exchanges, run = 0, server_exchange.run

    def counted(*given: Any, **named: Any) -> Any:
        nonlocal exchanges
        exchanges += 1
        return run(*given, **named)

    server_exchange.run = counted
    found = pull(url, into, keep)
    return found | {"round trips": exchanges}


def torch_collect(cache: str, file: str) -> dict[str, float]:
    """Let torch's bundler collect the same kernels and pickle them."""
    os.environ["TRITON_CACHE_DIR"] = cache
    os.environ["TORCHINDUCTOR_BUNDLE_TRITON_INTO_FX_GRAPH_CACHE"] = "1"
    from torch._inductor.triton_bundler import TritonBundler

    keys = sorted(os.listdir(cache))
    watch = Watch()
    TritonBundler.begin_compile()
    for key in keys:
        TritonBundler.put(key, 0)
    bundle, _ = TritonBundler.collect()
    watch.lap("collect")
    data = pickle.dumps(bundle)
    watch.lap("pickle")
    Path(file).write_bytes(data)
    watch.lap("write")
    return {**watch.seconds, "bytes": len(data), "kernels": len(bundle.kernel_artifacts)}


def torch_restore(file: str, into: str) -> dict[str, float]:
    """Let torch's bundler unpickle, and emit everything; it verifies nothing."""
    os.environ["TRITON_CACHE_DIR"] = into
    from torch._inductor.triton_bundler import TritonBundler

    watch = Watch()
    data = Path(file).read_bytes()
    watch.lap("read")
    bundle = pickle.loads(data)  # noqa: S301  # written by the benchmark a moment ago
    watch.lap("unpickle")
    done = TritonBundler.read_and_emit(bundle)
    watch.lap("emit")
    assert done is not None
    return {**watch.seconds, "kernels": len(done.cached_kernel_names)}


def write_loop(cache: str, into: str, keep: Keep) -> dict[str, float]:
    """The limit: write files that are in memory already, and do nothing else."""
    kernels = read_cache(cache, keep)
    os.makedirs(into)
    watch = Watch()
    for key, files in kernels.items():
        os.mkdir(f"{into}/{key}")
        for name, data in files.items():
            fd = os.open(f"{into}/{key}/{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            os.write(fd, data)
            os.close(fd)
    watch.lap("write")
    size = sum(len(data) for files in kernels.values() for data in files.values())
    return {**watch.seconds, "bytes": size, "files": sum(map(len, kernels.values()))}


def read_cache(cache: str, keep: str = "all") -> dict[str, dict[str, bytes]]:
    """Return kernel key -> file name -> bytes."""
    found: dict[str, dict[str, bytes]] = {}
    for key in sorted(os.listdir(cache)):
        folder = Path(cache, key)
        names = sorted(os.listdir(folder))
        found[key] = {
            n: (folder / n).read_bytes()
            for n in names
            if keep == "all" or n.endswith(LAUNCH_SUFFIXES)
        }
    return found


def tar_zstd(cache: str, file: str) -> dict[str, float]:
    """Pack a cache directory as a user would without us."""
    watch = Watch()
    if tar_program():
        pack = ["tar", "-cf", "-", "-C", cache, "."]
        with subprocess.Popen(pack, stdout=subprocess.PIPE) as tar:
            subprocess.run(["zstd", f"-{TAR_LEVEL}", "-qfo", file], stdin=tar.stdout, check=True)
    else:
        import zstandard

        with (
            open(file, "wb") as out,
            zstandard.ZstdCompressor(TAR_LEVEL).stream_writer(out) as packed,
            tarfile.open(fileobj=packed, mode="w|", bufsize=1 << 20) as archive,
        ):
            archive.add(cache, ".")
    watch.lap("tar")
    return {**watch.seconds, "bytes": os.path.getsize(file)}


def tar_program() -> bool:
    """Whether the programs are there; else Python's tarfile and zstandard do it."""
    return shutil.which("tar") is not None and shutil.which("zstd") is not None


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


def stored(url: str, file: str) -> dict[str, float]:
    """Push a bundle into an empty store; returns the stored bytes of its units, by how they can be
    compressed.
    """
    import bundler

    with bundler.Bundle.load(file) as bundle:
        with bundler.open_store(url) as store:
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
    kernels = read_cache(cache)
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
    wanted = [(key, _metadata(files), len(files) - 1) for key, files in read_cache(cache).items()]
    watch = Watch()
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


def gets(address: str, names: str) -> dict[str, float]:
    """The limit: fetch values whose names are known, pipelined, and do nothing with them."""
    keys, size = Path(names).read_text().split(), 0
    watch = Watch()
    with admin_of(address) as client:
        for start in range(0, len(keys), PIPELINED):
            with client.pipeline(transaction=False) as pipeline:
                for key in keys[start : start + PIPELINED]:
                    pipeline.get(key)
                size += sum(map(len, pipeline.execute()))
    watch.lap("get")
    return {**watch.seconds, "bytes": size}


def fetch(url: str, names: str, into: str, at_once: str) -> dict[str, float]:
    """Fetch and write files whose names are known from a bucket, so many at once; nothing is
    verified, and nothing is listed before.
    """
    import obstore
    from obstore.store import from_url

    wanted = Path(names).read_text().split("\n")
    watch = Watch()
    store = from_url(url, client_options={"allow_http": True})
    for folder in {name.rpartition("/")[0] for name in wanted}:
        os.makedirs(f"{into}/{folder}", exist_ok=True)

    def get(name: str) -> int:
        data = obstore.get(store, name).bytes()
        with open(f"{into}/{name}", "wb") as file:
            return file.write(data)

    # Threads: obstore's coroutines were a little slower at each number.
    with ThreadPoolExecutor(int(at_once)) as pool:
        written = list(pool.map(get, wanted))
    watch.lap("get")
    return {**watch.seconds, "files": len(written), "bytes": sum(written)}


def aws(url: str, into: str, without: str) -> dict[str, float]:
    """Let the program `aws` fetch the files of a bucket into an empty directory, without some."""
    line = ["aws", "s3", "sync", "--only-show-errors", url, into, "--exclude", without]
    watch = Watch()
    subprocess.run(line, check=True, env=aws_environment(), stdout=subprocess.DEVNULL)
    watch.lap("get")
    return watch.seconds


def aws_environment() -> dict[str, str]:
    """Return the environment of the program `aws`, which has Python packages of its own."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


_OURS = (collect, restore, push, pull, pull_counted, record, stored)
_THEIRS = (
    torch_collect,
    torch_restore,
    write_loop,
    tar_zstd,
    triton_put,
    triton_get,
    gets,
    fetch,
    aws,
)
JOBS: dict[str, Callable[..., dict[str, float]]] = {job.__name__: job for job in (*_OURS, *_THEIRS)}

if __name__ == "__main__":
    serve(*sys.argv[1:])
