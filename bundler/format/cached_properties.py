# SPDX-License-Identifier: Apache-2.0
"""`cached_property`: that of `functools` as it is since Python 3.12, without a lock, for every
room.

Up to 3.11 that property of a class has one lock for all objects, held while a value is worked out.
In a child that was forked at such a moment nobody releases the lock, and whoever asks any object
there for its value waits for ever.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or sys.version_info >= (3, 12):
    from functools import cached_property  # noqa: TID251  # the only place
else:

    class cached_property:  # noqa: N801  # it stands for a class of this name
        """A value that is worked out when it is first asked for; of threads that do so at once all
        get the same one.

        Args:
            make: returns the value, for the object.
        """

        def __init__(self, make: Any) -> None:
            self.func, self.__doc__ = make, make.__doc__

        def __set_name__(self, owner: type, name: str) -> None:
            self.attrname = name

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            if instance is None:
                return self
            # From now on the object's own dictionary answers, and this is not called.
            return instance.__dict__.setdefault(self.attrname, self.func(instance))


__all__ = ["cached_property"]
