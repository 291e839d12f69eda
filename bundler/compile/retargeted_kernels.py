# SPDX-License-Identifier: Apache-2.0
"""`Retarget`: recorded kernels for other targets: from their source, so that a JIT finds them, or
from their IR, for static launch only.

The command `build --from` calls it to fill a `Plan`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bundler.compile import module_import
from bundler.compile.build_plan import Failure, Plan, source_of
from bundler.compile.compile_job import Job, SourceRef
from bundler.errors import BundlerError, CompileFailed, ConfigError
from bundler.format.bundle import Bundle
from bundler.format.constant_values import Value
from bundler.format.digest import sha256
from bundler.format.entries import Kernel, Target
from bundler.format.launch_spec import LaunchFacts
from bundler.toolchain import compile_call, jit_specialization
from bundler.toolchain.argument_specs import recorded_arguments

IR_KIND = "ttir"
STATIC_ONLY = "built from its IR: for static launch only, no JIT will ask for it"
_ASSUMED_RANGE = (
    "every tensor is assumed to be below 2 GB, which an NVIDIA kernel does not tell; AMD's JIT asks"
    " for another key above"
)
# First architecture with each feature; NVIDIA numbers.
_FP8_ARCH, _DESCRIPTOR_ARCH = 89, 90
_LIBRARIES = (b"__nv_", b'libname = "libdevice"', b"__ocml_", b"__ockl_")
_INLINE_ASSEMBLY = b"tt.elementwise_inline_asm"
_DESCRIPTOR = (b"!tt.tensordesc", b"tt.experimental_", b"tt.make_tensor_descriptor", b"nvTmaDesc")
_FP8 = (b"f8E4M3FN", b"f8E4M3FNUZ", b"f8E5M2FNUZ")


@dataclass
class Retarget:
    """Adds the kernels of a recorded bundle to a plan, for other targets.

    Args:
        plan: where to.
        bundle: what was recorded; nothing of it is executed.
        modules: where the sources are: files or dotted names; they are imported, so the caller must
            trust them.
        from_ir: whether a kernel whose source is not there is built from its IR, else it is a
            failure.
    """

    plan: Plan
    bundle: Bundle
    modules: Sequence[str] = ()
    from_ir: bool = True
    _sources: dict[Target, dict[tuple[str, str, str], tuple[SourceRef, Any]]] = field(
        default_factory=dict
    )

    def add(self, targets: Sequence[Target]) -> None:
        """Add every kernel for each target; what cannot be built is among the plan's failures.

        A call that was recorded for several targets is built once.

        Raises:
            ConfigError: no target.
            NotFound: there is no such module.
        """
        if not targets:
            raise ConfigError("no target: pass --target, such as --target cuda:100")
        for target in targets:
            self._sources[target] = dict(self._functions(target))
            calls: set[bytes] = set()
            for kernel in self._recorded(target):
                self._add(kernel, target, calls)

    def _recorded(self, target: Target) -> list[Kernel]:
        """Return the kernels, those that were recorded for the most similar target first."""

        def similarity(kernel: Kernel) -> tuple[bool, bool, int, str]:
            return (
                kernel.target == target,
                kernel.target.backend == target.backend,
                _number(kernel.target),
                kernel.key,
            )

        return sorted(self.bundle.kernels, key=similarity, reverse=True)

    def _functions(
        self, target: Target
    ) -> Iterator[tuple[tuple[str, str, str], tuple[SourceRef, Any]]]:
        """Yield each kernel of the modules by (name, digest of its text, first line), as key parts
        have them.
        """
        for module in self.modules:
            place = module_import.find(module)
            imported = self.plan.load(place, target)
            for name, value in list(vars(imported).items()) if imported is not None else ():
                if jit_specialization.is_kernel(value):
                    function = jit_specialization.jit_function(value)
                    text = sha256(function.src.encode()).hex()
                    identity = (function.__name__, text, str(function.starting_line_number))
                    yield identity, (source_of(place, name), function)

    def _add(self, kernel: Kernel, target: Target, calls: set[bytes]) -> None:
        try:
            facts = kernel.launch.require_facts()
            found = self._source_of(kernel, target)
            if found is not None:
                self._add_source(kernel, facts, found, target)
                return
            # From source, recordings of one call for several targets give one key.  From IR they
            # would give several, so only one is built.
            call = _call_identity(kernel, facts)
            if call not in calls and kernel.target != target:
                self._add_ir(kernel, facts, target)
            calls.add(call)
        except BundlerError as error:
            self.plan.failures.append(Failure.of(kernel.name, target, error))

    def _source_of(self, kernel: Kernel, target: Target) -> tuple[SourceRef, Any] | None:
        parts = dict(kernel.parts.parts) if kernel.parts is not None else {}
        identity = tuple(parts.get(f"source.{part}", "") for part in ("name", "text", "line"))
        return self._sources[target].get(identity)  # type: ignore[arg-type]

    def _add_source(
        self, kernel: Kernel, facts: LaunchFacts, found: tuple[SourceRef, Any], target: Target
    ) -> None:
        source, function = found
        arguments, values = recorded_arguments(facts)
        options, dropped = compile_call.chosen_options(facts, kernel.target, target)
        constants = {
            name: compile_call.decode_value(
                value, lambda place, digest: self._function(place, digest, target)
            )
            for name, value in values.items()
        }
        jobs = self.plan.add_calls(
            function, source, [(arguments, {**constants, **options})], target
        )
        if jobs and dropped:
            why = f"{target.backend} has no option {', '.join(dropped)}; left out"
            self.plan.notes.append((kernel.name, str(target), why))
        for name, there, here in (
            compile_call.other_defaults(facts, kernel.target, target) if jobs else ()
        ):
            why = (
                f"{name}={there} is the default of {kernel.target.backend} and taken for not"
                f" chosen: it becomes {here}"
            )
            self.plan.notes.append((kernel.name, str(target), why))
        if jobs and target.backend == "hip" != kernel.target.backend and _has_pointers(facts):
            self.plan.notes.append((kernel.name, str(target), _ASSUMED_RANGE))

    def _function(self, place: str, digest: str, target: Target) -> Any:
        """Return a JIT function that is a constant: one of the given modules with this name and
        digest, whatever its module was called.
        """
        name = place.partition(":")[2]
        for _, function in self._sources[target].values():
            if function.__qualname__ == name and function.cache_key == digest:
                return function
        raise compile_call.no_such_function(place)

    def _add_ir(self, kernel: Kernel, facts: LaunchFacts, target: Target) -> None:
        text = self._ir(kernel, target)
        options, dropped = compile_call.chosen_options(facts, kernel.target, target)
        job = Job(
            kernel.name,
            SourceRef("ir", kernel.name, data=text),
            (),
            (),
            (),
            compile_call.encoded(options),
            target,
            facts=facts.to_bytes(),
        )
        self.plan.jobs.setdefault(job.digest, job)
        left = f"; {target.backend} has no option {', '.join(dropped)}" if dropped else ""
        self.plan.notes.append((kernel.name, str(target), STATIC_ONLY + left))

    def _ir(self, kernel: Kernel, target: Target) -> bytes:
        where = "its source is not in the modules given"
        if not self.from_ir:
            raise CompileFailed(
                f"{kernel.name}: {where}, and IR was not asked for", name=kernel.name, reason=where
            )
        artifact = next(
            (artifact for artifact in kernel.artifacts if artifact.kind == IR_KIND), None
        )
        if artifact is None:
            raise CompileFailed(
                f"{kernel.name}: {where}, and its IR is not in the bundle (keep='launch'); name the"
                " module of its source",
                name=kernel.name,
                reason=where,
            )
        text = self.bundle.read(artifact)
        refusal = why_not_from_ir(text, kernel.target, target)
        if refusal is not None:
            raise CompileFailed(
                f"{kernel.name} cannot be built for {target} from its IR: {refusal}; name the"
                " module of its source",
                name=kernel.name,
                reason=refusal,
            )
        return text


def why_not_from_ir(text: bytes, recorded: Target, target: Target) -> str | None:
    """Return why TTIR that was made for one target cannot be compiled for another; None when
    nothing known speaks against it.
    """
    if target.backend != recorded.backend:
        if any(word in text for word in _LIBRARIES):
            return f"it calls a device library of {recorded.backend}"
        if _INLINE_ASSEMBLY in text:
            return f"it has inline assembly for {recorded.backend}"
        if target.backend == "hip" and any(word in text for word in _DESCRIPTOR):
            return "it uses tensor descriptors"
    if target.backend == "cuda" and _number(target) < _number(recorded):
        if _number(target) < _DESCRIPTOR_ARCH and any(word in text for word in _DESCRIPTOR):
            return f"it uses tensor descriptors, which are for cuda:{_DESCRIPTOR_ARCH} and newer"
        if _number(target) < _FP8_ARCH and any(word in text for word in _FP8):
            return f"it uses fp8, which is for cuda:{_FP8_ARCH} and newer"
    return None


def _number(target: Target) -> int:
    return int(target.arch) if target.arch.isdecimal() else 0


def _call_identity(kernel: Kernel, facts: LaunchFacts) -> bytes:
    """Return what recordings of one call for several targets have in common."""
    plain = replace(
        facts,
        options=compile_call.chosen_named(facts, kernel.target),
        attributes=tuple(_without_range(facts.attributes)),
    )
    parts = dict(kernel.parts.parts) if kernel.parts is not None else {}
    return b"/".join(
        [
            plain.to_bytes(),
            *(parts.get(f"source.{part}", "").encode() for part in ("name", "text", "line")),
        ]
    )


def _without_range(
    attributes: Iterable[tuple[tuple[int, ...], Value]],
) -> Iterator[tuple[tuple[int, ...], Value]]:
    for path, value in attributes:
        kept = tuple(
            item for item in value.payload if item.payload[0].payload != "tt.pointer_range"
        )
        if kept:
            yield path, Value("list", kept)


def _has_pointers(facts: LaunchFacts) -> bool:
    return any(str(kind.plain()).startswith(("*", "('*")) for _, kind in facts.signature)
