# SPDX-License-Identifier: Apache-2.0
"""`record`: makes frozen dataclasses, in a third of the time that `dataclasses.dataclass` takes for one.

A new process that restores makes twenty classes before it reads the first byte.  The standard library compiles five functions for
each; here one is compiled, and the others are shared.  What comes out is a dataclass: `fields`, `replace`, equality, hash, repr and
`FrozenInstanceError` are the same.  For the modules that a restore imports.
"""

from __future__ import annotations

import dataclasses
from operator import attrgetter, ge, gt, le, lt
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as record
else:

    def record(cls: Any = None, /, *, frozen: bool, repr: bool = True, order: bool = False) -> Any:  # noqa: A002  # as dataclasses.dataclass
        """Return the class as a frozen dataclass; arguments as of `dataclasses.dataclass`."""
        if not frozen:
            raise TypeError("a record is frozen")
        if cls is None:
            return lambda cls: _made(cls, with_repr=repr, with_order=order)
        return _made(cls, with_repr=repr, with_order=order)


__all__ = ["record"]


def _made(cls: type, *, with_repr: bool, with_order: bool) -> type:
    # For the fields alone: nothing is compiled.
    made: type = dataclasses.dataclass(init=False, repr=False, eq=False)(cls)
    fields = dataclasses.fields(made)
    methods: dict[str, Any] = {"__init__": _initializer(cls, fields), **_guards(cls, {field.name for field in fields})}
    if "__eq__" not in vars(cls):
        methods |= _comparisons([field.name for field in fields if field.compare])
    if with_order:
        methods |= _orders([field.name for field in fields if field.compare])
    if with_repr and "__repr__" not in vars(cls):
        methods["__repr__"] = _repr
    for name, method in methods.items():
        setattr(made, name, method)
    return made


def _initializer(cls: type, fields: tuple[dataclasses.Field[Any], ...]) -> Any:
    """Return `__init__`, which sets all fields at once: one by one, as a frozen dataclass does, takes longer."""
    known: dict[str, Any] = {"_absent": dataclasses.MISSING}
    parameters, values = [], []
    for field in fields:
        name, value, default = field.name, field.name, ""
        if field.default is not dataclasses.MISSING:
            known[f"_default_{name}"], default = field.default, f"=_default_{name}"
        elif field.default_factory is not dataclasses.MISSING:
            known[f"_make_{name}"], default = field.default_factory, "=_absent"
            value = f"_make_{name}() if {name} is _absent else {name}"
        parameters.append(f"{name}: {field.type!r}{default}")
        values.append(f"{name}={value}")
    then = "\n    self.__post_init__()" if hasattr(cls, "__post_init__") else ""
    source = (
        f"def __init__(self, {', '.join(parameters)}) -> None:\n    self.__dict__.update({', '.join(values)}){then}"
    )
    exec(source, known)  # noqa: S102  # names and annotations of our own classes
    made = known["__init__"]
    made.__qualname__, made.__module__ = f"{cls.__qualname__}.__init__", cls.__module__
    return made


def _guards(cls: type, names: set[str]) -> dict[str, Any]:
    """Return what refuses changes, in a class that is derived from this one only those of the fields."""

    def __setattr__(self: Any, name: str, value: Any) -> None:  # noqa: N807  # it becomes that method
        if type(self) is cls or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
        object.__setattr__(self, name, value)

    def __delattr__(self: Any, name: str) -> None:  # noqa: N807  # it becomes that method
        if type(self) is cls or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
        object.__delattr__(self, name)

    return {"__setattr__": __setattr__, "__delattr__": __delattr__}


def _comparisons(names: list[str]) -> dict[str, Any]:
    """Return equality and hash by these fields."""
    # Of two names and more it returns a tuple.
    values = attrgetter(*names, *["__class__"] * (2 - len(names)))

    def __eq__(self: Any, other: object) -> Any:  # noqa: N807  # it becomes that method
        return values(self) == values(other) if other.__class__ is self.__class__ else NotImplemented

    def __hash__(self: Any) -> int:  # noqa: N807  # it becomes that method
        return hash(values(self))

    return {"__eq__": __eq__, "__hash__": __hash__}


def _orders(names: list[str]) -> dict[str, Any]:
    """Return the four comparisons, by these fields."""
    values = attrgetter(*names)

    def compared(by: Any) -> Any:
        return lambda one, two: by(values(one), values(two)) if two.__class__ is one.__class__ else NotImplemented

    return {"__lt__": compared(lt), "__le__": compared(le), "__gt__": compared(gt), "__ge__": compared(ge)}


def _repr(self: Any) -> str:
    shown = [f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self) if field.repr]
    return f"{type(self).__qualname__}({', '.join(shown)})"
