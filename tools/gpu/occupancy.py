# SPDX-License-Identifier: Apache-2.0
"""Compares the occupancy that reports show with what CUDA's driver says, for kernels built for this
GPU.

    python -m tools.gpu occupancy [BUNDLE...] [--results DIR]

Without a bundle it builds those of examples/kernels.py, which needs Triton and no torch.  Exit
status 1 when any differs; the result goes to docs/results/gpu-occupancy.json.
"""

from __future__ import annotations

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
from tools.gpu.steps import TIMEOUT_S, bundler_command
from tools.shared import measurement, programs
from tools.shared.processes import ROOT

_CAPABILITY_MAJOR, _CAPABILITY_MINOR, _MAX_DYNAMIC_SHARED = 75, 76, 8
_ASK = "cuOccupancyMaxActiveBlocksPerMultiprocessor"


def main() -> int:
    """Compare every kernel, print the table, write the result."""
    parser = programs.parser(
        __doc__, results=(measurement.RESULTS, "where gpu-occupancy.json goes")
    )
    parser.add_argument("bundles", nargs="*", type=Path)
    options = parser.parse_args()
    cuda, arch = _device()
    with tempfile.TemporaryDirectory(prefix="gpu-occupancy.") as folder:
        bundles = options.bundles or [_built(Path(folder), arch)]
        rows = [row for path in bundles for row in _rows(cuda, path, arch)]
    wrong = measurement.report("gpu-occupancy", {"rows": rows}, options.results)
    return 1 if wrong or not rows else 0


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
    path, kernels = folder / "examples.tbundle", ROOT / "examples" / "kernels.py"
    words = ("build", kernels, "--target", f"cuda:{arch}", "-o", path)
    bundler_command(*words, timeout=TIMEOUT_S, stdout=subprocess.DEVNULL)
    return path


def _rows(cuda: Any, path: Path, arch: str) -> list[dict[str, Any]]:
    with Bundle.load(path) as bundle:
        return [
            _row(cuda, bundle, kernel)
            for kernel in bundle.kernels
            if str(kernel.target) == f"cuda:{arch}"
        ]


def _row(cuda: Any, bundle: Bundle, kernel: Kernel) -> dict[str, Any]:
    binary, spec = bytes(bundle.read(kernel.binary)), kernel.spec
    taken = read_resources(binary, spec.entry)
    resources = (spec.num_warps, taken.registers, taken.shared_bytes, spec.shared_bytes)
    ours = block_occupancy(kernel.target, *resources)
    blocks = _blocks(cuda, binary, spec, spec.num_warps * kernel.target.warp_size)
    told, limit = (ours.blocks, ours.limit) if ours is not None else (None, "what is not known")
    needs = f"{spec.num_warps} warps, {taken.registers} registers, {spec.shared_bytes} bytes shared"
    return {
        "work": f"{kernel.name}, {needs}",
        "ok": told == blocks,
        "found": f"{told} blocks, the driver says {blocks}; held back by {limit}",
    }


def _blocks(cuda: Any, binary: bytes, spec: Any, threads: int) -> int:
    """Return how many blocks of a kernel the driver says that fit."""
    module, function, blocks = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
    shared = ctypes.c_size_t(spec.shared_bytes)
    for name, words in (
        ("cuModuleLoadData", (ctypes.byref(module), binary)),
        ("cuModuleGetFunction", (ctypes.byref(function), module, spec.entry.encode())),
        ("cuFuncSetAttribute", (function, _MAX_DYNAMIC_SHARED, spec.shared_bytes)),
        (_ASK, (ctypes.byref(blocks), function, threads, shared)),
        ("cuModuleUnload", (module,)),
    ):
        _check(getattr(cuda, name)(*words), name)
    return blocks.value


def _check(status: int, what: str) -> None:
    if status:
        raise SystemExit(f"{what} failed with {status}")


if __name__ == "__main__":
    sys.exit(main())
