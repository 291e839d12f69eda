# SPDX-License-Identifier: Apache-2.0
"""`FailurePolicy`: where a failure of a cache becomes a warning and a number, or in strict mode an
error.

Every way from Triton into a session (`lookup_engine.py`, `sessions.py`) leads through
`FailurePolicy.tolerating`, or through a handler that hands what it caught to `FailurePolicy`;
nothing else in this room catches what it did not expect.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from bundler.errors import BundlerError, StrictModeViolation
from bundler.integrations.session_tally import Tally
from bundler.package_loggers import logger
from bundler.user_warnings import show

if TYPE_CHECKING:
    from bundler.config import Strict

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
