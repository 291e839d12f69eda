# SPDX-License-Identifier: Apache-2.0
"""`tuning_listeners`, `program_listeners`: by which recordings hear what is made or found in this
process beside kernels.

Tuners tell of records (`bundler/runtime/tuning/result_lookup.py`), the generator of programs that it
keeps (`bundler/codegen/kept_programs.py`); `Recording` listens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, ParamSpec

from bundler.errors import BundlerError
from bundler.fork_safety import after_fork
from bundler.format.candidate_timings import Tuning
from bundler.format.launch_spec import TuningRecord
from bundler.package_loggers import logger

_LOG = logger("bundler.lifecycle")
P = ParamSpec("P")


class Listeners(Generic[P]):
    """Whoever wants to hear of each thing of a kind; thread-safe, empty after a fork."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: tuple[Callable[P, None], ...] = ()
        after_fork(self._reset_in_child)

    def attach(self, listener: Callable[P, None]) -> None:
        """Call a function with each of them from now on."""
        with self._lock:
            self._listeners = (*self._listeners, listener)

    def detach(self, listener: Callable[P, None]) -> None:
        """Call it no more; one that is not attached is no error."""
        with self._lock:
            self._listeners = tuple(other for other in self._listeners if other != listener)

    def tell(self, *told: P.args, **named: P.kwargs) -> None:
        """Pass one on; what a listener raises goes to the log."""
        for listener in self._listeners:
            try:
                listener(*told, **named)
            except BundlerError as error:
                _LOG.warning("a listener could not take what was recorded: %s", error)

    def _reset_in_child(self) -> None:
        # Another thread of the parent may have held the lock.
        self._lock, self._listeners = threading.Lock(), ()


#: Of each record that a tuner of this process finds or uses.
tuning_listeners: Listeners[[TuningRecord, Tuning | None]] = Listeners()
#: Of the path of each program that was kept, or found where it was kept.
program_listeners: Listeners[[str]] = Listeners()
