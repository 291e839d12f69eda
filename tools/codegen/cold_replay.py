# SPDX-License-Identifier: Apache-2.0
"""Runs the programs of bundles once, from nothing: a process of `bench --cold`, in which torch and
Triton cannot be imported, or torch is.

    python -m tools.codegen.cold_replay replay|replay_torch FOLDER [NAME ...]

Prints JSON.  Inputs are zeros: how long a kernel takes does not depend on them, and an index of
zero is always there.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bundler import Bundle
from bundler.runtime.program.bundle_programs import load_program
from bundler.runtime.program.device_memory import DeviceMemory
from bundler.runtime.program.program_summary import programs_of

BANNED = ("torch", "triton")


def main() -> int:
    """Replay, and print what it took."""
    started = time.monotonic()
    side, folder, *names = sys.argv[1:]
    paths = sorted(
        path for path in Path(folder).glob("*.tbundle") if not names or path.stem in names
    )
    replay = _alone if side == "replay" else _beside_torch
    work_s, seconds, kernels, skipped = replay(paths)
    print(
        json.dumps(
            {
                "names": [path.stem for path in paths if path.stem not in skipped],
                "graphs": len(paths) - len(skipped),
                "kernels": kernels,
                "work_s": work_s,
                "main_s": time.monotonic() - started,
                "graph_s": seconds,
                "skipped": skipped,
                "imported": [name for name in BANNED if sys.modules.get(name) is not None],
            }
        )
    )
    return 0


Replayed = tuple[float, dict[str, float], int, list[str]]


def _alone(paths: list[Path]) -> Replayed:
    # None is how Python says that a module is not there
    sys.modules |= dict.fromkeys(BANNED)  # type: ignore[arg-type]
    memory = DeviceMemory()

    def zeros(spec: Any) -> Any:
        made = memory.allocate(spec.dtype, spec.sizes, spec.strides)
        memory.fill(made)
        return made

    return _replayed(paths, memory, zeros, memory.synchronize)


def _beside_torch(paths: list[Path]) -> Replayed:
    import torch

    from bundler.toolchain.torch_memory import TorchMemory

    def zeros(spec: Any) -> Any:
        return torch.zeros(spec.sizes, dtype=getattr(torch, spec.dtype), device="cuda").as_strided(
            spec.sizes, spec.strides
        )

    torch.cuda.synchronize()
    return _replayed(paths, TorchMemory("cuda"), zeros, torch.cuda.synchronize)


def _replayed(
    paths: list[Path],
    memory: Any,
    zeros: Callable[[Any], Any],
    wait: Callable[[], None],
) -> Replayed:
    seconds: dict[str, float] = {}
    kernels, skipped = 0, []
    started = time.monotonic()
    for path in paths:
        began = time.monotonic()
        bundle = Bundle.load(path)
        if isinstance(memory, DeviceMemory) and programs_of(bundle)[0].operators:
            skipped.append(path.stem)  # it calls operators, which only torch has
            continue
        program = load_program(bundle, memory=memory)
        kernels += len(program.plan.kernels)
        program(*(zeros(given.spec) for given in program.plan.inputs))
        wait()
        seconds[path.stem] = time.monotonic() - began
    return time.monotonic() - started, seconds, kernels, skipped


if __name__ == "__main__":
    sys.exit(main())
