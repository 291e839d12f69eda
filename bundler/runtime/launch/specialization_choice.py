# SPDX-License-Identifier: Apache-2.0
"""`Choices`: chooses the specialization for a call, or says why there is none; `StaticKernel` asks
it for each new shape of call.

`Group` finds the specializations of one function by the types and constants of a call.  `CallShape`
is what calls have in common that differ in constants alone; with it the specialization for such a
call is found without comparing the rest again.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from bundler.errors import CannotLaunchStatically, NotFound, ToolchainMismatch
from bundler.format.constant_values import Value
from bundler.format.launch_spec import Argument
from bundler.format.summary import count
from bundler.runtime.launch.argument_types import CONSTEXPR, ArgumentType
from bundler.runtime.launch.specialization_match import Call, Specialization, bind

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
        # Without its tensors, whose memory would stay as long as the kernel.
        values = tuple(map(_constants_of, call.values, seen))
        self._call = Call(values, call.options)
        self._group, self._seen, self._open_at = group, seen, tuple(open_at)
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


def _constants_of(value: Any, seen: ArgumentType) -> Any:
    """Return of an argument what calls are compared by beside its type: constants."""
    if isinstance(seen.type, tuple):
        inside = map(ArgumentType, seen.type, seen.key)
        return tuple(map(_constants_of, value, inside))
    return value if seen.type == CONSTEXPR else None


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


MAX_SHOWN = 8
_KEY_CHARACTERS = 8
# The parts of a key that say which program was compiled.
_PROGRAM = ("source.hash", "option.")


class Chosen(NamedTuple):
    """The specialization for a call, the call's arguments by parameter, and what Triton makes of
    them.
    """

    specialization: Specialization
    call: Call
    seen: Sequence[ArgumentType]


class Choices:
    """The specializations of one kernel, ordered so that a call is compared with the few that may
    fit it.

    Immutable but for what it finds out once a target; any thread may use it.

    Args:
        name: the kernel's, for errors.
        specializations: all that were recorded.
    """

    def __init__(self, name: str, specializations: Sequence[Specialization]) -> None:
        self._name, self._all = name, tuple(specializations)
        self._groups: dict[str, tuple[Group, ...]] = {}

    def choose(self, target: str, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Chosen:
        """Return the specialization that Triton would compile for a call.

        Args:
            target: of the device, such as `cuda:90`.
            args, keywords: the call.

        Raises:
            ToolchainMismatch: none was compiled for the target.
            NotFound: none fits; says for each what differs.
            CannotLaunchStatically: the arguments fit no function, or two specializations fit that
                are not the same.
        """
        groups = self._of(target)
        calls = _calls(self._name, groups, args, keywords)
        found = [
            (specialization.closeness(seen), Chosen(specialization, call, seen))
            for group, call in calls
            for seen in [group.members[0].seen(call)]
            for specialization in group.candidates(seen)
            if next(specialization.differences(call, seen), None) is None
        ]
        if not found:
            raise _none_fits(self._name, target, calls)
        return _best(self._name, found)

    def shape(
        self, target: str, chosen: Chosen, by_position: Sequence[int], by_name: Sequence[str]
    ) -> CallShape | None:
        """Return what a call has in common with those that differ in constants alone, None when
        only full comparisons can tell.

        Args:
            target: that the choice was made for.
            chosen: for the call.
            by_position: the numbers of the parameters whose constants differ from call to call.
            by_name: further such parameters; their constants will be given in this order, after
                those by position.
        """
        groups = self._of(target)
        if (
            len(groups) != 1
        ):  # two functions of one name: which of them is called is a question of all arguments
            return None
        numbers = {argument.name: number for number, argument in enumerate(groups[0].arguments)}
        if not numbers.keys() >= {
            *by_name
        }:  # an option that a function of this name for another target has as a parameter
            return None
        return CallShape(
            groups[0],
            chosen.call,
            chosen.seen,
            [*by_position, *(numbers[name] for name in by_name)],
        )

    def _of(self, target: str) -> tuple[Group, ...]:
        groups = self._groups.get(target)
        if groups is None:
            groups = self._groups[target] = self._grouped(target)
        return groups

    def _grouped(self, target: str) -> tuple[Group, ...]:
        """Return the specializations for a target by the parameters of their functions: two
        functions may have one name.
        """
        groups: dict[tuple[Argument, ...], Group] = {}
        group: Group | None = None
        backend, _, arch = target.partition(":")
        for specialization in self._all:
            compiled_for = specialization.target
            if compiled_for.arch == arch and compiled_for.backend == backend:
                arguments = specialization.arguments
                # Kernels of one function mostly share the tuple, and comparing it takes longer than
                # all the rest.
                if group is None or group.arguments is not arguments:
                    group = groups.setdefault(arguments, Group(arguments))
                group.add(specialization)
        if groups:
            return tuple(groups.values())
        have = ", ".join(sorted({str(s.target) for s in self._all})) or "nothing yet"
        raise ToolchainMismatch(
            f"{self._name}: compiled for {have}, and this device is {target}; a binary runs on its"
            " own architecture only, so record the kernel for this one",
            kernel=self._name,
            expected=target,
            got=have,
        )


def _calls(
    name: str, groups: Sequence[Group], args: tuple[Any, ...], keywords: Mapping[str, Any]
) -> list[tuple[Group, Call]]:
    """Return the call as each function of that name would get it; functions that it does not fit
    are left out.
    """
    calls: list[tuple[Group, Call]] = []
    refused = None
    for group in groups:
        try:
            calls.append((group, bind(name, group.arguments, args, keywords)))
        except CannotLaunchStatically as error:
            refused = error
    if not calls and refused is not None:
        raise refused
    return calls


def _none_fits(name: str, target: str, calls: Sequence[tuple[Group, Call]]) -> NotFound:
    reasons = [
        (member, list(member.differences(call, seen)))
        for group, call in calls
        for seen in [group.members[0].seen(call)]
        for member in group.members
    ]
    closest = sorted(reasons, key=lambda pair: (len(pair[1]), pair[0].key))
    lines = [
        f"  {specialization.key[:_KEY_CHARACTERS]} ({specialization.describe()}):"
        f" {'; '.join(differences)}"
        for specialization, differences in closest[:MAX_SHOWN]
    ]
    if len(closest) > MAX_SHOWN:
        lines.append(f"  and {len(closest) - MAX_SHOWN} more")
    return NotFound(
        f"{name}: none of the {count(len(closest), 'recorded specialization')} for {target} fits"
        " this call; what differs, closest first:\n"
        + "\n".join(lines)
        + "\nRecord this call too, or give load() the JIT function as fallback",
        kernel=name,
        target=target,
        differences=tuple((specialization.key, tuple(words)) for specialization, words in closest),
    )


def _best(name: str, found: list[tuple[tuple[int, int], Chosen]]) -> Chosen:
    best = max(score for score, _ in found)
    chosen = sorted(
        (choice for score, choice in found if score == best),
        key=lambda choice: choice.specialization.key,
    )
    first = chosen[0].specialization
    for other, *_ in chosen[1:]:
        apart = _apart(first, other)
        if apart:
            raise CannotLaunchStatically(
                f"{name}: {len(chosen)} recorded specializations fit this call, and differ in"
                f" {', '.join(apart)}; give the option that tells them apart, or launch one by"
                " handle_of(key): " + ", ".join(choice.specialization.key for choice in chosen),
                kernel=name,
                keys=tuple(choice.specialization.key for choice in chosen),
            )
    return chosen[0]


def _apart(one: Specialization, other: Specialization) -> tuple[str, ...]:
    """Return what makes two kernels that fit one call different programs; two compilers' work on
    one program is not.
    """
    if one.kernel.binary.digest == other.kernel.binary.digest:
        return ()
    mine, theirs = one.kernel.parts, other.kernel.parts
    if mine is None or theirs is None:
        return ("what they were made from",)
    return tuple(
        part
        for part, here, there in mine.diff(theirs)
        if part.startswith(_PROGRAM) and here is not None and there is not None
    )[:MAX_SHOWN]
