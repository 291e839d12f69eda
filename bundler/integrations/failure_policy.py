# SPDX-License-Identifier: Apache-2.0
"""What a session counts, and what is a warning or an error: `Tally`, `FailurePolicy`, `StrictMode`.

`Tally` counts for every part of a session; `Tally.snapshot` makes the `Counters` that users see.
A failure of a cache becomes a warning and a number, or in strict mode an error, in `FailurePolicy`;
a kernel that would be compiled becomes one in `StrictMode`, which says what was recorded instead.

Every way from Triton into a session (`lookup_engine.py`, `sessions.py`) leads through
`FailurePolicy.tolerating`, or through a handler that hands what it caught to `FailurePolicy`;
nothing else in this room catches what it did not expect.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from bundler import observers
from bundler.errors import BundlerError, ConfigError, StrictModeViolation
from bundler.package_loggers import logger
from bundler.user_warnings import show

if TYPE_CHECKING:
    from bundler.config import Strict
    from bundler.integrations.key_comparison import Difference, KeyedKernel
    from bundler.integrations.process_report import Counters
    from bundler.toolchain.recording.spool_records import SpooledEvent


# The report names these; a process that compiles for days keeps no more.
SLOWEST = 10
# Hits that are summed up at once.
MANY_HITS = 4096
# Kernels of which hits are counted one by one; a process that finds more names no others.
MOST_KERNELS = 100_000
# What `add` tells observers: the name of a metric and its labels.
_TOLD: dict[str, tuple[str, dict[str, str]]] = {
    "misses": ("lookups", {"result": "miss", "tier": "none"}),
    "published": ("published", {}),
    "bytes_fetched": ("bytes", {"direction": "fetched", "tier": "store"}),
    "bytes_sent": ("bytes", {"direction": "sent", "tier": "store"}),
}
# What is counted one by one, under the names of `Counters`.
_NUMBERS = ("misses", "compiles", "published", "strict_warnings", "launchers", "moved")
_BYTES = ("bytes_fetched", "bytes_sent")


class Tally:
    """Counts for one session; safe from any thread.

    Attributes:
        hits: kernels that were found since the last sum: where, the seconds that their compiles
            took, the bytes fetched, the key.  Whoever finds one appends it and calls `fold` when
            there are many: that needs no lock.
    """

    def __init__(self) -> None:
        self.reset_after_fork()

    def reset_after_fork(self) -> None:
        """Count from nought, with a lock that no thread of the parent holds."""
        self._lock = threading.Lock()
        self.hits: deque[tuple[str, float, int, str]] = deque()
        self._hits_of: Counter[str] = Counter()
        self._found: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self._launchers_of_triton: Counter[str] = Counter()
        self._numbers: Counter[str] = Counter()
        self._moved: dict[str, str] = {}
        self._compile_seconds, self._seconds_saved = 0.0, 0.0
        self._slowest: list[tuple[str, float]] = []

    def fold(self) -> None:
        """Sum up the hits, and tell observers of each."""
        # It ends when there is none left; another thread may append one at any time.
        with self._lock, contextlib.suppress(IndexError):
            while True:
                place, saved_s, fetched_bytes, key = self.hits.popleft()
                if observers.listeners:
                    _tell_hit(place, saved_s, fetched_bytes)
                self._found[place] += 1
                if key in self._hits_of or len(self._hits_of) < MOST_KERNELS:
                    self._hits_of[key] += 1
                self._seconds_saved += saved_s
                self._numbers["bytes_fetched"] += fetched_bytes

    def moved(self, key: str, origin: str) -> None:
        """Count a hit that was a kernel which only moved, recorded under the key `origin`."""
        with self._lock:
            self._numbers["moved"] += 1
            if len(self._moved) < MOST_KERNELS:
                self._moved[key] = origin

    def compiled(self, name: str, seconds: float, key: str) -> None:
        """Count a kernel that was compiled."""
        observers.ended("compile", seconds, kernel=name, key=key)
        with self._lock:
            self._numbers["compiles"] += 1
            self._compile_seconds += seconds
            slowest = sorted([*self._slowest, (name, seconds)], key=lambda pair: -pair[1])
            self._slowest = slowest[:SLOWEST]

    def add(self, what: str, number: int = 1, *, told: bool = False) -> None:
        """Count something that is called as an attribute of `Counters`; `told` when observers have
        heard of it already.
        """
        if observers.listeners and what in _TOLD and not told:
            name, labels = _TOLD[what]
            observers.count(name, number, **labels)
        with self._lock:
            self._numbers[what] += number

    def launcher(self, reason: str | None) -> None:
        """Count a launcher that was given, or the reason why Triton builds its own."""
        with self._lock:
            if reason is None:
                self._numbers["launchers"] += 1
            else:
                self._launchers_of_triton[reason] += 1

    def failed(self, cause: str) -> bool:
        """Count a failure; True for the first of its cause."""
        with self._lock:
            self._errors[cause] += 1
            return self._errors[cause] == 1

    def hits_of(self) -> dict[str, int]:
        """Return how often each kernel was found, by key."""
        self.fold()
        with self._lock:
            return dict(self._hits_of)

    def moved_from(self) -> dict[str, str]:
        """Return the key under which each kernel that moved was recorded, by the key that was asked
        for.
        """
        with self._lock:
            return dict(self._moved)

    def snapshot(self) -> Counters:
        """Return the numbers as they are now."""
        from bundler.integrations.process_report import Counters  # a hit does not need it

        self.fold()
        with self._lock:
            return Counters(
                hits=self._found.total(),
                found=dict(sorted(self._found.items())),
                errors=dict(sorted(self._errors.items())),
                launchers_of_triton=dict(sorted(self._launchers_of_triton.items())),
                slowest=tuple(self._slowest),
                compile_seconds=self._compile_seconds,
                seconds_saved=self._seconds_saved,
                **{name: self._numbers[name] for name in (*_NUMBERS, *_BYTES)},
            )


def _tell_hit(place: str, saved_s: float, fetched_bytes: int) -> None:
    observers.count("lookups", result="hit", tier=place)
    observers.count("seconds_saved", saved_s)
    if fetched_bytes:
        observers.count("bytes", fetched_bytes, direction="fetched", tier=place)


_LOG = logger("bundler.integrations")


class ToleratedBlock:
    """A block of `FailurePolicy.tolerating`.  Each kernel that is found goes through one; a
    generator would take three times as long.
    """

    __slots__ = ("_can_raise", "_doing", "_policy")

    def __init__(self, policy: FailurePolicy, doing: str, *, can_raise: bool) -> None:
        self._policy, self._doing, self._can_raise = policy, doing, can_raise

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> bool:
        if not isinstance(error, Exception):
            return False
        (self._policy.tolerate if self._can_raise else self._policy.count)(error, self._doing)
        return True


class FailurePolicy:
    """Tells of each cause once, and counts all.

    Args:
        tally: where they are counted.
        strict: returns the mode in force now.
    """

    def __init__(self, tally: Tally, strict: Callable[[], Strict]) -> None:
        self._tally, self._strict = tally, strict

    def tolerating(self, doing: str, *, can_raise: bool = True) -> ToleratedBlock:
        """Return a block after whose failure we go on: it is counted, and warned of the first time.

        Args:
            doing: what we are doing, for the message.
            can_raise: whether an error that strict mode raises would reach somebody; not in a
                thread of ours.

        Raises:
            StrictModeViolation: as it is; it says what strict mode is asked for.
            Exception: what failed, in strict mode.
        """
        return ToleratedBlock(self, doing, can_raise=can_raise)

    def tolerate(self, error: Exception, doing: str) -> None:
        """Do what the end of a `tolerating` block does with an error; for a block that every kernel
        goes through.

        Raises:
            StrictModeViolation: as it is.
            Exception: what failed, in strict mode.
        """
        if isinstance(error, StrictModeViolation):
            raise error
        self.report(error, doing)

    def report(self, error: Exception, doing: str) -> None:
        """Count a failure and warn of it the first time; in strict mode raise it instead.

        Args:
            error: what went wrong.
            doing: what we were doing, for the message.
        """
        first = self._tally.failed(_cause(error))
        if self._strict() == "error":
            raise error
        self._warn(f"{doing}: {error}", first=first, error=error)

    def count(self, error: Exception, doing: str) -> None:
        """Count a failure where raising would reach nobody, as in a thread of ours."""
        first = self._tally.failed(_cause(error))
        self._warn(f"{doing}: {error}", first=first, error=error)

    def warn_once(self, cause: str, message: str, *, lost: bool = True) -> None:
        """Count something that is no error, and warn of it the first time; `lost` says whether the
        program has to do without something.
        """
        self._warn(message, first=self._tally.failed(cause), lost=lost)

    @staticmethod
    def warn(message: str) -> None:
        """Warn of something that may be as it should be, a first run for one: never an error,
        whatever the filters say.
        """
        _LOG.warning("%s", message)
        show(message)

    @staticmethod
    def _warn(
        message: str, *, first: bool, error: Exception | None = None, lost: bool = True
    ) -> None:
        """Warn the first time; later ones are for those who read logs."""
        trace = error if error is not None and not isinstance(error, BundlerError) else None
        _LOG.log(logging.WARNING if first else logging.DEBUG, "%s", message, exc_info=trace)
        if first:
            show(f"{message}; the program goes on without it" if lost else message)

    def unsafe(self, sentence: str) -> None:
        """Count a directory that others could have put something into, and warn of it."""
        self._tally.failed("unsafe-directory")
        self.warn(sentence)

    def unexpected(self, sentence: str) -> None:
        """Count a kernel that strict mode warns of, and warn."""
        self._tally.add("strict_warnings")
        self.warn(sentence)


def _cause(error: Exception) -> str:
    return error.code if isinstance(error, BundlerError) else type(error).__name__


MODES = ("off", "warn", "error")


class StrictMode:
    """What a compile is in one session.

    Args:
        mode: `off`, `warn` or `error`; may be set any time.
        recorded: yields kernels that were recorded, to say what is nearest.
        warn: in mode `warn` is told of each kernel once, in a sentence.
    """

    def __init__(
        self,
        mode: Strict,
        recorded: Callable[[], Iterable[KeyedKernel]],
        warn: Callable[[str], None],
    ) -> None:
        self.mode: Strict = mode
        self._recorded, self._warn = recorded, warn
        self._lock = threading.Lock()
        self._told: set[str] = set()

    def set_mode(self, mode: Strict) -> None:
        """Change the mode; raises `ConfigError` for another one."""
        if mode not in MODES:
            raise ConfigError(f"strict={mode!r}: expected {', '.join(map(repr, MODES))}", got=mode)
        self.mode = mode

    def miss(self, event: Callable[[], SpooledEvent], why: str = "") -> None:
        """Hear of a kernel that will be compiled now.

        Args:
            event: tells what is known of it; called only when that matters.
            why: why it is compiled, where that is not because nobody has it.

        Raises:
            StrictModeViolation: in mode `error`.
        """
        mode = self.mode
        if mode == "off":
            return
        record = event()
        if mode == "error":
            raise self._violation(record, why)
        with self._lock:
            first = record.key not in self._told
            self._told.add(record.key)
        if first:
            what = f"{record.name} ({record.key}) for {record.target} is compiled"
            self._warn(
                f"{what}: {why}"
                if why
                else f"{what}, and was not recorded; {self._compared(record)[0]}"
            )

    def reset_after_fork(self) -> None:
        """Give the child a lock that no thread of the parent holds."""
        self._lock = threading.Lock()

    def _violation(self, record: SpooledEvent, why: str) -> StrictModeViolation:
        what = f"{record.name} ({record.key}) for {record.target} would be compiled"
        if why:
            return StrictModeViolation(f"{what}: {why}", key=record.key, name=record.name)
        said, found = self._compared(record)
        return StrictModeViolation(
            f"{what}, which strict mode forbids; {said}, or set strict to 'warn'",
            key=record.key,
            name=record.name,
            nearest=found[0].key if found is not None else None,
            differences=tuple(map(str, found[1])) if found is not None else (),
        )

    def _compared(
        self, record: SpooledEvent
    ) -> tuple[str, tuple[KeyedKernel, tuple[Difference, ...]] | None]:
        """Return what was asked for and what is nearest to it, as the end of a sentence, and the
        nearest kernel.
        """
        from bundler.integrations.key_comparison import asked_of, nearest

        asked = asked_of(record)
        if asked is None:
            return "its key cannot be taken apart; record it in a warm-up", None
        try:
            found = nearest(asked, self._recorded())
        except BundlerError as error:
            found, there = None, f"what was recorded cannot be read: {error}"
        else:
            there = "no kernel of that name was ever recorded"
        if found is not None:
            there = f"nearest recorded {found[0].key}; " + "; ".join(map(str, found[1]))
        return f"asked for: {asked.specialization}; {there}; record it in a warm-up", found
