# SPDX-License-Identifier: Apache-2.0
"""`check_term`, `check_type`: whether a kernel can have an operator or a dtype; asked while a graph
is lowered, when a fallback is still possible.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from bundler.codegen.kernels import operation_text
from bundler.codegen.loops import data_types
from bundler.codegen.loops.loop_terms import SCAN, STRUCTURAL, Term, in_order_of

_ANSWERS = 4096


def check_type(dtype: str) -> None:
    """Raise `UnsupportedOperator` for a dtype that no kernel has."""
    data_types.compute_type(dtype)


def check_term(term: Term) -> None:
    """Raise `UnsupportedOperator` where there is no text for an operator over these dtypes."""
    check_type(term.dtype)
    if term.operator == SCAN:
        for inner in in_order_of(term.details[0].results):
            check_term(inner)
    if term.operator not in STRUCTURAL:
        _render(term.operator, tuple(argument.dtype for argument in term.terms), options_of(term))


def options_of(term: Term) -> tuple[tuple[str, Any], ...]:
    """Return the options of an operator for `operation_text.render`, the dtype of its result among
    them.
    """
    return (("dtype", term.dtype), *term.details)


@lru_cache(maxsize=_ANSWERS)
def _render(operator: str, dtypes: tuple[str, ...], options: tuple[tuple[str, Any], ...]) -> None:
    values = [operation_text.Value("tmp0", name) for name in dtypes]
    operation_text.render(operator, values, **dict(options))
