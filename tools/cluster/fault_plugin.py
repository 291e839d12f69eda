# SPDX-License-Identifier: Apache-2.0
"""One process that compiles a kernel with Triton through our cache manager, whatever the store
does; `cloud_faults` runs it.

python -m tools.cluster.fault_plugin        the store is in the environment; prints JSON

It says how long the compiling thread was in calls of the store, how long the end of the process
took, the warnings, and whether the kernel is right.  The time of the compile itself, which varies
with the load of the machine, is not in these.
"""

from __future__ import annotations

import atexit
import json
import threading
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

    from bundler.backends.breaker import Guarded
    from bundler.errors import BundlerWarning

    # every call of a store that may fail goes through it
    call, spent = Guarded._call, [0.0]  # noqa: SLF001

    def timed(*given: Any, **named: Any) -> Any:
        started = time.perf_counter()
        try:
            return call(*given, **named)
        finally:
            if threading.current_thread() is threading.main_thread():
                spent[0] += time.perf_counter() - started

    Guarded._call = timed  # type: ignore[method-assign]  # noqa: SLF001  # as above

    def heard(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if issubclass(category, BundlerWarning):
            found["warnings"].append(str(message))

    warnings.simplefilter("always")
    warnings.showwarning = heard
    kernels = example_kernels.load()
    (kernel,) = kernels.compile_one(KERNEL, TARGET)
    found["waited_s"], found["since"] = spent[0], time.perf_counter()
    found["whole"] = kernel.asm["cubin"].startswith(b"\x7fELF")


def _tell(found: dict[str, Any]) -> None:
    found["end_s"] = time.perf_counter() - found.pop("since")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
