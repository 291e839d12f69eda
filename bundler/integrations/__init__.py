# SPDX-License-Identifier: Apache-2.0
"""Who we plug into: Triton's cache manager and torch's Inductor.  `_process` owns the one
process-wide session.
"""
