# SPDX-License-Identifier: Apache-2.0
"""`ListedConfigs`: a tuner's list of configs as its user wrote it, checked; `Pruning`: which of them are tried for a call.

`autotune` makes both, and `AutotunedKernel` asks them at each call that it has to choose for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bundler.errors import ConfigError
from bundler.runtime.configs import Config

_COUNTS = frozenset({"num_warps", "num_stages", "num_ctas", "maxnreg"})
_PRUNERS = frozenset({"perf_model", "top_k", "early_config_prune"})


@dataclass(frozen=True)
class ListedConfigs:
    """Configs, each once, with the objects that they were made from, which pruning functions get."""

    originals: tuple[Any, ...]
    configs: tuple[Config, ...]

    @staticmethod
    def of(given: Sequence[Any]) -> ListedConfigs:
        """Take over a list of Triton's configs or ours.

        Raises:
            ConfigError: it is empty, or holds something else, or a config with a `pre_hook`.
        """
        if isinstance(given, str | bytes | Mapping) or not isinstance(given, Sequence):
            raise ConfigError(f"configs: expected a list of configs, got {given!r:.80}", got=type(given).__name__)
        if not given:
            raise ConfigError("configs: the list is empty; give at least one config to compile the kernel with")
        originals: dict[Config, Any] = {}
        for original in given:
            originals.setdefault(_checked(original), original)
        return ListedConfigs(tuple(originals.values()), tuple(originals))

    def check(self, kernel: str, arguments: Sequence[str]) -> None:
        """Raise `ConfigError` when a config gives a value to something that is no parameter of the kernel."""
        for config in self.configs:
            unknown = sorted(config.kwargs.keys() - set(arguments))
            if unknown:
                raise ConfigError(
                    f"{kernel}: the config {config} has a value for {unknown[0]!r}, which is no parameter of the kernel; it "
                    f"has {', '.join(arguments)}",
                    kernel=kernel, name=unknown[0],
                )  # fmt: skip

    def check_given(self, kernel: str, given: set[str]) -> None:
        """Raise `ConfigError` when a call gives a value to something that the configs choose."""
        chosen = {name for config in self.configs for name in (*config.kwargs, *config.options)}
        for name in sorted(given & (chosen | _COUNTS)):
            raise ConfigError(
                f"{kernel}: {name!r} is given, and chosen by the tuner too; leave it to the tuner",
                kernel=kernel, name=name,
            )  # fmt: skip


def _checked(original: Any) -> Config:
    config = Config.from_triton(original)
    if config.pre_hook is not None:
        raise ConfigError(
            f"config {config}: a pre_hook of a config cannot travel in a record, and what it does before a launch would be "
            "missing in the next process; give pre_hook to autotune, or do it before the call",
            name="pre_hook",
        )
    if not config.portable:
        config.to_wire()
    return config


@dataclass(frozen=True)
class Pruning:
    """Which configs of the list are tried for a call, as Triton's `prune_configs_by` says."""

    early: Callable[..., Any] | None = None
    model: Callable[..., Any] | None = None
    top_k: float = 1.0
    whole: bool = False

    @staticmethod
    def of(given: Mapping[str, Any] | None) -> Pruning:
        """Take over a dictionary; raises `ConfigError` for an unknown name or a `top_k` that is no number."""
        given = given or {}
        unknown = sorted(given.keys() - _PRUNERS)
        top_k = given.get("top_k", 1.0)
        if unknown:
            raise ConfigError(f"prune_configs_by: {unknown[0]!r} is not one of {', '.join(sorted(_PRUNERS))}")
        if isinstance(top_k, bool) or not isinstance(top_k, int | float) or top_k <= 0:
            raise ConfigError(
                f"prune_configs_by: top_k={top_k!r}; expected a part up to 1.0, or a number of configs", got=repr(top_k)
            )
        if isinstance(top_k, float) and top_k > 1.0:
            raise ConfigError(f"prune_configs_by: top_k={top_k!r}; a number of configs is a whole one", got=top_k)
        return Pruning(given.get("early_config_prune"), given.get("perf_model"), top_k, isinstance(top_k, int))

    def apply(self, listed: ListedConfigs, named: Mapping[str, Any], keywords: Mapping[str, Any]) -> ListedConfigs:
        """Return what is left of a list for a call; raises `ConfigError` when nothing is."""
        if self.early is not None:
            left = list(self.early(list(listed.originals), dict(named), **keywords))
            if not left:
                raise ConfigError(
                    "prune_configs_by: early_config_prune left no config; it has to return one at least",
                    name="early_config_prune",
                )
            listed = ListedConfigs.of(left)
        if self.model is None:
            return listed
        # A small part of a small list is still one config.
        most = int(self.top_k if self.top_k > 1 or self.whole else max(1, len(listed.configs) * self.top_k))
        if len(listed.configs) <= most:
            return listed
        priced = [
            (self.model(**{**named, **keywords, **config.all_kwargs()}), place)
            for place, config in enumerate(listed.configs)
        ]
        kept = [place for _, place in sorted(priced)[:most]]
        return ListedConfigs(tuple(listed.originals[i] for i in kept), tuple(listed.configs[i] for i in kept))
