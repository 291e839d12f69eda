# SPDX-License-Identifier: Apache-2.0
"""`warm`: does ahead what Triton does once in each process: its import, and the hash of its library
that is part of every key.

The server of the compile service calls it before it forks workers.
"""

from __future__ import annotations

import importlib
from typing import Any


def warm() -> None:
    """Import Triton and its compiler, and have its installation hashed; a process forked afterwards
    has all of it.

    No driver is asked, no CUDA initialized and no thread started.

    Raises:
        ImportError: Triton is not installed.
    """
    importlib.import_module("triton.compiler")
    cache: Any = importlib.import_module("triton.runtime.cache")
    cache.triton_key()
