# SPDX-License-Identifier: Apache-2.0
"""`Packer`: packs the values of a launch into the parameter buffer, byte for byte as the binary
declares it.

It is the only packer in Python: the ctypes launcher, the dry driver and the checks of a handle use
it.  The extension `_launch` packs common values itself, leaves the others and the words of an error
to `Packer`, and is held to the same bytes by a test.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from bundler.errors import CannotLaunchStatically
from bundler.format.summary import count
from bundler.runtime.launch.plan import (
    CODES,
    GLOBAL_SCRATCH,
    PROFILE_SCRATCH,
    TENSOR_MAP,
    TENSOR_MAP_BYTES,
    LaunchPlan,
    Parameter,
)

_FLOATS = {
    "fp16": 65520.0,
    "fp32": float.fromhex("0x1.ffffffp+127"),
}  # what rounds to more than the largest, and so to infinity
_FLOAT = struct.Struct("<f")


class Packer:
    """Fills the parameter buffer of one kernel.

    Takes what Triton's launchers take, and packs it as they do: fp16 is rounded, bf16 cut off, fp32
    rounded.  An integer outside the range of its parameter is refused, which Triton's launchers of
    some releases cut off.  Immutable: any thread may use it.
    """

    def __init__(self, plan: LaunchPlan) -> None:
        self._plan = plan
        self.nbytes = plan.buffer_bytes
        self._structure = struct.Struct(_struct_format(plan))
        self._order = [(_AS_IS.get(p.kind), _CONVERTERS[p.kind], p) for p in plan.arguments]
        self._count = len(self._order)
        hidden = [p.kind for p in plan.parameters if p.argument is None]
        self._global, self._profile = GLOBAL_SCRATCH in hidden, PROFILE_SCRATCH in hidden

    def pack_into(
        self, buffer: Any, values: Sequence[Any], global_scratch: int = 0, profile_scratch: int = 0
    ) -> None:
        """Write all parameters.

        Args:
            buffer: writable, of `nbytes` bytes; what lies between parameters is set to zero.
            values: one for each argument of the plan.
            global_scratch, profile_scratch: addresses, 0 for none.

        Raises:
            CannotLaunchStatically: wrong number or kind of values, or a number out of the range of
                its parameter.
        """
        if len(values) != self._count:
            self._refuse_count(len(values))
        # Most values are of the one type that struct packs, or refuses, by itself: a call for each
        # would double the time.
        packed = [
            value if type(value) is as_is else convert(value, self, parameter)
            # naming `strict` costs as much as a value
            for value, (as_is, convert, parameter) in zip(values, self._order)  # noqa: B905
        ]
        if self._global:
            packed.append(global_scratch)
        if self._profile:
            packed.append(profile_scratch)
        try:
            self._structure.pack_into(buffer, 0, *packed)
        except struct.error:
            self._refuse_range(values, packed)

    def pack(
        self, values: Sequence[Any], global_scratch: int = 0, profile_scratch: int = 0
    ) -> bytearray:
        """Return a new parameter buffer; raises as `pack_into`."""
        buffer = bytearray(self.nbytes)
        self.pack_into(buffer, values, global_scratch, profile_scratch)
        return buffer

    def _refuse_count(self, got: int) -> NoReturn:
        names = ", ".join(parameter.name for *_, parameter in self._order)
        raise CannotLaunchStatically(
            f"{self._plan.kernel}: takes {count(self._count, 'value')} ({names}), got {got}",
            kernel=self._plan.kernel,
            expected=self._count,
            got=got,
        )

    def _refuse_range(self, values: Sequence[Any], packed: Sequence[Any]) -> NoReturn:
        for value, number, (*_, parameter) in zip(values, packed, self._order, strict=False):
            try:
                struct.pack("<" + CODES[parameter.kind], number)
            except struct.error as error:
                pointer = parameter.kind == "pointer"
                expected = (
                    "an address of 64 bits" if pointer else f"a number that fits {parameter.kind}"
                )
                raise self.refusal(parameter, value, expected) from error
        raise CannotLaunchStatically(
            f"{self._plan.kernel}: a scratch address is not a 64-bit number",
            kernel=self._plan.kernel,
        )

    def refusal(self, parameter: Parameter, value: Any, expected: str) -> CannotLaunchStatically:
        """Return the error for one value that cannot be passed."""
        got = f"{value!r:.80}" if isinstance(value, (int, float)) else type(value).__name__
        return CannotLaunchStatically(
            f"{self._plan.kernel}: argument {parameter.name!r} has kind {parameter.kind}: expected"
            f" {expected}, got {got}",
            kernel=self._plan.kernel,
            argument=parameter.name,
            expected=parameter.kind,
            got=got,
        )


def _struct_format(plan: LaunchPlan) -> str:
    """Return the format of a plan's parameter buffer, in the words of `struct`."""
    parts, at = ["<"], 0
    for parameter in plan.parameters:
        parts.append("x" * (parameter.offset - at))
        parts.append(CODES[parameter.kind])
        at = parameter.offset + parameter.size
    parts.append("x" * (plan.buffer_bytes - at))
    return "".join(parts)


# --------------------------------------- One function a kind: a value, and what struct packs for it


def _pointer(value: Any, packer: Packer, parameter: Parameter) -> int:
    if value is None:
        return 0
    try:
        address = value.data_ptr()
    except AttributeError:  # an address of a type of its own, or nothing that has one
        address = value
    if type(address) is int or (isinstance(address, int) and not isinstance(address, bool)):
        return address
    raise packer.refusal(parameter, value, "a tensor, an address or None")


def _integer(value: Any, packer: Packer, parameter: Parameter) -> int:
    if isinstance(value, int):
        return value
    raise packer.refusal(parameter, value, "an integer")


def _truth(value: Any, packer: Packer, parameter: Parameter) -> int:
    # A kernel looks at the lowest bit alone, so any other number would not be what its caller
    # meant.
    if isinstance(value, int) and value in {0, 1}:
        return value
    raise packer.refusal(parameter, value, "True or False")


def _number(value: Any, packer: Packer, parameter: Parameter) -> float:
    if isinstance(value, (float, int)):
        try:
            return float(value)
        except OverflowError as error:
            raise packer.refusal(parameter, value, "a number that a float can hold") from error
    raise packer.refusal(parameter, value, "a number")


def _single(value: Any, packer: Packer, parameter: Parameter) -> float:
    """Return what packs as C's conversion of a double, where Python's struct refuses what rounds to
    infinity.
    """
    number = _number(value, packer, parameter)
    if abs(number) >= _FLOATS["fp32"]:
        return float("inf") if number > 0 else float("-inf")
    return number


def _brain(value: Any, packer: Packer, parameter: Parameter) -> int:
    """Return the upper half of the bits of a single; Triton cuts, it does not round."""
    return int.from_bytes(_FLOAT.pack(_single(value, packer, parameter))[2:], "little")


def _half(value: Any, packer: Packer, parameter: Parameter) -> float:
    number = _number(value, packer, parameter)
    if _FLOATS["fp16"] <= abs(number) < float("inf"):
        raise packer.refusal(parameter, value, "a number that fits fp16")
    return number


def _map(value: Any, packer: Packer, parameter: Parameter) -> bytes:
    if isinstance(value, (bytes, bytearray, memoryview)) and len(value) == TENSOR_MAP_BYTES:
        return bytes(value)
    raise packer.refusal(parameter, value, f"a tensor map of {TENSOR_MAP_BYTES} bytes")


# The type whose values struct packs as they are, where there is one: its own check of the range is
# the one that holds.
_AS_IS: dict[str, type] = {
    "pointer": int,
    **{f"{sign}{bits}": int for sign in "iu" for bits in (8, 16, 32, 64)},
    "i1": bool,
    "u1": bool,
    "fp64": float,
}
_CONVERTERS: dict[str, Callable[[Any, Packer, Parameter], Any]] = {
    "pointer": _pointer,
    **{f"{sign}{bits}": _integer for sign in "iu" for bits in (8, 16, 32, 64)},
    "i1": _truth,
    "u1": _truth,
    "fp16": _half,
    "bf16": _brain,
    "fp32": _single,
    "fp64": _number,
    TENSOR_MAP: _map,
}
