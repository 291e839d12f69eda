# SPDX-License-Identifier: Apache-2.0
"""The sides of `without-torch` that have torch, a process each: the build, eager mode with float64,
and torch.compile.

    python -m tools.codegen.llama_sides build|eager|compiled FOLDER [--tiny]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tools.codegen.llama_files import ANSWER, BUNDLE, PROMPT, TOKENS, WEIGHTS, example
from tools.codegen.llama_launch import ROUNDS, WARM

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main() -> int:
    """Do what one side does, and print what it found as JSON."""
    line = argparse.ArgumentParser(description=__doc__)
    line.add_argument("side", choices=tuple(SIDES))
    line.add_argument("folder", type=Path)
    line.add_argument("--tiny", action="store_true")
    options = line.parse_args()
    llama = example("llama")
    shape = llama.TINY if options.tiny else llama.ONE_B
    with torch.no_grad():
        print(json.dumps(SIDES[options.side](llama, shape, options.folder)))
    return 0


def build(llama: Any, shape: Any, folder: Path) -> dict[str, Any]:
    """Write random weights, and the bundle for this GPU."""
    from bundler.codegen import build_programs

    model = llama.model_of(shape, device=DEVICE)
    weights = {f"model.{name}": one.cpu() for name, one in model.state_dict().items()}
    save_file(weights, folder / WEIGHTS)
    started = time.perf_counter()
    programs = llama.programs_of(model, None if DEVICE == "cuda" else "cuda")
    generated = time.perf_counter()
    build_programs(programs, [target()], workers=None).save(folder / BUNDLE)
    return {
        "generate_s": generated - started,
        "compile_s": time.perf_counter() - generated,
        "bundle_bytes": (folder / BUNDLE).stat().st_size,
        "weight_bytes": (folder / WEIGHTS).stat().st_size,
    }


def target() -> str:
    """Return the target that bundles are built for."""
    if DEVICE == "cpu":
        return "cuda:90"
    if torch.version.hip is not None:
        arch = torch.cuda.get_device_properties(0).gcnArchName.partition(":")[0]
        return f"hip:{arch}"
    return "cuda:{}{}".format(*torch.cuda.get_device_capability())


def eager(llama: Any, shape: Any, folder: Path) -> dict[str, Any]:
    """Generate tokens, greedy, and save them and the logits of each step; those of float64 with the
    same tokens, too.
    """
    model = _loaded(llama, shape, folder)
    state = _begun(llama, shape)
    logits = _logits(llama.entries_of(model), state)
    tokens = state[0].tolist()[: PROMPT + ANSWER]
    (folder / TOKENS).write_text(json.dumps(tokens))
    np.save(folder / "eager.npy", logits)
    ms = _timed(llama, shape, llama.entries_of(model))
    # What the model computes in float32 whatever its weights are, it computes in float64, too.
    torch.set_default_dtype(torch.float64)
    with patch.object(torch.Tensor, "float", torch.Tensor.double):
        wide = llama.entries_of(model.double())
        state = [one.double() if one.is_floating_point() else one for one in _begun(llama, shape)]
        np.save(folder / "float64.npy", _logits(wide, state, tokens))
    return {"ms_a_token": ms}


def _logits(entries: dict[str, Any], state: list[Any], tokens: list[int] | None = None) -> Any:
    """Return the logits of each step; with some tokens, of these, whatever comes out."""
    found = [entries[_prefill(entries)](*state).cpu().numpy()]
    for number in range(PROMPT + 1, PROMPT + ANSWER):
        if tokens is not None:
            state[0][:number] = torch.tensor(tokens[:number], device=state[0].device)
        found.append(entries["decode"](*state).cpu().numpy())
    return np.concatenate(found)


def compiled(llama: Any, shape: Any, folder: Path) -> dict[str, Any]:
    """The same by torch.compile, whose caches are where the environment says."""
    entries = llama.entries_of(_loaded(llama, shape, folder))
    prefill = _prefill(entries)
    entries[prefill] = torch.compile(entries[prefill])
    state = _begun(llama, shape)
    entries[prefill](*state)
    state[0].tolist()
    first = time.time()
    entries["decode"] = torch.compile(entries["decode"], mode="reduce-overhead")
    ms = _timed(llama, shape, entries)
    memory = torch.cuda.max_memory_reserved() if DEVICE == "cuda" else 0
    return {"first_token_at": first, "ms_a_token": ms, "memory_bytes": memory}


def _timed(llama: Any, shape: Any, entries: dict[str, Any]) -> float:
    """Return milliseconds a token of a conversation, the least of some, as `llama_launch` has
    it.
    """
    state, found = _begun(llama, shape), []
    start = [one.clone() for one in state[:2]]
    for one in state:
        torch._dynamo.mark_static_address(one)  # noqa: SLF001  # else graphs would not change them
    wait: Callable[[], Any] = torch.cuda.synchronize if DEVICE == "cuda" else lambda: None
    for _ in range(ROUNDS):
        for target, value in zip(state, start, strict=False):
            target.copy_(value)
        entries[_prefill(entries)](*state)
        for _ in range(WARM):
            entries["decode"](*state)
        wait()
        started = time.perf_counter()
        for _ in range(ANSWER - WARM):
            entries["decode"](*state)
        wait()
        found.append((time.perf_counter() - started) / (ANSWER - WARM) * 1e3)
    return min(found)


def _prefill(entries: dict[str, Any]) -> str:
    return min((name for name in entries if name != "decode"), key=lambda name: int(name[8:]))


def _loaded(llama: Any, shape: Any, folder: Path) -> Any:
    with torch.device("meta"):
        model = llama.Llama(shape).requires_grad_(False)
    weights = load_file(folder / WEIGHTS, device=DEVICE)
    named = {name.removeprefix("model."): one for name, one in weights.items()}
    model.load_state_dict(named, assign=True)
    return model.requires_grad_(False)


def _begun(llama: Any, shape: Any) -> list[Any]:
    """Return the state of a conversation that begins with the prompt."""
    tokens, count, *caches = llama.state(shape, DEVICE)
    generator = torch.Generator().manual_seed(1)
    tokens[:PROMPT] = torch.randint(0, shape.words, (PROMPT,), generator=generator)
    return [tokens, count.fill_(PROMPT), *caches]


SIDES: dict[str, Callable[[Any, Any, Path], dict[str, Any]]] = {
    "build": build,
    "eager": eager,
    "compiled": compiled,
}

if __name__ == "__main__":
    sys.exit(main())
