# SPDX-License-Identifier: Apache-2.0
"""`after_fork`: how an object that holds a lock, a thread or a process learns that it is in a forked child.

Only the thread that forked exists in the child, so a lock that another thread held stays locked there for ever.  An object with such
a lock registers a method that makes the lock anew; every room may use this module, which imports nothing of ours.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable


def after_fork(method: Callable[[], None]) -> None:
    """Call a bound method in every forked child, as long as its object lives; nothing where the system cannot fork."""
    reference = weakref.WeakMethod(method)

    def call_if_alive() -> None:
        alive = reference()
        if alive is not None:
            alive()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=call_if_alive)
