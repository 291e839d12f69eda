# SPDX-License-Identifier: Apache-2.0
"""What a user could do with a bundle besides reading and restoring it: each of it ends well or with an error of ours."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from bundler.cli import wording
from bundler.cli.leak_search import find_leaks
from bundler.cli.program_facts import program_facts, show_programs
from bundler.cli.terminal import Screen
from bundler.format.bundle import Bundle
from bundler.format.entries import Kernel, Target, TuningFile
from bundler.format.launch_spec import LaunchSpec
from bundler.format.metadata import parse_metadata
from bundler.format.source_stripping import strip_source
from bundler.lifecycle.binary_resources import read_resources
from bundler.lifecycle.machine_store import open_store
from bundler.lifecycle.triton_results import results_key, results_timings
from bundler.lifecycle.tuning_directory import (
    TuningFolder,
    explain,
    place_tunings,
    tunings_of,
    winners_only,
    with_tunings,
)
from bundler.runtime import DryDriver, build_plan, can_launch, load
from bundler.runtime.program.program_summary import programs_of
from bundler.runtime.tuning.occupancy import usage_of
from bundler.runtime.tuning.tuning_winners import config_of, record_of, table_entry
from bundler.toolchain import rekeyed_key

MANY = 3


def uses(bundle: Bundle, folder: Path) -> Iterator[Callable[[], Any]]:
    """Yield calls; `folder` is theirs to fill."""
    for kernel in bundle.kernels[:MANY]:
        yield from _of_kernel(bundle, kernel)
    for backend in ("cuda", "hip"):
        yield partial(_launch, bundle, backend)
    yield lambda: winners_only(bundle).to_bytes()
    yield lambda: with_tunings(bundle, tunings_of(bundle)).to_bytes()
    yield lambda: (place_tunings(bundle, folder), [*TuningFolder(folder).records()])
    yield partial(_tunings, bundle)
    for entry in bundle.tuning_files[:MANY]:
        yield partial(_results, bundle, entry)
    yield partial(_store, bundle)
    yield lambda: find_leaks(bundle, bundle.kernels[:MANY], whole=True)
    yield lambda: strip_source(bundle).to_bytes()
    yield partial(_programs, bundle)


def _of_kernel(bundle: Bundle, kernel: Kernel) -> Iterator[Callable[[], Any]]:
    yield (
        lambda: (
            kernel.launch.facts and (kernel.launch.facts.to_bytes(), kernel.launch.facts.unportable)
        )
    )
    yield lambda: kernel.parts and kernel.parts.to_bytes()
    yield lambda: can_launch(kernel, bundle.read(kernel.binary))
    yield lambda: build_plan(kernel, bundle.read(kernel.binary))
    yield lambda: read_resources(bundle.read(kernel.binary), kernel.launch.entry)
    for backend in ("cuda", "hip"):
        yield partial(_usage, bundle, kernel, backend)
    yield lambda: LaunchSpec.from_metadata(parse_metadata(bundle.read(kernel.metadata)))
    yield lambda: rekeyed_key.key_here(
        kernel.key, kernel.launch.require_facts(), kernel.require_parts(), kernel.target
    )


def _usage(bundle: Bundle, kernel: Kernel, backend: str) -> None:
    target = Target(backend, kernel.target.arch, kernel.target.warp_size)
    usage_of(bundle.read(kernel.binary), kernel.launch.entry, target)


def _launch(bundle: Bundle, backend: str) -> None:
    driver: Any = DryDriver(backend)
    for name, found in load(bundle, driver=driver).items():
        for kernel in [kernel for kernel in bundle.kernels if kernel.name == name][:MANY]:
            handle = found.handle_of(kernel.key)
            kinds = [parameter.kind for parameter in handle.plan.arguments]
            values = [
                0x10000 if kind == "pointer" else 1.5 if "fp" in kind else 16 for kind in kinds
            ]
            handle.launch(1, 1, 1, 0, *values)


def _tunings(bundle: Bundle) -> None:
    for record, tuning in tunings_of(bundle)[:MANY]:
        record_of(json.loads(json.dumps(table_entry(record, tuning))))
        explain(record.kernel, record.parts, [record])
        config_of(record.config)


def _results(bundle: Bundle, entry: TuningFile) -> None:
    data = bundle.read(entry.artifact)
    results_timings(data)
    results_key(data)


def _programs(bundle: Bundle) -> None:
    """Print what is known of programs, as `inspect` does, and put it into JSON."""
    programs = programs_of(bundle)
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        show_programs(Screen(out=Console(file=nowhere)), programs)
    json.loads(wording.to_json([program_facts(program) for program in programs]))
    msgspec.json.encode([program_facts(program) for program in programs])


def _store(bundle: Bundle) -> None:
    with open_store("memory:") as store:
        store.push(bundle, "t")
        store.tags()
        store.kernel_records().publish(bundle)
        store.kernel_records().look_up([kernel.key for kernel in bundle.kernels])
        store.pull("t").verify()
