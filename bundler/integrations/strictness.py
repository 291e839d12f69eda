# SPDX-License-Identifier: Apache-2.0
"""Strict mode: a kernel that would be compiled is an error, or a line in the log, that says what was recorded instead."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from bundler.config import Strict
from bundler.errors import BundlerError, ConfigError, FormatError, StrictModeViolation
from bundler.format.keyparts import KeyParts
from bundler.integrations.comparing import Keyed, nearest
from bundler.toolchain.records import SpooledEvent

_LOG = logging.getLogger("bundler.integrations")
MODES = ("off", "warn", "error")


class Guard:
    """What a compile is in one session.

    Args:
        mode: `off`, `warn` or `error`; may be set any time.
        recorded: yields kernels that were recorded, to say what is nearest.
    """

    def __init__(self, mode: Strict, recorded: Callable[[], Iterable[Keyed]]) -> None:
        self.mode: Strict = mode
        self._recorded = recorded
        self._lock = threading.Lock()
        self._told: set[str] = set()

    def arm(self, mode: Strict) -> None:
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
        if self.mode == "off":
            return
        record = event()
        if self.mode == "warn":
            with self._lock:
                first = record.key not in self._told
                self._told.add(record.key)
            if not first:
                return
        error = self._violation(record, why)
        if self.mode == "error":
            raise error
        _LOG.warning("%s", error)

    def reset_after_fork(self) -> None:
        """Give the child a lock that no thread of the parent holds."""
        self._lock = threading.Lock()

    def _violation(self, record: SpooledEvent, why: str) -> StrictModeViolation:
        asked = asked_of(record)
        what = f"{record.name} ({record.key}) for {record.target} would be compiled"
        if why or asked is None:
            return StrictModeViolation(
                f"{what}: {why or 'its key cannot be taken apart'}", key=record.key, name=record.name
            )
        try:
            found = nearest(asked, self._recorded())
        except BundlerError as error:
            found, unknown = None, f"what was recorded cannot be read: {error}"
        else:
            unknown = "no kernel of that name was ever recorded"
        there = unknown
        if found is not None:
            there = f"nearest recorded {found[0].key}; " + "; ".join(map(str, found[1]))
        return StrictModeViolation(
            f"{what}, which strict mode forbids; asked for: {asked.specialization}; {there}; record it in a warm-up, or set "
            "strict to 'warn'",
            key=record.key, name=record.name, nearest=found[0].key if found is not None else None,
            differences=tuple(map(str, found[1])) if found is not None else (),
        )  # fmt: skip


def asked_of(record: SpooledEvent) -> Keyed | None:
    """Return a kernel by its key parts; None when they are not known."""
    if record.parts_bytes is None:
        return None
    try:
        parts = KeyParts.from_bytes(record.parts_bytes)
    except FormatError:
        return None
    return Keyed(record.key, dict(parts.parts).get("source.name", record.name), record.target, parts)
