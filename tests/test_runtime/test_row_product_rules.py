# SPDX-License-Identifier: Apache-2.0
"""Candidates for products of one row with a matrix: they fit, keep enough loads on their way, and
enough programs busy.
"""

import pytest

from bundler.runtime.heuristics.facts import Device, Facts, Policy, ReductionHint, Setting
from bundler.runtime.heuristics.reduction_rules import (
    persistent_reduction_configs,
    reduction_configs,
)

H200, MI300 = Device("cuda", 132, major=9), Device("hip", 304, warp_size=64)


def setting(device=H200, products=1, policy=None):
    facts = Facts(num_load=1 + products, num_reduction=products, row_products=True)
    return Setting(device, facts, policy or Policy())


def found(rows, length, given):
    """Return the candidates, as the kernel's kind has them, each with the row block that it has."""
    inner = ReductionHint.INNER
    if length > 1024:
        return reduction_configs({"x": rows, "r0_": length}, given, hint=inner)
    configs = persistent_reduction_configs({"x": rows, "r0_": length}, given, hint=inner)
    assert all("R0_BLOCK" not in config.kwargs for config in configs)
    return [config.with_kwargs(R0_BLOCK=length) for config in configs]


@pytest.mark.parametrize("device", [H200, MI300], ids=str)
@pytest.mark.parametrize("products", [1, 2, 5])
@pytest.mark.parametrize("length", [8, 64, 1024, 2048, 16384])
@pytest.mark.parametrize("rows", [1, 64, 2048, 1 << 17])
def test_each_candidate_fits_sizes_and_registers(device, products, length, rows):
    """Blocks are no longer than sizes; a thread has several elements to load where there are some,
    and of all products together no more than its registers hold.
    """
    candidates = found(rows, length, setting(device, products))
    assert candidates
    assert len(set(candidates)) == len(candidates)
    for config in candidates:
        x, r = config.kwargs["XBLOCK"], config.kwargs["R0_BLOCK"]
        threads = config.num_warps * device.warp_size
        assert 1 <= x <= rows
        assert r <= length
        assert x * r * products >= 16 * threads or config.num_warps == 1
        assert x == 1 or x * r * products <= 32 * threads


@pytest.mark.parametrize(("rows", "most"), [(64, 1), (1024, 2), (1 << 17, 2)])
def test_few_rows_are_shared_by_many_programs(rows, most):
    """Else a part of the device is idle."""
    first = found(rows, 4096, setting())[0]
    assert first.kwargs["XBLOCK"] <= most
    assert rows // first.kwargs["XBLOCK"] >= min(rows, 264) / 2


def test_one_candidate_where_equal_numbers_are_asked_for():
    """Another block adds up in another order."""
    (only,) = found(2048, 8192, setting(policy=Policy(deterministic=True)))
    assert only == found(2048, 8192, setting())[0]
