# SPDX-License-Identifier: Apache-2.0
"""Call by call, what is left of a push again, of a start from a server, and of the first restore of a new process.

`jobs.py` and `remote_jobs.py` run the first two as jobs, `bundle.py` calls the third; `page.py` and `remote_rows.py` show them.
Each step is done alone, so the sum is about what the whole takes where nothing overlaps.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.bench.fresh import child_environment
from tools.shared import measurement
from tools.shared.measurement import shown

if TYPE_CHECKING:
    from bundler.backends.port import Backend

_CODE = """
import json, sys, time
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
print(json.dumps(laps))
"""
_FRESH = (
    "msgspec: import it, and what it needs of the standard library",
    "modules: import ours, and what else they need",
    "load: open the bundle, check the manifest",
    "restore: decode, check, write",
)


class Steps:
    """Times one step after the other."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.restart()

    def restart(self) -> None:
        """Count from now."""
        self._since = time.perf_counter()

    def done(self, name: str) -> None:
        """Give the time since the last step a name."""
        self.seconds[name] = time.perf_counter() - self._since
        self.restart()


def push_steps(file: str, into: str) -> dict[str, float]:
    """What each step of a push takes when a store in a directory has everything already."""
    import bundler
    from bundler.format.limits import DEFAULT_LIMITS
    from bundler.store import bounds, store_layout
    from bundler.store.stored_manifests import read_manifest

    url = f"file://{into}"
    with bundler.Bundle.load(file) as bundle, bundler.open_store(url) as store, _backend(url) as backend:
        store.push(bundle, tag="bench")
        manifest = store_layout.manifest_key(bundle.digest, bundle.observed.encode())
        steps = Steps()
        read_manifest(backend, "bench", manifest, DEFAULT_LIMITS)
        steps.done("manifest: read it and compare its digests")
        units = list(store_layout.units_of(bundle.content))
        steps.done("names: list the units of the bundle")
        backend.touch([unit.key for unit in units])
        steps.done("marks: touch every unit")
        values = backend.get_within(bounds.of_units(units))
        steps.done("read: open, look at, read and close every unit")
        for key, value in values.items():
            store_layout.check_seal(value, key)
        steps.done("hash: sha256 of every unit")
    return steps.seconds


def start_steps(url: str, into: str, tag: str, patience_s: str) -> dict[str, float]:
    """What each step takes of restoring the launch set by tag from a server."""
    import bundler
    from bundler.format.limits import DEFAULT_LIMITS
    from bundler.format.manifest import Content
    from bundler.store import bounds, store_layout
    from bundler.store.blob_source import unit_payload
    from bundler.store.dictionaries import Dictionaries
    from bundler.store.references import References
    from bundler.store.stored_manifests import read_manifest

    steps = Steps()
    with _backend(url, float(patience_s)) as backend:
        found = References(backend, "bench").find(tag)
        manifest, hints = found.manifest, found.hints
        steps.done("tag: connect, log in, ask for it")
        content_bytes, _ = read_manifest(backend, "bench", manifest, DEFAULT_LIMITS)
        content = Content.decode(content_bytes)
        steps.done("manifest: fetch, compare, decode")
        units = list(store_layout.units_of(content))
        steps.done("names: list the units")
        backend.touch([manifest, *(unit.key for unit in units)])
        steps.done("marks: mark everything as in use")
        wanted = {unit.key: unit for unit in units if unit.family.endswith("/launch")}
        dictionaries = Dictionaries(backend, "bench")
        values = backend.get_within(bounds.of_units(wanted.values()))
        dictionaries.fetch([digest for _, digest in hints])
        steps.done("fetch: units and dictionaries")
        opened = {
            key: unit_payload(value, key, wanted[key].size, DEFAULT_LIMITS, dictionaries, "bench", verified=True)
            for key, value in values.items()
        }
        steps.done("decode: decompress them")
        for key, payload in opened.items():
            store_layout.split_unit(payload, wanted[key])
        steps.done("hash: sha256 of every file")
    with bundler.open_store(url, timeout_s=float(patience_s)) as store, store.pull(tag) as bundle:
        bundle.blobs.prefetch([digest for unit in wanted.values() for digest, _ in unit.blobs])
        steps.restart()
        bundler.restore(bundle, into, keep="launch")
        steps.done("place: look at this machine, check, write, rename")
    return steps.seconds


def _backend(url: str, timeout_s: float | None = None) -> Backend:
    from bundler.store.store_urls import Opening, open_backend

    server = () if timeout_s is None else (("timeout_s", timeout_s),)
    return open_backend((url,), Opening(server=server))[0]


def profile_table(heading: str, steps: dict[str, float]) -> str:
    """Return a heading and the table of the steps, as Markdown."""
    rows = [(step, shown(seconds * 1e3, "ms")) for step, seconds in [*steps.items(), ("sum", sum(steps.values()))]]
    lines = ["| step | time |", "| --- | --- |", *(f"| {step} | {time} |" for step, time in rows)]
    return f"{heading}\n\n" + "\n".join(lines) + "\n"


def fresh_steps(bundle: Path, into: Path, rounds: int) -> dict[str, float]:
    """What each step takes of the first restore of a new process, medians."""
    found: dict[str, list[float]] = {}
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
                for name, seconds in zip(_FRESH, laps, strict=True):
                    found.setdefault(name, []).append(seconds)
                found.setdefault("end: take the interpreter down", []).append(whole - sum(laps))
    with contextlib.suppress(OSError):
        shutil.rmtree(into)
    return {name: measurement.median(each) for name, each in found.items()}
