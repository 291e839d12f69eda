# SPDX-License-Identifier: Apache-2.0
"""`Tier`: one byte store among several, with its counters and the rules by which it finds out
damage.

`Tiers` asks every store through it.  `Rules` says how to check objects and what refs name, which
`bundler/store/store_urls.py` knows.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from bundler.backends.backend_errors import (
    BackendDenied,
    BackendError,
    BackendFull,
    BackendSuspended,
    BackendTimeout,
    BackendUnavailable,
    InvalidKey,
)
from bundler.backends.port import Backend, OwnLock, TierCounters, Unread

T = TypeVar("T")
_COUNTED: dict[type[BackendError], str] = {BackendTimeout: "timeouts", BackendSuspended: "rested"}
_CAUSES: dict[type[BackendError], str] = {
    BackendTimeout: "timeout",
    BackendUnavailable: "unavailable",
    BackendFull: "full",
    BackendDenied: "denied",
}


@dataclass(frozen=True)
class Rules:
    """What tiers are told about what they hold, which a byte store does not know by itself.

    Attributes:
        is_sound: whether an object's bytes are those that were stored once, by its key and them;
            compares their digest.  None: that cannot be told, and what a tier gives is taken as it
            is.
        named_by: which objects a ref's value names; a near tier gets the ref when it has them.
            None: it cannot be told.
        on_failure: called once for each tier and cause of a failure that no caller gets as an
            error: tier, cause, message.
    """

    is_sound: Callable[[str, bytes], bool] | None = None
    named_by: Callable[[str, bytes], Collection[str] | None] = field(
        default=lambda _key, _value: ()
    )
    on_failure: Callable[[str, str, str], None] = field(
        default=lambda _tier, _cause, _message: None
    )


class TierTally:
    """Counts for one tier; safe under threads, and in a forked child, which goes on from its
    parent's numbers.
    """

    def __init__(self, name: str) -> None:
        self._name, self._counts = name, Counter[str]()
        self._lock = OwnLock()

    def add(self, what: str, number: int = 1) -> None:
        """Count something that is called as an attribute of `TierCounters`."""
        with self._lock:
            self._counts[what] += number

    def first(self, cause: str) -> bool:
        """Tell whether this is the first time that something happened."""
        with self._lock:
            self._counts[f"cause {cause}"] += 1
            return self._counts[f"cause {cause}"] == 1

    def snapshot(self) -> TierCounters:
        """Return the numbers as they are now."""
        with self._lock:
            return TierCounters(
                self._name, **{k: v for k, v in self._counts.items() if " " not in k}
            )


class Tier:
    """A store with its name and numbers.

    Args:
        name: what to call it, without any secret.
        backend: the store; one that is not `writable` is never written.
        rules: what is known of objects and refs.
    """

    def __init__(self, name: str, backend: Backend, rules: Rules) -> None:
        self.name, self.backend, self.rules, self.tally = name, backend, rules, TierTally(name)
        self.writable = backend.writable

    def ask(self, call: Callable[[Backend], T]) -> T:
        """Make a call, and count how it failed if it does."""
        try:
            return call(self.backend)
        except InvalidKey:
            raise
        except BackendError as error:
            self.tally.add(_COUNTED.get(type(error), "errors"))
            raise

    def get_sound(self, max_bytes: Mapping[str, int]) -> dict[str, bytes]:
        """Return the undamaged objects; what comes damaged twice is removed, so that it is filled
        again.
        """
        got = self.ask(lambda b: b.get_within(max_bytes))
        is_sound = self.rules.is_sound or (lambda _key, _value: True)
        damaged = [key for key, value in got.items() if not is_sound(key, value)]
        if damaged:
            again = self.ask(lambda b: b.get_within({key: max_bytes[key] for key in damaged}))
            whole = {key: value for key, value in again.items() if is_sound(key, value)}
            self._remove([key for key in damaged if key not in whole], again)
            got = {key: value for key, value in got.items() if key not in damaged} | whole
        self.tally.add("hits", len(got))
        self.tally.add("misses", len(max_bytes) - len(got))
        return got

    def _remove(self, damaged: list[str], found: Mapping[str, bytes]) -> None:
        if damaged:
            first = found.get(damaged[0])
            self.tally.add("damaged", len(damaged))
            why = f": {first.why}" if isinstance(first, Unread) else ""
            self._tell("damaged", f"{damaged[0]} is not what was stored{why}")
            if self.writable:
                with self.tolerating():
                    self.ask(lambda b: b.delete(damaged))

    @contextlib.contextmanager
    def tolerating(self) -> Iterator[None]:
        """Run a block whose `BackendError` is counted, and reported once for each cause, in place
        of being raised.
        """
        try:
            yield
        except BackendError as error:
            self.tolerate(error)

    def tolerate(self, error: BackendError) -> None:
        """Report a failure that no caller gets as an error, once for each cause."""
        if not isinstance(error, BackendSuspended):  # the failure before the rest was reported
            self._tell(_CAUSES.get(type(error), "error"), str(error))

    def _tell(self, cause: str, message: str) -> None:
        if self.tally.first(cause):
            self.rules.on_failure(self.name, cause, message)
