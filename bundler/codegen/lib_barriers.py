# SPDX-License-Identifier: Apache-2.0
"""Programs of generated kernels that wait for each other.

`bundler.codegen.lib` shows it to kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def grid_barrier(counter, programs: tl.constexpr):
    """Wait until all programs along the first axis of the grid are here, and see what they stored.

    All of them have to run at once, as a cooperative launch sees to, and to have one `counter`, an
    int32 that no other programs use meanwhile. It is 0, or as an earlier barrier left it: the sum
    of all that arrive changes its sign alone, so it is ready for the next one.
    """
    # What other threads of this program stored comes before its arrival.
    tl.debug_barrier()
    if programs > 1:
        # 2^31 in all, of which the first program brings what the others, with 1 each, lack.
        first = tl.program_id(0) == 0
        arrival = tl.where(first, 0x7FFFFFFF - (programs - 2), 1)
        before = tl.atomic_add(counter, arrival, sem="release")
        now = before
        while (before ^ now) >= 0:
            now = tl.atomic_add(counter, 0, sem="acquire")
        # No thread loads before its program has seen that all arrived.
        tl.debug_barrier()
