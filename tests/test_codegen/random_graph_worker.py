# SPDX-License-Identifier: Apache-2.0
"""Generates kernels for random functions and compares what Triton's interpreter computes with
torch.

`python random_graph_worker.py SOURCES FIRST COUNT [KEEP]` prints, as JSON, how many graphs were
run, how many kernels they have, and what is wrong: by seed, the smallest description that fails in
the same way; without a search for it where `KEEP` is given.
"""

import json
import sys
import traceback
import warnings
from collections import Counter

from random_graphs import checked, drawn, function, inputs, smaller

from bundler.codegen.program import GenerateOptions, generate


def problem(description, sources, counts=None):
    """Return what is wrong with the program of a description; its kind is the first word."""
    try:
        program = generate(
            function(description), inputs(description), options=GenerateOptions(sources=sources)
        )
        results = program.run(*inputs(description))
    except Exception as error:  # noqa: BLE001  (whatever is raised is the finding)
        last = traceback.extract_tb(error.__traceback__)[-1]
        return (
            f"{type(error).__name__}: {str(error)[-300:]}"
            f" ({last.filename.rsplit('/', 1)[-1]}:{last.lineno})"
        )
    if counts is not None:
        counts["kernels"] += len(program.kernels)
        counts["fallbacks"] += len(program.fallbacks)
        counts.update(f"fallback {found.operator}" for found in program.fallbacks)
    return checked(description, results)


def main(sources, first, count, keep=None):
    """Print what was found."""
    warnings.simplefilter("ignore")
    counts, found = Counter(), {}
    for seed in range(int(first), int(first) + int(count)):
        description = drawn(seed)
        wrong = problem(description, sources, counts)
        counts["graphs"] += 1
        if wrong and keep is None:
            kind = wrong.split(":")[0].split(" ")[0]
            least = smaller(
                description, lambda d, kind=kind: problem(d, sources).startswith(kind), tries=120
            )
            found[seed] = [problem(least, sources), repr(least)]
        elif wrong:
            found[seed] = [wrong, repr(description)]
    print(json.dumps({"counts": counts, "found": found}))


if __name__ == "__main__":
    main(*sys.argv[1:])
