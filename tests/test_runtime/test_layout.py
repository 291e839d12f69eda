# SPDX-License-Identifier: Apache-2.0
"""The parameter layout that a binary declares is read right, and a damaged binary gives a typed
error and nothing else.
"""

import ctypes

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bundler.errors import CannotLaunchStatically, FormatError, LimitExceeded
from bundler.format import device_elf
from bundler.format.device_elf import section_named, why_unusable
from bundler.runtime import build_plan
from bundler.runtime.launch import plan_builder
from bundler.runtime.launch.plan_builder import MAX_BUFFER_BYTES, read_layout


class Map(ctypes.Structure):
    """A tensor map, which the compiler aligns to 64 bytes; as wide as one, aligned as far as ctypes
    can tell.
    """

    _fields_ = [("bytes", ctypes.c_uint64 * 16)]


C_TYPES = {
    "pointer": ctypes.c_uint64,
    "global_scratch": ctypes.c_uint64,
    "profile_scratch": ctypes.c_uint64,
    "i1": ctypes.c_int8,
    "i8": ctypes.c_int8,
    "i16": ctypes.c_int16,
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "u1": ctypes.c_uint8,
    "u8": ctypes.c_uint8,
    "u16": ctypes.c_uint16,
    "u32": ctypes.c_uint32,
    "u64": ctypes.c_uint64,
    "fp16": ctypes.c_uint16,
    "bf16": ctypes.c_uint16,
    "fp32": ctypes.c_float,
    "fp64": ctypes.c_double,
    "tensormap": Map,
}
# What Triton's launchers put behind the arguments of each recorded function, worked out by hand
# from its signature.
KINDS = {
    "add": ["pointer"] * 3 + ["i32"],
    "integers": ["pointer", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64", "u1"],
    "floats": ["pointer", "fp16", "bf16", "fp32", "fp64", "fp32"],
    "nested": ["pointer"] * 2 + ["i32"] * 3 + ["pointer"],
    "nothing": [],
}
SCRATCH = ["global_scratch", "profile_scratch"]


def structure(kinds):
    """A C structure of these members, which the C compiler's rules lay out."""
    fields = [(f"m{number}", C_TYPES[kind]) for number, kind in enumerate(kinds)]
    return type("Parameters", (ctypes.Structure,), {"_fields_": fields})


def offsets(struct):
    return [
        (getattr(struct, name).offset, getattr(struct, name).size) for name, _ in struct._fields_
    ]


def first(recorded, name, target):
    """The first recorded kernel of a name."""
    return next(k for k in recorded.bundle.kernels if k.name == name and str(k.target) == target)


@pytest.mark.release
@pytest.mark.toolchain
@pytest.mark.parametrize("name", KINDS)
def test_parameters_lie_where_c_would_put_them(recorded, target, name):
    """Offsets and sizes in the binary are those of a C structure with the recorded types and two
    scratch pointers.
    """
    kernels = [k for k in recorded.bundle.kernels if k.name == name and str(k.target) == target]
    for kernel in kernels:
        plan = build_plan(kernel, recorded.bundle.read(kernel.binary))
        kinds = [parameter.kind for parameter in plan.parameters]
        assert offsets(structure(kinds)) == [(p.offset, p.size) for p in plan.parameters]
    assert KINDS[name] + SCRATCH in [_kinds(recorded, kernel) for kernel in kernels]


def _kinds(recorded, kernel):
    return [p.kind for p in build_plan(kernel, recorded.bundle.read(kernel.binary)).parameters]


@pytest.mark.release
@pytest.mark.toolchain
def test_a_tensor_descriptor_is_a_map_on_hopper_and_parts_on_amd(recorded):
    """A 128-byte map aligned to 64, i32 shape, i64 strides; where there are no maps a pointer,
    shape, strides and flags first.
    """
    mapped = first(recorded, "host_descriptor", "cuda:90")
    plan = build_plan(mapped, recorded.bundle.read(mapped.binary))
    assert ["tensormap", "i32", "i32", "i64", "i64", "pointer", *SCRATCH] == [
        p.kind for p in plan.parameters
    ]
    assert (plan.parameters[0].size, plan.parameters[0].offset % 16) == (128, 0)
    assert [(m.argument, m.block_size) for m in plan.tensor_maps] == [(0, (16, 16))]
    apart = first(recorded, "host_descriptor", "hip:gfx942")
    kinds = _kinds(recorded, apart)
    flags = kinds.count("i1")
    assert flags in {1, 2}
    shape_twice = ["i64"] * 4 + ["i1"] * flags + ["i32"] * 2 + ["i64"] * 2
    assert ["pointer", *shape_twice, "pointer", *SCRATCH] == kinds


@pytest.mark.release
@pytest.mark.toolchain
def test_every_recorded_kernel_has_a_plan_but_eight_bit_scalars(recorded, compiled):
    """All kernels of these tests and of the examples can be launched on both kinds of GPU."""
    from bundler import Bundle
    from bundler.runtime import can_launch

    with Bundle.load(compiled.bundle) as examples:
        for bundle in (recorded.bundle, examples):
            reasons = {
                kernel.name: can_launch(kernel, bundle.read(kernel.binary))
                for kernel in bundle.kernels
            }
            eighth = reasons.pop("eighth", None)
            assert dict.fromkeys(reasons) == reasons
            assert (
                bundle is examples
                or "type fp8e5, which cannot be passed; no launcher passes" in eighth
            )


def test_the_size_of_a_block_is_read_too(recorded, target):
    """Threads in the binary are warps times lanes."""
    for kernel in recorded.bundle.kernels:
        layout = read_layout(recorded.bundle.read(kernel.binary), kernel.launch.entry)
        assert kernel.launch.num_warps * kernel.target.warp_size == layout.block_threads


def test_a_kernel_that_is_not_in_the_binary_is_missed(recorded, target):
    """The entry point is looked up by its whole name."""
    kernel = first(recorded, "add", target)
    image = recorded.bundle.read(kernel.binary)
    for entry in ("ad", "add2", "", "\udc80"):
        with pytest.raises(FormatError):
            read_layout(image, entry)


@pytest.mark.parametrize(
    "image",
    [b"", b"\x7fELF", b"MZ" * 100, b"\x7fELF\x02" + bytes(200), b"\x7fELF\x01" + bytes(200)],
)
def test_what_is_no_binary_is_refused(image):
    """Empty, cut off, another format, without sections."""
    with pytest.raises(FormatError):
        read_layout(image, "add")


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_damaged_binary_raises_nothing_but_a_format_error(recorded, data):
    """Flipped, overwritten, cut and spliced bytes give a layout within bounds or a FormatError."""
    kernel = data.draw(st.sampled_from(recorded.bundle.kernels))
    image = bytearray(recorded.bundle.read(kernel.binary))
    for _ in range(data.draw(st.integers(1, 6))):
        # The headers and tables at both ends are where damage tells.
        near = data.draw(st.sampled_from([0, max(0, len(image) - 4096), len(image) // 2]))
        at = min(len(image) - 1, near + data.draw(st.integers(0, 4095)))
        piece = data.draw(
            st.one_of(st.binary(min_size=1, max_size=8), st.just(b"\xff" * 8), st.just(bytes(8)))
        )
        image[at : at + len(piece)] = piece
    if data.draw(st.booleans()):
        del image[data.draw(st.integers(0, len(image))) :]
    try:
        layout = read_layout(bytes(image), kernel.launch.entry)
        plan = build_plan(kernel, bytes(image))
    except (FormatError, CannotLaunchStatically):
        return
    assert layout.buffer_bytes <= MAX_BUFFER_BYTES
    assert all(p.offset + p.size <= plan.buffer_bytes for p in plan.parameters)


def test_metadata_that_is_a_bomb_is_refused(recorded):
    """Metadata that nests, or declares more members than it has bytes, is refused before anything
    is allocated.
    """
    kernel = first(recorded, "add", "hip:gfx942")
    image = recorded.bundle.read(kernel.binary)
    start = image.index(b"amdhsa.kernels") - 2
    assert 0x80 <= image[start] < 0x90, "the metadata begins with a small map"
    for bomb in (b"\xdf\xff\xff\xff\xff", b"\xdd\x7f\xff\xff\xff", b"\x91" * 64, b"\xc7\xff\x01"):
        broken = image[:start] + bomb + image[start + len(bomb) :]
        with pytest.raises(FormatError):
            read_layout(broken, "add")


def test_more_metadata_than_any_kernel_has_is_a_limit(monkeypatch, recorded):
    """The note's size is looked at before it is decoded."""
    monkeypatch.setattr(device_elf, "_MAX_METADATA_BYTES", 64)
    kernel = first(recorded, "add", "hip:gfx942")
    with pytest.raises(LimitExceeded):
        read_layout(recorded.bundle.read(kernel.binary), "add")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_the_extension_finds_the_section_that_python_finds(recorded, data):
    """In a whole binary the same bytes; in a damaged one it leaves the answer to Python, or gives
    the one that Python gives.
    """
    if plan_builder.EXTENSION is None:
        pytest.skip("the extension was not built here")
    kernel = first(recorded, data.draw(st.sampled_from(["add", "nested", "nothing"])), "cuda:90")
    image = bytearray(recorded.bundle.read(kernel.binary))
    wanted = b".nv.info." + kernel.launch.entry.encode()
    assert plan_builder.EXTENSION.find_section(bytes(image), wanted) == section_named(
        bytes(image), wanted
    )
    assert plan_builder.EXTENSION.find_section(bytes(image), b".none") is None
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(
            st.one_of(
                st.integers(0, 63),
                st.integers(0, len(image) - 1),
                st.integers(len(image) - 2048, len(image) - 1),
            )
        )
        image[at] = data.draw(st.integers(0, 255))
    damaged = bytes(
        image[: data.draw(st.sampled_from([len(image), len(image) - 1, len(image) // 2, 63, 5, 0]))]
    )
    found = plan_builder.EXTENSION.find_section(damaged, wanted)
    if found is not NotImplemented:
        assert why_unusable(damaged) is None
        assert found == section_named(damaged, wanted)
