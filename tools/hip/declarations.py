# SPDX-License-Identifier: Apache-2.0
"""`ours`, `of_headers`, `of_hip_python`: what is declared of the HIP runtime: by us, by AMD's C headers, by AMD's Python package.

`headers.py` compares them; the test of `hip_api.py` takes the headers that come with the installed Triton.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bundler.runtime.launch import hip_api, launchers
from bundler.runtime.launch.cuda_api import ATTRIBUTE_BYTES

# The structures that we read and write, and the members whose places count.
STRUCTURES = {
    "hipDeviceProp_tR0600": ("gcnArchName",),
    "hipPointerAttribute_t": (
        "type",
        "device",
        "devicePointer",
        "hostPointer",
        "isManaged",
        "allocationFlags",
    ),
    "hipLaunchAttribute": ("id", "val"),
    "HIP_LAUNCH_CONFIG": (
        "gridDimX",
        "blockDimX",
        "sharedMemBytes",
        "hStream",
        "attrs",
        "numAttrs",
    ),
}
# The bytes of the one string that we read, and what we have more room for than is needed.
LENGTH = "hipDeviceProp_tR0600.gcnArchName length"
AT_MOST = ("hipDeviceProp_tR0600",)
# Bytes of each argument, as `launchers.py` and `_launch.c` give them.
_LAUNCHES = {
    hip_api.LAUNCH: [8, *[4] * 7, 8, 8, 8],
    hip_api.LAUNCH_COOPERATIVE: [8, *[4] * 7, 8, 8],
    hip_api.LAUNCH_EXTENDED: [8, 8, 8, 8],
}
_BEGIN = "#include <hip/hip_runtime_api.h>\n#include <stddef.h>\n#include <stdio.h>\n"
_HANDLES = {
    "hipModule_t",
    "hipFunction_t",
    "hipStream_t",
    "hipDeviceptr_t",
    "size_t",
    "unsigned long",
}


@dataclass
class Declared:
    """What one source declares.

    Attributes:
        numbers: enumerators by the headers' names.
        places: sizes of structures, and offsets of members, as `hipLaunchAttribute` and `hipLaunchAttribute.id`.
        arguments: bytes of each argument, by function.
    """

    numbers: dict[str, int] = field(default_factory=dict)
    places: dict[str, int] = field(default_factory=dict)
    arguments: dict[str, list[int]] = field(default_factory=dict)


def ours() -> Declared:
    """Return what the driver takes for granted; the properties of a device have a size of at most that."""
    found = Declared(numbers={name: getattr(hip_api, own) for own, name in hip_api.NAMES.items()})
    attributes = hip_api.PointerAttributes
    members = zip(STRUCTURES["hipPointerAttribute_t"], attributes._fields_, strict=True)
    config = dict(zip(STRUCTURES["HIP_LAUNCH_CONFIG"], (0, 12, 24, 32, 40, 48), strict=True))
    found.places = {
        "hipDeviceProp_tR0600": hip_api.PROPERTIES_BYTES,
        "hipDeviceProp_tR0600.gcnArchName": hip_api.ARCH_AT,
        LENGTH: hip_api.ARCH_BYTES,
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
    for structure, members in STRUCTURES.items():
        if re.search(rf"\b{structure}\b", text):
            lines.append(f'printf("places {structure} %zu\\n", sizeof({structure}));')
            lines += [
                f'printf("places {structure}.{member} %zu\\n", offsetof({structure}, {member}));'
                for member in members
            ]
    structure, _, member = LENGTH.partition(" ")[0].partition(".")
    lines.append(
        f'printf("places {LENGTH.replace(" ", "/")} %zu\\n", sizeof((({structure} *)0)->{member}));'
    )
    for function in wanted.arguments:
        types = _argument_types(text, function)
        if types is not None:
            lines.append(f'printf("arguments {function}");')
            lines += [f'printf(" %zu", sizeof({kind}));' for kind in types]
            lines.append('printf("\\n");')
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "declared")
        _compile(
            include,
            f"{_BEGIN}int main(void) {{ {' '.join(lines)} return 0; }}\n",
            "-o",
            str(program),
        )
        said = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    found = Declared()
    for kind, name, *numbers in map(str.split, said.splitlines()):
        if kind == "arguments":
            found.arguments[name] = [int(number) for number in numbers]
        else:
            getattr(found, kind)[name.replace("/", " ")] = int(numbers[0])
    return found


def missing_functions(include: Path) -> list[str]:
    """Return the functions without which no library is opened and which C headers do not declare."""
    text = _preprocessed(include)
    return sorted(name for name in hip_api.SIGNATURES if _argument_types(text, name) is None)


def of_hip_python(folder: Path) -> Declared:
    """Return what AMD's hip-python, or rocm-bindings-hip, was built with; enumerators and structures need no GPU."""
    own = ours()
    is_new = (folder / "rocm").is_dir()
    module, declared = (
        ("rocm.bindings.hip", "rocm/bindings/cyhip.pxd") if is_new else ("hip.hip", "hip/chip.pxd")
    )
    told = subprocess.run(
        [sys.executable, "-m", "tools.hip.hip_python", module, json.dumps(sorted(own.numbers))],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])},
        cwd=Path(__file__).resolve().parents[2], capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    found = Declared(**json.loads(told))
    text = (folder / declared).read_text()
    for function in own.arguments:
        # The package calls this one by the name that the headers' macro replaces.
        types = _argument_types(text, function.removesuffix("R0600"))
        if types is not None:
            found.arguments[function] = [
                8 if "*" in kind or kind in _HANDLES else 4 for kind in types
            ]
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
    done = subprocess.run(
        [compiler, "-xc", "-D__HIP_PLATFORM_AMD__", "-isystem", str(include), "-", *options],
        input=text, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{compiler} refuses the headers in {include}:\n{done.stderr}")
    return done.stdout
