# SPDX-License-Identifier: Apache-2.0
"""The side of `without-torch` that has neither torch nor Triton: what `examples/llama_run.py` does,
with the tokens of eager torch, and timed.

    python -m tools.codegen.llama_launch FOLDER
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from tools.codegen.llama_files import ANSWER, BUNDLE, PROMPT, TOKENS, WEIGHTS, example

ROUNDS, WARM = 5, 8


def main() -> int:
    """Save the logits of each step, and print times."""
    sys.modules |= dict.fromkeys(("torch", "triton"))  # type: ignore[arg-type]  # importing raises
    line = argparse.ArgumentParser(description=__doc__)
    line.add_argument("folder", type=Path)
    folder = line.parse_args().folder
    import numpy as np

    from bundler.runtime import DeviceMemory

    run, memory = example("llama_run"), DeviceMemory()
    programs = run.loaded(str(folder / BUNDLE), str(folder / WEIGHTS), memory)
    talk = run.Conversation(programs, memory)
    tokens = json.loads((folder / TOKENS).read_text())
    np.save(folder / "ours.npy", np.concatenate(forced(talk, tokens)))
    use = programs["decode"].graph_use
    facts = {
        "ms_a_token": timed(talk, tokens[:PROMPT]),
        "graph_launches": use.replays,
        "graph_refusal": use.refusal,
    }
    print(json.dumps(facts))
    return 0


def forced(talk: Any, tokens: list[int]) -> list[Any]:
    """Return the logits of each step, whatever token comes out, with those of eager torch."""
    found = [talk.memory.array(talk.begin(tokens[:PROMPT]))]
    for number in range(PROMPT + 1, len(tokens)):
        talk.write(tokens[:number])
        found.append(talk.memory.array(talk.step()))
    return found


def timed(talk: Any, prompt: list[int]) -> float:
    """Return milliseconds a token of a conversation, the least of some."""
    found = []
    for _ in range(ROUNDS):
        talk.begin(prompt)
        for _ in range(WARM):
            talk.step()
        talk.memory.synchronize()
        started = time.perf_counter()
        for _ in range(ANSWER - WARM):
            talk.step()
        talk.memory.synchronize()
        found.append((time.perf_counter() - started) / (ANSWER - WARM) * 1e3)
    return min(found)


if __name__ == "__main__":
    sys.exit(main())
