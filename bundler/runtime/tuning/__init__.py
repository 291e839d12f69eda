# SPDX-License-Identifier: Apache-2.0
"""How a kernel's configuration is found and remembered: the autotuner, what it measures with, and
the records that travel.

A call goes from `autotuned_kernel` to `result_lookup`, which looks for a config; where there is
none, `trial` tunes: it compiles by `candidate_compiler`, searches by `tuner` and `descent`, and
times by `benchmark`.  `docs/tuning.md` says more.
"""
