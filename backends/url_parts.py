# SPDX-License-Identifier: Apache-2.0
"""What URLs of all kinds of store have in common: `without_secrets` is what may be printed of one,
`seconds` reads a setting.
"""

from __future__ import annotations

from urllib.parse import SplitResult

from bundler.backends.backend_errors import BadSettings

MAX_SECONDS = 3600.0


def without_secrets(parts: SplitResult) -> str:
    """Return a URL without what may be secret: user, password and settings."""
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()


def seconds(shown: str, name: str, text: str, *, zero: bool = False) -> float:
    """Return the seconds that a setting says; `zero` for one that may be 0.

    Raises:
        BadSettings: it says something else.
    """
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found <= MAX_SECONDS or (found == 0 and not zero):
        least = "from 0" if zero else "more than 0,"
        raise BadSettings(
            f"{shown}: {name}={text!r:.40}: expected seconds, {least} to {MAX_SECONDS:.0f}"
        )
    return found
