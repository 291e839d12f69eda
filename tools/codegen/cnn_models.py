# SPDX-License-Identifier: Apache-2.0
"""Convolutional networks of timm as they are used: whole, on images of their own size; `models
--kind cnn --time` measures them.

The layout of their convolutions decides how long they take, which small models and images of
`timm_models` do not show.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from tools.codegen import timm_models

#: Name in timm -> pixels of its images.
ROWS = {
    "resnet50": 224,
    "tf_efficientnet_b0": 224,
    "mobilenetv3_large_100": 224,
    "densenet121": 224,
    "dm_nfnet_f0": 192,
    "regnety_008": 224,
}
# Images in each of an example's rows, on a GPU.
_IMAGES = 8
_SMALL_PIXELS = 32


def build(name: str, _device: str) -> torch.nn.Module:
    """Return a model with random weights."""
    timm = importlib.import_module("timm")
    model: torch.nn.Module = timm.create_model(name, num_classes=timm_models.CLASSES)
    return model


def modes(_name: str) -> tuple[str, ...]:
    """Return what a model is judged in."""
    return ("inference", "training")


def tolerance(_name: str, mode: str) -> tuple[float, bool]:
    """Return the dashboard's tolerance, and whether small tensors may be further off."""
    return 4e-2 if mode == "training" else 1e-3, True


def inputs(name: str, batch: int, device: str) -> dict[str, torch.Tensor]:
    """Return an example, on the CPU: as many images as a GPU is busy with, or few small ones."""
    small, draw = device == "cpu", torch.Generator().manual_seed(batch)
    count, pixels = (batch, _SMALL_PIXELS) if small else (batch * _IMAGES, ROWS[name])
    return {
        "x": torch.randn(count, 3, pixels, pixels, generator=draw),
        "labels": torch.randint(timm_models.CLASSES, (count,), generator=draw),
    }


def loss(outputs: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the number that is differentiated."""
    return timm_models.loss(outputs, given)
