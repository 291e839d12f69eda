# SPDX-License-Identifier: Apache-2.0
"""`KeptLaunches`: the kernels that a program of torch.compile launched in an earlier process, which
this one launches without Triton's JIT: no module of a kernel is run, no text is hashed.

::

    <cache>/triton-bundler/launches/<digest of program, device, Triton and its settings>
        sha256 of the rest, in hex, and a newline
        JSON: kernel -> [keywords of its launches, parts and config of its tuning record], and a
        newline
        a bundle of the kernels

What was tuned is looked up as ever: a record that is gone, or names another config, is a miss, and
so is a file that is damaged.  What is missed here Triton's JIT launches, and is kept anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

from bundler.codegen import triton_hash
from bundler.codegen.kept_programs import make_room
from bundler.compile.source_modules import errors_of, read_trusted, user_directory, write_whole
from bundler.errors import BundlerError, CannotLaunchStatically, NotFound, ToolchainMismatch
from bundler.format.bundle import Bundle
from bundler.format.bundle_union import merge
from bundler.format.limits import DEFAULT_LIMITS
from bundler.lifecycle.listeners import tuning_listeners
from bundler.lifecycle.tuning_directory import METER, Miss
from bundler.package_loggers import logger
from bundler.runtime.heuristics.launch_grids import combined_parts, open_grid
from bundler.runtime.launch.bundle_kernels import Kernels
from bundler.runtime.launch.drivers.driver import Driver
from bundler.runtime.program.program_plan import Cooperation, KernelEntry, ProgramPlan
from bundler.runtime.tuning.autotuned_kernel import Launched
from bundler.runtime.tuning.result_lookup import find_record
from bundler.runtime.tuning.tuner_options import TunerOptions
from bundler.toolchain import tuner_toolchain as toolchain
from bundler.toolchain.compiler_settings import are_watched, compiler_settings

_log = logger("bundler.codegen")
SCHEMA = 1
# Cubins are large, and are read more often than written.
_LEVEL = 1
_REFUSED = (NotFound, ToolchainMismatch, CannotLaunchStatically)
_PLAIN = frozenset({bool, int, float, str, type(None)})
Launch = Callable[..., None]


class _KeptKernel(NamedTuple):
    """How a kernel is launched: its keywords, and parts and config of its tuning record; None where
    it has none.
    """

    keywords: Mapping[str, Any]
    parts: Sequence[Sequence[str]] | None
    config: str | None


class KeptLaunches:
    """The kernels of one program on one device, as they were found; any thread may use it.

    Args:
        kept: by name, how each is launched.
        kernels: of the bundle.
        entries: of the plan.
    """

    def __init__(
        self, kept: Mapping[str, _KeptKernel], kernels: Kernels, entries: Mapping[str, KernelEntry]
    ) -> None:
        self._kept, self._kernels, self._entries = kept, kernels, entries
        # By name, whether its record still names its config, which is looked up once, as tuners do.
        self._current: dict[str, bool] = {}

    @classmethod
    def find(cls, program: str, plan: ProgramPlan, driver: Driver) -> Self | None:
        """Return what is kept of a program, by `program_name`, for the current device; None where
        nothing is, or where somebody wants to hear of compiles.
        """
        path = _path(program, driver)
        data = None if path is None else _read(path)
        digest, _, text = (data or b"").partition(b"\n")
        if not text or hashlib.sha256(text).hexdigest().encode() != digest:
            return None
        told, _, packed = text.partition(b"\n")
        kept = {name: _KeptKernel(*one) for name, one in json.loads(told).items()}
        try:
            kernels = Kernels(Bundle.from_bytes(packed), driver, {}, owned=None, debug=False)
        except BundlerError as error:
            _log.debug("kept launches cannot be used: %s", path, exc_info=error)
            return None
        return cls(kept, kernels, plan.kernels)

    def bound(self, name: str, sizes: Mapping[str, int], otherwise: Callable[[], Launch]) -> Launch:
        """Return what launches a kernel with the grid of some sizes, given its arguments.

        Args:
            name: of the kernel.
            sizes: of its grid.
            otherwise: returns what does so by Triton's JIT, for calls that none of the kernels
                fits, and where torch's profiler records, which is told more there.
        """
        kept = self._kept.get(name)
        if kept is None or are_watched() or not self._is_current(name, kept):
            return otherwise()
        entry = self._entries[name]
        try:
            grid = open_grid(entry.grid, combined_parts(entry.parameters))(kept.keywords, sizes)
            launch = partial(self._kernels[name][grid], **kept.keywords)
        except BundlerError as error:
            _log.debug("a kept kernel cannot be launched", exc_info=error)
            return otherwise()
        return _guarded(launch if 0 not in grid else _nothing, otherwise)

    def __contains__(self, name: str) -> bool:
        return name in self._kept

    def _is_current(self, name: str, kept: _KeptKernel) -> bool:
        found = self._current.get(name)
        if found is None:
            found = self._current[name] = _is_current(name, kept)
        return found


def program_name(key: str, sources: Mapping[str, str]) -> str:
    """Return what launches of a program are kept by: the digest of its graph's key, which covers
    our helper functions and heuristics, and the text of its kernels, of which a measurement, or
    another machine, may have brought others.
    """
    return hashlib.sha256(json.dumps([key, sorted(sources.items())]).encode()).hexdigest()


def keep_launches(
    program: str, plan: ProgramPlan, driver: Driver, modules: Mapping[str, Any]
) -> None:
    """Keep what a program launched on the current device, for the next process; trouble with it is
    told at level debug.

    Args:
        program: its `program_name`.
        plan: of it.
        driver: of the device.
        modules: its kernels.
    """
    path, settings = _path(program, driver), compiler_settings()
    if path is None:
        return
    apart = _of_several_forms(plan)
    kept, bundles = {}, []
    try:
        for name in modules:
            launched = None if name in apart else modules[name].launched()
            if launched is not None and launched.settings == {settings}:
                found = _kept(name, launched)
                if found is not None:
                    kept[name] = found
                    bundles.append(launched.kernels)
        if kept:
            text = json.dumps(kept).encode() + b"\n" + merge(bundles).to_bytes(level=_LEVEL)
            _put(path, hashlib.sha256(text).hexdigest().encode() + b"\n" + text)
    except BundlerError as error:
        _log.debug("not kept: what a program launches", exc_info=error)


def _kept(name: str, one: Launched) -> _KeptKernel | None:
    if not all(type(value) in _PLAIN for value in one.keywords.values()):
        return None
    if one.parts is None:
        return _KeptKernel(one.keywords, None, None)
    found = find_record(name, one.parts, None, TunerOptions())
    if isinstance(found, Miss):
        return None
    return _KeptKernel(one.keywords, one.parts, repr(found.record.config))


def _is_current(name: str, kept: _KeptKernel) -> bool:
    """Whether the record that a config is from still names it; then it is told of, and counted."""
    if kept.parts is None:
        return True
    parts = tuple((str(part), str(text)) for part, text in kept.parts)
    found = find_record(name, parts, None, TunerOptions())
    if isinstance(found, Miss) or repr(found.record.config) != kept.config:
        return False
    tuning_listeners.tell(found.record, found.tuning)
    METER.found(found.tuning)
    return True


def _of_several_forms(plan: ProgramPlan) -> frozenset[str]:
    """Return the kernels of which a measurement says whether they are launched at all."""
    names = {other for entry in plan.kernels.values() for other in entry.others}
    names |= {name for name, entry in plan.kernels.items() if entry.others}
    for step in plan.steps:
        if isinstance(step, Cooperation):
            names |= {*step.kernels}
    return frozenset(names)


def _guarded(launch: Launch, otherwise: Callable[[], Launch]) -> Launch:
    """Return what launches, and where it is refused, or watched, calls what does so otherwise."""
    profiler: Any = sys.modules["torch.autograd.profiler"]
    slow: list[Launch] = []

    def run(*arguments: Any) -> None:
        if not slow and not profiler._is_profiler_enabled:  # noqa: SLF001  # as `RECORDING` has it
            try:
                launch(*arguments)
            except _REFUSED as error:
                _log.debug("a kept kernel is not launched", exc_info=error)
            else:
                return
        if not slow:
            slow.append(otherwise())
        slow[0](*arguments)

    return run


def _nothing(*_: Any) -> None:
    """Launch no program."""


def _path(program: str, driver: Driver) -> str | None:
    """Return the file of a program on the current device; None where Triton is to be asked."""
    triton_hash.remember()
    settings, compiler = compiler_settings(), triton_hash.of_files()
    if settings is None or compiler is None:
        return None
    device = driver.device()
    facts = (driver.backend, driver.properties(device), toolchain.device_name(device))
    text = "\n".join([f"{SCHEMA} {program} {facts}", compiler, settings])
    return os.path.join(user_directory("launches"), hashlib.sha256(text.encode()).hexdigest())


def _put(path: str, data: bytes) -> None:
    with errors_of("the directory of kept launches"):
        write_whole(path, data)
        make_room(os.path.dirname(path))


def _read(path: str) -> bytes | None:
    try:
        return read_trusted(path, DEFAULT_LIMITS.file_bytes, "the directory of kept launches")
    except BundlerError as error:
        _log.debug("kept launches cannot be read: %s", path, exc_info=error)
        return None
