# SPDX-License-Identifier: Apache-2.0
"""`stand_in`: objects that stand in for the arguments of a call which a build file or a recording
describes.

====================================  ==================================================================================
spec                                  stands for
====================================  ==================================================================================
`*fp16`, `*i32`, `*i1`, …             a tensor of which no alignment is known
`*fp16:16`                            a tensor whose address is a multiple of 16 bytes, as allocators give them
`*fp16:16:large`, `*fp16:large`       the same, in a storage of 2 GB or more: another key on AMD
`i32`, `i64`, `u64`, …                a number that is neither 1 nor known to be a multiple of 16
`i32:16`                              a multiple of 16
`i32:1`                               1, on which Triton specializes
`fp32`, `fp64`, …                     a number with a fraction
`i1`                                  true or false
`none`                                None
`tensordesc<fp16[64, 32]>`            a tensor descriptor with this block shape
====================================  ==================================================================================

A tuple of specs stands for a tuple.  What a call with such arguments is specialized on, only Triton
says.

Declarations and build plans check specs with it, `jit_specialization` calls the JIT with the
objects, and retargeting turns recorded calls back into specs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bundler.errors import ConfigError
from bundler.format.constant_values import Value
from bundler.format.launch_spec import LaunchFacts, Path

Spec = str | tuple[Any, ...]

NONE = "none"
_POINTER = re.compile(r"\*k?(\w+)((?::16)?)((?::large)?)")
_NUMBER = re.compile(r"([iu](?:8|16|32|64))((?::16|:1)?)")
_FLOATS = frozenset({"fp16", "bf16", "fp32", "fp64"})
_BOOLS = frozenset({"i1", "u1"})
# Triton says `*u1` for a tensor of booleans, and users write `*i1`.
_BOOL_POINTERS = frozenset({"*i1", "*u1"})
_DESCRIPTOR = re.compile(r"tensordesc<(\w+)\[([\d, ]+)\].*>")
_BITS = {"bf16": 16} | {f"{kind}{bits}": bits for kind in ("fp", "i", "u") for bits in (16, 32, 64)}
# Python numbers for which Triton chooses each type: one that is neither 1 nor a multiple of 16, and
# a multiple of 16.
_NARROW = (17, 16)
_WIDE = {"i64": ((1 << 40) + 1, 1 << 40), "u64": ((1 << 63) + 1, 1 << 63)}
_UNALIGNED, _ALIGNED = 8, 16
_LARGE_BYTES = 1 << 31


@dataclass(frozen=True)
class ElementType:
    """What a tensor's dtype is to Triton: a name, and how many bytes."""

    name: str

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _BITS.get(self.name, 8) // 8

    @property
    def is_floating_point(self) -> bool:
        """Whether it has fractions."""
        return self.name[:2] in {"fp", "bf"}

    def __str__(self) -> str:
        return self.name


class StandInTensor:
    """A tensor as far as Triton's specializer looks at one."""

    def __init__(self, element: str, *, aligned: bool, large: bool) -> None:
        self.dtype = ElementType(element)
        self._address = _ALIGNED if aligned else _UNALIGNED
        self._range = _LARGE_BYTES if large else 0

    def data_ptr(self) -> int:
        """Return an address; nothing is there."""
        return self._address

    def ptr_range(self) -> int:
        """Return how many bytes from there on may be used."""
        return self._range


def stand_in(spec: Spec, name: str) -> Any:
    """Return an object to call Triton with.

    Args:
        spec: as in the table of this module.
        name: whose it is, for the error.

    Raises:
        ConfigError: not such a text.
    """
    if isinstance(spec, tuple):
        return tuple(stand_in(item, name) for item in spec)
    if not isinstance(spec, str):
        raise ConfigError(
            f"argument {name}: expected a type such as '*fp16:16' or 'i32', got {spec!r}", got=spec
        )
    if spec == NONE:
        return None
    if spec in _FLOATS:
        return 1.5
    if spec in _BOOLS:
        return True
    if match := _NUMBER.fullmatch(spec):
        general, multiple = _WIDE.get(match[1], _NARROW)
        return {":1": 1, ":16": multiple}.get(match[2], general)
    if match := _POINTER.fullmatch(spec):
        return StandInTensor(match[1], aligned=bool(match[2]), large=bool(match[3]))
    if match := _DESCRIPTOR.fullmatch(spec):
        return _descriptor(match[1], [int(size) for size in match[2].split(",")])
    raise ConfigError(
        f"argument {name}: {spec!r} is not a type; expected '*fp16:16', 'i32', 'i32:16', 'i32:1',"
        " 'fp32', 'i1', 'none' or 'tensordesc<fp16[64, 32]>'",
        got=spec,
    )


def _descriptor(element: str, block: list[int]) -> Any:
    base = StandInTensor(element, aligned=True, large=False)
    # Triton does not specialize on shape and strides; these are legal for every block and element.
    strides = [1 << 10 * (len(block) - 1 - axis) for axis in range(len(block))]
    return tensor_descriptor(base, [1 << 10] * len(block), strides, block)


def tensor_descriptor(
    base: Any, shape: Sequence[int], strides: Sequence[int], block: Sequence[int]
) -> Any:
    """Return Triton's own descriptor of a tensor, or of what stands in for one."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(base, list(shape), list(strides), list(block))


def same_type(found: Any, spec: Spec) -> bool:
    """Whether the type that Triton found is the one of a spec; an argument that it made a constant
    has no type any more.
    """
    if isinstance(spec, tuple):
        alike = isinstance(found, tuple) and len(found) == len(spec)
        return alike and all(map(same_type, found, spec))
    if found == "constexpr":
        return True
    # Without its value class.
    expected = spec if spec.startswith("tensordesc") else spec.partition(":")[0]
    for kinds in (_BOOLS, _BOOL_POINTERS):
        if expected in kinds:
            return found in kinds
    plain = [str(one).replace("*k", "*", 1).replace(" ", "") for one in (found, expected)]
    return plain[0] == plain[1]


def recorded_arguments(facts: LaunchFacts) -> tuple[dict[str, Spec], dict[str, Value]]:
    """Return the arguments of a recorded call: (name -> spec, name -> constant).

    A call with these is specialized as the recorded one was, on the recorded target.  AMD's
    attribute says that a tensor is below 2 GB, and without it a tensor is taken to be larger;
    NVIDIA's kernels do not tell, and count as below.

    Raises:
        ConfigError: an argument cannot be made again.
    """
    constants, attributes = dict(facts.constants), dict(facts.attributes)
    tells_size = any(name == "waves_per_eu" for name, _ in facts.options)
    declared = {argument.name for argument in facts.arguments if argument.constexpr}
    specs: dict[str, Spec] = {}
    values: dict[str, Value] = {}

    def spec_of(kind: Value, path: Path) -> Spec:
        if kind.tag == "tuple":
            return tuple(spec_of(item, (*path, i)) for i, item in enumerate(kind.payload))
        text = str(kind.payload)
        if text == "constexpr":
            # The kernel does not declare it constexpr: Triton makes constants of None and of 1.
            value = constants[path]
            if value.tag not in {"none", "int"}:
                raise ConfigError(
                    f"a {value.tag} inside a tuple argument cannot be passed again", got=value.tag
                )
            return NONE if value.tag == "none" else "i32:1"
        known = {item[0] for item in attributes[path].plain()} if path in attributes else set()
        aligned = ":16" if "tt.divisibility" in known and text[0] in "*iu" else ""
        is_large = text.startswith("*") and tells_size and "tt.pointer_range" not in known
        return text + aligned + (":large" if is_large else "")

    for index, (name, kind) in enumerate(facts.signature):
        plain = kind.payload != "constexpr" or constants[index,].tag in {"none", "int"}
        if name in declared or not plain:
            values[name] = constants[index,]
        else:
            specs[name] = spec_of(kind, (index,))
    return specs, values
