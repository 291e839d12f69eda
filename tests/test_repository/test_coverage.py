# SPDX-License-Identifier: Apache-2.0
"""docs/coverage.md names modules and tests that are there."""

import re
from pathlib import Path

import sympy

from bundler.codegen.kernels.index_text import index_text
from bundler.codegen.kernels.operator_rows import ROWS as OPERATORS

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "coverage.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in TEXT.splitlines()
    if re.match(r"\| ([RCHGSK]\d\d|E\d{3}) \|", line)
]


def test_the_modules_and_tests_are_there():
    """A renamed test or module takes its row along."""
    assert ROWS
    for name, *_, where, held in ROWS:
        for module in re.findall(r"`([^`]+\.py)`", where):
            assert (ROOT / "bundler" / module).is_file(), (name, module)
        for path, test in re.findall(r"`([^`:]+\.py)::(\w+)`", held):
            assert f"\ndef {test}(" in (ROOT / "tests" / path).read_text(), (name, path, test)


def test_operators_and_texts_of_indices_are_there():
    """A row of the reference's operators, and of its printer of indices, is a row of ours; the test
    beside it says that it is right.
    """
    named = [
        cells for cells in ROWS if "test_operators_and_texts_of_indices_are_there" in cells[-1]
    ]
    for row, cell, *_ in named:
        owner, _, element = cell.strip("`").partition(".")
        if owner == "TritonPrinter":
            assert text_of(element), (row, cell)
        else:
            parts = ["frexp_mantissa", "frexp_exponent"] if element == "frexp" else [element]
            assert all(part in OPERATORS for part in parts), (row, cell)
    assert len(named) > 80


def text_of(element: str) -> str:
    """Return the text of an expression that a method of the reference's printer writes."""
    x, y = sympy.symbols("x y", integer=True, nonnegative=True)
    name = element.removeprefix("_print_").replace("_helper_", "OpaqueUnaryFn_")
    if name in {"Min", "Max", "min_max_helper"}:
        return index_text(sympy.Min(x, y) + sympy.Max(x, y), nonnegative=lambda _: True)
    function = sympy.Function("Abs" if name == "Abs" else name)
    counts = {"PythonMod": 2, "FloorDiv": 2, "IntTrueDiv": 2, "FloatPow": 2, "Where": 3}
    given = [x < y, x, y][-counts.get(name, 1) :]
    given = [sympy.Function("ToFloat")(x), sympy.Integer(2)] if name == "RoundDecimal" else given
    text = index_text(function(*given), nonnegative=lambda _: True)
    opaque = name.removeprefix("OpaqueUnaryFn_")
    assert opaque == name or f"libdevice.{opaque}(" in text
    return text
