# SPDX-License-Identifier: Apache-2.0
"""The entry point of this package: `python -m tools.gpu PROGRAM`; each program is the module of its
name.
"""

from __future__ import annotations

import sys

from tools.shared import programs

PROGRAMS = {
    "check": "kernels recorded, replayed, built and launched; times of launches",
    "slim": "a process without a C compiler",
    "autotune": "tuned kernels: tuned from cold, then replayed without a measurement",
    "export": (
        "an exported kernel launched from C++, timed by torch's profiler, with its record in a"
        " trace"
    ),
    "occupancy": (
        "blocks that fit on a multiprocessor, as reports say it, beside the driver's answer"
    ),
    "launcher": "first calls with our launcher for Triton, without a run of gcc",
    "replay": (
        "recorded kernels in Triton's in-memory caches: 100 calls without a compile, a hit, a hook"
        " or a benchmark"
    ),
    "moved": (
        "kernels whose functions only moved, launched beside freshly compiled ones, compared bit"
        " by bit"
    ),
    "monitor": (
        "vLLM's own JIT monitor in error mode: silent after a replay of the examples, Liger and"
        " FLA, raises without"
    ),
    "capture": (
        "Liger and FLA captured without the GPU; the keys that a process on it asks for are in the"
        " bundle"
    ),
    "generated": (
        "kernels that Inductor generated, loaded by load_generated: bits, and times of the host,"
        " beside Inductor's own launches"
    ),
    "torch-compile": "a transformer through torch.compile, from caches of each kind",
}

if __name__ == "__main__":
    sys.exit(programs.run("tools.gpu", PROGRAMS))
