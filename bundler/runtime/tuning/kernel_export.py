# SPDX-License-Identifier: Apache-2.0
"""`export_kernel`: a tuned kernel as files for programs in other languages: the device binary, and how to launch it as JSON.

`AutotunedKernel.export` calls it.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bundler.format.bundle import Bundle
from bundler.format.bundle_file import os_errors, replace_content
from bundler.format.entries import Kernel
from bundler.runtime.configs import Config
from bundler.runtime.launch.plan_builder import build_plan


@dataclass(frozen=True)
class Exported:
    """The files of one exported kernel."""

    binary: Path
    parameters: Path


def export_kernel(
    kernel: Kernel, image: bytes, bundle: Bundle, config: Config, directory: str | os.PathLike[str]
) -> Exported:
    """Write a kernel's binary and launch parameters.

    Files are `<kernel>-<digest>.cubin` (or `.hsaco`) and the same with `.json`: entry, target, threads and cluster of a block, shared
    memory, scratch, config, and for each parameter its kind, offset and size in bytes in the parameter buffer.

    Args:
        kernel: the kernel.
        image: its binary, verified.
        bundle: where it is from.
        config: what it was compiled from.
        directory: made when it is not there.

    Raises:
        CannotLaunchStatically: something that a launch needs is not known.
        AccessDenied, StoreFull, NotFound: the files cannot be written.
    """
    plan = build_plan(kernel, image)
    name = f"{kernel.name}-{kernel.binary.digest.partition(':')[2][:16]}"
    folder = Path(directory)
    with os_errors(os.fspath(folder), "write"):
        folder.mkdir(parents=True, exist_ok=True)
    binary, parameters = folder / f"{name}.{kernel.binary.kind}", folder / f"{name}.json"
    facts: dict[str, Any] = {
        "kernel": kernel.name, "entry": plan.entry, "key": kernel.key, "target": str(kernel.target),
        "binary": binary.name, "digest": kernel.binary.digest, "bundle": bundle.digest,
        "config": config.to_dict(), "block_threads": plan.block_threads, "cluster": plan.cluster,
        "shared_bytes": plan.shared_bytes, "cooperative": plan.cooperative, "pdl": plan.pdl,
        "global_scratch_bytes": plan.global_scratch_bytes, "profile_scratch_bytes": plan.profile_scratch_bytes,
        "buffer_bytes": plan.buffer_bytes,
        "parameters": [{"name": p.name, "kind": p.kind, "offset": p.offset, "size": p.size} for p in plan.parameters],
    }  # fmt: skip
    for path, data in ((binary, image), (parameters, json.dumps(facts, indent=1, default=str).encode())):
        replace_content(path, data)
    return Exported(binary, parameters)
