# SPDX-License-Identifier: Apache-2.0
"""A byte store in Redis: which URLs mean one, and the way in for those who have redis-py.

Importing this module costs nothing.  `RedisBackend` is looked up in it when it is asked for, and
only then redis-py is imported; where that is missing, a `MissingExtra` says so.

`bundler/store/store_urls.py` is the caller.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bundler.backends.backend_errors import MissingExtra, install

if TYPE_CHECKING:
    from bundler.backends.redis.redis_backend import RedisBackend
    from bundler.backends.redis.url_settings import parse, shown, with_options

__all__ = ["SCHEMES", "RedisBackend", "parse", "shown", "with_options"]

SCHEMES = frozenset({"redis", "rediss", "unix", "redis+cluster", "rediss+cluster"})
_OF_URLS = frozenset({"parse", "shown", "with_options"})


# Hidden from type checkers: to them it would make every misspelt name an `Any`.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _OF_URLS:
            from bundler.backends.redis import url_settings

            return getattr(url_settings, name)
        if name != "RedisBackend":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            from bundler.backends.redis.redis_backend import RedisBackend
        except ImportError as error:
            if (error.name or "").partition(".")[0] != "redis":
                raise
            raise MissingExtra(
                f"a Redis store needs redis-py; {install('redis')}", name="redis"
            ) from error
        return RedisBackend
