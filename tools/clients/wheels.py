# SPDX-License-Identifier: Apache-2.0
"""`CLIENTS`, `unpacked`: the wheels whose kernels are compiled, at pinned versions, fetched from
the package index and unpacked.

::

    <folder>/wheels/NAME-VERSION-….whl      as the index has it
    <folder>/NAME-VERSION/                  its Python files; of native libraries nothing is taken

`check.py` and the test call `unpacked`; nothing else here needs a network.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tools.shared.wheel_files import fetched, unpack


@dataclass(frozen=True)
class Client:
    """A package with kernels.

    Attributes:
        project, version: as the package index names them.
        package: what is imported, and the folder in the wheel.
        needs: (project, version) of wheels without kernels that its modules import.
        hollow: whether its modules are loaded one by one, since importing the package wants a GPU
            and much more.
    """

    project: str
    version: str
    package: str
    needs: tuple[tuple[str, str], ...] = ()
    hollow: bool = False


CLIENTS = {
    "fla": Client("fla-core", "0.6.0", "fla", needs=(("einops", "0.8.2"),)),
    "liger": Client("liger-kernel", "0.8.5", "liger_kernel"),
    "conch": Client("conch-triton-kernels", "1.3", "conch"),
    "cce": Client("cut-cross-entropy", "25.1.1", "cut_cross_entropy"),
    "sglang": Client("sglang", "0.5.23", "sglang", needs=(("einops", "0.8.2"),), hollow=True),
    "vllm": Client("vllm", "0.33.0", "vllm", needs=(("einops", "0.8.2"),), hollow=True),
}


def unpacked(client: Client, folder: Path) -> list[Path]:
    """Return the folders that have to be on `sys.path` for a client, fetched where they are not
    there yet.

    Raises:
        NoIndex: the package index does not answer, or has no such wheel.
    """
    return [
        _unpacked(project, version, folder)
        for project, version in ((client.project, client.version), *client.needs)
    ]


def _unpacked(project: str, version: str, folder: Path) -> Path:
    place = folder / f"{project}-{version}"
    if not place.is_dir():
        wheel = fetched(project, version, folder / "wheels")
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            root = Path(temporary, "root")
            unpack(wheel, root, lambda name: name.endswith(".py"))
            os.rename(root, place)
    return place
