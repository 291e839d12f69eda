# SPDX-License-Identifier: Apache-2.0
"""`KnownGrids`: the grids that a heuristic kernel was launched with, by config and sizes: sizes repeat, and working a grid out takes longer.

`HeuristicKernel` asks it for each launch whose config is known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bundler.runtime.heuristics import launch_grids
from bundler.runtime.heuristics.launch_grids import Grid, LaunchGrid
from bundler.runtime.tuning.result_lookup import Choice

MAX_KNOWN = 4096
Work = Callable[[Mapping[str, Any], Mapping[str, Any]], LaunchGrid]


class _OfChoice:
    """The grids of one choice."""

    def __init__(self, choice: Choice, blocks: Mapping[str, Any], places: Sequence[int]) -> None:
        self.choice, self.blocks, self.places = choice, blocks, places
        self.known: dict[tuple[int, ...], LaunchGrid] = {}


class KnownGrids:
    """Works out each grid once; any thread may ask.

    Args:
        grid: of the kernel.
        work: works a grid out from blocks and sizes, and checks it.
        arguments: names of what a call gives, in order.
        fixed: constants and options that every call has.

    Attributes:
        pure: whether a grid follows from whole numbers alone.
    """

    def __init__(
        self, grid: Grid, work: Work, arguments: Sequence[str], fixed: Mapping[str, Any]
    ) -> None:
        # The kinds of grids here look at whole numbers alone; a function of the user's may look at anything.
        self.pure = getattr(grid, "__module__", None) == launch_grids.__name__
        self._work, self._arguments, self._fixed = work, tuple(arguments), fixed
        self._choices: dict[int, _OfChoice] = {}

    def of(self, choice: Choice, args: tuple[Any, ...]) -> LaunchGrid:
        """Return the grid of a call; raises `ConfigError` and `CannotLaunchStatically` as `HeuristicKernel.grid_of`."""
        # By its number, since hashing a choice takes longer than all the rest; it is kept, so that no other object gets the number.
        mine = self._choices.get(id(choice))
        if mine is None:
            return self._first(choice, args)
        sizes = tuple([args[place] for place in mine.places])
        # True and 1.0 are equal to 1, and no sizes.
        if not self.pure or not all([type(size) is int for size in sizes]):  # noqa: C419  # a generator takes twice as long
            return self._worked_out(mine, args)
        grid = mine.known.get(sizes)
        if grid is None:
            grid = self._worked_out(mine, args)
            if len(mine.known) >= MAX_KNOWN:
                mine.known.clear()
            mine.known[sizes] = grid
        return grid

    def _first(self, choice: Choice, args: tuple[Any, ...]) -> LaunchGrid:
        # What a grid needs is a whole number in every call for which it can be worked out, so it is one in this call.
        places = [place for place, value in enumerate(args) if type(value) is int]
        mine = _OfChoice(choice, {**self._fixed, **choice.keywords}, places)
        grid = self._worked_out(mine, args)
        if len(self._choices) >= MAX_KNOWN:
            self._choices.clear()
        self._choices[id(choice)] = mine
        return grid

    def _worked_out(self, mine: _OfChoice, args: tuple[Any, ...]) -> LaunchGrid:
        named = dict(zip(self._arguments, args, strict=True))
        blocks = {**named, **mine.blocks}
        return self._work(blocks, blocks)
