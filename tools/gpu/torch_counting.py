# SPDX-License-Identifier: Apache-2.0
"""Counts Triton compiles in a process and in torch's compile workers: a cache manager that notes
each finished kernel.

Set as TRITON_CACHE_MANAGER.  Triton stores a group of files after each compile and at no other
time.
"""

from __future__ import annotations

import os
from typing import Any

from triton.runtime.cache import FileCacheManager

LOG_VARIABLE = "GPU_TORCH_COMPILES"


class CountingCacheManager(FileCacheManager):  # type: ignore[misc]  # Triton has no types
    """Triton's own manager, with one line in a file for each `put_group`: the process and the
    kernel.
    """

    def put_group(self, filename: str, group: dict[str, str]) -> Any:
        """Note the compile, and store as usual."""
        # One short write in append mode is whole, whatever other processes write.
        with open(os.environ[LOG_VARIABLE], "ab", buffering=0) as log:
            log.write(f"{os.getpid()} {filename}\n".encode())
        return super().put_group(filename, group)
