# SPDX-License-Identifier: Apache-2.0
"""What has to be forgotten in a forked child."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable


def after_fork(method: Callable[[], None]) -> None:
    """Call a bound method in every forked child, as long as its object lives."""
    reference = weakref.WeakMethod(method)

    def forget() -> None:
        alive = reference()
        if alive is not None:
            alive()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=forget)
