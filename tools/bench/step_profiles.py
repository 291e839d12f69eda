# SPDX-License-Identifier: Apache-2.0
"""Step by step, what a restore, a collect, a push again and a start from a server take.

These are jobs of `jobs.py`; `page.py` and `remote.py` show them.  Each step is done alone, so the sum
is about what the whole takes where nothing overlaps.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tools.bench.sides import TAG, Watch, read_cache

if TYPE_CHECKING:
    from bundler.format.bundle import Bundle, Keep
    from bundler.store.dictionaries import Dictionaries
    from bundler.store.store_failures import NamedStore
    from bundler.store.store_layout import Hint, Unit

# As a restore writes them together, more or less.
STEP_KERNELS = 64
#: Of a restore by tag from a server, in their order.
START = (
    "open: read the URL, make the store",
    "tag: connect, log in, ask for it",
    "manifest: fetch, decompress, compare its digests",
    "decode: check every kernel of the manifest",
    "names: list the units, each by the digest of what is in it",
    "choose: look for Triton, ask ptxas, which files of which kernels",
    "fetch: send the commands, read the answers, compare the digest of each unit",
    "dictionaries: fetch, decompress, compare",
    "units: decompress them",
    "check: metadata and its paths, group files, batches for the writers",
    "marks: mark everything as in use",
    "writers: sha256 of the files, temporary directory, write, rename",
)


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


def push_steps(url: str, file: str) -> dict[str, float]:
    """What each step of a push takes when a store in a directory has everything already."""
    import bundler
    from bundler.format.limits import DEFAULT_LIMITS
    from bundler.store import store_layout
    from bundler.store.stored_manifests import read_manifest

    with (
        bundler.Bundle.load(file) as bundle,
        bundler.open_store(url) as store,
        _backend(url) as backend,
    ):
        store.push(bundle, TAG)
        manifest = store_layout.manifest_key(bundle.digest, bundle.observed.encode())
        steps = Watch()
        read_manifest(backend, manifest, DEFAULT_LIMITS)
        steps.lap("manifest: read it and compare its digests")
        units = list(store_layout.units_of(bundle.content))
        steps.lap("names: list the units of the bundle")
        backend.touch([unit.key for unit in units])
        steps.lap("marks: touch every unit")
        values = backend.get_within(store_layout.bounds_of_units(units))
        steps.lap("read: open, look at, read and close every unit")
        for key, value in values.items():
            store_layout.checked_frame(value, key)
        steps.lap("hash: sha256 of every unit")
    return steps.seconds


def start_steps(url: str, into: str, keep: Keep) -> dict[str, float]:
    """What each step takes of a restore by tag from a server, of everything or of the
    launch set.
    """
    from bundler.format.bundle import Bundle
    from bundler.format.limits import DEFAULT_LIMITS
    from bundler.format.manifest import Content, Observed

    # not a step
    from bundler.lifecycle import cache_directory, kernel_writer, restore_plan  # noqa: F401
    from bundler.store import store_layout
    from bundler.store.blob_source import BundleUnits, StoreBlobs
    from bundler.store.stored_manifests import References, read_manifest

    steps = Watch()
    with _backend(url) as backend:
        steps.lap(START[0])
        named = References(backend).find(TAG)
        manifest, hints = named.manifest, named.hints
        steps.lap(START[1])
        content_bytes, observed = read_manifest(backend, manifest, DEFAULT_LIMITS)
        steps.lap(START[2])
        content = Content.decode(content_bytes)
        seen = Observed.decode(observed)
        steps.lap(START[3])
        units = BundleUnits(content)
        read = units.launch if keep == "launch" else units.all()
        blobs = StoreBlobs(backend, units, DEFAULT_LIMITS, hints=hints)
        steps.lap(START[4])
        bundle = Bundle(content, seen, blobs, content_bytes=content_bytes)
        _place_steps(steps, backend, bundle, read, hints, into, keep)
        steps.lap("")
        dictionaries = [store_layout.dictionary_key(digest) for _, digest in hints]
        backend.touch([manifest, *dictionaries, *[unit.key for unit in units.all()]])
        steps.lap(START[10])
    return steps.seconds


def _place_steps(
    steps: Watch,
    backend: NamedStore,
    bundle: Bundle,
    units: Sequence[Unit],
    hints: Sequence[Hint],
    into: str,
    keep: Keep,
) -> None:
    from bundler.lifecycle.cache_directory import CacheDirectory
    from bundler.lifecycle.kernel_placement import localized, planned
    from bundler.lifecycle.kernel_writer import write_kernels
    from bundler.lifecycle.lifecycle_reports import RestoreOptions
    from bundler.lifecycle.restore_plan import RestorePlan
    from bundler.store import store_layout
    from bundler.store.blob_source import unit_batches
    from bundler.store.dictionaries import Dictionaries

    steps.lap("")
    plan, place = RestorePlan(bundle, RestoreOptions(into, keep)), CacheDirectory(into)
    wanted = [planned(kernel, keep) for kernel in plan.wanted_kernels()]
    steps.lap(START[5])
    needed = {unit.key: unit for unit in units}
    values: dict[str, bytes] = {}
    for batch in unit_batches(needed.values()):
        values |= backend.get_within(store_layout.bounds_of_units(batch))
    steps.lap(START[6])
    dictionaries = Dictionaries(backend)
    families = {unit.family for unit in needed.values()}
    dictionaries.fetch([digest for family, digest in hints if family in families])
    steps.lap(START[7])
    found = _decoded(needed, values, dictionaries)
    steps.lap(START[8])
    for one in wanted:
        one.contents = tuple([found[digest] for digest in one.digests])
    new = place.new_kernels([localized(one, place.path, plan.triton_dir) for one in wanted])
    steps.lap(START[9])
    assert not any(write_kernels(place.path, new, 1))
    steps.lap(START[11])


def _decoded(
    needed: Mapping[str, Unit], values: Mapping[str, bytes], known: Dictionaries
) -> dict[bytes, memoryview]:
    from bundler.store.blob_source import FetchedUnits
    from bundler.store.store_layout import blobs_of

    fetched, found = FetchedUnits(known, verified=True), {}
    fetched.add(needed.values(), values)
    for key, unit in needed.items():
        _, payload = fetched.take(key) or (b"", None)
        assert payload is not None
        found.update(blobs_of(payload, unit))
    return found


def _backend(url: str) -> NamedStore:
    from bundler.store.store_failures import NamedStore
    from bundler.store.store_urls import Opening, open_backend

    return NamedStore(open_backend((url,), Opening())[0], "bench")
