# SPDX-License-Identifier: Apache-2.0
"""`after_fork`, `ForkSafeLock`: how an object that holds a lock, a thread or a process learns that
it is in a forked child.

Only the thread that forked exists in the child, so a lock that another thread held stays locked
there for ever.  An object with such a lock registers a method that makes the lock anew; every room
may use this module, which imports nothing of ours.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

from bundler.package_loggers import logger

_LOG = logger("bundler")


class _Handlers:
    """The methods that a forked child calls, in the order in which they were added, each as long as
    its object lives.

    The system cannot be told to forget a handler, so it gets one for all: a program that makes
    thousands of services, one for each tuning say, leaves nothing behind.
    """

    def __init__(self) -> None:
        # By the number of the reference: the object, and what to call with it.  Not `WeakMethod`,
        # whose own callback fails, aloud, for an object that the end of the interpreter takes away.
        self._methods: dict[int, tuple[weakref.ref[Any], Callable[[Any], None]]] = {}
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._call)

    def add(self, method: Callable[[], None]) -> None:
        bound: Any = method
        reference = weakref.ref(bound.__self__, self._drop)
        self._methods[id(reference)] = reference, bound.__func__

    def _drop(self, reference: object) -> None:
        self._methods.pop(id(reference), None)

    def _call(self) -> None:
        for reference, method in list(self._methods.values()):
            holder = reference()
            try:
                if holder is not None:
                    method(holder)
            except Exception:  # noqa: BLE001  # one object's fault must not leave the locks of the others locked
                _LOG.exception("an object could not be reset in a forked child")


_HANDLERS = _Handlers()


def after_fork(method: Callable[[], None]) -> None:
    """Call a bound method in every forked child, as long as its object lives; nothing where the
    system cannot fork.
    """
    _HANDLERS.add(method)


class ForkSafeLock:
    """A reentrant lock that a forked child gets anew.

    Used as `with holder.lock:`, so that a block in which the process forks gives back the lock that
    it took.

    Attributes:
        lock: the lock of this process.
    """

    def __init__(self) -> None:
        self._renew()
        after_fork(self._renew)

    def _renew(self) -> None:
        self.lock = threading.RLock()
