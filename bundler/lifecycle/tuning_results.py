# SPDX-License-Identifier: Apache-2.0
"""The result files of Triton's own tuner, `*.autotune.json`: every config with its times, infinite where it failed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bundler.format.launch import Named
from bundler.format.tuning import Timing
from bundler.format.values import encode
from bundler.lifecycle.tuning import Miss

MAX_BYTES = 16 << 20
_COUNTS = {"num_warps": 4, "num_stages": 3, "num_ctas": 1, "maxnreg": None}
_NOT_TOLD = ("kwargs", "pre_hook")
_NS = 1e6


def results_timings(text: str | bytes) -> list[tuple[Named, float | None]] | Miss:
    """Return each config of a result file and its median in milliseconds, None where it failed; or why the file is none.

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
        name: value for name, value in config.items() if name not in {*_NOT_TOLD, *_COUNTS} and value is not None
    }
    pairs = [(name, kwargs[name]) for name in sorted(kwargs)] + list(counts.items())
    pairs += [(f"option.{name}", options[name]) for name in sorted(options)]
    return tuple((name, encode(value)) for name, value in pairs)


def _median(times: Any) -> float | None:
    value = times if isinstance(times, int | float) else times[0]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"a time is {value!r}")
    return float(value) if math.isfinite(value) and value >= 0 else None


def results_text(key: Sequence[Any], rows: Iterable[tuple[Mapping[str, Any], Timing]]) -> str:
    """Return a result file that Triton's tuner reads: for each config its fields and three times, infinite where it failed."""
    timings = []
    for config, timing in rows:
        median = timing.time_ns
        known = (median, *(median if ns is None else ns for ns in (timing.low_ns, timing.high_ns)))
        times = [math.inf if median is None or ns is None else ns / _NS for ns in known]
        timings.append([dict(config), times])
    return json.dumps({"key": list(key), "configs_timings": timings})
