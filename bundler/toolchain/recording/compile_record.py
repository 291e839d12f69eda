# SPDX-License-Identifier: Apache-2.0
"""`kernel_record`: everything known of a kernel while Triton compiles or finds it, as data.

`CacheCall.record` asks for it, for a session's tag and for the spool of a recording.
"""

from __future__ import annotations

import os

from bundler.format.entries import Toolchain
from bundler.toolchain.events import kernel_hash, target_of
from bundler.toolchain.keys.capture import key_parts, launch_facts, toolchain_of
from bundler.toolchain.recording import compile_frames
from bundler.toolchain.recording.spool_records import SpooledEvent
from bundler.toolchain.targets import current_device


def kernel_record(
    key: str, filename: str, place: str, spent_us: int, *, cache_hit: bool
) -> SpooledEvent:
    """Return what is known of a kernel, for a cache manager that Triton's `compile` calls at this
    moment.

    Args:
        key: the kernel's key.
        filename: name of its metadata file.
        place: the kernel's directory.
        spent_us: microseconds since the compile began; counts for a compile only.
        cache_hit: whether it was found.
    """
    times = () if cache_hit else (("compile", spent_us),)
    frame = compile_frames.find_compile()
    name = filename.removesuffix(".json")
    if frame is None:
        return SpooledEvent(
            key,
            kernel_hash(key),
            place,
            name,
            None,
            current_device(),
            times,
            cache_hit,
            None,
            None,
            Toolchain(),
            os.getpid(),
        )
    target = target_of(frame.backend.target)
    device = frame.device if frame.device is not None else current_device()
    parts = key_parts(
        frame.src, frame.backend, frame.options, frame.env_vars, frame.hash, frame.stages_key
    )
    return SpooledEvent(
        key=key,
        hash=frame.hash,
        directory=place,
        name=(frame.metadata or {}).get("name", name),
        target=target,
        device=device,
        stage_times_us=times,
        cache_hit=cache_hit,
        facts_bytes=launch_facts(frame.src, frame.options).to_bytes(),
        parts_bytes=parts.to_bytes(),
        toolchain=toolchain_of(target.backend, target.arch),
        pid=os.getpid(),
    )
