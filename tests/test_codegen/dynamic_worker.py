# SPDX-License-Identifier: Apache-2.0
"""Runs one program with symbolic sizes for several shapes, and prints the largest difference from
torch; TRITON_INTERPRET=1.
"""

import json
import sys

import torch

from bundler.codegen.program import GenerateOptions, generate

SHAPES = ((33, 65), (20, 70), (2, 3))


def function(a, b):
    return (
        (a * 2 + b.t()).relu(),
        torch.softmax(a, -1),
        a.reshape(-1)[:5] + 1,
        a.sum(0),
        torch.cat([a, a + 1]),
        a.mean(),
    )


def inputs(shape):
    return torch.randn(*shape), torch.randn(*shape[::-1])


program = generate(
    function, inputs(SHAPES[0]), dynamic=True, options=GenerateOptions(sources=sys.argv[1])
)
largest = 0.0
for shape in SHAPES:
    given = inputs(shape)
    for found, expected in zip(program.run(*given), function(*given), strict=True):
        assert found.shape == expected.shape, (shape, found.shape, expected.shape)
        largest = max(largest, float((found - expected).abs().max()))
print(json.dumps({"shapes": len(SHAPES), "largest_difference": largest}))
