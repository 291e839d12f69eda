# SPDX-License-Identifier: Apache-2.0
"""`Choices`: chooses the specialization for a call, or says why there is none; `StaticKernel` asks
it for each new shape of call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bundler.errors import CannotLaunchStatically, NotFound, ToolchainMismatch
from bundler.format.launch_spec import Argument
from bundler.format.summary import count
from bundler.runtime.launch.calls.argument_types import ArgumentType
from bundler.runtime.launch.calls.specialization_index import CallShape, Group
from bundler.runtime.launch.calls.specialization_match import Call, Specialization, bind

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
