# SPDX-License-Identifier: Apache-2.0
"""The entry point of this package: `python -m tools.bench PROGRAM`; each program is the module of
its name.
"""

from __future__ import annotations

import sys

from tools.shared import programs

PROGRAMS = {
    "bundle": "bundles beside torch's bundler, tar and zstd, and bare writes",
    "fresh": "a cold start beside torch's bundler: a new process each",
    "compile": "the compile service beside serial Triton and the pool of torch's compiler",
    "cloud": "a start from S3 beside fetching the same files in parallel",
    "remote": "a start from a Redis server beside the remote cache of Triton",
    "scale": "a bundle of 100,000 kernels beside one of 1,000",
    "farm": "kernels on the workers of Dask, MPI and Ray beside the local pool",
    "page": "make docs/benchmarks.md from docs/results/, or check that it is current",
}

if __name__ == "__main__":
    sys.exit(programs.run("tools.bench", PROGRAMS))
