# SPDX-License-Identifier: Apache-2.0
"""Launches each case by Triton, then without it from the bundle, by both launch paths, and compares
bit for bit.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from tools.gpu import cases
from tools.gpu.cases import Case, Maker
from tools.gpu.steps import Row, Step
from tools.shared import measurement
from tools.shared.measurement import check
from tools.shared.processes import ROOT

PATHS = ("compiled", "ctypes")


def rows(step: Step, folder: Path) -> tuple[list[Row], dict[str, Any]]:
    """Record, launch again in a process that never sees Triton, and return a row for each case."""
    bundle = str(folder / "launch.tbundle")
    by_triton = step(folder, "launch-record", bundle, cache=folder / "launch-cache")
    ours = {
        path: step(folder, "launch-static", bundle, path, cache=folder / "nothing")
        for path in PATHS
    }
    found = []
    for name, expected in by_triton["numbers"].items():
        got = {
            f"{path}, {how}": ours[path]["numbers"].get(name, {}).get(how)
            for path in PATHS
            for how in WAYS
        }
        wrong = [f"{way}: {value}" for way, value in got.items() if value != expected]
        words = "; ".join(wrong) or f"the same bits as Triton's launch, by {len(got)} ways"
        found.append(check(f"launch: {name}", not wrong, words))
    for name, reason in by_triton["refused"].items():
        found.append(check(f"launch: {name}", False, f"Triton itself does not launch it: {reason}"))
    binaries = by_triton["binaries"]
    same = all(ours[path]["binaries"] == binaries for path in PATHS)
    without = [name for path in PATHS for name in ours[path]["imported"]]
    said = f"imported: {without}" if without else "triton was not imported"
    launched = "launch: the binaries are those that Triton launched"
    found += [
        check(launched, same, f"{len(binaries)} binaries, by digest"),
        check("launch: no compiler in the process", not without, said),
    ]
    return found, {"launch": {"triton": by_triton, **ours}}


def record(path: str) -> dict[str, Any]:
    """Launch every case by Triton under a recording; returns digests of the outputs and of the
    binaries.
    """
    import torch
    from triton.tools.tensor_descriptor import TensorDescriptor

    import bundler

    kernels = load_kernels()
    allocate_scratch()
    numbers: dict[str, Any] = {}
    refused: dict[str, str] = {}
    with bundler.recording() as recording:
        for case in cases.cases(torch.cuda.device_count()):
            kernel = getattr(kernels, case.kernel)
            try:
                numbers[case.row] = digest_of(torch, case, TensorDescriptor, kernel)
            except Exception as error:  # noqa: BLE001  # a case that this Triton cannot compile is a row of the table
                refused[case.row] = f"{type(error).__name__}: {error}".splitlines()[0]
    bundle = recording.collect()
    bundle.save(path)
    return {
        "numbers": numbers,
        "refused": refused,
        "binaries": sorted(k.binary.digest for k in bundle.kernels),
    }


WAYS = ("dispatcher", "handle")


def static(path: str, launch_path: str) -> dict[str, Any]:
    """Launch every case from the bundle by one launch path, by dispatcher and by handle."""
    import torch

    driver = open_driver(launch_path)
    from bundler import Bundle
    from bundler.runtime.launch.bundle_kernels import load

    numbers: dict[str, Any] = {}
    with Bundle.load(path) as bundle, load(bundle, driver=driver) as kernels:
        for case in cases.cases(torch.cuda.device_count()):
            kernel = kernels[case.kernel]
            numbers[case.row] = {}
            for way, launch in (("dispatcher", kernel), ("handle", _ByHandle(kernel, driver))):
                try:
                    numbers[case.row][way] = digest_of(torch, case, cases.Descriptor, launch)
                except Exception as error:  # noqa: BLE001  # the row says what went wrong; the other cases go on
                    numbers[case.row][way] = f"{type(error).__name__}: {error}"
        binaries = sorted(kernel.binary.digest for kernel in bundle.kernels)
    return {
        "numbers": numbers,
        "binaries": binaries,
        "launch_path": driver.launch_path,
        "imported": [name for name in ("triton",) if name in sys.modules],
    }


class _ByHandle:
    """Launches a kernel by handle, where Triton and the dispatcher are called with a grid in
    brackets.
    """

    def __init__(self, kernel: Any, driver: Any) -> None:
        self._kernel, self._driver = kernel, driver

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            handle = self._kernel.handle(*arguments, **options)
            # options are not for values()
            names = {argument.name for argument in handle._arguments}  # noqa: SLF001
            values = handle.values(
                *arguments, **{name: value for name, value in options.items() if name in names}
            )
            stream = self._driver.stream(self._driver.device())
            # the first call is checked, the second is not
            for _ in range(1 if self._kernel.name == "histogram" else 2):
                handle.launch(*grid, *[1] * (3 - len(grid)), stream, *values)

        return launch


def digest_of(torch: Any, case: Case, descriptor: Any, kernel: Any) -> str:
    """Launch one case; returns a digest of its outputs."""
    device = 1 if case.where == "device" else 0
    with torch.cuda.device(device):
        maker = Maker(torch, device, descriptor)
        arguments = case.arguments(maker)
        torch.cuda.synchronize()
        other = torch.cuda.Stream() if case.where == "stream" else None
        with torch.cuda.stream(other):
            kernel[case.grid](*arguments, **case.options)
        torch.cuda.synchronize()
        output = arguments[case.output]
        tensor = output if isinstance(output, torch.Tensor) else output.base
        data = tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(data).hexdigest()


def open_driver(launch_path: str) -> Any:
    """Return a driver for CUDA that takes one of the two launch paths."""
    from bundler.runtime.launch.drivers.cuda import CudaDriver

    return CudaDriver(compiled=launch_path == "compiled")


def build_extensions() -> None:
    """Compile our extensions in the checkout, unless all are there."""
    if not all(measurement.extensions().values()):
        line = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        subprocess.run(line, check=True, cwd=ROOT)


def allocate_scratch() -> None:
    """Give Triton's kernels the memory that they ask for at a launch."""
    import torch
    import triton

    triton.set_allocator(
        lambda size, _align, _stream: torch.empty(size, device="cuda", dtype=torch.int8)
    )


def load_kernels() -> ModuleType:
    """Import the kernels; only processes with Triton may."""
    from tools.gpu import kernels

    return kernels


STEPS: dict[str, Step] = {"launch-record": record, "launch-static": static}
