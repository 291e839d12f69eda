# SPDX-License-Identifier: Apache-2.0
"""Runs the kernels of random functions with random blocks, in memory that has a border around each
tensor.

`python mask_worker.py SOURCES FIRST COUNT` prints, as JSON, what is wrong by seed: results that
differ from torch's, which a read of a border leads to too, and borders that were written.
"""

import json
import random
import sys
import warnings

import torch
from random_graphs import checked, drawn, function, inputs

from bundler.codegen.program import GenerateOptions, generate
from bundler.runtime.heuristics.block_limits import pow2_up
from bundler.toolchain.torch_memory import TorchMemory

BORDER = 64
BLOCKS = (1, 2, 4, 16, 64, 256)
WIDE_ROWS = (2, 8, 64)


def bordered(sizes, strides, dtype):
    """Return a tensor in the middle of memory that holds NaN, or a number that no result has, and
    that memory.
    """
    reach = (
        sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) + 1
        if all(sizes)
        else 0
    )
    fill = float("nan") if dtype.is_floating_point else dtype != torch.bool and 77
    memory = torch.full((reach + 2 * BORDER,), fill, dtype=dtype)
    return memory.as_strided(sizes, strides, BORDER), memory


def once(tensor):
    """Return the elements that a tensor has in memory, those that it repeats once."""
    return tensor[tuple(slice(None) if stride else slice(0, 1) for stride in tensor.stride())]


class BorderedMemory(TorchMemory):
    """Allocates tensors with borders, and remembers them."""

    def __init__(self):
        super().__init__("cpu")
        self.made = []

    def allocate(self, dtype, sizes, strides):
        tensor, memory = bordered(sizes, strides, getattr(torch, dtype))
        self.made.append((memory, memory.clone()))
        return tensor

    def written(self):
        """Return how many elements of borders were written."""
        count = 0
        for memory, before in self.made:
            for part in (slice(0, BORDER), slice(len(memory) - BORDER, None)):
                one, other = memory[part], before[part]
                same = (one == other) | (one != one) & (other != other)
                count += int((~same).sum())
        return count


def launcher(modules, chance):
    """Return what launches a kernel with blocks that are drawn."""

    def launch(name, arguments, _sizes):
        fn = modules[name].fn
        names = fn.arg_names[: len(arguments)]
        sizes = {
            n.replace("numel", ""): value
            for n, value in zip(names, arguments, strict=True)
            if "numel" in n
        }
        # No candidate has a block that is larger than a power of two can be for the size
        # (`test_program_texts` has the test of that).  Rows of a part of a shared launch are no
        # argument; those that are looped over are longer than these blocks.
        blocks = {}
        for n in fn.arg_names[len(arguments) :]:
            if "BLOCK" in n:
                drawn_size = chance.choice(WIDE_ROWS if n.startswith("R") else BLOCKS)
                size = sizes.get(n.replace("BLOCK", "").lower(), max(WIDE_ROWS))
                blocks[n] = min(drawn_size, pow2_up(size))
        parts = [n.removeprefix("XBLOCK_") for n in blocks if n.startswith("XBLOCK_")]
        if parts:
            programs = (
                sizes.get(f"y_{n}", 1) * -(-sizes[f"x_{n}"] // blocks[f"XBLOCK_{n}"]) for n in parts
            )
            grid = (sum(programs),)
        else:
            grid = tuple(
                -(-sizes.get(axis, 1) // blocks.get(f"{axis.upper()}BLOCK", 1)) for axis in "xyz"
            )
        fn[grid](*arguments, **blocks)

    return launch


def problem(seed, sources):
    """Return what is wrong with the kernels of one function."""
    chance = random.Random(seed)
    description = drawn(seed)
    program = generate(
        function(description), inputs(description), options=GenerateOptions(sources=sources)
    )
    memory = BorderedMemory()
    given = []
    for tensor in inputs(description):
        inside, around = bordered(tuple(tensor.shape), tensor.stride(), tensor.dtype)
        once(inside).copy_(once(tensor))
        memory.made.append((around, around.clone()))
        given.append(inside)
    results = program.runner(memory, launcher(program.modules, chance))(*given)
    written = memory.written()
    return (
        f"{written} elements beside tensors were written"
        if written
        else checked(description, results)
    )


def main(sources, first, count):
    warnings.simplefilter("ignore")
    found = {}
    for seed in range(int(first), int(first) + int(count)):
        try:
            wrong = problem(seed, sources)
        except Exception as error:  # noqa: BLE001  (whatever is raised is the finding)
            wrong = f"{type(error).__name__}: {error}"[:500]
        if wrong:
            found[seed] = wrong
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
