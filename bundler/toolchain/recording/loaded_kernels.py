# SPDX-License-Identifier: Apache-2.0
"""`loaded_kernels`: kernels that this process compiled or loaded before a recording began, found in
the JIT's own in-memory caches.

Recordings and sessions add them to what they heard.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from typing import Any

from bundler.package_loggers import logger
from bundler.toolchain import instances
from bundler.toolchain.events import CompileEvent, kernel_key, target_of
from bundler.toolchain.keys.encoding import as_tuples

_LOG = logger("bundler.toolchain")
# Triton writes the environment that is part of the key into metadata, beside options, which are all
# lower case.
_ENVIRONMENT_NAME = re.compile(r"[A-Z][A-Z0-9_]*")


def loaded_kernels() -> Iterator[CompileEvent]:
    """Yield each finished kernel in the JIT caches of this process, with the device it was loaded
    for.

    The options are rebuilt from the kernel's metadata, which compiler passes may have changed
    since: whether they are those of the key is for `capture.key_parts` to prove.  A kernel whose
    compile is still running is left out; one that cannot be read is left out with a log line.
    Nothing when Triton is not imported.  Which functions are known, says `instances`; looking for
    them takes 0.1 s where torch is imported.
    """
    for function in instances.instances(instances.JIT_FUNCTION):
        # Copied in one step: during a loop over the items another thread could change the
        # dictionary.
        for device, cache in list(dict(getattr(function, "device_caches", {})).items()):
            for kernel in list(cache[0].values()):
                event = _event_of(kernel, device)
                if event is not None:
                    yield event


def _event_of(kernel: Any, device: int) -> CompileEvent | None:
    finished = _finished(kernel)
    try:
        return None if finished is None else _read(finished, device)
    except Exception as error:  # noqa: BLE001  # the seam: a kernel object of another shape must not end the user's program
        _LOG.warning("a loaded kernel cannot be recorded (%s: %s)", type(error).__name__, error)
        return None


def _finished(kernel: Any) -> Any | None:
    """Return the compiled kernel behind a cache value; asking an unfinished one for anything would
    wait for its compile.
    """
    kind: Any = getattr(sys.modules.get("triton.runtime._async_compile"), "FutureKernel", None)
    if kind is None or type(kernel) is not kind:
        return kernel
    inner, future = vars(kernel).get("kernel"), vars(kernel).get("future")
    if inner is not None or future is None:
        return inner
    ended = future.done() and not future.cancelled() and future.exception() is None
    return future.result() if ended else None


def _read(kernel: Any, device: int) -> CompileEvent:
    metadata = kernel.metadata._asdict()
    compiler: Any = sys.modules["triton.compiler.compiler"]
    backend = compiler.make_backend(metadata["target"])
    path = next(path for name, path in kernel.metadata_group.items() if name.endswith(".json"))
    return CompileEvent(
        key=kernel_key(kernel.hash),
        hash=kernel.hash,
        directory=os.path.dirname(path),
        name=metadata["name"],
        target=target_of(metadata["target"]),
        src=kernel.src,
        options=backend.parse_options({name: as_tuples(value) for name, value in metadata.items()}),
        backend=backend,
        env_vars={
            name: value for name, value in metadata.items() if _ENVIRONMENT_NAME.fullmatch(name)
        },
        device=device,
    )
