# SPDX-License-Identifier: Apache-2.0
"""Runs random programs through torch.compile in Triton's interpreter, beside eager torch;
TRITON_INTERPRET=1.

`python random_program_worker.py SOURCES FIRST COUNT [KEEP]` prints, as JSON, how many were run, how
many kernels they have, and what is wrong: by seed, the problem and the smallest program that fails
in the same way; without a search for it where `KEEP` is given.
"""

import json
import os
import sys
import warnings
from collections import Counter

os.environ["XDG_CACHE_HOME"] = sys.argv[1]

import torch
from random_programs import drawn, problem, smaller

from bundler.codegen.torch_backend import triton_bundler


def tried(program, counts=None, device="cpu"):
    """Return what is wrong with a program."""
    notes = []
    found = problem(program, backend=triton_bundler, device=device, programs=notes)
    if counts is not None:
        counts["programs"] += 1
        counts["backward"] += program.backward
        counts["dynamic"] += program.dynamic
        counts["kernels"] += sum(len(getattr(one, "kernels", ())) for one in notes)
        counts["graphs"] += len(notes)
        refused = [one.reason for one in notes if not hasattr(one, "plan")]
        # What torch's own tracing cannot take apart nobody can generate.
        beyond = [reason for reason in refused if "torch cannot take it apart" in reason]
        counts["beyond torch's tracing"] += len(beyond)
        counts["as torch has it"] += len(refused) - len(beyond)
        counts.update(f"as torch has it: {reason}" for reason in refused)
    return found


def main(_sources, first, count, keep=None):
    """Print what was found."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    counts, found = Counter(), {}
    for seed in range(int(first), int(first) + int(count)):
        program = drawn(seed)
        wrong = tried(program, counts)
        if wrong and keep is None:
            kind = wrong.partition(":")[0]
            program = smaller(program, lambda one, kind=kind: tried(one).startswith(kind))
            wrong = tried(program)
        if wrong:
            found[seed] = [wrong, program.shown()]
    print(json.dumps({"counts": counts, "found": found}))


if __name__ == "__main__":
    main(*sys.argv[1:])
