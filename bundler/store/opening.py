# SPDX-License-Identifier: Apache-2.0
"""From a URL to a byte store."""

from __future__ import annotations

import os
from urllib.parse import SplitResult, parse_qsl, unquote_to_bytes, urlsplit, urlunsplit

from bundler.backends.base import Backend
from bundler.backends.files import GROUP, PRIVATE
from bundler.backends.local import LocalBackend
from bundler.backends.memory import MemoryBackend
from bundler.errors import ConfigError
from bundler.store.errors_map import store_errors

_MODES = {"private": PRIVATE, "group": GROUP}
_SCHEMES = "file:///absolute/path, file:///absolute/path?mode=group, memory:"


def open_backend(url: str) -> Backend:
    """Open the byte store that a URL names.

    Args:
        url: `file:///absolute/path` for a directory that only its owner may write, with `?mode=group` one that a group
            shares; `memory:` for one that ends with the process.

    Raises:
        ConfigError: not such a URL, or a directory that others could write to.
        AccessDenied, StoreUnavailable: the directory cannot be opened.
    """
    parts = _split(url)
    if parts.scheme == "memory" and not any(parts[1:]):
        return MemoryBackend()
    path = _path(parts)
    if parts.scheme != "file" or parts.netloc not in {"", "localhost"} or not path.startswith("/") or "\0" in path:
        raise ConfigError(f"not a store: {_shown(parts)!r}; expected {_SCHEMES}", url=_shown(parts))
    settings = dict(parse_qsl(parts.query, keep_blank_values=True))
    mode = settings.pop("mode", "private")
    if settings or mode not in _MODES or parts.fragment:
        raise ConfigError(f"{url!r}: expected ?mode=private or ?mode=group and nothing else", url=url)
    with store_errors(url):
        return LocalBackend(path, _MODES[mode])


def local_directory(url: str) -> str | None:
    """Return the directory of a `file:` store, which need not exist; None for another kind of store."""
    parts = _split(url)
    return _path(parts) if parts.scheme == "file" else None


def _split(url: str) -> SplitResult:
    # The parser drops line breaks, and then means another directory.
    if not url.isprintable():
        raise ConfigError(f"not a store: {url!r:.80} has characters that do not print; expected {_SCHEMES}")
    try:
        return urlsplit(url)
    except ValueError as error:
        raise ConfigError(f"not a store: {error}; expected {_SCHEMES}") from error


def _path(parts: SplitResult) -> str:
    return os.fsdecode(unquote_to_bytes(parts.path))


def _shown(parts: SplitResult) -> str:
    """Return a URL without what may be secret: user, password and settings."""
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
