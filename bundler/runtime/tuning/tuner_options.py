# SPDX-License-Identifier: Apache-2.0
"""`TunerOptions`: settings of a tuner beyond the parameters of Triton's own.

Users give them to `autotune`, and Inductor's generated modules to `HeuristicKernel`;
`AutotunedKernel`, `Trial` and `ResultLookup` read them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from bundler.compile.service import CompileService
from bundler.errors import ConfigError
from bundler.format.bundle import Bundle
from bundler.runtime.launch.drivers.driver import Driver
from bundler.runtime.tuning.descent import UNMEASURED_DETERMINISTIC, Descent, Space
from bundler.runtime.tuning.occupancy import DeviceLimits
from bundler.runtime.tuning.tuner_plugins import TunerPlugin
from bundler.runtime.tuning.tuner_reports import BandwidthReport, LaunchDump
from bundler.runtime.tuning.tuning_winners import LookupTable

Reuse = Literal["all", "bundle", "none"]


@dataclass(frozen=True)
class TunerOptions:
    """What a tuner does, and with what.

    Attributes:
        driver: whose GPUs to use; None opens CUDA's or HIP's when the kernel is first called.
        bundle: a bundle, which has to stay open, or the path of one: its records and kernels are
            used before anything is compiled.
        table: configs that are used in place of the list, without a measurement; a table, or the
            path of one.
        record: whether winners are written beside Triton's kernels, for the next process.
        reuse: whose records are used: `all`; `bundle`, those of the bundle alone; `none`.  With
            `none` and `record=False` winners are in no recording either.
        kind: what kind of kernel it is, such as `reduction`; decides what may be refined.
        space: size hints and limits for refining.
        descent: refine the winner by coordinate descent; for a user's kernel only with
            `space.fields`.
        steps: changes of the winner's fields, as `plan.steps` of a combined kernel has them: each
            step's changes are tried one after the other on top of the best so far, before
            `descent`.
        deterministic: no measurement decides for a user's kernel or a reduction: a table, or else
            the first config that compiles.
        custom: the kernel is written by a user, so that spills do not rule a config out; None for
            `autotune`'s kernels alone.
        spill_threshold: 32-bit words that a config may spill otherwise; None for 16, and 32 on AMD.
        rescale: whether reduction blocks may be halved where many registers are used.
        stage_to_host: whether the benchmark may keep copies of large tensors in pinned memory of
            the host.
        workers: processes that compile the configs; None for one a core, 1 for none.
        service: a compile service to use in place of one for each tuning.
        dump: writes down the parameters of each launch.
        bandwidth: measures each kernel once a tuning key, and collects the figures.
        gigabytes: that a launch reads and writes, for the figures; None to count the tensors.
        limits: registers and threads of a multiprocessor, where the driver of this process does not
            tell them.
        export: a directory; each chosen kernel is exported there, as `AutotunedKernel.export` does
            it.
        hook_args: what Triton's `jit_post_compile_hook` is told as `inductor_args` of each config
            that is compiled, if it takes that.
        plugins: asked before configs are compiled, searched and launched, and told of what was
            compiled.

    Raises:
        ConfigError: a value that cannot be used.
    """

    driver: Driver | None = None
    bundle: Bundle | str | os.PathLike[str] | None = None
    table: LookupTable | str | os.PathLike[str] | None = None
    record: bool = True
    reuse: Reuse = "all"
    kind: str = "user_autotune"
    space: Space = field(default_factory=Space)
    descent: Descent | None = None
    steps: tuple[tuple[Mapping[str, Any], ...], ...] = ()
    deterministic: bool = False
    custom: bool | None = None
    spill_threshold: int | None = None
    rescale: bool = True
    stage_to_host: bool = True
    workers: int | None = None
    service: CompileService | None = None
    dump: LaunchDump | None = None
    bandwidth: BandwidthReport | None = None
    gigabytes: float | None = None
    limits: DeviceLimits = field(default_factory=DeviceLimits)
    export: str | os.PathLike[str] | None = None
    plugins: tuple[TunerPlugin, ...] = ()
    hook_args: Any = None

    def __post_init__(self) -> None:
        if self.workers is not None and (type(self.workers) is not int or self.workers < 1):
            raise ConfigError(
                f"workers={self.workers!r}: expected a number of processes, at least 1",
                got=self.workers,
            )
        if self.spill_threshold is not None and self.spill_threshold < 0:
            raise ConfigError(
                f"spill_threshold={self.spill_threshold}: expected 0 or more",
                got=self.spill_threshold,
            )
        if self.reuse not in get_args(Reuse):
            raise ConfigError(
                f"reuse={self.reuse!r}: expected one of {', '.join(get_args(Reuse))}",
                got=self.reuse,
            )
        if self.gigabytes is not None and not self.gigabytes >= 0:
            raise ConfigError(
                f"gigabytes={self.gigabytes!r}: expected 0 or more", got=self.gigabytes
            )

    @property
    def search(self) -> str:
        """How winners are found, as a part of the tuning key: a winner that was found in one way is
        no answer for another.
        """
        kind = "" if self.kind == "user_autotune" else f"{self.kind}: "
        if self.deterministic and self.kind in UNMEASURED_DETERMINISTIC:
            return f"{kind}the first that compiles"
        if self.steps:
            tried = [[sorted(change.items()) for change in step] for step in self.steps]
            kind += f"in steps {hashlib.sha256(repr(tried).encode()).hexdigest()[:16]}, "
        if self.descent is None:
            return f"{kind}autotune"
        d, space = self.descent, self.space
        # Sorted: the same limits in another order are the same search.
        limits = sorted(
            {**space.max_blocks, **{f"min {k}": v for k, v in space.min_blocks.items()}}.items()
        )
        words = [
            f"radius {d.radius}",
            f"threshold {d.threshold}",
            *(["all directions"] if d.all_directions else []),
        ]
        return f"{kind}coordinate descent ({', '.join(words)}; {space.fields or 'usual'}; {limits})"
