# SPDX-License-Identifier: Apache-2.0
"""Compares what the HIP driver takes for granted with what AMD declares, release by release: writes docs/results/hip-headers.json.

    python -m tools.hip headers DIR

DIR keeps what is downloaded, 340 MB: the wheel of a Triton, which has HIP's C headers; AMD's hip-python, and what it is called since
ROCm 10, built from the headers of three other releases; and Debian's package of HIP 5, which must be refused.  Each has its digest here.  Needs Python 3.11 for
hip-python, a C compiler, pip and a package index, apt-get and dpkg-deb.  With --check nothing is written, and what differs from
the committed result is an error.  Exit status 1 when something differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bundler.runtime.launch import hip_api
from tools.hip.declarations import (
    AT_MOST,
    LENGTH,
    Declared,
    missing_functions,
    of_headers,
    of_hip_python,
    ours,
)
from tools.shared import measurement

RESULT = "hip-headers"
# A library may lack these: HIP had no such launch before 7.0, and kernels with clusters are then refused by name.
OPTIONAL = (hip_api.LAUNCH_EXTENDED, "HIP_LAUNCH_CONFIG", "hipLaunchAttribute")
_CLUSTER = hip_api.NAMES["CLUSTER_DIMENSION"]
_WHEELS = ("--no-deps", "--only-binary=:all:", "--python-version=3.11", "--implementation=cp", "--abi=cp311",
           "--platform=manylinux_2_28_x86_64", "--platform=manylinux_2_27_x86_64", "--platform=manylinux2014_x86_64",
           "--platform=manylinux_2_17_x86_64")  # fmt: skip


@dataclass(frozen=True)
class Source:
    """A package that declares one release of HIP; `digest` is of the file that is downloaded, `beside` what it imports."""

    hip: str
    project: str
    version: str
    digest: str
    beside: tuple[Source, ...] = ()


SOURCES = (
    Source("7.1", "triton", "3.7.1", "6744957e9fd610a29680ec2346057d0c86948ed3812468670719f391e94b44a5"),
    Source("6.4", "hip-python", "6.4.4.555.40", "39f374c750b1da33a2a726006d15f171348f7c2fc4a722ce37f7ed5fbd493821"),
    Source("7.2", "hip-python", "7.2.2.562.43", "631890c8f3a67901a0d2d0856f74815085818625570e010d0c56ea2ab10b1236"),
    Source(
        "7.15", "rocm-bindings-hip", "10.0.0.0.1.2", "b288d26fac3ab77d2f25f4b832397abb1d01157871f23226f9dd389e92b22ee4",
        (Source("7.15", "rocm-bindings-core", "10.0.0.0.1.2",
                "943da68c125cbc7f9ecdc8106241881ae29b36fd6b20e62ac0a7bc2782a41041"),),
    ),
    Source("5.2", "libamdhip64-dev", "5.2.3-8", "1f87b72e5aa86025c6cb96312c75ee7f549c42475f4bc51049ab7b67cc4e762e"),
)  # fmt: skip


def main() -> int:
    """Compare, and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="where downloads are kept; made if it is not there"
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; compare with the committed result"
    )
    parser.add_argument(
        "--results", type=Path, default=measurement.RESULTS, help="where the result is"
    )
    options = parser.parse_args()
    if sys.version_info[:2] != (3, 11):
        parser.error("hip-python's wheels are taken for Python 3.11; run this with that")
    rows = [row for source in SOURCES for row in _rows(source, unpacked(source, options.folder))]
    wrong = [row for row in rows if row["ok"] is False]
    for row in wrong:
        print(
            f"differs: HIP {row['hip']}, {row['what']}: we have {row['ours']}, it has {row['theirs']}"
        )
    if options.check:
        committed = json.loads((options.results / f"{RESULT}.json").read_text())
        if committed["rows"] != rows:
            print(
                f"the rows are not those of {options.results / RESULT}.json; run this without --check"
            )
            return 1
    else:
        sources = [
            {"hip": one.hip, "package": f"{one.project} {one.version}", "sha256": one.digest}
            for one in SOURCES
        ]
        print(
            f"wrote {measurement.save(RESULT, {'sources': sources, 'rows': rows}, options.results)}"
        )
    silent = [row for row in rows if row["ok"] is None]
    print(
        f"{len(rows) - len(silent)} compared, {len(wrong)} differ; {len(silent)} are not declared, or cannot be asked for"
    )
    return 1 if wrong else 0


def unpacked(source: Source, folder: Path) -> Path:
    """Return the folder with a package's files, and with those of what it imports; fetched unless they are there."""
    into = folder / f"{source.project}-{source.version}"
    for one in (source, *source.beside):
        _unpack(one, folder, into)
    return into


def _unpack(source: Source, folder: Path, into: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    name = f"{source.project.replace('-', '_')}-{source.version}-*.whl"
    line = [
        sys.executable,
        "-m",
        "pip",
        "download",
        *_WHEELS,
        "--dest",
        ".",
        f"{source.project}=={source.version}",
    ]
    if source.project.startswith("lib"):
        name = f"{source.project}_{source.version}_*.deb"
        line = ["apt-get", "download", f"{source.project}={source.version}"]
    if not any(folder.glob(name)):
        subprocess.run(line, cwd=folder, check=True)
    (file,) = folder.glob(name)
    with file.open("rb") as stream:
        got = hashlib.file_digest(stream, "sha256").hexdigest()
    if got != source.digest:
        raise SystemExit(
            f"{file} has the digest {got}, and {source.digest} was expected; remove it, and run this again"
        )
    if file.suffix == ".deb":
        subprocess.run(["dpkg-deb", "-x", file, into], check=True)
    else:
        with zipfile.ZipFile(file) as archive:
            wanted = [
                each
                for each in archive.namelist()
                if each.startswith(("triton/backends/amd/", "hip/", "rocm/"))
            ]
            archive.extractall(into, wanted)


def _rows(source: Source, folder: Path) -> list[dict[str, Any]]:
    if source.project in {"hip-python", "rocm-bindings-hip"}:
        return compared(source.hip, of_hip_python(folder))
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
    lacking = missing_functions(folder / "usr" / "include")
    return [
        {"hip": source.hip, "kind": "refused", "what": "functions without which no library is opened", "ours": [],
         "theirs": lacking, "ok": bool(lacking)}
    ]  # fmt: skip


def compared(hip: str, found: Declared) -> list[dict[str, Any]]:
    """Return a row for each number, place and prototype.

    `theirs` is None for what the source does not declare; `ok` then is None where a library may lack it, or the source cannot tell.
    """
    own, rows = ours(), []
    for kind in ("numbers", "places", "arguments"):
        theirs = getattr(found, kind)
        for what, expected in getattr(own, kind).items():
            got = theirs.get(what)
            ok: bool | None = got == expected
            if got is None and _may_lack(what, theirs):
                ok = None
            elif got is not None and what in AT_MOST:
                ok = got <= expected
            rows.append(
                {"hip": hip, "kind": kind, "what": what, "ours": expected, "theirs": got, "ok": ok}
            )
    return rows


def _may_lack(what: str, places: dict[str, Any]) -> bool:
    """Whether a release may lack it, or hip-python, which tells the size of its structure, has no way to tell this."""
    unasked = {"hipPointerAttribute_t.devicePointer", "hipPointerAttribute_t.hostPointer", LENGTH}
    return (
        what == _CLUSTER
        or what.partition(".")[0] in OPTIONAL
        or (what in unasked and "hipDeviceProp_tR0600" in places)
    )
