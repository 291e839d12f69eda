# SPDX-License-Identifier: Apache-2.0
"""What the store does when a byte store fails, or gives a damaged object.

`store_errors` turns the errors of byte stores into those of this package.  The modules of this room
call byte stores through `NamedStore`, which does that for each call.  `checked` asks for a damaged
object once more, then removes it, so that the next push sends it again.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TypeVar
from urllib.parse import unquote, urlsplit

from bundler.backends import backend_errors as theirs
from bundler.backends.batches import batches
from bundler.backends.breaker import Wrapped
from bundler.backends.port import Backend, Lease, TierCounters, Unread
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
from bundler.format.limits import Limits
from bundler.package_loggers import logger
from bundler.project import page
from bundler.store.store_layout import BATCH_KEYS, bound_of_key, bounds_of_keys

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


class NamedStore(Wrapped):
    """A byte store with a name, whose every call raises errors of this package; see `Wrapped`.

    Args:
        inner: the byte store.
        name: what to call it in messages; holds no secret.
        read_only: leave what is damaged, or is used, as it is.
    """

    def __init__(self, inner: Backend, name: str, *, read_only: bool = False) -> None:
        super().__init__(inner)
        self.name, self.read_only = name, read_only

    @property
    def untouched(self) -> NamedStore:
        """The same, to be left as it is."""
        return NamedStore(self.inner, self.name, read_only=True)

    @property
    def counters(self) -> tuple[TierCounters, ...]:
        """What each tier did so far; see `Backend`."""
        return self.inner.counters

    def lease(self, key: str, ttl_s: float) -> Lease | None:
        """Take a lease, whose changes raise errors of this package too; see `Backend`."""
        lease = self._call(lambda: self.inner.lease(key, ttl_s))
        if lease is None:
            return None
        return Lease(
            lambda ttl_s: self._call(lease.release if ttl_s is None else lambda: lease.renew(ttl_s))
        )

    def flush(self) -> None:
        """Make what was put survive a power failure; see `Backend`."""
        self._call(self.inner.flush)

    def _call(self, call: Callable[[], T], **_known: int) -> T:
        with store_errors(self.name):
            return call()


def named(backend: Backend, name: str) -> NamedStore:
    """Return a byte store with its name; one that has it already as it is."""
    if isinstance(backend, NamedStore) and backend.name == name:
        return backend
    return NamedStore(backend, name)


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
    key: str,
    value: bytes,
    store: NamedStore,
    check: Callable[[bytes], T],
    removable: tuple[type[BundlerError], ...] = DAMAGED,
) -> T:
    """Return what `check` makes of a stored value.

    A damaged one is asked for once more.  If it was damaged on its way here, the second is right;
    what the store gives twice the same is removed, and the next push sends it again.

    Args:
        key, value: the object as the store gave it.
        store: which gave it.
        check: raises `DigestMismatch` or `FormatError` for a damaged value.
        removable: the errors for which the object is removed; one that is only over a limit of this
            reader stays, and so does every one of a store that is to be left as it is.
    """
    try:
        return check(value)
    except DAMAGED as error:
        again = store.get_within({key: _bound(key, value)}).get(key)
        if again is not None and again != value:
            return check(again)
        keep = store.read_only or isinstance(error, LimitExceeded)
        if isinstance(error, removable) and not keep:
            _log.warning(
                "%s: %s is damaged; it is removed, and the next push sends it again: %s",
                store.name,
                key,
                error,
            )
            quarantine(store, key)
        raise


def read_sound(
    store: NamedStore, keys: Iterable[str], limits: Limits, decode: Callable[[str, bytes], T]
) -> Iterator[tuple[str, T]]:
    """Yield what small objects hold, by key and in the order of the keys; a damaged one is removed
    and left out.
    """
    for batch in batches(keys, BATCH_KEYS):
        values = store.get_within(bounds_of_keys(batch, limits))
        for key in batch:
            if key in values:
                with contextlib.suppress(*DAMAGED):
                    yield key, checked(key, values[key], store, partial(decode, key))


def _bound(key: str, value: bytes) -> int:
    """Return how much of an object was read, for it to be read again."""
    if isinstance(value, Unread) and value.max_bytes is not None:
        return value.max_bytes
    return max(len(value), bound_of_key(key))


def quarantine(store: NamedStore, key: str) -> None:
    """Remove a damaged object; where that is not permitted it stays, and is damaged for the next
    reader too.
    """
    try:
        store.delete([key])
    except BundlerError as error:
        _log.warning("%s cannot be removed: %s", key, error)
