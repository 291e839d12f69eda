# SPDX-License-Identifier: Apache-2.0
"""`ListedConfigs`: a tuner's list of configs as its user wrote it, checked; `Pruning`: which of
them are tried for a call.

`autotune` makes both, and `AutotunedKernel` asks them at each call that it has to choose for.
`keywords_on` and `ignored_on` say what of a config reaches the compiler of a target.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bundler.errors import ConfigError
from bundler.format.entries import Target
from bundler.runtime.configs import COUNTS, Config
from bundler.toolchain.compile_call import options_anywhere, options_of

_PRUNERS = frozenset({"perf_model", "top_k", "early_config_prune"})


@dataclass(frozen=True)
class ListedConfigs:
    """Configs, each once, with the objects that they were made from, which pruning functions get.

    Attributes:
        originals, configs: as the user gave them, and ours, in the same order.
        parameters: of the kernel that they are for; None where that is not known yet.
    """

    originals: tuple[Any, ...]
    configs: tuple[Config, ...]
    parameters: tuple[str, ...] | None = None

    @staticmethod
    def of(given: Sequence[Any], parameters: tuple[str, ...] | None = None) -> ListedConfigs:
        """Take over a list of Triton's configs or ours; with `parameters`, what is none of them is
        an option.

        Raises:
            ConfigError: it is empty, or holds something else, or a config with a `pre_hook`.
        """
        if isinstance(given, str | bytes | Mapping) or not isinstance(given, Sequence):
            raise ConfigError(
                f"configs: expected a list of configs, got {given!r:.80}", got=type(given).__name__
            )
        if not given:
            raise ConfigError(
                "configs: the list is empty; give at least one config to compile the kernel with"
            )
        originals: dict[Config, Any] = {}
        for original in given:
            config = _checked(original)
            originals.setdefault(
                config if parameters is None else config.for_parameters(parameters), original
            )
        return ListedConfigs(tuple(originals.values()), tuple(originals), parameters)

    def for_kernel(self, kernel: str, parameters: Sequence[str]) -> ListedConfigs:
        """Return the list for a kernel: what a config gives a value to is a parameter, or an option
        of one of Triton's backends.

        Raises:
            ConfigError: a config names something that is neither.
        """
        for config in self.configs:
            unknown = sorted(config.kwargs.keys() - set(parameters))
            unknown = sorted(set(unknown) - options_anywhere()) if unknown else []
            if unknown:
                raise ConfigError(
                    f"{kernel}: the config {config} has a value for {unknown[0]!r}, which is no"
                    " parameter of the kernel, and no option of Triton's compiler; its parameters"
                    f" are {', '.join(parameters)}",
                    kernel=kernel,
                    name=unknown[0],
                )
        return ListedConfigs.of(self.originals, tuple(parameters))

    def at(self, places: Sequence[int]) -> ListedConfigs:
        """Return a list of those at some places alone."""
        return ListedConfigs(
            tuple(self.originals[place] for place in places),
            tuple(self.configs[place] for place in places),
            self.parameters,
        )

    def check_given(self, kernel: str, given: set[str]) -> None:
        """Raise `ConfigError` when a call gives a value to something that the configs choose."""
        chosen = {name for config in self.configs for name in (*config.kwargs, *config.options)}
        for name in sorted(given & chosen.union(COUNTS)):
            raise ConfigError(
                f"{kernel}: {name!r} is given, and chosen by the tuner too; leave it to the tuner",
                kernel=kernel,
                name=name,
            )


def keywords_on(config: Config, target: Target) -> dict[str, Any]:
    """Return what a config adds to a call on a target: parameters, and the options that the
    target's compiler has.
    """
    ignored = ignored_on(config, target)
    return {name: value for name, value in config.all_kwargs().items() if name not in ignored}


def effective_on(config: Config, target: Target) -> Config:
    """Return the part of a config that counts on a target: two configs that agree in it are one
    kernel there.
    """
    ignored = ignored_on(config, target)
    if not ignored:
        return config
    options = {name: value for name, value in config.options.items() if name not in ignored}
    return replace(
        config, options=options, maxnreg=None if "maxnreg" in ignored else config.maxnreg
    )


def ignored_on(config: Config, target: Target) -> tuple[str, ...]:
    """Return the options of a config that the compiler of a target does not have, such as
    `waves_per_eu` on CUDA.
    """
    asked = [*config.options, *(["maxnreg"] if config.maxnreg is not None else [])]
    return tuple(sorted(set(asked) - options_of(target))) if asked else ()


def _checked(original: Any) -> Config:
    config = Config.from_triton(original)
    if config.pre_hook is not None:
        raise ConfigError(
            f"config {config}: a pre_hook of a config cannot travel in a record, and what it does"
            " before a launch would be missing in the next process; give pre_hook to autotune, or"
            " do it before the call",
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
    top_k: float = 1.0  # a part of the list, or a whole number of configs

    @staticmethod
    def of(given: Mapping[str, Any] | None) -> Pruning:
        """Take over a dictionary; raises `ConfigError` for an unknown name or a `top_k` that is no
        number.
        """
        given = given or {}
        unknown = sorted(given.keys() - _PRUNERS)
        top_k = given.get("top_k", 1.0)
        if unknown:
            raise ConfigError(
                f"prune_configs_by: {unknown[0]!r} is not one of {', '.join(sorted(_PRUNERS))}"
            )
        if isinstance(top_k, bool) or not isinstance(top_k, int | float) or top_k <= 0:
            raise ConfigError(
                f"prune_configs_by: top_k={top_k!r}; expected a part up to 1.0, or a number of"
                " configs",
                got=repr(top_k),
            )
        if isinstance(top_k, float) and top_k > 1.0:
            raise ConfigError(
                f"prune_configs_by: top_k={top_k!r}; a number of configs is a whole one", got=top_k
            )
        return Pruning(given.get("early_config_prune"), given.get("perf_model"), top_k)

    def apply(
        self, listed: ListedConfigs, named: Mapping[str, Any], keywords: Mapping[str, Any]
    ) -> ListedConfigs:
        """Return what is left of a list for a call; raises `ConfigError` when nothing is."""
        if self.early is not None:
            left = list(self.early(list(listed.originals), dict(named), **keywords))
            if not left:
                raise ConfigError(
                    "prune_configs_by: early_config_prune left no config; it has to return one at"
                    " least",
                    name="early_config_prune",
                )
            listed = ListedConfigs.of(left, listed.parameters)
        if self.model is None:
            return listed
        # A small part of a small list is still one config.
        part = isinstance(self.top_k, float)
        most = int(max(1, len(listed.configs) * self.top_k) if part else self.top_k)
        if len(listed.configs) <= most:
            return listed
        priced = [
            (self.model(**{**named, **keywords, **config.all_kwargs()}), place)
            for place, config in enumerate(listed.configs)
        ]
        kept = [place for _, place in sorted(priced)[:most]]
        return listed.at(kept)
