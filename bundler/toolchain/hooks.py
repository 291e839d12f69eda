# SPDX-License-Identifier: Apache-2.0
"""The hooks that profilers hang on Triton's launches, for launches that are not Triton's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

Hook = Callable[[Any], Any]


def launch_hooks() -> tuple[Hook | None, Hook | None] | None:
    """Return what Triton calls before and after a launch, None when nothing is to be called or Triton is not loaded."""
    knobs: Any = sys.modules.get("triton.knobs")
    if knobs is None:
        return None
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    found = (enter if _calls(enter) else None, leave if _calls(leave) else None)
    return None if found == (None, None) else found


def _calls(hook: Any) -> bool:
    # A chain without members is there always; before chains, and by assignment, it is one function.
    return hook is not None and bool(getattr(hook, "calls", True))


def launch_metadata(facts: dict[str, Any]) -> Any:
    """Return the facts of a launch in the form that Triton's hooks expect."""
    lazy: Any = getattr(sys.modules.get("triton.compiler.compiler"), "LazyDict", dict)
    return lazy(facts)
