# SPDX-License-Identifier: Apache-2.0
"""`Job`: one kernel to compile, as plain data for a worker; `Compiled`: its result.

Build plans, tuners and programs make jobs for the service; a worker, or the service itself without
workers, calls `perform`.  `source_job` makes a job of a kernel in a module's text.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec

from bundler.compile import module_import
from bundler.compile.source_modules import source_module
from bundler.compile.worker_messages import failure, resolve
from bundler.errors import BundlerError, CompileFailed, ConfigError, FormatError
from bundler.format import wire
from bundler.format.bundle import Bundle
from bundler.format.cached_properties import cached_property
from bundler.format.constant_values import Value
from bundler.format.digest import digest_text, sha256
from bundler.format.entries import Target, Toolchain
from bundler.format.launch_spec import (
    LaunchFacts,
    Named,
    Path,
    named_from_wire,
    named_to_wire,
    paths_from_wire,
    paths_to_wire,
)
from bundler.format.manifest import Observation
from bundler.lifecycle.bundle_builder import Builder, KnownFacts, join, known_facts
from bundler.toolchain import compile_call, identity, jit_specialization
from bundler.toolchain.encoding import encode_value
from bundler.toolchain.events import CompileEvent

SourceKind = Literal["module", "text", "ir"]
_KINDS = ("module", "text", "ir")
_NEEDED = frozenset({"signature", "target"})
_KNOWN = _NEEDED | {"constants", "attributes", "options", "function"}
_ALIGNED = "tt.divisibility"
_MICROSECOND = 1e-6


@dataclass(frozen=True)
class SourceRef:
    """Where a kernel's source is.

    Attributes:
        kind: `module`: a Python file, which compiling imports, so the maker of the job must trust
            it; `text`: the text of a Python module, which becomes a content-addressed file; `ir`:
            Triton's IR, which is never executed.
        function: qualified name of the JIT function in its module; for IR the name of the kernel.
        module: the name that the file is imported by, dotted inside a package; of a `text` the
            importer, `module:function`, which gets text and path and returns what has the function;
            empty for `source_module`.
        path: the file of a `module`; of a `text` what tracebacks, and kernels of a Triton that
            keeps paths, call it.
        root: the directory that must be on `sys.path` for it.
        data: the text of a `text` or `ir` source.
    """

    kind: SourceKind
    function: str
    module: str = ""
    path: str = ""
    root: str = ""
    data: bytes = b""

    def to_wire(self) -> list[Any]:
        """Return the positional form."""
        return [self.kind, self.function, self.module, self.path, self.root, self.data]

    @staticmethod
    def from_wire(data: Any) -> SourceRef:
        """Decode what `to_wire` wrote; raises `FormatError` for anything else."""
        kind, *rest = wire.fields(data, "source", str, str, str, str, str, bytes)
        if kind not in _KINDS:
            raise FormatError(f"source: unknown kind {kind!r}", got=kind)
        return SourceRef(kind, *rest)


@dataclass(frozen=True)
class Job:
    """One kernel to compile for one target.

    Signature, constants, attributes and options are those that Triton's own JIT hands to its
    compiler for one call (`toolchain/jit_specialization.py` asks it); all are data, and none is
    executed.

    Attributes:
        name: the kernel's name, for people.
        source: where its source is.
        signature: argument name -> Triton type.
        constants, attributes: path of an argument -> value.
        options: every option of the target's backend.
        target: what to compile for.
        key: the kernel key that the JIT will ask for, where that is known; a compile that gives
            another one fails.
        helpers_first: the functions that the kernel calls were hashed before it; matters on Triton
            3.6 and 3.7 only.
        facts: launch facts of the compile that the IR came from (`ir` only).
    """

    name: str
    source: SourceRef
    signature: Named
    constants: tuple[tuple[Path, Value], ...]
    attributes: tuple[tuple[Path, Value], ...]
    options: Named
    target: Target
    key: str = ""
    helpers_first: bool | None = None
    facts: bytes | None = None

    def to_bytes(self) -> bytes:
        """Return the positional msgpack form."""
        return wire.pack(
            [
                self.name,
                self.source.to_wire(),
                named_to_wire(self.signature),
                paths_to_wire(self.constants),
                paths_to_wire(self.attributes),
                named_to_wire(self.options),
                [self.target.backend, self.target.arch, self.target.warp_size],
                self.key,
                self.helpers_first,
                self.facts,
            ]
        )

    @staticmethod
    def from_bytes(data: bytes) -> Job:
        """Decode what `to_bytes` wrote; raises `FormatError` for anything else."""
        kinds = (str, *[list] * 6, str, (bool, type(None)), (bytes, type(None)))
        name, source, signature, constants, attributes, options, target, key, first, facts = (
            wire.fields(wire.unpack(data, "job"), "job", *kinds)
        )
        return Job(
            name,
            SourceRef.from_wire(source),
            named_from_wire(signature),
            paths_from_wire(constants),
            paths_from_wire(attributes),
            named_from_wire(options),
            Target(*wire.fields(target, "job's target", str, str, int)),
            key,
            first,
            facts,
        )

    @cached_property
    def digest(self) -> str:
        """`sha256:<hex>` over everything above: equal jobs have equal digests."""
        return digest_text(sha256(self.to_bytes()))


@dataclass(frozen=True)
class Compiled:
    """The result of a job.

    Attributes:
        key: the kernel's key.
        directory: its directory, complete.
        seconds: wall time of the job, imports included.
        stages: (stage, seconds) of the compile; empty for a hit.
        hit: whether the kernel was there already.
        toolchain: who compiled it.
        facts, parts: launch facts and named key parts, encoded; None where they cannot be had.
    """

    key: str
    directory: str
    seconds: float
    stages: tuple[tuple[str, float], ...]
    hit: bool
    toolchain: Toolchain = field(default_factory=Toolchain)
    facts: bytes | None = None
    parts: bytes | None = None

    def to_bytes(self) -> bytes:
        """Return the msgpack form."""
        return wire.pack(self)

    @staticmethod
    def from_bytes(data: bytes) -> Compiled:
        """Decode what `to_bytes` wrote; raises `FormatError` for anything else."""
        return wire.decode(data, _RESULTS, "result")

    def add_to(self, builder: Builder) -> str | None:
        """Add the kernel to a bundle under construction; returns why it is left out, None when it
        is in.
        """
        times = tuple((stage, round(seconds / _MICROSECOND)) for stage, seconds in self.stages)
        known = KnownFacts(self.toolchain, self.facts, self.parts)
        if builder.add_directory(self.key, Observation(layouts=("triton",), times_us=times), known):
            return None
        return dict(builder.left_out)[self.key]


_RESULTS = msgspec.msgpack.Decoder(Compiled)


def source_job(name: str, text: Any, meta: Any) -> Job:
    """Return the job of compiling one kernel of a module's text.

    Args:
        name: the kernel's, and of its function unless `meta` names another.
        text: a Python module.
        meta: see `CompileService.source`.

    Raises:
        ConfigError: something is missing, unknown or of the wrong type; or a value cannot be sent
            to a worker.
    """
    if not isinstance(meta, Mapping) or not _NEEDED <= meta.keys() <= _KNOWN:
        given = sorted(meta) if isinstance(meta, Mapping) else repr(meta)[:80]
        raise ConfigError(
            f"{name}: meta has {given}; expected {', '.join(sorted(_NEEDED))}, and perhaps "
            f"{', '.join(sorted(_KNOWN - _NEEDED))}",
            name=name,
        )
    parts = {
        part: meta.get(part) or {} for part in ("signature", "constants", "attributes", "options")
    }
    odd = [part for part, value in parts.items() if not _is_named(value)]
    if odd or not isinstance(text, str):
        raise ConfigError(
            f"{name}: {odd[0] if odd else 'the source'} is not of its type; names map to values",
            name=name,
        )
    places = {argument: number for number, argument in enumerate(parts["signature"])}
    return Job(
        name,
        SourceRef("text", str(meta.get("function", name)), data=text.encode()),
        tuple((argument, _type(kind, name)) for argument, kind in parts["signature"].items()),
        tuple(
            ((_place(places, argument, name),), _value(value, argument, name))
            for argument, value in parts["constants"].items()
        ),
        tuple(
            ((_place(places, argument, name),), _attribute(value, argument, name))
            for argument, value in parts["attributes"].items()
        ),
        _named(parts["options"], name),
        _target(meta["target"], name),
    )


def _is_named(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(key, str) for key in value)


def _place(places: Mapping[str, int], argument: str, name: str) -> int:
    if argument not in places:
        raise ConfigError(
            f"{name}: {argument!r} is not in the signature, which lists every parameter of the"
            " function in order; a constant's type there is 'constexpr'",
            name=argument,
        )
    return places[argument]


def _type(kind: Any, name: str) -> Value:
    if isinstance(kind, tuple):
        return Value("tuple", tuple(_type(item, name) for item in kind))
    if not isinstance(kind, str):
        raise ConfigError(
            f"{name}: a type is a text such as '*fp16', or a tuple of types, got {kind!r:.80}",
            got=repr(kind),
        )
    return Value("str", kind)


def _attribute(value: Any, argument: str, name: str) -> Value:
    # A number is what users know: by how many bytes an address, or by which number a size, can be
    # divided.
    return _value([[_ALIGNED, value]] if type(value) is int else value, argument, name)


def _named(values: Mapping[str, Any], name: str) -> Named:
    return tuple((option, _value(value, option, name)) for option, value in values.items())


def _value(value: Any, what: str, name: str) -> Value:
    found = encode_value(value)
    if not found.portable:
        raise ConfigError(
            f"{name}: the value of {what!r} cannot be sent to a worker: {found.payload}", name=what
        )
    return found


def _target(target: Any, name: str) -> Target:
    try:
        return target if isinstance(target, Target) else Target.parse(str(target))
    except ConfigError as error:
        raise ConfigError(f"{name}: {error.message}", got=str(target)) from error


def perform(job: Job, cache_dir: str) -> Compiled:
    """Compile a job's kernel into `cache_dir`, or find it there.

    Runs in a worker or in process, one at a time in each; needs no GPU.  It imports the source,
    which is code.

    Args:
        job: what to compile.
        cache_dir: a cache directory of Triton's kind; made when it is not there.

    Raises:
        CompileFailed: with the compiler's message and, where it names one, the line of the source;
            also when the kernel came out under another key than the job says.
    """
    started = time.monotonic()
    return finished(job, _compiled(job, cache_dir), started)


def finished(job: Job, event: CompileEvent, started_s: float) -> Compiled:
    """Return the result of a job whose compile is done.

    Args:
        job: the job.
        event: what the compile gave.
        started_s: when the job began, by the monotonic clock.

    Raises:
        CompileFailed: the kernel came out under another key than the job says.
    """
    if job.key and event.key != job.key:
        raise CompileFailed(
            f"{job.name} for {job.target}: expected the key {job.key}, got {event.key}; its source"
            " changed since the build was planned, or gives another kernel each time it is"
            " imported",
            name=job.name,
            reason="another key",
            expected=job.key,
            got=event.key,
        )
    known = known_facts(event, [])
    return Compiled(
        event.key,
        event.directory,
        time.monotonic() - started_s,
        tuple(
            (stage, spent * _MICROSECOND)
            for stage, spent in event.stage_times_us
            if not event.cache_hit
        ),
        event.cache_hit,
        known.toolchain,
        known.launch if job.facts is None else _ir_facts(job.facts, known),
        known.parts,
    )


def _compiled(job: Job, cache_dir: str) -> CompileEvent:
    if job.source.kind == "ir":
        with tempfile.TemporaryDirectory(prefix="triton-bundler-ir-") as folder:
            return compile_call.compile_ir(
                job.source.data, job.name, job.options, job.target, cache_dir, folder
            )
    return compile_call.compile_function(
        jit_specialization.jit_function(load_kernel(job.source, job.target)),
        job.signature,
        job.constants,
        job.attributes,
        job.options,
        job.target,
        cache_dir,
        # Another job may have hashed helpers of this kernel before, in an order that leads to
        # another key.
        helpers_first=bool(job.helpers_first) if job.key else job.helpers_first,
    )


def load_kernel(source: SourceRef, target: Target) -> Any:
    """Return the kernel that a source names, imported for a target; raises `CompileFailed`."""
    try:
        module: Any
        if source.kind == "text" and source.module:
            module = resolve(source.module)(source.data.decode(), source.path)
        elif source.kind == "text":
            module = source_module(source.data.decode()).load()
        else:
            module = module_import.load(
                module_import.ModulePlace(source.path, source.module, source.root), target
            )
        return module_import.function_in(module, source.function)
    except CompileFailed:
        raise
    except (BundlerError, UnicodeDecodeError, ImportError, AttributeError) as error:
        raise CompileFailed(
            f"{source.function}: {error}", name=source.function, reason=str(error)
        ) from error


def bundle_of(
    cache_dir: str,
    made: Iterable[tuple[Compiled, str]],
    environment: tuple[tuple[str, str], ...] | None = None,
) -> Bundle:
    """Return compiled kernels of a cache directory, each with the name of its job, as a bundle in
    memory; raises `CompileFailed` for one that no bundle can hold.

    `environment`: what `identity.environment` returned, from a caller that makes many bundles.
    """
    builder = Builder(cache_dir)
    for compiled, name in made:
        reason = compiled.add_to(builder)
        if reason is not None:
            raise failure(name, reason)
    return join([builder], identity.environment() if environment is None else environment)


def _ir_facts(recorded: bytes, known: KnownFacts) -> bytes | None:
    """Return facts for a static launch of what was compiled from IR: the recorded call's, with this
    compile's options.
    """
    if known.launch is None:
        return None
    options = LaunchFacts.from_bytes(known.launch).options
    return replace(LaunchFacts.from_bytes(recorded), source_kind="ir", options=options).to_bytes()
