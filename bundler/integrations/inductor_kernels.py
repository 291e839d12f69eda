# SPDX-License-Identifier: Apache-2.0
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
from typing import Any, NamedTuple

from bundler.compile.compile_job import SourceRef
from bundler.compile.job_futures import CompileFuture
from bundler.compile.service import CompileService
from bundler.errors import ConfigError
from bundler.format.entries import Target
from bundler.integrations import inductor_metadata as metadata
from bundler.runtime.configs import (
    Config,
    fixed_configs,
    foreach_configs,
    template_configs,
    user_configs,
)
from bundler.runtime.heuristics.combo_rules import combo_plan
from bundler.runtime.heuristics.facts import HeuristicKind, Setting, SizeHints
from bundler.runtime.heuristics.launch_grids import Grid, open_grid
from bundler.runtime.heuristics.pointwise_rules import pointwise_configs
from bundler.runtime.heuristics.reduction_rules import (
    cooperative_reduction_configs,
    persistent_reduction_configs,
    reduction_configs,
    split_scan_configs,
)
from bundler.runtime.tuning.benchmark import Clock, GivenClock
from bundler.runtime.tuning.heuristic_kernel import Candidates, HeuristicKernel
from bundler.runtime.tuning.tuner_options import TunerOptions
from bundler.runtime.tuning.tuner_reports import BandwidthReport
from bundler.toolchain import tuner_toolchain as toolchain
from bundler.toolchain.argument_specs import Spec
from bundler.toolchain.compile_call import compile_function
from bundler.toolchain.encoding import encode_value
from bundler.toolchain.events import CompileEvent

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
    settings: TunerSettings, heuristic: _Heuristic, given: Given, **facts: Any
) -> Decorator:
    """Return the decorator of one kernel: candidates by the heuristic, and the grid of its
    metadata.
    """
    triton_meta = dict(given.get("triton_meta") or {})
    inductor_meta = dict(given.get("inductor_meta") or {})
    hints: SizeHints = given.get("size_hints", {})
    custom = bool(given.get("custom_kernel"))
    setting = metadata.setting_of(triton_meta, inductor_meta, **facts)
    parts = metadata.sub_kernels_of(inductor_meta, **facts) if hints else ()
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


Given = Mapping[str, Any]
Rules = Callable[..., Sequence[Config]]
_META = ("triton_meta", "filename", "inductor_meta")


def _hinted(rules: Rules) -> Callable[[Given, Setting], Sequence[Config]]:
    """Return rules for reductions with torch's sizes and torch's hint."""

    def choose(given: Given, setting: Setting) -> Sequence[Config]:
        hint = metadata.reduction_hint_of(given.get("reduction_hint", False))
        return rules(given["size_hints"], setting, hint=hint)

    return choose


def _pointwise(given: Given, setting: Setting) -> Sequence[Config]:
    hint = metadata.tile_hint_of(given.get("tile_hint"))
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
        facts["num_dynamic"] = metadata.dynamic_sizes(given.get("triton_meta") or {})
    return _decorator(settings, heuristic, given, **facts)


def stand_ins(settings: TunerSettings) -> dict[str, Callable[..., Decorator]]:
    """Return a decorator for each of torch's heuristics, under torch's name and with torch's
    parameters.
    """
    return {name: partial(_stand_in, settings, name) for name in _HEURISTICS}
