# SPDX-License-Identifier: Apache-2.0
"""The header of an exported kernel: its structs pack in C++ and in C what `Packer` packs, whatever
the parameters are called.
"""

import ctypes
import struct

import compiling
import pytest

from bundler.runtime.heuristics.grid_expressions import GridExpressions
from bundler.runtime.launch.parameter_buffer import Packer
from bundler.runtime.launch.plan import TENSOR_MAP, TENSOR_MAP_BYTES, TensorMap
from bundler.runtime.tuning.kernel_export import header_text

KINDS = (
    "pointer",
    "i1",
    "u1",
    "i8",
    "u8",
    "i16",
    "u16",
    "i32",
    "u32",
    "i64",
    "u64",
    "fp16",
    "bf16",
    "fp32",
    "fp64",
    TENSOR_MAP,
)
# What a program writes for each kind, and the value that Python is given for the same.
VALUES = {
    "pointer": ("0x700000000010ull", 0x700000000010),
    "i1": ("1", True),
    "u1": ("0", False),
    "i8": ("-7", -7),
    "u8": ("200", 200),
    "i16": ("-30000", -30000),
    "u16": ("60000", 60000),
    "i32": ("-2000000000", -2000000000),
    "u32": ("4000000000u", 4000000000),
    "i64": ("-9000000000000000000ll", -9000000000000000000),
    "u64": ("18000000000000000000ull", 18000000000000000000),
    "fp16": ("0x3e00", 1.5),
    "bf16": ("0x3fc0", 1.5),
    "fp32": ("0.1f", 0.1),
    "fp64": ("0.1", 0.1),
}


def program(name, plan, header, assignments):
    """Return a library that packs these arguments, and tells the facts and a grid."""
    return f"""{header}
#ifdef __cplusplus
extern "C" {{
#endif
void packed(unsigned char *buffer);
int grid_for(int64_t n, uint32_t *grid);
const char *fact(int number);
uint64_t number_of(int number);
void packed(unsigned char *buffer) {{
  {name}_arguments arguments;
  memset(&arguments, 0, sizeof arguments);
  {assignments}
  {name}_pack(buffer, &arguments, 0xAAAA, 0xBBBB);
}}
int grid_for(int64_t n, uint32_t *grid) {{ return {name}_grid(n, grid); }}
const char *fact(int number) {{
  const char *all[] = {{{name}_kernel.entry, {name}_kernel.target, {name}_kernel.binary, {name}_kernel.digest}};
  return all[number];
}}
uint64_t number_of(int number) {{
  const uint64_t all[] = {{{name}_kernel.block_threads, {name}_kernel.cluster, {name}_kernel.shared_bytes,
    (uint64_t){name}_kernel.cooperative, (uint64_t){name}_kernel.pdl, {name}_kernel.global_scratch_bytes,
    {name}_kernel.global_scratch_align, {name}_kernel.profile_scratch_bytes, {name}_kernel.profile_scratch_align,
    {name}_kernel.buffer_bytes, {name}_kernel.parameter_count, {name}_kernel.parameters[1].offset}};
  return all[number];
}}
#ifdef __cplusplus
}}
#endif
"""


@pytest.mark.parametrize("language", ["c++", "c"])
def test_all_kinds_of_parameters_are_packed_as_python_packs_them(plan, tmp_path, language):
    """Byte for byte, with scratch; facts and grid come out as they went in."""
    one = plan(
        *KINDS,
        block_threads=256,
        cluster=2,
        shared_bytes=70000,
        cooperative=True,
        pdl=True,
        global_scratch_bytes=512,
        global_scratch_align=128,
        profile_scratch_bytes=64,
        profile_scratch_align=16,
        tensor_maps=(TensorMap(15, 3, 4, 9, (16, 64), fp4_padded=False),),
    )
    values = [
        VALUES[kind][1] if kind in VALUES else bytes(range(TENSOR_MAP_BYTES)) for kind in KINDS
    ]
    lines = [
        f"arguments.a{number} = {VALUES[kind][0]};"
        for number, kind in enumerate(KINDS)
        if kind in VALUES
    ]
    lines.append(
        f"for (int i = 0; i < {TENSOR_MAP_BYTES}; i++) arguments.a15[i] = (unsigned char)i;"
    )
    header = header_text(
        one, "k.cubin", "sha256:00ff", {"a0": 16}, GridExpressions("-(-n // 3)"), ""
    )
    text = program("kernel", one, header, "\n  ".join(lines))
    library = ctypes.CDLL(str(compiling.compile_text(text, tmp_path / "lib.so", language=language)))
    buffer = (ctypes.c_ubyte * one.buffer_bytes)()
    library.packed(buffer)
    assert bytes(buffer) == bytes(Packer(one).pack(values, 0xAAAA, 0xBBBB))
    library.fact.restype, library.number_of.restype = ctypes.c_char_p, ctypes.c_uint64
    assert [library.fact(n) for n in range(4)] == [b"entry", b"cuda:90", b"k.cubin", b"sha256:00ff"]
    numbers = [
        256,
        2,
        70000,
        1,
        1,
        512,
        128,
        64,
        16,
        one.buffer_bytes,
        len(one.parameters),
        one.parameters[1].offset,
    ]
    assert [library.number_of(n) for n in range(12)] == numbers
    grid = (ctypes.c_uint32 * 3)()
    assert (library.grid_for(ctypes.c_int64(10), grid), tuple(grid)) == (0, (4, 1, 1))
    # Two blocks a program: half as many programs are the most.
    assert library.grid_for(ctypes.c_int64(3 * 2**30 - 3), grid) == 0
    assert library.grid_for(ctypes.c_int64(3 * 2**30), grid) == 2
    assert "divisible by 16 */" in header


@pytest.mark.parametrize("language", ["c++", "c"])
def test_odd_names_make_no_odd_code(plan, tmp_path, language):
    """A kernel and files may be called anything: names become names of C++, and texts literals,
    without an end in them.
    """
    from dataclasses import replace

    one = plan("i32", "i32", hidden=())
    parameters = tuple(
        replace(p, name=name)
        for p, name in zip(one.parameters, ("class", 'a*/ int x = "\\\n'), strict=True)
    )
    one = replace(one, kernel='2 bad"*/\n??/name', entry='e"\\\n??/é', parameters=parameters)
    header = header_text(one, 'k"\n.cubin', "sha256:00ff", {}, GridExpressions("n // 2"), "")
    text = program("k2_bad_______name", one, header, "arguments.class_ = 5;")
    library = ctypes.CDLL(str(compiling.compile_text(text, tmp_path / "lib.so", language=language)))
    library.fact.restype = ctypes.c_char_p
    assert library.fact(0).decode() == 'e"\\\n??/é'
    assert library.fact(2).decode() == 'k"\n.cubin'
    buffer = (ctypes.c_ubyte * 8)()
    library.packed(buffer)
    assert bytes(buffer) == struct.pack("<ii", 5, 0)


@pytest.mark.parametrize("language", ["c++", "c"])
def test_a_kernel_without_parameters_or_grid_has_a_header(plan, tmp_path, language):
    """Nothing to fill, and the reason why there is no grid where its function would be."""
    one = plan(hidden=())
    header = header_text(one, "k.cubin", "sha256:00ff", {}, None, "a function */ of the user's")
    assert "There is no kernel_grid: a function * / of the user's." in header
    use = (
        "int use(void);\nint use(void) { kernel_arguments a = {0}; unsigned char b[1];"
        " kernel_pack(b, &a, 0, 0); return (int)kernel_kernel.buffer_bytes; }"
    )
    other = header_text(one, "k.cubin", "sha256:11ff", {}, None, "")
    assert other.splitlines()[1] != header.splitlines()[1]
    compiling.compile_text(f"{header}\n{header}\n{use}\n", tmp_path / "lib.so", language=language)
