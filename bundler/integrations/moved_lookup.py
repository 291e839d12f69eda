# SPDX-License-Identifier: Apache-2.0
"""`find_moved`: a kernel for a function that only moved in its file, after a miss of a session that takes such kernels.

The lookup engine calls it; `Shelves.find_moved` knows where to look, `lifecycle/moved_kernels.py` proves what was found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bundler.errors import BundlerError
from bundler.lifecycle.moved_kernels import moved_kernel
from bundler.package_loggers import logger
from bundler.toolchain.capture import key_parts

if TYPE_CHECKING:
    from bundler.integrations.kernel_lookup import Found, Shelves
    from bundler.toolchain.compile_frames import CompileFrame

_log = logger("bundler.integrations")


def find_moved(key: str, frame: CompileFrame, shelves: Shelves) -> Found | None:
    """Return a recorded kernel under the key that Triton asks for; None where none differs from it in lines alone.

    Args:
        key: what Triton asks for.
        frame: the call of Triton's `compile` that asks.
        shelves: where kernels are looked for.

    Raises:
        StoreUnavailable, AccessDenied: the store cannot be read.
    """
    function: Any = getattr(frame.src, "fn", None)
    if function is None:
        return None
    parts = key_parts(
        frame.src, frame.backend, frame.options, frame.env_vars, frame.hash, frame.stages_key
    )
    if parts.moved_key is None:
        return None
    for found in shelves.find_moved(parts.moved_key):
        try:
            made = moved_kernel(found.source, found.kernel, function, asked=key)
        except BundlerError as error:
            _log.info("%s is not taken for %s: %s", found.kernel.key, key, error)
            continue
        return found._replace(
            kernel=made.kernel, source=made.source(found.source), moved_from=made.origin
        )
    return None
