# SPDX-License-Identifier: Apache-2.0
"""`figures_of`: what the report says of one kernel, as the page's JSON has it.

`report_page.py` calls it for each kernel, in the order in which the texts are packed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bundler.cli import wording
from bundler.cli.bundles.specializations import specialization_of
from bundler.cli.report.text_archive import TextArchive
from bundler.errors import BundlerError
from bundler.format.bundle import Bundle
from bundler.format.entries import Kernel
from bundler.lifecycle.binary_resources import read_resources
from bundler.runtime.tuning.occupancy import block_occupancy

# In the order of the compile.  `python` is the file of the function, where it was given.
TEXT_KINDS = ("python", "source", "ttir", "ttgir", "llir", "ptx", "amdgcn")
_LOCATION = re.compile(rb'loc\("([^"\n]+\.py)":(\d+)')
_MOST_SOURCE_BYTES = 4_000_000


class SourceFolder:
    """Python files in which kernels may be defined, found by name; nothing outside of the folder is
    read.

    Args:
        folder: the folder; links that lead out of it are not followed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self._known: dict[tuple[str, str], str | None] = {}

    def text_of(self, path: str, function: str) -> str | None:
        """Return the text of the file of this base name that defines the function, None where there
        is none.
        """
        wanted = path.replace("\\", "/").rpartition("/")[2], function
        if wanted not in self._known:
            self._known[wanted] = self._search(*wanted)
        return self._known[wanted]

    def _search(self, name: str, function: str) -> str | None:
        defined = re.compile(rf"^\s*def {re.escape(function)}\b", re.MULTILINE)
        for path in sorted(self._folder.rglob("*.py")):
            inside = path.name == name and path.resolve().is_relative_to(self._folder)
            if inside and path.is_file() and path.stat().st_size <= _MOST_SOURCE_BYTES:
                text = path.read_text(encoding="utf-8", errors="replace")
                if defined.search(text):
                    return text
        return None


def figures_of(
    bundle: Bundle,
    kernel: Kernel,
    archive: TextArchive | None,
    sources: SourceFolder | None,
    hits_of: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Gather what is known of a kernel; what of it is damaged is said as its `problem`, not raised.

    Args:
        bundle, kernel: whose figures.
        archive: gets its texts; None leaves them out. `texts` says where in it each begins, and how
            many runs it has.
        sources: where the files of Python are looked for.
        hits_of: how often each kernel was found, by key; None where nobody tells.
    """
    known, error = specialization_of(bundle, kernel)
    problem = error.message if error is not None else None
    resources, occupancy = None, None
    try:
        resources = read_resources(bundle.read(kernel.binary), kernel.spec.entry)
        occupancy = block_occupancy(
            kernel.target,
            kernel.spec.num_warps,
            resources.allocated_registers or resources.registers,
            resources.shared_bytes,
            kernel.spec.shared_bytes,
        )
    except BundlerError as unreadable:
        problem = unreadable.message
    seen = bundle.observed.kernels.get(kernel.key)
    stages_us = dict(seen.times_us) if seen is not None else {}
    return {
        **wording.kernel_facts(kernel),
        "warps": kernel.spec.num_warps,
        "blocks_of_cluster": kernel.spec.num_ctas,
        "stages": known.stages,
        # What it was compiled for; None where nobody recorded it.
        "constants": _json_safe(known.constants),
        "signature": _json_safe(known.signature),
        "options": _json_safe(known.options),
        "registers": getattr(resources, "registers", None),
        "spills": getattr(resources, "spilled_registers", None),
        "stack_bytes": getattr(resources, "stack_bytes", None),
        "static_shared_bytes": getattr(resources, "shared_bytes", None),
        "dynamic_shared_bytes": kernel.spec.shared_bytes,
        # Warps that its target's multiprocessor holds, 0 to 1 of the most, and what keeps it from
        # more.
        "occupancy": occupancy.share if occupancy is not None else None,
        "occupancy_limit": occupancy.limit if occupancy is not None else None,
        "binary_bytes": kernel.binary.size,
        # Empty when only hits were seen.
        "stages_us": stages_us,
        "compile_us": sum(stages_us.values()) if stages_us else None,
        "devices": seen.devices if seen is not None else (),
        "hits": hits_of.get(kernel.key, 0) if hits_of is not None else None,
        "files": [(artifact.kind, artifact.size) for artifact in kernel.artifacts],
        "texts": {} if archive is None else _texts_of(bundle, kernel, archive, sources),
        "problem": problem,
    }


def _texts_of(
    bundle: Bundle, kernel: Kernel, archive: TextArchive, sources: SourceFolder | None
) -> dict[str, tuple[int, int]]:
    texts: dict[str, tuple[int, int]] = {}
    path = ""
    for artifact in kernel.artifacts:
        if artifact.kind not in TEXT_KINDS:
            continue
        try:
            data = bytes(bundle.read(artifact))
        except BundlerError:  # verify tells; the page says that the kernel has no such text
            continue
        texts[artifact.kind] = archive.add(data.decode("utf-8", "backslashreplace"))
        if not path and (found := _LOCATION.search(data)) is not None:
            path = found[1].decode("utf-8", "replace")
    text = sources.text_of(path, kernel.name) if sources is not None and path else None
    if text is not None:
        texts["python"] = archive.add(text)
    return texts


def _json_safe(values: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return values that any JSON decoder takes; bytes and the like become text."""
    found: Mapping[str, Any] | None = json.loads(json.dumps(values, default=str))
    return found
