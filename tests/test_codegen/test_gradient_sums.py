# SPDX-License-Identifier: Apache-2.0
"""Gradients of a weight that several layers share, in Triton's interpreter."""


def test_they_are_added_up_as_they_are_made(interpreted):
    """Each case of the file: products turned and plain, and sums that a kernel adds up."""
    interpreted("gradient_sum_cases.py")
