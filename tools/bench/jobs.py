# SPDX-License-Identifier: Apache-2.0
"""The pieces of work that are timed, each in a process of its own, forked from one that has done
the imports.

    python -m tools.bench.jobs SIDE         reads one JSON line a job, [name, arguments], and answers each with one

A forked process begins with the state of a fresh one, and leaves none behind; the imports, which
would drown everything else, are paid once.  What it shares with its parent it copies before the
work begins.  `SIDE` is what gets imported: ours, torch or plain.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tools.bench import sides
from tools.bench.bare_steps import bare_steps
from tools.bench.sides import Watch
from tools.bench.step_profiles import push_steps

if TYPE_CHECKING:
    from bundler import Bundle, Store
    from bundler.format.bundle import Keep

TAR_LEVEL = 3
# As a restore writes them together, more or less.
STEP_KERNELS = 64
LAUNCH_SUFFIXES = (".cubin", ".json")


def serve(side: str) -> None:
    """Answer jobs until standard input ends."""
    if side == "ours":
        import bundler

        _ = bundler.Bundle, bundler.open_store, bundler.pack, bundler.restore
    elif side == "torch":
        import torch._inductor.triton_bundler  # noqa: F401
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


def push(file: str, into: str) -> dict[str, float]:
    """Push a bundle into an empty store in a directory, and once more."""
    import bundler

    with bundler.Bundle.load(file) as bundle, bundler.open_store(f"file://{into}") as store:
        return pushed_twice(store, bundle, "bench")


def pushed_twice(store: Store, bundle: Bundle, tag: str) -> dict[str, float]:
    """Push a bundle into an empty store, and once more."""
    watch = Watch()
    first = store.push(bundle, tag)
    watch.lap("push")
    store.push(bundle, tag)
    watch.lap("push again")
    return {**watch.seconds, "bytes": first.bytes_sent}


def pull(store: str, into: str, keep: Keep) -> dict[str, float]:
    """Pull a bundle out of a store in a directory and restore it."""
    import bundler

    watch = Watch()
    with bundler.open_store(f"file://{store}") as opened:
        report = opened.restore("bench", cache_dir=into, keep=keep)
    watch.lap("pull and restore")
    return {**watch.seconds, "bytes": report.bytes, "kernels": len(report.restored)}


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


def restore_steps(file: str, into: str, keep: Keep) -> dict[str, float]:
    """What each step of a restore costs a processor on its own, in one thread."""
    from bundler.format.bundle import Bundle
    from bundler.lifecycle.cache_directory import CacheDirectory
    from bundler.lifecycle.kernel_placement import localized, planned, read
    from bundler.lifecycle.kernel_writer import write_kernels
    from bundler.lifecycle.lifecycle_reports import RestoreOptions
    from bundler.lifecycle.restore_plan import RestorePlan
    from bundler.toolchain import targets

    hashing = "writers: sha256 of the files"
    writing = (
        "writers: check metadata, temporary directory, files with paths in them, group file, rename"
    )
    watch = Watch(time.thread_time)
    bundle = Bundle.load(file)
    watch.lap("load: parse and check the manifest")
    targets.visible_targets()
    watch.lap("meanwhile: ask the driver which GPUs are here")
    plan = RestorePlan(bundle, RestoreOptions(into, keep))
    kernels = plan.wanted_kernels()
    place = CacheDirectory(into)
    watch.lap("reader: which kernels are of use here")
    for start in range(0, len(kernels), STEP_KERNELS):
        wanted = [planned(kernel, keep) for kernel in kernels[start : start + STEP_KERNELS]]
        watch.lap("reader: name, digest, size and paths of each file")
        read(bundle.blobs, wanted)
        watch.lap("reader: read and decompress the frames, find each file")
        ready = [localized(one, place.path, plan.triton_dir) for one in wanted]
        watch.lap("reader: find where paths go")
        new = place.new_kernels(ready)
        watch.lap("reader: group file, names, batch")
        for one in ready:
            compared = zip(one.contents, one.digests, strict=True)
            assert all(hashlib.sha256(data).digest() == digest for data, digest in compared)
        watch.lap(hashing)
        assert not any(write_kernels(place.path, new, 0))
        watch.lap(writing)
    watch.seconds[writing] -= watch.seconds[hashing]  # a writer does both
    return watch.seconds


def collect_steps(cache: str) -> dict[str, float]:
    """What each step of collecting and saving costs on its own, in one thread; compression in
    several.
    """
    from msgspec.structs import replace

    from bundler import pack
    from bundler.format.manifest import Observation
    from bundler.lifecycle.bundle_builder import Builder
    from bundler.lifecycle.kernel_directory import Rejected, read_kernel

    watch = Watch()
    kernels = read_cache(cache)
    watch.lap("read: open, read and close every file")
    digests = {
        key: {name: hashlib.sha256(data).digest() for name, data in files.items()}
        for key, files in kernels.items()
    }
    watch.lap("hash: sha256 of every file")
    found = [read_kernel(os.path.join(cache, key)) for key in kernels]
    checking, reading = (
        "check: complete, unchanged meanwhile, from one compile",
        next(iter(watch.seconds)),
    )
    watch.lap(checking)
    watch.seconds[checking] -= watch.seconds[reading]  # it reads again
    builder, seen = Builder(cache), Observation(layouts=("triton",))
    watch.lap("")
    for one in found:
        assert not isinstance(one, Rejected)
        builder.add_found(one.key, replace(one, digests=digests[one.key]), seen)
    watch.lap("entries: paths out of metadata, what a launch needs, files by their digests")
    bundle = pack(cache)
    watch.lap("")
    bundle.to_bytes()
    watch.lap("compress: frames in threads, manifest")
    return watch.seconds


_PLAIN = (collect, restore, push, pull, torch_collect, torch_restore, write_loop, tar_zstd)
_STEPS = (restore_steps, bare_steps, collect_steps, push_steps)
JOBS: dict[str, Callable[..., dict[str, float]]] = {job.__name__: job for job in (*_PLAIN, *_STEPS)}

if __name__ == "__main__":
    serve(sys.argv[1])
