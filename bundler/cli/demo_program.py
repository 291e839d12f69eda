# SPDX-License-Identifier: Apache-2.0
"""The two processes of the demo: the first compiles the kernels under a recording and saves the
bundle, the second compiles them again and counts hits.  `demo.py` runs it by path.

    python demo_program.py record|check OUTPUT KERNELS TARGET...

The second imports nothing of `bundler`: Triton's own listener tells which kernels were hits and
which were compiled.  Both print a line for each kernel, so that the demo can show its progress.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any


def load(path: str) -> Any:
    """Import the kernels by path, in both processes in the same way: their source is part of the
    key.
    """
    spec = importlib.util.spec_from_file_location("demo_kernels", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def record(output: str, kernels_path: str, targets: list[str]) -> None:
    """Compile every kernel for every target while recording, and save what was recorded."""
    # At the end of the path, not in PYTHONPATH: the folder may hold other modules too.
    sys.path.append(str(Path(__file__).absolute().parents[2]))
    import bundler

    kernels = load(kernels_path)
    before = kernels.triton.knobs.compilation.listener

    def tell(*arguments: Any, **facts: Any) -> None:
        print(facts["metadata"]["name"], flush=True)
        if before is not None:
            before(*arguments, **facts)

    kernels.triton.knobs.compilation.listener = tell
    with bundler.recording() as recording:
        kernels.compile_all(targets)
        recording.collect().save(output)


def check(output: str, kernels_path: str, targets: list[str]) -> None:
    """Compile every kernel for every target, and write down what Triton's listener heard."""
    kernels = load(kernels_path)
    heard: list[dict[str, Any]] = []

    def listener(**facts: Any) -> None:
        heard.append(
            {
                "hash": facts["metadata"]["hash"],
                "name": facts["metadata"]["name"],
                "hit": facts["cache_hit"],
                "ms": facts["times"].total / 1000,
            }
        )
        print(facts["metadata"]["name"], flush=True)

    kernels.triton.knobs.compilation.listener = listener
    kernels.compile_all(targets)
    if "bundler" in sys.modules:
        raise RuntimeError("this process should not know the bundler")
    Path(output).write_text(json.dumps(heard), encoding="utf-8")


if __name__ == "__main__":
    step = record if sys.argv[1] == "record" else check
    step(sys.argv[2], sys.argv[3], sys.argv[4:])
