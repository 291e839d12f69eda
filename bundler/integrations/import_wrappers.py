# SPDX-License-Identifier: Apache-2.0
"""`wrap_when_imported`: puts a function of ours around one of a module that may not be imported yet, without importing it.

`server_plugins.py` stands by it where a server's workers are warm, whichever of the server's modules a process comes to use.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Around = Callable[[Callable[..., Any]], Callable[..., Any]]
Complain = Callable[[str], None]

_MARK = "_bundler_wrapped"


class _Wrappers(MetaPathFinder):
    """Finds no module itself: of those that it waits for it lets the other finders look, and acts when the module was executed."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._wanted: dict[str, dict[str, tuple[Around, Complain]]] = {}
        self._looking = threading.local()

    def add(self, module: str, name: str, around: Around, complain: Complain) -> None:
        """Wrap now, or when the module is imported; once, however often it is asked for."""
        with self._lock:
            self._wanted.setdefault(module, {})[name] = (around, complain)
            if self not in sys.meta_path:
                sys.meta_path.insert(0, self)
        imported = sys.modules.get(module)
        # One that is being imported is wrapped at the end of that only if we were asked for it before.
        if imported is not None:
            self._wrap(imported, module)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return what the other finders say of a module that is waited for, with a loader that wraps; None for all others."""
        if fullname not in self._wanted or getattr(self._looking, "now", False):
            return None
        self._looking.now = True
        try:
            found = (
                finder.find_spec(fullname, path, target)
                for finder in sys.meta_path
                if finder is not self
            )
            spec = next((one for one in found if one is not None), None)
        finally:
            self._looking.now = False
        execute = getattr(spec and spec.loader, "exec_module", None)
        if execute is None:
            return spec

        def execute_and_wrap(module: ModuleType) -> None:
            execute(module)
            # The loader of a file is an object of that module alone, that of an archive is one for all in it.
            if module.__name__ == fullname:
                self._wrap(module, fullname)

        vars(spec.loader)["exec_module"] = execute_and_wrap  # type: ignore[union-attr]
        return spec

    def _wrap(self, module: ModuleType, fullname: str) -> None:
        for name, (around, complain) in self._wanted[fullname].items():
            *owners, last = name.split(".")
            try:
                owner: Any = functools.reduce(getattr, owners, module)
                original = getattr(owner, last)
                if not hasattr(original, _MARK):
                    wrapped = functools.wraps(original)(around(original))
                    setattr(wrapped, _MARK, True)
                    setattr(owner, last, wrapped)
            except (AttributeError, TypeError) as error:
                complain(
                    f"{fullname} has no {name} that can be wrapped ({type(error).__name__}: {error})"
                )


_wrappers = _Wrappers()


def wrap_when_imported(module: str, name: str, around: Around, complain: Complain) -> None:
    """Replace a function of a module by `around` of it: now if the module is imported, else when it is.

    Who imported the function by name before keeps the original.  A function is wrapped once, however often this is called.

    Args:
        module: its full name.
        name: of the function in it, or `Class.method`.
        around: gets the original and returns what to put in its place.
        complain: gets a sentence when the module has no such function.
    """
    _wrappers.add(module, name, around, complain)
