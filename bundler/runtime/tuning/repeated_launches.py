# SPDX-License-Identifier: Apache-2.0
"""`repeated_launches`: launches of a heuristic kernel after the first, without Python between the
call and the launcher.

Generated wrappers call a kernel with tensors and then whole numbers, by position, on the current
stream.  The compiled dispatcher tells such calls apart by type and alignment, as a `StaticKernel`
has it; the numbers decide about the grid, so they stand in the place of one.  `HeuristicKernel`
makes one of these after its first launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from bundler.runtime import grids
from bundler.runtime.launch.compiled_dispatch import compiled_dispatcher
from bundler.runtime.tuning import profiler_ranges
from bundler.runtime.tuning.autotuned_kernel import AutotunedKernel
from bundler.runtime.tuning.result_lookup import Choice

MAX_GRIDS = 4096
# Kinds of calls; Inductor makes a kernel of its own for each.
MAX_KINDS = 256
Args = tuple[Any, ...]
GridOf = Callable[[Choice, Args], grids.Grid]


class RepeatedLaunches:
    """Launches a kernel's calls of one form: `count` arguments by position, of which those from
    `start` on are numbers.

    Args:
        tuned: the kernel, launched.
        start, count: the form; what follows after `count` is for the grid alone.
        slow: launches any call.
        grid_of: the grid of a choice and a call.
        fixed: keywords of each launch.

    Attributes:
        launch: gets the numbers at the end of a call, then the kernel's arguments; None where there
            is no compiled dispatcher.
        device, stream: the driver's, to tell whether a stream is the current one.
    """

    def __init__(
        self,
        tuned: AutotunedKernel,
        start: int,
        count: int,
        slow: Callable[[Args], None],
        grid_of: GridOf,
        fixed: dict[str, Any],
    ) -> None:
        self.tuned, self.start, self.slow = tuned, start, slow
        self.grid_of, self.fixed = grid_of, fixed
        state = tuned.ready()
        self.device, self.stream = state.driver.device, state.driver.stream
        self._hooks, self._backend = state.hooks, state.driver.backend
        self.launch = compiled_dispatcher(
            state.driver,
            state.hooks,
            self._slow,
            self._first,
            self._measure,
            (False,) * count,
            {},
            MAX_KINDS,
            self._observed,
        )

    def _observed(self) -> bool:
        return self._hooks.present() or profiler_ranges.active()

    def _slow(self, numbers: Args, *args: Any) -> None:
        self.slow((*args[: self.start], *numbers))

    def _first(self, numbers: Args, *args: Any) -> tuple[Any, ...] | None:
        """Launch the first call of a kind; returns what the dispatcher keeps of it, None where each
        has to be looked at.
        """
        self._slow(numbers, *args)
        choice, tuned = self.tuned.known(args), self.tuned
        if len(tuned.choices) > 1:
            # `best_config` is that of the last call, so each call has to tell which it was
            tuned.again = False
        if choice is None or len(tuned.choices) > 1:
            return None
        state = tuned.ready()
        if choice.config in state.through_triton:
            return None
        repeated = state.static.repeated(args, {**self.fixed, **choice.keywords})
        if repeated is None:
            return None
        launcher, taken, cluster = repeated
        # Keywords are the same in each such call, and compiled in, so that nothing of them is
        # passed.
        if (taken if isinstance(taken, int) else max(taken) + 1) > len(args):
            return None
        known: dict[Args, tuple[int, int, int]] = {}
        return launcher, taken, known, _Repeated(choice, cluster, known), None

    def _measure(
        self, row: _Repeated, args: Args, _keywords: dict[str, Any], numbers: Args
    ) -> tuple[int, int, int]:
        grid = self.grid_of(row.choice, (*args[: self.start], *numbers))
        sizes = grids.checked(grid, self.tuned.__name__, self._backend, row.cluster)
        # True and 1.0 are equal to 1, and no sizes.
        if all(type(number) is int for number in numbers):
            if len(row.known) >= MAX_GRIDS:
                row.known.clear()
            row.known[numbers] = sizes
        return sizes


class _Repeated(NamedTuple):
    """What is known of one kind of calls: its choice, the blocks of a cluster, and grids by
    numbers.
    """

    choice: Choice
    cluster: int
    known: dict[Args, tuple[int, int, int]]


def repeated_launches(
    tuned: AutotunedKernel,
    first: Args,
    count: int,
    slow: Callable[[Args], None],
    grid_of: GridOf,
    fixed: dict[str, Any],
) -> RepeatedLaunches | None:
    """Return what launches calls like one that was launched; None where there is no compiled
    dispatcher, or the call is not of that form.

    Args:
        tuned, count, slow, grid_of, fixed: as for `RepeatedLaunches`.
        first: the call's arguments, by position.
    """
    start = len(first)
    while start and type(first[start - 1]) is int:
        start -= 1
    # A number in front of a tensor may be a size, too, and has no place in what the dispatcher
    # looks grids up by.
    if (
        tuned.options.dump is not None
        or tuned.options.plugins
        or any(type(value) is int for value in first[:start])
    ):
        return None
    found = RepeatedLaunches(tuned, start, count, slow, grid_of, fixed)
    return None if found.launch is None else found
