# SPDX-License-Identifier: Apache-2.0
"""The members of a bundle: kernels, tuning files, helper libraries and opaque files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from bundler.errors import ConfigError, FormatError, NotFound
from bundler.format import names
from bundler.format.digest import digest_text, sha256
from bundler.format.keyparts import KeyParts
from bundler.format.launch_spec import LaunchFacts, LaunchSpec
from bundler.format.metadata import check_metadata_size
from bundler.format.sentinel import Span
from bundler.format.summary import Summarized, count, printable, short

_TARGET = re.compile(r"([a-z]{1,16}):([A-Za-z0-9_.+-]{1,32})")
_KEY_CHARACTERS = 12  # enough to recognise a kernel key
PACKED = "it came by pack, and a cache directory does not hold them"


@dataclass(frozen=True, order=True)
class Target:
    """What a device binary runs on; `arch` is text, `90` for sm_90 and `gfx942` for an AMD chip."""

    backend: str
    arch: str
    warp_size: int = field(default=32, compare=False)

    def __str__(self) -> str:
        return f"{self.backend}:{self.arch}"

    @staticmethod
    def parse(text: str) -> Target:
        """Read `cuda:90` or `hip:gfx942`; raises `ConfigError` for anything else."""
        match = _TARGET.fullmatch(text)
        if match is None:
            raise ConfigError(f"not a target: {text!r}; expected backend:arch, such as cuda:90 or hip:gfx942", got=text)
        # CDNA (gfx9) chips have wavefronts of 64 lanes; RDNA and NVIDIA have 32.
        return Target(match[1], match[2], 64 if match[2].startswith("gfx9") else 32)


@dataclass(frozen=True)
class Toolchain:
    """Who compiled: Triton's release, the sha256 of its binary (hex), and ptxas's version; None where unknown."""

    release: str | None = None
    binary: str | None = None
    ptxas: str | None = None


@dataclass(frozen=True)
class Artifact:
    """One file: its name, kind, the digest and size (bytes) of what is stored, and its path sentinels."""

    filename: str
    digest: str
    size: int
    spans: tuple[Span, ...] = ()

    def __repr__(self) -> str:
        spans = f", {count(len(self.spans), 'path placeholder')}" if self.spans else ""
        return f"<Artifact {short(self.filename)} {short(self.digest)} {count(self.size, 'byte')}{spans}>"

    @property
    def kind(self) -> str:
        """`cubin`, `hsaco`, `json`, `ttir`, `ttgir`, `llir`, `ptx`, `amdgcn`, `source`, `so` or `other`."""
        return names.artifact_kind(self.filename)


@dataclass(frozen=True)
class Kernel:
    """All artifacts of one kernel key, from one compile.

    Launch facts and key parts are kept encoded and decoded when asked for: a bundle of thousands opens fast.
    """

    key: str
    name: str
    target: Target
    artifacts: tuple[Artifact, ...]
    toolchain: Toolchain
    spec: LaunchSpec = field(repr=False)
    facts_bytes: bytes | None = field(default=None, repr=False)
    parts_bytes: bytes | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        files = f"{count(len(self.artifacts), 'file')}, {count(self.size, 'byte')}"
        return f"<Kernel {short(printable(self.name))} {self.target} {self.key[:_KEY_CHARACTERS]}… {files}>"

    @cached_property
    def launch(self) -> LaunchSpec:
        """What a static launch needs; its `facts` are None for a kernel that came by pack."""
        facts = None if self.facts_bytes is None else LaunchFacts.from_bytes(self.facts_bytes)
        return replace(self.spec, facts=facts)

    @cached_property
    def parts(self) -> KeyParts | None:
        """The named parts of the key; None for a kernel that came by pack."""
        return None if self.parts_bytes is None else KeyParts.from_bytes(self.parts_bytes)

    def require_parts(self) -> KeyParts:
        """Return the named parts of the key; raises `NotFound` with the reason when there are none."""
        if self.parts is None:
            raise NotFound(f"{self.name} ({self.key}) has no key parts: {PACKED}", key=self.key)
        return self.parts

    @cached_property
    def binary(self) -> Artifact:
        """The device binary."""
        return next(a for a in self.artifacts if a.kind in names.BINARY_KINDS)

    @cached_property
    def metadata(self) -> Artifact:
        """Triton's metadata JSON."""
        return next(a for a in self.artifacts if a.kind == "json")

    @cached_property
    def launch_set(self) -> tuple[Artifact, ...]:
        """The artifacts a hit needs: device binary and metadata."""
        return tuple(a for a in self.artifacts if a.kind in names.LAUNCH_KINDS)

    @property
    def size(self) -> int:
        """Bytes of all artifacts as stored."""
        return sum(artifact.size for artifact in self.artifacts)

    @property
    def files_digest(self) -> str:
        """Digest over names and digests of all artifacts: equal exactly when the files are equal."""
        lines = "".join(f"{a.filename}\0{a.digest}\0" for a in self.artifacts)
        return digest_text(sha256(lines.encode()))

    def artifact(self, filename: str) -> Artifact:
        """Return the artifact called `filename`; raises `NotFound`."""
        for artifact in self.artifacts:
            if artifact.filename == filename:
                return artifact
        raise NotFound(f"{self.name} ({self.key}) has no file {filename!r}", key=self.key, name=filename)


def check_kernel(kernel: Kernel) -> Kernel:
    """Return a kernel whose files are named as Triton names them, one binary and one metadata among them.

    Raises:
        UnsafeName: its key or a file name is not one that Triton makes.
        FormatError: a file occurs twice, or the binary or the metadata is missing, not unique, or no such file by its size.
    """
    names.check_kernel_key(kernel.key)
    seen: set[str] = set()
    for artifact in kernel.artifacts:
        names.check_file_name(artifact.filename)
        if artifact.filename in seen:
            raise FormatError(f"{kernel.key}: file {artifact.filename!r} occurs twice", key=kernel.key)
        if artifact.filename.startswith(names.GROUP_PREFIX):
            raise FormatError(f"{kernel.key}: a group file is generated at restore, never stored", key=kernel.key)
        seen.add(artifact.filename)
    kinds = [artifact.kind for artifact in kernel.artifacts]
    binaries = sum(kind in names.BINARY_KINDS for kind in kinds)
    if binaries != 1 or kinds.count("json") != 1:
        raise FormatError(
            f"{kernel.key}: expected one device binary and one metadata file, got {binaries} and {kinds.count('json')}",
            key=kernel.key,
        )
    check_metadata_size(kernel.metadata.size, kernel.key)
    if kernel.binary.size == 0:
        raise FormatError(f"{kernel.key}: the device binary is empty", key=kernel.key)
    return kernel


@dataclass(frozen=True, repr=False)
class TuningFile(Summarized):
    """A tuner's result file: Triton's `KEY/*.autotune.json`, or Inductor's `xx/*.best_config`."""

    path: str
    artifact: Artifact

    @property
    def in_triton_cache(self) -> bool:
        """Whether the path is relative to Triton's cache directory (else to Inductor's)."""
        return names.is_kernel_key(self.path.partition("/")[0])


@dataclass(frozen=True, repr=False)
class HelperLibrary(Summarized):
    """A shared library that Triton built with the C compiler: `KEY/cuda_utils….so`, launchers.  Executable code."""

    path: str
    artifact: Artifact
    machine: str


@dataclass(frozen=True, repr=False)
class Opaque(Summarized):
    """A file of Inductor's cache that torch executes or unpickles, by its path relative to that cache."""

    path: str
    artifact: Artifact


Entry = Kernel | TuningFile | HelperLibrary | Opaque


def entry_artifacts(entry: Entry) -> Iterator[Artifact]:
    """Yield the artifacts of any entry."""
    if isinstance(entry, Kernel):
        yield from entry.artifacts
    else:
        yield entry.artifact
