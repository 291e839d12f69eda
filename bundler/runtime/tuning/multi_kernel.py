# SPDX-License-Identifier: Apache-2.0
"""`MultiKernel`, `ShapeKernel`: several implementations of one computation, and which of them runs.

`MultiKernel` runs the one that was measured as the fastest, `ShapeKernel` the one that was made for
the most similar shapes.  Users
make them from compiled kernels, as `docs/heuristics.md` shows.  `ChoiceRecords` is the choice of a
`MultiKernel` as a tuning record, which travels as a kernel's config does; `MultiKernelRecords` that
among kernels under heuristics.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from bundler.compile.job_futures import CompileFuture, JoinedFuture
from bundler.errors import BundlerError, ConfigError, FormatError, NoValidConfig
from bundler.format import wire
from bundler.format.bundle import Bundle
from bundler.format.candidate_timings import Parts, Timing, Tuning, id_of
from bundler.format.digest import sha256
from bundler.format.launch_spec import Named, TuningRecord, joint_source
from bundler.format.summary import count
from bundler.lifecycle.listeners import tuning_listeners
from bundler.lifecycle.tuning_directory import METER, Miss
from bundler.package_loggers import logger
from bundler.runtime.configs import Config
from bundler.runtime.launch.argument_types import is_tensor
from bundler.runtime.tuning import tuning_winners
from bundler.runtime.tuning.benchmark import Clock, Sandbox
from bundler.runtime.tuning.heuristic_kernel import HeuristicKernel
from bundler.runtime.tuning.result_lookup import find_record, keep_record, parts_of
from bundler.runtime.tuning.tuner_options import TunerOptions
from bundler.toolchain import tuner_toolchain as toolchain

Kernel = Callable[..., Any]
Shape = tuple[int, ...]
Shapes = tuple[Shape, ...]
Measure = Callable[[Kernel, tuple[Any, ...]], float]

NO_MATCH = math.inf
# Farther than any shapes that can be compared, nearer than shapes that cannot.
FALLBACK_DISTANCE = float(2**62)
DEFAULT_MEMO = 4096
_LOG = logger("bundler.runtime")


# The one parameter of a record's config: which kernel runs.
_KERNEL = "kernel"
_NS_OF_MS, _US_OF_S = 1e6, 1e6
SEARCH = "multi-kernel"


class ChoiceRecords:
    """Looks up and keeps a choice among implementations that are known by name, as a tuning record.

    Args:
        name: of what they compute.
        choices: their names.
        parts: what a record is compared by; all have to be equal.
        options: of the tuner: bundle, table, whether to look up and to record; deterministic takes
            the first, unmeasured.
        bundle: whose records are looked at first.
        search: how the choice is found, as records say.
    """

    def __init__(
        self,
        name: str,
        choices: Iterable[str],
        parts: Callable[[], Parts],
        options: TunerOptions | None = None,
        *,
        bundle: Callable[[], Bundle | None] = lambda: None,
        search: str = SEARCH,
    ) -> None:
        self._name, self._choices, self._parts = name, tuple(choices), parts
        self._options, self._bundle, self._search = options or TunerOptions(), bundle, search
        self._table = tuning_winners.opened_table(self._options.table)

    def find(self) -> tuple[str, str] | Miss:
        """Return what runs and how it is known: `table`, `first` or `record`; or why nothing is
        known.
        """
        parts = self._parts()
        if self._table is not None:
            named = dict(parts)
            config = self._table.find(self._name, named["source"], named["arguments"])
            chosen = None if config is None else config.kwargs.get(_KERNEL)
            if chosen in self._choices:
                return str(chosen), "table"
        if self._options.deterministic:
            return self._choices[0], "first"
        found = find_record(self._name, parts, self._bundle(), self._options)
        if isinstance(found, Miss):
            return found
        chosen = choice_of(found.record)
        if chosen not in self._choices:
            return Miss(
                f"{found.source}: its choice {chosen!r} is none of {', '.join(self._choices)}"
            )
        tuning_listeners.tell(found.record, found.tuning)
        METER.found(found.tuning)
        return chosen, "record"

    def keep(
        self, choice: str, times_ms: Mapping[str, float], reasons: Mapping[str, str], spent_s: float
    ) -> None:
        """Tell recordings of a choice that was measured, and write it where the next process looks.

        Args:
            choice: what runs.
            times_ms, reasons: the times of those that were measured, and why others have none.
            spent_s: how long it took to measure them.
        """
        timings = tuple(
            Timing(_named(name), time_ns=round(times_ms[name] * _NS_OF_MS))
            if name in times_ms and name not in reasons
            else Timing(_named(name), reason=reasons.get(name, "the measurement gave no time"))
            for name in self._choices
        )
        record = TuningRecord(self._name, self._parts(), _named(choice), self._search)
        keep_record(
            record,
            Tuning(id_of(record), timings, 0, round(spent_s * _US_OF_S), int(time.time())),
            self._options,
        )


class MultiKernelRecords(ChoiceRecords):
    """Looks up and keeps the choice among kernels under heuristics.

    A record counts when all of these are equal: the kernels' names, sources, candidates and sizes,
    the device, and who compiles.

    Args:
        name: of the multi-kernel.
        kernels: by name, in their order.
        options: as `ChoiceRecords` has them.

    Raises:
        ConfigError: there is no kernel.
    """

    def __init__(
        self, name: str, kernels: Mapping[str, HeuristicKernel], options: TunerOptions | None = None
    ) -> None:
        if not kernels:
            raise ConfigError(f"{name}: expected kernels to choose from")
        first, made = next(iter(kernels.values())), dict(kernels)
        super().__init__(
            name,
            made,
            lambda: _parts_of(made),
            options,
            bundle=lambda: first.tuned.ready().bundle,
        )


def choice_of(record: TuningRecord) -> str:
    """Return what a record says that runs; empty where it says something else."""
    try:
        config = tuning_winners.config_of(record.config)
    except FormatError:
        return ""
    return str(config.kwargs[_KERNEL]) if set(config.kwargs) == {_KERNEL} else ""


def _parts_of(kernels: Mapping[str, HeuristicKernel]) -> Parts:
    sources = [(name, toolchain.source_part(one.tuned.base)) for name, one in kernels.items()]
    configs = [[name, tuning_winners.configs_part(one.configs)] for name, one in kernels.items()]
    sizes = [f"{name} {sorted(one.candidates.hints.items())}" for name, one in kernels.items()]
    return parts_of(
        joint_source(sources),
        sha256(wire.pack(configs)).hex(),
        ", ".join(sizes),
        next(iter(kernels.values())).tuned.ready().driver,
        SEARCH,
    )


def _named(kernel: str) -> Named:
    return tuning_winners.named_of(Config({_KERNEL: kernel}))


class MultiKernel:
    """Implementations of one computation, of which the first call measures all and later calls run
    the fastest.

    Thread-safe: of several first calls at once one measures and the others wait.  With `records`
    the choice is looked up before anything is measured, and is a tuning record afterwards, which
    travels in bundles and stores; without, `choice` and `choose` carry it to another process.

    Args:
        name: of the computation, for errors.
        kernels: by name, each called with the arguments of the call.
        measure: times one call of a kernel with arguments and returns milliseconds, as
            `timed_on_clones` makes it. What it raises, of `Exception`, makes that kernel lose.
        arguments: kernel -> positions of the arguments that it takes; a kernel that is not named
            takes all.
        records: where the choice is looked up and kept; `MultiKernelRecords` for kernels under
            heuristics.
        refused: implementations that cannot run here at all, by name, and why; for `reasons`.

    Raises:
        ConfigError: there is no kernel, or a position is named for one that is not there.
    """

    def __init__(
        self,
        name: str,
        kernels: Mapping[str, Kernel],
        measure: Measure,
        *,
        arguments: Mapping[str, Sequence[int]] | None = None,
        records: ChoiceRecords | None = None,
        refused: Mapping[str, str] | None = None,
    ) -> None:
        self._reasons: dict[str, str] = dict(refused or {})
        unknown = sorted((arguments or {}).keys() - kernels.keys() - self._reasons.keys())
        if not kernels or unknown:
            raise ConfigError(
                f"{name}: expected kernels to choose from, and arguments for them alone; got"
                f" {unknown}"
            )
        self.name = name
        self._kernels, self._measure = dict(kernels), measure
        self._arguments = {kernel: tuple(places) for kernel, places in (arguments or {}).items()}
        self._lock = threading.Lock()
        self._records = records
        self._choice: str | None = None
        self._how = ""
        self._times_ms: dict[str, float] = {}

    @property
    def choice(self) -> str | None:
        """The name of the kernel that runs; None before the first call."""
        return self._choice

    @property
    def how(self) -> str:
        """Where the choice is from: `given`, `table`, `record`, `first` (deterministic) or
        `measured`; empty before the first call.
        """
        return self._how

    @property
    def times_ms(self) -> Mapping[str, float]:
        """What was measured; empty when nothing was."""
        return dict(self._times_ms)

    @property
    def reasons(self) -> Mapping[str, str]:
        """Why kernels have no time: they did not compile, or could not be run."""
        return dict(self._reasons)

    def choose(self, kernel: str) -> None:
        """Let one kernel run from now on, and measure nothing: a choice of another process, or one
        that is forced.

        Raises:
            ConfigError: there is no such kernel.
        """
        if kernel not in self._kernels:
            raise ConfigError(
                f"{self.name}: there is no kernel {kernel!r}; expected one of"
                f" {', '.join(self._kernels)}",
                name=kernel,
            )
        with self._lock:
            self._choice, self._how = kernel, "given"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the chosen kernel; the first call chooses.

        Raises:
            NoValidConfig: no kernel could be measured; `reasons` says of each why.
        """
        kernel = self._choice or self._chosen(args)  # after the first call no lock is taken
        return self._kernels[kernel](*self._of(kernel, args), **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the chosen kernel, as Inductor's wrappers call it; the first call chooses."""
        return self(*args, **kwargs)

    def _chosen(self, args: tuple[Any, ...]) -> str:
        with self._lock:
            if self._choice is None and not self._looked_up():
                started = time.perf_counter()
                # All are measured, also when the first is fast: which one wins depends on the sizes
                # of this call.
                for name, kernel in self._kernels.items():
                    try:
                        self._times_ms[name] = self._measure(kernel, self._of(name, args))
                    except Exception as error:  # noqa: BLE001  # an implementation that does not run here loses
                        self._reasons[name] = f"{type(error).__name__}: {error}"
                self._choice, self._how = self._fastest(), "measured"
                if self._records is not None:
                    spent_s = time.perf_counter() - started
                    self._records.keep(self._choice, self._finite(), self._reasons, spent_s)
            assert self._choice is not None
            return self._choice

    def _looked_up(self) -> bool:
        """Take a choice that is known already; returns whether there is one."""
        if self._records is None:
            return False
        found = self._records.find()
        if isinstance(found, Miss):
            _LOG.info("%s is measured: %s", self.name, found.reason)
            return False
        if found[0] not in self._kernels:  # it did not compile here
            return False
        self._choice, self._how = found
        return True

    def _finite(self) -> dict[str, float]:
        return {name: ms for name, ms in self._times_ms.items() if math.isfinite(ms)}

    def _fastest(self) -> str:
        usable = self._finite()
        if not usable:
            silent = dict.fromkeys(self._times_ms, "the measurement gave no time")
            reasons = tuple({**silent, **self._reasons}.items())
            raise NoValidConfig(
                f"{self.name}: none of {count(len(reasons), 'kernel')} can be run: "
                + "; ".join(f"{name}: {reason}" for name, reason in reasons),
                kernel=self.name,
                reasons=reasons,
            )
        return min(usable, key=usable.__getitem__)

    def _of(self, kernel: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        places = self._arguments.get(kernel)
        return args if places is None else tuple(args[place] for place in places)


def multi_kernel_future(
    name: str,
    kernels: Mapping[str, Future[Any]],
    measure: Measure,
    *,
    arguments: Mapping[str, Sequence[int]] | None = None,
    options: TunerOptions | None = None,
) -> CompileFuture[MultiKernel]:
    """Return a future of a `MultiKernel` whose implementations are compiled by a service;
    `CompileService.wait` takes it.

    One that does not compile is left out, with its reason in `MultiKernel.reasons`.  The future
    raises `NoValidConfig` when none compiles.

    Args:
        name, measure, arguments: as for `MultiKernel`.
        kernels: by name, futures of functions, or of kernels with `run`, as
            `HeuristicKernel.compile_in` and `compile_generated` return them.
        options: where the choice among kernels of heuristics is looked up and kept; other
            functions' choice is not.

    Raises:
        ConfigError: there is no future.
    """
    if not kernels:
        raise ConfigError(f"{name}: expected kernels to choose from")

    def make(outcomes: list[Any]) -> MultiKernel:
        by_name = dict(zip(kernels, outcomes, strict=True))
        reasons = {
            name: str(made) for name, made in by_name.items() if isinstance(made, BundlerError)
        }
        if len(reasons) == len(by_name):
            words = "; ".join(f"{kernel}: {reason}" for kernel, reason in reasons.items())
            raise NoValidConfig(
                f"{name}: none of {count(len(by_name), 'kernel')} compiles: {words}",
                kernel=name,
                reasons=tuple(reasons.items()),
            )
        usable = {
            kernel: getattr(made, "run", made)
            for kernel, made in by_name.items()
            if kernel not in reasons
        }
        known = {
            kernel: made for kernel, made in by_name.items() if isinstance(made, HeuristicKernel)
        }
        records = MultiKernelRecords(name, known, options) if len(known) == len(usable) else None
        return MultiKernel(
            name, usable, measure, arguments=arguments, records=records, refused=reasons
        )

    return JoinedFuture(name, list(kernels.values()), make)


def timed_on_clones(clock: Clock) -> Measure:
    """Return a function that measures a call on clones of its tensors, with the caller's content
    before each launch.

    Where there is no room for clones, the caller's tensors are used, and restored at the end (see
    `Sandbox`).  A kernel that tunes itself does so in its first launch, which does not count.

    Args:
        clock: such as `CudaClock(rep_ms=40)`.
    """

    def measure(kernel: Kernel, args: tuple[Any, ...]) -> float:
        values = {str(place): value for place, value in enumerate(args)}
        tensors = [name for name, value in values.items() if is_tensor(value)]
        # Every tensor is cloned: which of them an implementation writes is not known here.
        with Sandbox(values, tensors, ()).open() as sandbox:
            given = [sandbox.values[name] for name in values]
            return clock.sample(lambda: kernel(*given), sandbox.reset).compared_ms

    return measure


class ShapeKernel:
    """Implementations tuned for different shapes; a call runs the one whose shapes are nearest.

    Nothing is measured.  Thread-safe.  What was found for the last `memo` different shapes is
    remembered.

    Args:
        name: of the computation, for errors.
        kernels: shapes of the tensor arguments, in order -> kernel; the key None is for shapes that
            no other kernel is made for.
        memo: how many shapes are remembered.

    Raises:
        ConfigError: there is no kernel, or `memo` is less than 1.
    """

    def __init__(
        self, name: str, kernels: Mapping[Shapes | None, Kernel], *, memo: int = DEFAULT_MEMO
    ) -> None:
        if not kernels or memo < 1:
            raise ConfigError(
                f"{name}: expected kernels to choose from, and to remember 1 or more shapes, not"
                f" {memo}"
            )
        self.name = name
        self._kernels, self._most = dict(kernels), memo
        self._lock = threading.Lock()
        self._memo: OrderedDict[Shapes, Kernel] = OrderedDict()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the kernel for the shapes of this call; raises `ConfigError` where none fits."""
        return self.kernel_for(shapes_of(args))(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the kernel for the shapes of this call, as Inductor's wrappers call it."""
        return self(*args, **kwargs)

    def kernel_for(self, shapes: Shapes) -> Kernel:
        """Return the kernel whose shapes are nearest, the first of equals.

        Raises:
            ConfigError: no kernel has tensors of these ranks, and there is none for all others.
        """
        with self._lock:
            found = self._memo.get(shapes)
            # Comparing shapes costs more than the launch of a small kernel, so the last results are
            # kept.
            if found is None:
                found = self._memo[shapes] = self._nearest(shapes)
                if len(self._memo) > self._most:
                    self._memo.popitem(last=False)
            else:
                self._memo.move_to_end(shapes)
            return found

    def _nearest(self, shapes: Shapes) -> Kernel:
        distances = {key: distance(key, shapes) for key in self._kernels}
        nearest = min(distances, key=distances.__getitem__)
        if distances[nearest] == NO_MATCH:
            raise ConfigError(
                f"{self.name}: no kernel is made for tensors of ranks {tuple(map(len, shapes))};"
                " give one for the key None",
                kernel=self.name,
                got=shapes,
            )
        return self._kernels[nearest]


def distance(made_for: Shapes | None, shapes: Shapes) -> float:
    """Return how far shapes are from those that a kernel was made for: the sum of the differences
    of their binary logarithms.

    Infinite where the number of tensors or a rank differs: such a kernel is for another problem.
    None, which is made for nothing in particular, is farther than everything that can be compared.
    A size of 0 counts as half an element.
    """
    if made_for is None:
        return FALLBACK_DISTANCE
    if list(map(len, made_for)) != list(map(len, shapes)):
        return NO_MATCH
    pairs = zip(_flat(made_for), _flat(shapes), strict=True)
    return sum(abs(_log2(mine) - _log2(yours)) for mine, yours in pairs)


def shapes_of(args: Iterable[Any]) -> Shapes:
    """Return the shapes of the tensors among a call's arguments, in their order."""
    return tuple(tuple(int(size) for size in arg.shape) for arg in args if hasattr(arg, "data_ptr"))


def _flat(shapes: Shapes) -> list[int]:
    return [size for shape in shapes for size in shape]


def _log2(size: int) -> float:
    return math.log2(size) if size > 0 else -1.0
