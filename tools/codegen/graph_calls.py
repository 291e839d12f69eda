# SPDX-License-Identifier: Apache-2.0
"""What a call costs on the host that is one launch of a CUDA graph, with 32 inputs, beside
Inductor's `reduce-overhead` and both without graphs.

    python -m tools.codegen graph-calls [--results DIR] [--check]

First a program of a bundle is loaded with graphs, and its calls compared with eager torch's, all
results kept.  Then microseconds of a call that nobody waits for, the GPU idle when it begins, in turns; and of ours
what is between Dynamo's guards and the launch.  Inductor's is told that a step begins before each
call, as its users have to.  The result goes to docs/results/codegen-graph-calls.json.  With
`--check` the exit status is 1 where the time to the launch is above its target.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.codegen.command_line import parser
from tools.shared import measurement

NAME = "codegen-graph-calls"
INPUTS = 32
# Between Dynamo's guards and the launch.
MOST_US = 15.0
_WARM, _ROUNDS = 20, 400
_TO_LAUNCH = "ours, to the launch"


def main() -> int:
    """Measure, and save; 1 where `--check` finds the target missed."""
    options = parser(__doc__, "results check").parse_args()
    path = options.results / f"{NAME}.json"
    if options.check:
        return _told(json.loads(path.read_text()))
    replays = replayed()
    result = {**measurement.facts(), "inputs": INPUTS, "replays": replays, "samples": samples()}
    result["median_us"] = {
        side: round(statistics.median(taken), 2) for side, taken in result["samples"].items()
    }
    measurement.save(NAME, result, Path(options.results))
    return _told(result)


def _told(result: dict[str, Any]) -> int:
    for side, taken in result["median_us"].items():
        print(f"{side:<36}{taken:8.2f} us")
    print(f"{_TO_LAUNCH}: at most {MOST_US:.0f} us")
    return int(result["median_us"][_TO_LAUNCH] > MOST_US)


def replayed() -> int:
    """Return how many calls of a bundle's program were a graph's, of 24 whose results are right.

    Raises:
        AssertionError: some result is wrong, or was written over by a later call.
    """
    import torch

    from bundler.codegen.program import generate
    from bundler.runtime.program.bundle_programs import load_program
    from bundler.toolchain.torch_memory import TorchMemory

    def function(x: Any, weight: Any) -> Any:
        return torch.softmax(torch.relu(x @ weight) * 2, -1)

    def example() -> tuple[Any, Any]:
        return torch.randn(64, 128, device="cuda"), weight

    weight = torch.randn(128, 256, device="cuda")
    target = "cuda:{}{}".format(*torch.cuda.get_device_capability())
    bundle = generate(function, example()).build([target])
    run: Any = load_program(bundle, memory=TorchMemory("cuda"), graphs=True)
    kept = []
    for _ in range(24):
        given = example()
        kept.append((function(*given), *run(*given)))
        for expected, found in kept:
            torch.testing.assert_close(found, expected)
    count: int = run.graph_use.replays
    assert count > len(kept) // 2, run.graph_use
    return count


def samples() -> dict[str, list[float]]:
    """Return the microseconds of each call, by side."""
    import torch

    programs: list[Any] = []
    inputs = [torch.randn(64, 64, device="cuda") for _ in range(INPUTS)]
    graphs = {"programs": programs, "graphs": True}
    sides: dict[str, Callable[..., Any]] = {
        "eager": _sum,
        "Inductor": torch.compile(_another(), backend="inductor"),
        "Inductor, reduce-overhead": torch.compile(_another(), mode="reduce-overhead"),
        "ours": torch.compile(_another(), backend="triton_bundler"),
        "ours, graphs": torch.compile(_another(), backend="triton_bundler", options=graphs),
    }
    taken: dict[str, list[float]] = {side: [] for side in (*sides, _TO_LAUNCH)}
    for call in sides.values():
        for _ in range(_WARM):
            torch.compiler.cudagraph_mark_step_begin()
            call(*inputs)
    launches = _watched(programs[0])
    for _ in range(_ROUNDS):
        for side, call in sides.items():
            torch.compiler.cudagraph_mark_step_begin()
            torch.cuda.synchronize()
            started = time.perf_counter()
            found = call(*inputs)
            taken[side].append((time.perf_counter() - started) * 1e6)
            del found
        torch.cuda.synchronize()
        with torch.no_grad():
            started = time.perf_counter()
            programs[0].consume(list(inputs))
        taken[_TO_LAUNCH].append((launches[-1] - started) * 1e6)
    return taken


def _watched(program: Any) -> list[float]:
    """Return a list that gets the moment of each launch of a program's graph."""
    moments: list[float] = []
    capture = program._runner._latest._capture  # noqa: SLF001  # shown nowhere else
    launch = capture.launch

    def watched() -> None:
        moments.append(time.perf_counter())
        launch()

    capture.launch = watched
    return moments


def _sum(*tensors: Any) -> Any:
    found = tensors[0]
    for one in tensors[1:]:
        found = found + one * 0.5
    return found, found.sum(0)


def _another() -> Callable[..., Any]:
    """Return a function that torch.compile has not seen, so that each side has its own code."""
    return types.FunctionType(_sum.__code__.replace(), {}, "_sum")


if __name__ == "__main__":
    sys.exit(main())
