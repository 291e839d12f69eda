# SPDX-License-Identifier: Apache-2.0
"""`compiler_settings`: all that decides what Triton compiles in this process, beside kernel,
options and device, as one text; with it a kernel that another process compiled is found without
asking Triton's compiler.

It says more than Triton's own keys do: each setting counts, whether Triton's key has it or not.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from typing import Any

from bundler.toolchain.identity import triton_dir

_PLAIN = frozenset({bool, int, float, str, type(None)})
# Settings of where files lie, which decide nothing of what is compiled.
_PLACES = frozenset({"home_dir", "dump_dir", "override_dir", "dir"})
# With these a kernel is to be compiled, looked at or replaced each time, or not compiled at all.
_WATCHED = (
    ("runtime", "interpret"),
    ("runtime", "jit_cache_hook"),
    ("runtime", "jit_post_compile_hook"),
    ("runtime", "add_stages_inspection_hook"),
    ("compilation", "always_compile"),
    ("compilation", "override"),
    ("compilation", "dump_ir"),
    ("compilation", "listener"),
    ("cache", "manager_class"),
    ("cache", "remote_manager_class"),
)
# What is linked into kernels, and is no part of Triton's hash of its own files.
_LIBRARY = os.path.join("backends", "nvidia", "lib", "libdevice.10.bc")
_LOADING = ("kernel_load_start_hook", "kernel_load_end_hook")


def compiler_settings() -> str | None:
    """Return the settings; None where compiles `are_watched`.  Imports Triton."""
    knobs = importlib.import_module("triton.knobs")
    if are_watched():
        return None
    lines = [_file(os.path.join(triton_dir() or "", _LIBRARY))]
    for name, group in sorted(vars(knobs).items()):
        if isinstance(group, knobs.base_knobs):
            lines += [f"{name}.{line}" for line in _group(group)]
    variables = sys.modules["triton._C.libtriton"].get_cache_invalidating_env_vars()
    return "\n".join([*lines, *(f"{key}={value}" for key, value in sorted(variables.items()))])


def are_watched() -> bool:
    """Whether somebody wants to hear of compiles (a recording, a session, a hook), or Triton is
    told to compile each time, or interprets; for a process that has imported Triton.
    """
    knobs = sys.modules["triton.knobs"]
    if any(getattr(getattr(knobs, group), name, None) for group, name in _WATCHED):
        return True
    return any(getattr(getattr(knobs.runtime, name, None), "calls", ()) for name in _LOADING)


def _group(group: Any) -> Iterator[str]:
    """Yield what is set in one group of settings: in Python, and in the environment."""
    descriptors = group.knob_descriptors
    known = {**vars(type(group)), **vars(group)}
    for name, value in sorted(known.items()):
        if name in _PLACES or name.startswith("__"):
            continue
        if type(value) in _PLAIN:
            yield f"{name}: {value!r}"
        if name in descriptors:
            key = descriptors[name].key
            given = os.environ.get(key)
            yield f"{key}={given!r}"
            default = getattr(descriptors[name], "default_path", None)
            if default is not None or key.endswith("_PATH"):
                paths = (vars(group).get(name), given, default)
                yield f"{name} {[_file(path) for path in paths if isinstance(path, str)]}"


def _file(path: str) -> str:
    """Return what the file system says of a program; one that was written to has another time of
    change.  Triton's own is named by its place beside Triton.
    """
    try:
        about = os.stat(path)
    except OSError as error:
        return f"{path}: {type(error).__name__}"
    place = path.removeprefix(triton_dir() or "")
    return f"{place} {about.st_size} {about.st_mtime_ns} {about.st_ctime_ns} {about.st_ino}"
