# SPDX-License-Identifier: Apache-2.0
"""What a session sends: kernels and files that Triton made, and turns that are over.

`MadeKernel`, `MadeFile` and `Over` are the jobs of the lookup engine's publisher; the engine makes them, and calls `bundle_of` to send
kernels and `file_known_by` to name files.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from bundler.format.bundle import Bundle, Keep
    from bundler.format.manifest import Observation
    from bundler.lifecycle.bundle_builder import Builder
    from bundler.lifecycle.compiled_once import Turn
    from bundler.toolchain.spool_records import SpooledEvent


class MadeKernel(NamedTuple):
    """A kernel that was compiled, and the turn that others may wait for."""

    event: SpooledEvent
    turn: Turn | None


class MadeFile(NamedTuple):
    """A tuning file or helper library that was made: what it is known by in the store, its name and its bytes."""

    known_by: str
    filename: str
    data: bytes


class Over(NamedTuple):
    """A turn that ended without a kernel."""

    turn: Turn


Job = MadeKernel | MadeFile | Over


def file_known_by(key: str, filename: str, origin: str | None) -> str:
    """Return what a single file is known by in a store.

    A helper library by what it is built of, since its key differs between machines and releases; anything else by its place.
    """
    return f"file {key}/{filename}" if origin is None else f"library {origin}/{filename}"


def bundle_of(kernels: Sequence[MadeKernel], keep: Keep) -> Bundle:
    """Return the compiled kernels as a bundle; `left_out` says which could not be read, and why."""
    # A process that only finds kernels imports none of this.
    from bundler.lifecycle.bundle_builder import Builder, KnownFacts, join
    from bundler.toolchain import identity

    builders: dict[str, Builder] = {}
    for made in kernels:
        event = made.event
        root = os.path.dirname(os.path.abspath(event.directory))
        builder = builders.setdefault(root, Builder(root, keep))
        facts = KnownFacts(event.toolchain, event.facts_bytes, event.parts_bytes)
        builder.add_directory(event.key, _observation(event), facts)
    return join(builders.values(), identity.environment())


def _observation(event: SpooledEvent) -> Observation:
    from bundler.lifecycle.recorded_kernels import Sighting

    devices = set() if event.device is None else {event.device}
    return Sighting(event.directory, "", devices, times_us=event.stage_times_us).observation
