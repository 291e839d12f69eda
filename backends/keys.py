# SPDX-License-Identifier: Apache-2.0
"""The grammar of keys: `a/b/c`, safe as a path on every file system and as text on every server.

`check_key`, `check_keys` and `check_prefix` raise `InvalidKey`; every byte store calls them before
it looks at a key.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from bundler.backends.backend_errors import InvalidKey

KEY_CHARACTERS = 400
KEY_DEPTH = 8
_COMPONENT = "[A-Za-z0-9_][A-Za-z0-9._-]{0,127}"
_KEY = re.compile(f"{_COMPONENT}(?:/{_COMPONENT}){{0,{KEY_DEPTH - 1}}}")


def is_key(text: str) -> bool:
    """Tell whether a text is a key."""
    return len(text) <= KEY_CHARACTERS and _KEY.fullmatch(text) is not None


def check_prefix(prefix: str) -> str:
    """Return what a listing is restricted to: a key, or the empty text for everything; raises
    `InvalidKey`.
    """
    return prefix and check_key(prefix)


def check_keys(keys: Iterable[str]) -> list[str]:
    """Return keys if they are some, which is sooner known of many at once; raises as
    `check_key`.
    """
    some = [*keys]
    if not all(map(_KEY.fullmatch, some)) or max(map(len, some), default=0) > KEY_CHARACTERS:
        some = [*map(check_key, some)]
    return some


def check_key(key: str) -> str:
    """Return `key` if it is one.

    Raises:
        InvalidKey: it is empty, too long or too deep, or a component begins with other than a
            letter, digit or `_`.
    """
    if not is_key(key):
        raise InvalidKey(
            f"not a key: {key!r:.80}; expected at most {KEY_DEPTH} components of A-Z a-z 0-9 . _ -"
            f" joined by /, each beginning with a letter, digit or _, {KEY_CHARACTERS} characters"
            " in all"
        )
    return key
