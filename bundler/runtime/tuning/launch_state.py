# SPDX-License-Identifier: Apache-2.0
"""`LaunchState`: what a tuned kernel launches with: its driver, the kernels loaded so far, the
records that it looks configs up in.

`AutotunedKernel` opens one at its first call, so that a kernel can be declared where there is no
GPU.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from bundler.errors import ConfigError
from bundler.format.bundle import Bundle
from bundler.package_loggers import logger
from bundler.runtime import grids
from bundler.runtime.configs import Config
from bundler.runtime.launch.calls.specialization_match import Specialization
from bundler.runtime.launch.drivers.driver import Driver
from bundler.runtime.launch.drivers.driver_opening import open_first_driver
from bundler.runtime.launch.launch_hooks import Hooks, launch_facts
from bundler.runtime.launch.loaded_plans import PlanLoader
from bundler.runtime.launch.plans.plan_builder import BACKENDS
from bundler.runtime.launch.static_kernel import StaticKernel
from bundler.runtime.tuning.candidate_compiler import CompiledConfig
from bundler.runtime.tuning.result_lookup import Choice, ResultLookup
from bundler.runtime.tuning.tuner_options import TunerOptions
from bundler.toolchain import tuner_toolchain as toolchain
from bundler.trust.admission import admit

_LOG = logger("bundler.runtime")


@dataclass
class LaunchState:
    """What a kernel launches with; any thread may launch, one at a time may `adopt`."""

    driver: Driver
    static: StaticKernel
    loader: PlanLoader
    hooks: Hooks
    bundle: Bundle | None
    lookup: ResultLookup
    through_triton: set[Config] = field(default_factory=set)
    streams: threading.local = field(default_factory=threading.local)

    @staticmethod
    def open(name: str, function: Any, options: TunerOptions, *, results: bool) -> LaunchState:
        """Return the state of a kernel that was not launched yet.

        Args:
            name, function: the kernel's, and its JIT function.
            options: the tuner's.
            results: whether Triton's own result files are read and written.
        """
        driver = options.driver or open_first_driver(BACKENDS)
        loader, hooks, given = PlanLoader(driver), Hooks(), options.bundle
        bundle = given if isinstance(given, Bundle | None) else Bundle.load(given)
        if bundle is not None:
            admit(bundle)
        lookup = ResultLookup(name, function, bundle, options, results=results)
        return LaunchState(
            driver, StaticKernel(name, [], loader, hooks), loader, hooks, bundle, lookup
        )

    def close(self, *, bundle_stays: bool) -> None:
        """Take everything off the device; a bundle that the user gave stays open, one that was
        opened from a path is closed.
        """
        self.static.forget()
        self.loader.unload()
        if self.bundle is not None and not bundle_stays:
            self.bundle.close()

    def adopt(self, name: str, config: Config, made: CompiledConfig) -> None:
        """Let a compiled config be launched from now on."""
        if (
            made.reason is not None
        ):  # it needs something that only Triton's own launcher gives a kernel
            _LOG.info("%s is launched by Triton: %s", name, made.reason)
            self.through_triton.add(config)
            return
        self.loader.add_source(made.bundle)
        self.static.add([Specialization(made.kernel)])

    def adopt_from_bundle(self, choice: Choice) -> None:
        """Let the kernels that came with a record be launched."""
        if choice.specializations and self.bundle is not None:
            self.loader.add_source(self.bundle)
            self.static.add(choice.specializations)

    def start(
        self,
        fn: Any,
        choice: Choice,
        grid: grids.Grid,
        args: tuple[Any, ...],
        keywords: Mapping[str, Any],
    ) -> None:
        """Launch a chosen config; raises as a call of `StaticKernel`."""
        stream = getattr(self.streams, "stream", None)
        if stream is not None:
            self._start_on(stream, fn, choice, grid, args, {**keywords, **choice.keywords})
        # The set is empty for nearly every kernel, and hashing a config takes longer than this
        # look.
        elif self.through_triton and choice.config in self.through_triton:
            fn.run(*args, grid=grid, warmup=False, **{**keywords, **choice.keywords})
        else:
            self.static[grid](*args, **keywords, **choice.keywords)

    @contextlib.contextmanager
    def on_stream(self, stream: int) -> Iterator[None]:
        """Let this thread launch on a stream that the driver does not know as the current one."""
        self.streams.stream = None if stream == self.driver.stream(self.driver.device()) else stream
        try:
            yield
        finally:
            self.streams.stream = None

    def stream(self) -> int:
        """Return the stream that this thread's launches go to."""
        named: int | None = getattr(self.streams, "stream", None)
        return self.driver.stream(self.driver.device()) if named is None else named

    def _start_on(
        self,
        stream: int,
        fn: Any,
        choice: Choice,
        grid: grids.Grid,
        args: tuple[Any, ...],
        keywords: dict[str, Any],
    ) -> None:
        if choice.config in self.through_triton:
            raise ConfigError(
                f"{self.static.name}: only Triton can launch it, on torch's current stream; make"
                f" {stream:#x} that",
                kernel=self.static.name,
            )
        handle = self.static.handle(*args, **keywords)
        names = toolchain.innermost(fn).arg_names
        call = {**dict(zip(names, args, strict=False)), **keywords}
        cluster = handle.plan.cluster
        sizes = grids.checked(
            grid(call) if callable(grid) else grid, self.static.name, self.driver.backend, cluster
        )
        values = handle.values(**{name: value for name, value in call.items() if name in names})
        if 0 in sizes:
            return
        facts = launch_facts(self.static.name, handle.plan.key, sizes, stream, handle.device)
        self.hooks.around(facts, lambda: handle.launch(*sizes, stream, *values))
