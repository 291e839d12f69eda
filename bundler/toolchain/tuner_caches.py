# SPDX-License-Identifier: Apache-2.0
"""`TunerCaches`: fills `cache` of Triton's tuners from result files and tuning records, so that a
first call of a tuned kernel benchmarks nothing.

A result file holds the tuning key and each configuration with its times; its directory is named by
a hash of these, the kernel's source, the toolchain and the target.  It is used where Triton here
makes the same hash, and names a configuration that the tuner has. Tuners that are made later take
what fits them when their modules are whole, since only then can their functions be hashed, or when
they are first called.  `bundler/integrations/replayed_kernels.py` offers the files of a bundle, and
its tuning records (`replayed_tunings.py`).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

from bundler.errors import NotFound, ToolchainMismatch
from bundler.fork_safety import ForkSafeLock
from bundler.format.bundle_file import read_regular
from bundler.package_loggers import logger
from bundler.toolchain import instances
from bundler.toolchain.device_caches import of_modules
from bundler.toolchain.encoding import as_tuples
from bundler.toolchain.events import kernel_key, target_of
from bundler.toolchain.instances import when_imported
from bundler.toolchain.jit_specialization import jit_function
from bundler.toolchain.tuner_toolchain import (
    MAX_RESULT_BYTES,
    results_digest,
    results_name,
    triton_config_class,
)

_LOG = logger("bundler.toolchain")


class Winner(Protocol):
    """What a tuner's winner may be taken from: a `ResultFile`, or a tuning record."""

    @property
    def path(self) -> str:
        """What reports call it; each has another one."""

    @property
    def name(self) -> str:
        """The name of the function that was tuned, or of a result file of it."""

    @property
    def modules(self) -> tuple[str, ...] | None:
        """It goes to tuners of functions of these modules, and of those below them, alone; None for
        all.
        """

    def winner(self, tuner: Any, function: Any) -> tuple[tuple[Any, ...], Any]:
        """Return the tuning key and the tuner's own configuration that was the fastest; raises
        where it is not for this tuner.
        """


class ResultFile(NamedTuple):
    """One result file of Triton's tuner.

    Attributes:
        path: as in the bundle, `KEY/name.autotune.json`.
        roots: Triton's cache directories in which it may have been restored.
        modules: it goes to tuners of functions of these modules, and of those below them, alone;
            None for all.
    """

    path: str
    roots: tuple[str, ...]
    modules: tuple[str, ...] | None = None

    @property
    def name(self) -> str:
        """The file's own name, which begins with that of the function."""
        return self.path.rpartition("/")[2]

    def text(self) -> bytes:
        """Return its content; raises `NotFound`."""
        for root in self.roots:
            path = os.path.join(root, self.path)
            if os.path.isfile(path):
                return read_regular(path, MAX_RESULT_BYTES)
        raise NotFound(f"{self.path} is not in {' or '.join(self.roots)}")

    def winner(self, tuner: Any, function: Any) -> tuple[tuple[Any, ...], Any]:
        """Return the tuning key, and the tuner's own configuration that was the fastest.

        Raises:
            ToolchainMismatch: the file is not of this source, these configurations or this
                toolchain.
            NotFound: there is no file.
            ValueError, TypeError, LookupError: it is no result file.
        """
        document = json.loads(self.text())
        key, kind = as_tuples(document["key"]), triton_config_class()
        if not isinstance(key, tuple):
            raise TypeError("its key is no list")
        timings = [(kind(**fields), times) for fields, times in document["configs_timings"]]
        active = sys.modules["triton.runtime.driver"].driver.active
        target = target_of(active.get_current_target())
        digest = results_digest(function, target, key, [str(config) for config, _ in timings])
        if kernel_key(digest) != self.path.partition("/")[0]:
            raise ToolchainMismatch(
                "it is of another source, other configurations, another target or another toolchain"
            )
        best = min(timings, key=lambda timing: timing[1])[0]
        # The tuner's own object: what comes from a file must not decide what is called, and a hook
        # is code.
        wanted = best.all_kwargs()
        mine = next((config for config in tuner.configs if config.all_kwargs() == wanted), None)
        if mine is None or mine.pre_hook is not None:
            raise ToolchainMismatch("the tuner has no such configuration, or one with a hook")
        return key, mine


class FilledCache(dict[Any, Any]):
    """The `cache` of a tuner that was made after a replay, and has looked into it: a plain
    dictionary in all that it does.
    """


class _PendingCache(FilledCache):
    """The same until its module is whole, or the tuner first looks into it, which fills it.

    It stays the same object, since another thread of the tuner may be about to write a winner into
    it.
    """

    def __init__(self, caches: TunerCaches, tuner: Any) -> None:
        super().__init__(tuner.cache)
        self._caches, self._tuner = caches, tuner

    def __contains__(self, key: object) -> bool:
        self.fill_now()
        return dict.__contains__(self, key)

    def fill_now(self) -> None:
        """Fill it, unless somebody did."""
        tuner, self._tuner = self._tuner, None
        if tuner is not None:
            # Another thread may look at the same moment: it sees it filled or not, and at worst
            # benchmarks.
            self._caches.fill(tuner, self)
            # from now on a look costs what it costs in any dictionary
            self.__class__ = FilledCache  # type: ignore[assignment]


class TunerCaches:
    """The result files and records that were offered to the tuners of this process; safe from any
    thread.
    """

    def __init__(self) -> None:
        self._holder = ForkSafeLock()
        # By name of the function or the file.  Replaced, never changed.
        self._offered: dict[str, tuple[Winner, ...]] = {}

    def offer(self, files: Iterable[Winner]) -> dict[str, str]:
        """Fill the caches of the tuners that are here, and keep what is offered for those that are
        not.

        Returns:
            For each path why it is not in a cache; empty text where it is.
        """
        told: dict[str, str] = {}
        with self._holder.lock:
            for file in files:
                told[file.path] = "no tuner of that function is here yet"
                self._offered = {
                    **self._offered,
                    file.name: tuple(dict.fromkeys((*self._offered.get(file.name, ()), file))),
                }
        if told:
            instances.when_made(instances.TUNER, self._await)
            for tuner in instances.instances(instances.TUNER):
                for path, reason in self.fill(tuner, tuner.cache).items():
                    if told.get(path):
                        told[path] = reason
        return told

    def fill(self, tuner: Any, cache: dict[Any, Any]) -> dict[str, str]:
        """Put into a tuner's cache what fits it; returns for each path why not, as `offer`; never
        raises.
        """
        function = jit_function(tuner)
        files = [] if function is None else self._for(function)
        told: dict[str, str] = {}
        for file in files:
            if not of_modules(function, file.modules):
                continue
            try:
                key, config = file.winner(tuner, function)
            except Exception as error:  # noqa: BLE001  # files of anybody's making, and Triton's own code
                told[file.path] = str(error)[:300] or type(error).__name__
                _LOG.debug("%s was not used: %s", file.path, error)
                continue
            # What this process measured itself goes before what another one did.
            cache.setdefault(key, config)
            told[file.path] = ""
        return told

    def _for(self, function: Any) -> tuple[Winner, ...]:
        offered = self._offered
        # Triton's own file first: it is of just this process's tuner.
        return (*offered.get(results_name(function), ()), *offered.get(function.__name__, ()))

    def _await(self, tuner: Any) -> None:
        function = jit_function(tuner)
        if function is not None and self._for(function):
            tuner.cache = awaiting = _PendingCache(self, tuner)
            when_imported(function.module, awaiting.fill_now)


tuner_caches = TunerCaches()
