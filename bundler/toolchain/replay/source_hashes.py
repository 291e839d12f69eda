# SPDX-License-Identifier: Apache-2.0
"""`agreeing_hashes`, `difference`: whether a JIT function of this process has the source that a
kernel was recorded with.

Before Triton 3.9 a function's hash depends on whether the functions that it calls were hashed
before it, so one source has two. `device_caches` asks before it hands a recorded kernel to a
function.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any

from bundler.errors import ToolchainMismatch
from bundler.format.keyparts import KeyParts
from bundler.toolchain.jit_specialization import functions_of, hash_again

# A launch holds such a lock while Triton hashes a function, which takes milliseconds.
_PATIENCE_S = 1.0


def agreeing_hashes(function: Any, wanted: frozenset[str]) -> frozenset[str]:
    """Return which of the recorded hashes are hashes of this function's source.

    Where the function was not hashed before, it keeps one of them, so that Triton asks for keys as
    the recorded process did. Safe while other threads launch.

    Raises:
        ToolchainMismatch: the function cannot be hashed, for instance while its module is being
            imported.
    """
    fresh = function.hash is None
    try:
        known = function.cache_key
    except Exception as error:  # Triton reads the function's source and globals: they are anybody's
        if fresh:
            function.hash = None  # Triton leaves a placeholder there, which would stand in keys
        raise ToolchainMismatch(
            f"Triton cannot hash it ({type(error).__name__}: {error!s:.200})"
        ) from error
    if wanted <= {known}:
        return wanted
    return wanted & {known, *_other_hashes(function, wanted, fresh=fresh)}


def _other_hashes(function: Any, wanted: frozenset[str], *, fresh: bool) -> list[str]:
    """Return the hashes with and without the functions that it calls hashed before."""
    functions = functions_of(function)
    found = []
    with _held(functions):
        before = [(one, one.hash, one.used_global_vals) for one in functions]
        agreed = None
        for helpers_first in (False, True):
            digest = hash_again(function, helpers_first=helpers_first)
            found.append(digest)
            if digest in wanted:
                agreed = (digest, function.used_global_vals)
        for one, digest, used in before:
            one.hash, one.used_global_vals = digest, used
        if fresh and agreed is not None and function.hash not in wanted:
            function.hash, function.used_global_vals = agreed
    return found


@contextlib.contextmanager
def _held(functions: list[Any]) -> Iterator[None]:
    """Keep other threads from reading hashes while the block changes them."""
    found = (getattr(one, "_hash_lock", None) for one in functions)
    locks = {id(lock): lock for lock in found if lock is not None}
    with contextlib.ExitStack() as stack:
        for lock in locks.values():
            # Not without end: a launch takes such locks in an order of its own.
            if not lock.acquire(timeout=_PATIENCE_S):
                raise ToolchainMismatch("another thread is hashing it")
            stack.callback(lock.release)
        yield


def difference(function: Any, parts: KeyParts) -> str:
    """Return which recorded part of a source differs from that of a function, in words."""
    recorded = dict(parts.parts)
    text = hashlib.sha256(function.src.encode("utf-8", "replace")).hexdigest()
    place = f"{function.module}.{function.__qualname__}"
    if recorded.get("source.text", text) != text:
        return f"source.text: the code of {place} was edited"
    line = str(function.starting_line_number)
    if recorded.get("source.line", line) != line:
        return (
            f"source.line: {place} was at line {recorded['source.line']:.20} and is at line {line}"
        )
    return f"source.hash: a function or a global constant that {place} uses was changed"
