# SPDX-License-Identifier: Apache-2.0
"""One process that compiles a kernel with Triton through our cache manager, whatever the store does; `cloud_faults` runs it.

python -m tools.cluster.fault_plugin        the store is in the environment; prints JSON: seconds, warnings, whether the kernel is right
"""

from __future__ import annotations

import atexit
import json
import time
import warnings
from typing import Any

from tools.shared import example_kernels

TARGET = "cuda:90"
KERNEL = "gelu"


def main() -> None:
    """Compile, end as a program does, and say how it went."""
    found: dict[str, Any] = {"warnings": []}
    # Before ours, so that it runs after ours.
    atexit.register(_tell, found)
    import triton  # noqa: F401  # its import is no part of the measurement

    from bundler.errors import BundlerWarning

    def heard(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if issubclass(category, BundlerWarning):
            found["warnings"].append(str(message))

    warnings.simplefilter("always")
    warnings.showwarning = heard
    kernels = example_kernels.load()
    found["started"] = time.perf_counter()
    (kernel,) = kernels.compile_one(KERNEL, TARGET)
    found["compiled_s"] = time.perf_counter() - found["started"]
    found["whole"] = kernel.asm["cubin"].startswith(b"\x7fELF")


def _tell(found: dict[str, Any]) -> None:
    found["ended_s"] = time.perf_counter() - found.pop("started")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
