# SPDX-License-Identifier: Apache-2.0
"""`Replacements`: attributes of modules and classes that stand-ins take the place of, and that get
their values back.

A capture replaces functions of torch and Triton with it while a program runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

_ABSENT: Any = object()


class Replacements(contextlib.ExitStack):
    """What was replaced; its end puts everything back, the last first.  Not thread-safe."""

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Give an attribute another value; one that the owner itself lacks is removed again at the
        end.
        """
        before = vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)
        if before is _ABSENT:
            self.callback(delattr, owner, name)
        else:
            self.callback(setattr, owner, name, before)

    def put_all(self, owner: Any, values: Mapping[str, Any]) -> None:
        """Give several attributes other values."""
        for name, value in values.items():
            self.put(owner, name, value)
