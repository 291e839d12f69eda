# SPDX-License-Identifier: Apache-2.0
"""Copies of kernels under further keys, where more are needed than anybody wants to compile.

A copy has the bytes of a real compile, but a hash of its own in the metadata, as its key says, and
a few bytes more at the end of every other file: no two kernels share a file that a store would keep
once.
"""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from bundler import Bundle
    from bundler.format.entries import Kernel


def copy_of(bundle: Bundle, kernel: Kernel, number: int, blobs: dict[bytes, bytes]) -> Kernel:
    """Return a copy of a kernel, and put its files into `blobs`."""
    from bundler.format.digest import digest_text, sha256

    old = json.loads(bundle.read(kernel.metadata))["hash"]
    new = hashlib.sha256(f"{old} {number}".encode()).hexdigest()
    artifacts = []
    for artifact in kernel.artifacts:
        data = bundle.read(artifact)
        # As long as before, so that places of paths in it stay right.
        is_json, comment = artifact.kind == "json", f"//{number:6}\n".encode()
        data = data.replace(old.encode(), new.encode()) if is_json else data + comment
        blobs[sha256(data)] = data
        named = {"digest": digest_text(sha256(data)), "size": len(data)}
        artifacts.append(msgspec.structs.replace(artifact, **named))
    key = base64.b32encode(bytes.fromhex(new)).decode().rstrip("=")
    return replace(kernel, key=key, artifacts=tuple(artifacts))


def save(kernels: Iterable[Kernel], blobs: dict[bytes, bytes], file: str | Path) -> None:
    """Save a bundle of kernels and their files."""
    from bundler.format.bundle import Bundle, MemoryBlobs
    from bundler.format.manifest import Content, Observed

    Bundle(Content.of(list(kernels)), Observed(), MemoryBlobs(blobs)).save(file)
