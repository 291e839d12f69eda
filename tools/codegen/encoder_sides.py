# SPDX-License-Identifier: Apache-2.0
"""The sides of `without-torch` that have torch, for encoders with random weights in bfloat16: BERT
of transformers in its own size, of rows with a mask, and a ViT of timm on images of 224 pixels.

    python -m tools.codegen.encoder_sides build|eager|compiled FOLDER NAME [--tiny] [--target T]
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tools.codegen.encoder_launch import BUNDLE, INPUTS, WEIGHTS, timed
from tools.codegen.llama_sides import DEVICE, target

LENGTH, WORDS, PIXELS = 512, 30522, 224


class Words(nn.Module):  # type: ignore[misc]  # torch is not followed
    """BERT: tokens, and which of them are none."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        transformers = importlib.import_module("transformers")
        config = transformers.BertConfig(num_hidden_layers=layers, vocab_size=WORDS)
        self.model = transformers.BertModel(config, add_pooling_layer=False)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return each token's numbers."""
        seen = mask[:, None, None, :].expand(-1, 1, mask.shape[1], -1)
        found: Tensor = self.model(input_ids=tokens, attention_mask=seen).last_hidden_state
        return found.float()

    def example(self, batch: int) -> list[Tensor]:
        """Return rows of several lengths."""
        tokens = torch.randint(0, WORDS, (batch, LENGTH))
        return [tokens, torch.arange(LENGTH) < torch.randint(1, LENGTH + 1, (batch, 1))]


class Images(nn.Module):  # type: ignore[misc]  # torch is not followed
    """ViT: images become classes."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.model = importlib.import_module("timm").create_model(
            "vit_base_patch16_224", depth=layers
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return a number for each class."""
        found: Tensor = self.model(images.to(self.model.cls_token.dtype))
        return found.float()

    def example(self, batch: int) -> list[Tensor]:
        """Return images."""
        return [torch.randn(batch, 3, PIXELS, PIXELS)]


#: The model by its name, and how many rows or images a call has.
MODELS: dict[str, tuple[Any, int]] = {
    "bert-base": (Words, 1),
    "vit-base": (Images, 1),
    "bert-base-8": (Words, 8),
    "vit-base-8": (Images, 8),
}
LAYERS, TINY = 12, 1
# Standard deviation of what is added to each weight.
NOISE = 0.02


def main() -> int:
    """Do what one side does, and print what it found as JSON."""
    line = argparse.ArgumentParser(description=__doc__)
    line.add_argument("side", choices=tuple(SIDES))
    line.add_argument("folder", type=Path)
    line.add_argument("name", choices=tuple(MODELS))
    line.add_argument("--tiny", action="store_true")
    line.add_argument("--target", action="append", help="of the bundle; without one this GPU")
    options = line.parse_args()
    with torch.no_grad(), torch.device(DEVICE):
        kind, batch = MODELS[options.name]
        model = kind(TINY if options.tiny else LAYERS)
    model = model.to(torch.bfloat16).eval().requires_grad_(False)
    with torch.no_grad():
        more = (batch, options.target) if options.side == "build" else ()
        print(json.dumps(SIDES[options.side](model, options.folder, *more)))
    return 0


def build(
    model: Any, folder: Path, batch: int, targets: Sequence[str] | None = None
) -> dict[str, Any]:
    """Write random weights, an example, and the bundle: for this GPU, where no other is named."""
    from bundler.codegen import GenerateOptions, generate

    torch.manual_seed(0)
    for weight in model.parameters():
        # Nothing of the model is left without an effect, as a bias of zeros would be.
        weight.add_(torch.randn_like(weight) * NOISE)
    inputs = model.example(batch)
    np.savez(folder / INPUTS, *[one.numpy() for one in inputs])
    started = time.perf_counter()
    program = generate(
        model,
        [one.to(DEVICE) for one in inputs],
        device=None if DEVICE == "cuda" else "cuda",
        # `Words.example` draws no token that is none.
        options=GenerateOptions(name="model", templates="all", assert_indices=False),
    )
    generated = time.perf_counter()
    program.build(targets or [target()]).save(folder / BUNDLE)
    compiled_s = time.perf_counter() - generated
    # Buffers that a state dict leaves out, too.
    kept = {program.plan.weights[name].names[0]: one for name, one in program.constants.items()}
    save_file({**model.state_dict(), **kept}, folder / WEIGHTS)
    return {
        "generate_s": generated - started,
        "compile_s": compiled_s,
        "bundle_bytes": (folder / BUNDLE).stat().st_size,
        "weight_bytes": (folder / WEIGHTS).stat().st_size,
    }


def eager(model: Any, folder: Path) -> dict[str, Any]:
    """Save what eager mode has, and float64; what the model computes in float32 whatever its
    weights are, it computes in float64, too.
    """
    inputs = _loaded(model, folder)
    np.save(folder / "eager.npy", model(*inputs).cpu().numpy())
    ms = _timed(model, inputs)
    with patch.object(Tensor, "float", Tensor.double):
        np.save(folder / "float64.npy", model.double()(*inputs).cpu().numpy())
    return {"ms": ms}


def compiled(model: Any, folder: Path) -> dict[str, Any]:
    """The same by torch.compile, whose caches are where the environment says."""
    inputs = _loaded(model, folder)
    step = torch.compile(model, mode="reduce-overhead")
    step(*inputs).cpu()
    first = time.time()
    ms = _timed(step, inputs)
    memory = torch.cuda.max_memory_reserved() if DEVICE == "cuda" else 0
    return {"first_at": first, "ms": ms, "memory_bytes": memory}


def _loaded(model: Any, folder: Path) -> list[Tensor]:
    """Give the model its weights, and return the example."""
    model.load_state_dict(load_file(folder / WEIGHTS), strict=False)
    with np.load(folder / INPUTS) as given:
        return [torch.from_numpy(one).to(DEVICE) for one in given.values()]


def _timed(step: Any, inputs: list[Tensor]) -> float:
    wait: Callable[[], Any] = torch.cuda.synchronize if DEVICE == "cuda" else lambda: None
    return timed(lambda: step(*inputs), wait)


SIDES: dict[str, Callable[..., dict[str, Any]]] = {
    "build": build,
    "eager": eager,
    "compiled": compiled,
}

if __name__ == "__main__":
    sys.exit(main())
