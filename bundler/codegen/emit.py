# SPDX-License-Identifier: Apache-2.0
"""`emit_bundle`: the kernels of programs, compiled for targets that need not be here, in a bundle
with the programs' plans.

Each kernel is built with the first candidates of its heuristic on the target's device, and with
those that follow until one does not spill registers, as the tuner would have it.  The plan notes
them, and a replay launches the one that a tuning record names, else the first that does not spill.
`Program.build` and `build_programs` call it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from bundler.codegen.loops.data_types import FLOAT8_TYPES
from bundler.compile.build_plan import Plan
from bundler.compile.bundle_build import BuildResult, build
from bundler.compile.compile_job import SourceRef
from bundler.errors import CompileFailed, ConfigError, UnsupportedOperator
from bundler.format.bundle import Bundle, MemoryBlobs
from bundler.format.bundle_union import merge
from bundler.format.digest import digest_text, sha256
from bundler.format.entries import Artifact, Opaque, Target
from bundler.format.keyparts import FUNCTIONS_PART
from bundler.format.manifest import Content, Observed
from bundler.format.opaque_files import program_path
from bundler.runtime.configs import Config
from bundler.runtime.heuristics.facts import Device
from bundler.runtime.program.allowed_operators import unlisted
from bundler.runtime.program.program_plan import KernelChoice, Launch, ProgramPlan
from bundler.runtime.tuning.occupancy import most_spills, usage_of
from bundler.toolchain.compile_call import float8_types
from bundler.toolchain.tuner_toolchain import source_part

if TYPE_CHECKING:
    from bundler.codegen.module_decorators import ModuleKernel

# Heuristics look at the number of multiprocessors, which an architecture does not say: one chip
# stands for each.
_MULTIPROCESSORS = {
    "80": 108,
    "86": 84,
    "89": 142,
    "90": 132,
    "100": 148,
    "120": 188,
    "gfx90a": 104,
    "gfx942": 304,
    "gfx950": 256,
}
_ASSEMBLY = "tl.inline_asm_elementwise("
_DEFAULT_MULTIPROCESSORS = 108
# How many candidates are compiled in search of one that does not spill registers.
_MOST_SPILLING = 4
_WAVE = {"cuda": 32, "hip": 64}


def device_of(target: Target) -> Device:
    """Return the device that a target stands for."""
    major = int(target.arch[:-1]) if target.backend == "cuda" and target.arch.isdigit() else None
    count = _MULTIPROCESSORS.get(target.arch, _DEFAULT_MULTIPROCESSORS)
    return Device(target.backend, count, target.warp_size or _WAVE[target.backend], major)


@dataclass(frozen=True)
class Buildable:
    """What a build needs of a program.

    Attributes:
        name: of the program in the bundle.
        sources: text of each kernel's module, by the kernel's name.
        modules: the kernels, imported.
        plan: what the program does.
    """

    name: str
    sources: Mapping[str, str]
    modules: Mapping[str, ModuleKernel]
    plan: ProgramPlan


def emit_bundle(
    programs: Sequence[Buildable],
    targets: Sequence[str],
    workers: int | None,
    candidates: int | Literal["all"] = 1,
) -> Bundle:
    """Return a bundle with the kernels of programs for all targets, and their plans; see
    `build_programs`.
    """
    most = None if candidates == "all" else candidates
    if most is not None and (type(most) is not int or most < 1):
        raise ConfigError(
            f"candidates={candidates!r}: expected a number from 1 on, or 'all'", got=candidates
        )
    chosen = [Target.parse(target) for target in targets]
    for target, program in itertools.product(chosen, programs):
        refuse_missing_types(program.sources, target)
        refuse_assembly(program.sources, target)
    plan = Plan()
    planned = [
        [
            _Planned(name, target, _planned(plan, program, name, target, slice(most)))
            for target in chosen
            for name in program.sources
            # Where nobody knows that programs can wait for each other, none are launched that do.
            if target.backend == "cuda" or not program.modules[name].shares_rows
        ]
        for program in programs
    ]
    built = build(plan, workers)
    spilling = _spilling(built.bundle)
    while (further := _further(programs, planned, built.bundle, spilling)).jobs:
        more = build(further, workers).bundle
        built = replace(built, bundle=merge([built.bundle, more]))
        spilling |= _spilling(more)
    plans = [_plan_of(*pair, built, spilling) for pair in zip(programs, planned, strict=True)]
    return merge([built.bundle, *plans])


def _spilling(bundle: Bundle) -> frozenset[str]:
    """Return the keys of kernels that spill more registers than the tuner allows."""
    found = []
    for kernel in bundle.kernels:
        usage = usage_of(bundle.read(kernel.binary), kernel.spec.entry, kernel.target)
        if (usage.spills or 0) > most_spills(kernel.target.backend):
            found.append(kernel.key)
    return frozenset(found)


def _further(
    programs: Sequence[Buildable],
    planned: Sequence[Sequence[_Planned]],
    built: Bundle,
    spilling: frozenset[str],
) -> Plan:
    """Return a plan of the next candidate of each kernel that spills in all that were compiled,
    which becomes its candidate.
    """
    plan = Plan()
    good = {kernel.key for kernel in built.kernels} - spilling
    for program, items in zip(programs, planned, strict=True):
        for item in items:
            keys = [key for _, key in item.candidates]
            if 0 < len(keys) < _MOST_SPILLING and keys[0] in spilling and good.isdisjoint(keys):
                following = slice(len(keys), len(keys) + 1)
                item.candidates.extend(_planned(plan, program, item.name, item.target, following))
    return plan


def _plan_of(
    program: Buildable, planned: Sequence[_Planned], built: BuildResult, spilling: frozenset[str]
) -> Bundle:
    """Return a bundle with a program's plan, which knows how its kernels were compiled.

    Raises:
        CompileFailed: one that the program needs was not.
    """
    there = {kernel.key: kernel for kernel in built.bundle.kernels}
    # A later candidate may fail, as one that needs more shared memory than the device has, and so
    # may a kernel that another one computes the same as; without the first one of all others the
    # program could not run.
    launched = {step.kernel for step in program.plan.apart.steps if isinstance(step, Launch)}
    needed = [item for item in planned if item.name in launched]
    if built.failures and not all(item.candidates[0][1] in there for item in needed):
        first = built.failures[0]
        raise CompileFailed(
            f"{first.name} for {first.target}: {first.reason}", name=first.name, reason=first.reason
        )
    entries = dict(program.plan.kernels)
    for item in planned:
        # In the heuristic's order, those that spill last: a replay takes the first one unless a
        # tuning record names another.
        candidates = sorted(item.candidates, key=lambda candidate: candidate[1] in spilling)
        choices = tuple(choice for choice, key in candidates if key in there)
        entry, module = entries[item.name], program.modules[item.name]
        # Another policy's record, of a kernel of equal text, decides nothing of a deterministic
        # one.
        source = "" if module.policy.deterministic else source_part(module.fn)
        compiled = {str(item.target): choices} if choices else {}
        parts = [there[key].parts for _, key in item.candidates if key in there]
        texts = [dict(one.parts).get(FUNCTIONS_PART, "") for one in parts if one is not None]
        entries[item.name] = replace(
            entry,
            choices={**entry.choices, **compiled},
            source=source,
            functions=next(filter(None, texts), entry.functions),
        )
    return _holding(program.name, replace(program.plan, kernels=entries))


class _Planned(NamedTuple):
    """A kernel for a target, and its candidates with the key that each is compiled under; no key
    where it cannot be.
    """

    name: str
    target: Target
    candidates: list[tuple[KernelChoice, str]]


def _planned(
    plan: Plan, program: Buildable, name: str, target: Target, which: slice
) -> list[tuple[KernelChoice, str]]:
    kernel = program.modules[name]
    source = SourceRef("text", name, data=program.sources[name].encode())
    found = []
    for config in kernel.on(device_of(target)).configs[which]:
        jobs = plan.add_calls(
            kernel.fn,
            source,
            [(kernel.argument_specs, _keywords(config) | kernel.compile_options)],
            target,
        )
        found.append((_choice(config), jobs[0].key if jobs else ""))
    return found


def has_float8(
    sources: Mapping[str, str], types: Collection[str] = tuple(FLOAT8_TYPES.values())
) -> list[str]:
    """Return the kernels that have one of these types, as signatures name them, in their text."""
    pattern = re.compile(rf"\b(?:tl\.float|fp)(?:{'|'.join(text[2:] for text in types)})\b")
    return [kernel for kernel, source in sources.items() if types and pattern.search(source)]


def refuse_missing_types(sources: Mapping[str, str], target: Target) -> None:
    """Raise where a kernel has a type that the compiler lacks for a target.

    Raises:
        UnsupportedOperator: an 8-bit float, as float8_e4m3fn before cuda:89.
    """
    there = float8_types(target)
    for dtype, text in FLOAT8_TYPES.items():
        if text not in there and (kernels := has_float8(sources, [text])):
            known = ", ".join(name for name, other in FLOAT8_TYPES.items() if other in there)
            raise UnsupportedOperator(
                f"{kernels[0]} for {target}: Triton has no {dtype} there; expected one of {known}; "
                "build for a newer architecture, or convert outside of the program",
                operator=kernels[0],
                dtypes=(dtype,),
            )


def refuse_assembly(sources: Mapping[str, str], target: Target) -> None:
    """Raise where a kernel holds assembly, which is PTX, and a target has other instructions.

    Raises:
        UnsupportedOperator: for every target but CUDA's.
    """
    kernels = [name for name, source in sources.items() if _ASSEMBLY in source]
    if kernels and target.backend != "cuda":
        raise UnsupportedOperator(
            f"{kernels[0]} for {target}: inline_asm_elementwise holds PTX, which only cuda targets"
            " have; build for one of them, or compute it by other operators",
            operator="inline_asm_elementwise",
        )


def _choice(config: Config) -> KernelChoice:
    return KernelChoice(
        dict(config.kwargs), config.num_warps, config.num_stages, dict(config.options)
    )


def _keywords(config: Config) -> dict[str, Any]:
    return config.all_kwargs()


def _holding(name: str, plan: ProgramPlan) -> Bundle:
    data = plan.to_json()
    raw = sha256(data)
    path = program_path(name, code=bool(unlisted(plan)))
    entry = Opaque(path, Artifact(path.rpartition("/")[2], digest_text(raw), len(data)))
    return Bundle(Content.of([entry]), Observed(), MemoryBlobs({raw: data}))
