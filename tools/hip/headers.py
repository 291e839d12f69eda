# SPDX-License-Identifier: Apache-2.0
"""Compares what the HIP driver takes for granted with what AMD declares, release by release: writes
docs/results/hip-headers.json.

    python -m tools.hip headers DIR

DIR keeps what is downloaded, 340 MB: the wheel of a Triton, which has HIP's C headers; AMD's
hip-python, and what it is called since ROCm 10, built from the headers of three other releases; and
Debian's package of HIP 5, which must be refused. Each has its digest here. Needs Python 3.11 for
hip-python, a C compiler, pip and a package index, apt-get and dpkg-deb. With --check nothing is
written, and what differs from the committed result is an error. `ours`, `of_headers` and
`_of_hip_python` say what each side declares; a test takes the headers of the installed Triton. Exit
status 1 when something differs.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bundler.runtime.launch.drivers import hip_api, launchers
from bundler.runtime.launch.drivers.cuda_api import ATTRIBUTE_BYTES
from tools.shared import measurement, programs
from tools.shared.processes import answer, captured
from tools.shared.wheel_files import fetched, unpack

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
_ENUMERATIONS = (
    "hipError_t",
    "hipDeviceAttribute_t",
    "hipFunction_attribute",
    "hipMemoryType",
    "hipLaunchAttributeID",
)
_MEMBERS = {"type": "type", "device": "device", "isManaged": "managed", "allocationFlags": "flags"}
_BEGIN = "#include <hip/hip_runtime_api.h>\n#include <stddef.h>\n#include <stdio.h>\n"
_HANDLES = {f"hip{name}_t" for name in ("Module", "Function", "Stream", "Deviceptr")}
_WIDE = {*_HANDLES, "size_t", "unsigned long"}
RESULT = "hip-headers"
# A library may lack these: HIP had no such launch before 7.0, and kernels with clusters are then
# refused by name.
OPTIONAL = (hip_api.LAUNCH_EXTENDED, "HIP_LAUNCH_CONFIG", "hipLaunchAttribute")
_CLUSTER = hip_api.NAMES["CLUSTER_DIMENSION"]
_PLATFORMS = ("_2_28", "_2_27", "2014", "_2_17")
_WHEELS = (
    *("--python-version=3.11", "--implementation=cp", "--abi=cp311"),
    *(f"--platform=manylinux{glibc}_x86_64" for glibc in _PLATFORMS),
)


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


def _missing_functions(include: Path) -> list[str]:
    """Return the functions without which no library is opened and which C headers do not
    declare.
    """
    text = _preprocessed(include)
    return sorted(name for name in hip_api.SIGNATURES if _argument_types(text, name) is None)


def _of_hip_python(folder: Path) -> Declared:
    """Return what AMD's hip-python, or rocm-bindings-hip, was built with; enumerators and
    structures need no GPU.
    """
    own = ours()
    is_new = (folder / "rocm").is_dir()
    module, declared = (
        ("rocm.bindings.hip", "rocm/bindings/cyhip.pxd") if is_new else ("hip.hip", "hip/chip.pxd")
    )
    words = ("headers", "--step", "told", str(folder), module, *own.numbers)
    found = Declared(**answer("tools.hip", *words, environment={}))
    text = (folder / declared).read_text()
    for function in own.arguments:
        # The package calls this one by the name that the headers' macro replaces.
        types = _argument_types(text, function.removesuffix("R0600"))
        if types is not None:
            found.arguments[function] = [8 if "*" in kind or kind in _WIDE else 4 for kind in types]
    return found


def _told(folder: str, module: str, *wanted: str) -> dict[str, Any]:
    """Return what an unpacked hip-python knows of HIP's numbers, in a process of its own.

    Where a member lies is found by writing a number at our place of it and reading it through the
    package.
    """
    sys.path.insert(0, folder)
    hip: Any = importlib.import_module(module)
    return {"numbers": _numbers(hip, wanted), "places": _places(hip)}


def _numbers(hip: Any, wanted: Sequence[str]) -> dict[str, int]:
    enumerations = [getattr(hip, name) for name in _ENUMERATIONS]
    return {
        name: int(getattr(enumeration, name))
        for name in wanted
        for enumeration in enumerations
        if hasattr(enumeration, name)
    }


def _places(hip: Any) -> dict[str, int]:
    found = {
        "hipDeviceProp_tR0600": int(hip.hipDeviceProp_t().c_sizeof()),
        "hipPointerAttribute_t": int(hip.hipPointerAttribute_t().c_sizeof()),
    }
    for name in ("hipLaunchAttribute", "HIP_LAUNCH_CONFIG"):
        if hasattr(hip, name):
            found[name] = int(getattr(hip, name)().c_sizeof())
    memory = ctypes.create_string_buffer(hip_api.PROPERTIES_BYTES)
    ctypes.memmove(ctypes.addressof(memory) + hip_api.ARCH_AT, b"gfx942", 6)
    if hip.hipDeviceProp_t.fromObj(ctypes.addressof(memory)).gcnArchName in {b"gfx942", "gfx942"}:
        found["hipDeviceProp_tR0600.gcnArchName"] = hip_api.ARCH_AT
    for name, own in _MEMBERS.items():
        attributes = hip_api.PointerAttributes(**{own: 2})
        if int(getattr(hip.hipPointerAttribute_t.fromObj(ctypes.addressof(attributes)), name)) == 2:
            found[f"hipPointerAttribute_t.{name}"] = getattr(hip_api.PointerAttributes, own).offset
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


@dataclass(frozen=True)
class Source:
    """A package that declares one release of HIP; `digest` is of the file that is downloaded,
    `beside` what it imports.
    """

    hip: str
    project: str
    version: str
    digest: str
    beside: tuple[Source, ...] = ()


_CORE = Source(
    *("7.15", "rocm-bindings-core", "10.0.0.0.1.2"),
    "943da68c125cbc7f9ecdc8106241881ae29b36fd6b20e62ac0a7bc2782a41041",
)
SOURCES = (
    Source(
        *("7.1", "triton", "3.7.1"),
        "6744957e9fd610a29680ec2346057d0c86948ed3812468670719f391e94b44a5",
    ),
    Source(
        *("6.4", "hip-python", "6.4.4.555.40"),
        "39f374c750b1da33a2a726006d15f171348f7c2fc4a722ce37f7ed5fbd493821",
    ),
    Source(
        *("7.2", "hip-python", "7.2.2.562.43"),
        "631890c8f3a67901a0d2d0856f74815085818625570e010d0c56ea2ab10b1236",
    ),
    Source(
        *("7.15", "rocm-bindings-hip", "10.0.0.0.1.2"),
        "b288d26fac3ab77d2f25f4b832397abb1d01157871f23226f9dd389e92b22ee4",
        (_CORE,),
    ),
    Source(
        *("5.2", "libamdhip64-dev", "5.2.3-8"),
        "1f87b72e5aa86025c6cb96312c75ee7f549c42475f4bc51049ab7b67cc4e762e",
    ),
)


def main() -> int:
    """Compare, and write the result; or do the step of a process of its own."""
    if programs.run_step({"told": _told}):
        return 0
    parser = programs.parser(
        __doc__,
        check=(False, "write nothing; compare with the committed result"),
        results=(measurement.RESULTS, "where the result is"),
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="where downloads are kept")
    options = parser.parse_args()
    if sys.version_info[:2] != (3, 11):
        parser.error("hip-python's wheels are taken for Python 3.11; run this with that")
    rows = [row for source in SOURCES for row in _rows(source, unpacked(source, options.folder))]
    wrong = [row for row in rows if row["ok"] is False]
    for row in wrong:
        print("differs: HIP {hip}, {what}: we have {ours}, it has {theirs}".format_map(row))
    if options.check:
        committed = json.loads((options.results / f"{RESULT}.json").read_text())
        if committed["rows"] != rows:
            file = f"{options.results / RESULT}.json"
            print(f"the rows are not those of {file}; run this without --check")
            return 1
    else:
        sources = [
            {"hip": one.hip, "package": f"{one.project} {one.version}", "sha256": one.digest}
            for one in SOURCES
        ]
        result = {"sources": sources, "rows": rows}
        print(f"wrote {measurement.save(RESULT, result, options.results)}")
    silent = [row for row in rows if row["ok"] is None]
    counts = f"{len(rows) - len(silent)} compared, {len(wrong)} differ"
    print(f"{counts}; {len(silent)} are not declared, or cannot be asked for")
    return 1 if wrong else 0


def unpacked(source: Source, folder: Path) -> Path:
    """Return the folder with a package's files, and with those of what it imports; fetched unless
    they are there.
    """
    into = folder / f"{source.project}-{source.version}"
    for one in (source, *source.beside):
        _unpack(one, folder, into)
    return into


def _unpack(source: Source, folder: Path, into: Path) -> None:
    if source.project.startswith("lib"):
        name, folder = f"{source.project}_{source.version}_*.deb", folder.absolute()
        folder.mkdir(parents=True, exist_ok=True)
        if not any(folder.glob(name)):
            line = ["apt-get", "download", f"{source.project}={source.version}"]
            subprocess.run(line, cwd=folder, check=True)
        (file,) = folder.glob(name)
    else:
        file = fetched(source.project, source.version, folder, *_WHEELS)
    with file.open("rb") as stream:
        got = hashlib.file_digest(stream, "sha256").hexdigest()
    if got != source.digest:
        raise SystemExit(
            f"{file} has the digest {got}, and {source.digest} was expected; remove it, and run"
            " this again"
        )
    if file.suffix == ".deb":
        subprocess.run(["dpkg-deb", "-x", file, into], check=True)
    else:
        ours = ("triton/backends/amd/", "hip/", "rocm/")
        unpack(file, into, lambda name: name.startswith(ours))


def _rows(source: Source, folder: Path) -> list[dict[str, Any]]:
    if source.project in {"hip-python", "rocm-bindings-hip"}:
        return compared(source.hip, _of_hip_python(folder))
    if source.project == "triton":
        backend = folder / "triton" / "backends" / "amd"
        found = of_headers(backend / "include")
        # What the headers have no name for is the number that Triton's own launcher gives.
        given = re.search(
            r"Cluster dimensions\s+attributes\[0\]\.id = (\d+);", (backend / "driver.c").read_text()
        )
        if _CLUSTER not in found.numbers and given is not None:
            found.numbers[_CLUSTER] = int(given[1])
        return compared(source.hip, found)
    lacking = _missing_functions(folder / "usr" / "include")
    return [
        {
            "hip": source.hip,
            "kind": "refused",
            "what": "functions without which no library is opened",
            "ours": [],
            "theirs": lacking,
            "ok": bool(lacking),
        }
    ]


def compared(hip: str, found: Declared) -> list[dict[str, Any]]:
    """Return a row for each number, place and prototype.

    `theirs` is None for what the source does not declare; `ok` then is None where a library may
    lack it, or the source cannot tell.
    """
    own, rows = ours(), []
    for kind in ("numbers", "places", "arguments"):
        theirs = getattr(found, kind)
        for what, expected in getattr(own, kind).items():
            got = theirs.get(what)
            ok: bool | None = got == expected
            if got is None and _may_lack(what, theirs):
                ok = None
            elif got is not None and what in _AT_MOST:
                ok = got <= expected
            rows.append(
                {"hip": hip, "kind": kind, "what": what, "ours": expected, "theirs": got, "ok": ok}
            )
    return rows


def _may_lack(what: str, places: dict[str, Any]) -> bool:
    """Whether a release may lack it, or hip-python, which tells the size of its structure, has no
    way to tell this.
    """
    unasked = {"hipPointerAttribute_t.devicePointer", "hipPointerAttribute_t.hostPointer", _LENGTH}
    return (
        what == _CLUSTER
        or what.partition(".")[0] in OPTIONAL
        or (what in unasked and "hipDeviceProp_tR0600" in places)
    )
