# SPDX-License-Identifier: Apache-2.0
"""Turns errors of redis-py and error replies of Redis into `BackendError`; no other module does so.

Every exchange with a server runs inside `errors_by_meaning`; `meaning` and `is_wrong_type` read
single replies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from redis.exceptions import RedisClusterException, RedisError, ResponseError

from bundler.backends.backend_errors import (
    BackendDenied,
    BackendError,
    BackendFull,
    BackendTimeout,
    BackendUnavailable,
)


class OverlongReply(BackendUnavailable):
    """A server sent more than what was asked for may have."""


# By name, since releases of redis-py have different classes; whatever is not here means that the
# server is unavailable.
_MEANINGS: dict[str, type[BackendError]] = {
    "OutOfMemoryError": BackendFull,
    "AuthenticationError": BackendDenied,
    "AuthenticationWrongNumberOfArgsError": BackendDenied,
    "AuthorizationError": BackendDenied,
    "ExternalAuthProviderError": BackendDenied,
    "NoPermissionError": BackendDenied,
    "ReadOnlyError": BackendDenied,
    "TimeoutError": BackendTimeout,
}
# Inside a script an error loses its class; these are words of the server, the last two those of
# 6.2.
_WORDS = {
    BackendFull: ("OOM command",),
    BackendDenied: (
        "NOPERM",
        "NOAUTH",
        "WRONGPASS",
        "READONLY",
        "can't run this command",
        "can't access at least one",
    ),
}
_FIXES = {
    BackendFull: "raise maxmemory, set maxmemory-policy allkeys-lru, or prune",
    BackendDenied: "check user, password and the user's rights; a replica takes no writes",
}


def meaning(error: Exception, shown: str) -> BackendError:
    """Return what an error of redis-py, or of the system below it, means."""
    # What is read goes on behind it; redis-py ends its sentences.
    text = str(error).rstrip(".") or type(error).__name__
    names = [cls.__name__ for cls in type(error).__mro__]
    kind = next((_MEANINGS[name] for name in names if name in _MEANINGS), BackendUnavailable)
    kind = next((k for k, words in _WORDS.items() if any(word in text for word in words)), kind)
    fix = _FIXES.get(kind)
    return kind(f"{shown}: {text}{f'; {fix}' if fix else ''}")


def is_wrong_type(answer: object) -> bool:
    """Tell whether a server answered that a key holds a list, a hash or the like, and no string."""
    return isinstance(answer, ResponseError) and str(answer).startswith("WRONGTYPE")


@contextlib.contextmanager
def errors_by_meaning(shown: str) -> Iterator[None]:
    """Raise `BackendError` for errors of redis-py; a host name that cannot be one is a
    `UnicodeError`.
    """
    try:
        yield
    except (RedisError, RedisClusterException, OSError, UnicodeError) as error:
        raise meaning(error, shown) from error
