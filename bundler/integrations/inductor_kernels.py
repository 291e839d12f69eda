# SPDX-License-Identifier: Apache-2.0
"""`GeneratedKernel`, and what stands for torch's heuristics while a generated module is imported;
each makes one.

`stand_ins` returns the stand-ins, which note in `TunerSettings` what they were told.
`inductor_generated.py` imports a generated module with them and returns its kernels; users launch
the `GeneratedKernel`.  What Inductor writes beside a kernel is read as the heuristics' own terms:
`setting_of`, `target_of`, `tuner_options_of` and the functions beside them each read one thing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from bundler.compile.compile_job import SourceRef
from bundler.compile.job_futures import CompileFuture
from bundler.compile.service import CompileService
from bundler.errors import ConfigError
from bundler.format.entries import Target
from bundler.runtime.configs import (
    Config,
    fixed_configs,
    foreach_configs,
    template_configs,
    user_configs,
)
from bundler.runtime.heuristics.combo_rules import SubKernel, combo_plan
from bundler.runtime.heuristics.facts import (
    DEFAULT_SPLIT_SCAN_RBLOCK,
    DEFAULT_WARP_SIZE,
    Device,
    Facts,
    HeuristicKind,
    Policy,
    ReductionHint,
    Setting,
    SizeHints,
    TileHint,
)
from bundler.runtime.heuristics.launch_grids import Grid, open_grid
from bundler.runtime.heuristics.pointwise_rules import pointwise_configs
from bundler.runtime.heuristics.reduction_rules import (
    cooperative_reduction_configs,
    persistent_reduction_configs,
    reduction_configs,
    split_scan_configs,
)
from bundler.runtime.tuning.benchmark import Clock, GivenClock
from bundler.runtime.tuning.descent import Descent
from bundler.runtime.tuning.heuristic_kernel import Candidates, HeuristicKernel
from bundler.runtime.tuning.tuner_options import TunerOptions
from bundler.runtime.tuning.tuner_reports import BandwidthReport
from bundler.toolchain import tuner_toolchain as toolchain
from bundler.toolchain.argument_specs import NONE, Spec
from bundler.toolchain.compile_call import compile_function
from bundler.toolchain.encoding import encode_value
from bundler.toolchain.events import CompileEvent

# The same wish under the name that each release of torch gave it.
_ONE_ELEMENT = {"ONE_ELEMENT_PER_THREAD", "ELEMENTS_PER_WARP_32"}
_DETERMINISTIC = (
    "deterministic",
    "force_filter_reduction_configs",
    "are_deterministic_algorithms_enabled",
)
_MAX_AUTOTUNE = ("max_autotune", "max_autotune_pointwise")
_DYNAMIC_SIZE = "ks"  # in the names of size arguments that change from call to call

Meta = Mapping[str, Any]


def setting_of(triton_meta: Meta, inductor_meta: Meta, **facts: Any) -> Setting:
    """Return what a kernel's metadata says of device, kernel and wishes.

    Args:
        triton_meta: with the device.
        inductor_meta: statistics and wishes.
        facts: further fields of `Facts`, which the kernel's own decorator was given.

    Raises:
        ConfigError: there is no device in it, or a value has the wrong type.
    """
    try:
        known = facts_of(
            inductor_meta, native_matmul=bool(triton_meta.get("native_matmul")), **facts
        )
        return Setting(device_of(triton_meta), known, policy_of(inductor_meta))
    except (AttributeError, TypeError) as error:
        raise ConfigError(f"a generated kernel's metadata is odd: {error}") from error


def device_of(triton_meta: Meta) -> Device:
    """Return the device that a kernel was generated for; raises `ConfigError` without one."""
    given: Any = triton_meta.get("device")
    if not hasattr(given, "multi_processor_count"):
        raise ConfigError(f"a generated kernel's metadata has no device, but {given!r:.80}")
    return Device(
        given.type,
        given.multi_processor_count,
        getattr(given, "warp_size", None) or DEFAULT_WARP_SIZE,
        getattr(given, "major", None),
        getattr(given, "regs_per_multiprocessor", None),
        getattr(given, "max_threads_per_multi_processor", None),
        getattr(given, "max_threads_per_block", None),
    )


def target_of(triton_meta: Meta) -> Target:
    """Return the target that a kernel was generated for; raises `ConfigError` for one that is
    neither CUDA nor HIP.
    """
    device = device_of(triton_meta)
    arch = str(triton_meta["device"].cc)
    if device.type not in {"cuda", "hip"}:
        raise ConfigError(
            f"a kernel for {device.type!r} cannot be compiled here; expected 'cuda' or 'hip'"
        )
    return Target(device.type, arch.partition(":")[0], device.warp_size)


def facts_of(inductor_meta: Meta, **facts: Any) -> Facts:
    """Return what is known of a kernel."""
    get = inductor_meta.get
    hints = {getattr(hint, "name", str(hint)) for hint in get("autotune_hints") or ()}
    return Facts(
        num_load=get("num_load", 0),
        num_store=get("num_store", 0),
        num_reduction=get("num_reduction", 0),
        one_element_per_thread=bool(hints & _ONE_ELEMENT),
        atomic_add=bool(get("atomic_add_found")),
        no_x_dim=bool(get("no_x_dim")),
        contiguous_row=bool(get("has_loadstore_with_contiguous_rdim", True)),
        add_persistent_rblock=bool(get("add_persistent_rblock")),
        max_persistent_rblock=get("max_persistent_rblock", 0),
        tiling_scores=dict(get("tiling_scores") or {}),
        tma_min_blocks=dict(get("tma_min_block_sizes") or {}),
        min_xblock=get("min_xblock"),
        min_rblock=get("min_rblock"),
        rsplit_size=get("RSPLIT_SIZE") or 0,
        allow_multi_stages=bool(get("mix_order_reduction_allow_multi_stages", True)),
        min_split_scan_rblock=get("min_split_scan_rblock", DEFAULT_SPLIT_SCAN_RBLOCK),
        native_matmul_rblock=get("native_matmul_persistent_rblock"),
        **facts,
    )


def policy_of(inductor_meta: Meta) -> Policy:
    """Return the wishes of whoever had the kernel generated."""
    return Policy(
        max_autotune=any(bool(inductor_meta.get(name)) for name in _MAX_AUTOTUNE),
        autotune_pointwise=bool(inductor_meta.get("autotune_pointwise", True)),
        deterministic=any(bool(inductor_meta.get(name)) for name in _DETERMINISTIC),
        batch_invariant=bool(inductor_meta.get("batch_invariant")),
    )


def compile_options_of(triton_meta: Meta, inductor_meta: Meta) -> dict[str, Any]:
    """Return the compiler options of every config, as torch hands them over."""
    hip = device_of(triton_meta).is_hip
    options: dict[str, Any] = {
        "debug": bool(inductor_meta.get("assert_indirect_indexing", True)) and not hip,
        "sanitize_overflow": False,
    }
    if "enable_fp_fusion" in triton_meta:
        options["enable_fp_fusion"] = bool(triton_meta["enable_fp_fusion"])
    if not hip:
        options |= {
            name: bool(triton_meta.get(name)) for name in ("launch_cooperative_grid", "launch_pdl")
        }
        if triton_meta.get("disable_ftz"):
            options["enable_reflect_ftz"] = False
    return options


def tuner_options_of(inductor_meta: Meta, told: TunerOptions, *, custom: bool) -> TunerOptions:
    """Return what the user told the tuner, with what torch was told where the user said nothing.

    Raises:
        ConfigError: torch was told to keep binaries (`store_cubin`), and the user did not say
            where.
    """
    get, descent, reuse = inductor_meta.get, told.descent, told.reuse
    if descent is None and get("coordinate_descent_tuning"):
        radius = get("coordinate_descent_search_radius") or 1
        descent = Descent(
            radius, all_directions=bool(get("coordinate_descent_check_all_directions"))
        )
    local = not get("force_disable_caches") and bool(get("autotune_local_cache", True))
    if get("force_disable_caches"):
        reuse = "none"
    elif not local and reuse == "all":
        reuse = "bundle"
    if get("store_cubin") and told.export is None:
        raise ConfigError(
            f"{get('kernel_name', 'a kernel')}: was generated with store_cubin, and nobody said"
            " where to; give TunerOptions(export=DIRECTORY)",
            name="store_cubin",
        )
    return replace(
        told,
        descent=descent,
        reuse=reuse,
        record=told.record and local,
        custom=custom if told.custom is None else told.custom,
        spill_threshold=(
            get("spill_threshold") if told.spill_threshold is None else told.spill_threshold
        ),
        rescale=told.rescale and bool(get("dynamic_scale_rblock", True)),
        stage_to_host=told.stage_to_host and bool(get("optimize_mem", True)),
        gigabytes=get("kernel_num_gb") if told.gigabytes is None else told.gigabytes,
        hook_args=get("config_args") if told.hook_args is None else told.hook_args,
    )


def bandwidth_of(inductor_meta: Meta) -> tuple[str | None, str | None] | None:
    """Return (file, pattern of names) of the report that torch was told to write; None where it was
    told nothing.
    """
    if not inductor_meta.get("profile_bandwidth"):
        return None
    # An empty text is torch's way to say "all kernels" and "no file".
    return (
        inductor_meta.get("profile_bandwidth_output") or None,
        inductor_meta.get("profile_bandwidth_regex") or None,
    )


def arguments_of(triton_meta: Meta, parameters: Sequence[str], constants: Meta) -> dict[str, Spec]:
    """Return the arguments of the calls that a kernel was generated for: name -> spec, without
    those that are constants.

    Raises:
        ConfigError: the metadata is for a Triton before 3.3, or an argument cannot be described.
    """
    attributes = (triton_meta.get("configs") or [{}])[0]
    if not isinstance(attributes, Mapping):
        raise ConfigError(
            "a generated kernel's metadata is for a Triton before 3.3; have torch generate it anew"
        )
    fixed, hip = triton_meta.get("constants") or {}, device_of(triton_meta).is_hip
    found: dict[str, Spec] = {}
    for number, name in enumerate(parameters):
        kind = triton_meta["signature"].get(name)
        if kind is None or name in constants:
            continue
        if kind == "constexpr":
            # torch makes a constant of None and of 1, as the JIT does when it gets them.
            if name in fixed and fixed[name] in {None, 1}:
                found[name] = NONE if fixed[name] is None else "i32:1"
            continue
        known = {item[0] for item in attributes.get((number,), ())}
        aligned = ":16" if "tt.divisibility" in known and kind[0] in "*iu" else ""
        found[name] = (
            f"{kind}{aligned}{':large' if hip and kind[0] == '*' and 'tt.pointer_range' not in known else ''}"
        )
    return found


def reduction_hint_of(hint: Any) -> ReductionHint:
    """Return our hint for torch's; False and None are no hint."""
    name = getattr(hint, "name", hint)
    return (
        ReductionHint[name]
        if isinstance(name, str) and name in ReductionHint.__members__
        else ReductionHint.DEFAULT
    )


def tile_hint_of(hint: Any) -> TileHint:
    """Return our hint for torch's, or for its name."""
    name = str(getattr(hint, "name", hint)).removeprefix("TileHint.")
    return TileHint.SQUARE if name == "SQUARE" else TileHint.DEFAULT


def sub_kernels_of(inductor_meta: Meta, **facts: Any) -> tuple[SubKernel, ...]:
    """Return the kernels of a combination with blocks of their own; none for any other kernel.

    Raises:
        ConfigError: the metadata of a combination is incomplete.
    """
    combo = inductor_meta.get("combo_grid_meta") or {}
    if "heuristic_0" not in combo:
        return ()
    shared = {name: value for name, value in inductor_meta.items() if name != "combo_grid_meta"}
    try:
        return tuple(
            _sub_kernel(combo, shared, number, facts) for number in range(combo["num_kernels"])
        )
    except (KeyError, TypeError) as error:
        raise ConfigError(f"the metadata of a combination is incomplete: {error!r}") from error


def _sub_kernel(combo: Meta, shared: Meta, number: int, facts: Meta) -> SubKernel:
    kind = combo[f"heuristic_{number}"]
    own = facts_of(
        {**shared, **combo.get(f"inductor_meta_{number}", {})},
        **(facts if kind == "pointwise" else {}),
    )
    return SubKernel(
        kind,
        dict(combo[f"size_hints_{number}"]),
        own,
        reduction_hint_of(combo.get(f"reduction_hint_{number}")),
        tile_hint_of(combo.get(f"tile_hint_{number}")),
    )


# Inductor's own, where it measures with the profiler.
PROFILER_WARMUP_MS, PROFILER_REP_MS = 10, 40


class GeneratedKernel(HeuristicKernel):
    """A kernel that Inductor generated, with the candidates that our heuristics chose for it.

    Attributes:
        triton_meta, inductor_meta: what Inductor wrote beside it; plain data.
    """

    triton_meta: Meta
    inductor_meta: Meta

    def compile(
        self, config: Config, cache_dir: str | os.PathLike[str], target: Target | None = None
    ) -> CompileEvent:
        """Compile the kernel for a config; needs no GPU.

        Args:
            config: one of `configs`, or another.
            cache_dir: a cache directory of Triton's kind.
            target: what to compile for; None takes the target that the kernel was generated for.

        Raises:
            CompileFailed: with the compiler's message.
            ConfigError: the kernel was generated for a target or a Triton that we do not know.
        """
        meta = self.triton_meta
        constants = {**meta.get("constants", {}), **self.constants, **config.kwargs}
        place = {name: (number,) for number, name in enumerate(self.parameters)}
        attributes = (meta.get("configs") or [{}])[0]
        if not isinstance(attributes, Mapping):
            raise ConfigError(
                f"{self.__name__}: its metadata is for a Triton before 3.3; have torch generate it"
                " anew"
            )
        counts = {k: value for k, value in config.all_kwargs().items() if k not in config.kwargs}
        options = {**self.compile_options, **counts}
        return compile_function(
            self.fn,
            tuple(
                (name, encode_value(kind))
                for name, kind in meta["signature"].items()
                if name in place
            ),
            tuple(
                (place[name], encode_value(value))
                for name, value in constants.items()
                if name in place
            ),
            tuple((tuple(path), encode_value(value)) for path, value in attributes.items()),
            tuple((name, encode_value(value)) for name, value in options.items()),
            target or target_of(meta),
            os.fspath(cache_dir),
        )

    def compile_in(
        self,
        service: CompileService,
        arguments: Mapping[str, Spec] | None = None,
        target: Target | None = None,
    ) -> CompileFuture[HeuristicKernel]:
        """Compile every candidate in the workers of a service; arguments and target are those of
        the metadata unless they are given.
        """
        known = arguments_of(self.triton_meta, self.parameters, self.constants)
        chosen = target or target_of(self.triton_meta)
        return super().compile_in(service, known if arguments is None else arguments, chosen)


Decorator = Callable[[Any], GeneratedKernel]


@dataclass(frozen=True)
class TunerSettings:
    """What the user told the tuner of generated kernels, and where a worker finds them; the
    kernels' own metadata adds to it.
    """

    options: TunerOptions = field(default_factory=TunerOptions)
    clock: Callable[[], Clock] | None = None
    text: SourceRef | None = None
    reports: dict[tuple[str | None, str | None], BandwidthReport] = field(default_factory=dict)

    def report(self, inductor_meta: Meta) -> BandwidthReport | None:
        """Return the user's report, or the one that torch was told to write; kernels that are
        loaded together share it.
        """
        wanted = bandwidth_of(inductor_meta)
        if self.options.bandwidth is not None or wanted is None:
            return self.options.bandwidth
        if wanted not in self.reports:
            path, pattern = wanted
            self.reports[wanted] = BandwidthReport(path, pattern=pattern, lines=True)
        return self.reports[wanted]

    def clock_for(self, inductor_meta: Meta) -> Callable[[], Clock] | None:
        """Return what makes the user's clock, or the one that torch was told to measure bandwidth
        with; None for the GPU's own.
        """
        profiled = inductor_meta.get("profile_bandwidth_with_do_bench_using_profiling")
        if self.clock is not None or not (inductor_meta.get("profile_bandwidth") and profiled):
            return self.clock
        return lambda: GivenClock(toolchain.profiler_benchmark(PROFILER_WARMUP_MS, PROFILER_REP_MS))


def _decorator(
    settings: TunerSettings, heuristic: _Heuristic, given: Given, **facts: Any
) -> Decorator:
    """Return the decorator of one kernel: candidates by the heuristic, and the grid of its
    metadata.
    """
    triton_meta = dict(given.get("triton_meta") or {})
    inductor_meta = dict(given.get("inductor_meta") or {})
    hints: SizeHints = given.get("size_hints", {})
    custom = bool(given.get("custom_kernel"))
    setting = setting_of(triton_meta, inductor_meta, **facts)
    parts = sub_kernels_of(inductor_meta, **facts) if hints else ()
    if parts:
        grouping = bool(inductor_meta["combo_grid_meta"].get("autotune_grouping"))
        parameters = triton_meta.get("signature", ())
        plan = combo_plan(parts, setting, parameters=parameters, grouping=grouping)
        candidates = Candidates(heuristic.kind, (plan.base,), setting, combo=plan)
    else:
        configs = tuple(heuristic.choose(given, setting))
        candidates = Candidates(heuristic.kind, configs, setting, dict(hints))
    mutated = [*inductor_meta.get("mutated_arg_names", ()), *triton_meta.get("restore_value", ())]

    def decorate(fn: Any) -> GeneratedKernel:
        kernel = GeneratedKernel(
            fn,
            candidates,
            _grid(inductor_meta),
            mutated=mutated,
            zeroed=tuple(triton_meta.get("reset_to_zero", ())),
            constants=triton_meta.get("constants"),
            extra_arguments=tuple(inductor_meta.get("extra_launcher_args", ())),
            compile_options=compile_options_of(triton_meta, inductor_meta),
            options=replace(
                tuner_options_of(inductor_meta, settings.options, custom=custom),
                bandwidth=settings.report(inductor_meta),
            ),
            clock=settings.clock_for(inductor_meta),
            source=None if settings.text is None else replace(settings.text, function=fn.__name__),
        )
        kernel.triton_meta, kernel.inductor_meta = triton_meta, inductor_meta
        kernel.tuned.metadata = {"triton_meta": triton_meta, "inductor_meta": inductor_meta}
        return kernel

    return decorate


def _grid(inductor_meta: Meta) -> Grid:
    if "grid_type" not in inductor_meta:
        raise ConfigError(
            "a generated kernel's metadata has no grid_type; it comes from a torch before 2.7, make"
            " it anew"
        )
    return open_grid(str(inductor_meta["grid_type"]), inductor_meta)


Given = Mapping[str, Any]
Rules = Callable[..., Sequence[Config]]
_META = ("triton_meta", "filename", "inductor_meta")


def _hinted(rules: Rules) -> Callable[[Given, Setting], Sequence[Config]]:
    """Return rules for reductions with torch's sizes and torch's hint."""

    def choose(given: Given, setting: Setting) -> Sequence[Config]:
        hint = reduction_hint_of(given.get("reduction_hint", False))
        return rules(given["size_hints"], setting, hint=hint)

    return choose


def _pointwise(given: Given, setting: Setting) -> Sequence[Config]:
    hint = tile_hint_of(given.get("tile_hint"))
    return pointwise_configs(given["size_hints"], setting, tile_hint=hint)


def _cooperative(given: Given, setting: Setting) -> Sequence[Config]:
    persistent = bool(given["inductor_meta"].get("persistent_reduction"))
    return _hinted(partial(cooperative_reduction_configs, is_persistent=persistent))(given, setting)


def _template(given: Given, _setting: Setting) -> Sequence[Config]:
    return template_configs(
        given["num_stages"],
        given["num_warps"],
        num_consumer_groups=given.get("num_consumer_groups", 0),
        num_buffers_warp_spec=given.get("num_buffers_warp_spec", 0),
    )


class _Heuristic(NamedTuple):
    """One of torch's heuristics.

    Attributes:
        kind: what ours calls it.
        parameters: torch's, in torch's order; `filename` and the like say where torch keeps its
            results, and go unused.
        choose: returns the candidates, by what was given for the parameters.
        open: whether torch gives more than these, which goes unused.
    """

    kind: HeuristicKind
    parameters: tuple[str, ...]
    choose: Callable[[Given, Setting], Sequence[Config]]
    open: bool = False


_POINTWISE = (
    "size_hints",
    "triton_meta",
    "tile_hint",
    "filename",
    "min_elem_per_thread",
    "inductor_meta",
)
_REDUCTION = ("size_hints", "reduction_hint", *_META)
_SPECIALIZED = ("num_consumer_groups", "num_buffers_warp_spec", "filename", "inductor_meta")
_HEURISTICS: Mapping[str, _Heuristic] = {
    "pointwise": _Heuristic(
        "pointwise",
        _POINTWISE,
        _pointwise,
    ),
    "reduction": _Heuristic("reduction", _REDUCTION, _hinted(reduction_configs)),
    "persistent_reduction": _Heuristic(
        "persistent_reduction", _REDUCTION, _hinted(persistent_reduction_configs)
    ),
    "cooperative_reduction": _Heuristic("reduction", _REDUCTION, _cooperative),
    "split_scan": _Heuristic("split_scan", _REDUCTION, _hinted(split_scan_configs)),
    "template": _Heuristic(
        "template", ("num_stages", "num_warps", "triton_meta", *_SPECIALIZED), _template, open=True
    ),
    "fixed_config": _Heuristic(
        "fixed",
        ("config", "filename", "triton_meta", "inductor_meta"),
        lambda given, _: fixed_configs(given["config"]),
    ),
    "user_autotune": _Heuristic(
        "user_autotune",
        ("configs", *_META, "custom_kernel"),
        lambda given, _: user_configs(given["configs"]),
    ),
    "foreach": _Heuristic(
        "template",
        _META,
        lambda _, setting: foreach_configs(max_autotune=setting.policy.max_autotune),
    ),
}


def _stand_in(settings: TunerSettings, name: str, *args: Any, **named: Any) -> Decorator:
    """Return what one of torch's heuristics makes of what a generated module gives it."""
    heuristic = _HEURISTICS[name]
    given = {**dict(zip(heuristic.parameters, args, strict=False)), **named}
    odd = set(given) - set(heuristic.parameters)
    if len(args) > len(heuristic.parameters) or (odd and not heuristic.open):
        raise TypeError(f"{name}() was given what it does not know: {', '.join(sorted(odd))}")
    facts: dict[str, Any] = {}
    if name == "pointwise":
        facts["min_elem_per_thread"] = given.get("min_elem_per_thread", 0)
    elif name == "reduction":  # the other rules do not look at sizes that change
        signature = (given.get("triton_meta") or {}).get("signature", ())
        facts["num_dynamic"] = sum(_DYNAMIC_SIZE in name for name in signature)
    return _decorator(settings, heuristic, given, **facts)


def stand_ins(settings: TunerSettings) -> dict[str, Callable[..., Decorator]]:
    """Return a decorator for each of torch's heuristics, under torch's name and with torch's
    parameters.
    """
    return {name: partial(_stand_in, settings, name) for name in _HEURISTICS}
