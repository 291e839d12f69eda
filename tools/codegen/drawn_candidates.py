# SPDX-License-Identifier: Apache-2.0
"""`draw_candidates`: each generated kernel has one candidate, drawn by its code, so that nothing is
compiled to be timed.

Judges of numbers call it where thousands of programs run once each: over all kernels every kind of
candidate is launched, and none twice.  What tunes kernels is judged elsewhere.
"""

from __future__ import annotations

import functools
import os
import zlib
from dataclasses import replace
from typing import Any

from bundler.runtime.tuning.heuristic_kernel import HeuristicKernel

# Workers are told by the environment.
ASKED = "CODEGEN_DRAWN_CANDIDATES"


@functools.cache
def draw_candidates() -> None:
    """Give kernels that are made from now on in this process one candidate each, where the
    environment asks for it.
    """
    if ASKED not in os.environ:
        return
    begin: Any = HeuristicKernel.__init__

    def begun(self: HeuristicKernel, fn: Any, candidates: Any, *rest: Any, **named: Any) -> None:
        configs = candidates.configs
        drawn = configs[zlib.crc32(fn.fn.__code__.co_code) % len(configs)] if configs else None
        one = replace(candidates, configs=(drawn,)) if drawn else candidates
        begin(self, fn, one, *rest, **named)

    HeuristicKernel.__init__ = begun  # type: ignore[method-assign]
