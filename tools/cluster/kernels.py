# SPDX-License-Identifier: Apache-2.0
"""Kernels for simulated ranks: real ones, and where that is not enough copies of them under more
keys.

A copy has the bytes of a real compile, but a hash of its own in the metadata, as its key says, and
a few bytes more at the end of every other file: no two kernels share a file that a store would keep
once.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec

MOST_COMPILED = 200


def real_kernels(folder: Path, count: int) -> Path:
    """Compile so many kernels for sm_90 with Triton, `MOST_COMPILED` at most; returns a bundle
    file.
    """
    import bundler
    from tools.shared import kernel_variants

    path = folder / "real.tbundle"
    with bundler.pack(kernel_variants.cache_of(min(count, MOST_COMPILED), folder)) as bundle:
        bundle.save(path)
    return path


def make_stand_ins(source: Path, count: int, path: Path) -> list[str]:
    """Write a bundle of `count` kernels made from the CUDA kernels of a bundle file; returns their
    keys in order.
    """
    import bundler
    from bundler.format.bundle import Bundle, MemoryBlobs
    from bundler.format.digest import digest_text, sha256
    from bundler.format.entries import Kernel
    from bundler.format.manifest import Content, Observed

    blobs: dict[bytes, bytes] = {}

    def copies(bundle: Bundle) -> Iterator[Kernel]:
        kernels = [kernel for kernel in bundle.kernels if kernel.target.backend == "cuda"]
        if not kernels:
            raise RuntimeError(f"{source} has no kernel for CUDA to make stand-ins from")
        for number in range(count):
            kernel = kernels[number % len(kernels)]
            old = json.loads(bundle.read(kernel.metadata))["hash"]
            new = hashlib.sha256(f"{old} {number}".encode()).hexdigest()
            artifacts = []
            for artifact in kernel.artifacts:
                data = bundle.read(artifact)
                # As long as before, so that places of paths in it stay right.
                data = (
                    data.replace(old.encode(), new.encode())
                    if artifact.kind == "json"
                    else data + f"//{number:6}\n".encode()
                )
                blobs[sha256(data)] = data
                artifacts.append(
                    msgspec.structs.replace(
                        artifact, digest=digest_text(sha256(data)), size=len(data)
                    )
                )
            key = base64.b32encode(bytes.fromhex(new)).decode().rstrip("=")
            yield replace(kernel, key=key, artifacts=tuple(artifacts))

    with bundler.Bundle.load(source) as bundle:
        made = list(copies(bundle))
    Bundle(Content.of(made), Observed({}), MemoryBlobs(blobs)).save(path)
    return [kernel.key for kernel in made]
