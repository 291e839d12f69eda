# SPDX-License-Identifier: Apache-2.0
"""`Builder`: turns files of a cache directory into entries of a bundle; `join` makes one bundle of
several builders.

Called by whatever makes bundles from directories: collecting, packing, and sessions that publish
what was compiled.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bundler.errors import BundlerError, FormatError, MergeConflict, UnsafeName
from bundler.format import names, sentinel
from bundler.format.bundle import Bundle, MemoryBlobs, with_parts
from bundler.format.bundle_union import merge
from bundler.format.digest import digest_text, sha256
from bundler.format.entries import (
    Artifact,
    Entry,
    HelperLibrary,
    Kernel,
    Opaque,
    Toolchain,
    TuningFile,
)
from bundler.format.launch_spec import LaunchSpec
from bundler.format.limits import DEFAULT_LIMITS
from bundler.format.manifest import Content, Observation, Observed
from bundler.format.metadata import MOVED_FROM
from bundler.lifecycle.kernel_directory import KernelFiles, Rejected, read_file, read_kernel
from bundler.package_loggers import logger
from bundler.toolchain import directories, identity

if TYPE_CHECKING:
    from bundler.toolchain.events import CompileEvent

_log = logger("bundler.lifecycle")

NOT_NEEDED = "not needed to launch (keep='launch')"
MOVED = (
    "it was placed for a function that only moved, and the kernel that it comes from has its"
    " own key"
)


@dataclass(frozen=True)
class KnownFacts:
    """What a recording knows about a kernel beyond its files."""

    toolchain: Toolchain
    launch: bytes | None = None
    parts: bytes | None = None


def known_facts(
    event: CompileEvent, problems: list[tuple[str, str]], *, lines: bool = True
) -> KnownFacts:
    """Return what a compile in this process tells about its kernel; what cannot be had goes to
    `problems`.

    Args:
        event: of the compile.
        problems: gets pairs of a key and what is missing.
        lines: have the key tell of the source's lines, which nobody asks for before a launch.
    """
    from bundler.toolchain import keytext  # who packs has seen no compile

    toolchain = keytext.toolchain_of(event.target.backend, event.target.arch)
    if event.options is None or event.env_vars is None:
        problems.append((event.key, "launch facts: the compile's options could not be seen"))
        return KnownFacts(toolchain)
    try:
        launch = keytext.launch_facts(event.src, event.options).to_bytes()
        parts = keytext.key_parts(
            event.src,
            event.backend,
            event.options,
            event.env_vars,
            event.hash,
            event.stages_key,
            lines=lines,
        ).to_bytes()
    except (AttributeError, KeyError, TypeError, ValueError, OSError, BundlerError) as error:
        # A source kind that a later Triton brings; the kernel itself is still good for a hit.
        _log.warning("no launch facts for %s (%s): %r", event.name, event.key, error)
        problems.append((event.key, f"launch facts: {type(error).__name__}: {error}"))
        return KnownFacts(toolchain)
    return KnownFacts(toolchain, launch, parts)


def observation_of(
    root: str, devices: Iterable[int], times_us: tuple[tuple[str, int], ...]
) -> Observation:
    """Return what goes into the observed part of a manifest for a kernel of a cache directory."""
    layout = directories.inductor_layout(root)
    return Observation(
        tuple(sorted(devices if layout is None else {layout[1]})),
        ("triton" if layout is None else "inductor",),
        times_us,
    )


@dataclass
class Builder:
    """Collects entries of one cache directory; several builders of one bundle are joined by `join`.

    Attributes:
        root: the cache directory.
        keep: `all`, or `launch` for device binary and metadata only.
        left_out: (name, reason) of what was seen and not taken.
        triton_dir: where Triton is installed here.
    """

    root: str
    keep: str = "all"
    left_out: list[tuple[str, str]] = field(default_factory=list)
    entries: dict[str, Entry] = field(default_factory=dict)
    observed: dict[str, Observation] = field(default_factory=dict)
    blobs: dict[bytes, bytes] = field(default_factory=dict)
    triton_dir: str | None = field(default_factory=identity.triton_dir)

    def __post_init__(self) -> None:
        self._roots = {self.root, os.path.abspath(self.root), os.path.realpath(self.root)}

    @property
    def kernels(self) -> list[Kernel]:
        """Kernels taken so far."""
        return [entry for entry in self.entries.values() if isinstance(entry, Kernel)]

    def add_directory(
        self, name: str, observation: Observation, facts: KnownFacts | None = None
    ) -> bool:
        """Take the kernel in `<root>/<name>`; True when it is in the bundle now, else `left_out`
        says why.
        """
        return self.add_found(name, read_kernel(os.path.join(self.root, name)), observation, facts)

    def add_found(
        self,
        name: str,
        found: KernelFiles | Rejected,
        observation: Observation,
        facts: KnownFacts | None = None,
    ) -> bool:
        """Take what was found in `<root>/<name>`, as `add_directory` does."""
        if isinstance(found, Rejected):
            self.left_out.append((name, found.reason))
            return False
        if MOVED_FROM in found.metadata:
            self.left_out.append((name, MOVED))
            return False
        try:
            self._add_kernel(found, observation, facts)
        except (FormatError, UnsafeName) as error:
            self.left_out.append((name, error.message))
            return False
        for other in found.others:
            self.add_single(name, other)
        return True

    def _add_kernel(
        self, found: KernelFiles, observation: Observation, facts: KnownFacts | None
    ) -> None:
        metadata = found.metadata
        release = metadata.get("triton_version")
        known = facts or KnownFacts(
            Toolchain(release=release if isinstance(release, str) else None)
        )
        roots = self._roots | found.written_roots
        wanted = names.LAUNCH_KINDS if self.keep == "launch" else None
        artifacts = tuple(
            self._store(name, data, roots, found.digests.get(name))
            for name, data in found.files.items()
            if wanted is None or names.artifact_kind(name) in wanted
        )
        self.entries[found.key] = Kernel(
            found.key,
            found.name,
            found.target,
            artifacts,
            known.toolchain,
            LaunchSpec.from_metadata(metadata),
            known.launch,
            known.parts,
        )
        self.observed[found.key] = observation

    def add_single(self, folder: str, name: str) -> bool:
        """Take a tuning file or helper library `<root>/<folder>/<name>`; anything else is
        reported.
        """
        path = f"{folder}/{name}"
        if name.endswith(names.AUTOTUNE_SUFFIX):
            return self.add_file(path, TuningFile)
        if name.endswith(".so") and self.keep == "all":
            return self.add_file(path, HelperLibrary)
        if name.endswith(".so"):
            self.left_out.append((path, NOT_NEEDED))
        elif name.startswith("tmp."):
            self.left_out.append((path, "a temporary file of a compile"))
        else:
            self.left_out.append((path, "not listed in the kernel's group file"))
        return False

    def add_file(self, path: str, kind: type[TuningFile | HelperLibrary | Opaque]) -> bool:
        """Take one file, by its path relative to the root; True when it is in the bundle now."""
        folder, _, name = path.rpartition("/")
        try:
            names.check_relative_path(path)
            data = read_file(os.path.join(self.root, folder), name, DEFAULT_LIMITS)
        except (UnsafeName, OSError) as error:
            self.left_out.append(
                (path, error.strerror or str(error) if isinstance(error, OSError) else str(error))
            )
            return False
        if isinstance(data, Rejected):
            self.left_out.append((path, data.reason))
            return False
        roots = self._roots if kind is TuningFile else set()
        artifact = self._store(name, data, roots)
        self.entries[path] = (
            HelperLibrary(path, artifact, identity.machine())
            if kind is HelperLibrary
            else kind(path, artifact)  # type: ignore[call-arg]
        )
        return True

    def _store(
        self, name: str, data: bytes, roots: Iterable[str], digest: bytes | None = None
    ) -> Artifact:
        spans: tuple[sentinel.Span, ...] = ()
        if name.endswith(".json"):
            data, spans = portable(data, roots, self.triton_dir)
        # What holds a path is stored as other bytes than were read.
        raw = sha256(data) if digest is None or spans else digest
        self.blobs[raw] = data
        return Artifact(name, digest_text(raw), len(data), spans)


def portable(
    data: bytes, roots: Iterable[str], triton_dir: str | None = None
) -> tuple[bytes, tuple[sentinel.Span, ...]]:
    """Put sentinels in place of cache directories and of Triton's install directory, wherever that
    was.

    Who does this for many files looks up where Triton is now, `triton_dir`, once.
    """
    prefixes = sentinel.triton_dirs(data)
    here = triton_dir or identity.triton_dir()
    if here is not None:
        prefixes.add(here)
    places = [(sentinel.CACHE_DIR, root) for root in roots] + [
        (sentinel.TRITON_DIR, prefix) for prefix in prefixes
    ]
    return sentinel.to_sentinels(data, places)


def join(
    builders: Iterable[Builder], environment: tuple[tuple[str, str], ...] | None = None
) -> Bundle:
    """Return one bundle of all builders.

    A kernel that several directories hold is kept once.  Where they hold different kernels under
    one key, which only a damaged cache does, the first directory's stays and the other is reported.
    """
    bundles: list[Bundle] = []
    left_out: list[tuple[str, str]] = []
    environments = () if environment is None else (environment,)
    for builder in builders:
        left_out += builder.left_out
        entries = dict(builder.entries)
        while entries or not bundles:
            bundle = Bundle(
                Content.of(entries.values()),
                Observed(builder.observed, environments),
                MemoryBlobs(builder.blobs, verified=True),
            )
            try:
                bundles = [merge([*bundles, bundle]) if bundles else bundle]
                break
            except MergeConflict as error:
                key = error.facts.get("key")
                left_out.append((key or builder.root, error.message))
                entries = {
                    name: entry for name, entry in entries.items() if key not in {None, name}
                }
    whole = (
        bundles[0] if bundles else Bundle(Content(), Observed({}, environments), MemoryBlobs({}))
    )
    told = tuple(sorted(set(left_out)))
    return with_parts(whole, whole.content, whole.observed, left_out=told)
