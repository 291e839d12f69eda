# SPDX-License-Identifier: Apache-2.0
"""`Choices`: chooses the specialization for a call, or says why there is none; `StaticKernel` asks it for each new kind of call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bundler.errors import CannotLaunchStatically, NotFound, ToolchainMismatch
from bundler.format.constant_values import Value
from bundler.format.launch_spec import Argument
from bundler.format.summary import count
from bundler.runtime.launch.argument_types import CONSTEXPR, Seen
from bundler.runtime.launch.specialization_match import Call, Specialization, bind

MAX_SHOWN = 8
_KEY_CHARACTERS = 8
# The parts of a key that say which program was compiled.
_PROGRAM = ("source.hash", "option.")


class Choices:
    """The specializations of one kernel, ordered so that a call is compared with the few that may fit it.

    Immutable but for what it finds out once a target; any thread may use it.

    Args:
        name: the kernel's, for errors.
        specializations: all that were recorded.
    """

    def __init__(self, name: str, specializations: Sequence[Specialization]) -> None:
        self._name, self._all = name, tuple(specializations)
        self._groups: dict[str, tuple[_Group, ...]] = {}

    def choose(self, target: str, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> tuple[Specialization, Call]:
        """Return the specialization that Triton would compile for a call, and the call's arguments by parameter.

        Args:
            target: of the device, such as `cuda:90`.
            args, keywords: the call.

        Raises:
            ToolchainMismatch: none was compiled for the target.
            NotFound: none fits; says for each what differs.
            CannotLaunchStatically: the arguments fit no function, or two specializations fit that are not the same.
        """
        groups = self._groups.get(target)
        if groups is None:
            groups = self._groups[target] = self._grouped(target)
        calls = _calls(self._name, groups, args, keywords)
        found = [
            (specialization.closeness(seen), specialization, call)
            for group, call in calls
            for seen in [group.members[0].seen(call)]
            for specialization in group.candidates(seen)
            if next(specialization.differences(call, seen), None) is None
        ]
        if not found:
            raise _none_fits(self._name, target, calls)
        return _best(self._name, found)

    def _grouped(self, target: str) -> tuple[_Group, ...]:
        """Return the specializations for a target by the parameters of their functions: two functions may have one name."""
        groups: dict[tuple[Argument, ...], _Group] = {}
        group: _Group | None = None
        for specialization in self._all:
            if str(specialization.target) == target:
                arguments = specialization.arguments
                # Kernels of one function mostly share the tuple, and comparing it takes longer than all the rest.
                if group is None or group.arguments is not arguments:
                    group = groups.setdefault(arguments, _Group(arguments))
                group.add(specialization)
        if groups:
            return tuple(groups.values())
        have = ", ".join(sorted({str(s.target) for s in self._all})) or "nothing yet"
        raise ToolchainMismatch(
            f"{self._name}: compiled for {have}, and this device is {target}; a binary runs on its own architecture only, so "
            "record the kernel for this one",
            kernel=self._name, expected=target, got=have,
        )  # fmt: skip


class _Group:
    """Specializations of one function, by the types and constants that a call has to have."""

    def __init__(self, arguments: tuple[Argument, ...]) -> None:
        self.arguments = arguments
        self.members: list[Specialization] = []
        self._exact: dict[tuple[Any, ...], list[Specialization]] = {}
        # Those with a type or constant that is compared in other ways than by being equal.
        self._other: list[Specialization] = []

    def add(self, specialization: Specialization) -> None:
        self.members.append(specialization)
        constants = specialization.constants
        marks = [_recorded(kind, constants.get((index,))) for index, kind in enumerate(specialization.types)]
        if None in marks:
            self._other.append(specialization)
        else:
            self._exact.setdefault(tuple(marks), []).append(specialization)

    def candidates(self, seen: Sequence[Seen]) -> Sequence[Specialization]:
        """Return all that may fit a call; each has still to be compared with it."""
        exact = self._exact.get(tuple(map(_called, seen)), ())
        return [*exact, *self._other] if self._other else exact


def _recorded(kind: Value, constant: Value | None) -> tuple[str, Any] | None:
    """Return what stands for a recorded argument: its type, or its constant; None for one that is not simply equal."""
    if kind.tag != "str":
        return None
    if kind.payload != CONSTEXPR:
        return kind.payload, None
    if constant is None or constant.tag not in _PLAIN:
        return None
    return constant.tag, constant.plain()


def _called(seen: Seen) -> tuple[str, Any] | None:
    """Return what stands for an argument of a call, equal to `_recorded` of what fits it."""
    if seen.type != CONSTEXPR:
        return (seen.type, None) if isinstance(seen.type, str) else None
    value = seen.key
    if value is None:
        return "none", None
    tag = "bool" if type(value) is bool else "int" if isinstance(value, int) else "str" if type(value) is str else ""
    return (tag, int(value) if tag == "int" else value) if tag else None


# Tags of constants that fit a call exactly when tag and value are equal.
_PLAIN = frozenset({"none", "bool", "int", "str"})


def _calls(
    name: str, groups: Sequence[_Group], args: tuple[Any, ...], keywords: Mapping[str, Any]
) -> list[tuple[_Group, Call]]:
    """Return the call as each function of that name would get it; functions that it does not fit are left out."""
    calls: list[tuple[_Group, Call]] = []
    refused = None
    for group in groups:
        try:
            calls.append((group, bind(name, group.arguments, args, keywords)))
        except CannotLaunchStatically as error:
            refused = error
    if not calls and refused is not None:
        raise refused
    return calls


def _none_fits(name: str, target: str, calls: Sequence[tuple[_Group, Call]]) -> NotFound:
    reasons = [
        (member, list(member.differences(call, seen)))
        for group, call in calls
        for seen in [group.members[0].seen(call)]
        for member in group.members
    ]
    closest = sorted(reasons, key=lambda pair: (len(pair[1]), pair[0].key))
    lines = [
        f"  {specialization.key[:_KEY_CHARACTERS]} ({specialization.describe()}): {'; '.join(differences)}"
        for specialization, differences in closest[:MAX_SHOWN]
    ]
    if len(closest) > MAX_SHOWN:
        lines.append(f"  and {len(closest) - MAX_SHOWN} more")
    return NotFound(
        f"{name}: none of the {count(len(closest), 'recorded specialization')} for {target} fits this call; what differs, closest "
        "first:\n" + "\n".join(lines) + "\nRecord this call too, or give load() the JIT function as fallback",
        kernel=name,
        target=target,
        differences=tuple((specialization.key, tuple(words)) for specialization, words in closest),
    )


def _best(name: str, found: list[tuple[tuple[int, int], Specialization, Call]]) -> tuple[Specialization, Call]:
    best = max(score for score, _, _ in found)
    chosen = sorted(((s, call) for score, s, call in found if score == best), key=lambda pair: pair[0].key)
    first = chosen[0][0]
    for other, _ in chosen[1:]:
        apart = _apart(first, other)
        if apart:
            raise CannotLaunchStatically(
                f"{name}: {len(chosen)} recorded specializations fit this call, and differ in {', '.join(apart)}; give the "
                "option that tells them apart, or launch one by handle_of(key): " + ", ".join(s.key for s, _ in chosen),
                kernel=name,
                keys=tuple(s.key for s, _ in chosen),
            )
    return chosen[0]


def _apart(one: Specialization, other: Specialization) -> tuple[str, ...]:
    """Return what makes two kernels that fit one call different programs; two compilers' work on one program is not."""
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
