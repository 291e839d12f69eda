# SPDX-License-Identifier: Apache-2.0
"""From a URL to a byte store."""

from __future__ import annotations

from urllib.parse import parse_qsl, unquote, urlsplit

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
    parts = urlsplit(url)
    if parts.scheme == "memory" and not parts.netloc and not parts.path:
        return MemoryBackend()
    if parts.scheme != "file" or parts.netloc not in {"", "localhost"} or not parts.path.startswith("/"):
        raise ConfigError(f"not a store: {url!r}; expected {_SCHEMES}", url=url)
    settings = dict(parse_qsl(parts.query, keep_blank_values=True))
    mode = settings.pop("mode", "private")
    if settings or mode not in _MODES:
        raise ConfigError(f"{url!r}: expected ?mode=private or ?mode=group and nothing else", url=url)
    with store_errors(url):
        return LocalBackend(unquote(parts.path), _MODES[mode])
