# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: INP001
"""What a child process imports that does not have our package: in place of our cache managers, the
ones behind them.

A recording, or a session, names our cache manager in the environment of all children, and Triton
fails in a child that cannot import it.  So the directory of this file is on PYTHONPATH then, behind
the program's own entries; nothing else is in it.  Where the real package can be found, this file
loads that one in its own place.

Needs nothing but the standard library and Triton.  A child without our package that imports it by
itself gets a module without our functions instead of an ImportError.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import importlib.util
import os
import sys
import types
import warnings
from typing import Any

# Our cache managers, and the variable that names the manager behind each, as
# bundler.toolchain.recording.manager_environment sets it.
_MANAGERS = {
    "toolchain.recording.spool_manager": ("SpoolCacheManager", "TRITON_BUNDLER_SPOOL_INNER"),
    "integrations.triton": ("BundlerCacheManager", "TRITON_BUNDLER_INNER"),
}
_HERE = os.path.dirname(os.path.realpath(__file__))


def _find_real() -> importlib.machinery.ModuleSpec | None:
    """Return where the real package is; None when there is none."""
    elsewhere = [entry for entry in sys.path if os.path.realpath(entry) != _HERE]
    for finder in sys.meta_path:
        path = elsewhere if finder is importlib.machinery.PathFinder else None
        spec = finder.find_spec(__name__, path)
        # A folder that only happens to have the name is found too, but has no file of its own.
        if spec is not None and spec.loader is not None and spec.origin not in {None, __file__}:
            return spec
    return None


def _load(spec: importlib.machinery.ModuleSpec) -> None:
    """Load the real package in place of this module, so that an import of this one gives
    that one.
    """
    module = importlib.util.module_from_spec(spec)
    sys.modules[__name__] = module
    spec.loader.exec_module(module)  # type: ignore[union-attr]  # `_find_real` looked


def _stand_in(place: str) -> None:
    parts = place.split(".")
    for count in range(1, len(parts)):
        room = types.ModuleType(".".join([__name__, *parts[:count]]))
        room.__path__ = []
        sys.modules[room.__name__] = room
    module = sys.modules[f"{__name__}.{place}"] = types.ModuleType(f"{__name__}.{place}")
    # PEP 562
    module.__getattr__ = functools.partial(_manager, place)  # type: ignore[method-assign]


def _manager(place: str, name: str) -> Any:
    manager, variable = _MANAGERS[place]
    if name != manager:
        raise AttributeError(
            f"triton-bundler is not installed for {sys.executable}; its stand-in has no"
            f" {place}.{name}"
        )
    _tell()
    module, _, attribute = (
        os.environ.get(variable) or "triton.runtime.cache:FileCacheManager"
    ).partition(":")
    return getattr(importlib.import_module(module), attribute)


@functools.cache
def _tell() -> None:
    text = (
        f"triton-bundler is not installed for {sys.executable}, so what this process compiles is"
        " neither recorded nor shared by the program that started it; pip install triton-bundler"
        " there"
    )
    try:
        warnings.warn(text, RuntimeWarning, stacklevel=3)
    except RuntimeWarning as warning:  # asked for by -W error, but this must not end a compile
        warnings.showwarning(warning, RuntimeWarning, __file__, 1)


_real = _find_real()
if _real is not None:
    _load(_real)
else:
    __path__: list[str] = []
    for _place in _MANAGERS:
        _stand_in(_place)
