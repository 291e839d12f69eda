# SPDX-License-Identifier: Apache-2.0
"""`TunedCalls`: what the calls of a tuned kernel have to look like, and what their arguments say before a config is known.

`AutotunedKernel` asks it for each call that it has to choose a config for.
"""

from __future__ import annotations

from typing import Any

from bundler.errors import ConfigError
from bundler.format.summary import count
from bundler.runtime import grids
from bundler.runtime.launch.argument_types import is_tensor
from bundler.runtime.tuning.candidate_compiler import expand
from bundler.runtime.tuning.config_list import ListedConfigs
from bundler.toolchain import tuner_toolchain as toolchain

Args = tuple[Any, ...]
Keywords = dict[str, Any]


class TunedCalls:
    """Calls of one kernel.

    Args:
        name, function: the kernel's, with the heuristics around it.
        keys: the arguments whose values are the tuning key.
        listed: the configs.
    """

    def __init__(
        self, name: str, function: Any, keys: tuple[str, ...], listed: ListedConfigs
    ) -> None:
        self._name, self._function, self._listed = name, function, listed
        self._parameters = list(function.arg_names)
        self._keys = [(key, self._parameters.index(key)) for key in keys]

    def named(self, args: Args, keywords: Keywords) -> dict[str, Any]:
        """Return a call's arguments by name."""
        return {**dict(zip(self._parameters, args, strict=False)), **keywords}

    def constants(self, args: Args, keywords: Keywords) -> dict[str, Any]:
        """Return the arguments that are compiled in: whoever launches the binary gives no others."""
        call = self.named(args, keywords)
        return {
            name: call[name]
            for name in toolchain.constexprs(toolchain.innermost(self._function))
            if name in call
        }

    def launches_nothing(self, grid: grids.Grid, args: Args, keywords: Keywords) -> bool:
        """Whether the grid of a call has no program, so that there is nothing to measure or launch."""
        sizes: Any = grid
        if callable(grid):
            call = {**self.named(args, keywords), **self._listed.configs[0].all_kwargs()}
            sizes = grid(expand(self._function, call))
        return 0 in (sizes if isinstance(sizes, tuple | list) else (sizes,))

    def check(self, args: Args, keywords: Keywords) -> None:
        """Raise `ConfigError` for too many arguments, for what the tuner chooses, and for a tensor in the tuning key."""
        if len(args) > len(self._parameters):
            expected = count(len(self._parameters), "argument")
            raise ConfigError(f"{self._name}: takes {expected}, got {len(args)}", kernel=self._name)
        self._listed.check_given(self._name, {*self._parameters[: len(args)], *keywords})
        for name, place in self._keys:
            if is_tensor(args[place] if place < len(args) else keywords.get(name)):
                raise ConfigError(
                    f"{self._name}: the key names {name!r}, which is a tensor; name the numbers that decide, such as its size",
                    kernel=self._name, name=name,
                )  # fmt: skip
