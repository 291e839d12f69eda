# SPDX-License-Identifier: Apache-2.0
"""`Hooks`: what is called around a launch: hooks that users add, and those that a profiler added to Triton.

`Kernels` and `AutotunedKernel` have one object each, which all their launches ask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bundler.toolchain.profiler_hooks import Hook, are_present, launch_hooks, launch_metadata


class Hooks:
    """The hooks of one set of kernels.

    Each gets a dictionary: `name`, `key`, `grid`, `stream`, `device` of the launch.  What a hook raises reaches the caller; a
    launch that a hook refused does not happen.  Add and remove them before launches run in other threads.
    """

    def __init__(self) -> None:
        self.enter: list[Hook] = []
        self.leave: list[Hook] = []

    def present(self) -> bool:
        """Whether anything is to be called around the next launch."""
        return bool(self.enter or self.leave) or are_present()

    def around(self, facts: dict[str, Any], launch: Callable[[], None]) -> None:
        """Call the hooks for entering, launch, then the hooks for leaving, the last one first."""
        foreign = launch_hooks()
        metadata = launch_metadata(facts)
        for hook in self.enter:
            hook(facts)
        if foreign is not None and foreign[0] is not None:
            foreign[0](metadata)
        launch()
        if foreign is not None and foreign[1] is not None:
            foreign[1](metadata)
        for hook in reversed(self.leave):
            hook(facts)
