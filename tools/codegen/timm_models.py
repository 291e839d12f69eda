# SPDX-License-Identifier: Apache-2.0
"""Small models of timm with random weights: all of TorchInductor's dashboard, past and present, and
other families; `models` judges them. `timm_models.json` is the table of them.

Names of the dashboard (timm_models_list.txt of pytorch's benchmarks/dynamo) stand for a small
relative of the same architecture: fewer layers, narrower, images of 64 to 224 pixels.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional

CLASSES = 16


class Row(NamedTuple):
    """One model.

    Attributes:
        model: its name in timm.
        pixels: of its images.
        smaller: what is smaller than timm's own.
        blocks: how many of the first are kept, if not all.
        training: the dashboard's tolerance in training, by its timm_models.yaml of today, and its
            list of 60 for the former ones.
        larger: whether the dashboard lets small tensors be further off.
    """

    model: str
    pixels: int
    smaller: dict[str, Any]
    blocks: int | None
    training: float
    larger: bool


def _with_tuples(value: Any) -> Any:
    """Return a value of JSON as timm has it: with tuples in the place of lists."""
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


_TABLE: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text())
# The 18 of the dashboard's list of today in its order, then those of the 60 that came before it.
ROWS: dict[str, Row] = {
    name: Row(
        row.get("model", name),
        row.get("pixels", 64),
        {key: _with_tuples(value) for key, value in row.get("smaller", {}).items()},
        row.get("blocks"),
        row.get("training", 1e-2),
        row.get("larger", False),
    )
    for name, row in (_TABLE["dashboard"] | _TABLE["former"] | _TABLE["others"]).items()
}


def build(name: str, _device: str) -> torch.nn.Module:
    """Return a model with random weights.

    Raises:
        LookupError: this release of timm has no such model.
    """
    timm, row = importlib.import_module("timm"), ROWS[name]
    if not timm.is_model(row.model):
        raise LookupError(f"timm {timm.__version__} has no {row.model}")
    model: torch.nn.Module = timm.create_model(row.model, num_classes=CLASSES, **row.smaller)
    if row.blocks:
        model.blocks = model.blocks[: row.blocks]
    return model


def modes(_name: str) -> tuple[str, ...]:
    """Return what a model is judged in."""
    return ("inference", "training")


def tolerance(name: str, mode: str) -> tuple[float, bool]:
    """Return the dashboard's tolerance for a model, and whether small tensors may be
    further off.
    """
    row = ROWS[name]
    return row.training if mode == "training" else 1e-3, row.larger


def inputs(name: str, batch: int, device: str) -> dict[str, torch.Tensor]:
    """Return an example of `batch` images, on the CPU."""
    row, draw = ROWS[name], torch.Generator().manual_seed(batch)
    halved = device == "cpu" and row.pixels == 64 and "img_size" not in row.smaller
    pixels = 32 if halved else row.pixels
    return {
        "x": torch.randn(batch, 3, pixels, pixels, generator=draw),
        "labels": torch.randint(CLASSES, (batch,), generator=draw),
    }


def loss(outputs: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the number that is differentiated."""
    parts = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    return torch.stack([functional.cross_entropy(one, given["labels"]) for one in parts]).sum()
