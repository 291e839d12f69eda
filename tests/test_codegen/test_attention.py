# SPDX-License-Identifier: Apache-2.0
"""Attention that is written as products and a softmax becomes torch's, where the numbers stay."""

import operator
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional  # noqa: E402

from bundler.codegen.attention import with_attention  # noqa: E402

SIZES = {"query": (2, 4, 6, 16), "key": (2, 4, 10, 16), "value": (2, 4, 10, 16)}


def scaled(query: Any, key: Any, value: Any) -> Any:
    return torch.softmax(torch.matmul(query, key.transpose(-2, -1)) * 0.25, dim=-1) @ value


def divided(query: Any, key: Any, value: Any) -> Any:
    return ((query @ key.transpose(2, 3)) / 4).softmax(-1).matmul(value).transpose(1, 2).flatten(2)


def of_three_dimensions(query: Any, key: Any, value: Any) -> Any:
    query, key, value = (one.flatten(0, 1) for one in (query, key, value))
    weights = functional.softmax(torch.bmm(query, key.transpose(1, 2)), dim=-1)
    return torch.bmm(functional.dropout(weights, 0.1, training=False), value).view(2, 4, 6, 16)


def in_float32(query: Any, key: Any, value: Any) -> Any:
    scores = torch.matmul(query, key.transpose(2, 3)) * 0.25
    return functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype) @ value


def viewed(query: Any, key: Any, value: Any) -> Any:
    return ((query @ key.transpose(-2, -1)).softmax(-1) @ value).view(8, 6, 16)


def masked(query: Any, key: Any, value: Any) -> Any:
    mask = torch.full((6, 10), torch.finfo(query.dtype).min).triu(5)
    return (query @ key.transpose(-2, -1) / 4 + mask).softmax(-1) @ value


def masked_in_four_dimensions(query: Any, key: Any, value: Any) -> Any:
    mask = torch.full((2, 1, 6, 10), -1e9).triu(5)
    query, key, value = (one.flatten(0, 1) for one in (query, key, value))
    scores = torch.bmm(query * 0.25, key.transpose(1, 2)).view(2, 4, 6, 10) + mask
    weights = functional.softmax(scores.view(8, 6, 10), dim=-1)
    return torch.bmm(weights, value).view(2, 4, 6, 16)


def with_learned_bias(query: Any, key: Any, value: Any) -> Any:
    return (query @ key.transpose(-2, -1) + key[0, 0, :, 0]).softmax(-1) @ value


def with_wider_mask(query: Any, key: Any, value: Any) -> Any:
    mask = torch.ones(2, 4, 6, 10)
    return (query[:1] @ key[:1].transpose(-2, -1) + mask).softmax(-1) @ value[:1]


def with_weights(query: Any, key: Any, value: Any) -> Any:
    weights = (query @ key.transpose(-2, -1)).softmax(-1)
    return weights @ value, weights


def over_rows(query: Any, key: Any, value: Any) -> Any:
    return (query @ key.transpose(-2, -1)).softmax(-2) @ value


def of_one_head_for_all(query: Any, key: Any, value: Any) -> Any:
    return (query @ key[:, :1].transpose(-2, -1)).softmax(-1) @ value[:, :1]


def not_turned(query: Any, key: Any, value: Any) -> Any:
    return (query @ key.reshape(2, 4, 16, 10)).softmax(-1) @ value


def with_dropout(query: Any, key: Any, value: Any) -> Any:
    return functional.dropout((query @ key.transpose(-2, -1)).softmax(-1), 0.5) @ value


def changed_between(query: Any, key: Any, value: Any) -> Any:
    key = key.clone()
    scores = query @ key.transpose(-2, -1)
    key.mul_(0)
    return scores.softmax(-1) @ value


def written_between(query: Any, key: Any, value: Any) -> Any:
    query = query.clone()
    weights = (query @ key.transpose(-2, -1)).softmax(-1)
    query[0] = 0.0
    return weights @ value


def without_gradient_of_scores(query: Any, key: Any, value: Any) -> Any:
    with torch.no_grad():
        weights = (query @ key.transpose(-2, -1)).softmax(-1)
    return weights @ value


def traced(function: Callable[..., Any], inputs: list[Any]) -> Any:
    """Return the graph that Dynamo hands to a backend."""
    found: list[Any] = []
    torch._dynamo.reset()
    torch.compile(function, backend=lambda module, _: found.append(module) or module)(*inputs)
    return found[0]


def run(module: Any, inputs: list[Any]) -> Any:
    """Return a graph's one result; it takes its inputs in the order in which they were read."""
    named = dict(zip(SIZES, inputs, strict=True))
    names = [node.target for node in module.graph.find_nodes(op="placeholder")]
    return module(*(named[name.removeprefix("L_").removesuffix("_")] for name in names))[0]


def inputs_of(dtype: Any = None) -> list[Any]:
    torch.manual_seed(0)
    made = [torch.randn(sizes, dtype=dtype) for sizes in SIZES.values()]
    return [one.requires_grad_() for one in made]


def attention_calls(module: Any) -> int:
    return sum(
        node.target is functional.scaled_dot_product_attention for node in module.graph.nodes
    )


@pytest.mark.parametrize(
    "function",
    [
        scaled,
        divided,
        of_three_dimensions,
        in_float32,
        viewed,
        masked,
        masked_in_four_dimensions,
    ],
)
def test_attention_of_products_is_called_with_the_same_numbers(
    function: Callable[..., Any],
) -> None:
    inputs = inputs_of()
    module = with_attention(traced(function, inputs))
    expected, result = function(*inputs), run(module, inputs)
    assert attention_calls(module) == 1
    assert not any("softmax" in str(node.target) for node in module.graph.nodes)
    torch.testing.assert_close(result, expected)
    for mine, theirs in zip(
        torch.autograd.grad(result.sin().sum(), inputs),
        torch.autograd.grad(expected.sin().sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


def test_bfloat16_is_no_further_from_the_truth_than_products_are() -> None:
    inputs = inputs_of(torch.bfloat16)
    module = with_attention(traced(in_float32, inputs))
    exact = in_float32(*(one.double() for one in inputs)).float()
    result, products = run(module, inputs), in_float32(*inputs)
    assert attention_calls(module) == 1
    assert result.dtype == torch.bfloat16
    assert (result - exact).abs().max() <= 1.5 * (products - exact).abs().max()


def test_who_reads_sizes_alone_reads_no_weights() -> None:
    """Models compare the sizes of scores and result with what they expect."""
    inputs = inputs_of()
    module = traced(scaled, inputs)
    products = module.graph.find_nodes(op="call_function", target=torch.matmul)
    with module.graph.inserting_after(products[0]):
        sizes = module.graph.call_method("size", (products[0],))
    with module.graph.inserting_after(sizes):
        module.graph.call_function(operator.not_, (sizes,))
    module = with_attention(module)
    assert attention_calls(module) == 1
    torch.testing.assert_close(run(module, inputs), scaled(*inputs))


def test_what_is_changed_in_place_beside_it_is_changed_still() -> None:
    """Batch norms count their batches so, and nobody in the graph reads the counter."""
    counter = torch.zeros((), dtype=torch.long)

    def counted(query: Any, key: Any, value: Any) -> Any:
        counter.add_(1)
        return scaled(query, key, value)

    module = with_attention(traced(counted, inputs_of()))
    assert attention_calls(module) == 1
    assert [node.target for node in module.graph.nodes].count("add_") == 1


@pytest.mark.parametrize(
    "function",
    [
        changed_between,
        written_between,
        without_gradient_of_scores,
        with_learned_bias,
        with_wider_mask,
        with_weights,
        over_rows,
        of_one_head_for_all,
        not_turned,
        with_dropout,
    ],
)
def test_what_torchs_attention_would_compute_otherwise_stays(function: Callable[..., Any]) -> None:
    module = traced(function, inputs_of())
    assert with_attention(module) is module


def test_deterministic_algorithms_keep_the_products() -> None:
    module = traced(scaled, inputs_of())
    torch.use_deterministic_algorithms(True)
    try:
        assert with_attention(module) is module
    finally:
        torch.use_deterministic_algorithms(False)
