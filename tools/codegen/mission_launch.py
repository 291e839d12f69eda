# SPDX-License-Identifier: Apache-2.0
"""Runs the programs of bundles in a process without torch and Triton, and leaves the bytes of their
results: `mission --launch` starts it.

    python -m tools.codegen.mission_launch BUNDLES OUTPUTS [NAME ...]

Prints JSON: by graph what was launched, or what went wrong.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

# Whoever imports one of these from here on fails.
BANNED = ("torch", "triton", "sympy")
# None is how Python says that a module is not there
sys.modules |= dict.fromkeys(BANNED)  # type: ignore[arg-type]

from bundler import Bundle  # noqa: E402
from bundler.runtime.program.bundle_programs import load_program  # noqa: E402
from bundler.runtime.program.device_memory import DeviceMemory  # noqa: E402
from bundler.runtime.program.program_summary import programs_of  # noqa: E402
from tools.codegen.plain_inputs import arrays  # noqa: E402


def main() -> int:
    """Launch each program."""
    bundles, outputs, *names = sys.argv[1:]
    memory = DeviceMemory()
    graphs: dict[str, dict[str, Any]] = {}
    skipped = []
    for path in sorted(Path(bundles).glob("*.tbundle")):
        if names and path.stem not in names:
            continue
        bundle = Bundle.load(path)
        if programs_of(bundle)[0].operators:
            skipped.append(path.stem)
            continue
        program = load_program(bundle, memory=memory)
        try:
            graphs[path.stem] = _launched(path.stem, program, memory, Path(outputs))
        # One program that fails must not hide the others.
        except Exception as error:  # noqa: BLE001
            graphs[path.stem] = {"error": f"{type(error).__name__}: {error}"[:1000]}
    print(
        json.dumps(
            {
                "graphs": graphs,
                "skipped": skipped,
                "kernels": sum(one.get("kernels", 0) for one in graphs.values()),
                "imported": [name for name in BANNED if sys.modules.get(name) is not None],
            }
        )
    )
    return 0


def _launched(name: str, program: Any, memory: DeviceMemory, folder: Path) -> dict[str, Any]:
    given = [
        memory.put(values, spec.spec.dtype)
        for values, spec in zip(arrays(name, program.plan), program.plan.inputs, strict=True)
    ]
    results = program(*given)
    memory.synchronize()
    for number, result in enumerate(results):
        (folder / f"{name}.{number}").write_bytes(memory.get(result))
        layout = json.dumps([result.dtype, result.shape, result.strides])
        (folder / f"{name}.{number}.json").write_text(layout)
    return {"kernels": len(program.plan.kernels), "results": len(results)}


if __name__ == "__main__":
    sys.exit(main())
