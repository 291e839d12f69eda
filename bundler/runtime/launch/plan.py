# SPDX-License-Identifier: Apache-2.0
"""`LaunchPlan`: what a driver needs to launch one kernel: where each parameter lies, how large a
block is, which attributes hold.

`plan_builder` makes it, and drivers and launchers read it.  What follows from a signature or a list
of parameters alone, which kernels that differ in their constants share, both keep in `SharedParts`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from bundler.format.cached_properties import cached_property
from bundler.format.entries import Target
from bundler.format.summary import Summarized

GLOBAL_SCRATCH, PROFILE_SCRATCH = "global_scratch", "profile_scratch"
TENSOR_MAP, TENSOR_MAP_BYTES = "tensormap", 128
# What `struct` calls each kind of parameter; a kernel's own binary says where it lies.
CODES = {
    "i1": "b",
    "i8": "b",
    "i16": "h",
    "i32": "i",
    "i64": "q",
    "u1": "B",
    "u8": "B",
    "u16": "H",
    "u32": "I",
    "u64": "Q",
    "fp16": "e",
    "bf16": "H",
    "fp32": "f",
    "fp64": "d",
    "pointer": "Q",
    GLOBAL_SCRATCH: "Q",
    PROFILE_SCRATCH: "Q",
    TENSOR_MAP: f"{TENSOR_MAP_BYTES}s",
}
KIND_BYTES = {kind: struct.calcsize(f"={code}") for kind, code in CODES.items()}


@dataclass(frozen=True)
class Parameter:
    """One parameter of the device function.

    `kind` is a key of `KIND_BYTES`; `offset` and `size` are bytes in the parameter buffer, as the
    binary declares them; `argument` is the position of the value that fills it among those given to
    `Launcher`, None for scratch.
    """

    name: str
    kind: str
    offset: int
    size: int
    argument: int | None


@dataclass(frozen=True)
class TensorMap:
    """How a host tensor descriptor becomes a 128-byte map: numbers of the driver's enumerations, as
    Triton recorded them.

    `argument` is the position of the map among the values given to `Launcher`; `elem_type` is the
    compiler's number.
    """

    argument: int
    swizzle: int
    elem_size: int
    elem_type: int
    block_size: tuple[int, ...]
    fp4_padded: bool


@dataclass(frozen=True)
class Piece:
    """Where one value given to `Launcher` comes from.

    `path` finds the argument: its index, then indices into nested tuples.  An argument that is no
    tensor descriptor has one piece; a descriptor has several in a row, and the first of them has
    its `rank`, the number of dimensions.
    """

    name: str
    kind: str
    path: tuple[int, ...]
    rank: int | None = None


@dataclass(frozen=True, repr=False)
class LaunchPlan(Summarized):
    """Everything a driver needs to launch one kernel.

    A launcher takes one value for each parameter that has an `argument`, in that order: an int,
    float or bool, a tensor, an address or None for a pointer, 128 bytes for a tensor map.
    Descriptors and tuples are taken apart before.
    """

    kernel: str
    key: str
    entry: str
    target: Target
    parameters: tuple[Parameter, ...]
    buffer_bytes: int
    block_threads: int
    cluster: int
    shared_bytes: int
    cooperative: bool
    pdl: bool
    global_scratch_bytes: int
    global_scratch_align: int
    profile_scratch_bytes: int
    profile_scratch_align: int
    tensor_maps: tuple[TensorMap, ...] = ()
    pieces: tuple[Piece, ...] = ()

    @classmethod
    def of(cls, **fields: Any) -> LaunchPlan:
        """Return the plan with all these fields."""
        plan = object.__new__(cls)
        # A frozen dataclass sets its fields one by one, which takes longer than all else of making
        # a plan.
        plan.__dict__.update(fields)
        return plan

    @cached_property
    def arguments(self) -> tuple[Parameter, ...]:
        """The parameters that a launch fills with values, in the order of those values."""
        return tuple(parameter for parameter in self.parameters if parameter.argument is not None)

    def scratch_bytes(self, programs: int, kind: str) -> int:
        """Return how much scratch a launch needs: `programs` (of the grid) times `cluster` times
        the size for one.
        """
        one = self.global_scratch_bytes if kind == GLOBAL_SCRATCH else self.profile_scratch_bytes
        return programs * self.cluster * one


K = TypeVar("K")
V = TypeVar("V")


class SharedParts(Generic[K, V]):
    """Values by the identity of an object: comparing signatures costs more than all else that is
    done with one.

    Any thread may use it; two that miss at once make a value twice.

    Args:
        limit: so many objects are kept; then all are forgotten.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        # The object is kept beside the value, so that no other gets its number.
        self._kept: dict[int, tuple[K, V]] = {}

    def get(self, key: K, make: Callable[[K], V]) -> V:
        """Return the value of an object, made by `make` when there is none."""
        found = self._kept.get(id(key))
        if found is None:
            if len(self._kept) >= self._limit:
                self._kept.clear()
            found = self._kept[id(key)] = key, make(key)
        return found[1]
