# SPDX-License-Identifier: Apache-2.0
"""What a new process pays before the first byte: imports, alone and with the work that they are
for, and judging a signature; and a cold start beside torch's bundler's.

    python -m tools.bench fresh [--kernels N] [--rounds N] [--quick] [--check]

Each sample is an interpreter of its own, with compiled bytecode, as users have it; its pair does
the same without us, or with torch's bundler, whose import is not counted: a process that compiles
has it anyway.  Ours is.
"""

from __future__ import annotations

import base64
import importlib.util
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

from tools.bench import jobs
from tools.bench.sides import Samples, arguments, concluded, working_folder
from tools.shared import measurement, programs
from tools.shared.kernel_variants import cache_of
from tools.shared.measurement import differences, median, row
from tools.shared.processes import ROOT, output, python_path

IMPORT_TARGET_MS = 60.0
PLUGIN_TARGET_MS = 60.0
RESTORE_TARGET_MS = 110.0
KERNELS = 300
ROUNDS = 15
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
BUNDLE = ROOT / "tests" / "data" / "v2.0" / "triton-3.7.1.tbundle"
JUDGING_TARGET_MS = 20.0
# CPU time: a clock on the wall says more about the other programs of this machine than about
# milliseconds.
_JUDGING = """
import json, sys, time, bundler
from bundler.lifecycle import restoration
real, spent = restoration.admit, []
def timed(*given):
    began = time.process_time()
    admission = real(*given)
    spent.append((time.process_time() - began) * 1e3)
    return admission
restoration.admit = timed
for number in range(4):
    assert bundler.restore(sys.argv[1], f"{sys.argv[2]}/{number}", only="all").signatures
print(json.dumps(spent))
"""


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
    bundle, into = work / "fresh.tbundle", work / "fresh"
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


def signature_cost(rounds: int) -> list[dict[str, Any]]:
    """Return what judging a signature adds to a restore, the first of a process and later ones;
    nothing where the package `cryptography` is missing, which signs.
    """
    if importlib.util.find_spec("cryptography") is None:
        print(
            "skipped: without the package cryptography nothing is signed, so judging a signature is"
            " not measured",
            file=sys.stderr,
        )
        return []
    import bundler
    from bundler.trust.trusted_keys import TrustedKey, write_key

    key = bundler.SigningKey.generate()
    with working_folder(measurement.fast_directory()) as folder:
        signed = folder / "signed.tbundle"
        bundler.sign(BUNDLE, key, output=signed)
        write_key(f"{folder}/keys", "bench", TrustedKey(key=base64.b64encode(key.public).decode()))
        settings = {"SIGNATURES": "require", "KEYS": f"{folder}/keys", "LOCAL": f"{folder}/local"}
        variables = {f"TRITON_BUNDLER_{name}": value for name, value in settings.items()}
        into = folder / "into"
        program = (_JUDGING, str(signed), str(into))
        found = interpreters(rounds, program, into=into, **variables)
        said = [json.loads(text) for ((_, text),) in found]
    first, later = [one[0] for one in said], [time for one in said for time in one[1:]]
    return [
        row(f"judging a signature, {which} (CPU)", median(found), "ms", most=most, samples=found)
        for which, found, most in (
            ("first restore of a process", first, JUDGING_TARGET_MS),
            ("later restores", later, None),
        )
    ]


def _row(
    work: str,
    most: float | None,
    pair: tuple[str, str],
    rounds: int,
    given: tuple[str, ...] = (),
) -> dict[str, Any]:
    into = Path(given[1]) if given else None
    found = list(interpreters(rounds, *((code, *given) for code in pair), into=into))
    samples = {
        name: [turn[at][0] * 1e3 for turn in found] for at, name in enumerate(("without", "with"))
    }
    figure = median(differences(samples["with"], samples["without"]))
    return row(work, figure, "ms", most=most, samples=samples)


def interpreters(
    rounds: int, *programs: tuple[str, ...], into: Path | None = None, **variables: str
) -> Iterator[list[tuple[float, str]]]:
    """Run programs in turn, each in an interpreter of its own with compiled bytecode; yields for
    each round the seconds of each, and what it said.

    Args:
        rounds: how often.
        programs: the code and arguments of each.
        into: a directory that they fill, removed before each.
        variables: more for their environment.
    """
    environment = {**os.environ, **variables, "PYTHONPATH": python_path()}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory(prefix="bench.") as folder:
        environment["PYTHONPYCACHEPREFIX"] = folder
        for number in range(rounds + 1):
            found = []
            for program in programs:
                if into is not None:
                    shutil.rmtree(into, ignore_errors=True)
                started = time.perf_counter()
                said = subprocess.check_output(
                    [sys.executable, "-c", *program], env=environment, text=True
                )
                found.append((time.perf_counter() - started, said))
            if number:  # the first round fills the bytecode cache
                yield found


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
    return concluded("bench-fresh", result, options)


if __name__ == "__main__":
    steps: dict[str, Callable[..., Any]] = {
        "make": make,
        "torch collect": jobs.torch_collect,
        "torch": jobs.torch_restore,
    }
    sys.exit(0 if programs.run_step(steps) else main())
