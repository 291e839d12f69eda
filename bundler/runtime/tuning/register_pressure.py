# SPDX-License-Identifier: Apache-2.0
"""`rescaled`: a config with half the reduction block, for kernels that use so many registers that too few blocks run at once.

`Search` adds such configs to the candidates that it measures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from bundler.runtime.configs import Config
from bundler.runtime.tuning.occupancy import Occupancy

SMALLEST_R = 64
LEAST_MAJOR = 8


def r_blocks(config: Config) -> dict[str, int]:
    """Return the reduction blocks of a config; RSPLIT and the like are none."""
    return {
        n: v
        for n, v in config.kwargs.items()
        if n.startswith("R") and n.endswith("BLOCK") and type(v) is int
    }


def may_rescale(
    kind: str, size_hints: Mapping[str, int], device: Occupancy, *, deterministic: bool
) -> bool:
    """Whether a kernel's configs are looked at: a looped reduction with size hints, on a GPU that is new enough.

    Persistent reductions have no block to halve; in deterministic mode the order of additions must not depend on registers.
    """
    return (
        kind == "reduction"
        and bool(size_hints)
        and not deterministic
        and (device.backend == "hip" or (device.backend == "cuda" and device.major >= LEAST_MAJOR))
        and device.registers > 0
        and device.threads > 0
    )


def rescaled(
    config: Config,
    registers: int | None,
    size_hints: Mapping[str, int],
    device: Occupancy,
    min_r: int = 1,
) -> Config | None:
    """Return the config with its largest reduction block halved, None when it is fine as it is.

    Args:
        config: what was compiled.
        registers: registers of a thread in its binary; None when that is not known.
        size_hints: sizes by axis.
        device: what a multiprocessor has.
        min_r: the smallest block of the first reduced axis (`R0_BLOCK`) allowed.
    """
    blocks = r_blocks(config)
    if (
        registers is None
        or not config.dynamic_scale
        or math.prod(blocks.values()) <= SMALLEST_R
        or not blocks
    ):
        return None
    if registers <= device.registers // device.threads:
        return None
    running = max(1, device.registers // (registers * device.warp_size * config.num_warps))
    needed = -(-size_hints.get("x", 1) // config.kwargs.get("XBLOCK", 1))
    if needed <= running * device.multiprocessors:
        return None
    largest = max(blocks, key=lambda name: blocks[name])
    half = blocks[largest] // 2
    least = min_r if largest == "R0_BLOCK" else 1
    return config.with_kwargs(**{largest: half}) if half >= max(least, 1) else None
