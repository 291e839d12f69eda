# SPDX-License-Identifier: Apache-2.0
"""Writes on where a prompt ends, by the bundle and the weights that `llama.py` made: with neither
torch nor Triton, on any GPU that the bundle was built for.

    python examples/llama_run.py llama.tbundle llama.safetensors --prompt 1,2,3 --tokens 64

Needs numpy, safetensors and the GPU's driver.  Prints tokens, and times as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import numpy as np

import bundler.runtime

PREFILL, WORDS = "prefill_", "model.words.weight"


class Conversation:
    """Tokens, their number, keys and values, which stay on the device, where they are.

    Kernels read and write where tokens and their number say, and assert nothing, so what the host
    gives is looked at here.

    Args:
        programs: of the bundle, by name.
        memory: of the device.
    """

    def __init__(self, programs: dict[str, Any], memory: Any) -> None:
        self.memory, self.programs = memory, programs
        plan = programs["decode"].plan
        weights = {name: one for one in plan.weights.values() for name in one.names}
        self.words, self.count = int(weights[WORDS].spec.sizes[0]), 0
        specs = [item.spec for item in plan.inputs]
        self.state = [memory.allocate(spec.dtype, spec.sizes) for spec in specs]
        for tensor in self.state:
            memory.fill(tensor)  # what nobody wrote is multiplied by 0, and must not be a NaN

    def begin(self, prompt: list[int]) -> Any:
        """Read a prompt; returns the logits of the token behind it.

        Raises:
            ValueError: it is empty, or longer than the largest bucket.
        """
        buckets = [int(name[len(PREFILL) :]) for name in self.programs if name.startswith(PREFILL)]
        fitting = [bucket for bucket in buckets if 0 < len(prompt) <= bucket]
        if not fitting:
            raise ValueError(f"a prompt: expected 1 to {max(buckets)} tokens, got {len(prompt)}")
        self.write(prompt)
        return self.step(f"{PREFILL}{min(fitting)}")

    def write(self, tokens: list[int]) -> None:
        """Write tokens in place of all that there are.

        Raises:
            ValueError: there are none, or more than there is room for, or one is no word.
        """
        (room,) = self.state[0].shape
        if not 0 < len(tokens) <= room:
            raise ValueError(f"a conversation: expected 1 to {room} tokens, got {len(tokens)}")
        for place, token in enumerate(tokens):
            if not 0 <= token < self.words:
                raise ValueError(f"token {place}: expected 0 to {self.words - 1}, got {token}")
        self.count = len(tokens)
        row = np.zeros(room, "int64")
        row[: len(tokens)] = tokens
        for target, values in zip(self.state, (row, np.full(1, len(tokens))), strict=False):
            self.memory.copy(target, self.memory.put(values))

    def step(self, name: str = "decode") -> Any:
        """Run a program, which appends a token; returns the logits that it was chosen by.

        Raises:
            ValueError: there is no room for one more.
        """
        (room,) = self.state[0].shape
        if not 0 < self.count < room:
            raise ValueError(f"a step: expected 1 to {room - 1} tokens before it, got {self.count}")
        self.count += 1
        (logits,) = self.programs[name](*self.state)
        return logits

    def tokens(self, count: int) -> list[int]:
        """Return the first tokens, once the device has come so far."""
        found: list[int] = self.memory.array(self.state[0]).tolist()[:count]
        return found


def loaded(bundle: str, weights: str, memory: Any) -> dict[str, Any]:
    """Return the programs of a bundle, which have one copy of each weight."""
    return bundler.runtime.load_programs(bundle, memory=memory, weights=weights, graphs=["decode"])


def main() -> None:
    """Generate, and tell what it took."""
    line = argparse.ArgumentParser(description=__doc__)
    line.add_argument("bundle")
    line.add_argument("weights")
    line.add_argument("--prompt", default="1,2,3,4,5,6,7,8", help="numbers of tokens")
    line.add_argument("--tokens", type=int, default=64)
    options = line.parse_args()
    prompt = [int(one) for one in options.prompt.split(",")]
    memory = bundler.runtime.DeviceMemory()
    free = memory.info()[0]
    talk = Conversation(loaded(options.bundle, options.weights, memory), memory)
    if len(prompt) + options.tokens > talk.state[0].shape[0]:
        line.error(f"prompt and answer have at most {talk.state[0].shape[0]} tokens together")
    talk.begin(prompt)
    talk.tokens(len(prompt) + 1)
    first = time.time()
    for _ in range(options.tokens - 1):
        talk.step()
    answer = talk.tokens(len(prompt) + options.tokens)[len(prompt) :]
    facts = {
        "tokens": answer,
        "first_token_at": first,
        "ms_a_token": (time.time() - first) / max(options.tokens - 1, 1) * 1e3,
        "memory_bytes": free - memory.info()[0],
        "graph_launches": talk.programs["decode"].graph_use.replays,
        "imported": [name for name in ("torch", "triton") if sys.modules.get(name) is not None],
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
