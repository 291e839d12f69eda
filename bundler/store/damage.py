# SPDX-License-Identifier: Apache-2.0
"""What the store does about a damaged object: it asks once more, then removes the object, so that
the next push sends it again.

`checked` does this around any check; `quarantine` removes.  Every module of this room that reads
objects calls them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from bundler.backends.port import Backend, Unread
from bundler.errors import BundlerError, DigestMismatch, FormatError, LimitExceeded
from bundler.package_loggers import logger
from bundler.store import bounds
from bundler.store.error_translation import store_errors

DAMAGED = (DigestMismatch, FormatError)
T = TypeVar("T")
_log = logger("bundler.store")


def checked(
    backend: Backend,
    name: str,
    key: str,
    value: bytes,
    check: Callable[[bytes], T],
    removable: tuple[type[BundlerError], ...] = DAMAGED,
) -> T:
    """Return what `check` makes of a stored value.

    A damaged one is asked for once more.  If it was damaged on its way here, the second is right;
    what the store gives twice the same is removed, and the next push sends it again.

    Args:
        backend, name: the store.
        key, value: the object as the store gave it.
        check: raises `DigestMismatch` or `FormatError` for a damaged value.
        removable: the errors for which the object is removed; one that is only over a limit of this
            reader stays.
    """
    try:
        return check(value)
    except DAMAGED as error:
        with store_errors(name):
            again = backend.get_within({key: _bound(key, value)}).get(key)
        if again is not None and again != value:
            return check(again)
        if isinstance(error, removable) and not isinstance(error, LimitExceeded):
            _log.warning(
                "%s: %s is damaged; it is removed, and the next push sends it again: %s",
                name,
                key,
                error,
            )
            quarantine(backend, name, key)
        raise


def _bound(key: str, value: bytes) -> int:
    """Return how much of an object was read, for it to be read again."""
    if isinstance(value, Unread) and value.max_bytes is not None:
        return value.max_bytes
    return max(len(value), bounds.of_key(key))


def quarantine(backend: Backend, name: str, key: str) -> None:
    """Remove a damaged object; where that is not permitted it stays, and is damaged for the next
    reader too.
    """
    try:
        with store_errors(name):
            backend.delete([key])
    except BundlerError as error:
        _log.warning("%s cannot be removed: %s", key, error)
