# SPDX-License-Identifier: Apache-2.0
"""`TunerPlugin`: what a program may add to a tuner: before configs are compiled, after one was,
before a search, before a launch.

`TunerOptions.plugins` holds them, and an `AutotunedKernel` asks them as `Plugins`, one after the
other; `TunedLaunch` is what they are told of a launch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bundler.errors import ConfigError
from bundler.format.bundle import Bundle
from bundler.format.candidate_timings import Parts
from bundler.format.entries import Kernel
from bundler.runtime.configs import Config
from bundler.runtime.tuning.candidate_compiler import CompiledConfig
from bundler.runtime.tuning.config_list import ListedConfigs
from bundler.user_warnings import warn


@dataclass(frozen=True)
class TunedLaunch:
    """One launch of a tuned kernel.

    Attributes:
        kernel: its name.
        file: of its source; empty when it has none.
        key: of the compiled kernel, by which bundles and Triton's cache know it; empty where only
            Triton can launch it.
        config: it was compiled from.
        grid: three numbers.
        stream: handle of the stream.
        device: index of the device.
        arguments: of the call, by name; those that were given by position come first.
        by_position: how many these are.
    """

    kernel: str
    file: str
    key: str
    config: Config
    grid: tuple[int, int, int]
    stream: int
    device: int
    arguments: Mapping[str, Any]
    by_position: int = 0


class TunerPlugin:
    """What a program may add to a tuner; a plug-in overrides what it needs, and the rest does
    nothing.

    Methods are called in the thread whose call tunes or launches, `before_launch` by several
    threads at once.  What a method raises reaches the caller of the kernel, but for
    `after_compile`: the kernel is good, so a failure there is a warning.
    """

    def before_compile(self, kernel: str, configs: tuple[Config, ...]) -> Sequence[Config] | None:
        """Return the configs to try in place of all, some of those that are given; None for all.

        What is left out is no part of the tuning key: a record of the rest is not taken for one of
        the whole list.
        """

    def after_compile(self, kernel: Kernel, config: Config, bundle: Bundle) -> None:
        """Hear of a config that was compiled, or found compiled; `bundle.read` gives the kernel's
        files.
        """

    def before_tuning(
        self, kernel: str, configs: tuple[Config, ...], parts: tuple[tuple[str, str], ...]
    ) -> Config | None:
        """Return the config to use, so that nothing is measured or kept; None to let the tuner
        measure.

        Called where no table, bundle or record has the answer; `parts` says what the tuning is
        about, the device among it.
        """

    def before_launch(self, launch: TunedLaunch) -> bool:
        """Return True when the launch is done, or is not to be; False to let it happen."""
        del launch
        return False


class Plugins:
    """The plug-ins of one tuned kernel, in order.

    Args:
        kernel: its name.
        plugins: whose turn it is first comes first.
    """

    def __init__(self, kernel: str, plugins: Sequence[TunerPlugin]) -> None:
        self._kernel, self._plugins = kernel, tuple(plugins)
        # A launch is looked at only where somebody wants to see it: that takes longer than the
        # launch.
        self._watching = [
            p for p in plugins if type(p).before_launch is not TunerPlugin.before_launch
        ]

    @property
    def watching(self) -> bool:
        """Whether a plug-in looks at launches."""
        return bool(self._watching)

    def listed(self, listed: ListedConfigs) -> ListedConfigs:
        """Return what plug-ins leave of a list; raises `ConfigError` for configs that are not in
        it, and for none.
        """
        for plugin in self._plugins:
            wanted = plugin.before_compile(self._kernel, listed.configs)
            if wanted is None:
                continue
            odd = [config for config in wanted if config not in listed.configs]
            if odd or not wanted:
                got = f"{odd[0]}, which is not in the list" if odd else "no config"
                raise ConfigError(
                    f"{self._kernel}: before_compile of {type(plugin).__name__} returned {got};"
                    " expected some of those it was given",
                    kernel=self._kernel,
                )
            listed = listed.at(
                [place for place, config in enumerate(listed.configs) if config in wanted]
            )
        return listed

    def compiled(self, config: Config, made: CompiledConfig) -> None:
        """Tell of a compiled config."""
        for plugin in self._plugins:
            try:
                plugin.after_compile(made.kernel, config, made.bundle)
            except Exception as error:  # noqa: BLE001  # whatever it is, the kernel was compiled
                warn(f"{self._kernel}: after_compile of {type(plugin).__name__} failed: {error!r}")

    def config(self, configs: tuple[Config, ...], parts: Parts) -> Config | None:
        """Return the config that a plug-in chooses; None when none does."""
        found = (plugin.before_tuning(self._kernel, configs, parts) for plugin in self._plugins)
        return next((config for config in found if config is not None), None)

    def launched(self, launch: TunedLaunch) -> bool:
        """Whether a plug-in took a launch over."""
        return any(plugin.before_launch(launch) for plugin in self._watching)
