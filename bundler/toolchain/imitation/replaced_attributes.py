# SPDX-License-Identifier: Apache-2.0
"""`Replacements`: attributes of modules and classes that stand-ins take the place of, and that get
their values back.

A capture replaces functions of torch and Triton with it while a program runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ABSENT: Any = object()


class Replacements:
    """What was replaced, in order; `undo` puts everything back, the last first.  Not
    thread-safe.
    """

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Give an attribute another value; one that the owner itself lacks is removed again by
        `undo`.
        """
        self._before.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def put_all(self, owner: Any, values: Mapping[str, Any]) -> None:
        """Give several attributes other values."""
        for name, value in values.items():
            self.put(owner, name, value)

    def undo(self) -> None:
        """Put everything back; twice is fine."""
        while self._before:
            owner, name, value = self._before.pop()
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
