# SPDX-License-Identifier: Apache-2.0
"""`BoundCall`: what is to be done for all calls of a kernel that look alike; `StaticKernel` makes one for each kind and remembers it.

`bind_call` makes one from a call, `bind_like` from one of the same shape, whose kernel differs in constants alone.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from bundler.runtime.launch.argument_flattening import feed_of
from bundler.runtime.launch.driver import Driver, Launcher
from bundler.runtime.launch.loaded_plans import Loaded

Sizes = tuple[int, int, int]
# A place is a byte for the compiled dispatcher.
MOST_PLACES = 256
# By the grid as a caller gives it: grids repeat, and checking one costs as much as all the rest of a launch.
Grids = dict[tuple[int, ...], Sizes]


# What the compiled dispatcher keeps of a call, and what makes that for others of its shape, given their constants.
Told = tuple[Launcher, int | bytes, Grids, "BoundCall", "Again | None"]
Again = Callable[..., Told | None]


class BoundCall(NamedTuple):
    """How calls that look alike are launched.

    Attributes:
        launcher: of the kernel that they need.
        passed: makes the launcher's values of what a call gave, in its order.
        taken: what is passed of the call's values, as they come: the first so many, or those at these places; None when they have to be
            taken apart, or defaults are among them.
        grids: the grids seen so far.
        addresses: parameters that got an address as a plain number: nothing but the driver knows where that lies.
        names: of all parameters.
        defaults: of the parameters that such calls leave out.
        loaded: the kernel on its device.
    """

    launcher: Launcher
    passed: Callable[[list[Any]], Sequence[Any]]
    taken: int | bytes | None
    grids: Grids
    addresses: tuple[tuple[int, str], ...]
    names: tuple[str, ...]
    defaults: Mapping[str, Any]
    loaded: Loaded

    def told(self, again: Again | None = None) -> Told | None:
        """Return what the compiled dispatcher needs to launch more such calls, None when it cannot.

        Args:
            again: tells the same of calls that differ in constants alone.
        """
        if self.addresses or self.taken is None:
            return None
        return self.launcher, self.taken, self.grids, self, again


def bind_call(
    loaded: Loaded, driver: Driver, grids: Grids, names: tuple[str, ...], call_values: Sequence[Any],
    given: Sequence[str],
) -> BoundCall:  # fmt: skip
    """Return how a call is launched.

    Args:
        loaded: the kernel for the call, on its device.
        driver: that loaded it.
        grids: where sizes of grids are remembered.
        names: of all parameters.
        call_values: of all parameters, defaults among them.
        given: the names of what the call gave, in its order.
    """
    missing = {
        name: value for name, value in zip(names, call_values, strict=True) if name not in given
    }
    places = [
        given.index(name) if name in given else len(given) + list(missing).index(name)
        for name in names
    ]
    pointers = {
        piece.path for piece in loaded.plan.pieces if piece.kind == "pointer" and piece.rank is None
    }
    addresses = tuple(
        (places[index], name)
        for index, (name, value) in enumerate(zip(names, call_values, strict=True))
        if (index,) in pointers and isinstance(value, int) and name in given
    )
    passed, taken = _passing(loaded, driver, places, tuple(missing.values()))
    return BoundCall(loaded.launcher, passed, taken, grids, addresses, names, missing, loaded)


def bind_like(other: BoundCall, loaded: Loaded, grids: Grids) -> BoundCall | None:
    """Return how a call of the same shape is launched; None when its kernel takes its values in another way."""
    # Plans of one signature share their pieces.
    if other.taken is None or loaded.plan.pieces is not other.loaded.plan.pieces:
        return None
    _, passed, taken, _, addresses, names, defaults, _ = other
    # As `BoundCall(...)` does in one step more, which each first launch of a kernel would take.
    return tuple.__new__(
        BoundCall, (loaded.launcher, passed, taken, grids, addresses, names, defaults, loaded)
    )


def _passing(
    loaded: Loaded, driver: Driver, places: list[int], defaults: tuple[Any, ...]
) -> tuple[Callable[[list[Any]], Sequence[Any]], int | bytes | None]:
    """Return what makes the launcher's values of what a call gave, in its order, and the defaults of the rest; and what they are as `taken`."""
    pieces = loaded.plan.pieces
    if all(len(piece.path) == 1 and piece.rank is None for piece in pieces):
        wanted = [places[piece.path[0]] for piece in pieces]
        if wanted == list(range(len(pieces))):
            return operator.itemgetter(slice(0, len(pieces))), len(pieces)
        given = len(places) - len(defaults)
        # A size of 1 is compiled in, so that there is a gap where it stands in the call.
        if len(wanted) > 1 and max(wanted) < min(given, MOST_PLACES):
            return operator.itemgetter(*wanted), bytes(wanted)
    feed = feed_of(loaded.plan, driver)
    return lambda values: feed([(values + list(defaults))[place] for place in places]), None
