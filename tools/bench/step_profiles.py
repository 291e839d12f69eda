# SPDX-License-Identifier: Apache-2.0
"""Call by call, what is left of a push again, of a start from a server, and of the first restore of
a new process.

`jobs.py` and `remote_jobs.py` run the first two as jobs, `bundle.py` calls the third; `page.py` and
`remote_rows.py` show them. Each step is done alone, so the sum is about what the whole takes where
nothing overlaps.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.bench.fresh import child_environment
from tools.bench.sides import Watch
from tools.shared.measurement import medians

if TYPE_CHECKING:
    from bundler.format.bundle import Bundle, Keep
    from bundler.store.dictionaries import Dictionaries
    from bundler.store.store_failures import NamedStore
    from bundler.store.store_layout import Hint, Unit

# It imports nothing that a restore would have to import itself, and prints what `json` reads.
_CODE = """
import sys, time
laps, since = [], time.perf_counter()
def lap():
    global since
    laps.append(time.perf_counter() - since)
    since = time.perf_counter()
import msgspec
lap()
import bundler
bundler.Bundle, bundler.restore
lap()
with bundler.Bundle.load(sys.argv[1]) as bundle:
    lap()
    bundler.restore(bundle, sys.argv[2], "launch")
    lap()
print(laps)
"""
_FRESH = (
    "msgspec: import it, and what it needs of the standard library",
    "modules: import ours, and what else they need",
    "load: open the bundle, check the manifest",
    "restore: decode, check, write",
)

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


def push_steps(file: str, into: str) -> dict[str, float]:
    """What each step of a push takes when a store in a directory has everything already."""
    import bundler
    from bundler.format.limits import DEFAULT_LIMITS
    from bundler.store import store_layout
    from bundler.store.stored_manifests import read_manifest

    url = f"file://{into}"
    with (
        bundler.Bundle.load(file) as bundle,
        bundler.open_store(url) as store,
        _backend(url) as backend,
    ):
        store.push(bundle, tag="bench")
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


def start_steps(url: str, into: str, tag: str, patience_s: str, keep: Keep) -> dict[str, float]:
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
    with _backend(url, float(patience_s)) as backend:
        steps.lap(START[0])
        named = References(backend).find(tag)
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
    from bundler.lifecycle.restore_plan import RestoreOptions, RestorePlan
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


def _backend(url: str, timeout_s: float | None = None) -> NamedStore:
    from bundler.store.store_failures import NamedStore
    from bundler.store.store_urls import Opening, open_backend

    server = () if timeout_s is None else (("timeout_s", timeout_s),)
    return NamedStore(open_backend((url,), Opening(server=server))[0], "bench")


def fresh_steps(bundle: Path, into: Path, rounds: int) -> dict[str, float]:
    """What each step takes of the first restore of a new process, medians."""
    found: list[dict[str, float]] = []
    with child_environment() as environment:
        for number in range(rounds + 1):
            shutil.rmtree(into, ignore_errors=True)
            started = time.perf_counter()
            subprocess.run([sys.executable, "-c", "pass"], env=environment, check=True)
            bare, started = time.perf_counter() - started, time.perf_counter()
            command = [sys.executable, "-c", _CODE, str(bundle), str(into)]
            done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
            whole = time.perf_counter() - started - bare
            laps: list[Any] = json.loads(done.stdout)
            if number:  # the first round fills the bytecode cache
                steps = dict(zip(_FRESH, laps, strict=True))
                found.append(steps | {"end: take the interpreter down": whole - sum(laps)})
    shutil.rmtree(into, ignore_errors=True)
    return medians(found)
