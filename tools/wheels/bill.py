# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.wheels bill WHEEL`: what a wheel consists of and what it asks for, as CycloneDX
1.6 in JSON.

`bill_of` makes it, for this program and for `release.py`: the wheel with its digest, each file in
it with its own, each requirement with the extra that brings it, and the version that
constraints.txt says was tested.  Two runs give equal bytes: time and serial number come from the
wheel.
"""

from __future__ import annotations

import base64
import email.parser
import hashlib
import json
import re
import sys
import uuid
import zipfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tools.shared import programs
from tools.shared.processes import ROOT

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_EXTRA = re.compile(r"""extra\s*==\s*["']([^"']+)["']""")


def bill_of(wheel: Path, tested: Mapping[str, str]) -> dict[str, Any]:
    """Return the bill of materials of a wheel.

    Args:
        wheel: the file.
        tested: version by normalized name of what the wheel was tested with.
    """
    data = wheel.read_bytes()
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        about = next(name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = email.parser.Parser().parsestr(archive.read(about).decode())
        record = archive.read(about.replace("METADATA", "RECORD")).decode()
        built = datetime(*max(info.date_time for info in archive.infolist()), tzinfo=UTC)
    name, version = metadata["Name"], metadata["Version"]
    itself = {
        "type": "library",
        "bom-ref": f"pkg:pypi/{name}@{version}",
        "name": name,
        "version": version,
        "purl": f"pkg:pypi/{name}@{version}",
        "description": metadata["Summary"],
        "licenses": [{"license": {"id": metadata["License-Expression"]}}],
        "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(data).hexdigest()}],
        "components": [_file(line) for line in record.splitlines() if ",sha256=" in line],
    }
    needed = _requirements(metadata.get_all("Requires-Dist") or [], name, tested)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "serialNumber": (
            f"urn:uuid:{uuid.UUID(bytes=hashlib.sha256(data).digest()[:16], version=4)}"
        ),
        "metadata": {"timestamp": built.isoformat().replace("+00:00", "Z"), "component": itself},
        "components": needed,
        "dependencies": [
            {"ref": itself["bom-ref"], "dependsOn": [one["bom-ref"] for one in needed]},
            *({"ref": one["bom-ref"]} for one in needed),
        ],
    }


def pinned_versions(constraints: Path = ROOT / "constraints.txt") -> dict[str, str]:
    """Return version by normalized name of what is pinned."""
    lines = [line.strip() for line in constraints.read_text(encoding="utf-8").splitlines()]
    pairs = [line.split("==") for line in lines if "==" in line and not line.startswith("#")]
    return {_normal(name): version for name, version in pairs}


def _file(line: str) -> dict[str, Any]:
    """Return a component of a line of RECORD: name, `sha256=` and unpadded base64, size."""
    name, digest, _ = line.rsplit(",", 2)
    raw = base64.urlsafe_b64decode(digest.removeprefix("sha256=") + "=")
    return {
        "type": "file",
        "bom-ref": f"file:{name}",
        "name": name,
        "hashes": [{"alg": "SHA-256", "content": raw.hex()}],
    }


def _requirements(lines: list[str], own: str, tested: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return a component for each distribution that is asked for, with or without an extra."""
    asked: dict[str, list[str]] = {}
    for line in lines:
        found = _NAME.match(line)
        if found is not None and _normal(found[0]) != _normal(own):
            asked.setdefault(_normal(found[0]), []).append(line)
    components = []
    for name, requirements in sorted(asked.items()):
        version = tested.get(name)
        purl = f"pkg:pypi/{name}" + (f"@{version}" if version else "")
        extras = [_EXTRA.search(line) for line in requirements]
        components.append(
            {
                "type": "library",
                "bom-ref": purl,
                "name": name,
                "purl": purl,
                **({"version": version} if version else {}),
                "scope": "required" if None in extras else "optional",
                "properties": [
                    {"name": "triton-bundler:requirement", "value": line}
                    for line in sorted(requirements)
                ],
            }
        )
    return components


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def text_of(bill: Mapping[str, Any]) -> str:
    """Return the bill as it is written."""
    return json.dumps(bill, indent=1, sort_keys=True) + "\n"


def main() -> int:
    """Print the bill of the wheel in the command line."""
    parser = programs.parser(__doc__)
    parser.add_argument("wheel", type=Path)
    sys.stdout.write(text_of(bill_of(parser.parse_args().wheel, pinned_versions())))
    return 0
