# SPDX-License-Identifier: Apache-2.0
"""The first process of the demo: compiles the kernels under a recording and saves the bundle.
`demo.py` runs it by path.

    python demo_record.py OUTPUT KERNELS TARGET...

It prints a line for each kernel, so that the demo can show its progress.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def record(output: str, kernels_path: str, targets: list[str]) -> None:
    """Compile every kernel for every target while recording, and save what was recorded."""
    # At the end of the path, not in PYTHONPATH: the folder may hold other modules too.
    sys.path.append(str(Path(__file__).absolute().parents[2]))
    import bundler
    from bundler.cli.demo_check import load

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


if __name__ == "__main__":
    record(sys.argv[1], sys.argv[2], sys.argv[3:])
