# SPDX-License-Identifier: Apache-2.0
"""`Hooks`: what is called around a launch: hooks that users add, and those that a profiler added to
Triton.

`Kernels` and `AutotunedKernel` have one object each, which all their launches ask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from bundler.toolchain.profiler_hooks import Hook, are_present, launch_hooks, launch_metadata


def launch_facts(
    name: str, key: str, grid: tuple[int, ...], stream: int, device: int, module: Any = None
) -> dict[str, Any]:
    """Return what hooks are told of a launch; the function's handle is that of a loaded module."""
    return {
        "name": name,
        "key": key,
        "grid": grid,
        "stream": stream,
        "device": device,
        "function": getattr(module, "function", 0),
    }


class Hooks:
    """The hooks of one set of kernels.

    Each gets a dictionary: `name`, `key`, `grid`, `stream`, `device` of the launch.  What a hook
    raises reaches the caller; a launch that a hook refused does not happen.  Add and remove them
    before launches run in other threads.
    """

    def __init__(self) -> None:
        self._enter: list[Hook] = []
        self._leave: list[Hook] = []

    @property
    def enter(self) -> list[Hook]:
        """What is called before a launch; always the same list, since the compiled dispatcher looks
        at it before each launch.
        """
        return self._enter

    @enter.setter
    def enter(self, hooks: Iterable[Hook]) -> None:
        self._enter[:] = hooks

    @property
    def leave(self) -> list[Hook]:
        """What is called after a launch; always the same list, too."""
        return self._leave

    @leave.setter
    def leave(self, hooks: Iterable[Hook]) -> None:
        self._leave[:] = hooks

    def present(self) -> bool:
        """Whether anything is to be called around the next launch."""
        return bool(self._enter or self._leave) or are_present()

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
