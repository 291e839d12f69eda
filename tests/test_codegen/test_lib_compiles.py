# SPDX-License-Identifier: Apache-2.0
"""The functions that kernels call compile for each kind of GPU, without one."""

from pathlib import Path

import pytest

KERNELS = Path(__file__).with_name("lib_kernels.py")
TARGETS = ("cuda:80", "cuda:90", "cuda:100", "hip:gfx942")
BLOCK = {"ROWS": 4, "COLUMNS": 256}
CASES = {
    "extremes": ({"values": "*fp32", "out": "*fp32"}, BLOCK),
    "extremes of doubles": ({"values": "*fp64", "out": "*fp64"}, BLOCK),
    "arguments_of_extremes": ({"values": "*fp32", "out": "*fp32", "indices": "*i32"}, BLOCK),
    "arguments_of_extremes of integers": (
        {"values": "*i64", "out": "*i64", "indices": "*i32"},
        BLOCK,
    ),
    "of_bits": ({"values": "*i32", "flags": "*i1", "out": "*i32", "out_flags": "*i8"}, BLOCK),
    "moments": ({"values": "*fp32", "out": "*fp32", "count": "i32"}, {**BLOCK, "LOOP": True}),
    "moments of doubles": (
        {"values": "*fp64", "out": "*fp64", "count": "i32"},
        {**BLOCK, "LOOP": False},
    ),
    "online_softmax": ({"values": "*fp32", "out": "*fp32", "count": "i32"}, BLOCK),
    "sort_rows": (
        {"keys": "*i64", "out": "*i64"},
        {**BLOCK, "FIRST": 64},
    ),
    "sort_rows of which some are wanted": (
        {"keys": "*i32", "out": "*i32"},
        {**BLOCK, "FIRST": 3},
    ),
    "search": (
        {
            "values": "*fp32",
            "boundaries": "*fp32",
            "sorter": "*i64",
            "out": "*i64",
            "count": "i32",
            "size": "i32",
            "stride": "i32",
        },
        {"RIGHT": True, "SORTED": False, "WIDE": True, "BLOCK": 256},
    ),
    "error_function": ({"values": "*fp32", "out": "*fp32"}, {"COUNT": 256}),
    "divide": ({"a": "*i64", "b": "*i64", "out": "*i64"}, {"COUNT": 256}),
    "of_indices": ({"out": "*i64", "size": "i64"}, {"COUNT": 256}),
    "draw": (
        {
            "seed": "*i64",
            "offsets": "*i64",
            "low": "*i64",
            "high": "*i64",
            "uniform": "*fp32",
            "normal": "*fp32",
            "integers": "*i64",
            "theirs": "*fp32",
        },
        {"COUNT": 256},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", CASES)
def test_functions_compile_for_every_target(compile_for, case, target):
    """A kernel that calls the function compiles for the GPU."""
    types, constants = CASES[case]
    assert compile_for(KERNELS, case.partition(" ")[0], types, constants, target)


def test_a_reduction_compiles(compile_for):
    """The softmax of a looped reduction compiles for one GPU."""
    types, constants = CASES["online_softmax"]
    assert compile_for(KERNELS, "online_softmax", types, constants, "cuda:90")
