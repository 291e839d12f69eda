# SPDX-License-Identifier: Apache-2.0
"""Values that a program's host computes of sizes: Python's own numbers, and nothing but
arithmetic.
"""

import math

import pytest

from bundler.errors import ConfigError
from bundler.runtime.program.host_values import host_value, value_names

SIZES = {"ks0": 7, "ks1": 2, "fs0": 0.3}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("(1.0 / ks0)", 1.0 / 7),
        ("(ks0 / ks1)", 3.5),
        ("(ks0 ** -0.5)", 7**-0.5),
        ("sqrt(ks0)", math.sqrt(7)),
        ("trunc((float(ks0) * 1.7))", 11),
        ("floor((fs0 * -5))", -2),
        ("round((ks0 / 2))", 4),
        ("max(ks0, (fs0 * 100.0))", 30.0),
        ("where((ks0 > 5), ks1, ks0)", 2),
        ("((ks0 > 5) and (not (ks1 == 3)))", True),
        ("(ks0 ** ks1)", 49),
        ("(-ks0 // 2)", -4),
    ],
)
def test_a_value_is_python_s(text, expected):
    """Type and value are those that the user's own expression would have."""
    found = host_value(text, SIZES)
    assert (type(found), found) == (type(expected), expected)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "ks0.real",
        "ks0[0]",
        "[ks0]",
        "'a'",
        "open(ks0)",
        "max(ks0)",
        "max(*[1, 2])",
        "(1 < ks0 < 9)",
        "lambda: 1",
        "9 ** 9 ** 9",
        "1 << 1000",
        "1 / (ks0 - 7)",
        "sqrt(-ks0)",
        "(-ks0) ** 0.5",
        "ks9",
        "-" * 200 + "ks0",
        "1" * 5000,
        "1j",
    ],
)
def test_anything_else_is_refused_by_a_typed_error(text):
    """A plan may come from anybody: no name is looked up, no number grows without bounds, nothing
    of Python's own errors leaks.
    """
    with pytest.raises(ConfigError):
        host_value(text, SIZES)


def test_names_are_those_of_sizes():
    """Functions are none."""
    assert value_names("max(ks0, sqrt(fs0))") == {"ks0", "fs0"}
