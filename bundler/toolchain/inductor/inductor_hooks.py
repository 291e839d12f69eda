# SPDX-License-Identifier: Apache-2.0
"""`keep_winners`: keeps torch from tuning a kernel again whose tuning result it has just read.

`bundler.integrations.inductor.load` calls it.
"""

from __future__ import annotations

import functools
from typing import Any

from bundler.package_loggers import logger
from bundler.toolchain import instances
from bundler.toolchain.inductor import inductor_caches
from bundler.toolchain.inductor.inductor_tuners import DESCENDED, DESCENT

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
        kind, original = (
            inductor_caches.find(inductor_caches.AUTOTUNER_TYPE),
            inductor_caches.find(METHOD),
        )
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
