# SPDX-License-Identifier: Apache-2.0
"""What Inductor writes beside a kernel, read as the heuristics' own terms: device, facts, policy,
hints.

`setting_of`, `target_of`, `compile_options_of`, `tuner_options_of` and the functions beside them
each read one thing.  A generated kernel (`inductor_kernels.py`) calls them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from bundler.errors import ConfigError
from bundler.format.entries import Target
from bundler.runtime.heuristics.combo_rules import SubKernel
from bundler.runtime.heuristics.facts import (
    DEFAULT_SPLIT_SCAN_RBLOCK,
    DEFAULT_WARP_SIZE,
    Device,
    Facts,
    Policy,
    ReductionHint,
    Setting,
    TileHint,
)
from bundler.runtime.tuning.descent import Descent
from bundler.runtime.tuning.tuner_options import TunerOptions
from bundler.toolchain.argument_specs import NONE, Spec

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


def dynamic_sizes(triton_meta: Meta) -> int:
    """Return how many size arguments change from call to call."""
    return sum(_DYNAMIC_SIZE in name for name in triton_meta.get("signature", ()))


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
