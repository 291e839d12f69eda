# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernels of one client for one target, and writes them into a bundle: `python -m
tools.clients compile fla cuda:90`.

The files of one client are imported, which is code of its authors. `check.py` starts it for each
client and target.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from bundler.compile.service import CompileService
from bundler.format import wire
from bundler.format.entries import Target
from bundler.lifecycle.bundle_builder import Builder, join
from bundler.toolchain import identity
from tools.clients import found_kernels, stand_ins
from tools.clients.trials import Trials
from tools.clients.wheels import CLIENTS, unpacked
from tools.shared import programs

PREPARE = "tools.clients.stand_ins:prepare"
# Of one compile; a wrong guess may lead to kernels that no compiler can finish.
_TIMEOUT_S = 90.0
_MEMORY_BYTES = 3 << 30


def main() -> int:
    """Compile what is asked for."""
    parser = programs.parser(
        __doc__,
        folder=(Path, "where wheels and compiled kernels are kept between runs"),
        part=([""], "only these folders of the package"),
        workers=(2, "processes that compile"),
        wanted=(int, "stop when so many kernels are compiled"),
        seconds=(7200.0, "stop after so long; what is left counts as not tried"),
        result=(Path, "where the result goes; beside it .jobs and .tbundle"),
    )
    parser.add_argument("client", choices=CLIENTS)
    parser.add_argument("target", type=Target.parse, help="such as cuda:90")
    options = parser.parse_args()
    if options.folder is None or options.result is None:
        parser.error("--folder and --result are needed")
    options.result.parent.mkdir(parents=True, exist_ok=True)
    result = compile_client(options)
    options.result.write_text(json.dumps(result, indent=1))
    return 0


def compile_client(options: argparse.Namespace) -> dict[str, Any]:
    """Find, compile and bundle; returns what is known then."""
    until = time.monotonic() + options.seconds
    client, target, folder = CLIENTS[options.client], options.target, options.folder.absolute()
    roots = unpacked(client, folder)
    sys.path[:0] = map(str, roots)
    stand_ins.install()
    places = [Path(client.package, part) for part in options.part]
    found = found_kernels.find(roots[0], places, target)
    kernels = list(found.kernels.values())
    cache = folder / "compiled" / f"{options.client}-{target.backend}"
    state = folder / "state" / options.client / str(target).replace(":", "-")
    with CompileService(
        options.workers,
        cache_dir=cache,
        timeout_s=_TIMEOUT_S,
        memory_bytes=_MEMORY_BYTES,
        isolate=True,
        preload=PREPARE,
    ) as service:
        trials = Trials(service, target, state)
        untried = trials.run(kernels, until, options.wanted)
    left_out = _bundle(trials, cache, options.result)
    refused = dict(sorted(trials.refused.items()))
    return {
        "client": options.client,
        "version": client.version,
        "target": str(target),
        "root": str(roots[0]),
        "files": found.files,
        "files_refused": found.refused,
        "helpers": found.helpers,
        "found": len(found.kernels),
        "tried": len(kernels) - untried,
        "compiled": len(trials.compiled),
        "keys": len({one.key for one in trials.compiled.values()}),
        "left_out": left_out,
        "refused": refused,
        "unfinished": trials.unfinished,
    }


def _bundle(trials: Trials, cache: Path, result: Path) -> dict[str, str]:
    """Write the bundle, and the jobs that lead to it; returns the kernels that are in no bundle,
    with the reason.
    """
    builder, left_out = Builder(str(cache)), {}
    for name, compiled in trials.compiled.items():
        if (reason := compiled.add_to(builder)) is not None:
            left_out[name] = reason
    join([builder], identity.environment()).save(result.with_suffix(".tbundle"))
    jobs = wire.pack([job.to_bytes() for job in trials.jobs.values()])
    result.with_suffix(".jobs").write_bytes(jobs)
    return left_out


def environment(folder: Path) -> dict[str, str]:
    """Return environment variables for a process that imports clients: none finds a GPU, or writes
    outside the folder.
    """
    return {
        "CUDA_VISIBLE_DEVICES": "",
        "HOME": os.fspath(folder),
        "TRITON_CACHE_DIR": os.fspath(folder / "compiled" / "other"),
    }
