# SPDX-License-Identifier: Apache-2.0
"""Candidates and grids by rule: sizes, a device and facts about a kernel in; configs and a grid
out, as pure functions.

The rules (`pointwise_rules`, `reduction_rules`, `launch_grids`, ...) know nothing of how kernels
are launched or tuned. Integrations call them directly.  Programs use the decorators, which this
package shows under its own name:

    H200 = Device("cuda", multiprocessors=132, major=9)

    @heuristics.pointwise({"x": 2**20}, Setting(H200))
    @triton.jit
    def scale(in_ptr0, out_ptr0, xnumel, XBLOCK: tl.constexpr): ...

    scale.run(x, out, x.numel())

A decorated function is tuned, so the decorators are defined in `tuning/heuristic_decorators.py` and
imported when one is asked for.  `docs/heuristics.md` says more.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bundler.runtime.tuning.heuristic_decorators import (
        attention,
        combo,
        cooperative_reduction,
        fixed_config,
        foreach,
        mix_order_reduction,
        persistent_reduction,
        pointwise,
        product,
        reduction,
        split_scan,
        template,
        user_autotune,
    )

__all__ = [
    "attention",
    "combo",
    "cooperative_reduction",
    "fixed_config",
    "foreach",
    "mix_order_reduction",
    "persistent_reduction",
    "pointwise",
    "product",
    "reduction",
    "split_scan",
    "template",
    "user_autotune",
]

# Hidden from type checkers: to them it would make every misspelt name an `Any`.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module("bundler.runtime.tuning.heuristic_decorators"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
