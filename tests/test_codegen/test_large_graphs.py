# SPDX-License-Identifier: Apache-2.0
"""Graphs of thousands of operators: the work grows as the graph does, and none is too deep."""

import sys

import pytest

torch = pytest.importorskip("torch")

from bundler.codegen.program import program_of_graph  # noqa: E402
from bundler.codegen.trace import trace  # noqa: E402


def chain(x, y, length):
    for number in range(length):
        x = torch.sin(x) * 1.5 if number % 2 else x + y
    return x


def scan(x, y, length):
    state, found = torch.zeros(8, 8), []
    for number in range(length):
        state = x[:, number] * state + y[:, number]
        found.append(state.sum(-1))
    return torch.stack(found, 1)


def calls(function, inputs, length):
    """Return how many functions are called to generate a program: work, whatever the machine."""
    module, count = trace(lambda x, y: function(x, y, length), inputs), 0

    def counted(_frame, event, _argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(counted)
    try:
        program_of_graph(module)
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize(
    ("function", "sizes"),
    [(chain, (8, 8)), pytest.param(scan, (8, 192, 8), marks=pytest.mark.slow)],
)
def test_twice_the_graph_is_about_twice_the_work(function, sizes):
    inputs = (torch.zeros(sizes), torch.zeros(sizes))
    calls(function, inputs, 24)  # what is done once
    assert calls(function, inputs, 128) < 2.4 * calls(function, inputs, 64)


def test_a_chain_of_many_operators_is_generated():
    module = trace(lambda x, y: chain(x, y, 600), (torch.zeros(8, 8), torch.zeros(8, 8)))
    assert len(program_of_graph(module).kernels) == 1
