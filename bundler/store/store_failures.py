# SPDX-License-Identifier: Apache-2.0
"""What the store does when a byte store fails, or gives a damaged object.

`store_errors` turns the errors of byte stores into those of this package: every call of a byte
store stands in `with store_errors(name)`, and no other module of the room does that.  `checked`
asks for a damaged object once more, then removes it, so that the next push sends it again.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import TypeVar
from urllib.parse import unquote, urlsplit

from bundler.backends import backend_errors as theirs
from bundler.backends.port import Backend, Unread
from bundler.errors import (
    AccessDenied,
    BundlerError,
    ConfigError,
    DigestMismatch,
    FormatError,
    LimitExceeded,
    NotFound,
    StoreFull,
    StoreUnavailable,
)
from bundler.package_loggers import logger
from bundler.project import page
from bundler.store.store_layout import bound_of_key

# The beginning of a message of a byte store that is a server, and the text between the names of
# tiers.
_URL = re.compile(r"[a-z][a-z0-9+]*://\S*?: ")
DAMAGED = (DigestMismatch, FormatError)
T = TypeVar("T")
_log = logger("bundler.store")
_TIERS = " + "
_REDIS = ("redis", "unix:")
_MEANING: dict[type[theirs.BackendError], type[BundlerError]] = {
    theirs.BackendFull: StoreFull,
    theirs.BackendDenied: AccessDenied,
    theirs.UntrustedRoot: ConfigError,
    theirs.InvalidKey: ConfigError,
    theirs.BadSettings: ConfigError,
    theirs.MissingExtra: ConfigError,
    theirs.BackendUnavailable: StoreUnavailable,
    theirs.NotThere: NotFound,
    theirs.WrongBytes: DigestMismatch,
}


@contextlib.contextmanager
def store_errors(store: str) -> Iterator[None]:
    """Raise the package's error for a byte store's; `store` names it without any secret."""
    try:
        yield
    except theirs.BackendError as error:
        kind = next(
            (ours for cls, ours in _MEANING.items() if isinstance(error, cls)), StoreUnavailable
        )
        on_server = isinstance(error, theirs.BackendDenied) and not store.startswith(
            ("file:", "memory:")
        )
        cited = page("cluster") if store.startswith(_REDIS) else page("stores")
        more = f"; {cited}" if on_server else ""
        raise kind(named_once(store, str(error)) + more, store=store) from error


def named_once(store: str, text: str) -> str:
    """Return a byte store's message after the name of the store, which is said once.

    Of several tiers the one that the message names is said alone.
    """
    url = _URL.match(text)
    if url is None:
        path = unquote(urlsplit(store).path) if store.startswith("file:") else ""
        return f"{store}: {text.removeprefix(f'{path} ') if path else text}"
    return text if _TIERS in store else f"{store}: {text[url.end() :]}"


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
    return max(len(value), bound_of_key(key))


def quarantine(backend: Backend, name: str, key: str) -> None:
    """Remove a damaged object; where that is not permitted it stays, and is damaged for the next
    reader too.
    """
    try:
        with store_errors(name):
            backend.delete([key])
    except BundlerError as error:
        _log.warning("%s cannot be removed: %s", key, error)
