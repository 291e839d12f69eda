# SPDX-License-Identifier: Apache-2.0
"""The only reader of this package's own environment variables.

Triton's and torch's variables belong to `bundler.toolchain`, which reads them at each call.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

SPOOL_DIRECTORY = "TRITON_BUNDLER_SPOOL"
SPOOL_INNER = "TRITON_BUNDLER_SPOOL_INNER"
SPOOL_VARIABLES = (SPOOL_DIRECTORY, SPOOL_INNER)


@dataclass(frozen=True)
class SpoolSettings:
    """What a recording parent told its child processes; set by us, not by users.

    Attributes:
        directory: where children write their records, None when nobody records; several joined by `os.pathsep` when
            recordings are nested.
        inner: the cache manager class that the user had configured, as `module:Class`.
    """

    directory: str | None
    inner: str | None


def spool_settings() -> SpoolSettings:
    """Read the spool variables of this process."""
    return SpoolSettings(
        directory=os.environ.get(SPOOL_DIRECTORY) or None,
        inner=os.environ.get(SPOOL_INNER) or None,
    )
