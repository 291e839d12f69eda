# SPDX-License-Identifier: Apache-2.0
"""`LaunchWatch`: shows the launches of a tuned kernel to those who want to see them: a dump, plug-ins, torch's profiler.

`AutotunedKernel` lets it launch where anybody does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from bundler.errors import CannotLaunchStatically, NotFound
from bundler.runtime import grids
from bundler.runtime.launch.handle import Handle
from bundler.runtime.tuning import profiler_ranges
from bundler.runtime.tuning.launch_state import LaunchState
from bundler.runtime.tuning.result_lookup import Choice
from bundler.runtime.tuning.tuner_options import TunerOptions
from bundler.runtime.tuning.tuner_plugins import Plugins, TunedLaunch
from bundler.toolchain import tuner_toolchain as toolchain

# Names that Inductor has for them, in its metadata and in its ranges.
_WORK = ("kernel_num_gb", "kernel_flop")


class LaunchWatch:
    """Shows launches of one kernel.

    Attributes:
        always: whether somebody wants to see each; a profiler wants it while it is active.

    Args:
        name, function: the kernel's, and its JIT function.
        options: the tuner's, with the dump.
        plugins: those of the kernel.
    """

    def __init__(self, name: str, function: Any, options: TunerOptions, plugins: Plugins) -> None:
        self._name, self._function, self._options, self._plugins = name, function, options, plugins
        self.always = options.dump is not None or plugins.watching
        self._file = toolchain.file_of(function)

    def launch(
        self,
        state: LaunchState,
        choice: Choice,
        grid: grids.Grid,
        call: Mapping[str, Any],
        by_position: int,
        handle: Callable[[], Handle],
        metadata: Mapping[str, Any],
        start: Callable[[], None],
    ) -> None:
        """Launch, and show it.

        Args:
            state: what it is launched with.
            choice: what is launched.
            grid, call: the caller's, arguments by name.
            by_position: how many of them were given so.
            handle: returns the compiled kernel for the call.
            metadata: of the generator that wrote the kernel.
            start: launches.
        """
        launch = replace(
            self._described(state, choice, grid, call, handle), by_position=by_position
        )
        if self._plugins.launched(launch):
            return
        if self._options.dump is not None:
            self._options.dump.write(launch)
        if not profiler_ranges.active():
            start()
            return
        told = metadata.get("inductor_meta", {})
        known = {name: told[name] for name in _WORK if told.get(name) is not None}
        if self._options.gigabytes is not None:
            known["kernel_num_gb"] = self._options.gigabytes
        with profiler_ranges.launch_range(launch, known):
            start()

    def _described(
        self,
        state: LaunchState,
        choice: Choice,
        grid: grids.Grid,
        call: Mapping[str, Any],
        handle: Callable[[], Handle],
    ) -> TunedLaunch:
        key, cluster = "", choice.config.num_ctas
        if choice.config not in state.through_triton:
            # Only Triton can launch what cannot be handled here, and says nothing of its key.
            with contextlib.suppress(NotFound, CannotLaunchStatically):
                plan = handle().plan
                key, cluster = plan.key, plan.cluster
        given = grid({**call, **choice.keywords}) if callable(grid) else grid
        sizes = grids.checked(given, self._name, state.driver.backend, cluster)
        return TunedLaunch(
            self._name,
            self._file,
            key,
            choice.config,
            sizes,
            state.stream(),
            state.driver.device(),
            dict(call),
        )
