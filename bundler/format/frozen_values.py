# SPDX-License-Identifier: Apache-2.0
"""`FrozenValue`: base of the dataclasses that a restore imports, which are frozen and compared by
value.

`dataclass(frozen=True)` writes the methods of each class as text and compiles them, which takes a
new process 0.3 to 0.7 ms.  A class that inherits them from here and has an `__init__` of its own
says `@dataclass(init=False, repr=False, eq=False)`, which takes a tenth of that;
`dataclasses.fields`, `replace` and `asdict` work as ever.  `entries`, `manifest` and `observations`
have such classes, and the report and options of a restore.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast


class FrozenValue:
    """A value whose fields are set once, by `_set_fields`; equal to one of its class whose compared
    fields are equal.
    """

    def _set_fields(self, fields: dict[str, Any]) -> None:
        """Set the fields, given by name: the `locals()` of an `__init__` whose parameters
        they are.
        """
        del fields["self"]
        self.__dict__.update(fields)

    def __setattr__(self, name: str, value: object) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> None:
        raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")

    def __repr__(self) -> str:
        shown = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(cast(Any, self))
            if field.repr
        ]
        return f"{type(self).__qualname__}({', '.join(shown)})"

    def __eq__(self, other: object) -> bool:
        if other.__class__ is not self.__class__:
            return NotImplemented
        return _compared(self) == _compared(other)

    def __hash__(self) -> int:
        return hash(_compared(self))


def _compared(value: Any) -> tuple[Any, ...]:
    return tuple(
        [getattr(value, field.name) for field in dataclasses.fields(value) if field.compare]
    )
