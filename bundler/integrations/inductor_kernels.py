# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: ARG001  # the parameters are torch's, and it gives more than we need
"""`GeneratedKernel`, and what stands for torch's heuristics while a generated module is imported;
each makes one.

`stand_ins` returns the stand-ins, which note in `TunerSettings` what they were told.
`inductor_generated.py` imports a generated module with them and returns its kernels; users launch
the `GeneratedKernel`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from bundler.compile.compile_job import SourceRef
from bundler.compile.job_futures import CompileFuture
from bundler.compile.service import CompileService
from bundler.errors import ConfigError
from bundler.format.entries import Target
from bundler.integrations import inductor_metadata as metadata
from bundler.runtime.configs import Config
from bundler.runtime.heuristics.combo_rules import combo_plan
from bundler.runtime.heuristics.facts import HeuristicKind, Setting, SizeHints
from bundler.runtime.heuristics.given_configs import (
    fixed_configs,
    foreach_configs,
    template_configs,
    user_configs,
)
from bundler.runtime.heuristics.launch_grids import Grid, open_grid
from bundler.runtime.heuristics.persistent_rules import persistent_reduction_configs
from bundler.runtime.heuristics.pointwise_rules import pointwise_configs
from bundler.runtime.heuristics.reduction_rules import reduction_configs
from bundler.runtime.heuristics.split_rules import cooperative_reduction_configs, split_scan_configs
from bundler.runtime.tuning.benchmark import Clock, GivenClock
from bundler.runtime.tuning.heuristic_kernel import Candidates, HeuristicKernel
from bundler.runtime.tuning.tuner_options import TunerOptions
from bundler.runtime.tuning.tuner_reports import BandwidthReport
from bundler.toolchain import tuner_toolchain as toolchain
from bundler.toolchain.argument_specs import Spec
from bundler.toolchain.compile_call import compile_function
from bundler.toolchain.events import CompileEvent
from bundler.toolchain.keys.encoding import encode_value

Meta = Mapping[str, Any]
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
        counts = {
            name: value for name, value in config.all_kwargs().items() if name not in config.kwargs
        }
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
            target or metadata.target_of(meta),
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
        known = metadata.arguments_of(self.triton_meta, self.parameters, self.constants)
        chosen = target or metadata.target_of(self.triton_meta)
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
        wanted = metadata.bandwidth_of(inductor_meta)
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
    settings: TunerSettings,
    kind: HeuristicKind,
    choose: Callable[[Setting], Sequence[Config]],
    hints: SizeHints,
    triton_meta: Meta | None,
    inductor_meta: Meta | None,
    *,
    custom: bool = False,
    **facts: Any,
) -> Decorator:
    """Return the decorator of one kernel: candidates by `choose`, and the grid of its metadata."""
    triton_meta, inductor_meta = dict(triton_meta or {}), dict(inductor_meta or {})
    setting = metadata.setting_of(triton_meta, inductor_meta, **facts)
    parts = metadata.sub_kernels_of(inductor_meta, **facts) if hints else ()
    if parts:
        combo = inductor_meta["combo_grid_meta"]
        grouping = bool(combo.get("autotune_grouping"))
        plan = combo_plan(
            parts, setting, parameters=triton_meta.get("signature", ()), grouping=grouping
        )
        candidates = Candidates(kind, (plan.base,), setting, combo=plan)
    else:
        candidates = Candidates(kind, tuple(choose(setting)), setting, dict(hints))
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
            compile_options=metadata.compile_options_of(triton_meta, inductor_meta),
            options=replace(
                metadata.tuner_options_of(inductor_meta, settings.options, custom=custom),
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


# Under torch's names, with torch's parameters: `filename` and the like say where torch keeps its
# results, and go unused.


def _pointwise(
    settings: TunerSettings,
    size_hints: SizeHints,
    triton_meta: Meta,
    tile_hint: Any = None,
    filename: str | None = None,
    min_elem_per_thread: int = 0,
    inductor_meta: Meta | None = None,
) -> Decorator:
    hint = metadata.tile_hint_of(tile_hint)

    def choose(setting: Setting) -> Sequence[Config]:
        return pointwise_configs(size_hints, setting, tile_hint=hint)

    return _decorator(
        settings,
        "pointwise",
        choose,
        size_hints,
        triton_meta,
        inductor_meta,
        min_elem_per_thread=min_elem_per_thread,
    )


def _hinted(
    kind: HeuristicKind, rules: Callable[..., Sequence[Config]]
) -> Callable[..., Decorator]:
    """Return what stands in for one of torch's heuristics that take sizes and a hint for
    reductions.
    """

    def stand_in(
        settings: TunerSettings,
        size_hints: SizeHints,
        reduction_hint: Any = False,
        triton_meta: Meta | None = None,
        filename: str | None = None,
        inductor_meta: Meta | None = None,
    ) -> Decorator:
        hint = metadata.reduction_hint_of(reduction_hint)

        def choose(setting: Setting) -> Sequence[Config]:
            return rules(size_hints, setting, hint=hint)

        # Only the rules for reductions look at how many sizes change from call to call.
        facts: dict[str, Any] = {}
        if kind == "reduction":
            facts["num_dynamic"] = metadata.dynamic_sizes(triton_meta or {})
        return _decorator(settings, kind, choose, size_hints, triton_meta, inductor_meta, **facts)

    return stand_in


def _cooperative_reduction(
    settings: TunerSettings,
    size_hints: SizeHints,
    reduction_hint: Any,
    triton_meta: Meta,
    filename: str | None,
    inductor_meta: Meta,
) -> Decorator:
    hint, persistent = (
        metadata.reduction_hint_of(reduction_hint),
        bool(inductor_meta.get("persistent_reduction")),
    )

    def choose(setting: Setting) -> Sequence[Config]:
        return cooperative_reduction_configs(
            size_hints, setting, hint=hint, is_persistent=persistent
        )

    return _decorator(settings, "reduction", choose, size_hints, triton_meta, inductor_meta)


def _template(
    settings: TunerSettings,
    num_stages: int,
    num_warps: int,
    triton_meta: Meta,
    num_consumer_groups: int = 0,
    num_buffers_warp_spec: int = 0,
    filename: str | None = None,
    inductor_meta: Meta | None = None,
    **_unused: Any,
) -> Decorator:
    configs = template_configs(
        num_stages,
        num_warps,
        num_consumer_groups=num_consumer_groups,
        num_buffers_warp_spec=num_buffers_warp_spec,
    )
    return _decorator(
        settings, "template", lambda _setting: configs, {}, triton_meta, inductor_meta
    )


def _fixed_config(
    settings: TunerSettings,
    config: Meta,
    filename: str | None,
    triton_meta: Meta,
    inductor_meta: Meta,
) -> Decorator:
    return _decorator(
        settings, "fixed", lambda _setting: fixed_configs(config), {}, triton_meta, inductor_meta
    )


def _user_autotune(
    settings: TunerSettings,
    configs: Sequence[Meta],
    triton_meta: Meta,
    filename: str | None = None,
    inductor_meta: Meta | None = None,
    custom_kernel: bool = False,
) -> Decorator:
    chosen = user_configs(configs)
    return _decorator(
        settings,
        "user_autotune",
        lambda _setting: chosen,
        {},
        triton_meta,
        inductor_meta,
        custom=custom_kernel,
    )


def _foreach(
    settings: TunerSettings,
    triton_meta: Meta,
    filename: str | None = None,
    inductor_meta: Meta | None = None,
) -> Decorator:
    return _decorator(
        settings,
        "template",
        lambda setting: foreach_configs(setting.policy),
        {},
        triton_meta,
        inductor_meta,
    )


_STAND_INS: Mapping[str, Callable[..., Decorator]] = {
    "pointwise": _pointwise,
    "reduction": _hinted("reduction", reduction_configs),
    "persistent_reduction": _hinted("persistent_reduction", persistent_reduction_configs),
    "cooperative_reduction": _cooperative_reduction,
    "split_scan": _hinted("split_scan", split_scan_configs),
    "template": _template,
    "fixed_config": _fixed_config,
    "user_autotune": _user_autotune,
    "foreach": _foreach,
}


def stand_ins(settings: TunerSettings) -> dict[str, Callable[..., Decorator]]:
    """Return a decorator for each of torch's heuristics, under torch's name and with torch's
    parameters.
    """
    return {name: partial(stand_in, settings) for name, stand_in in _STAND_INS.items()}
