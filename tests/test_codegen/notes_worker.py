# SPDX-License-Identifier: Apache-2.0
"""Runs in Triton's interpreter: prints as JSON the comments of a compiled program, and for each
16-bit float, with and without upcasting, which results have eager torch's bits.
"""

import json

import torch

from bundler.codegen.program import GenerateOptions, generate


def normed(x, w):
    y = torch.nn.functional.layer_norm(x, (64,))
    return torch.softmax(torch.mm(y * 2, w).relu(), -1)


def arithmetic(a, b):
    c = (a * b + a) * b - a
    return torch.sigmoid(c) * b, (a * a + b).sum(-1) * a[:, 0], torch.softmax(a * b, -1)


def comments():
    programs = []
    options = {"programs": programs, "workers": 1, "keep": False}
    torch.compile(normed, backend="triton_bundler", options=options)(
        torch.zeros(8, 64), torch.zeros(64, 32)
    )
    return [line for program in programs for (one,) in program.comments.values() for line in one]


def equal_bits(dtype, upcast):
    torch.manual_seed(0)
    inputs = [torch.randn(16, 96).to(dtype) for _ in range(2)]
    program = generate(arithmetic, inputs, options=GenerateOptions(upcast=upcast))
    found = zip(program.run(*inputs), arithmetic(*inputs), strict=True)
    return [torch.equal(result, expected) for result, expected in found]


if __name__ == "__main__":
    bits = {
        f"{dtype} {upcast}": equal_bits(dtype, upcast)
        for dtype in (torch.float16, torch.bfloat16)
        for upcast in (True, False)
    }
    print(json.dumps({"comments": comments(), "bits": bits}))
