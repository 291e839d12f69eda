# SPDX-License-Identifier: Apache-2.0
"""`Plan`: from modules and build files to jobs, each with the key that a JIT will ask for.

The `build` command fills one and hands it to `bundle_build`; what cannot be planned is kept as a
`Failure`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
from bundler.format.constant_values import Value
from bundler.format.entries import Target
from bundler.toolchain import compile_call, jit_specialization
from bundler.toolchain.argument_specs import Spec
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
