# SPDX-License-Identifier: Apache-2.0
"""Compares what `mission_launch` left with what torch computes from the same inputs, in their
dtypes and in float64.

    python -m tools.codegen.mission_compare BUNDLES OUTPUTS [NAME ...]

Prints JSON: by graph, how far ours and torch's own results are from float64, in tolerances.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from bundler import Bundle
from bundler.format.opaque_files import program_name
from bundler.runtime.program.program_plan import ProgramPlan, read_plan
from tools.codegen.compared_graphs import GRAPHS
from tools.codegen.plain_inputs import arrays
from tools.codegen.tensor_distance import distance

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main() -> int:
    """Compare each graph whose results are there."""
    bundles, outputs, *names = sys.argv[1:]
    found = {}
    for path in sorted(Path(bundles).glob("*.tbundle")):
        if (not names or path.stem in names) and (Path(outputs) / f"{path.stem}.0").exists():
            bundle = Bundle.load(path)
            entry = next(one for one in bundle.opaque if program_name(one.path) is not None)
            plan = read_plan(bundle.read(entry.artifact))
            try:
                with torch.no_grad():
                    found[path.stem] = _compared(path.stem, plan, Path(outputs))
            except Exception as error:  # noqa: BLE001  # as in the launching process
                found[path.stem] = {"error": f"{type(error).__name__}: {error}"[:1000]}
    print(json.dumps({"graphs": found}))
    return 0


def _compared(name: str, plan: ProgramPlan, folder: Path) -> dict[str, Any]:
    own, wide = (_by_torch(name, plan, wide=wide) for wide in (False, True))
    got = [_read(folder / f"{name}.{number}", like) for number, like in enumerate(own)]
    exact = [other.to(one.dtype) for one, other in zip(own, wide, strict=True)]
    return {
        "off": max(distance(one, other) for one, other in zip(got, exact, strict=True)),
        "off_torch": max(distance(one, other) for one, other in zip(own, exact, strict=True)),
    }


def _by_torch(name: str, plan: ProgramPlan, *, wide: bool) -> list[torch.Tensor]:
    given = []
    for values, one in zip(arrays(name, plan), plan.inputs, strict=True):
        assert one.spec is not None
        tensor = torch.from_numpy(values).to(DEVICE)
        tensor = tensor.view(torch.bfloat16) if one.spec.dtype == "bfloat16" else tensor
        given.append(tensor.double() if wide and tensor.is_floating_point() else tensor)
    # torch shows it nowhere else
    leaves = torch.utils._pytree.tree_leaves(GRAPHS[name][0](*given))  # noqa: SLF001
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _read(path: Path, like: torch.Tensor) -> torch.Tensor:
    """Return a result as a tensor of torch: its layout is in a file beside its bytes."""
    dtype, sizes, strides = json.loads(path.with_suffix(f"{path.suffix}.json").read_text())
    flat = torch.frombuffer(bytearray(path.read_bytes()), dtype=getattr(torch, dtype))
    found = flat.as_strided(sizes, strides).to(DEVICE)
    return found.view(torch.bool) if like.dtype is torch.bool else found


if __name__ == "__main__":
    sys.exit(main())
