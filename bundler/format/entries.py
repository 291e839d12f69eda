# SPDX-License-Identifier: Apache-2.0
"""The members of a bundle: kernels, tuning files, helper libraries and opaque files.

`Kernel`, `TuningFile`, `HelperLibrary` and `Opaque`, with the `Target` and `Toolchain` of a kernel.
Writers of bundles make them, readers of bundles return them; every room uses them, and users get
them from `Bundle`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache, total_ordering
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar

from msgspec import Struct

from bundler.errors import ConfigError, FormatError, NotFound, UnsafeName
from bundler.format import names
from bundler.format.cached_properties import cached_property
from bundler.format.digest import digest_raw, digest_text, sha256
from bundler.format.limits import check_metadata_size
from bundler.format.sentinel import Span
from bundler.format.summary import Summarized, count, printable, short, shown_fields

if TYPE_CHECKING:
    from dataclasses import Field

    from bundler.format.keyparts import KeyParts
    from bundler.format.launch_spec import LaunchSpec


def set_fields(value: object, fields: dict[str, Any]) -> None:
    """Set the fields of a frozen value, given by name: the `locals()` of an `__init__` whose
    parameters they are.
    """
    del fields["self"]
    vars(value).update(fields)


class _DataclassFields:
    """`__dataclass_fields__`, made when somebody asks `dataclasses` for it: a new process would
    import that module, and what it needs, for a tenth of its first restore.
    """

    def __get__(self, _value: object, owner: type) -> Any:
        import dataclasses

        kind: Any = next(kind for kind in owner.__mro__ if "__init__" in vars(kind))
        unshown, types = kind._unshown, kind.__annotations__  # noqa: SLF001  # ours
        rows = [
            (name, types[name], dataclasses.field(repr=name not in unshown))
            for name in kind.__match_args__
        ]
        made: Any = dataclasses.make_dataclass(kind.__name__, rows)
        kind.__dataclass_fields__ = fields = made.__dataclass_fields__
        return fields


class FrozenValue:
    """A value whose fields are the parameters of its `__init__`, set once by `set_fields`; equal to
    one of its class whose fields are equal.  To `dataclasses` it is one of theirs.

    Args:
        unshown: fields that a repr leaves out.
    """

    __match_args__: ClassVar[tuple[str, ...]]
    _unshown: ClassVar[tuple[str, ...]] = ()
    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    else:
        __dataclass_fields__ = _DataclassFields()

    def __init_subclass__(cls, unshown: tuple[str, ...] = (), **more: Any) -> None:
        super().__init_subclass__(**more)
        if "__init__" in vars(cls):
            code = cls.__init__.__code__
            cls.__match_args__ = code.co_varnames[1 : code.co_argcount]  # type: ignore[misc]
            cls._unshown = unshown

    def __setattr__(self, name: str, value: object) -> None:
        from dataclasses import FrozenInstanceError

        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> None:
        from dataclasses import FrozenInstanceError

        raise FrozenInstanceError(f"cannot delete field {name!r}")

    def __repr__(self) -> str:
        shown = [f"{name}={getattr(self, name)!r}" for name in shown_fields(self)]
        return f"{type(self).__qualname__}({', '.join(shown)})"

    def __eq__(self, other: object) -> bool:
        if other.__class__ is not self.__class__:
            return NotImplemented
        return field_values(self) == field_values(other)

    def __hash__(self) -> int:
        return hash(field_values(self))

    def __replace__(self, **changes: Any) -> Self:
        return replace(self, **changes)


_Value = TypeVar("_Value", bound=FrozenValue)


def field_values(value: Any) -> tuple[Any, ...]:
    """Return the values of all fields of a frozen value."""
    return tuple([getattr(value, name) for name in value.__match_args__])


def replace(value: _Value, **changes: Any) -> _Value:
    """Return a copy with other fields, as `dataclasses.replace`."""
    return type(value)(
        **dict(zip(value.__match_args__, field_values(value), strict=True)) | changes
    )


Keep = Literal["all", "launch"]
#: A file as those want it who read thousands: name, raw digest, size in bytes, path sentinels.
StoredFile = tuple[str, bytes, int, tuple[Span, ...]]


_TARGET = r"([a-z]{1,16}):([A-Za-z0-9_.+-]{1,32})"
_KEY_CHARACTERS = 12  # enough to recognise a kernel key
# Every variant of a kernel has files of the same names.
_LAYOUTS_REMEMBERED = 4096
PACKED = "it came by pack, and a cache directory does not hold them"


@total_ordering
class Target(FrozenValue):
    """What a device binary runs on; `arch` is text, `90` for sm_90 and `gfx942` for an AMD chip."""

    backend: str
    arch: str
    warp_size: int

    def __init__(self, backend: str, arch: str, warp_size: int = 32) -> None:
        set_fields(self, locals())

    def __eq__(self, other: object) -> bool:
        return (
            self.backend == other.backend and self.arch == other.arch
            if type(other) is Target
            else NotImplemented
        )

    def __hash__(self) -> int:
        return hash((self.backend, self.arch))

    def __lt__(self, other: Target) -> bool:
        return (
            (self.backend, self.arch) < (other.backend, other.arch)
            if type(other) is Target
            else NotImplemented
        )

    def __str__(self) -> str:
        return f"{self.backend}:{self.arch}"

    @staticmethod
    def parse(text: str) -> Target:
        """Read `cuda:90` or `hip:gfx942`; raises `ConfigError` for anything else."""
        match = re.fullmatch(_TARGET, text)
        if match is None:
            raise ConfigError(
                f"not a target: {text!r}; expected backend:arch, such as cuda:90 or hip:gfx942",
                got=text,
            )
        # CDNA (gfx9) chips have wavefronts of 64 lanes; RDNA and NVIDIA have 32.
        return Target(match[1], match[2], 64 if match[2].startswith("gfx9") else 32)


class Toolchain(Struct, frozen=True, gc=False):
    """Who compiled: Triton's release, the sha256 of its binary (hex), and ptxas's version; None
    where unknown.
    """

    release: str | None = None
    binary: str | None = None
    ptxas: str | None = None


class Artifact(Struct, frozen=True, gc=False):
    """One file: its name, kind, the digest and size (bytes) of what is stored, and its path
    sentinels.
    """

    filename: str
    digest: str
    size: int
    spans: tuple[Span, ...] = ()

    def __repr__(self) -> str:
        spans = f", {count(len(self.spans), 'path placeholder')}" if self.spans else ""
        return (
            f"<Artifact {short(self.filename)} {short(self.digest)}"
            f" {count(self.size, 'byte')}{spans}>"
        )

    @property
    def kind(self) -> str:
        """`cubin`, `hsaco`, `json`, `ttir`, `ttgir`, `llir`, `ptx`, `amdgcn`, `source`, `so` or
        `other`.
        """
        return names.artifact_kind(self.filename)


class FileLayout(Struct, frozen=True, gc=False):
    """What the names of a kernel's files say about them; numbers are positions among these names.

    Attributes:
        order: all files in Triton's order, which is the canonical one.
        launch: device binary and metadata, in that order.
        binary, metadata: the one file of each kind.
        has_library: whether a shared library is among them.
    """

    order: tuple[int, ...]
    launch: tuple[int, ...]
    binary: int
    metadata: int
    has_library: bool

    @property
    def is_canonical(self) -> bool:
        """Whether the files are in the canonical order."""
        return all(position == place for place, position in enumerate(self.order))


class StoredFiles(Struct, frozen=True, gc=False):
    """Files of a kernel in Triton's order, by columns.

    Attributes:
        names: of each.
        digests: the raw digest of each.
        size_bytes: of all as stored.
        spans: path sentinels, four numbers each: the position of the file here, then offset, place
            and style.
        layout: what the names say about the files.
    """

    names: tuple[str, ...]
    digests: tuple[bytes, ...]
    size_bytes: int
    spans: tuple[int, ...]
    layout: FileLayout


class Kernel(FrozenValue, unshown=("spec", "facts_bytes", "parts_bytes")):
    """All artifacts of one kernel key, from one compile.

    Launch facts and key parts are kept encoded and decoded when asked for: a bundle of thousands
    opens fast.
    """

    key: str
    name: str
    target: Target
    artifacts: tuple[Artifact, ...]
    toolchain: Toolchain
    spec: LaunchSpec
    facts_bytes: bytes | None
    parts_bytes: bytes | None

    def __init__(
        self,
        key: str,
        name: str,
        target: Target,
        artifacts: tuple[Artifact, ...],
        toolchain: Toolchain,
        spec: LaunchSpec,
        facts_bytes: bytes | None = None,
        parts_bytes: bytes | None = None,
    ) -> None:
        set_fields(self, locals())

    def __repr__(self) -> str:
        files = f"{count(len(self.artifacts), 'file')}, {count(self.size, 'byte')}"
        return (
            f"<Kernel {short(printable(self.name))} {self.target} {self.key[:_KEY_CHARACTERS]}…"
            f" {files}>"
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Kernel):
            return NotImplemented
        # The kernels of a loaded bundle are of a class of their own; what costs most comes last.
        return all(getattr(self, name) == getattr(other, name) for name in _COMPARED)

    def __hash__(self) -> int:
        return hash(self.key)

    def files(self, keep: Keep = "all") -> Iterator[StoredFile]:
        """Yield name, raw digest, size and path sentinels of its files, in Triton's order.

        For who goes through the files of thousands of kernels: those of a loaded bundle make no
        `Artifact` for it.

        Args:
            keep: `launch` yields device binary and metadata alone.
        """
        artifacts = self.launch_set if keep == "launch" else self.artifacts
        for a in sorted(artifacts, key=lambda artifact: names.artifact_order(artifact.filename)):
            yield a.filename, digest_raw(a.digest), a.size, a.spans

    def stored_files(self, keep: Keep = "all") -> StoredFiles:
        """Return what `files` yields, by columns; for who restores thousands of kernels."""
        filenames, digests, sizes, spans = zip(*self.files(keep), strict=True)
        flat = [
            number
            for position, some in enumerate(spans)
            for span in some
            for number in (position, span.offset, span.place, span.style)
        ]
        return StoredFiles(filenames, digests, sum(sizes), tuple(flat), file_layout(filenames))

    def binary_file(self) -> tuple[str, bytes]:
        """Return name and raw digest of the device binary; for who launches thousands of
        kernels.
        """
        return self.binary.filename, digest_raw(self.binary.digest)

    @property
    def layout(self) -> FileLayout:
        """What the names of its files say about them; raises as `file_layout`."""
        return file_layout(tuple(artifact.filename for artifact in self.artifacts))

    def with_artifacts(self, artifacts: Iterable[Artifact]) -> Kernel:
        """Return the same kernel with other files; what is not decoded yet stays so."""
        return replace(self, artifacts=tuple(artifacts))

    @property
    def has_facts(self) -> bool:
        """Whether there are launch facts; false for a kernel that came by pack."""
        return self.facts_bytes is not None

    @cached_property
    def launch(self) -> LaunchSpec:
        """What a static launch needs; its `facts` are None for a kernel that came by pack."""
        from bundler.format.launch_spec import LaunchFacts  # a restore never looks at them

        packed = self.facts_bytes  # joined each time it is asked for
        return self.spec.with_facts(None if packed is None else LaunchFacts.from_bytes(packed))

    @cached_property
    def parts(self) -> KeyParts | None:
        """The named parts of the key; None for a kernel that came by pack."""
        from bundler.format.keyparts import KeyParts

        return None if self.parts_bytes is None else KeyParts.from_bytes(self.parts_bytes)

    def require_parts(self) -> KeyParts:
        """Return the named parts of the key; raises `NotFound` with the reason when there
        are none.
        """
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
        """Digest over names and digests of all artifacts: equal exactly when the files are
        equal.
        """
        lines = "".join(f"{a.filename}\0{a.digest}\0" for a in self.artifacts)
        return digest_text(sha256(lines.encode()))

    def artifact(self, filename: str) -> Artifact:
        """Return the artifact called `filename`; raises `NotFound`."""
        for artifact in self.artifacts:
            if artifact.filename == filename:
                return artifact
        raise NotFound(
            f"{self.name} ({self.key}) has no file {filename!r}", key=self.key, name=filename
        )


_COMPARED = (
    "key",
    "name",
    "target",
    "toolchain",
    "artifacts",
    "spec",
    "facts_bytes",
    "parts_bytes",
)


def check_kernel(kernel: Kernel) -> Kernel:
    """Return a kernel whose files are named as Triton names them, one binary and one metadata among
    them.

    Raises:
        UnsafeName: its key or a file name is not one that Triton makes.
        FormatError: a file occurs twice, or the binary or the metadata is missing, not unique, or
            no such file by its size.
    """
    key, artifacts = kernel.key, kernel.artifacts
    names.check_kernel_key(key)
    try:
        layout = file_layout(tuple(a.filename for a in artifacts))
    except UnsafeName:
        raise
    except FormatError as error:
        raise FormatError(f"{key}: {error.message}", key=key) from None
    check_sizes(key, layout, [a.size for a in artifacts])
    return kernel


def check_sizes(key: str, layout: FileLayout, sizes: Sequence[int]) -> None:
    """Raise `LimitExceeded`, `FormatError` when the metadata or the device binary of a kernel is no
    such file by its size.
    """
    check_metadata_size(sizes[layout.metadata], key)
    if sizes[layout.binary] == 0:
        raise FormatError(f"{key}: the device binary is empty", key=key)


@lru_cache(_LAYOUTS_REMEMBERED)
def file_layout(filenames: tuple[str, ...]) -> FileLayout:
    """Return what the names of a kernel's files say about them.

    Raises:
        UnsafeName: one is not a name that Triton makes.
        FormatError: one occurs twice, or the device binary or the metadata is missing or not
            unique.
    """
    for position, filename in enumerate(filenames):
        names.check_file_name(filename)
        if filename in filenames[:position]:
            raise FormatError(f"file {filename!r} occurs twice", name=filename)
        if filename.startswith(names.GROUP_PREFIX):
            raise FormatError("a group file is generated at restore, never stored", name=filename)
    kinds = [names.artifact_kind(filename) for filename in filenames]
    order = tuple(
        sorted(
            range(len(filenames)), key=lambda position: names.artifact_order(filenames[position])
        )
    )
    launch = tuple(position for position in order if kinds[position] in names.LAUNCH_KINDS)
    binaries = [position for position in launch if kinds[position] != "json"]
    metadata = [position for position in launch if kinds[position] == "json"]
    if len(binaries) != 1 or len(metadata) != 1:
        raise FormatError(
            f"expected one device binary and one metadata file, got {len(binaries)} and"
            f" {len(metadata)}"
        )
    return FileLayout(order, launch, binaries[0], metadata[0], "so" in kinds)


class TuningFile(Summarized, Struct, frozen=True, gc=False):
    """A tuner's result file: Triton's `KEY/*.autotune.json`, or Inductor's `xx/*.best_config`."""

    path: str
    artifact: Artifact

    @property
    def in_triton_cache(self) -> bool:
        """Whether the path is relative to Triton's cache directory (else to Inductor's)."""
        return names.is_kernel_key(self.path.partition("/")[0])


class HelperLibrary(Summarized, Struct, frozen=True, gc=False):
    """A shared library that Triton built with the C compiler: `KEY/cuda_utils….so`, launchers.
    Executable code.
    """

    path: str
    artifact: Artifact
    machine: str


class Opaque(Summarized, Struct, frozen=True, gc=False):
    """A file of Inductor's cache that torch executes or unpickles, by its path relative to that
    cache; or, by its path, of a tree or a program.
    """

    path: str
    artifact: Artifact


Entry = Kernel | TuningFile | HelperLibrary | Opaque
_KINDS = {
    Kernel: "kernel",
    TuningFile: "tuning file",
    HelperLibrary: "helper library",
    Opaque: "opaque file",
}


def entry_kind(entry: Entry) -> str:
    """Return what an entry is, in words."""
    return next(words for kind, words in _KINDS.items() if isinstance(entry, kind))


def entry_artifacts(entry: Entry) -> Iterator[Artifact]:
    """Yield the artifacts of any entry."""
    if isinstance(entry, Kernel):
        yield from entry.artifacts
    else:
        yield entry.artifact


def entry_files(entry: Entry) -> Iterator[StoredFile]:
    """Yield the files of any entry, as `Kernel.files` does."""
    if isinstance(entry, Kernel):
        yield from entry.files()
    else:
        artifact = entry.artifact
        yield artifact.filename, digest_raw(artifact.digest), artifact.size, artifact.spans
