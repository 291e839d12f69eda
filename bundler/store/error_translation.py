# SPDX-License-Identifier: Apache-2.0
"""Turns the errors of byte stores into those of this package; no other module of the room does.

Every call of a byte store stands in `with store_errors(name)`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from urllib.parse import unquote, urlsplit

from bundler.backends import backend_errors as theirs
from bundler.errors import (
    AccessDenied,
    BundlerError,
    ConfigError,
    DigestMismatch,
    NotFound,
    StoreFull,
    StoreUnavailable,
)
from bundler.project import page

# The beginning of a message of a byte store that is a server, and the text between the names of
# tiers.
_URL = re.compile(r"[a-z][a-z0-9+]*://\S*?: ")
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
