# SPDX-License-Identifier: Apache-2.0
"""Small models of transformers with random weights: all of TorchInductor's dashboard, and other
architectures; `models` judges them. `transformers_models.json` is the table of them.

Names are the dashboard's (huggingface_models_list.txt of pytorch's benchmarks/dynamo) where it has
the model.  Widths are 128, layers two, heads of 64.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch

Sizes = dict[str, Any]
VOCABULARY = 512
# Tokens of an example, by device: Triton's interpreter is slow.
LENGTHS = {"cuda": 128, "cpu": 8}


class Row(NamedTuple):
    """One model: its class, its configuration, and what it is given.

    Attributes:
        kind: of what it is given, as `inputs` has it: `tokens` come with a label each, `labels` are
            one for each row, `questions` have a start and an end, `padded` a mask of attention.
        modes: what it is judged in.
    """

    model: str
    sizes: Sizes
    kind: str
    modes: tuple[str, ...]


def _sizes(given: Any) -> Any:
    """Return the sizes of a row; those that it is `like` stand in the table by name."""
    if isinstance(given, str):
        return _sizes(_TABLE["sizes"][given])
    base = _sizes(given["like"]) if "like" in given else {}
    own = {key: one for key, one in given.items() if key != "like"}
    return base | {key: _sizes(one) if isinstance(one, dict) else one for key, one in own.items()}


_TABLE: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text())
# Those of the dashboard first, in its order.
ROWS: dict[str, Row] = {
    name: Row(
        row.get("model", name),
        _sizes(row["sizes"]),
        row.get("kind", "tokens"),
        tuple(row.get("modes", ("inference", "training"))),
    )
    for name, row in (_TABLE["dashboard"] | _TABLE["others"]).items()
}

# As huggingface.yaml of the dashboard has them.
HIGHER_TRAINING = frozenset({"MT5ForConditionalGeneration", "BertForMaskedLM"})
HIGHER_INFERENCE = frozenset({"GPT2ForSequenceClassification"})
LARGER_MULTIPLIER = frozenset({"GPT2ForSequenceClassification", "BertForMaskedLM"})


def build(name: str, device: str) -> torch.nn.Module:
    """Return a model with random weights and without dropout.

    Raises:
        LookupError: this release of transformers has no such model.
    """
    row = ROWS[name]
    return built(row.model, _quarter(row.sizes) if device == "cpu" else row.sizes)


def built(name: str, sizes: Sizes) -> torch.nn.Module:
    """Return a model of a class of transformers, whose other sizes are as by default.

    Raises:
        LookupError: this release of transformers has no such class.
    """
    transformers = importlib.import_module("transformers")
    made = getattr(transformers, name, None)
    if made is None:
        raise LookupError(f"transformers {transformers.__version__} has no {name}")
    config = made.config_class(**sizes)
    for part in (config, *(one for one in vars(config).values() if hasattr(one, "to_dict"))):
        for key, value in vars(part).items():
            if "drop" in key and isinstance(value, float):
                setattr(part, key, 0.0)
        if hasattr(part, "use_cache"):
            part.use_cache = False
    model: torch.nn.Module = made(config)
    return model


def _quarter(sizes: Any) -> Any:
    """Return a configuration with a quarter of each size, for the interpreter; what is under 32
    counts things, and images keep their pixels.
    """
    match sizes:
        case dict():
            return {
                key: value if key == "image_size" else _quarter(value)
                for key, value in sizes.items()
            }
        case list():
            return [_quarter(one) for one in sizes]
        case bool() | None:
            return sizes
        case int():
            return sizes // 4 if sizes >= 32 else sizes
        case _:
            return sizes


def modes(name: str) -> tuple[str, ...]:
    """Return what a model is judged in."""
    return ROWS[name].modes


def tolerance(name: str, mode: str) -> tuple[float, bool]:
    """Return the dashboard's tolerance for a model, and whether small tensors may be
    further off.
    """
    higher = name in (HIGHER_TRAINING if mode == "training" else HIGHER_INFERENCE)
    plain, raised = (1e-2, 2e-2) if mode == "training" else (1e-3, 4e-3)
    return raised if higher else plain, name in LARGER_MULTIPLIER


def inputs(name: str, batch: int, device: str) -> dict[str, Any]:
    """Return an example of `batch` rows, on the CPU."""
    vocabulary = VOCABULARY if device == "cuda" else VOCABULARY // 4
    draw = torch.Generator().manual_seed(batch)
    return example(ROWS[name].kind, batch, LENGTHS[device], vocabulary, draw)


def example(
    kind: str, batch: int, length: int, vocabulary: int, draw: torch.Generator
) -> dict[str, Any]:
    """Return what a model of a kind is given, of `batch` rows, on the CPU."""

    def integers(most: int, *shape: int) -> torch.Tensor:
        return torch.randint(most, shape, generator=draw)

    tokens = (
        integers(vocabulary - 3, batch, length) + 3
    )  # the first ones are marks, such as padding
    targets = integers(vocabulary - 3, batch, length) + 3
    pixels = torch.randn(batch, 3, 64, 64, generator=draw)
    return {
        "image": {"pixel_values": pixels, "labels": integers(16, batch)},
        "audio": {
            "input_values": torch.randn(batch, 1600, generator=draw),
            "labels": integers(16, batch),
        },
        "speech": {
            "input_features": torch.randn(
                batch, 16, 64 if vocabulary == VOCABULARY else 16, generator=draw
            ),
            "labels": targets,
        },
        "pair": {"input_ids": tokens, "pixel_values": pixels, "return_loss": True},
        "questions": {
            "input_ids": tokens,
            "start_positions": integers(length, batch),
            "end_positions": integers(length, batch),
        },
        "labels": {"input_ids": tokens, "labels": integers(2, batch)},
        "padded": {
            "input_ids": tokens,
            "labels": targets,
            "attention_mask": (torch.arange(length) <= integers(length, batch)[:, None]).long(),
        },
        "tokens": {"input_ids": tokens, "labels": targets},
    }[kind]


def loss(outputs: Any, _given: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the number that is differentiated."""
    found: torch.Tensor = outputs["loss"]
    return found
