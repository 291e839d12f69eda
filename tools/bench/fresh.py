# SPDX-License-Identifier: Apache-2.0
"""What a new process pays before the first byte: imports, alone and with the work that they are
for; and a cold start beside torch's bundler's.

    python -m tools.bench fresh [--kernels N] [--rounds N] [--quick] [--check]

Each sample is an interpreter of its own, with compiled bytecode, as users have it; its pair does
the same without us, or with torch's bundler, whose import is not counted: a process that compiles
has it anyway.  Ours is.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tools.bench.sides import arguments, working_folder
from tools.shared import measurement, programs
from tools.shared.kernel_variants import cache_of
from tools.shared.measurement import differences, median, row
from tools.shared.processes import output, python_path

IMPORT_TARGET_MS = 60.0
PLUGIN_TARGET_MS = 60.0
RESTORE_TARGET_MS = 110.0
KERNELS = 300
ROUNDS = 15
FRESH_BUNDLE = "fresh.tbundle"
_STEP = "tools.bench.fresh", "--step"
_BARE = "pass"
_TRITON = "import triton.knobs, triton.runtime.cache"
_PLUGIN = "from bundler.integrations.triton import BundlerCacheManager"
_RESTORE = """
import sys
import bundler
with bundler.Bundle.load(sys.argv[1]) as bundle:
    report = bundler.restore(bundle, sys.argv[2], "launch")
assert len(report.restored) == int(sys.argv[3]), report
"""


Samples = dict[str, list[float]]


def imports(rounds: int) -> list[dict[str, Any]]:
    """Return what importing us costs, and what importing the plug-in costs a process that has
    Triton.
    """
    ours, manager = (_BARE, "import bundler"), (_TRITON, f"{_TRITON}\n{_PLUGIN}")
    started = "import bundler, added to interpreter start"
    added = "import of the cache manager, added to import triton"
    return [
        _row(started, IMPORT_TARGET_MS, ours, rounds),
        _row(added, PLUGIN_TARGET_MS, manager, rounds),
    ]


def first_restore(cache: Path, work: Path, kernels: int, rounds: int) -> dict[str, Any]:
    """Return what a new process pays for its first restore, of a launch set, imports and all."""
    number = min(KERNELS, kernels)
    bundle, into = work / FRESH_BUNDLE, work / "fresh"
    output(*_STEP, "make", str(cache), str(bundle), str(number), environment={})
    done = f"import, load, restore the launch set of {number} kernels"
    name = f"fresh process: {done} (above a bare interpreter)"
    # A target for another number of kernels would mean nothing.
    most = RESTORE_TARGET_MS if number == KERNELS else None
    return _row(name, most, (_BARE, _RESTORE), rounds, (str(bundle), str(into), str(number)))


def beside_torch(cache: Path, work: Path, ours: Samples, kernels: int) -> dict[str, Any]:
    """Return a cold start beside torch's bundler, which unpickles and writes all files of the same
    kernels, and verifies none.
    """
    bundle, into = work / "torch.pickle", work / "torch"
    output(*_STEP, "torch collect", str(cache), str(bundle), environment={})
    theirs = []
    for _ in ours["with"]:
        shutil.rmtree(into, ignore_errors=True)
        told = json.loads(output(*_STEP, "torch", str(bundle), str(into), environment={}))
        theirs.append(sum(seconds for step, seconds in told.items() if step != "kernels"))
    return measurement.ratio_row(
        f"a new process imports us, loads and restores the launch set of {kernels} kernels",
        [ms / 1e3 for ms in differences(ours["with"], ours["without"])],
        theirs,
        "torch's bundler, imported before, unpickles and emits everything, unverified",
        samples={"ours": ours["with"], "torch": theirs},
    )


def _row(
    work: str,
    most: float | None,
    pair: tuple[str, str],
    rounds: int,
    given: tuple[str, ...] = (),
) -> dict[str, Any]:
    samples: dict[str, list[float]] = {"without": [], "with": []}
    with child_environment() as environment:
        for number in range(rounds + 1):
            for times, code in zip(samples.values(), pair, strict=True):
                for made in given[1:2]:
                    shutil.rmtree(made, ignore_errors=True)
                started = time.perf_counter()
                subprocess.run([sys.executable, "-c", code, *given], env=environment, check=True)
                if number:  # the first pair fills the bytecode cache
                    times.append((time.perf_counter() - started) * 1e3)
    figure = median(differences(samples["with"], samples["without"]))
    return row(work, figure, "ms", most=most, samples=samples)


@contextlib.contextmanager
def child_environment() -> Iterator[dict[str, str]]:
    """Give an environment in which interpreters share compiled bytecode of their own."""
    environment = {**os.environ, "PYTHONPATH": python_path()}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory(prefix="bench.") as folder:
        yield {**environment, "PYTHONPYCACHEPREFIX": folder}


def make(cache: str, file: str, number: str) -> None:
    """Save a bundle of the first kernels of a cache."""
    from bundler import Bundle, Content, Observed, pack

    with pack(cache) as bundle:
        Bundle(Content.of(bundle.kernels[: int(number)]), Observed(), bundle.blobs).save(file)


def main() -> int:
    """Measure, print a table, write the samples."""
    options = arguments(__doc__, (KERNELS, 24), (ROUNDS, 1))
    cache = cache_of(options.kernels, options.keep)
    with working_folder(measurement.fast_directory()) as work:
        first = first_restore(cache, work, options.kernels, options.rounds)
        rows = [first, beside_torch(cache, work, first["samples"], options.kernels)]
    result = {"kernels": options.kernels, "rounds": options.rounds, "rows": rows}
    missed = measurement.report("bench-fresh", result, options.results)
    measurement.missed(missed)
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    from tools.bench import jobs  # which imports this module

    steps: dict[str, Callable[..., Any]] = {
        "make": make,
        "torch collect": jobs.torch_collect,
        "torch": jobs.torch_restore,
    }
    sys.exit(0 if programs.run_step(steps) else main())
