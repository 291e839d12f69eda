# SPDX-License-Identifier: Apache-2.0
"""Compares what the HIP driver takes for granted with what AMD's headers declare.

    python -m tools.hip headers [INCLUDE]

INCLUDE is the folder with the headers of a release of ROCm; without it, those that come with the
installed Triton are taken, as a test does.  Needs a C compiler.  `ours` and `of_headers` say what
each side declares.  Exit status 1 when something differs.  docs/results/hip-headers.json keeps what
four releases of HIP declare, and what HIP 5 lacks.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bundler.runtime.launch.drivers import hip_api, launchers
from bundler.runtime.launch.drivers.cuda_api import ATTRIBUTE_BYTES
from tools.shared import programs
from tools.shared.processes import captured

# The structures that we read and write, and the members whose places count.
_STRUCTURES = {
    "hipDeviceProp_tR0600": ("gcnArchName",),
    "hipPointerAttribute_t": (
        *("type", "device", "devicePointer", "hostPointer", "isManaged", "allocationFlags"),
    ),
    "hipLaunchAttribute": ("id", "val"),
    "HIP_LAUNCH_CONFIG": (
        *("gridDimX", "blockDimX", "sharedMemBytes", "hStream", "attrs", "numAttrs"),
    ),
}
# The bytes of the one string that we read, and what we have more room for than is needed.
_LENGTH = "hipDeviceProp_tR0600.gcnArchName length"
_AT_MOST = ("hipDeviceProp_tR0600",)
# Bytes of each argument, as `launchers.py` and `_launch.c` give them.
_LAUNCHES = {
    hip_api.LAUNCH: [8, *[4] * 7, 8, 8, 8],
    hip_api.LAUNCH_COOPERATIVE: [8, *[4] * 7, 8, 8],
    hip_api.LAUNCH_EXTENDED: [8, 8, 8, 8],
}
_BEGIN = "#include <hip/hip_runtime_api.h>\n#include <stddef.h>\n#include <stdio.h>\n"
# A library may lack these: HIP had no such launch before 7.0, and kernels with clusters are then
# refused by name.
OPTIONAL = (hip_api.LAUNCH_EXTENDED, "HIP_LAUNCH_CONFIG", "hipLaunchAttribute")
_CLUSTER = hip_api.NAMES["CLUSTER_DIMENSION"]


@dataclass
class Declared:
    """What one source declares.

    Attributes:
        numbers: enumerators by the headers' names.
        places: sizes of structures, and offsets of members, as `hipLaunchAttribute` and
            `hipLaunchAttribute.id`.
        arguments: bytes of each argument, by function.
    """

    numbers: dict[str, int] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)
    arguments: dict[str, list[int]] = field(default_factory=dict)


def ours() -> Declared:
    """Return what the driver takes for granted; the properties of a device have a size of at most
    that.
    """
    found = Declared(numbers={name: getattr(hip_api, own) for own, name in hip_api.NAMES.items()})
    attributes = hip_api.PointerAttributes
    members = zip(_STRUCTURES["hipPointerAttribute_t"], attributes._fields_, strict=True)
    config = dict(zip(_STRUCTURES["HIP_LAUNCH_CONFIG"], (0, 12, 24, 32, 40, 48), strict=True))
    found.places = {
        "hipDeviceProp_tR0600": hip_api.PROPERTIES_BYTES,
        "hipDeviceProp_tR0600.gcnArchName": hip_api.ARCH_AT,
        _LENGTH: hip_api.ARCH_BYTES,
        "hipPointerAttribute_t": ctypes.sizeof(attributes),
        **{
            f"hipPointerAttribute_t.{name}": getattr(attributes, own[0]).offset
            for name, own in members
        },
        "hipLaunchAttribute": ATTRIBUTE_BYTES,
        "hipLaunchAttribute.id": 0,
        "hipLaunchAttribute.val": 8,
        "HIP_LAUNCH_CONFIG": launchers.CONFIG.size,
        **{f"HIP_LAUNCH_CONFIG.{name}": at for name, at in config.items()},
    }
    sized: dict[str, Sequence[Any]] = {**hip_api.SIGNATURES, hip_api.ERROR_STRING: (ctypes.c_int,)}
    found.arguments = {
        name: [ctypes.sizeof(kind) for kind in kinds] for name, kinds in sized.items()
    } | _LAUNCHES
    return found


def of_headers(include: Path) -> Declared:
    """Return what C headers declare, as the C compiler counts it.

    Raises:
        RuntimeError: there is no C compiler, or it refuses the headers.
    """
    wanted, text = ours(), _preprocessed(include)
    lines = [
        f'printf("numbers {name} %lld\\n", (long long){name});'
        for name in wanted.numbers
        if re.search(rf"\b{name}\b", text)
    ]
    for structure, members in _STRUCTURES.items():
        if re.search(rf"\b{structure}\b", text):
            lines.append(f'printf("places {structure} %zu\\n", sizeof({structure}));')
            lines += [
                f'printf("places {structure}.{member} %zu\\n", offsetof({structure}, {member}));'
                for member in members
            ]
    structure, _, member = _LENGTH.partition(" ")[0].partition(".")
    lines.append(
        f'printf("places {_LENGTH.replace(" ", "/")} %zu\\n", sizeof((({structure}'
        f" *)0)->{member}));"
    )
    for function in wanted.arguments:
        types = _argument_types(text, function)
        if types is not None:
            lines.append(f'printf("arguments {function}");')
            lines += [f'printf(" %zu", sizeof({kind}));' for kind in types]
            lines.append('printf("\\n");')
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "declared")
        text = f"{_BEGIN}int main(void) {{ {' '.join(lines)} return 0; }}\n"
        _compile(include, text, "-o", str(program))
        said = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    found = Declared()
    for kind, name, *numbers in map(str.split, said.splitlines()):
        if kind == "arguments":
            found.arguments[name] = [int(number) for number in numbers]
        else:
            getattr(found, kind)[name.replace("/", " ")] = int(numbers[0])
    return found


def _argument_types(text: str, function: str) -> list[str] | None:
    """Return the types of a function's arguments as it is declared, None where it is not."""
    declared = re.search(rf"(?:hipError_t|char *\*) *{function} *\(([^)]*)\)", text)
    if declared is None:
        return None
    arguments = [" ".join(argument.split()) for argument in declared[1].split(",")]
    # Of each the name is cut off, which a lone `void` does not have.
    return [
        re.sub(r"\w+$", "", argument).strip()
        for argument in arguments
        if argument not in {"", "void"}
    ]


def _preprocessed(include: Path) -> str:
    return _compile(include, _BEGIN, "-E", "-P")


def _compile(include: Path, text: str, *options: str) -> str:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise RuntimeError("needs a C compiler, and there is none: install gcc")
    places = ("-D__HIP_PLATFORM_AMD__", "-isystem", include, "-")
    done = captured(compiler, "-xc", *places, *options, input=text)
    if done.returncode:
        raise RuntimeError(f"{compiler} refuses the headers in {include}:\n{done.stderr}")
    return done.stdout


def main() -> int:
    """Compare, and print what differs."""
    parser = programs.parser(__doc__)
    about = "default: that of the installed Triton"
    parser.add_argument("include", nargs="?", type=Path, metavar="INCLUDE", help=about)
    include = parser.parse_args().include
    rows = compared(of_headers(include or of_triton()))
    wrong = [row for row in rows if row["ok"] is False]
    for row in wrong:
        print("differs: {what}: we have {ours}, it has {theirs}".format_map(row))
    silent = sum(row["ok"] is None for row in rows)
    print(f"{len(rows) - silent} compared, {len(wrong)} differ; {silent} are not declared")
    return 1 if wrong else 0


def of_triton() -> Path:
    """Return where the installed Triton has AMD's headers.

    Raises:
        RuntimeError: Triton is not installed.
    """
    triton = importlib.util.find_spec("triton")
    if triton is None or triton.origin is None:
        raise RuntimeError("Triton is not installed, so there are no headers of AMD's")
    return Path(triton.origin).parent / "backends" / "amd" / "include"


def compared(found: Declared) -> list[dict[str, Any]]:
    """Return a row for each number, place and prototype.

    `theirs` is None for what the headers do not declare; `ok` then is None where a library may
    lack it.
    """
    own, rows = ours(), []
    for kind in ("numbers", "places", "arguments"):
        theirs = getattr(found, kind)
        for what, expected in getattr(own, kind).items():
            got = theirs.get(what)
            ok: bool | None = got == expected
            if got is None and (what == _CLUSTER or what.partition(".")[0] in OPTIONAL):
                ok = None
            elif got is not None and what in _AT_MOST:
                ok = got <= expected
            row = {"kind": kind, "what": what, "ours": expected, "theirs": got, "ok": ok}
            rows.append(row)
    return rows
