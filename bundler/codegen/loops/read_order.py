# SPDX-License-Identifier: Apache-2.0
"""`reads_rows`: whether a tensor that is computed element by element had better lie in rows, the
last dimension innermost, though torch gives it the order of its first operand.

A convolution's result whose dimensions are permuted is such an operand: sums with it would have its
order from block to block, and each norm behind them would reduce across memory. `lower` asks.
"""

from __future__ import annotations

from collections.abc import Sequence

import sympy

from bundler.codegen.loops.loop_terms import Term, loads_of


def reads_rows(body: Term, variables: Sequence[sympy.Symbol], sizes: Sequence[sympy.Expr]) -> bool:
    """Return whether at least half of what a body reads an element of for each of its own lies in
    rows; False where it reads nothing so.

    What is read once for several elements, as a bias, says nothing of the order.

    Args:
        body: over the variables.
        variables: one for each dimension.
        sizes: of the dimensions.
    """
    long = [name for name, size in zip(variables, sizes, strict=True) if size != 1]
    votes = []
    for index in {load[1] for load in loads_of(body)}:
        strides = [sympy.expand(index).coeff(name) for name in long]
        if all(stride.is_Integer and stride > 0 for stride in strides):
            votes.append(strides == sorted(strides, reverse=True))
    return bool(votes) and 2 * sum(votes) >= len(votes)
