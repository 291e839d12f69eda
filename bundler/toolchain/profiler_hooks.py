# SPDX-License-Identifier: Apache-2.0
"""`launch_hooks`: the hooks that profilers add to Triton's launches, for launches that do not go
through Triton; `is_recording`: whether torch's profiler is on.

`bundler/runtime/launch/launch_hooks.py` asks before each launch, so `are_present` is written for
speed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

Hook = Callable[[Any], Any]
_modules = sys.modules
# What `are_present` looks at, for the compiled dispatcher, which looks at it in C and asks
# `are_present` where it finds anything else.
CHAINS = (_modules, "triton.knobs", "runtime", "launch_enter_hook", "launch_exit_hook", "calls")

# The flag of torch's profiler, likewise.
RECORDING = (_modules, "torch.autograd.profiler", "_is_profiler_enabled")


def are_present() -> bool:
    """Whether Triton has anything to call around a launch; asked before each launch, so the common
    case comes first.
    """
    knobs: Any = _modules.get("triton.knobs")
    if knobs is None:
        return False
    runtime = knobs.runtime
    try:
        # Chains, which are there always: without members in them nothing is called.
        return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)
    except AttributeError:
        return launch_hooks() is not None


def is_recording() -> bool:
    """Whether torch's profiler is recording in this process; never imports torch."""
    _, module, flag = RECORDING
    return bool(getattr(_modules.get(module), flag, False))


def launch_hooks() -> tuple[Hook | None, Hook | None] | None:
    """Return what Triton calls before and after a launch, None when nothing is to be called or
    Triton is not loaded.
    """
    knobs: Any = _modules.get("triton.knobs")
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
