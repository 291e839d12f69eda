# SPDX-License-Identifier: Apache-2.0
"""Candidates for a matrix product written as a reduction over two axes, and a third for batches.

`reduction_rules` and `persistent_rules` use them for kernels that call themselves native matrix
products.
"""

from __future__ import annotations

from dataclasses import replace

from bundler.errors import ConfigError
from bundler.runtime.configs import Config, unique
from bundler.runtime.heuristics.block_limits import MAX_TENSOR_ELEMENTS, MIN_DOT_EDGE, product, rows
from bundler.runtime.heuristics.facts import Setting, SizeHints

# x, y, r, warps, stages
_TILES = (
    (32, 32, 16, 2, 1),
    (32, 32, 128, 4, 2),
    (32, 64, 32, 8, 5),
    (64, 32, 32, 8, 5),
    (64, 32, 128, 4, 5),
    (64, 64, 16, 4, 2),
    (64, 64, 32, 4, 2),
    (64, 64, 64, 8, 3),
    (64, 64, 128, 4, 5),
    (64, 128, 32, 4, 3),
    (64, 128, 32, 8, 4),
    (64, 128, 64, 4, 3),
    (64, 128, 128, 4, 4),
    (128, 64, 32, 4, 3),
    (128, 64, 32, 8, 4),
    (128, 128, 32, 8, 2),
    (128, 128, 32, 4, 3),
    (128, 128, 64, 4, 3),
    (128, 128, 64, 8, 5),
)
_PLAIN, _BATCHED = 3, 4


def matmul_configs(hints: SizeHints) -> list[Config]:
    """Return the candidates of a product that loops over its inner dimension."""
    return [
        _tile(hints, x, y, warps, stages).with_kwargs(R0_BLOCK=r)
        for x, y, r, warps, stages in _TILES
    ]


def persistent_matmul_configs(hints: SizeHints, setting: Setting) -> list[Config]:
    """Return the candidates of a product that holds its whole inner dimension, cut to what one
    tensor may have.
    """
    given = setting.facts.native_matmul_rblock
    r = max(rows(hints), MIN_DOT_EDGE) if given is None else given
    tiles = unique(_tile(hints, x, y, warps, stages) for x, y, _, warps, stages in _TILES)
    cut = [_cut(config, r) for config in tiles]
    return unique(config for config in cut if _elements(config, r) <= MAX_TENSOR_ELEMENTS)


def _tile(hints: SizeHints, x: int, y: int, warps: int, stages: int) -> Config:
    if len(hints) not in {_PLAIN, _BATCHED}:
        raise ConfigError(
            "matrix product: expected sizes for x, y and r0_, and z for batches; got"
            f" {dict(hints)}",
            got=dict(hints),
        )
    batch = {"ZBLOCK": 1} if len(hints) == _BATCHED else {}
    return Config(
        {"XBLOCK": x, "YBLOCK": y, **batch},
        num_warps=warps,
        num_stages=stages,
        origin=f"matrix product {x}x{y}",
    )


def _elements(config: Config, r: int) -> int:
    return product(config.kwargs.values()) * r


def _cut(config: Config, r: int) -> Config:
    while _elements(config, r) > MAX_TENSOR_ELEMENTS:
        long = max(("XBLOCK", "YBLOCK"), key=lambda name: int(config.kwargs[name]))
        if config.kwargs[long] <= MIN_DOT_EDGE:
            break
        config = replace(config, kwargs={**config.kwargs, long: config.kwargs[long] // 2})
    return config
