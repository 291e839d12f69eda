# SPDX-License-Identifier: Apache-2.0
"""`Plan`: from modules and build files to jobs, each with the key that a JIT will ask for.

The `build` command fills one and hands it to `bundle_build`; what cannot be planned is kept as a
`Failure`.

`Retarget` adds recorded kernels for other targets: from their source, so that a JIT finds them, or
from their IR, for static launch only; the command `build --from` calls it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

from bundler.compile import module_import
from bundler.compile.compile_job import Job, SourceRef
from bundler.compile.declarations import (
    LIST,
    Declaration,
    ListedKernel,
    NamedConstant,
    declarations_of,
)
from bundler.compile.module_import import ModulePlace
from bundler.errors import BundlerError, CompileFailed, ConfigError
from bundler.format.bundle import Bundle
from bundler.format.constant_values import Value
from bundler.format.digest import sha256
from bundler.format.entries import Kernel, Target
from bundler.format.launch_spec import LaunchFacts
from bundler.toolchain import compile_call, jit_specialization
from bundler.toolchain.argument_specs import Spec, recorded_arguments
from bundler.toolchain.jit_specialization import Specialized

Keywords = Mapping[str, Any]

_TWO_KEYS = (
    "its key depends on what a program hashed before it (before Triton 3.9, where a function that"
    " it calls uses a constant of its module), so it is built under both keys"
)
_NO_ANSWER = (
    "when it is imported, and gets no answer without the GPU: what it decides by that may be"
    " different there"
)


@dataclass(frozen=True)
class Failure:
    """A kernel, or a module, that could not be built.

    Attributes:
        name, target: which, for what.
        reason: why, in a sentence.
        file, line: of its source, where that is known.
        words: the compiler's whole message.
        printed: what was printed meanwhile, such as what LLVM and MLIR refuse.
    """

    name: str
    target: str
    reason: str
    file: str | None = None
    line: int | None = None
    words: str = ""
    printed: str = ""

    @staticmethod
    def of(name: str, target: Target, error: BundlerError) -> Failure:
        """Return a failure with what an error says."""
        known = error.facts
        said = (known.get("words") or "", known.get("printed") or "")
        return Failure(
            name, str(target), error.message, known.get("file"), known.get("line"), *said
        )


@dataclass
class Plan:
    """What is to be built.

    Attributes:
        jobs: one for each kernel key.
        failures: what cannot be built.
        notes: (kernel, target, what was assumed).
    """

    jobs: dict[str, Job] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    notes: list[tuple[str, str, str]] = field(default_factory=list)

    def add_modules(self, modules: Sequence[str], targets: Sequence[Target]) -> None:
        """Add what modules declare: kernels with `prebuild`, and those in a list called PREBUILD.

        Args:
            modules: files or dotted names; they are imported, once for each target.
            targets: which to build for; empty for those that the declarations name.

        Raises:
            NotFound: there is no such module.
            ConfigError: no kernel is declared; or no target is asked for, and some kernels
                (`untargeted`) name none.
        """
        for module in modules:
            place = module_import.find(module)
            # Without --target, the declarations say; they are read by importing the module once for
            # that alone.
            chosen = targets or self._declared_targets(place)
            # A list, not a generator: `any` would leave out the targets behind the first that
            # declares something.
            found = [self._add_module(place, target) for target in chosen]
            if not any(found) and not self.failures:
                raise _nothing_declared(module)

    def add_listed(self, listed: Sequence[ListedKernel], targets: Sequence[Target]) -> None:
        """Add what a build file lists.

        Raises:
            NotFound: a module is not there.
            ConfigError: no target is asked for, and some kernels (`untargeted`) name none.
        """
        untargeted = [item.function for item in listed if not item.declaration.targets]
        if not targets and untargeted:
            raise _no_target("the build file", untargeted, "name targets in the file")
        for item in listed:
            place = module_import.find(item.module)
            chosen = [
                target
                for target in targets or item.declaration.targets
                if item.declaration.wants(target)
            ]
            for target in chosen:
                module = self.load(place, target)
                if module is not None:
                    self._add_listed(place, module, item, target)

    def add_calls(
        self,
        kernel: Any,
        source: SourceRef,
        calls: Iterable[tuple[Mapping[str, Spec], Keywords]],
        target: Target,
    ) -> list[Job]:
        """Add a job for each compile that calls of a kernel lead to; returns them."""
        name = source.function.rpartition(".")[2]
        added: list[Job] = []
        for arguments, keywords in calls:
            try:
                function = jit_specialization.jit_function(kernel).__name__
                found = jit_specialization.specialize(kernel, arguments, keywords, target)
                jobs = [job for one in found for job in jobs_of(function, source, one, target)]
            except Exception as error:  # noqa: BLE001  # heuristics, hooks and Triton's checks may raise anything
                message = (
                    error.message
                    if isinstance(error, BundlerError)
                    else f"{type(error).__name__}: {error}"
                )
                self.failures.append(
                    Failure(name, str(target), f"{name} cannot be specialized: {message}")
                )
                continue
            # By key: two declarations may lead to the same kernel, which is built once.
            added += [self.jobs.setdefault(job.key, job) for job in jobs]
            if any(job.helpers_first for job in jobs):
                self.note(name, target, _TWO_KEYS)
        return added

    def note(self, name: str, target: Target, text: str) -> None:
        """Say once what was assumed of a kernel, or of a module."""
        note = (name, str(target), text)
        if note not in self.notes:
            self.notes.append(note)

    def _declared_targets(self, place: ModulePlace) -> tuple[Target, ...]:
        # A module may ask for the target when it is imported, so some target is declared to read
        # what targets it wants.
        module = module_import.load(place, Target("cuda", "90"))
        declared = [
            (name, declaration.targets) for name, _, declaration in _declared_in(module, place)
        ]
        if not declared:
            raise _nothing_declared(place.name)
        untargeted = [name for name, targets in declared if not targets]
        if untargeted:
            raise _no_target(place.name, untargeted, "give each its targets")
        return tuple(sorted({target for _, targets in declared for target in targets}))

    def _add_module(self, place: ModulePlace, target: Target) -> bool:
        module = self.load(place, target)
        if module is None:
            return False
        found = False
        try:
            for name, kernel, declaration in _declared_in(module, place):
                found = True
                if declaration.wants(target):
                    self.add_calls(
                        kernel, source_of(place, name), _resolved(module, declaration), target
                    )
        except ConfigError as error:
            self.failures.append(Failure.of(place.name, target, error))
        return found

    def _add_listed(
        self, place: ModulePlace, module: ModuleType, item: ListedKernel, target: Target
    ) -> None:
        try:
            kernel = module_import.function_in(module, item.function)
        except BundlerError as error:
            self.failures.append(Failure.of(item.function, target, error))
            return
        self.add_calls(
            kernel, source_of(place, item.function), _resolved(module, item.declaration), target
        )

    def load(self, place: ModulePlace, target: Target) -> ModuleType | None:
        """Import a module for a target; None when that failed, which is among the failures then."""
        try:
            module = module_import.load(place, target)
        except CompileFailed as error:
            self.failures.append(Failure.of(place.name, target, error))
            return None
        asked = module_import.refused(place, target)
        if asked:
            self.note(
                place.name, target, f"asks Triton's driver for {', '.join(asked)} {_NO_ANSWER}"
            )
        return module


def _nothing_declared(module: str) -> ConfigError:
    return ConfigError(
        f"{module} declares nothing to build; decorate its kernels with bundler.prebuild, list them"
        f" in {LIST}, or write a build file (--spec); --target says what for",
        name=module,
    )


def _no_target(where: str, untargeted: Sequence[str], way_out: str) -> ConfigError:
    names = tuple(dict.fromkeys(untargeted))
    return ConfigError(
        f"no target for {', '.join(names)} of {where}: pass --target, such as --target cuda:90, or"
        f" {way_out}; the targets of one kernel are not taken for another",
        untargeted=names,
    )


def source_of(place: ModulePlace, function: str) -> SourceRef:
    """Return the source of a function in a module file."""
    return SourceRef("module", function, place.name, place.path, place.root)


def jobs_of(name: str, source: SourceRef, found: Specialized, target: Target) -> Iterator[Job]:
    """Yield a job for each key under which a JIT may ask for a compile."""
    for key, helpers_first in found.keys:
        yield Job(
            name,
            source,
            found.signature,
            found.constants,
            found.attributes,
            found.options,
            target,
            key,
            helpers_first,
        )


def _declared_in(module: ModuleType, place: ModulePlace) -> Iterator[tuple[str, Any, Declaration]]:
    """Yield (name, kernel, declaration): decorated kernels first, then those that are listed."""
    # By identity: a kernel that is imported under a second name is still one kernel, declared once.
    names = {
        id(value): name
        for name, value in vars(module).items()
        if jit_specialization.is_kernel(value)
    }
    for name, value in list(vars(module).items()):
        if names.get(id(value)) == name and _package(
            jit_specialization.jit_function(value)
        ) == _package(module):
            for declaration in _all_declarations(value):
                yield name, value, declaration
    for number, item in enumerate(getattr(module, LIST, ())):
        what = f"{place.path}: {LIST}[{number}]"
        if not isinstance(item, Mapping) or id(item.get("kernel")) not in names:
            raise ConfigError(
                f"{what}: expected a mapping whose 'kernel' is a kernel of the module, got"
                f" {item!r:.80}"
            )
        rest = {name: value for name, value in item.items() if name != "kernel"}
        yield names[id(item["kernel"])], item["kernel"], Declaration.of_mapping(what, rest)


def _package(of: Any) -> str:
    """Return the top-level package of a module or function: a module builds what its own package
    declares, not what it imports.
    """
    name: str = getattr(of, "__name__", "") if isinstance(of, ModuleType) else of.__module__
    return name.partition(".")[0]


def _all_declarations(kernel: Any) -> Iterator[Declaration]:
    """Yield what is declared of a kernel, also below an autotuner or heuristics."""
    while (
        kernel is not None
    ):  # down to the JIT function, which has parameters; its own `fn` is plain Python
        yield from declarations_of(kernel)
        kernel = getattr(kernel, "fn", None) if not hasattr(kernel, "params") else None


def _resolved(
    module: ModuleType, declaration: Declaration
) -> Iterator[tuple[dict[str, Spec], dict[str, Any]]]:
    """Yield a declaration's calls, with the types and functions that a build file names."""
    for arguments, keywords in declaration.calls():
        yield arguments, {name: _constant(module, value) for name, value in keywords.items()}


def _constant(module: ModuleType, value: Any) -> Any:
    if isinstance(value, NamedConstant) and value.kind == "dtype":
        return compile_call.decode_value(Value("dtype", value.name))
    if isinstance(value, NamedConstant):
        return jit_specialization.jit_function(module_import.function_in(module, value.name))
    # A named tuple stays what it is: a kernel reads its fields.
    return tuple(_constant(module, item) for item in value) if type(value) is tuple else value


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
    """

    plan: Plan
    bundle: Bundle
    modules: Sequence[str] = ()
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
        return self._sources[target].get(_source_identity(kernel))

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
    return b"/".join([plain.to_bytes(), *(part.encode() for part in _source_identity(kernel))])


def _source_identity(kernel: Kernel) -> tuple[str, str, str]:
    """Return name, digest of the text, and first line, as a kernel's key parts have them."""
    parts = dict(kernel.parts.parts) if kernel.parts is not None else {}
    return parts.get("source.name", ""), parts.get("source.text", ""), parts.get("source.line", "")


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
