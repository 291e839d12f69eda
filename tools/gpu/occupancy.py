# SPDX-License-Identifier: Apache-2.0
"""Compares the occupancy that reports show with what CUDA's driver says, for kernels built for this
GPU.

    python -m tools.gpu occupancy [BUNDLE...] [--results DIR]

Without a bundle it builds those of examples/kernels.py, which needs Triton and no torch.  Exit
status 1 when any differs; the result goes to docs/results/gpu-occupancy.json.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bundler.format.bundle import Bundle
from bundler.format.entries import Kernel
from bundler.lifecycle.binary_resources import read_resources
from bundler.runtime.tuning.occupancy import block_occupancy
from tools.shared import measurement
from tools.shared.processes import ROOT

_CAPABILITY_MAJOR, _CAPABILITY_MINOR, _MAX_DYNAMIC_SHARED = 75, 76, 8
_BUILD_TIMEOUT_S = 300


def main() -> int:
    """Compare every kernel, print the table, write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundles", nargs="*", type=Path)
    parser.add_argument(
        "--results", type=Path, default=measurement.RESULTS, help="where gpu-occupancy.json goes"
    )
    options = parser.parse_args()
    cuda, arch = _device()
    with tempfile.TemporaryDirectory(prefix="gpu-occupancy.") as folder:
        rows = [
            row
            for path in options.bundles or [_built(Path(folder), arch)]
            for row in _rows(cuda, path, arch)
        ]
    for row in rows:
        print(f"{'ok  ' if row['ok'] else 'FAIL'}  {row['work']:<60}  {row['found']}")
    print(f"\nwritten to {measurement.save('gpu-occupancy', {'rows': rows}, options.results)}")
    return 0 if rows and all(row["ok"] for row in rows) else 1


def _device() -> tuple[Any, str]:
    cuda = ctypes.CDLL("libcuda.so.1")
    _check(cuda.cuInit(0), "cuInit")
    context, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    _check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0), "cuDevicePrimaryCtxRetain")
    _check(cuda.cuCtxSetCurrent(context), "cuCtxSetCurrent")
    for value, attribute in ((major, _CAPABILITY_MAJOR), (minor, _CAPABILITY_MINOR)):
        _check(cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, 0), "cuDeviceGetAttribute")
    return cuda, f"{major.value}{minor.value}"


def _built(folder: Path, arch: str) -> Path:
    path = folder / "examples.tbundle"
    words = [
        sys.executable,
        "-m",
        "bundler",
        "build",
        str(ROOT / "examples" / "kernels.py"),
        "--target",
        f"cuda:{arch}",
        "-o",
        str(path),
    ]
    subprocess.run(words, check=True, timeout=_BUILD_TIMEOUT_S, stdout=subprocess.DEVNULL, cwd=ROOT)
    return path


def _rows(cuda: Any, path: Path, arch: str) -> list[dict[str, Any]]:
    with Bundle.load(path) as bundle:
        return [
            _row(cuda, bundle, kernel)
            for kernel in bundle.kernels
            if str(kernel.target) == f"cuda:{arch}"
        ]


def _row(cuda: Any, bundle: Bundle, kernel: Kernel) -> dict[str, Any]:
    binary = bytes(bundle.read(kernel.binary))
    taken = read_resources(binary, kernel.spec.entry)
    ours = block_occupancy(
        kernel.target,
        kernel.spec.num_warps,
        taken.registers,
        taken.shared_bytes,
        kernel.spec.shared_bytes,
    )
    module, function, blocks = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
    _check(cuda.cuModuleLoadData(ctypes.byref(module), binary), "cuModuleLoadData")
    _check(
        cuda.cuModuleGetFunction(ctypes.byref(function), module, kernel.spec.entry.encode()),
        "cuModuleGetFunction",
    )
    _check(
        cuda.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, kernel.spec.shared_bytes),
        "cuFuncSetAttribute",
    )
    threads, shared = (
        kernel.spec.num_warps * kernel.target.warp_size,
        ctypes.c_size_t(kernel.spec.shared_bytes),
    )
    _check(
        cuda.cuOccupancyMaxActiveBlocksPerMultiprocessor(
            ctypes.byref(blocks), function, threads, shared
        ),
        "cuOccupancy…",
    )
    _check(cuda.cuModuleUnload(module), "cuModuleUnload")
    told = ours.blocks if ours is not None else None
    return {
        "work": (
            f"{kernel.name}, {kernel.spec.num_warps} warps, {taken.registers} registers,"
            f" {kernel.spec.shared_bytes} bytes shared"
        ),
        "ok": told == blocks.value,
        "found": (
            f"{told} blocks, the driver says {blocks.value}; held back by"
            f" {ours.limit if ours is not None else 'what is not known'}"
        ),
    }


def _check(status: int, what: str) -> None:
    if status:
        raise SystemExit(f"{what} failed with {status}")


if __name__ == "__main__":
    sys.exit(main())
