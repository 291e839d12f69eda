# SPDX-License-Identifier: Apache-2.0
"""`loaded_kernels`: Inductor's kernels that are loaded in this process: their candidates, and the
configuration that tuning chose.

torch stores a graph before it tunes the kernels in it, so the stored entry holds every candidate
and no winner.  The winner is known to the live objects alone, once each kernel has run.

Recordings and sessions find the directories of such kernels with it, and `save` of the Inductor
integration their winners; its `load` calls `keep_winners`, with which torch tunes no kernel again
whose tuning result it has just read.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from bundler.package_loggers import logger
from bundler.toolchain import instances
from bundler.toolchain.events import kernel_key
from bundler.toolchain.inductor import inductor_caches

# The setting, as it stands in each kernel, that its configuration is refined by coordinate descent;
# and the mark that it was.
DESCENT, DESCENDED = "coordinate_descent_tuning", "found_by_coordesc"
# Kinds that torch does not refine, by the names of its HeuristicType.
_NOT_DESCENDED = {"TEMPLATE", "USER_AUTOTUNE", "FIXED"}


@dataclass(frozen=True)
class LoadedKernel:
    """One of Inductor's kernels.

    Attributes:
        identity: what tells it from others, here and in graph entries; see `identity_of`.
        device: index of the device it was loaded for.
        candidates: kernel keys of every configuration that was compiled, as far as torch still has
            them.
        winner: kernel key of the configuration that is launched from now on; None while that is not
            decided.
        result: torch's compile result of the winner in a form that can be pickled; None when it
            cannot be had.
    """

    identity: tuple[int, str]
    device: int
    candidates: frozenset[str]
    winner: str | None
    result: Any = field(default=None, repr=False)


def loaded_kernels() -> list[LoadedKernel]:
    """Return Inductor's kernels in this process, as far as `instances` knows them; nothing when
    torch compiled none.
    """
    # torch keeps copies of its tuners for the entries that it writes; those have no launchers.
    return [
        _read(found)
        for found in instances.instances(instances.INDUCTOR_TUNER)
        if found.compile_results and found.launchers
    ]


def loaded_directories() -> Iterator[str]:
    """Yield the directory of each kernel that Inductor loaded in this process, and of its
    candidates.

    torch launches many of them without asking Triton, so Triton's listener does not hear of them.
    Nothing where torch compiled none, or in a torch that we do not know.
    """
    if instances.INDUCTOR_TUNER.module not in sys.modules or inductor_caches.missing():
        return
    for kernel in loaded_kernels():
        for key in sorted(kernel.candidates):
            root = inductor_caches.kernel_root(key, [kernel.device])
            if root is not None:
                yield os.path.join(root, key)


def identity_of(autotuner: Any) -> tuple[int, str]:
    """Return what tells an autotuner from others: its device, and a digest of its source or,
    without one, its kernel key.

    The digest is the stem of its generated module.  Templates for products of matrices have none:
    torch decides before it generates them, so each has one configuration, and so one kernel key.
    """
    return device_of(autotuner), autotuner.kernel_hash or min(candidate_keys(autotuner))


def candidate_keys(autotuner: Any) -> frozenset[str]:
    """Return the kernel keys of an autotuner's compile results."""
    return frozenset(kernel_key(result.kernel.hash) for result in autotuner.compile_results)


def device_of(autotuner: Any) -> int:
    """Return the index of the device that an autotuner compiles for."""
    return int(autotuner.triton_meta.get("device") or 0)


def _read(autotuner: Any) -> LoadedKernel:
    launchers = autotuner.launchers
    launched = frozenset(launcher.cache_hash for launcher in launchers)
    settled = len(launchers) == 1 and _settled(autotuner, launchers[0].config)
    return LoadedKernel(
        identity=identity_of(autotuner),
        device=device_of(autotuner),
        candidates=candidate_keys(autotuner) | launched,
        winner=launchers[0].cache_hash if settled else None,
        result=_portable(autotuner, launchers[0]) if settled else None,
    )


def _settled(autotuner: Any, config: Any) -> bool:
    """Tell whether torch would tune no further at the next launch."""
    if not autotuner.inductor_meta.get(DESCENT, False) or getattr(config, DESCENDED, False):
        return True
    return getattr(autotuner.heuristic_type, "name", "") in _NOT_DESCENDED


def _portable(autotuner: Any, launcher: Any) -> Any:
    """Return the compile result behind a launcher, as it was before its binary was loaded; None for
    one with no static form.
    """
    static: Any = inductor_caches.find(inductor_caches.STATIC_RESULT_TYPE)
    kernel = getattr(launcher.__globals__.get("runner"), "__self__", None)
    results = [result for result in autotuner.compile_results if result.kernel is kernel]
    every_static = all(type(result) is static for result in autotuner.compile_results)
    if not every_static or not hasattr(kernel, "cubin_path"):
        return None
    # What coordinate descent found is kept by its launcher alone.
    meta = results[0].compile_meta if results else autotuner._create_compile_meta(launcher.config)  # noqa: SLF001
    return static(_unloaded(kernel), launcher.config, meta, autotuner.inductor_meta)


def _unloaded(kernel: Any) -> Any:
    """Copy a static kernel without what belongs to this process: module, function and path."""
    copy = object.__new__(type(kernel))
    copy.__dict__.update(kernel.__getstate__())
    copy.__dict__.pop("C_impl", None)
    copy.cubin_raw = None
    return copy


# The last step of building a kernel, in the process that launches it, also where a worker compiled
# it.
METHOD = inductor_caches.AUTOTUNER_TYPE + "._dynamic_scale_rblock"
RESULTS = "torch._inductor.runtime.autotune_cache:AutotuneCache.create"
READ = "torch._inductor.runtime.autotune_cache:AutotuneCache._read"
NEEDED = (METHOD, RESULTS, READ)
_OURS = "_bundler_keeps_winner"
_LOG = logger("bundler.toolchain")


def keep_winners() -> tuple[str, ...]:
    """Make torch launch what a tuning result names, and try nothing beside it; calling it again
    changes nothing.

    torch 2.11 halves the block of a reduction that uses many registers also when its configuration
    came from a tuning result: it compiles and tunes again.  And the mark that coordinate descent
    found a configuration is lost where it comes from a compile worker, since Triton drops it when
    it unpickles one: torch descends again.

    Returns:
        The names of what this torch does not have; with any of them nothing was changed.
    """
    missing = inductor_caches.missing(NEEDED)
    if not missing:
        kind = inductor_caches.find(inductor_caches.AUTOTUNER_TYPE)
        original = inductor_caches.find(METHOD)
        if not hasattr(original, _OURS):
            setattr(kind, original.__name__, _unless_found(original))
        instances.note_from_now_on()  # for `save`, later
    return missing


def _unless_found(original: Any) -> Any:
    @functools.wraps(original)
    def scale(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (getattr(self, "autotune_cache_info", None) or {}).get("autotune_cache_state") != "hit":
            return original(self, *args, **kwargs)
        if self.inductor_meta.get(DESCENT, False):
            _mark(self)
        return None

    setattr(scale, _OURS, True)
    return scale


def _mark(autotuner: Any) -> None:
    """Mark the one configuration that was found as what its record says."""
    try:
        cache = inductor_caches.find(RESULTS)(autotuner.inductor_meta, autotuner.filename, "")
        # torch has no other way
        record = cache._read() if cache is not None else None  # noqa: SLF001
        found = record is not None and bool(record.get(DESCENDED))
    except (OSError, AttributeError, TypeError, ValueError) as error:
        # The seam: the kernel is good without the mark, torch only tunes it again.
        _LOG.warning(
            "the tuning result of %s cannot be read again: %r", autotuner.kernel_hash, error
        )
        return
    for result in autotuner.compile_results if found else ():
        setattr(result.config, DESCENDED, True)
