# SPDX-License-Identifier: Apache-2.0
"""What this machine has: the only room that imports Triton and torch, and where every difference
between their releases ends.

Nothing here imports either of them before it has to: only `spool_manager` and `cache_manager` do at
import, and only processes that run Triton import them. Releases are told apart by looking for the
feature, never by comparing version numbers.
"""
