# SPDX-License-Identifier: Apache-2.0
"""The side of `without-torch` that runs an encoder with neither torch nor Triton, and is timed.

python -m tools.codegen.encoder_launch FOLDER
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

BUNDLE, WEIGHTS, INPUTS = "model.tbundle", "model.safetensors", "inputs.npz"
ROUNDS, WARM, CALLS = 5, 8, 40


def main() -> int:
    """Save the result of a call, and print times and memory."""
    sys.modules |= dict.fromkeys(("torch", "triton"))  # type: ignore[arg-type]  # importing raises
    line = argparse.ArgumentParser(description=__doc__)
    line.add_argument("folder", type=Path)
    folder = line.parse_args().folder
    import numpy as np

    from bundler.runtime import DeviceMemory

    memory = DeviceMemory()
    free = memory.info()[0]
    runner, inputs = loaded(folder, memory)
    found = memory.array(runner(*inputs)[0])
    first = time.time()
    np.save(folder / "ours.npy", found)
    facts: dict[str, Any] = {
        "first_at": first,
        "ms": timed(lambda: runner(*inputs), memory.synchronize),
    }
    use = runner.graph_use
    facts |= {"graph_launches": use.replays, "graph_refusal": use.refusal}
    facts["memory_bytes"] = free - memory.info()[0]
    facts["imported"] = [name for name in ("torch", "triton") if sys.modules.get(name) is not None]
    print(json.dumps(facts))
    return 0


def loaded(folder: Path, memory: Any) -> tuple[Any, list[Any]]:
    """Return the program of a folder's bundle, and what it is given."""
    import numpy as np

    from bundler.runtime import load_program

    runner = load_program(folder / BUNDLE, memory=memory, weights=folder / WEIGHTS, graphs=True)
    with np.load(folder / INPUTS) as given:
        return runner, [memory.put(one) for one in given.values()]


def timed(call: Any, wait: Any) -> float:
    """Return milliseconds a call, of calls that nobody waits for; the least of some rounds."""
    found = []
    for _ in range(ROUNDS):
        for _ in range(WARM):
            call()
        wait()
        started = time.perf_counter()
        for _ in range(CALLS):
            call()
        wait()
        found.append((time.perf_counter() - started) / CALLS * 1e3)
    return min(found)


if __name__ == "__main__":
    sys.exit(main())
