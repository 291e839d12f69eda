# SPDX-License-Identifier: Apache-2.0
"""`CompileEvent`: one kernel that was compiled or found, as the listener and the search of loaded
kernels report it.

Recordings and compile jobs turn it into data with `keytext.py`; `kernel_key` and `kernel_hash`
convert between the two forms of a key.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

from bundler.format.entries import Target


@dataclass(frozen=True, slots=True, eq=False)
class CompileEvent:
    """What was known at the moment of a compile; live objects of Triton, to be turned into data by
    `keytext`.

    Attributes:
        key: the directory name that Triton gives the kernel.
        hash: the same as hexadecimal text.
        directory: the kernel's directory as Triton spelled it.
        name: entry point in the device binary.
        target: what the binary runs on.
        src: Triton's source object.
        options: the backend's options before any pass changed them; None when the compile call
            could not be seen.
        backend: Triton's backend object; None as above.
        env_vars: environment that is part of the key; None as above.
        stages_key: what a user's stage inspection hook added to the key, empty without one; None as
            above.
        stage_times_us: duration in microseconds of each stage, in order; empty for a kernel found
            in memory.
        cache_hit: whether Triton found the kernel instead of compiling it; true for a kernel found
            in memory.
        device: index of the device it was compiled for; None when unknown.
        thread_id: the thread that compiled; 0 for a kernel found in memory.
    """

    key: str
    hash: str
    directory: str
    name: str
    target: Target
    src: Any
    options: Any | None = None
    backend: Any | None = None
    env_vars: dict[str, str] | None = None
    stages_key: str | None = None
    stage_times_us: tuple[tuple[str, int], ...] = ()
    cache_hit: bool = True
    device: int | None = None
    thread_id: int = 0


def kernel_key(kernel_hash: str) -> str:
    """Return the directory name for a kernel's hash (hex): base32 without padding.  Raises
    `ValueError` if it is not hex.
    """
    return base64.b32encode(bytes.fromhex(kernel_hash)).decode("ascii").rstrip("=")


def kernel_hash(key: str) -> str:
    """Return the hash (hex) of a directory name; the inverse of `kernel_key`.  Raises `ValueError`
    if it is not base32.
    """
    return base64.b32decode(key + "=" * (-len(key) % 8)).hex()


def target_of(triton_target: Any) -> Target:
    """Turn Triton's `GPUTarget` into ours."""
    return Target(str(triton_target.backend), str(triton_target.arch), int(triton_target.warp_size))
