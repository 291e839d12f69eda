# SPDX-License-Identifier: Apache-2.0
"""What a launch needs to know about a kernel, and what a tuner found out about it.

`LaunchFacts` and `LaunchSpec`, with an `Argument` for each parameter, and `TuningRecord`.
`bundler/toolchain` makes them when a compile is recorded, the launcher and the build service read
them, our tuners write tuning records.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Annotated, Any

import msgspec

from bundler.errors import CannotLaunchStatically, FormatError
from bundler.format import wire
from bundler.format.constant_values import Value, encode, is_plain, value_of_pair
from bundler.format.digest import sha256
from bundler.format.limits import DEFAULT_LIMITS
from bundler.format.summary import Summarized, count, printable, short

Path = tuple[int, ...]
Named = tuple[tuple[str, Value], ...]
# Constants by the path of an argument, each as tag and payload of a value.
Tagged = tuple[tuple[Path, tuple[str, Any]], ...]


@dataclass(frozen=True)
class Argument:
    """One parameter of the kernel function, as its author wrote it."""

    name: str
    annotation: str
    default: Value | None
    constexpr: bool
    do_not_specialize: bool
    do_not_specialize_on_alignment: bool


@dataclass(frozen=True)
class LaunchFacts:
    """What Triton's metadata lacks, read off the compile itself.

    `signature` gives each argument's Triton type (a nested tuple of types for a tuple argument);
    `constants` and `attributes` are keyed by the path of an argument: its index, then indices into
    nested tuples.
    """

    source_kind: str  # "ast" for a JIT function, "ir" for a compile from an IR file
    arguments: tuple[Argument, ...]
    signature: Named
    constants: tuple[tuple[Path, Value], ...]
    attributes: tuple[tuple[Path, Value], ...]
    options: Named

    def __repr__(self) -> str:
        held = f"{count(len(self.signature), 'argument')}, {count(len(self.constants), 'constant')}"
        return f"<LaunchFacts {self.source_kind} {held}, {count(len(self.options), 'option')}>"

    @property
    def unportable(self) -> tuple[str, ...]:
        """Names of arguments whose constant has no encoding; empty when another process could
        compile from this.
        """
        names = [argument.name for argument in self.arguments]
        return tuple(
            names[path[0]] if path and path[0] < len(names) else str(path)
            for path, value in self.constants
            if not value.portable
        )

    def to_bytes(self) -> bytes:
        """Return the positional msgpack form."""
        return wire.pack(
            [
                self.source_kind,
                [
                    [
                        a.name,
                        a.annotation,
                        _optional(a.default),
                        a.constexpr,
                        a.do_not_specialize,
                        a.do_not_specialize_on_alignment,
                    ]
                    for a in self.arguments
                ],
                named_to_wire(self.signature),
                paths_to_wire(self.constants),
                paths_to_wire(self.attributes),
                named_to_wire(self.options),
            ]
        )

    @staticmethod
    def from_bytes(data: bytes) -> LaunchFacts:
        """Decode what `to_bytes` wrote; raises `FormatError` for anything else."""
        alike = _like_the_last(data)
        if alike is not None:
            return with_constants(*alike)
        sections = wire.split(data, len(_SECTIONS))
        if sections is None:
            # Not as we write it, or large: decoded whole, which says what is wrong when something
            # is.
            items = wire.fields(
                wire.unpack(data, "launch facts"),
                "launch facts",
                str,
                *[list] * (len(_SECTIONS) - 1),
            )
            return LaunchFacts(*[read(item) for read, item in zip(_SECTIONS, items, strict=True)])
        kind, arguments, signature, constants, attributes, options = sections
        # Constants differ from kernel to kernel; the rest is shared by many, and then decoded once.
        facts = LaunchFacts(
            _section(0, kind),
            _section(1, arguments),
            _section(2, signature),
            _constants(constants),
            _section(4, attributes),
            _section(5, options),
        )
        after = len(attributes) + len(options)
        _last_facts[:] = [
            (data[: len(data) - after - len(constants)], data[len(data) - after :], facts)
        ]
        return facts


@dataclass(frozen=True)
class LaunchSpec:
    """What a static launch needs.  Sizes are bytes a block (`shared_bytes`) or a program
    (scratch).
    """

    entry: str
    num_warps: int
    num_ctas: int
    warp_size: int
    shared_bytes: int
    tmem_columns: int | None
    global_scratch_bytes: int | None
    global_scratch_align: int | None
    profile_scratch_bytes: int | None
    profile_scratch_align: int | None
    cooperative: bool
    pdl: bool
    tensor_descriptors: Value
    facts: LaunchFacts | None = None

    def __repr__(self) -> str:
        blocks = f" x {self.num_ctas} blocks" if self.num_ctas != 1 else ""
        facts = "packed" if self.facts is None else count(len(self.facts.signature), "argument")
        return (
            f"<LaunchSpec {short(printable(self.entry))} {count(self.num_warps, 'warp')}{blocks}, "
            f"{count(self.shared_bytes, 'byte')} shared, {facts}>"
        )

    def with_facts(self, facts: LaunchFacts | None) -> LaunchSpec:
        """Return the same spec with these facts."""
        spec = object.__new__(LaunchSpec)
        # A frozen dataclass sets its fields one by one, and each kernel that is launched comes
        # here.
        spec.__dict__.update(self.__dict__, facts=facts)
        return spec

    @staticmethod
    def from_metadata(metadata: Mapping[str, Any]) -> LaunchSpec:
        """Read the launch part of Triton's metadata JSON; raises `FormatError` when a field is
        missing or odd.
        """
        values: dict[str, Any] = {}
        for name, key, default in _METADATA_FIELDS:
            if key in metadata:
                values[name] = metadata[key]
            elif default is _REQUIRED:
                raise FormatError(f"metadata has no field {key!r}", field=key)
            else:
                values[name] = default
        descriptors = encode(metadata.get("tensordesc_meta") or [])
        # As a reader will see it: what would not come back is refused here, where one kernel can be
        # left out.
        packed = wire.pack([*values.values(), descriptors.to_wire()])
        return LaunchSpec.from_wire(wire.unpack(packed, "metadata", _SPEC_LIMITS), None)

    def require_facts(self) -> LaunchFacts:
        """Return the launch facts.

        Raises:
            CannotLaunchStatically: the kernel came by `pack`; a cache directory does not hold them.
        """
        if self.facts is None:
            raise CannotLaunchStatically(
                f"{self.entry}: the argument types are not known, since this kernel came by pack"
                " and a cache directory does not hold them; record the compile instead"
                " (bundler.recording)",
                kernel=self.entry,
            )
        return self.facts

    def to_wire(self) -> list[Any]:
        """Return the positional form; the facts are a field of the kernel's own record."""
        *values, descriptors = _SPEC_VALUES(self)
        return [*values, descriptors.to_wire()]

    @staticmethod
    def from_wire(data: Any, facts: LaunchFacts | None, *, open_ended: bool = False) -> LaunchSpec:
        """Decode what `to_wire` wrote; raises `FormatError` for anything else."""
        *values, descriptors = wire.fields(data, "launch spec", *_SPEC_KINDS, open_ended=open_ended)
        return LaunchSpec(*values, Value.from_wire(descriptors), facts)  # type: ignore[call-arg, arg-type, unused-ignore]


_SPEC_VALUES = attrgetter(*[field.name for field in fields(LaunchSpec) if field.name != "facts"])
_REQUIRED = object()
_METADATA_FIELDS: tuple[tuple[str, str, Any], ...] = (
    ("entry", "name", _REQUIRED),
    ("num_warps", "num_warps", _REQUIRED),
    ("num_ctas", "num_ctas", 1),
    ("warp_size", "warp_size", 32),
    ("shared_bytes", "shared", _REQUIRED),
    ("tmem_columns", "tmem_size", None),
    ("global_scratch_bytes", "global_scratch_size", None),
    ("global_scratch_align", "global_scratch_align", None),
    ("profile_scratch_bytes", "profile_scratch_size", None),
    ("profile_scratch_align", "profile_scratch_align", None),
    ("cooperative", "launch_cooperative_grid", False),
    ("pdl", "launch_pdl", False),
)
# In a manifest a launch spec lies inside three arrays: content, kernels, kernel.
_SPEC_LIMITS = msgspec.structs.replace(DEFAULT_LIMITS, depth=DEFAULT_LIMITS.depth - 3)
_MAYBE = (int, type(None))
_SPEC_KINDS: tuple[Any, ...] = (str, *[int] * 4, *[_MAYBE] * 5, bool, bool, list)


def joint_source(sources: Iterable[tuple[str, str]]) -> str:
    """Return what names the sources of several kernels together, as (name, what names its source),
    for the record that says which of them runs.
    """
    return sha256(wire.pack([list(one) for one in sources])).hex()


@dataclass(frozen=True, repr=False)
class TuningRecord(Summarized):
    """The winning configuration of a tuned kernel; its timings are observations and live beside it.

    `parts` are the named parts of the tuning key (kernel source, configs, device properties,
    toolchain); `found_by` says how the winner was found, such as `autotune` or
    `coordinate_descent`.
    """

    kernel: str
    parts: tuple[tuple[str, str], ...]
    config: Named
    found_by: str

    def to_wire(self) -> list[Any]:
        """Return the positional form."""
        return [
            self.kernel,
            [list(part) for part in self.parts],
            named_to_wire(self.config),
            self.found_by,
        ]

    @staticmethod
    def from_wire(data: Any, *, open_ended: bool = False) -> TuningRecord:
        """Decode what `to_wire` wrote; raises `FormatError` for anything else."""
        kernel, parts, config, found_by = wire.fields(
            data, "tuning record", str, list, list, str, open_ended=open_ended
        )
        pairs = tuple(tuple(wire.fields(part, "key part", str, str)) for part in parts)
        return TuningRecord(kernel, pairs, named_from_wire(config), found_by)


def _optional(value: Value | None) -> list[Any] | None:
    return None if value is None else value.to_wire()


def _argument(data: Any) -> Argument:
    name, annotation, default, *flags = wire.fields(
        data, "argument", str, str, (list, type(None)), bool, bool, bool
    )
    return Argument(name, annotation, None if default is None else Value.from_wire(default), *flags)


def named_to_wire(named: Named) -> list[Any]:
    """Return the positional form of values by name."""
    return [[name, value.to_wire()] for name, value in named]


def named_from_wire(data: list[Any]) -> Named:
    """Decode what `named_to_wire` wrote; raises `FormatError` for anything else."""
    pairs = [wire.fields(item, "named value", str, object) for item in data]
    return tuple((name, Value.from_wire(value)) for name, value in pairs)


def paths_to_wire(by_path: tuple[tuple[Path, Value], ...]) -> list[Any]:
    """Return the positional form of values by the path of an argument."""
    return [[list(path), value.to_wire()] for path, value in by_path]


def paths_from_wire(data: list[Any]) -> tuple[tuple[Path, Value], ...]:
    """Decode what `paths_to_wire` wrote; raises `FormatError` for anything else."""
    result = []
    for item in data:
        path, value = wire.fields(item, "argument path", list, object)
        if min((wire.expect(index, int, "argument path") for index in path), default=0) < 0:
            raise FormatError(
                f"argument path: expected places of arguments, got {path}",
                what="argument path",
                got=path,
            )
        result.append((tuple(path), Value.from_wire(value)))
    return tuple(result)


_SECTIONS: tuple[Callable[[Any], Any], ...] = (
    lambda kind: wire.expect(kind, str, "launch facts"),
    lambda arguments: tuple(
        _argument(item) for item in wire.expect(arguments, list, "launch facts")
    ),
    lambda signature: named_from_wire(wire.expect(signature, list, "launch facts")),
    lambda constants: paths_from_wire(wire.expect(constants, list, "launch facts")),
    lambda attributes: paths_from_wire(wire.expect(attributes, list, "launch facts")),
    lambda options: named_from_wire(wire.expect(options, list, "launch facts")),
)


def _decode(number: int, packed: bytes) -> Any:
    # Packed alone it lies one array less deep than in the facts; wrapped, it is as deep and as
    # checked as there.
    return _SECTIONS[number](wire.unpack(b"\x91" + packed, "launch facts")[0])


# What nearly all constants are: numbers, texts and the like, none inside another.
_Place = Annotated[int, msgspec.Meta(ge=0)]
_PLAIN_CONSTANTS = msgspec.msgpack.Decoder(
    tuple[tuple[tuple[_Place, ...], tuple[str, bool | int | str | None]], ...]
)


def _constants(packed: bytes) -> tuple[tuple[Path, Value], ...]:
    """Return the constants in a section that `wire.split` found; they differ from kernel to kernel,
    so this is done for each.
    """
    # No text in it can be longer than it is.  It declares no more than there is, or it would not
    # have been split off.
    if len(packed) <= DEFAULT_LIMITS.string_bytes:
        try:
            found = _PLAIN_CONSTANTS.decode(packed)
        except (
            wire.MSGSPEC_ERRORS
        ):  # others, or no constants at all: `_decode` knows, and says what is wrong
            return _decode(3, packed)  # type: ignore[no-any-return]
        return _values_by_path(found)
    return _decode(3, packed)  # type: ignore[no-any-return]


# Of the facts that were decoded last: what stands before the constants, what stands behind them,
# and the facts.  Kernels of one function are decoded one after the other, and differ in their
# constants alone.
_last_facts: list[tuple[bytes, bytes, LaunchFacts]] = []


def _like_the_last(data: bytes) -> tuple[LaunchFacts, Tagged] | None:
    """Return the last facts and other constants, where that is what facts consist of, None for
    others.
    """
    for before, after, last in _last_facts[:1]:
        # Between whole members of an array of six lies exactly one when what is there decodes as
        # one.
        between = len(data) - len(before) - len(after)
        if not 0 < between <= DEFAULT_LIMITS.string_bytes or not (
            data.startswith(before) and data.endswith(after)
        ):
            return None
        try:
            return last, _PLAIN_CONSTANTS.decode(data[len(before) : len(data) - len(after)])
        except wire.MSGSPEC_ERRORS:
            return None
    return None


def read_alike(data: bytes) -> tuple[LaunchFacts, Tagged | None]:
    """Return launch facts as those of another kernel and constants of their own, for who reads the
    facts of many kernels.

    Returns:
        facts, and the constants to put in the place of theirs; None where the facts are those of
        the data already.

    Raises:
        FormatError: as `LaunchFacts.from_bytes`.
    """
    alike = _like_the_last(data)
    if alike is None:
        return LaunchFacts.from_bytes(data), None
    for _, (tag, payload) in alike[1]:
        if not is_plain(tag, payload):
            return LaunchFacts.from_bytes(data), None
    return alike


def with_constants(facts: LaunchFacts, constants: Tagged) -> LaunchFacts:
    """Return the facts of a kernel that differs from another in constants alone; raises
    `FormatError` for what is no constant.
    """
    made = object.__new__(LaunchFacts)
    # A frozen dataclass sets its fields one by one.
    vars(made).update(vars(facts), constants=_values_by_path(constants))
    return made


def _values_by_path(found: Tagged) -> tuple[tuple[Path, Value], ...]:
    return tuple([(path, value_of_pair(tag, payload)) for path, (tag, payload) in found])


# Bounded by `wire.MAX_SPLIT_BYTES` an entry.  What it returns is immutable, so that threads and
# kernels can share it.
_section = functools.lru_cache(maxsize=1024)(_decode)
