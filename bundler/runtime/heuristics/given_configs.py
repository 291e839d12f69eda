# SPDX-License-Identifier: Apache-2.0
"""Candidates that need no rule, since their author decided on them: templates, fixed and
user-written configs, lists of kernels (foreach).

The decorators of the same names and Inductor's generated modules call these functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bundler.errors import ConfigError
from bundler.runtime.configs import COUNTS, Config
from bundler.runtime.heuristics.facts import Policy

# Options of Triton releases with explicit warp specialization; 0 says "none", and then a compiler
# need not know them.
_WARP_SPECIALIZATION = ("num_consumer_groups", "num_buffers_warp_spec")
_FOREACH_WARPS, _FOREACH_TRIED = 8, (1, 2, 4, 8)


def template_configs(num_stages: int, num_warps: int, **options: Any) -> list[Config]:
    """Return the one candidate of a template, whose blocks stand in its source.

    Args:
        num_stages, num_warps: as decided with the template.
        options: further options of the compiler; those that are None, and counts of 0, are left
            out.
    """
    given = {name: value for name, value in options.items() if _is_given(name, value)}
    return [
        Config({}, num_warps=num_warps, num_stages=num_stages, options=given, origin="template")
    ]


def fixed_configs(config: Mapping[str, Any]) -> list[Config]:
    """Return the one candidate that a flat dictionary describes: parameters and counts side by
    side.

    Raises:
        ConfigError: a count has the wrong type.
    """
    return [_from_flat(config, "fixed")]


def user_configs(configs: Sequence[Mapping[str, Any]]) -> list[Config]:
    """Return the candidates that a user wrote, in their order; without any the compiler's defaults.

    Args:
        configs: flat dictionaries.

    Raises:
        ConfigError: an entry is no dictionary, or a count has the wrong type.
    """
    if not configs:
        return [Config(origin="default")]
    return [_from_flat(config, "user") for config in configs]


def foreach_configs(policy: Policy) -> list[Config]:
    """Return the candidates of a kernel over a list of tensors, which differ in their warps.

    Args:
        policy: with `max_autotune` there are several.
    """
    tried = _FOREACH_TRIED if policy.max_autotune else (_FOREACH_WARPS,)
    return [Config({}, num_warps=warps, num_stages=1, origin="foreach") for warps in tried]


def _from_flat(config: Mapping[str, Any], origin: str) -> Config:
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"config: expected a dictionary of parameters and counts, got {config!r:.80}",
            got=type(config).__name__,
        )
    counts = {name: config[name] for name in COUNTS if config.get(name) is not None}
    options = {
        name: config[name] for name in _WARP_SPECIALIZATION if _is_given(name, config.get(name))
    }
    kwargs = {
        name: value for name, value in config.items() if name not in COUNTS + _WARP_SPECIALIZATION
    }
    return Config(kwargs, **counts, options=options, origin=origin)


def _is_given(name: str, value: Any) -> bool:
    return value is not None and not (name in _WARP_SPECIALIZATION and value == 0)
