# SPDX-License-Identifier: Apache-2.0
"""Strict mode: a kernel that would be compiled is an error, or a warning, that says what was
recorded instead.

Each lookup engine has a `StrictMode` and tells it of each miss.  `asked_of` turns a noted compile
into what keys are compared by; the engine and `explanations.py` call it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from bundler.errors import BundlerError, ConfigError, FormatError, StrictModeViolation

# Keys are compared only for a kernel that nobody has.
if TYPE_CHECKING:
    from bundler.config import Strict
    from bundler.integrations.key_comparison import Difference, KeyedKernel
    from bundler.toolchain.recording.spool_records import SpooledEvent

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
        from bundler.integrations.key_comparison import nearest

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


def asked_of(record: SpooledEvent) -> KeyedKernel | None:
    """Return a kernel by its key parts; None when they are not known."""
    if record.parts_bytes is None:
        return None
    from bundler.format.keyparts import KeyParts
    from bundler.integrations.key_comparison import KeyedKernel

    try:
        parts = KeyParts.from_bytes(record.parts_bytes)
    except FormatError:
        return None
    return KeyedKernel(
        record.key, dict(parts.parts).get("source.name", record.name), record.target, parts
    )
