# SPDX-License-Identifier: Apache-2.0
"""`header_text`: the header of an exported kernel, for programs in C++ and C: what a launch needs, without a parser for JSON.

`kernel_export` writes it beside the binary.  A program includes it, fills the struct of arguments, asks for the grid, packs, and launches
through the driver's own functions; `examples/exported_kernel.cpp` is such a program.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from bundler.runtime.heuristics.grid_expressions import GridExpressions
from bundler.runtime.heuristics.grid_sources import HELPERS, grid_function, identifier, identifiers
from bundler.runtime.launch.plan import (
    GLOBAL_SCRATCH,
    PROFILE_SCRATCH,
    TENSOR_MAP,
    TENSOR_MAP_BYTES,
    LaunchPlan,
    Parameter,
)

# Floats of 16 bits are given as their bits, since C++ has no type for them everywhere; so are truths, as 0 or 1.
_TYPES = {
    "pointer": "uint64_t", "i1": "int8_t", "u1": "uint8_t", "fp16": "uint16_t", "bf16": "uint16_t", "fp32": "float", "fp64": "double",
    TENSOR_MAP: "unsigned char", **{f"i{bits}": f"int{bits}_t" for bits in (8, 16, 32, 64)},
    **{f"u{bits}": f"uint{bits}_t" for bits in (8, 16, 32, 64)},
}  # fmt: skip
_HIDDEN = {GLOBAL_SCRATCH: "bundler_global_scratch", PROFILE_SCRATCH: "bundler_profile_scratch"}
_PLAIN = re.compile(r"[A-Za-z0-9_ .:,;=+*/%()<>{}|&!#@^~$'\[\]-]")

_SHARED = f"""\
#ifndef BUNDLER_EXPORTED_KERNEL
#define BUNDLER_EXPORTED_KERNEL

/* One parameter of the device function: where it lies in the parameter buffer, in bytes. */
typedef struct bundler_parameter {{
  const char *name, *kind;
  uint32_t offset, size;
}} bundler_parameter;

/* What a launch needs beside the grid and the buffer. */
typedef struct bundler_kernel {{
  const char *entry;         /* name of the device function in the binary */
  const char *target;        /* backend and architecture that the binary is for */
  const char *binary;        /* name of the file beside this one */
  const char *digest;        /* of that file */
  uint32_t block_threads;    /* threads along x; 1 along y and z */
  uint32_t cluster;          /* blocks for each program: the launch has grid[0] * cluster blocks along x */
  uint32_t shared_bytes;     /* dynamic shared memory */
  int32_t cooperative, pdl;  /* launch attributes: 0 or 1 */
  uint64_t global_scratch_bytes, global_scratch_align;    /* for each block of the launch; 0 bytes: pass 0 */
  uint64_t profile_scratch_bytes, profile_scratch_align;
  uint32_t buffer_bytes, parameter_count;
  const bundler_parameter *parameters;
}} bundler_kernel;
{HELPERS}
#endif
"""


def header_text(
    plan: LaunchPlan,
    binary: str,
    digest: str,
    divisors: Mapping[str, int],
    grid: GridExpressions | None,
    why_no_grid: str,
) -> str:
    """Return the header of a kernel: `NAME_kernel`, `NAME_arguments`, `NAME_pack`, and `NAME_grid` where the grid is known as text.

    Args:
        plan: of the kernel.
        binary, digest: the binary's file.
        divisors: what the values of arguments have to be divisible by.
        grid: as expressions over the call's sizes, None where it is not known.
        why_no_grid: said in the place of the function.

    Raises:
        ConfigError: the grid has no form in C++.
    """
    name = identifier(plan.kernel)
    guard = f"BUNDLER_KERNEL_{identifier(digest.partition(':')[2][:16] or name)}_{name}"
    if grid is None:
        grid_text = f"/* There is no {name}_grid: {_words(why_no_grid)}. */"
    else:
        told = ", ".join(
            f"{axis} = {_words(text)}" for axis, text in zip("xyz", grid.axes, strict=True)
        )
        grid_text = f"/* {told} */\n{grid_function(f'{name}_grid', grid, plan.target.backend, plan.cluster)}"
    return "\n".join((
        f"/* Kernel {_words(plan.kernel)}, written by triton-bundler; C++ and C. */",
        f"#ifndef {guard}", f"#define {guard}", "", "#include <stdint.h>", "#include <string.h>", "", _SHARED,
        _facts(name, plan, binary, digest), "", _arguments(name, plan.arguments, divisors), "", _pack(name, plan), "", grid_text, "", "#endif", "",
    ))  # fmt: skip


def _facts(name: str, plan: LaunchPlan, binary: str, digest: str) -> str:
    rows = [
        f"  {{{_quoted(p.name)}, {_quoted(p.kind)}, {p.offset}, {p.size}}},"
        for p in plan.parameters
    ]
    table = (
        [f"static const bundler_parameter {name}_parameters[] = {{", *rows, "};"] if rows else []
    )
    words = [*map(_quoted, (plan.entry, str(plan.target), binary, digest))]
    numbers = (
        plan.block_threads, plan.cluster, plan.shared_bytes, plan.cooperative, plan.pdl, plan.global_scratch_bytes,
        plan.global_scratch_align, plan.profile_scratch_bytes, plan.profile_scratch_align, plan.buffer_bytes, len(rows),
    )  # fmt: skip
    fields = [
        *words,
        *(str(int(number)) for number in numbers),
        f"{name}_parameters" if rows else "0",
    ]
    return "\n".join(
        [
            *table,
            f"static const bundler_kernel {name}_kernel = {{",
            *(f"  {f}," for f in fields),
            "};",
        ]
    )


def _arguments(name: str, parameters: Sequence[Parameter], divisors: Mapping[str, int]) -> str:
    """Return the struct that a program fills, in the order of the parameters."""
    names = identifiers(parameter.name for parameter in parameters)
    members = []
    for p in parameters:
        length = f"[{TENSOR_MAP_BYTES}]" if p.kind == TENSOR_MAP else ""
        demand = f", divisible by {divisors[p.name]}" if p.name in divisors else ""
        members.append(f"  {_TYPES[p.kind]} {names[p.name]}{length};  /* {p.kind}{demand} */")
    return "\n".join(
        [
            f"typedef struct {name}_arguments {{",
            *(members or ["  char bundler_none;"]),
            f"}} {name}_arguments;",
        ]
    )


def _pack(name: str, plan: LaunchPlan) -> str:
    """Return the function that fills the parameter buffer."""
    names = identifiers(parameter.name for parameter in plan.arguments)
    lines = [
        "/* Writes the parameter buffer, NAME_kernel.buffer_bytes long; scratch is an address, 0 for none. */".replace(
            "NAME", name
        ),
        f"static inline void {name}_pack(unsigned char *bundler_buffer, const {name}_arguments *bundler_from,",
        "  uint64_t bundler_global_scratch, uint64_t bundler_profile_scratch) {",
        f"  memset(bundler_buffer, 0, {plan.buffer_bytes});",
        "  (void)bundler_from; (void)bundler_global_scratch; (void)bundler_profile_scratch;",
    ]
    for p in plan.parameters:
        source = _HIDDEN[p.kind] if p.argument is None else f"bundler_from->{names[p.name]}"
        lines.append(f"  memcpy(bundler_buffer + {p.offset}, &{source}, {p.size});")
    return "\n".join([*lines, "}"])


def _quoted(text: str) -> str:
    """Return a text as a literal of C++ and C; whatever is no plain character is written as a number."""
    return (
        '"'
        + "".join(chr(b) if _PLAIN.fullmatch(chr(b)) else f"\\{b:03o}" for b in text.encode())
        + '"'
    )


def _words(text: str) -> str:
    """Return a text that can stand in a comment."""
    return (
        "".join(c if _PLAIN.fullmatch(c) else "_" for c in text)
        .replace("*/", "* /")
        .replace("/*", "/ *")
    )
