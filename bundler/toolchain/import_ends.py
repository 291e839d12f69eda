# SPDX-License-Identifier: Apache-2.0
"""`when_imported`: hears of the end of an import that is under way, when the functions of a module
can be hashed for the first time.

Python's import sets `_initializing` of a module's spec to False when the module is whole, or has
failed, before whoever imports it goes on. A spec of a class of ours hears of that.  Nothing is put
in the way of other imports.

`device_caches` and `tuner_caches` call it for functions and tuners that are made after a replay.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any

from bundler.package_loggers import logger

_LOG = logger("bundler.toolchain")
_ENDED = "_initializing"
_WAITING = "_bundler_waiting"


class _HeardSpec(ModuleSpec):
    """A module's spec for as long as its import takes."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == _ENDED and not value:
            self.__class__ = ModuleSpec  # type: ignore[assignment]  # a plain spec again
            for tell in vars(self).pop(_WAITING, []):
                try:
                    tell()
                except Exception as error:  # noqa: BLE001  # the seam: a fault of ours must not end the user's import
                    _LOG.warning(
                        "what was imported as %s was not looked at (%s: %s)",
                        self.name,
                        type(error).__name__,
                        error,
                    )


def when_imported(module: str, tell: Callable[[], None]) -> bool:
    """Call a function when the import of a module that is under way ends, in the thread that
    imports it.

    Returns:
        False where no import of it is under way: a script, a module that somebody runs by hand, one
        that is whole.
    """
    spec = getattr(sys.modules.get(module), "__spec__", None)
    if type(spec) not in {ModuleSpec, _HeardSpec} or not getattr(spec, _ENDED, False):
        return False
    vars(spec).setdefault(_WAITING, []).append(tell)
    spec.__class__ = _HeardSpec
    return True


def being_imported(module: str) -> bool:
    """Tell whether an import of a module is under way."""
    spec = getattr(sys.modules.get(module), "__spec__", None)
    return bool(getattr(spec, _ENDED, False))
