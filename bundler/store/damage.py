# SPDX-License-Identifier: Apache-2.0
"""What is done about an object that is not what was stored: it is asked for once more, then removed, and sent again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from bundler.backends.base import Backend
from bundler.errors import BundlerError, DigestMismatch, FormatError, LimitExceeded
from bundler.store.errors_map import store_errors

DAMAGED = (DigestMismatch, FormatError)
T = TypeVar("T")
_log = logging.getLogger("bundler.store")


def checked(
    backend: Backend,
    name: str,
    key: str,
    value: bytes,
    check: Callable[[bytes], T],
    removable: tuple[type[BundlerError], ...] = DAMAGED,
) -> T:
    """Return what `check` makes of a stored value.

    A damaged one is asked for once more.  If it was damaged on its way here, the second is right; what the store gives twice
    the same is removed, and the next push sends it again.

    Args:
        backend, name: the store.
        key, value: the object as the store gave it.
        check: raises `DigestMismatch` or `FormatError` for a damaged value.
        removable: for which of these it is removed; what is over a limit of ours stays.
    """
    try:
        return check(value)
    except DAMAGED as error:
        with store_errors(name):
            again = backend.get([key]).get(key)
        if again is not None and again != value:
            return check(again)
        if isinstance(error, removable) and not isinstance(error, LimitExceeded):
            _log.warning("%s: %s is damaged; it is removed, and the next push sends it again: %s", name, key, error)
            quarantine(backend, name, key)
        raise


def quarantine(backend: Backend, name: str, key: str) -> None:
    """Remove a damaged object; where that is not permitted it stays, and is damaged for the next reader too."""
    try:
        with store_errors(name):
            backend.delete([key])
    except BundlerError as error:
        _log.warning("%s cannot be removed: %s", key, error)
