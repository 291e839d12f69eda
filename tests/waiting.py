# SPDX-License-Identifier: Apache-2.0
"""Waits for what another thread or process does."""

import time


def until(condition, what="", *, seconds=100):
    """Return what a condition gives as soon as that is true; fail after so many seconds."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, what or f"not true after {seconds} s"
        time.sleep(0.005)
    return found
