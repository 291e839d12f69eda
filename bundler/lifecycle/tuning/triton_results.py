# SPDX-License-Identifier: Apache-2.0
"""The result files of other tuners.

Triton's `*.autotune.json` holds every config with its times, infinite where it failed; Inductor's
`*.best_config` the winner alone.

`results_timings`, `results_key` and `inductor_result` read them, `results_text` writes Triton's.
The command `tune` calls these functions, and so do our tuners
(`bundler/runtime/tuning/result_lookup.py`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bundler.format.candidate_timings import Timing
from bundler.format.constant_values import encode
from bundler.format.launch_spec import Named
from bundler.lifecycle.tuning.tuning_directory import Miss

MAX_BYTES = 16 << 20
_COUNTS = {"num_warps": 4, "num_stages": 3, "num_ctas": 1, "maxnreg": None}
_NOT_TOLD = ("kwargs", "pre_hook")
_NS = 1e6
# What stands in an Inductor file beside the config, and the one member that holds options of a
# backend.
_ABOUT = ("configs_hash", "found_by_coordesc", "time_taken_ms", "triton_cache_hash")
_EXTRA = "extra_options"
# In nanoseconds it has 64 bits, as a record keeps it.
_MAX_MS = 2**63 / _NS


def results_timings(text: str | bytes) -> list[tuple[Named, float | None]] | Miss:
    """Return each config of a result file and its median in milliseconds, None where it failed; or
    why the file is none.

    Args:
        text: the file; its numbers may be `Infinity`.
    """
    try:
        if len(text) > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES} bytes")
        document = json.loads(text)
        return [(_named(config), _median(times)) for config, times in document["configs_timings"]]
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        return Miss(f"not a result file of Triton's tuner: {type(error).__name__}: {error}")


def results_key(text: str | bytes) -> str:
    """Return the tuning key that stands in a result file, as text; empty where there is none."""
    try:
        key = json.loads(text)["key"]
        return ", ".join(map(str, key)) if isinstance(key, list) else str(key)
    except (ValueError, TypeError, KeyError, RecursionError):
        return ""


def _named(config: Mapping[str, Any]) -> Named:
    kwargs = config["kwargs"]
    if not isinstance(kwargs, dict):
        raise TypeError("kwargs is no object")
    counts = {name: config.get(name, default) for name, default in _COUNTS.items()}
    for name, value in counts.items():
        if type(value) is not int and not (value is None and name == "maxnreg"):
            raise TypeError(f"{name} is {value!r}")
    options = {
        name: value
        for name, value in config.items()
        if name not in {*_NOT_TOLD, *_COUNTS} and value is not None
    }
    pairs = [(name, kwargs[name]) for name in sorted(kwargs)] + list(counts.items())
    pairs += [(f"option.{name}", options[name]) for name in sorted(options)]
    return tuple((name, encode(value)) for name, value in pairs)


def _median(times: Any) -> float | None:
    value = times if isinstance(times, int | float) else times[0]
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or _MAX_MS < abs(value) < math.inf
    ):
        raise TypeError(f"a time is {value!r:.80}")
    return float(value) if math.isfinite(value) and value >= 0 else None


def results_text(key: Sequence[Any], rows: Iterable[tuple[Mapping[str, Any], Timing]]) -> str:
    """Return a result file that Triton's tuner reads: for each config its fields and three times,
    infinite where it failed.
    """
    timings = []
    for config, timing in rows:
        median = timing.time_ns
        known = (median, *(median if ns is None else ns for ns in (timing.low_ns, timing.high_ns)))
        times = [math.inf if median is None or ns is None else ns / _NS for ns in known]
        timings.append([dict(config), times])
    return json.dumps({"key": list(key), "configs_timings": timings})


@dataclass(frozen=True)
class InductorResult:
    """What a result file of Inductor's tuner says.

    Attributes:
        config: the winner.
        key: kernel key of the winner; empty where the file does not say.
        configs: a hash of the configs that were to be tried; empty where the file does not say.
        descended: whether coordinate descent found it.
        spent_ms: time that the tuning took; not that of the kernel, which the file does not say.
    """

    config: Named
    key: str
    configs: str
    descended: bool
    spent_ms: int


def inductor_result(text: str | bytes) -> InductorResult | Miss:
    """Return what a result file of Inductor's tuner says, or why it is none."""
    try:
        if len(text) > MAX_BYTES:
            raise ValueError(f"more than {MAX_BYTES} bytes")
        document = dict(json.loads(text))
        configs, descended, spent_ms, key = (document.pop(name, None) for name in _ABOUT)
        extra = document.pop(_EXTRA, None) or {}
        counts = {name: document.pop(name) for name in _COUNTS if name in document}
        if not {"num_warps", "num_stages"} <= counts.keys() or any(
            type(n) not in {int, type(None)} for n in counts.values()
        ):
            raise ValueError("it has no num_warps and num_stages")
        pairs = [(name, document[name]) for name in sorted(document)] + list(counts.items())
        pairs += [(f"option.{name}", extra[name]) for name in sorted(extra)]
        config = tuple((name, encode(value)) for name, value in pairs)
        return InductorResult(
            config,
            str(key or ""),
            str(configs or ""),
            bool(descended),
            int(0 if spent_ms is None else spent_ms),
        )
    except (
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        RecursionError,
        OverflowError,
    ) as error:
        return Miss(f"not a result file of Inductor's tuner: {type(error).__name__}: {error}")
