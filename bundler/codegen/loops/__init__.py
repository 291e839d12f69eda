# SPDX-License-Identifier: Apache-2.0
"""The loop form of a program, and what `schedule.py` decides over it.

The form: dtypes, terms, nodes and buffers, tensors not yet stored (`lazy_tensors.py`), index
expressions.  The decisions: the order of a loop's dimensions (`loop_order.py`), long reductions in two steps
(`split_reductions.py`, `mixed_reductions.py`), which loops share a kernel (`fusion.py`), and its
dimensions (`range_trees.py`).
"""
