# SPDX-License-Identifier: Apache-2.0
"""The one seam where a failure of a cache becomes a warning and a number, or in strict mode an error."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable

from bundler.config import Strict
from bundler.errors import BundlerError, BundlerWarning
from bundler.integrations.counting import Tally

_LOG = logging.getLogger("bundler.integrations")


class Troubles:
    """Tells of each cause once, and counts all.

    Args:
        tally: where they are counted.
        strict: returns the mode in force now.
    """

    def __init__(self, tally: Tally, strict: Callable[[], Strict]) -> None:
        self._tally, self._strict = tally, strict

    def met(self, error: Exception, doing: str) -> None:
        """Count a failure and warn of it the first time; in strict mode raise it instead.

        Args:
            error: what went wrong.
            doing: what we were doing, for the message.
        """
        cause = error.code if isinstance(error, BundlerError) else type(error).__name__
        first = self._tally.failed(cause)
        if self._strict() == "error":
            raise error
        self.tell(f"{doing}: {error}", first=first, error=error)

    def noted(self, error: Exception, doing: str) -> None:
        """Count a failure where raising would reach nobody, as in a thread of ours."""
        cause = error.code if isinstance(error, BundlerError) else type(error).__name__
        self.tell(f"{doing}: {error}", first=self._tally.failed(cause), error=error)

    def noticed(self, cause: str, message: str) -> None:
        """Count something that is no error, and warn of it the first time."""
        self.tell(message, first=self._tally.failed(cause))

    @staticmethod
    def tell(message: str, *, first: bool, error: Exception | None = None) -> None:
        """Warn the first time; later ones are for those who read logs."""
        trace = error if error is not None and not isinstance(error, BundlerError) else None
        _LOG.log(logging.WARNING if first else logging.DEBUG, "%s", message, exc_info=trace)
        if first:
            warnings.warn(f"{message}; the program goes on without it", BundlerWarning, stacklevel=4)
