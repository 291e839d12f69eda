# SPDX-License-Identifier: Apache-2.0
"""`logger`: the loggers of this package, which cost nothing before something is logged.

Every room takes its logger from here.  `logging` takes a new process as long to import as fifty
kernels take to restore, and where the program itself has not imported it, nobody has asked for our
lines yet.  A program that does not configure logging sees none of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from logging import Logger


class _LazyLogger:
    """Is the logger of its name in all that it is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        import logging

        ours = logging.getLogger("bundler")
        if not ours.handlers:
            ours.addHandler(logging.NullHandler())  # else Python shows warnings that nobody handles
        return getattr(logging.getLogger(self._name), attribute)


def logger(name: str) -> Logger:
    """Return the logger of this name, which begins with `bundler`."""
    return cast("Logger", _LazyLogger(name))
