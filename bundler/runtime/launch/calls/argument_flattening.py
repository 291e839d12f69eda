# SPDX-License-Identifier: Apache-2.0
"""`feed_of`: from a call's arguments to the values that a launcher packs, for `Handle` and
`StaticKernel`.

Tuples and tensor descriptors are taken apart, and constants left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bundler.errors import CannotLaunchStatically
from bundler.format.summary import count
from bundler.runtime.launch.calls.argument_types import is_descriptor
from bundler.runtime.launch.drivers.driver import Driver
from bundler.runtime.launch.plans.plan import TENSOR_MAP, LaunchPlan, Piece, TensorMap

Feed = Callable[[Sequence[Any]], Sequence[Any]]


def feed_of(plan: LaunchPlan, driver: Driver) -> Feed:
    """Return what makes of a call's arguments, one for each parameter of the function, the values
    for the launcher.
    """
    pieces = plan.pieces
    if all(len(piece.path) == 1 and piece.rank is None for piece in pieces) and _one_each(pieces):
        return _picking([piece.path[0] for piece in pieces])
    return _NestedArguments(plan, driver)


def _one_each(pieces: Sequence[Piece]) -> bool:
    return len({piece.path for piece in pieces}) == len(pieces)


def _picking(indices: list[int]) -> Feed:
    count = len(indices)
    if indices == list(range(count)):
        return lambda arguments: arguments[:count]
    return lambda arguments: [arguments[index] for index in indices]


class _NestedArguments:
    """For kernels with tuples or tensor descriptors among their arguments."""

    def __init__(self, plan: LaunchPlan, driver: Driver) -> None:
        self._plan, self._driver = plan, driver
        maps = {tensor_map.argument: tensor_map for tensor_map in plan.tensor_maps}
        # One step an argument: its first piece, how many pieces it has, and the map that a
        # descriptor becomes.
        self._steps: list[tuple[Piece, int, TensorMap | None]] = []
        for number, piece in enumerate(plan.pieces):
            if piece.rank is not None or not self._steps or self._steps[-1][0].path != piece.path:
                self._steps.append((piece, 1, maps.get(number)))
            else:
                first, size, tensor_map = self._steps[-1]
                self._steps[-1] = (first, size + 1, tensor_map)

    def __call__(self, arguments: Sequence[Any]) -> list[Any]:
        values: list[Any] = []
        for piece, size, tensor_map in self._steps:
            value: Any = arguments
            for index in piece.path:
                value = value[index]
            if piece.rank is None:
                values.append(value)
            else:
                values.extend(self._apart(piece, size, tensor_map, value))
        return values

    def _apart(
        self, piece: Piece, size: int, tensor_map: TensorMap | None, value: Any
    ) -> list[Any]:
        """Return what Triton's launcher passes for a tensor descriptor."""
        rank = piece.rank or 0
        if not is_descriptor(value) or len(value.shape) != rank or len(value.strides) != rank:
            raise CannotLaunchStatically(
                f"{self._plan.kernel}: argument {piece.name!r}: expected a tensor descriptor of"
                f" {count(rank, 'dimension')}, got {type(value).__name__}",
                kernel=self._plan.kernel,
                argument=piece.name,
                expected=rank,
            )
        sides = [*map(int, value.shape), *map(int, value.strides)]
        if piece.kind == TENSOR_MAP and tensor_map is not None:
            return [self._driver.tensor_map(self._plan, tensor_map, value), *sides]
        # A pointer, shape and strides, then flags as many as this Triton passes, then shape and
        # strides again.
        flags = [
            getattr(value, "padding", "zero") == "nan",
            bool(getattr(value, "round_f32_to_tf32", False)),
        ]
        return [value.base, *sides, *flags[: size - 1 - 2 * len(sides)], *sides]
