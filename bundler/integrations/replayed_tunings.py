# SPDX-License-Identifier: Apache-2.0
"""`RecordedWinner`: a tuning record of ours as something that a tuner of Triton can take its winner
from.

A record counts where source, set of configurations, device and toolchain are those that are here:
what `bundler.autotune` asks of it. How the winner was searched for does not count: it is one of the
tuner's own configurations.  `replayed_kernels.py` offers the records of a bundle to `tuner_caches`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

from bundler.errors import ToolchainMismatch
from bundler.format.candidate_timings import id_of
from bundler.format.launch_spec import TuningRecord
from bundler.runtime.configs import Config
from bundler.runtime.launch.drivers.driver import DeviceProperties
from bundler.runtime.tuning import tuning_winners
from bundler.toolchain import tuner_toolchain
from bundler.toolchain.events import target_of

_COMPARED = ("source", "configs", "device", "toolchain")
_MOST_CHARACTERS = 4096


class RecordedWinner(NamedTuple):
    """One tuning record.

    Attributes:
        record: it.
        modules: it goes to tuners of functions of these modules, and of those below them, alone;
            None for all.
    """

    record: TuningRecord
    modules: tuple[str, ...] | None = None

    @property
    def path(self) -> str:
        """What reports call it."""
        return f"{self.record.kernel}/{id_of(self.record)}"

    @property
    def name(self) -> str:
        """The name of the function that was tuned."""
        return self.record.kernel

    def winner(self, tuner: Any, function: Any) -> tuple[tuple[Any, ...], Any]:
        """Return the tuning key, as Triton's tuner makes it, and the tuner's own configuration that
        won.

        Raises:
            ToolchainMismatch: the record is of another source, other configurations, another device
                or toolchain.
            FormatError, ConfigError: the record holds no configuration.
        """
        recorded, here = dict(self.record.parts), _parts_here(tuner, function)
        for name in _COMPARED:
            if recorded.get(name) != here[name]:
                raise ToolchainMismatch(
                    f"{name}: recorded {recorded.get(name, 'nothing')!s:.120}, here"
                    f" {here[name]:.120}"
                )
        chosen = tuning_winners.config_of(self.record.config)
        mine = next((config for config in tuner.configs if _as_ours([config]) == [chosen]), None)
        if mine is None or mine.pre_hook is not None:
            raise ToolchainMismatch("the tuner has no such configuration, or one with a hook")
        return _key(recorded.get("arguments", "")), mine


def _parts_here(tuner: Any, function: Any) -> dict[str, str]:
    driver = sys.modules["triton.runtime.driver"].driver.active
    device, target = driver.get_current_device(), target_of(driver.get_current_target())
    told = driver.utils.get_device_properties(device)
    # Those facts of a device that a record tells.
    properties = DeviceProperties(
        target.arch, 0, told["max_shared_mem"], target.warp_size, told["multiprocessor_count"], True
    )
    return {
        "source": tuner_toolchain.source_part(function),
        "configs": tuning_winners.configs_part(_as_ours(tuner.configs)),
        "device": tuning_winners.device_part(
            target.backend, properties, tuner_toolchain.device_name(device)
        ),
        "toolchain": tuner_toolchain.toolchain_part(target),
    }


def _as_ours(configs: Iterable[Any]) -> list[Config]:
    return [Config.from_triton(config) for config in configs]


def _key(arguments: str) -> tuple[Any, ...]:
    """Return a tuning key that reads as this text does.  A text that looks like a number is taken
    for one: at worst the key is never asked for.
    """
    return tuple(map(_value, arguments[:_MOST_CHARACTERS].split(", "))) if arguments else ()


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
