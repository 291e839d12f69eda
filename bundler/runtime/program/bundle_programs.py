# SPDX-License-Identifier: Apache-2.0
"""`load_program`: a program of a bundle, its plan read and checked, its kernels launched statically.

    program = bundler.runtime.load_program("model.tbundle", memory=memory)
    (output,) = program(x, weight)

No compiler and no Triton is needed, and no torch unless the memory is torch's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from bundler.errors import CannotLaunchStatically, FormatError, NotFound, Untrusted
from bundler.format.bundle import Bundle
from bundler.format.entries import Opaque
from bundler.format.launch_spec import TuningRecord
from bundler.format.opaque_files import is_code_path, program_name
from bundler.runtime.heuristics.launch_grids import LaunchGrid, open_grid
from bundler.runtime.launch.bundle_kernels import Kernels, load
from bundler.runtime.launch.drivers.driver import Driver
from bundler.runtime.launch.static_kernel import StaticKernel
from bundler.runtime.program.allowed_operators import unlisted
from bundler.runtime.program.checked_memory import CheckedMemory
from bundler.runtime.program.graph_replay import GraphRunner
from bundler.runtime.program.plan_reading import read_plan
from bundler.runtime.program.program_plan import (
    KernelChoice,
    KernelEntry,
    OperatorStep,
    ProgramPlan,
)
from bundler.runtime.program.run import ProgramMemory, ProgramRunner
from bundler.runtime.program.seed_stream import SeedStream
from bundler.trust.admission import admit


def load_program(
    bundle: Bundle | str | os.PathLike[str],
    *,
    memory: ProgramMemory,
    name: str | None = None,
    driver: Driver | None = None,
    constants: Mapping[str, Any] | None = None,
    seed: int | None = None,
    trust: Literal["kernels", "code", "signed"] = "kernels",
    graphs: bool = False,
) -> ProgramRunner:
    """Return a program of a bundle, ready to run without a compiler.

    Args:
        bundle: an open bundle, or the path of one.
        memory: where its tensors come from.
        name: of the program; None where the bundle has one only.
        driver: which GPUs to use; None opens that of the machine.
        constants: tensors that the program holds, by name.
        seed: of its random numbers: equal seeds give equal numbers in the first call, in the
            second, and so on. None: other numbers in each process.
        trust: `code` for a program that calls operators of your own or of other libraries, which
            run on the CPU and do what they like; `signed` where a trusted key has to vouch for
            that.
        graphs: launch repeated calls as one CUDA graph each, where that can be done and nobody has
            results that it would write over; the memory is a `TorchMemory` then.

    Raises:
        ConfigError: graphs of a memory that is not torch's.
        NotFound: the bundle has no such program, none of its kernels is for the device, or no
            library registers an operator that it calls.
        FormatError, DigestMismatch: the bundle or the plan in it is damaged.
        Untrusted: it calls operators that need trust in code, or a signature is required that is
            not there.
    """
    opened = bundle if isinstance(bundle, Bundle) else Bundle.load(bundle)
    entry, code = _plan_of(opened, name)
    if code and admit(opened, trust).trust != "code":
        raise Untrusted(
            f"program {program_name(entry.path)!r}: it calls operators that run as code of their"
            " own; pass trust='code' if you know who made the bundle, or trust='signed' where a"
            " key that you trust signed it for code",
            path=entry.path,
        )
    plan = read_plan(opened.read(entry.artifact))
    others = () if code else unlisted(plan)
    if others:
        raise Untrusted(
            f"program {program_name(entry.path)!r}: {', '.join(others[:8])}: expected operators"
            " that any program may call; build the program anew with this version, which marks it"
            " as code",
            operators=others,
        )
    _find_operators(plan, memory)
    checked = CheckedMemory(memory, trusted=code)
    seeds = SeedStream(memory, seed)
    runner = GraphRunner if graphs else ProgramRunner
    if not plan.kernels:  # it returns inputs, views of them, and what operators give
        admit(opened)
        return runner(plan, _launch_nothing, checked, constants, seeds)
    launch = StaticLauncher(plan, load(opened, driver=driver), opened.tuning_records)
    return runner(plan, launch, checked, constants, seeds)


def _plan_of(bundle: Bundle, name: str | None) -> tuple[Opaque, bool]:
    """Return the file of a program's plan, and whether it is marked as code."""
    plans: dict[str, list[Opaque]] = {}
    for entry in bundle.opaque:
        found = program_name(entry.path)
        if found is not None:
            plans.setdefault(found, []).append(entry)
    chosen = name if name is not None else next(iter(plans)) if len(plans) == 1 else ""
    if chosen not in plans:
        raise NotFound(
            f"no program {name or ''!r} in the bundle; there are"
            f" {', '.join(sorted(plans)) or 'none'}",
            name=name,
        )
    entry, *others = plans[chosen]
    if others:
        raise FormatError(
            f"program {chosen!r}: expected one plan in the bundle, got {entry.path} and "
            f"{others[0].path}",
            path=others[0].path,
        )
    return entry, is_code_path(entry.path)


def _find_operators(plan: ProgramPlan, memory: Any) -> None:
    """Raise `NotFound` where a plan calls an operator that torch does not have now."""
    find = getattr(memory, "operator", None)
    if find is not None:
        for name in dict.fromkeys(s.operator for s in plan.steps if isinstance(s, OperatorStep)):
            find(name)


def _launch_nothing(name: str, _arguments: Sequence[Any], _sizes: Mapping[str, int]) -> None:
    raise NotFound(f"{name}: the program has no kernels", name=name)


class StaticLauncher:
    """Launches a plan's kernels from a bundle, each with the candidate for the current device.

    Args:
        plan: of the program.
        kernels: of the bundle.
        records: of kernels that were tuned, which choose among the candidates that a kernel was
            compiled with; without one for a kernel, and for the current device, the first is
            launched.
    """

    def __init__(
        self, plan: ProgramPlan, kernels: Kernels, records: Sequence[TuningRecord] = ()
    ) -> None:
        self._entries, self._kernels, self._records = plan.kernels, kernels, records
        self._driver = kernels.driver
        self._grids = {name: open_grid(entry.grid, {}) for name, entry in plan.kernels.items()}

    def bound(self, name: str, sizes: Mapping[str, int]) -> Callable[..., None]:
        """Return what launches a kernel with the grid of some sizes, given its arguments."""
        current_device = self._driver.device
        known: dict[int, tuple[StaticKernel, LaunchGrid, dict[str, Any]]] = {}

        def launch(*arguments: Any) -> None:
            device = current_device()
            found = known.get(device)
            if found is None:
                found = known[device] = self._on(name, device, sizes)
            kernel, grid, keywords = found
            if 0 not in grid:
                kernel[grid](*arguments, **keywords)

        return launch

    def _on(
        self, name: str, device: int, sizes: Mapping[str, int]
    ) -> tuple[StaticKernel, LaunchGrid, dict[str, Any]]:
        """Return a kernel, its grid, and its blocks and options on a device."""
        target = f"{self._driver.backend}:{self._driver.properties(device).arch}"
        choice = _choice(name, self._entries[name], target, self._records)
        keywords = {
            **choice.blocks,
            "num_warps": choice.num_warps,
            "num_stages": choice.num_stages,
            **choice.options,
        }
        return self._kernels[name], self._grids[name](choice.blocks, sizes), keywords


def _choice(
    name: str, entry: KernelEntry, target: str, records: Sequence[TuningRecord]
) -> KernelChoice:
    """Return the candidate that a record of this kernel's source on such a device names, else the
    first.
    """
    choices = entry.choices.get(target)
    if not choices:
        raise CannotLaunchStatically(
            f"{name}: the program was built for {', '.join(entry.choices) or 'no target'}, not for"
            f" {target}; build it with --target {target}",
            kernel=name,
            target=target,
        )
    for record in records:
        parts = dict(record.parts)
        if (
            entry.source
            and parts.get("source") == entry.source
            and target in parts.get("device", "").split(", ")
        ):
            config = {key: value.plain() for key, value in record.config}
            for choice in choices:
                wanted = {
                    **choice.blocks,
                    "num_warps": choice.num_warps,
                    "num_stages": choice.num_stages,
                }
                wanted |= {f"option.{key}": value for key, value in choice.options.items()}
                if all(config.get(key) == value for key, value in wanted.items()):
                    return choice
    return choices[0]
