# SPDX-License-Identifier: Apache-2.0
"""Which pointers of a kernel become tensor descriptors that the host makes: `declared` reads it off
a function's parameters, as a default that is part of the record of a compile.

A descriptor that a kernel makes itself costs it a microsecond and scratch memory; one that comes
with the launch costs nothing there.  Whoever calls a kernel passes the same tensors in either case.
So a function says of its own arguments what a descriptor needs beside an address and a block:

    DESCRIPTORS: tl.constexpr = ("PROGRAMS", ("in_ptr0", (64, 32), (32, 1), ("YBLOCK", "R0_BLOCK")))

which is the constant that has to be other than zero, and then of each such argument its name, sizes
and strides in elements, and the block: constants by name, or numbers.  Compiles put descriptors in
the place of these arguments, and launches make tensor maps of their addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from bundler.format.launch_spec import Argument

#: The parameter whose default says it.
PARAMETER = "DESCRIPTORS"


class HostDescriptor(NamedTuple):
    """What a descriptor of an argument needs beside its address.

    Attributes:
        name: of the argument.
        shape, strides: in elements.
        block: for each dimension a number, or the name of a constant.
    """

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int | str, ...]


class Declared(NamedTuple):
    """The descriptors of a function, and the constant that is other than zero where it takes
    them.
    """

    condition: str
    descriptors: tuple[HostDescriptor, ...]


def declared(default: Any) -> Declared | None:
    """Return what a default of the parameter says; None for one that says something else, as that
    of a parameter that has the name by chance.
    """
    if not isinstance(default, tuple) or not default or not isinstance(default[0], str):
        return None
    found = [_descriptor(item) for item in default[1:]]
    known = tuple(one for one in found if one is not None)
    return Declared(default[0], known) if known and len(known) == len(found) else None


def by_place(arguments: Sequence[Argument]) -> dict[int, HostDescriptor]:
    """Return the descriptors that a recorded function may take, by the place of the argument."""
    for argument in reversed(arguments):
        if argument.name == PARAMETER and argument.constexpr and argument.default is not None:
            found = declared(argument.default.plain())
            named = {} if found is None else {one.name: one for one in found.descriptors}
            places = enumerate(one.name for one in arguments)
            return {place: named[name] for place, name in places if name in named}
    return {}


def _descriptor(item: Any) -> HostDescriptor | None:
    try:
        name, shape, strides, block = item
        rank = len(shape)
    except (TypeError, ValueError):  # it is something else
        return None
    sides = (shape, strides, block)
    is_one = (
        isinstance(name, str)
        and all(isinstance(side, tuple) and len(side) == rank for side in sides)
        and rank > 0
        and all(type(number) is int and number >= 0 for number in (*shape, *strides))
        and all(type(size) in {int, str} for size in block)
    )
    return HostDescriptor(name, shape, strides, block) if is_one else None
