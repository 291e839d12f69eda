# SPDX-License-Identifier: Apache-2.0
"""The index from a call to the specializations that may fit it, which `specialization_choice` and
`StaticKernel` ask.

`Group` finds the specializations of one function by the types and constants of a call.  `CallShape`
is what calls have in common that differ in constants alone; with it the specialization for such a
call is found without comparing the rest again.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Iterable, Sequence
from typing import Any

from bundler.format.constant_values import Value
from bundler.format.launch_spec import Argument
from bundler.runtime.launch.calls.argument_types import CONSTEXPR, ArgumentType
from bundler.runtime.launch.calls.specialization_match import Call, Specialization

# A mark stands for an argument: the name of its type, or (type, value) of a constant; equal marks
# fit each other.  `Reader` makes the same pairs of a call's constants.
Mark = Any
_OPEN = object()  # the mark of a constant that is filled in later
_DTYPE = "dtype"
_DOUBLE = struct.Struct(">d")
# Python's types of constants that fit a recorded one exactly when type and value are equal.
_PLAIN = frozenset({int, bool, float, type(None)})


class Group:
    """Specializations of one function, by the types and constants that a call has to have.

    Complete once all were added; any thread may ask it then.
    """

    def __init__(self, arguments: tuple[Argument, ...]) -> None:
        self.arguments = arguments
        self.members: list[Specialization] = []
        self._by_marks: dict[tuple[Mark, ...], list[Specialization]] = {}
        # Those with a type or constant that is compared in other ways than by being equal.
        self._unmarked: list[Specialization] = []
        # Those with a Triton type among their constants, which a call may name by a string, too.
        self._with_dtype: list[Specialization] = []
        # Kernels of one function mostly share their signature; the object is kept by the members.
        self._type_marks: dict[int, tuple[list[Mark], tuple[int, ...], bool]] = {}

    def add(self, specialization: Specialization) -> None:
        """Add a specialization whose arguments are the group's."""
        self.members.append(specialization)
        types, open_at, may_be_equal = self._types(specialization)
        marks = types.copy()
        for path, (tag, payload) in specialization.tagged:
            if len(path) == 1 and path[0] in open_at:
                marks[path[0]] = _recorded_mark(tag, payload)
        constants = [marks[index] for index in open_at]
        if not may_be_equal or not all(type(mark) is tuple for mark in constants):
            self._unmarked.append(specialization)
            return
        self._by_marks.setdefault(tuple(marks), []).append(specialization)
        if _DTYPE in [mark[0] for mark in constants]:
            self._with_dtype.append(specialization)

    def candidates(self, seen: Sequence[ArgumentType]) -> Sequence[Specialization]:
        """Return all that may fit a call; each has still to be compared with it."""
        marks = tuple(map(called_mark, seen))
        marked = self._by_marks.get(marks, ())
        named = (
            self._with_dtype
            if any(type(mark) is tuple and mark[0] is str for mark in marks)
            else ()
        )
        return [*marked, *self._unmarked, *(member for member in named if member not in marked)]

    def marked(self, marks: list[Mark]) -> Sequence[Specialization]:
        """Return all that have these marks."""
        return self._by_marks.get(tuple(marks), ())

    def by_marks_at(
        self, open_at: Sequence[int], others: list[Mark]
    ) -> dict[tuple[Mark, ...], Specialization]:
        """Return the specializations by their marks at these places; those alone that have these
        marks elsewhere, and no double.
        """
        closed = [index for index in range(len(others)) if index not in set(open_at)]
        # Of one place it returns what stands there, of none there is nothing to compare.
        at_closed = operator.itemgetter(*closed) if closed else len
        wanted = at_closed(others)
        return {
            tuple([marks[index] for index in open_at]): members[0]
            for marks, members in self._by_marks.items()
            if len(members) == 1 and at_closed(marks) == wanted
        }

    @property
    def takes_names(self) -> bool:
        """Whether a string of a call may stand for a constant that is recorded as something
        else.
        """
        return bool(self._unmarked or self._with_dtype)

    def _types(self, specialization: Specialization) -> tuple[list[Mark], tuple[int, ...], bool]:
        """Return the marks of the types, which parameters are constants, and whether equal marks
        can tell all types.
        """
        signature = specialization.alike.signature
        found = self._type_marks.get(id(signature))
        if found is None:
            marks = [_type_mark(kind) for _, kind in signature]
            open_at = tuple(index for index, mark in enumerate(marks) if mark is _OPEN)
            found = self._type_marks[id(signature)] = marks, open_at, None not in marks
        return found


class CallShape:
    """What calls have in common that `Reader` tells apart by their constants alone: types,
    promises, options.

    Made from one call and what it was found to fit; any thread may ask it.

    Args:
        group: the only functions of that name for the device.
        call: a call of this shape.
        seen: what Triton makes of its arguments.
        open_at: the parameters whose constants differ from call to call.
    """

    def __init__(
        self, group: Group, call: Call, seen: Sequence[ArgumentType], open_at: Sequence[int]
    ) -> None:
        self._group, self._call, self._seen, self._open_at = group, call, seen, tuple(open_at)
        self._marks = [called_mark(one) for one in seen]
        for index in open_at:
            self._marks[index] = _OPEN
        # Whether everything but the open constants fits, by what specializations share.
        self._fits: dict[tuple[int, ...], bool] = {}
        # By their constants: those that a call of this shape finds without a further look; made
        # when a second call comes.
        self._by_constants: dict[tuple[Mark, ...], Specialization] | None = None

    def find(self, constants: Iterable[Any]) -> Specialization | None:
        """Return the specialization for a call, None when only a full comparison can tell.

        Args:
            constants: the entries that `Reader` made for the open parameters, in their order.
        """
        entries = tuple(constants)
        known = self._index() if self._by_constants is None else self._by_constants
        found = known.get(entries)
        if found is not None and (self._fits.get(found.profile) or self._fits_otherwise(found)):
            return found
        marks = self._marks.copy()
        for index, entry in zip(self._open_at, entries, strict=True):
            marks[index] = self._entry_mark(entry)
        # A mark of None is equal to none that is recorded.
        fitting = [found for found in self._group.marked(marks) if self._fits_otherwise(found)]
        return fitting[0] if len(fitting) == 1 else None

    def _index(self) -> dict[tuple[Mark, ...], Specialization]:
        # A string may stand for a constant that is recorded as something else: such calls are
        # compared in full.
        self._by_constants = (
            {} if self._group.takes_names else self._group.by_marks_at(self._open_at, self._marks)
        )
        return self._by_constants

    def _entry_mark(self, entry: Any) -> Mark:
        kind = entry[0] if entry else None
        if kind in _PLAIN or (kind is str and not self._group.takes_names):
            return entry
        return (_DTYPE, entry[1]) if getattr(kind, "__name__", "") == _DTYPE else None

    def _fits_otherwise(self, specialization: Specialization) -> bool:
        profile = specialization.profile
        fits = self._fits.get(profile)
        if fits is None:
            differences = specialization.differences(self._call, self._seen, besides=self._open_at)
            fits = self._fits[profile] = next(differences, None) is None
        return fits


def _type_mark(kind: Value) -> Mark:
    if kind.tag != "str":
        return None
    return _OPEN if kind.payload == CONSTEXPR else kind.payload


def _recorded_mark(tag: str, payload: Any) -> Mark:
    """Return the mark of a recorded constant, None for one that is not simply equal to those that
    fit it.
    """
    kind = _TAGGED.get(tag)
    if kind is not None:
        return kind, payload
    if tag == "int":
        return int, int(payload)
    return (_DTYPE, payload) if tag == _DTYPE else None


_TAGGED = {"none": type(None), "bool": bool, "float": float, "str": str}


def called_mark(seen: ArgumentType) -> Mark:
    """Return the mark of an argument of a call, None for one that is not simply equal to what fits
    it.
    """
    if seen.type != CONSTEXPR:
        return seen.type if isinstance(seen.type, str) else None
    value = seen.key
    kind = type(value)
    if kind in {bool, str, type(None)}:
        return kind, value
    if isinstance(value, int):
        return int, int(value)
    if isinstance(value, float):
        return float, _DOUBLE.pack(value)  # -0.0 equals 0.0, and NaN not itself
    return (_DTYPE, str(value)) if kind.__name__ == _DTYPE else None
