# SPDX-License-Identifier: Apache-2.0
"""`pointwise_configs`: candidates for kernels that compute each element by itself, over one to
three axes.

The decorator `pointwise`, combined kernels and Inductor's generated modules call it.
"""

from __future__ import annotations

from functools import partial

from bundler.errors import ConfigError
from bundler.runtime.configs import Config, unique
from bundler.runtime.heuristics.block_limits import check_hints, max_block, product
from bundler.runtime.heuristics.facts import Setting, SizeHints, TileHint
from bundler.runtime.heuristics.tiles import meet_descriptor_floors, pointwise_tile

_LEAST_BLOCK, _MOST_BLOCK, _PROGRAMS = 256, 1024, 128
# Elements along an axis of which a tile has to have more than one.
_LONG = 16
_FINE = 64  # elements of a warp where more warps may hide latency better


def pointwise_configs(
    hints: SizeHints, setting: Setting, *, tile_hint: TileHint = TileHint.DEFAULT
) -> list[Config]:
    """Return the candidates of a pointwise kernel, the default first.

    Pure: the same arguments give the same list in every process and on every machine.

    Args:
        hints: elements along `x`, `x` and `y`, or `x`, `y` and `z`; powers of two.
        setting: device, facts and policy.
        tile_hint: of a kernel over two axes.

    Raises:
        ConfigError: sizes of other axes or that are no powers of two, or a problem that no grid can
            cover.
    """
    check_hints(hints)
    if setting.facts.no_x_dim or set(hints) != set("xyz"[: len(hints)]):
        raise ConfigError(
            "pointwise: expected sizes for x, x and y, or x, y and z, with a block along x; got"
            f" {dict(hints)}",
            got=dict(hints),
        )
    block = max(_LEAST_BLOCK, min(product(hints.values()) // _PROGRAMS, _MOST_BLOCK))
    rule = (_one_axis, _two_axes, _three_axes)[len(hints) - 1]
    return unique(meet_descriptor_floors(rule(hints, setting, block, tile_hint), setting))


def _one_axis(hints: SizeHints, setting: Setting, block: int, _hint: TileHint) -> list[Config]:
    tile = partial(pointwise_tile, hints, setting)
    if not setting.policy.autotune_pointwise and not setting.policy.max_autotune:
        return [tile(block)]
    configs = [
        tile(block),
        tile(block // 2, per_warp=_FINE),
        *_one_element_each(hints, setting, block),
    ]
    if setting.device.is_hip:
        configs += [
            tile(max_block("x", setting), waves_per_eu=2),
            tile(4096),
            tile(2048, warps=8, stages=2, waves_per_eu=1),
        ]
        if setting.facts.atomic_add:
            configs.append(tile(64, warps=1))
    if setting.device.is_xpu:
        configs.append(tile(32))
    return configs


def _two_axes(hints: SizeHints, setting: Setting, block: int, hint: TileHint) -> list[Config]:
    tile = partial(pointwise_tile, hints, setting)
    device, policy = setting.device, setting.policy
    # A transposition is square, and AMD's and Intel's devices were seen to gain by other tiles.
    settled = hint is TileHint.SQUARE and not (device.is_hip or device.is_xpu)
    if (not policy.autotune_pointwise or settled) and not policy.max_autotune:
        return [tile(32, 32)]
    configs = [
        tile(32, 32),
        tile(64, 64),
        tile(256, 16),
        tile(16, 256),
        tile(block, 1),
        tile(1, block),
    ]
    configs += _one_element_each(hints, setting, block)
    if device.is_hip:
        configs += [tile(64, 32), tile(128, 16), tile(128, 32), tile(32, 512)]
    if device.is_xpu:
        configs += [tile(32, 32, warps=8), tile(4, 256)]
    if setting.facts.crossed and not policy.max_autotune:
        return [config for config in configs if not _is_line(config, hints)]
    return configs


def _is_line(config: Config, hints: SizeHints) -> bool:
    """Whether a tile has one element along an axis that has many: of what lies along that axis each
    program takes some bytes of a sector. On an H200 such tiles took 1.3 to 7 times as long as
    squares, in four kernels that add transposed tensors.
    """
    blocks = {axis: config.kwargs[f"{axis.upper()}BLOCK"] for axis in "xy"}
    return any(block == 1 and hints[axis] >= _LONG for axis, block in blocks.items())


def _three_axes(hints: SizeHints, setting: Setting, block: int, _hint: TileHint) -> list[Config]:
    tile = partial(pointwise_tile, hints, setting)
    if not setting.policy.max_autotune and not setting.device.is_xpu:
        return [tile(16, 16, 16)]
    configs = [tile(16, 16, 16), tile(64, 8, 8), tile(8, 64, 8), tile(8, 8, 64)]
    configs += [tile(block, 1, 1), tile(1, block, 1), tile(1, 1, block)]
    return configs + _one_element_each(hints, setting, block)


def _one_element_each(hints: SizeHints, setting: Setting, block: int) -> list[Config]:
    """Return tiles along each axis in which every thread has about one element; none without the
    hint for it.
    """
    if not setting.facts.one_element_per_thread:
        return []
    axes = range(len(hints))
    tiles = [tuple(block // 4 if axis == long else 1 for axis in axes) for long in axes]
    return [
        pointwise_tile(hints, setting, *tile, per_warp=setting.device.warp_size, min_elem=0)
        for tile in tiles
    ]
