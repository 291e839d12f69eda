# SPDX-License-Identifier: Apache-2.0
"""Whether `DeviceMemory` holds what it promises, on a GPU, beside torch: writes
docs/results/codegen-memory.json.

    python -m tools.codegen memory-check [--results DIR] [--check]

A program with a row reduction, random numbers and a buffer is called 10,000 times: every result is
the first one's for its seed, and the GPU has as much free memory at the end as after the first
calls.  Tensors of torch come and go by DLPack between streams that are kept busy, so that a missing
wait gives wrong numbers; CuPy's and cuda.core's streams are used where these are installed.  An
allocation of more than there is raises, and the next call works.  A file of weights is loaded, and
its speed told.  With `--check` nothing runs, and the exit status is 1 where the result misses a
target.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.codegen.command_line import parser
from tools.shared import measurement

NAME = "codegen-memory"
CALLS = 10_000
#: By how much less memory may be free at the end: what a driver takes for itself.
MOST_LOST_BYTES = 16 << 20
_WARM, _ROUNDS, _ROWS, _WIDTH = 50, 40, 512, 1024
_SLEEP_CYCLES = 20_000_000
_WEIGHT_BYTES = 1 << 30


def main() -> int:
    """Run all, and save; 1 where something does not hold."""
    options = parser(__doc__, "results check").parse_args()
    path = options.results / f"{NAME}.json"
    if options.check:
        return _told(json.loads(path.read_text()))
    checks: dict[str, Callable[[], dict[str, Any]]] = {
        "calls": called,
        "torch": exchanged,
        "streams": streams,
        "out of memory": exhausted,
        "pinned": pinned,
        "weights": weights,
    }
    result = {name: check() for name, check in checks.items()}
    measurement.save(NAME, result, Path(options.results))
    return _told(result)


def _told(result: dict[str, Any]) -> int:
    """Print what was found, and return 1 where a target is missed."""
    for name in ("calls", "torch", "streams", "out of memory", "pinned", "weights"):
        print(f"{name}: {json.dumps(result[name])}")
    wrong = sum(one.get("wrong", 0) for one in result.values() if isinstance(one, dict))
    return int(wrong > 0 or result["calls"]["lost_bytes"] > MOST_LOST_BYTES)


def _loaded(function: Callable[..., Any], *example: Any, **options: Any) -> Any:
    """Return a program for this GPU."""
    import torch

    from bundler.codegen.program import generate
    from bundler.runtime.program.bundle_programs import load_program

    maker = "cuda" if torch.version.hip is None else "hip"
    arch = "{}{}".format(*torch.cuda.get_device_capability())
    if maker == "hip":
        arch = torch.cuda.get_device_properties(0).gcnArchName.partition(":")[0]
    bundle = generate(function, example, device="cuda").build([f"{maker}:{arch}"])
    return load_program(bundle, **options)


def _drawn(x: Any) -> Any:
    import torch

    return torch.softmax(x + torch.rand_like(x), -1), x.sum(0)


def _plain(x: Any, y: Any) -> Any:
    return x * 2 + y, (x - y).sum(-1)


def called() -> dict[str, Any]:
    """Call a program again and again."""
    import torch

    from bundler.runtime import DeviceMemory

    memory = DeviceMemory()
    given = torch.randn(_ROWS, _WIDTH, device="cuda")
    program = _loaded(_drawn, given, memory=memory)
    wrong, first = 0, None
    with memory.use(memory.new_stream()):
        found = program(given, seed=7)
        for _ in range(_WARM):
            found = program(given, seed=7)
        memory.synchronize()
        before, started = memory.info()[0], time.perf_counter()
        for number in range(CALLS):
            found = program(given, seed=7)
            if number % 100 == 0:
                data = [bytes(memory.get(one)) for one in found]
                first = first or data
                wrong += data != first
        memory.synchronize()
        taken_s = time.perf_counter() - started
        # Before torch loads kernels of its own, which stay.
        lost = before - memory.info()[0]
        expected = given.sum(0)
        wrong += not torch.allclose(torch.from_dlpack(found[1]), expected, 1e-4, 1e-3)
        del found
    return {
        "wrong": wrong,
        "lost_bytes": lost,
        "us_a_call": round(taken_s / CALLS * 1e6, 1),
    }


def exchanged() -> dict[str, Any]:
    """Have torch write on a busy stream what a program reads on another one, and the other way."""
    import torch

    from bundler.runtime import DeviceMemory

    memory = DeviceMemory()
    example = torch.zeros(_ROWS, _WIDTH, device="cuda")
    program = _loaded(_plain, example, example, memory=memory)
    theirs, ours, wrong = torch.cuda.Stream(), memory.new_stream(), 0
    for number in range(_ROUNDS):
        with torch.cuda.stream(theirs):
            torch.cuda._sleep(_SLEEP_CYCLES)  # noqa: SLF001  # torch has it for such tests
            x = torch.full((_ROWS, _WIDTH), float(number), device="cuda")
            y = torch.ones_like(x)
            with memory.use(ours):
                results = program(x, y)
                found = [torch.from_dlpack(one) for one in results]
                del results
            expected = [x * 2 + y, (x - y).sum(-1)]
            wrong += not all(map(torch.equal, found, expected))
            del found, x, y
    return {"wrong": wrong, "rounds": _ROUNDS}


def streams() -> dict[str, Any]:
    """Work on the current streams of other libraries."""
    import torch

    from bundler.runtime import DeviceMemory

    memory = DeviceMemory()
    example = torch.ones(_ROWS, _WIDTH, device="cuda")
    program = _loaded(_plain, example, example, memory=memory)
    found: dict[str, Any] = {"torch": torch.cuda.Stream().cuda_stream}
    for name, make in (("cupy", _of_cupy), ("cuda.core", _of_cuda_core)):
        try:
            found[name] = make()
        except ImportError:
            continue
    wrong = 0
    for stream in found.values():
        with memory.use(stream):
            (doubled, _) = program(example, example)
        wrong += not bool((torch.from_dlpack(doubled) == 3).all())
    return {"wrong": wrong, "of": sorted(found)}


def _of_cupy() -> Any:
    cupy: Any = importlib.import_module("cupy")
    stream = cupy.cuda.Stream(non_blocking=True)
    return stream if hasattr(stream, "__cuda_stream__") else stream.ptr


def _of_cuda_core() -> Any:
    try:
        core: Any = importlib.import_module("cuda.core")
        core.Device  # noqa: B018  # older releases have it elsewhere
    except (ImportError, AttributeError):
        core = importlib.import_module("cuda.core.experimental")
    device = core.Device(0)
    device.set_current()
    return device.create_stream()


def exhausted() -> dict[str, Any]:
    """Ask for more than there is, and go on."""
    from bundler import OutOfDeviceMemory
    from bundler.runtime import DeviceMemory

    memory, told = DeviceMemory(), {}
    _, total = memory.info()
    held = memory.allocate("uint8", (1 << 28,))
    try:
        memory.allocate("uint8", (total,))
    except OutOfDeviceMemory as error:
        told = {"asked": error.asked, "free": error.free, "total": error.total}
    right = told.get("asked") == told.get("total") == total and told["free"] < total
    del held
    again = memory.integers([1, 2, 3])
    return {"wrong": int(not right) + (memory.array(again).tolist() != [1, 2, 3]), **told}


def pinned() -> dict[str, Any]:
    """Copy to the GPU and back, both ways without a wait in between."""
    import numpy as np

    from bundler.runtime import DeviceMemory

    memory, size = DeviceMemory(), 1 << 28
    there, back = memory.pinned(size), memory.pinned(size)
    np.frombuffer(there.buffer, "uint32")[:] = np.arange(size // 4, dtype="uint32")
    tensor = memory.allocate("uint32", (size // 4,))
    started = time.perf_counter()
    memory.copy(tensor, there)
    memory.copy(back, tensor)
    returned_s = time.perf_counter() - started
    memory.synchronize()
    taken_s = time.perf_counter() - started
    given, found = (np.frombuffer(one.buffer, "uint32") for one in (there, back))
    return {
        "wrong": int(not np.array_equal(given, found)),
        "gigabytes_a_second": round(2 * size / taken_s / 1e9, 1),
        "returned_after_us": round(returned_s * 1e6, 1),
    }


def weights() -> dict[str, Any]:
    """Load a file of weights of 1 GiB, and compare what is on the GPU then."""
    import torch

    from bundler.runtime import DeviceMemory

    count, width = 64, _WEIGHT_BYTES // 64 // 2
    # Whole numbers, whose sums bfloat16 has exactly.
    tensors = {f"w{n}": torch.randint(-2, 3, (width,)).bfloat16() for n in range(count)}

    class Sum(torch.nn.Module):  # type: ignore[misc]  # torch is not read
        def __init__(self) -> None:
            super().__init__()
            for name in tensors:
                self.register_buffer(name, torch.zeros(width, dtype=torch.bfloat16))

        def forward(self, x: Any) -> Any:
            for name in tensors:
                x = x + getattr(self, name)
            return x

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.safetensors")
        importlib.import_module("safetensors.torch").save_file(tensors, path)
        x = torch.zeros(width, dtype=torch.bfloat16, device="cuda")
        memory = DeviceMemory()
        started = time.perf_counter()
        built = _loaded(Sum(), x, memory=memory, weights=path)
        (found,) = built(x)
        taken_s = time.perf_counter() - started
        loading_s = _loading_s(path, built.plan, memory)
    expected = sum(one.cuda().float() for one in tensors.values())
    return {
        "wrong": int(not torch.equal(torch.from_dlpack(found).float(), expected)),
        "seconds_with_build": round(taken_s, 2),
        "gigabytes_a_second": round(_WEIGHT_BYTES / loading_s / 1e9, 1),
    }


def _loading_s(path: Path, plan: Any, memory: Any) -> float:
    from bundler.runtime.program.program_weights import bound_weights

    started = time.perf_counter()
    bound_weights(plan, path, memory, {})
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
