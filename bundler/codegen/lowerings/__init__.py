# SPDX-License-Identifier: Apache-2.0
"""Operators of a graph as loops: what `lower.py` asks of each call.

`operator_lowerings.py` has the table of all operators; each `*_lowerings.py` has one family of
them. What no lowering can write becomes an extern call, with the reason (`kernels/operator_support.py`).
"""
