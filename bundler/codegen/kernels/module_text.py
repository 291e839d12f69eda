# SPDX-License-Identifier: Apache-2.0
"""`module_text`: the source of one kernel's module; `KernelModules` names kernels and keeps one of
equal ones.

A module imports Triton, our helper functions and our decorators, and nothing of torch.  Its text
says all that is known of the kernel beside its lines: size hints, signature, alignment, statistics.
The name, and how much memory a launch moves, are put in last, so that kernels that differ in these
alone are one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bundler.codegen.kernels.kernel_arguments import KernelParameter
from bundler.codegen.kernels.kernel_plan import KernelText
from bundler.format.digest import sha256
from bundler.format.host_descriptors import PARAMETER as DESCRIPTORS
from bundler.runtime.heuristics.launch_grids import COOPERATIVE_GRID, PRODUCT_GRID

_PLACEHOLDER, _GIGABYTES = "KERNEL_NAME", "KERNEL_GIGABYTES"
_CATEGORIES = {
    "pointwise": "poi",
    "reduction": "red",
    "persistent_reduction": "per",
    "product": "mm",
    "attention": "att",
}
_WITH_ROWS = frozenset({"reduction", "persistent_reduction"})
_GRIDS = {
    ("xnumel",): "Grid1D",
    ("ynumel", "xnumel"): "Grid2DWithYZOverflow",
    ("znumel", "ynumel", "xnumel"): "Grid3D",
}
_COMBINED, _IN_TURN = "SequentialFlattenComboKernelGrid", "RoundRobinFlattenComboKernelGrid"
_LONGEST_NAME = 120
_HARNESS_IMPORT = (
    "from bundler.codegen.module_benchmarks import candidate_times, random_arguments, report\n"
)
_IMPORTS = """import triton
import triton.language as tl
from triton.language import math as tl_math
from triton.language.extra import libdevice

from bundler.codegen import lib
from bundler.codegen.module_decorators import {}
"""


@dataclass(frozen=True)
class ProgramKernel:
    """A generated kernel.

    Attributes:
        name: of its function.
        source: of its module.
        text: what it was made of; None for one that another process generated.
    """

    name: str
    source: str
    text: KernelText | None = None

    @property
    def digest(self) -> str:
        """Names the source."""
        return sha256(self.source.encode()).hex()


@dataclass
class KernelModules:
    """The kernels of a program, each source once.

    Attributes:
        kernels: by name.
        harness: end each with a benchmark.
        policy: what the metadata of each says of how it is tuned.
        others: kernel -> kernels that compute the same, with the places of their arguments among
            its own.
        beyond: kernel of short rows -> the one that takes rows of any length, likewise.
    """

    kernels: dict[str, ProgramKernel] = field(default_factory=dict)
    harness: bool = False
    policy: Mapping[str, bool] = field(default_factory=dict)
    others: dict[str, dict[str, tuple[int, ...]]] = field(default_factory=dict)
    beyond: dict[str, dict[str, tuple[int, ...]]] = field(default_factory=dict)
    _by_source: dict[str, str] = field(default_factory=dict)

    def add(self, text: KernelText) -> ProgramKernel:
        """Return the kernel with this text, under the name that it got when it was first added."""
        # Compared with a placeholder in the place of the name, so equal kernels are found.
        source = module_text(text, self.policy) + (harness_text(text) if self.harness else "")
        name = self._by_source.get(source)
        if name is None:
            name = kernel_name(text, len(self.kernels))
            self._by_source[source] = name
            filled = source.replace(_PLACEHOLDER, name).replace(
                repr(_GIGABYTES), repr(text.gigabytes)
            )
            self.kernels[name] = ProgramKernel(name, filled, text)
        return self.kernels[name]

    def add_other(self, kernel: ProgramKernel, text: KernelText) -> None:
        """Add a kernel that computes the same as another one, from the same arguments."""
        assert kernel.text is not None
        places = _places(kernel.text, text)
        if places is not None:
            self.others.setdefault(kernel.name, {})[self.add(text).name] = places

    def add_bounded(self, short: KernelText, any_length: KernelText) -> bool:
        """Add a kernel of short rows with the one that launches of longer rows go to; False, and
        none of them, where a launch of the former lacks an argument of the latter.
        """
        places = _places(short, any_length)
        if places is not None:
            kernel = self.add(short)
            self.beyond[kernel.name] = {self.add(any_length).name: places}
        return places is not None


def _places(text: KernelText, other: KernelText) -> tuple[int, ...] | None:
    """Return the places of a kernel's arguments among those of another one that computes the same;
    None where a launch has no such argument.
    """
    places = {_passed(one): n for n, one in enumerate(text.parameters)}
    passed = [_passed(one) for one in other.parameters]
    return tuple(places[one] for one in passed) if places.keys() >= set(passed) else None


def _passed(parameter: KernelParameter) -> tuple[str, str]:
    """Return what of a launch a parameter is: pointers and sizes may have other names in another
    kernel, and two numels may be equal.
    """
    name = parameter.name if parameter.name.endswith("numel") else ""
    return name, str(parameter.outer)


def kernel_name(text: KernelText, number: int) -> str:
    """Return `triton_<category>_fused_<operators>_<number>`."""
    fused = "_".join(text.origins)[:_LONGEST_NAME] or "nothing"
    category = "for" if text.parts else _CATEGORIES[text.kind]
    return f"triton_{category}_fused_{fused}_{number}"


def module_text(text: KernelText, policy: Mapping[str, bool]) -> str:
    """Return the source of a module, with placeholders for the kernel's name and its gigabytes."""
    parameters = [*map(_declared, text.parameters), *(f"{b}: tl.constexpr" for b in text.blocks)]
    if text.descriptors:
        parameters.append(f"{DESCRIPTORS}: tl.constexpr = {text.descriptors!r}")
    arguments = "".join(f"    {line},\n" for line in _metadata(text, policy))
    body = "".join(f"    {line}\n" for line in text.body)
    functions = "".join(f"\n\n{function}" for function in text.functions)
    decorator = "combination" if text.parts else "heuristic"
    return (
        f"{_IMPORTS.format(decorator)}{functions}\n\n"
        f"# {', '.join(text.origins) or 'copy'}\n"
        f"@{decorator}(\n{arguments})\n"
        f"@triton.jit{_unspecialized(text)}\n"
        f"def {_PLACEHOLDER}({', '.join(parameters)}):\n{body}"
    )


def _metadata(text: KernelText, policy: Mapping[str, bool]) -> list[str]:
    """Return the arguments of the decorator; a combination's begin with what is known of each
    part.
    """
    kernel = {"triton_meta": triton_meta(text), "inductor_meta": {**inductor_meta(text), **policy}}
    if text.parts:
        members = [{"members": n} if text.in_turn else {} for n in members_of(text)]
        parts = [
            repr({"kind": part.kind, **count, **_known(part, part.counts)})
            for part, count in zip(text.parts, members, strict=True)
        ]
        return [*parts, *(f"{name}={value!r}" for name, value in kernel.items())]
    known = _known(text, kernel)
    return [repr(text.kind), *(f"{name}={value!r}" for name, value in known.items())]


def members_of(text: KernelText) -> list[int]:
    """Return of how many tensors each part of a combination is."""
    sizes = dict(zip((p.name for p in text.parameters), text.examples, strict=True))
    return [int(sizes.get(f"ynumel_{number}", 1)) for number in range(len(text.parts))]


def _known(text: KernelText, kernel: Mapping[str, Any]) -> dict[str, Any]:
    """Return what heuristics are told of a kernel, or a part, with `kernel` in the midst of it."""
    facts = {
        "size_hints": {prefix: text.hints[prefix] for prefix, _ in text.dimensions},
        "tile_hint": _tile_hint(text),
        "reduction_hint": text.reduction_hint if text.kind in _WITH_ROWS else None,
        **kernel,
        **text.facts,
        "min_elem_per_thread": (
            text.elements if text.kind == "pointwise" and text.elements > 1 else None
        ),
    }
    return {name: value for name, value in facts.items() if value is not None}


def _declared(parameter: KernelParameter) -> str:
    """Return a parameter as the function has it: of a number with 64 bits the type, since Triton
    goes by the value else, unless that is a constant.
    """
    wide = {"i64": "tl.int64", "u64": "tl.uint64", "fp64": "tl.float64"}.get(parameter.type)
    if wide is None or _is_one(parameter):
        return parameter.name
    return f"{parameter.name}: {wide}"


def harness_text(text: KernelText) -> str:
    """Return the benchmark of a module, with a placeholder for the kernel's name; it alone needs
    torch, when it runs.
    """
    examples = "".join(
        f"        {0 if parameter.name.startswith('load_seed_offset') else example!r},\n"
        for parameter, example in zip(text.parameters, text.examples, strict=True)
    )
    return (
        f"\n\n{_HARNESS_IMPORT}\n\ndef get_args():\n    return random_arguments([\n{examples}   "
        f" ])\n\n\ndef call(args):\n    {_PLACEHOLDER}.run(*args)\n\n\ndef"
        f" benchmark_all_configs(args):\n    return candidate_times({_PLACEHOLDER}, args)\n\n\nif"
        f" __name__ == '__main__':\n    report(call, get_args(), {text.gigabytes!r})\n"
    )


def _unspecialized(text: KernelText) -> str:
    """Return what Triton's JIT is told not to look at: numbers that differ from launch to launch,
    since a bundle has the kernel once.
    """
    names = [
        p.name
        for p in text.parameters
        if (
            not p.type.startswith("*")
            if isinstance(p.outer, str)
            else not (p.fixed and p.outer.is_Integer)
        )
    ]
    return f"(do_not_specialize={names!r})" if names else ""


def _tile_hint(text: KernelText) -> str | None:
    if text.kind != "pointwise" or len(text.dimensions) != 2:  # noqa: PLR2004  # y and x
        return None
    # One input, one output and two numels are a transposition, whose tiles should be square.
    return "SQUARE" if len(text.parameters) == 4 else "DEFAULT"  # noqa: PLR2004


def triton_meta(text: KernelText) -> dict[str, Any]:
    """Return what Triton is told: types, constants and attributes, without the device, which a
    build or a launch chooses.
    """
    signature = {parameter.name: parameter.type for parameter in text.parameters}
    # Triton's JIT makes a constant of an integer that is 1; a build ahead of time has to agree.
    constants = {p.name: 1 for p in text.parameters if _is_one(p)}
    signature |= dict.fromkeys([*constants, *text.blocks], "constexpr")
    aligned = {
        (n,): [["tt.divisibility", 16]]
        for n, p in enumerate(text.parameters)
        if p.aligned and p.name not in constants
    }
    return {"signature": signature, "constants": constants, "configs": [aligned]}


def _is_one(parameter: KernelParameter) -> bool:
    return parameter.fixed and not isinstance(parameter.outer, str) and parameter.outer == 1


def _grid_type(text: KernelText) -> str:
    if text.parts:
        return _IN_TURN if text.in_turn else _COMBINED
    if text.kind in {"product", "attention"}:
        return PRODUCT_GRID
    if "rsplit_size" in text.facts:
        return "MixOrderReductionGrid"
    if text.workspaces:
        return COOPERATIVE_GRID
    return _GRIDS[tuple(text.grid_sizes)]


def inductor_meta(text: KernelText) -> Mapping[str, Any]:
    """Return what heuristics and launches are told."""
    return {
        "grid_type": _grid_type(text),
        "kernel_name": _PLACEHOLDER,
        "mutated_arg_names": sorted(text.changed),
        "no_x_dim": False,
        "atomic_add_found": text.atomic,
        "assert_indirect_indexing": text.asserts,
        **text.counts,
        "kernel_num_gb": _GIGABYTES,
    }
