# SPDX-License-Identifier: Apache-2.0
"""The one edge where a byte store's errors become the package's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from bundler.backends import errors as theirs
from bundler.errors import AccessDenied, BundlerError, ConfigError, StoreFull, StoreUnavailable

_MEANING: dict[type[theirs.BackendError], type[BundlerError]] = {
    theirs.BackendFull: StoreFull,
    theirs.BackendDenied: AccessDenied,
    theirs.UntrustedRoot: ConfigError,
    theirs.InvalidKey: ConfigError,
    theirs.BadSettings: ConfigError,
    theirs.MissingExtra: ConfigError,
    theirs.BackendUnavailable: StoreUnavailable,
}


@contextlib.contextmanager
def store_errors(store: str) -> Iterator[None]:
    """Raise the package's error for a byte store's; `store` names it without any secret."""
    try:
        yield
    except theirs.BackendError as error:
        kind = next((ours for cls, ours in _MEANING.items() if isinstance(error, cls)), StoreUnavailable)
        raise kind(f"{store}: {error}", store=store) from error
