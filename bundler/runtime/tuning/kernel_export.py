# SPDX-License-Identifier: Apache-2.0
"""`export_kernel`: a tuned kernel as files for programs in other languages: binary, stages of its
compile, how to launch it as JSON and header.

`AutotunedKernel.export` calls it. docs/export.md describes the files. Programs in C++ and C include
the header, which needs no parser for JSON: they fill the struct of arguments, ask for the grid,
pack, and launch through the driver's own functions, as `examples/exported_kernel.cpp` does.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bundler.errors import CannotLaunchStatically, ConfigError
from bundler.format import names
from bundler.format.bundle import Bundle
from bundler.format.bundle_file import os_errors, replace_content
from bundler.format.entries import Kernel
from bundler.runtime.configs import Config
from bundler.runtime.heuristics.grid_expressions import GridExpressions
from bundler.runtime.heuristics.grid_sources import (
    HELPERS,
    expression_text,
    grid_function,
    identifier,
    identifiers,
)
from bundler.runtime.launch.plan import (
    GLOBAL_SCRATCH,
    PROFILE_SCRATCH,
    TENSOR_MAP,
    TENSOR_MAP_BYTES,
    LaunchPlan,
    Parameter,
)
from bundler.runtime.launch.plan_builder import build_plan

SCHEMA = 1
_DIVISIBLE = "tt.divisibility"
_NOT_STAGES = names.LAUNCH_KINDS | {"other", "so"}
# Floats of 16 bits are given as their bits, since C++ has no type for them everywhere; so are
# truths, as 0 or 1.
_TYPES = {
    "pointer": "uint64_t",
    "i1": "int8_t",
    "u1": "uint8_t",
    "fp16": "uint16_t",
    "bf16": "uint16_t",
    "fp32": "float",
    "fp64": "double",
    TENSOR_MAP: "unsigned char",
    **{f"i{bits}": f"int{bits}_t" for bits in (8, 16, 32, 64)},
    **{f"u{bits}": f"uint{bits}_t" for bits in (8, 16, 32, 64)},
}
# In the order of the struct `bundler_kernel`.
_NUMBERS = (
    "block_threads",
    "cluster",
    "shared_bytes",
    "cooperative",
    "pdl",
    "global_scratch_bytes",
    "global_scratch_align",
    "profile_scratch_bytes",
    "profile_scratch_align",
    "buffer_bytes",
)
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


@dataclass(frozen=True)
class Exported:
    """The files of one exported kernel.

    Attributes:
        binary: for the device.
        parameters: how to launch it, as JSON.
        header: the same for C++ and C.
        stages: the stages of its compile as text, by kind: `ptx`, `llir`, `ttgir`, `ttir`, …
    """

    binary: Path
    parameters: Path
    header: Path
    stages: Mapping[str, Path] = field(default_factory=dict)


@dataclass(frozen=True)
class ExportNotes:
    """What is written beside a kernel's own facts.

    Attributes:
        config: that it was compiled from.
        grid: what a program works its grid out with; None where nobody knows it as text.
        why_no_grid: why it is None.
        metadata: of the generator that wrote the kernel.
    """

    config: Config
    grid: GridExpressions | None = None
    why_no_grid: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)


def grid_notes(grid: Any, values: Mapping[str, Any]) -> tuple[GridExpressions | None, str]:
    """Return a call's grid as expressions over its sizes, or None and why there are none.

    Args:
        grid: as the caller gave it.
        values: of the config, and constants.
    """
    tell = getattr(grid, "expressions", None)
    if tell is None:
        what = (
            "nobody gave a grid"
            if grid is None
            else "the call's grid is a function or a number, which says nothing of other sizes"
        )
        return None, f"{what}; give one as text, such as TextGrid('-(-n // BLOCK)')"
    try:
        return tell(values), ""
    except ConfigError as error:
        return None, error.message


def export_kernel(
    kernel: Kernel,
    image: bytes,
    bundle: Bundle,
    notes: ExportNotes,
    directory: str | os.PathLike[str],
) -> Exported:
    """Write a kernel's binary, its stages, and how to launch it.

    Files are `<kernel>-<digest>.cubin` (or `.hsaco`) and the same with `.json`, `.h`, `.ptx` and so
    on.

    Args:
        kernel: the kernel.
        image: its binary, verified.
        bundle: where it is from; its stages are written, as far as the bundle has them.
        notes: config, grid, metadata.
        directory: made when it is not there.

    Raises:
        CannotLaunchStatically: something that a launch needs is not known.
        AccessDenied, StoreFull, NotFound: the files cannot be written.
    """
    plan = build_plan(kernel, image)
    divisors = _divisors(kernel, plan)
    # Called after the binary's file, whose name was checked when the bundle was read: a kernel may
    # be called anything.
    called = kernel.binary.filename.rpartition(".")[0]
    folder, stem = Path(directory), f"{called}-{kernel.binary.digest.partition(':')[2][:16]}"
    with os_errors(os.fspath(folder), "write"):
        folder.mkdir(parents=True, exist_ok=True)

    def place(kind: str) -> Path:
        return folder / f"{stem}.{kind}"

    stages = {
        kind: artifact
        for artifact in kernel.artifacts
        if (kind := names.artifact_kind(artifact.filename)) not in _NOT_STAGES
    }
    exported = Exported(
        place(kernel.binary.kind), place("json"), place("h"), {kind: place(kind) for kind in stages}
    )
    header = header_text(
        plan, exported.binary.name, kernel.binary.digest, divisors, notes.grid, notes.why_no_grid
    )
    facts = {
        **_facts(plan, divisors),
        "compiled_in": compiled_in(kernel),
        "binary": exported.binary.name,
        "digest": kernel.binary.digest,
        "bundle": bundle.digest,
        "header": exported.header.name,
        "stages": {kind: path.name for kind, path in exported.stages.items()},
        "config": plain(notes.config.to_dict()),
        "grid": _grid(notes),
        "metadata": plain(notes.metadata),
    }
    for kind, artifact in stages.items():
        replace_content(exported.stages[kind], bundle.read(artifact))
    # How to launch it comes last: whoever finds that finds the rest.
    replace_content(exported.binary, image)
    replace_content(exported.header, header.encode())
    replace_content(exported.parameters, json.dumps(facts, indent=1).encode())
    return exported


def _divisors(kernel: Kernel, plan: LaunchPlan) -> dict[str, int]:
    """Return what the values of parameters have to be divisible by: the compiler took that for
    granted, and the binary relies on it.
    """
    known = {path: dict(value.plain()) for path, value in kernel.launch.require_facts().attributes}
    found = {}
    for parameter in plan.arguments:
        assert parameter.argument is not None
        divisor = known.get(plan.pieces[parameter.argument].path, {}).get(_DIVISIBLE)
        if divisor is not None:
            found[parameter.name] = int(divisor)
    return found


def compiled_in(kernel: Kernel) -> dict[str, Any]:
    """Return the values of arguments that are part of the binary; other values need another binary.

    Raises:
        CannotLaunchStatically: a value is that of an argument that the kernel does not have.
    """
    facts = kernel.launch.require_facts()
    names_of = dict(enumerate(name for name, _ in facts.signature))
    values = {path[0]: plain(value.plain()) for path, value in facts.constants if len(path) == 1}
    if not values.keys() <= names_of.keys():
        raise CannotLaunchStatically(
            f"{kernel.key}: constants of arguments {sorted(values.keys() - names_of.keys())}, and"
            f" it has {len(names_of)}; its launch facts are not those of a compile: record it"
            " again",
            key=kernel.key,
        )
    return {names_of[number]: value for number, value in values.items()}


def _facts(plan: LaunchPlan, divisors: Mapping[str, int]) -> dict[str, Any]:
    """Return what a launch needs."""
    return {
        "schema": SCHEMA,
        "kernel": plan.kernel,
        "entry": plan.entry,
        "key": plan.key,
        "target": str(plan.target),
        **{name: getattr(plan, name) for name in _NUMBERS},
        "parameters": [
            {
                "name": p.name,
                "kind": p.kind,
                "offset": p.offset,
                "size": p.size,
                "hidden": p.argument is None,
                "divisible_by": divisors.get(p.name, 1),
            }
            for p in plan.parameters
        ],
        "tensor_maps": [asdict(tensor_map) for tensor_map in plan.tensor_maps],
    }


def _grid(notes: ExportNotes) -> dict[str, Any]:
    grid = notes.grid
    if grid is None:
        return {"sizes": [], "expressions": None, "cpp": None, "why": notes.why_no_grid}
    names_in_c = identifiers(("grid", *grid.sizes))
    return {
        "sizes": list(grid.sizes),
        "expressions": list(grid.axes),
        "cpp": [expression_text(axis, names_in_c) for axis in grid.axes],
        "positive": grid.positive,
    }


def plain(value: Any) -> Any:
    """Return a generator's metadata as JSON knows it: tuples with names as objects, sets in order,
    what is unknown as text.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no number for it
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, set | frozenset):
        return sorted((plain(item) for item in value), key=str)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(getattr(value, "name", value))


def header_text(
    plan: LaunchPlan,
    binary: str,
    digest: str,
    divisors: Mapping[str, int],
    grid: GridExpressions | None,
    why_no_grid: str,
) -> str:
    """Return the header of a kernel: `NAME_kernel`, `NAME_arguments`, `NAME_pack`, and `NAME_grid`
    where the grid is known as text.

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
        grid_text = (
            f"/* {told}"
            f" */\n{grid_function(f'{name}_grid', grid, plan.target.backend, plan.cluster)}"
        )
    return "\n".join(
        (
            f"/* Kernel {_words(plan.kernel)}, written by triton-bundler; C++ and C. */",
            f"#ifndef {guard}",
            f"#define {guard}",
            "",
            "#include <stdint.h>",
            "#include <string.h>",
            "",
            _SHARED,
            _header_facts(name, plan, binary, digest),
            "",
            _arguments(name, plan.arguments, divisors),
            "",
            _pack(name, plan),
            "",
            grid_text,
            "",
            "#endif",
            "",
        )
    )


def _header_facts(name: str, plan: LaunchPlan, binary: str, digest: str) -> str:
    rows = [
        f"  {{{_quoted(p.name)}, {_quoted(p.kind)}, {p.offset}, {p.size}}},"
        for p in plan.parameters
    ]
    table = (
        [f"static const bundler_parameter {name}_parameters[] = {{", *rows, "};"] if rows else []
    )
    words = [*map(_quoted, (plan.entry, str(plan.target), binary, digest))]
    numbers = (*(getattr(plan, name) for name in _NUMBERS), len(rows))
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
        "/* Writes the parameter buffer, NAME_kernel.buffer_bytes long; scratch is an address, 0"
        " for none. */".replace("NAME", name),
        (
            f"static inline void {name}_pack(unsigned char *bundler_buffer, const {name}_arguments"
            " *bundler_from,"
        ),
        "  uint64_t bundler_global_scratch, uint64_t bundler_profile_scratch) {",
        f"  memset(bundler_buffer, 0, {plan.buffer_bytes});",
        "  (void)bundler_from; (void)bundler_global_scratch; (void)bundler_profile_scratch;",
    ]
    for p in plan.parameters:
        source = _HIDDEN[p.kind] if p.argument is None else f"bundler_from->{names[p.name]}"
        lines.append(f"  memcpy(bundler_buffer + {p.offset}, &{source}, {p.size});")
    return "\n".join([*lines, "}"])


def _quoted(text: str) -> str:
    """Return a text as a literal of C++ and C; whatever is no plain character is written as a
    number.
    """
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
