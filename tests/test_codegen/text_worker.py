# SPDX-License-Identifier: Apache-2.0
"""Builds programs of loops without torch, and prints a digest of their texts and plans, so that
interpreters without torch can be compared.
"""

import hashlib
import sys
from types import SimpleNamespace

import sympy

sys.modules["torch"] = None  # whoever imports it fails

from bundler.codegen.loops.lazy_tensors import GraphBuilder  # noqa: E402
from bundler.codegen.loops.loop_nodes import Reference, TensorLayout, contiguous_strides  # noqa: E402
from bundler.codegen.schedule import schedule_program  # noqa: E402


def dense(builder, name, *sizes):
    layout = TensorLayout(
        "float32",
        tuple(map(sympy.sympify, sizes)),
        contiguous_strides(tuple(map(sympy.sympify, sizes))),
    )
    return builder.stored(name, layout, "input")


def mapped(builder, operator, *tensors, at=None):
    """An element-wise operator over tensors, each read at the same indices, or as `at` says."""
    read = at or [lambda i: i] * len(tensors)

    def compute(indices):
        terms = [tensor.at(place(indices)) for tensor, place in zip(tensors, read, strict=True)]
        return builder.pool.operate(operator, *terms, dtype="float32")

    return builder.lazy(tensors[0].sizes, "float32", compute, frozenset({operator}))


def rows(i):
    return (i[0],)


def softmax(builder):
    a = dense(builder, "arg0", 128, 512)
    top = builder.reduce("max", a, [1], "float32", frozenset({"amax"}))
    power = mapped(builder, "exp", mapped(builder, "sub", a, top, at=[lambda i: i, rows]))
    total = builder.reduce("sum", power, [1], "float32", frozenset({"sum"}))
    return mapped(builder, "truediv", power, total, at=[lambda i: i, rows])


def transposed(builder):
    a, b = dense(builder, "arg0", 96, 40), dense(builder, "arg1", 40, 96)
    return mapped(builder, "add", a, b, at=[lambda i: i, lambda i: (i[1], i[0])])


def columns(builder):
    return builder.reduce(
        "welford_m2", dense(builder, "arg0", 4096, 96), [0], "float32", frozenset({"var"})
    )


def changing(builder):
    size = sympy.Symbol("ks0", integer=True, positive=True)
    a = dense(builder, "arg0", 32, size)
    return mapped(
        builder,
        "mul",
        a,
        builder.reduce("sum", a, [1], "float32", frozenset({"sum"})),
        at=[lambda i: i, rows],
    )


digest = hashlib.sha256()
for make in (softmax, transposed, columns, changing):
    builder = GraphBuilder()
    name = builder.realize(make(builder))
    inputs = [name for name, buffer in builder.buffers.items() if buffer.source == "input"]
    graph = SimpleNamespace(
        builder=builder,
        inputs=inputs,
        outputs=[Reference(name, builder.buffers[name].layout)],
        hints={sympy.Symbol("ks0", integer=True, positive=True): 60},
        changed=(),
        values={},
        guards=(),
        names={},
        freed=frozenset(),
        donated=frozenset(),
    )
    built = schedule_program(graph, lambda _: True)
    digest.update(
        repr(([kernel.source for kernel in built.kernels.values()], built.plan.to_json())).encode()
    )
    print(make.__name__, len(built.kernels), file=sys.stderr)
print(digest.hexdigest())
