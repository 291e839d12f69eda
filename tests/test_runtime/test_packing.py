# SPDX-License-Identifier: Apache-2.0
"""Values are packed byte for byte as a C compiler would put them, and as Triton's launchers convert
them.
"""

import ctypes
import math
import struct

import launch_calls as calls
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bundler.errors import CannotLaunchStatically
from bundler.format.entries import Target
from bundler.runtime import LaunchPlan, Parameter
from bundler.runtime.launch.parameter_buffer import Packer

C_TYPES = {
    "pointer": ctypes.c_uint64,
    "i8": ctypes.c_int8,
    "i16": ctypes.c_int16,
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "u8": ctypes.c_uint8,
    "u16": ctypes.c_uint16,
    "u32": ctypes.c_uint32,
    "u64": ctypes.c_uint64,
    "u1": ctypes.c_uint8,
    "i1": ctypes.c_int8,
    "fp32": ctypes.c_float,
    "fp64": ctypes.c_double,
    "fp16": ctypes.c_uint16,
    "bf16": ctypes.c_uint16,
}
RANGES = {
    f"{sign}{bits}": (-(1 << bits - 1), (1 << bits - 1) - 1)
    if sign == "i"
    else (0, (1 << bits) - 1)
    for sign in "iu"
    for bits in (8, 16, 32, 64)
}


def structure(kinds):
    """A C structure of these members and two pointers for scratch."""
    types = [C_TYPES[kind] for kind in kinds] + [ctypes.c_uint64] * 2
    return type(
        "S", (ctypes.Structure,), {"_fields_": [(f"m{i}", kind) for i, kind in enumerate(types)]}
    )


def plan_of(kinds):
    """A plan with these arguments, where C would put them."""
    layout = structure(kinds)
    names = [*kinds, "global_scratch", "profile_scratch"]
    parameters = tuple(
        Parameter(
            f"a{i}",
            kind,
            getattr(layout, f"m{i}").offset,
            getattr(layout, f"m{i}").size,
            i if i < len(kinds) else None,
        )
        for i, kind in enumerate(names)
    )
    return LaunchPlan(
        "k",
        "KEY",
        "k",
        Target("cuda", "90"),
        parameters,
        ctypes.sizeof(layout),
        128,
        1,
        0,
        False,
        False,
        0,
        1,
        0,
        1,
    )


def bits_of_bf16(value):
    return int.from_bytes(bytes(ctypes.c_float(value))[2:], "little")


def bits_of_fp16(value):
    import numpy as np

    with np.errstate(over="ignore"):
        return int(np.float16(value).view(np.uint16))


@st.composite
def kinds_and_values(draw):
    """Kinds of arguments, a value for each, and what C stores for it."""
    pairs = []
    for kind in draw(st.lists(st.sampled_from(sorted(C_TYPES)), max_size=12)):
        if kind in RANGES:
            value = draw(st.integers(*RANGES[kind]))
            pairs.append((kind, value, value))
        elif kind == "pointer":
            value = draw(st.one_of(st.none(), st.integers(0, (1 << 64) - 1)))
            pairs.append((kind, value, value or 0))
        elif kind in {"u1", "i1"}:
            value = draw(st.booleans())
            pairs.append((kind, value, int(value)))
        elif kind == "fp16":
            value = draw(st.floats(-65504, 65504))
            pairs.append((kind, value, bits_of_fp16(value)))
        elif kind == "bf16":
            value = draw(st.floats(allow_nan=False))
            pairs.append((kind, value, bits_of_bf16(value)))
        else:
            value = draw(st.floats(allow_nan=False))
            pairs.append((kind, value, value))
    return pairs


@settings(max_examples=200, deadline=None)
@given(kinds_and_values(), st.integers(0, (1 << 64) - 1), st.integers(0, (1 << 64) - 1))
def test_packed_bytes_are_those_of_a_c_structure(pairs, global_scratch, profile_scratch):
    """Any arguments in any order give the bytes that ctypes gives for the same structure."""
    kinds = [kind for kind, _, _ in pairs]
    packed = Packer(plan_of(kinds)).pack(
        [value for _, value, _ in pairs], global_scratch, profile_scratch
    )
    expected = structure(kinds)(
        *[stored for _, _, stored in pairs], global_scratch, profile_scratch
    )
    assert bytes(expected) == bytes(packed)


def test_a_used_buffer_is_overwritten_whole():
    """What lies between two parameters is zero, whatever was there."""
    packer = Packer(plan_of(["u8", "fp64"]))
    buffer = bytearray(b"\xff" * packer.nbytes)
    packer.pack_into(buffer, [1, 2.0])
    assert struct.pack("<B7xdQQ", 1, 2.0, 0, 0) == bytes(buffer)


@pytest.mark.parametrize("kind", sorted(RANGES))
def test_integers_are_taken_to_the_ends_of_their_range_and_no_further(kind):
    """The least and the greatest fit; one beyond is refused with the argument's name."""
    low, high = RANGES[kind]
    packer = Packer(plan_of([kind]))
    for value in (low, high):
        assert bytes(structure([kind])(value, 0, 0)) == bytes(packer.pack([value]))
    for value in (low - 1, high + 1):
        with pytest.raises(
            CannotLaunchStatically, match=f"argument 'a0' has kind {kind}.*got {value}"
        ):
            packer.pack([value])


@pytest.mark.parametrize(
    ("kind", "value", "code"),
    [
        ("bf16", 1.99999, "<H"),
        ("bf16", -3.1415926, "<H"),
        ("bf16", 1e39, "<H"),
        ("bf16", float("inf"), "<H"),
        ("fp16", 2.0**-24, "<H"),
        ("fp16", 2.0**-25, "<H"),
        ("fp16", 1 + 2.0**-11, "<H"),
        ("fp16", 65519.9, "<H"),
        ("fp16", -float("inf"), "<H"),
        ("fp32", 1e39, "<f"),
        ("fp32", 3.4028235677973366e38, "<f"),
        ("fp32", 1e-46, "<f"),
    ],
)
def test_floats_are_converted_as_triton_converts_them(kind, value, code):
    """bf16 is cut off, not rounded; fp16 and fp32 round to even; what is too large for fp32 is
    infinite.
    """
    packed = bytes(Packer(plan_of([kind])).pack([value]))
    stored = {
        "bf16": bits_of_bf16,
        "fp16": bits_of_fp16,
        "fp32": lambda v: ctypes.c_float(v).value,
    }[kind](value)
    assert struct.pack(code, stored) == packed[: struct.calcsize(code)]


@pytest.mark.parametrize("kind", ["fp16", "bf16", "fp32", "fp64"])
def test_nan_stays_nan(kind):
    """Not a number is passed as such."""
    packed = bytes(Packer(plan_of([kind])).pack([math.nan]))
    if kind == "bf16":
        assert math.isnan(struct.unpack("<f", bytes(2) + packed[:2])[0])
    else:
        assert math.isnan(
            struct.unpack_from({"fp16": "<e", "fp32": "<f", "fp64": "<d"}[kind], packed)[0]
        )


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("fp16", 65520.0),
        ("fp16", 1e6),
        ("fp64", 10**400),
        ("fp32", "1"),
        ("fp64", None),
        ("i32", 1.0),
        ("i32", None),
        ("u1", 2),
        ("u1", -1),
        ("i1", "yes"),
        ("pointer", "x"),
        ("pointer", 1.5),
        ("pointer", -1),
        ("pointer", 1 << 64),
        ("pointer", True),
        ("u64", []),
    ],
)
def test_a_value_of_the_wrong_kind_names_its_argument(kind, value):
    """The error says which argument, what it takes and what came."""
    with pytest.raises(CannotLaunchStatically) as raised:
        Packer(plan_of(["i32", kind])).pack([0, value])
    assert ("k", "a1", kind) == (raised.value.kernel, raised.value.argument, raised.value.expected)


@pytest.mark.parametrize("values", [[], [1], [1, 2, 3]])
def test_the_number_of_values_counts(values):
    """Too few and too many are refused with both numbers."""
    with pytest.raises(
        CannotLaunchStatically, match=rf"takes 2 values \(a0, a1\), got {len(values)}"
    ):
        Packer(plan_of(["i32", "i32"])).pack(values)


def test_tensors_addresses_and_none_are_pointers():
    """A tensor counts by its address."""
    packed = Packer(plan_of(["pointer"] * 3)).pack([calls.X, calls.ADDRESS, None])
    assert struct.pack("<QQQQQ", calls.ADDRESS, calls.ADDRESS, 0, 0, 0) == bytes(packed)


@pytest.mark.release
@pytest.mark.toolchain
def test_the_buffers_of_real_calls_are_exact(recorded, kernels, driver, target):
    """What reaches the driver for calls of real kernels is what a C program would pass."""
    expectations = {
        "integers": ("<QbxhiqBxHIQB7xQQ", lambda a: a),
        "floats": ("<QeHfdf4xQQ", lambda a: (*a[:2], bits_of_bf16(a[2]), *a[3:])),
        "nested": ("<QQiii4xQQQ", lambda a: (*a[0], a[1][0], *a[1][1], a[2])),
        "nothing": ("<QQ", lambda a: a),
    }
    seen = set()
    for call, key in zip(calls.CALLS, recorded.chosen[target], strict=True):
        # The second call of `nested` has a size of 1, which is compiled in.
        if (
            call.kernel not in expectations
            or key is None
            or (call.kernel in seen and call.kernel == "nested")
        ):
            continue
        seen.add(call.kernel)
        kernels[call.kernel][(1,)](*call.args)
        code, stored = expectations[call.kernel]
        values = [getattr(value, "address", value) for value in stored(call.args)]
        assert struct.pack(code, *values, 0, 0) == driver.launches[-1].parameters
    assert expectations.keys() == seen


def test_a_descriptor_is_taken_apart_as_triton_does(kernels, driver, target):
    """On Hopper map, shape, strides; on AMD base, shape, strides, flags, shape, strides."""
    tensor = calls.HALF
    kernels["host_descriptor"][(1,)](
        calls.Descriptor(tensor, [64, 48], [48, 1], [16, 16], "nan"), tensor
    )
    launch = driver.launches[0]
    start = launch.plan.parameters[0].offset
    if target == "cuda:90":
        assert tensor.address == int.from_bytes(launch.parameters[start : start + 8], "little")
        assert (
            struct.pack("<iiqqQQQ", 64, 48, 48, 1, tensor.address, 0, 0)
            == launch.parameters[start + 128 :]
        )
    else:
        assert struct.pack("<Qqqqq", tensor.address, 64, 48, 48, 1) == launch.parameters[:40]
        assert launch.parameters[40:44] == b"\x01\0\0\0", (
            "not a number outside of the tensor, and no rounding"
        )
        assert (
            struct.pack("<ii4xqqQQQ", 64, 48, 48, 1, tensor.address, 0, 0) == launch.parameters[44:]
        )
