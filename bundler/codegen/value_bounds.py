# SPDX-License-Identifier: Apache-2.0
"""`is_within`: whether an integer value of a kernel is provably an index into a dimension, so that no assertion has to say so.

What index expressions, constants and arithmetic over them decide is known; a value that was loaded may be anything.  `kernel_body` asks before it
writes an assertion.
"""

from __future__ import annotations

import sympy

from bundler.codegen.index_ranges import Ranges
from bundler.codegen.loop_terms import Argument, Term

Bounds = tuple[int, int]
_INTEGERS = frozenset({"int32", "int64"})  # what arithmetic of indices does not leave


def is_within(term: Term, size: sympy.Expr, ranges: Ranges) -> bool:
    """Whether a value is at least 0 and below a size."""
    if term.operator == "index_expr" and not term.terms:  # also over sizes that change
        return ranges.nonnegative(term.details[0]) and ranges.below(term.details[0], size)
    found = _bounds(term, ranges)
    return found is not None and found[0] >= 0 and bool(size.is_Integer and found[1] < size)


def _bounds(value: Argument, ranges: Ranges) -> Bounds | None:
    """Return the least and the greatest number that a value can be; None where that is not known."""
    if not isinstance(value, Term):
        return (value, value) if type(value) is int else None
    if value.dtype not in _INTEGERS:
        return None
    match value.operator:
        case "constant":
            return int(value.details[0]), int(value.details[0])
        case "index_expr":
            largest = (
                ranges.largest(value.details[0]) if ranges.nonnegative(value.details[0]) else None
            )
            return (
                (0, int(largest))
                if largest is not None and largest.is_Integer and not value.terms
                else None
            )
        case "to_dtype" | "check_bounds":
            return _bounds(value.arguments[0], ranges)
        case "where":
            return _chosen(value, ranges)
        case "add" | "sub" | "mul":
            return _computed(value, ranges)
    return None


def _chosen(term: Term, ranges: Ranges) -> Bounds | None:
    condition, one, other = term.arguments
    right = _bounds(other, ranges)
    # An index that would count from the end where it is negative, which it never is.
    asked = (
        condition.arguments
        if isinstance(condition, Term) and condition.operator == "lt"
        else (None, 0)
    )
    if (
        asked[0] is other
        and right is not None
        and right[0] >= 0
        and _bounds(asked[1], ranges) == (0, 0)
    ):
        return right
    left = _bounds(one, ranges)
    return (
        None if left is None or right is None else (min(left[0], right[0]), max(left[1], right[1]))
    )


def _computed(term: Term, ranges: Ranges) -> Bounds | None:
    left, right = (_bounds(argument, ranges) for argument in term.arguments)
    if left is None or right is None:
        return None
    if term.operator == "mul":
        products = [a * b for a in left for b in right]
        found = min(products), max(products)
    elif term.operator == "add":
        found = left[0] + right[0], left[1] + right[1]
    else:
        found = left[0] - right[1], left[1] - right[0]
    limit = 1 << (31 if term.dtype == "int32" else 63)
    return (
        found if -limit <= found[0] and found[1] < limit else None
    )  # what overflows may be anything
