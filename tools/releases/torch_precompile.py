# SPDX-License-Identifier: Apache-2.0
"""Carries a pair of files of torch.compiler.precompile in a bundle: `python -m tools.releases
torch-precompile DIRECTORY`.

The pair is captured below Inductor's cache directory, beside kernels; the directory is packed, and
restored to another path, once with `trust="kernels"` and once with `trust="code"`.  The restored
pair is loaded in a new process, which computes the same.  It prints one JSON.  `python -m
tools.releases torch` runs it.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import bundler
from tools.shared import processes, programs

FOLDER, SOURCE, CACHE = "precompile", "model.py", "model.cache"
# torch 2.15 has it first.
_MODULE = "torch.compiler.precompile"
_KEY = "A" * 52


def main() -> int:
    """Carry a pair, or do one step of it in this process."""
    if not programs.run_step({"capture": _capture, "load": _load}):
        parser = programs.parser(__doc__)
        parser.add_argument("directory", type=Path, help="an empty directory to work in")
        print(json.dumps(_carry(parser.parse_args().directory)))
    return 0


def _carry(directory: Path) -> dict[str, Any]:
    if (
        importlib.util.find_spec("torch.compiler") is None
        or importlib.util.find_spec(_MODULE) is None
    ):
        return {"skipped": f"this torch has no {_MODULE}"}
    first, second, untrusted = (directory / name for name in ("first", "second", "untrusted"))
    captured = _step(first, "capture")
    # `pack` takes a directory for Inductor's that has a kernel directory of a device; this one
    # holds a tuning result alone.
    kernels = first / "triton" / "0" / _KEY
    kernels.mkdir(parents=True)
    (kernels / "k.autotune.json").write_text("{}")
    bundle = bundler.pack(first)
    bundler.restore(bundle, untrusted, devices=[0])
    bundler.restore(bundle, second, devices=[0], trust="code")
    names = (SOURCE, CACHE)
    first.rename(directory / "away")
    return {
        "files": {name: (second / FOLDER / name).stat().st_size for name in names},
        "restored_without_trust": [name for name in names if (untrusted / FOLDER / name).exists()],
        "equal_result": _step(second, "load") == captured,
    }


def _step(directory: Path, name: str) -> list[list[float]]:
    directory.mkdir(parents=True, exist_ok=True)
    answer: list[list[float]] = processes.answer(
        "tools.releases",
        "torch-precompile",
        "--step",
        name,
        os.fspath(directory),
        environment={"TORCHINDUCTOR_CACHE_DIR": os.fspath(directory)},
    )
    return answer


def _pair(directory: str) -> tuple[Path, Path]:
    folder = Path(directory, FOLDER)
    folder.mkdir(exist_ok=True)
    return folder / SOURCE, folder / CACHE


def _inputs() -> tuple[Any, Any]:
    import torch

    torch.manual_seed(0)
    return torch.randn(8, 8), torch.randn(8, 8)


def _capture(directory: str) -> Any:
    import torch
    from torch.compiler import precompile

    source, cache = _pair(directory)
    with precompile.capture(torch.matmul, artifact_path=source, cache_path=cache) as capture:
        return capture(*_inputs()).tolist()


def _load(directory: str) -> Any:
    from torch.compiler import precompile

    return precompile.load(*_pair(directory))(*_inputs()).tolist()
