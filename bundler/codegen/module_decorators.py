# SPDX-License-Identifier: Apache-2.0
"""`heuristic`: the decorator of generated modules; it makes a `ModuleKernel`, which gets candidates
and a grid once the device is known.

Generated text is the same for every device.  A build asks a kernel for the candidates on its
target's device (`on`); a program that runs it asks for those of the device that it has (`run`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bundler.codegen.program_policy import ProgramPolicy
from bundler.compile.compile_job import Job, SourceRef
from bundler.format.cached_properties import cached_property
from bundler.format.entries import Target
from bundler.runtime import heuristics
from bundler.runtime.configs import Config, unique
from bundler.runtime.heuristics.combo_rules import SubKernel, combo_plan
from bundler.runtime.heuristics.facts import (
    Device,
    Facts,
    HeuristicKind,
    Policy,
    ReductionHint,
    Setting,
    TileHint,
)
from bundler.runtime.heuristics.launch_grids import COOPERATIVE_GRID, combined_parts, open_grid
from bundler.runtime.heuristics.product_rules import Operands
from bundler.runtime.heuristics.reduction_rules import cooperative_reduction_configs
from bundler.runtime.launch.drivers.driver import COOPERATIVE, Driver, all_at_once
from bundler.runtime.launch.drivers.driver_opening import open_first_driver
from bundler.runtime.tuning.autotuned_kernel import Launched
from bundler.runtime.tuning.benchmark import CudaClock
from bundler.runtime.tuning.heuristic_kernel import Candidates, HeuristicKernel
from bundler.runtime.tuning.multi_kernel import (
    MultiKernel,
    MultiKernelRecords,
    timed_on_clones,
)
from bundler.runtime.tuning.tuner_options import TunerOptions
from bundler.toolchain import tuner_toolchain as toolchain

Meta = Mapping[str, Any]
# Equal to `kernel_plan.LARGEST_BLOCK`: text leaves masks out where a size is a multiple of it.
_LARGEST_X = 4096
# So long torch measures each of several kernels that compute the same.
_REP_MS = 40.0
# The device whose candidates Triton's interpreter runs: large blocks, so fewer steps in Python.
_INTERPRETED = Device("cuda", multiprocessors=132, major=9)
# The same for a kernel whose programs wait for each other, which they cannot where they run one
# after the other: a row has one program there.
_INTERPRETED_ALONE = replace(_INTERPRETED, multiprocessors=1)
# Elements and warps of a program that shares a row: it has a multiprocessor for itself, and has to
# ask for as much memory at once as several programs do elsewhere.
_LONG_BLOCKS = ((8192, 16), (16384, 32))


def heuristic(
    kind: HeuristicKind,
    *,
    size_hints: Mapping[str, int],
    triton_meta: Meta,
    inductor_meta: Meta,
    tile_hint: str | None = None,
    reduction_hint: str | None = None,
    min_elem_per_thread: int = 0,
    add_persistent_rblock: bool = False,
    one_element_per_thread: bool = False,
    column_tiles: bool = False,
    operands: Operands | None = None,
    rsplit_size: int = 0,
    allow_multi_stages: bool = True,
    tma_min_blocks: Mapping[str, int] | None = None,
    row_products: bool = False,
    unmeasured: bool = False,
) -> Callable[[Any], ModuleKernel]:
    """Say what is known of a generated kernel.

    Args:
        kind: `pointwise`, `reduction`, `persistent_reduction`, `product` or `attention`.
        size_hints: prefix of a dimension -> power of two.
        triton_meta: types, constants and attributes of the parameters.
        inductor_meta: kind of grid, statistics, and parameters that are changed.
        tile_hint, reduction_hint: names of the heuristics' hints.
        min_elem_per_thread, add_persistent_rblock, one_element_per_thread, column_tiles,
            rsplit_size, allow_multi_stages, tma_min_blocks, row_products, unmeasured: as `Facts`
            has them.
        operands: what a product or attention multiplies.
    """
    facts = Facts(
        num_load=inductor_meta["num_load"],
        num_store=inductor_meta["num_store"],
        num_reduction=inductor_meta["num_reduction"],
        atomic_add=inductor_meta["atomic_add_found"],
        no_x_dim=inductor_meta["no_x_dim"],
        min_elem_per_thread=min_elem_per_thread,
        add_persistent_rblock=add_persistent_rblock,
        one_element_per_thread=one_element_per_thread,
        column_tiles=column_tiles,
        contiguous_row=reduction_hint != "OUTER",
        num_dynamic=sum(name.startswith("ks") for name in triton_meta["signature"]),
        max_xblock=_LARGEST_X,
        rsplit_size=rsplit_size,
        allow_multi_stages=allow_multi_stages,
        tma_min_blocks=tma_min_blocks or {},
        row_products=row_products,
        unmeasured=unmeasured,
        # Elements have two axes where memory runs along either, or where descriptors want them.
        crossed=kind == "pointwise" and {*size_hints} == {"x", "y"} and not tma_min_blocks,
    )

    def decorate(fn: Any) -> ModuleKernel:
        return ModuleKernel(
            fn,
            kind,
            dict(size_hints),
            facts,
            dict(triton_meta),
            dict(inductor_meta),
            tile_hint,
            reduction_hint,
            operands,
        )

    return decorate


def combination(
    *parts: Meta, triton_meta: Meta, inductor_meta: Meta
) -> Callable[[Any], ModuleKernel]:
    """Say what is known of a kernel that computes several things side by side.

    Args:
        *parts: of each part its `kind`, and what `heuristic` is told of such a kernel, counts
            among it; `members` as `SubKernel` has it.
        triton_meta, inductor_meta: as `heuristic` has them, of the whole.
    """
    found = tuple(map(_part, parts))

    def decorate(fn: Any) -> ModuleKernel:
        reduces = any(part.kind != "pointwise" for part in found)
        kind: HeuristicKind = "reduction" if reduces else "pointwise"
        return ModuleKernel(
            fn, kind, {}, Facts(), dict(triton_meta), dict(inductor_meta), parts=found
        )

    return decorate


def _part(known: Meta) -> SubKernel:
    facts = dict(known)
    kind, hints = facts.pop("kind"), facts.pop("size_hints")
    reduction_hint = ReductionHint[facts.pop("reduction_hint", "DEFAULT")]
    members = facts.pop("members", None)
    known_facts = Facts(**facts, max_xblock=_LARGEST_X)
    return SubKernel(kind, hints, known_facts, reduction_hint, members=members)


@dataclass(eq=False)
class ModuleKernel:
    """A kernel of a generated module.

    Attributes:
        fn: what `@triton.jit` made.
        kind: of its heuristic.
        size_hints: prefix of a dimension -> power of two.
        facts: what is known of it.
        triton_meta, inductor_meta: as its module has them.
        tile_hint, reduction_hint: names of the heuristics' hints.
        operands: what a product or attention multiplies.
        parts: of a combination, what is known of each.
    """

    fn: Any
    kind: HeuristicKind
    size_hints: Mapping[str, int]
    facts: Facts
    triton_meta: Meta
    inductor_meta: Meta
    tile_hint: str | None = None
    reduction_hint: str | None = None
    operands: Operands | None = None
    parts: tuple[SubKernel, ...] = ()
    # By the number of the device; None stands for the interpreter.
    _made: dict[int | None, HeuristicKernel] = field(default_factory=dict, repr=False)
    # By the number of the device and the names of the others.
    _several: dict[tuple[int | str, ...], MultiKernel] = field(default_factory=dict, repr=False)

    @property
    def policy(self) -> ProgramPolicy:
        """How it gets its configuration."""
        return ProgramPolicy.of(self.inductor_meta)

    @property
    def compile_options(self) -> dict[str, Any]:
        """Options of the compiler beside those of a candidate."""
        # Triton keeps assertions only in a debug build, which by itself also checks for overflow.
        asserts = self.inductor_meta["assert_indirect_indexing"]
        return {
            **({"debug": True, "sanitize_overflow": False} if asserts else {}),
            **({COOPERATIVE: True} if self.shares_rows else {}),
        }

    @property
    def shares_rows(self) -> bool:
        """Whether its programs share rows, and wait for each other."""
        return bool(self.inductor_meta["grid_type"] == COOPERATIVE_GRID)

    def on(
        self,
        device: Device,
        policy: Policy | None = None,
        options: TunerOptions | None = None,
        source: SourceRef | None = None,
    ) -> HeuristicKernel:
        """Return the kernel with candidates and grid for a device.

        Args:
            device: that it will run on.
            policy: for the heuristics; None takes that of its own policy.
            options: of its tuner.
            source: where another process finds it.
        """
        wanted, options = self.policy, options or TunerOptions()
        setting = Setting(device, self.facts, policy or wanted.candidates)
        if options.gigabytes is None:
            options = replace(options, gigabytes=self.inductor_meta["kernel_num_gb"])
        # A thread has to hold several elements for some conversions, which descent does not know.
        if options.descent is None and not self.facts.min_elem_per_thread:
            options = replace(options, descent=wanted.descent)
        launch: dict[str, Any] = {
            "mutated": self.inductor_meta["mutated_arg_names"],
            "constants": self.triton_meta["constants"],
            "options": options,
            "compile_options": self.compile_options,
            "grid": self.inductor_meta["grid_type"],
            "source": source,
        }
        if self.parts:
            grid = open_grid(launch.pop("grid"), combined_parts(self.triton_meta["signature"]))
            plan = combo_plan(self.parts, setting)
            # Each candidate of a part is a compile of all parts, so they are tried where asked for.
            tried = plan if setting.policy.max_autotune else None
            found = Candidates(self.kind, (plan.base,), setting, combo=tried)
            return HeuristicKernel(self.fn, found, grid, **launch)
        if self.shares_rows:
            del launch["grid"]
            found = Candidates("reduction", self._shared(setting), setting, dict(self.size_hints))
            return HeuristicKernel(self.fn, found, open_grid(COOPERATIVE_GRID, {}), **launch)
        if setting.policy.max_autotune:
            # All of a kind lack some that its sizes suggest.
            launch["first"] = self.on(device, Policy()).configs
        if self.kind == "pointwise":
            hint = TileHint[self.tile_hint or "DEFAULT"]
            return heuristics.pointwise(self.size_hints, setting, tile_hint=hint, **launch)(self.fn)
        if self.operands is not None:
            template = heuristics.attention if self.kind == "attention" else heuristics.product
            return template(self.size_hints, setting, operands=self.operands, **launch)(self.fn)
        decorator = (
            heuristics.reduction if self.kind == "reduction" else heuristics.persistent_reduction
        )
        decorated = decorator(
            self.size_hints, setting, hint=ReductionHint[self.reduction_hint or "DEFAULT"], **launch
        )
        return decorated(self.fn)

    def _shared(self, setting: Setting) -> tuple[Config, ...]:
        """Return the candidates of a kernel whose programs share rows; none has more programs than
        the device has multiprocessors.
        """
        hint = ReductionHint[self.reduction_hint or "DEFAULT"]
        found = cooperative_reduction_configs(self.size_hints, setting, hint=hint)
        shares = int(found[0].kwargs["RSPLIT"])
        part = max(self.size_hints["r0_"] // shares, 1)
        blocks = {"XBLOCK": 1, "RSPLIT": shares}
        long = [
            Config({**blocks, "R0_BLOCK": min(block, part)}, num_warps=warps, num_stages=1)
            for block, warps in _LONG_BLOCKS
        ]
        configs = unique([*long, *found])
        return tuple(configs[:1] if setting.policy.deterministic else configs)

    def run_at_once(self, rows: int) -> bool:
        """Whether all programs of a launch run at once on the current device, whichever candidate
        it is, so that they may wait for each other.
        """
        if self.is_interpreted:
            return False
        driver = _driver()
        grids = (self.here().grid(one.kwargs, {"xnumel": rows}) for one in self.here().configs)
        return all_at_once(driver.backend, driver.properties(driver.device()), grids)

    def run(self, *args: Any) -> None:
        """Launch on the current device, tuned at the first call; in Triton's interpreter run the
        first candidate.
        """
        self.bound()(*args)

    def jobs(self, text: str) -> list[Job]:
        """Return the compiles that a first launch on the current device needs, one for each
        candidate; none where it was launched, or asked for, before, since programs share kernels.

        Args:
            text: of the kernel's module.

        Raises:
            ConfigError: the arguments do not fit the function.
        """
        number = _driver().device()
        if number in self._made:
            return []
        source = SourceRef("text", self.fn.__name__, data=text.encode())
        # No workers of its own: what is compiled ahead, it finds in Triton's cache.
        kernel = self.on(current_device(), options=TunerOptions(workers=1), source=source)
        found = kernel.jobs(self.argument_specs, current_target())
        self._made[number] = kernel
        return found

    @property
    def argument_specs(self) -> dict[str, str]:
        """What Triton's JIT would see in a call, as specs: a type, and that it is a multiple of 16
        or one.
        """
        meta = self.triton_meta
        aligned = {place for (place,) in meta["configs"][0]}
        found = {}
        for place, (name, kind) in enumerate(meta["signature"].items()):
            if name in meta["constants"]:
                found[name] = "i32:1"
            elif kind != "constexpr":
                found[name] = f"{kind}:16" if place in aligned else kind
        return found

    def bound(self) -> Callable[..., None]:
        """Return what does as `run`, as long as the current device is the same."""
        kernel = self.here()
        return functools.partial(_interpret, kernel) if self.is_interpreted else kernel

    def bound_among(
        self, others: Mapping[str, tuple[ModuleKernel, Sequence[int]]]
    ) -> Callable[..., None]:
        """Return what does as `run` by whichever is fastest of this kernel and others, which the
        first call measures unless a record tells; as long as the current device is the same.

        Args:
            others: by name, each with the places of its arguments among those of a call.
        """
        if not others or self.is_interpreted:
            return self.bound()
        key = (_driver().device(), *others)
        if key not in self._several:
            name = self.fn.__name__
            made = {name: self.here(), **{k: one.here() for k, (one, _) in others.items()}}
            self._several[key] = MultiKernel(
                name,
                {kernel: one.run for kernel, one in made.items()},
                _time_on_clones,
                arguments={kernel: places for kernel, (_, places) in others.items()},
                records=MultiKernelRecords(name, made, made[name].tuned.options),
            )
        return self._several[key]

    def fastest(
        self, forms: Mapping[str, Callable[..., None]], kernels: Mapping[str, ModuleKernel]
    ) -> Callable[..., None]:
        """Return what does as whichever of several forms of this kernel's computation is faster,
        which the first call measures unless a record tells.

        Args:
            forms: name of a kernel -> what runs the form that has it, as often as wanted.
            kernels: all that the forms launch, by name.
        """
        name, made = self.fn.__name__, {kernel: one.here() for kernel, one in kernels.items()}
        records = MultiKernelRecords(name, made, made[name].tuned.options)
        found = MultiKernel(name, forms, _time_in_place, records=records)
        self._several[_driver().device(), *kernels] = found
        return found

    def launched(self) -> Launched | None:
        """Return how it was launched on the current device so far; None where it was not, or by
        Triton's interpreter, and as `AutotunedKernel.launched`.
        """
        made = None if self.is_interpreted else self._made.get(_driver().device())
        return None if made is None else made.launched()

    def here(self) -> HeuristicKernel:
        """Return the kernel for the current device, or for the interpreter."""
        number = None if self.is_interpreted else _driver().device()
        kernel = self._made.get(number)
        if kernel is None:
            kernel = self._made[number] = self.anew()
        return kernel

    def anew(self, options: TunerOptions | None = None) -> HeuristicKernel:
        """Return another one for the current device, or for the interpreter, which is tuned by
        itself.
        """
        interpreted = _INTERPRETED_ALONE if self.shares_rows else _INTERPRETED
        device = interpreted if self.is_interpreted else current_device()
        return self.on(device, options=options)

    @cached_property
    def is_interpreted(self) -> bool:
        """Whether it runs in Triton's interpreter."""
        return toolchain.interpreted(self.fn)


def _time_on_clones(kernel: Callable[..., Any], args: tuple[Any, ...]) -> float:
    """Return the milliseconds of a launch; the clock is made here, since it needs a GPU."""
    return timed_on_clones(CudaClock(rep_ms=_REP_MS))(kernel, args)


def _time_in_place(form: Callable[..., Any], args: tuple[Any, ...]) -> float:
    """Return the milliseconds of a form that may run again and again."""
    return CudaClock(rep_ms=_REP_MS).sample(lambda: form(*args), lambda: None).compared_ms


def _interpret(kernel: HeuristicKernel, *args: Any) -> None:
    kernel.run(*(toolchain.interpreted_double(a) if isinstance(a, float) else a for a in args))


@functools.lru_cache(maxsize=1)
def _driver() -> Any:
    return open_first_driver(("cuda", "hip"))


def current_driver() -> Driver:
    """Return what this process launches by."""
    driver: Driver = _driver()
    return driver


def current_target() -> Target:
    """Return what this process launches on as builds name it."""
    driver = _driver()
    return Target.parse(f"{driver.backend}:{driver.properties(driver.device()).arch}")


def current_device() -> Device:
    """Return the device that this process launches on."""
    driver = _driver()
    properties = driver.properties(driver.device())
    major = (
        int(properties.arch[:-1])
        if driver.backend == "cuda" and properties.arch.isdigit()
        else None
    )
    return Device(
        driver.backend,
        properties.multiprocessors,
        properties.warp_size,
        major,
        max_threads_per_block=properties.max_threads_per_block,
    )
