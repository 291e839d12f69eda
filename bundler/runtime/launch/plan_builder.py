# SPDX-License-Identifier: Apache-2.0
"""`build_plan`: the plan of a launch, from what was recorded of a kernel, compared with what its
binary declares.

`can_launch` says why a kernel has no plan.  `PlanLoader` builds plans; the tuner and
`kernel_export` ask, too.

`read_layout` reads out of a device binary where its kernel expects each parameter.  A cubin says it
in the section `.nv.info.ENTRY`, a list of attributes; an hsaco in a note, a msgpack map.  Both are
read as hostile input, by `format/device_elf.py`: what comes back is a layout or a
`FormatError`.
"""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from bundler.errors import BundlerError, CannotLaunchStatically, FormatError, LimitExceeded
from bundler.format.constant_values import Value
from bundler.format.device_elf import (
    INFO,
    amd_kernel,
    attributes,
    natural,
    section_named,
    why_unusable,
)
from bundler.format.entries import Kernel, Target
from bundler.format.launch_spec import LaunchFacts, LaunchSpec, Named
from bundler.format.summary import count
from bundler.runtime.launch.extension import EXTENSION
from bundler.runtime.launch.plan import (
    GLOBAL_SCRATCH,
    KIND_BYTES,
    PROFILE_SCRATCH,
    TENSOR_MAP,
    LaunchPlan,
    Parameter,
    Piece,
    SharedParts,
    TensorMap,
)

BACKENDS = ("cuda", "hip")
MAX_RANK = 5
MAX_NAMED = 20
MAX_NUMBER = 2**31 - 1
_NUMBERS = (
    "num_warps",
    "num_ctas",
    "warp_size",
    "shared_bytes",
    "global_scratch_bytes",
    "global_scratch_align",
    "profile_scratch_bytes",
    "profile_scratch_align",
)
_DESCRIPTOR = re.compile(r"tensordesc<([^[>]*)\[([^\]]*)\]")
_MAX_SIGNATURES, _MAX_VARIANTS = 1024, 64
_SCALARS = {
    "f32": "fp32",
    **{kind: kind for kind in KIND_BYTES if kind[0] in "iu" or kind[:2] in {"fp", "bf"}},
}


def build_plan(kernel: Kernel, image: bytes) -> LaunchPlan:
    """Return how to launch a kernel.

    Args:
        kernel: a kernel of a bundle.
        image: its device binary, verified.

    Raises:
        CannotLaunchStatically: something that the launch needs is not known, or the binary
            contradicts the record.
        FormatError: the binary cannot be read.
    """
    return plan_with(kernel, image, kernel.launch.facts)


def plan_with(kernel: Kernel, image: bytes, facts: LaunchFacts | None) -> LaunchPlan:
    """Return the same; `facts` are the kernel's, but for the constants, which may be another's.
    Raises as `build_plan`.
    """
    spec, target = kernel.spec, kernel.target
    if target.backend not in BACKENDS:
        _check_target(target, _Refusal(spec.entry, kernel.key))
    # The binary has the last word on where parameters lie: what Triton recorded says their types
    # and order alone.
    layout = read_layout(image, spec.entry)
    signature = None if facts is None else facts.signature
    # Kernels that differ in their constants alone have all of this in common, and so their plans.
    number = id(spec), id(signature), id(layout), id(target)
    found = _plans.get(number)
    if found is None:
        if len(_plans) >= _MAX_SIGNATURES:
            _plans.clear()
        found = _plans[number] = (
            (spec, signature, layout, target),
            _new_plan(kernel, kernel.launch, layout),
        )
    return _of_kernel(found[1], kernel)


def _of_kernel(alike: LaunchPlan, kernel: Kernel) -> LaunchPlan:
    plan, fields = object.__new__(LaunchPlan), vars(alike).copy()
    fields["kernel"], fields["key"] = kernel.name, kernel.key
    # Copied whole: one by one they take three times as long.
    object.__setattr__(plan, "__dict__", fields)
    return plan


def _new_plan(kernel: Kernel, spec: LaunchSpec, layout: Layout) -> LaunchPlan:
    refuse, backend = _Refusal(spec.entry, kernel.key), kernel.target.backend
    _check_numbers(spec, refuse)
    _check_threads(spec, layout, refuse)
    parameters, pieces, maps = _parameters(spec, backend, layout, refuse)
    return LaunchPlan.of(
        kernel=kernel.name,
        key=kernel.key,
        entry=spec.entry,
        target=kernel.target,
        parameters=parameters,
        buffer_bytes=layout.buffer_bytes,
        block_threads=spec.num_warps * kernel.target.warp_size,
        # AMD's chips have no clusters; Triton writes down a number all the same.
        cluster=spec.num_ctas if backend == "cuda" else 1,
        shared_bytes=spec.shared_bytes,
        cooperative=spec.cooperative,
        pdl=spec.pdl,
        global_scratch_bytes=spec.global_scratch_bytes or 0,
        global_scratch_align=spec.global_scratch_align or 1,
        profile_scratch_bytes=spec.profile_scratch_bytes or 0,
        profile_scratch_align=spec.profile_scratch_align or 1,
        tensor_maps=maps,
        pieces=pieces,
    )


def can_launch(what: Any, image: bytes | None = None) -> str | None:
    """Return why a kernel cannot be launched without Triton, None when it can.

    Total: whatever is not known is a reason, never an exception.

    Args:
        what: a `Kernel` of a bundle, or its `LaunchSpec`.
        image: the kernel's device binary; with it the parameters are checked against what the
            binary declares.
    """
    try:
        spec = what.launch if isinstance(what, Kernel) else what
        if not isinstance(spec, LaunchSpec):
            return f"{type(what).__name__} is no kernel and no launch spec"
        if isinstance(what, Kernel) and image is not None:
            build_plan(what, image)
            return None
        refuse = _Refusal(spec.entry, what.key if isinstance(what, Kernel) else None)
        target = what.target if isinstance(what, Kernel) else None
        if target is not None:
            _check_target(target, refuse)
        backend = target.backend if target is not None else "cuda"
        list(_pieces(spec.require_facts(), _tensor_maps(spec, backend, refuse), 1, refuse))
    except BundlerError as error:  # every reason is one of ours; anything else is a mistake of ours, and is to be seen
        return error.message
    return None


class _Refusal:
    """Makes the errors of one kernel, which name it."""

    def __init__(self, entry: str, key: str | None) -> None:
        self._entry, self._key = entry, key

    def __call__(self, reason: str, **facts: Any) -> CannotLaunchStatically:
        return CannotLaunchStatically(
            f"{self._entry}: {reason}", kernel=self._entry, key=self._key, **facts
        )


def _check_target(target: Target, refuse: _Refusal) -> None:
    if target.backend not in BACKENDS:
        raise refuse(
            f"compiled for {target}; kernels are launched on {' and '.join(BACKENDS)} only",
            target=str(target),
        )


def _check_numbers(spec: LaunchSpec, refuse: _Refusal) -> None:
    # What drivers take has 32 bits, and a bundle may say anything.
    for name in _NUMBERS:
        number = getattr(spec, name)
        if number is not None and number > MAX_NUMBER:
            raise refuse(
                f"its record says {number} for {name}, at most {MAX_NUMBER} can be launched"
            )


def _check_threads(spec: LaunchSpec, layout: Layout, refuse: _Refusal) -> None:
    # With another number of threads than the compiler meant, a kernel computes something else
    # without an error.
    threads = spec.num_warps * spec.warp_size
    if layout.block_threads not in {None, threads}:
        raise refuse(
            f"the record says {count(spec.num_warps, 'warp')} of {spec.warp_size},"
            f" {count(threads, 'thread')}, and the binary was made for {layout.block_threads};"
            " record the compile again"
        )


# ----------------------------------- From the record: one piece for each value that a launch passes


def _pieces(
    facts: LaunchFacts, maps: tuple[TensorMap, ...] | None, flags: int, refuse: _Refusal
) -> Iterator[Piece]:
    for index, (name, kind) in enumerate(facts.signature):
        yield from _pieces_of(name, kind, (index,), (maps is not None, flags), refuse)


def _pieces_of(
    name: str, kind: Value, path: tuple[int, ...], descriptors: tuple[bool, int], refuse: _Refusal
) -> Iterator[Piece]:
    if kind.tag == "tuple":
        for index, item in enumerate(kind.payload):
            yield from _pieces_of(f"{name}[{index}]", item, (*path, index), descriptors, refuse)
        return
    text = kind.payload
    if kind.tag != "str":
        raise refuse(
            f"argument {name!r} has a type that cannot be read ({kind.tag})", argument=name
        )
    if text.startswith("*"):
        yield Piece(name, "pointer", path)
    elif text.startswith("tensordesc"):
        yield from _descriptor_pieces(name, text, path, descriptors, refuse)
    elif text in _SCALARS:
        yield Piece(name, _SCALARS[text], path)
    # A constant is compiled in, and passed to nobody.
    elif text != "constexpr":
        why = "; no launcher passes eight-bit floats by value" if text.startswith("fp8") else ""
        raise refuse(
            f"argument {name!r} has type {text:.80}, which cannot be passed{why}",
            argument=name,
            got=text,
        )


def _descriptor_pieces(
    name: str, text: str, path: tuple[int, ...], descriptors: tuple[bool, int], refuse: _Refusal
) -> Iterator[Piece]:
    """Yield what Triton's launcher makes of a tensor descriptor: a map, or its parts, and then
    shape and strides (again).
    """
    match = _DESCRIPTOR.match(text)
    rank = match[2].count(",") + 1 if match is not None else 0
    if not 0 < rank <= MAX_RANK or "input_rank" in text:
        raise refuse(
            f"argument {name!r} is a tensor descriptor of a kind not known ({text:.80})",
            argument=name,
        )
    # A map holds neither shape nor strides in a form that a kernel could read, so these follow it
    # in any case.
    mapped, flags = descriptors
    kinds = [TENSOR_MAP] if mapped else ["pointer", *["i64"] * 2 * rank, *["i1"] * flags]
    kinds += [*["i32"] * rank, *["i64"] * rank]
    for number, kind in enumerate(kinds):
        yield Piece(name, kind, path, rank if number == 0 else None)


_Shape = tuple[tuple[Parameter, ...], tuple[Piece, ...], tuple[TensorMap, ...]]


@functools.lru_cache(maxsize=_MAX_SIGNATURES)
def _variants(_signature: Named) -> dict[tuple[Any, ...], _Shape]:
    """Return where the shapes of kernels with this signature are kept, by what else they follow
    from.
    """
    return {}


# Plans by the numbers of what they follow from, which is kept beside them so that nothing else gets
# its number.
_plans: dict[
    tuple[int, int, int, int], tuple[tuple[LaunchSpec, Named | None, Layout, Target], LaunchPlan]
] = {}


# Kernels that differ in their constants alone have one shape.
_shapes: SharedParts[Named, dict[tuple[Any, ...], _Shape]] = SharedParts(_MAX_SIGNATURES)


def _parameters(spec: LaunchSpec, backend: str, layout: Layout, refuse: _Refusal) -> _Shape:
    """Return the parameters where the binary has them, what fills them, and the tensor maps among
    them.
    """
    facts, hidden = spec.require_facts(), _hidden(spec, backend)
    variants = _shapes.get(facts.signature, _variants)
    descriptors = spec.tensor_descriptors
    key = (backend, hidden, layout.slots, descriptors if descriptors.payload else None)
    found = variants.get(key)
    if found is None:
        # Triton appends these to the parameters that its user wrote.
        extra = [_SCRATCH[kind] for kind in hidden]
        maps = _tensor_maps(spec, backend, refuse)
        pieces = _fitting(facts, maps, len(layout.slots) - len(extra), extra, refuse)
        shown = [
            Parameter(p.name, p.kind, 0, KIND_BYTES[p.kind], number)
            for number, p in enumerate(pieces)
        ]
        found = _placed([*shown, *extra], layout, refuse), pieces, _numbered(maps, pieces)
        if len(variants) >= _MAX_VARIANTS:
            variants.clear()
        variants[key] = found
    return found


def _hidden(spec: LaunchSpec, backend: str) -> tuple[str, ...]:
    """Return the kinds of parameters that Triton appends: on CUDA as its metadata say, on HIP
    always two.
    """
    if backend == "hip" or (
        spec.global_scratch_bytes is not None and spec.profile_scratch_bytes is not None
    ):
        return GLOBAL_SCRATCH, PROFILE_SCRATCH
    if spec.global_scratch_bytes is not None:
        return (GLOBAL_SCRATCH,)
    return () if spec.profile_scratch_bytes is None else (PROFILE_SCRATCH,)


_SCRATCH = {
    kind: Parameter(kind, kind, 0, KIND_BYTES[kind], None)
    for kind in (GLOBAL_SCRATCH, PROFILE_SCRATCH)
}


# -------------------------------------------------------------------------------------- Tensor maps


def _tensor_maps(spec: LaunchSpec, backend: str, refuse: _Refusal) -> tuple[TensorMap, ...] | None:
    """Return how each tensor descriptor becomes a map, None when they are passed in parts."""
    found = spec.tensor_descriptors
    if found.tag not in {"list", "tuple"}:
        raise refuse(f"its tensor descriptors are described by a {found.tag}, expected a list")
    if not found.payload:
        return None
    if backend != "cuda":
        raise refuse(
            "it takes tensor descriptors in a form that only newer AMD chips have, and which is not"
            " supported"
        )
    return tuple(_tensor_map(item, refuse) for item in found.payload)


def _tensor_map(item: Value, refuse: _Refusal) -> TensorMap:
    facts = item.plain() if item.tag == "dict" else {}
    if facts.get("is_im2col"):
        raise refuse("it takes a tensor descriptor in im2col mode, which is not supported")
    numbers = [facts.get(name) for name in ("swizzle", "elem_size", "elem_type")]
    block, padded = facts.get("block_size"), facts.get("fp4_padded", False)
    if not all(map(_is_small, numbers)) or type(padded) is not bool:
        raise refuse(f"its record of a tensor descriptor cannot be read ({facts!r:.200})")
    if not isinstance(block, (list, tuple)) or not all(map(_is_small, block)):
        raise refuse(f"its record of a tensor descriptor has no block size ({facts!r:.200})")
    swizzle, elem_size, elem_type = (int(number or 0) for number in numbers)
    return TensorMap(0, swizzle, elem_size, elem_type, tuple(block), padded)


def _is_small(number: object) -> bool:
    return type(number) is int and 0 <= number <= MAX_NUMBER


def _numbered(
    maps: tuple[TensorMap, ...] | None, pieces: tuple[Piece, ...]
) -> tuple[TensorMap, ...]:
    places = [number for number, piece in enumerate(pieces) if piece.kind == TENSOR_MAP]
    return tuple(
        TensorMap(place, m.swizzle, m.elem_size, m.elem_type, m.block_size, m.fp4_padded)
        for place, m in zip(places, maps or (), strict=True)
    )


# ------------------------------------------------------------------------------- Against the binary


def _fitting(
    facts: LaunchFacts,
    maps: tuple[TensorMap, ...] | None,
    room: int,
    hidden: list[Parameter],
    refuse: _Refusal,
) -> tuple[Piece, ...]:
    """Return the pieces, as many as the binary has room for.

    Triton 3.6 passes one flag with a descriptor taken apart, later releases two; which one compiled
    a kernel is seen by the number of its parameters.
    """
    pieces = tuple(_pieces(facts, maps, 2, refuse))
    if len(pieces) != room:
        fewer = tuple(_pieces(facts, maps, 1, refuse))
        if len(fewer) != room:
            raise refuse(
                f"the record gives it {count(len(pieces), 'argument')} and"
                f" {count(len(hidden), 'hidden one')}"
                f" ({', '.join(piece.name for piece in pieces[:MAX_NAMED])}), and the binary"
                f" declares {count(room + len(hidden), 'parameter')}; record the compile again",
                expected=room + len(hidden),
                got=len(pieces) + len(hidden),
            )
        pieces = fewer
    # Each map belongs to one argument, by its place in the list.
    descriptors = sum(piece.kind == TENSOR_MAP for piece in pieces)
    if descriptors != len(maps or ()):
        raise refuse(
            f"it takes {count(descriptors, 'tensor descriptor')}, and the record describes"
            f" {len(maps or ())}"
        )
    return pieces


def _placed(parameters: list[Parameter], layout: Layout, refuse: _Refusal) -> tuple[Parameter, ...]:
    placed = []
    for number, (parameter, slot) in enumerate(zip(parameters, layout.slots, strict=True)):
        # A wrong type would shift all that follows: the kernel would read one argument's bytes as
        # another's.
        if slot.size != parameter.size:
            raise refuse(
                f"argument {parameter.name!r} is recorded as {parameter.kind},"
                f" {count(parameter.size, 'byte')}, and parameter {number} of the binary has"
                f" {slot.size}; record the compile again",
                argument=parameter.name,
                expected=parameter.size,
                got=slot.size,
            )
        placed.append(
            Parameter(parameter.name, parameter.kind, slot.offset, slot.size, parameter.argument)
        )
    return tuple(placed)


# a parameter has a byte at least, and a kernel takes 4 KiB of them, 32 KiB on the newest chips
MAX_PARAMETERS = 4096
MAX_BUFFER_BYTES = 32764
# What a kernel declares is some hundred bytes; more is not kept in memory to be compared with.
_MAX_KNOWN_BYTES = 2048

_KPARAM_INFO, _KPARAM_INFO_2, _CBANK_PARAM_SIZE, _REQUIRED_THREADS = 0x17, 0x45, 0x19, 0x10
_KPARAM = struct.Struct(
    "<IHHI"
)  # index, ordinal, offset, packed; the size is the packed word's upper 14 bits
_SIZE_SHIFT = 18
_THREADS = struct.Struct("<III")


class Slot(NamedTuple):
    """Where one parameter lies: bytes from the start of the parameter buffer, and how many."""

    offset: int
    size: int


@dataclass(frozen=True)
class Layout:
    """What a binary says about one kernel; `block_threads` is None where it does not fix the size
    of a block.
    """

    slots: tuple[Slot, ...]
    buffer_bytes: int
    block_threads: int | None


def read_layout(image: bytes, entry: str) -> Layout:
    """Return the parameter layout of the kernel `entry` in a cubin or hsaco.

    Raises:
        FormatError: no such binary, no such kernel in it, or parameters that overlap, leave their
            buffer or have gaps in their numbering.
        LimitExceeded: more of anything than a kernel can have.
    """
    try:
        wanted = INFO + b"." + entry.encode()
        # The extension answers for a whole binary that is written as linkers do; whatever is wrong
        # with another, is found out here.
        info = NotImplemented if EXTENSION is None else EXTENSION.find_section(image, wanted)
        if info is NotImplemented:
            why = why_unusable(image)
            if why is not None:
                raise FormatError(f"{entry}: the device binary is {why}", kernel=entry)
            info = section_named(image, wanted)
        if info is None:
            return _checked(_hsaco_layout(amd_kernel(image, entry), entry), entry)
        # Kernels that differ in their constants alone often declare the same, byte for byte.
        return (_known_cubin_layout if len(info) <= _MAX_KNOWN_BYTES else _cubin_layout)(
            info, entry
        )
    except (struct.error, UnicodeEncodeError, OverflowError) as error:
        raise FormatError(
            f"{entry}: the device binary is damaged ({error})", kernel=entry
        ) from error


# ------------------------------------------------------------------------------------------- NVIDIA


def _cubin_layout(info: bytes, entry: str) -> Layout:
    slots: dict[int, Slot] = {}
    buffer_bytes, threads = 0, None
    for attribute, value, payload in attributes(info):
        if attribute == _KPARAM_INFO:
            _, ordinal, offset, packed = _KPARAM.unpack_from(payload)
            if ordinal in slots:
                raise FormatError(
                    f"{entry}: the device binary describes parameter {ordinal} twice", kernel=entry
                )
            slots[ordinal] = Slot(offset, packed >> _SIZE_SHIFT)
        elif attribute == _KPARAM_INFO_2:
            raise FormatError(
                f"{entry}: the cubin describes its parameters in a form that is not known",
                kernel=entry,
            )
        elif attribute == _CBANK_PARAM_SIZE:
            buffer_bytes = value
        elif attribute == _REQUIRED_THREADS:
            x, y, z = _THREADS.unpack_from(payload)
            threads = x * y * z
    if sorted(slots) != list(range(len(slots))):
        raise FormatError(
            f"{entry}: the cubin numbers its parameters {sorted(slots)[:20]}", kernel=entry
        )
    return _checked(
        Layout(tuple(slots[ordinal] for ordinal in sorted(slots)), buffer_bytes, threads), entry
    )


_known_cubin_layout = functools.lru_cache(maxsize=1024)(_cubin_layout)


# ---------------------------------------------------------------------------------------------- AMD


def _hsaco_layout(kernel: dict[Any, Any], entry: str) -> Layout:
    arguments = kernel.get(".args", [])
    if not isinstance(arguments, list) or not all(
        isinstance(argument, dict) for argument in arguments
    ):
        raise FormatError(f"{entry}: the hsaco does not describe its arguments", kernel=entry)
    # What is called hidden is filled by the runtime library, not by who launches.
    hidden = [str(argument.get(".value_kind")).startswith("hidden_") for argument in arguments]
    shown = [
        argument for argument, is_hidden in zip(arguments, hidden, strict=True) if not is_hidden
    ]
    slots = tuple(
        Slot(*(natural(argument, key, MAX_BUFFER_BYTES, entry) for key in (".offset", ".size")))
        for argument in shown
    )
    whole = natural(kernel, ".kernarg_segment_size", MAX_BUFFER_BYTES, entry)
    end = max((slot.offset + slot.size for slot in slots), default=0)
    threads = kernel.get(".max_flat_workgroup_size")
    return Layout(slots, end if any(hidden) else whole, threads if type(threads) is int else None)


# --------------------------------------------------------------------------------------------- Both


def _checked(layout: Layout, entry: str) -> Layout:
    if len(layout.slots) > MAX_PARAMETERS or layout.buffer_bytes > MAX_BUFFER_BYTES:
        raise LimitExceeded(
            f"{entry}: {count(len(layout.slots), 'parameter')} in"
            f" {count(layout.buffer_bytes, 'byte')}",
            kernel=entry,
            limit=MAX_PARAMETERS,
        )
    end = 0
    for number, slot in enumerate(layout.slots):
        if slot.size == 0 or slot.offset < end or slot.offset + slot.size > layout.buffer_bytes:
            raise FormatError(
                f"{entry}: the device binary puts parameter {number} at {slot.offset},"
                f" {count(slot.size, 'byte')}, in a buffer of {count(layout.buffer_bytes, 'byte')}"
                f" that is filled up to {end}",
                kernel=entry,
            )
        end = slot.offset + slot.size
    return layout
