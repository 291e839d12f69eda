# SPDX-License-Identifier: Apache-2.0
"""`build_bundle`: the kernels of a program, compiled for targets that need not be here, in a bundle with the program's plan.

Each kernel is built with the first candidate of its heuristic on the target's device, which the plan notes, so that a replay launches it so.
`Program.build` calls it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from bundler.codegen.data_types import FLOAT8_TYPES
from bundler.compile.build_plan import Plan
from bundler.compile.bundle_build import build
from bundler.compile.compile_job import SourceRef
from bundler.errors import CompileFailed, UnsupportedOperator
from bundler.format.bundle import Bundle, MemoryBlobs
from bundler.format.bundle_union import merge
from bundler.format.digest import digest_text, sha256
from bundler.format.entries import Artifact, Opaque, Target
from bundler.format.manifest import Content, Observed
from bundler.runtime.configs import Config
from bundler.runtime.heuristics.facts import Device
from bundler.runtime.launch.program_plan import KernelChoice, ProgramPlan
from bundler.runtime.launch.program_replay import PLAN_PREFIX, PLAN_SUFFIX
from bundler.toolchain.option_defaults import float8_types

if TYPE_CHECKING:
    from bundler.codegen.module_decorators import ModuleKernel

# One chip of each architecture: heuristics look at the number of multiprocessors.
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
_DEFAULT_MULTIPROCESSORS = 108
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


def build_bundle(program: Buildable, targets: Sequence[str], workers: int | None) -> Bundle:
    """Return a bundle with the program's kernels for all targets, and its plan; see `Program.build`."""
    plan = Plan()
    choices: dict[str, dict[str, KernelChoice]] = {name: {} for name in program.sources}
    chosen = [Target.parse(target) for target in targets]
    for target in chosen:
        refuse_missing_types(program.sources, target)
    for target in chosen:
        device = device_of(target)
        for name, module_kernel in program.modules.items():
            config = module_kernel.on(device).configs[0]
            choices[name][str(target)] = _choice(config)
            source = SourceRef("text", name, data=program.sources[name].encode())
            plan.add_calls(
                module_kernel.fn,
                source,
                [(_arguments(module_kernel), _keywords(config) | module_kernel.compile_options)],
                target,
            )
    built = build(plan, workers)
    if built.failures:
        first = built.failures[0]
        raise CompileFailed(f"{first.name} for {first.target}: {first.reason}", name=first.name, reason=first.reason)
    entries = {name: replace(entry, choices=choices[name]) for name, entry in program.plan.kernels.items()}
    return merge([built.bundle, _of_plan(program.name, replace(program.plan, kernels=entries).to_json())])


def has_float8(sources: Mapping[str, str], types: Collection[str] = tuple(FLOAT8_TYPES.values())) -> list[str]:
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


def _choice(config: Config) -> KernelChoice:
    return KernelChoice(dict(config.kwargs), config.num_warps, config.num_stages)


def _keywords(config: Config) -> dict[str, Any]:
    return config.all_kwargs()


def _arguments(kernel: ModuleKernel) -> dict[str, str]:
    """Return what Triton's JIT would see in a call, as specs: a type, and that it is a multiple of 16 or one."""
    meta: Mapping[str, Any] = kernel.triton_meta
    aligned = {place for (place,) in meta["configs"][0]}
    found = {}
    for place, (name, kind) in enumerate(meta["signature"].items()):
        if name in meta["constants"]:
            found[name] = "i32:1"
        elif kind != "constexpr":
            found[name] = f"{kind}:16" if place in aligned else kind
    return found


def _of_plan(name: str, data: bytes) -> Bundle:
    raw = sha256(data)
    path = f"{PLAN_PREFIX}{name}{PLAN_SUFFIX}"
    entry = Opaque(path, Artifact(path.rpartition("/")[2], digest_text(raw), len(data)))
    return Bundle(Content.of([entry]), Observed(), MemoryBlobs({raw: data}))
