# SPDX-License-Identifier: Apache-2.0
"""Functions whose kernels a reader can follow; their texts lie in `golden/`.

`python golden_programs.py` writes the texts anew, to be read before they are committed.
"""

from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from bundler.codegen.program import GenerateOptions, ProgramPolicy, generate

GOLDEN = Path(__file__).resolve().parent / "golden"


def full(*sizes, dtype=torch.float32):
    return torch.zeros(sizes, dtype=dtype)


PROGRAMS = {
    "add_relu": (lambda a, b: (a + b).relu(), (full(1000), full(1000))),
    "broadcast": (lambda a, b: a * b, (full(64, 32), full(32))),
    "transpose": (lambda a, b: a + b.t(), (full(48, 40), full(40, 48))),
    "half_gate": (
        lambda a, b: F.silu(a) * b,
        (full(96, dtype=torch.float16), full(96, dtype=torch.bfloat16)),
    ),
    "embedding": (F.embedding, (full(8, dtype=torch.int64), full(100, 16))),
    "padding": (lambda a: F.pad(a, (1, 2)), (full(4, 30),)),
    "row_sum": (lambda a: a.sum(1), (full(10, 40),)),
    "softmax": (lambda a: torch.softmax(a, -1), (full(128, 512),)),
    "changing_softmax": (lambda a: torch.softmax(a * 2, -1), (full(128, 300),)),
    "long_layer_norm": (lambda a, w: F.layer_norm(a, (3000,), w), (full(16, 3000), full(3000))),
    "dropout": (lambda a: torch.ops.aten.native_dropout(a, 0.25, True), (full(1000),)),
    "argmax": (lambda a: a.argmax(1), (full(7, 50),)),
    "siblings": (
        lambda x, q, k, v: tuple(F.linear(x, w) for w in (q, k, v)),
        (*(full(*s, dtype=torch.bfloat16) for s in ((100, 256), *[(512, 256)] * 3)),),
    ),
    "linear_gate": (
        lambda x, w, b, c: F.silu(F.linear(x, w, b)) * c,
        (*(full(*s, dtype=torch.bfloat16) for s in ((100, 256), (512, 256), (512,), (100, 512))),),
    ),
    "scores": (lambda q, k: q @ k.transpose(1, 2) * 0.125, (full(6, 128, 64), full(6, 50, 64))),
    "quantized": (
        lambda x, w, s: F.linear(x, w.to(x.dtype) * s),
        (
            full(4, 100, dtype=torch.bfloat16),
            full(64, 100, dtype=torch.int8),
            full(64, 1, dtype=torch.bfloat16),
        ),
    ),
    "decode": (
        lambda x, w: F.relu(F.linear(x, w)),
        (full(1, 4096, dtype=torch.bfloat16), full(64, 4096, dtype=torch.bfloat16)),
    ),
    "scaled": (
        lambda a, b, one, other: torch._scaled_mm(a, b.t(), one, other, out_dtype=torch.bfloat16),
        (
            *(full(*s).to(torch.float8_e4m3fn) for s in ((32, 64), (48, 64))),
            full(32, 1),
            full(1, 48),
        ),
    ),
    "patches": (
        lambda x, w, b, p: F.conv2d(x, w, b, stride=4).flatten(2).transpose(1, 2) + p,
        (full(2, 3, 32, 32), full(64, 3, 4, 4), full(64), full(64, 64)),
    ),
    "attention": (
        partial(F.scaled_dot_product_attention, is_causal=True),
        tuple(full(2, 4, 256, 80, dtype=torch.bfloat16) for _ in range(3)),
    ),
    "decoding": (
        partial(F.scaled_dot_product_attention, enable_gqa=True),
        (full(1, 8, 1, 64), *(full(1, 2, 1000, 64) for _ in range(2)), full(1, 1000)),
    ),
    "lists": (
        lambda *given: torch._foreach_norm(given),
        (full(3000), full(40), full(5, 8), full(40)),
    ),
}
# With tensor descriptors.
TILES = {
    "tiles": (lambda a, b, c: a + b.t() + c, (full(48, 40), full(40, 48), full(40))),
    "tiles_of_rows": (lambda a: a - a.amax(1, keepdim=True), (full(10, 44),)),
    "tiles_of_long_rows": (lambda a: a[:, 8:].argmax(1), (full(10, 4408),)),
}
# Whose products and attention are kernels.
TEMPLATES = {
    *("attention", "decoding", "linear_gate", "scores"),
    *("quantized", "decode", "scaled", "siblings", "patches"),
}
# Whose sizes change from call to call.
CHANGING = {"changing_softmax"}


def text_of(name):
    """Return the text of a program's kernels, without imports and metadata that all kernels
    have.
    """
    function, inputs = {**PROGRAMS, **TILES}[name]
    options = GenerateOptions(
        templates="all" if name in TEMPLATES else "none",
        policy=ProgramPolicy(use_tensor_descriptor=name in TILES),
    )
    program = generate(function, inputs, dynamic=name in CHANGING, options=options)
    assert not program.fallbacks, program.fallbacks
    return "\n".join(source[source.index("\n\n\n") + 3 :] for source in program.sources.values())


def main():
    """Write the texts."""
    GOLDEN.mkdir(exist_ok=True)
    for name in (*PROGRAMS, *TILES):
        (GOLDEN / f"{name}.txt").write_text(text_of(name))


if __name__ == "__main__":
    main()
