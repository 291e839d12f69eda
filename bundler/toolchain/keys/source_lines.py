# SPDX-License-Identifier: Apache-2.0
"""`source_lines`, `hashes_at`: what Triton's hash of a JIT function would be, did it and its
helpers stand at other lines.

Triton's hash of a function holds the number of its first line, and the hashes of the functions that
it calls, so a comment above any of these changes it.  Here Triton's own code computes the hash once
more, of copies of the functions that differ in these numbers alone; nothing of the functions
themselves is changed.

`keytext` records both parts, `rekeyed_key` compares with them, `rekeyed_kernels` proves by them that
a kernel only moved.
"""

from __future__ import annotations

import copy
import hashlib
import threading
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

from bundler.format.keyparts import FUNCTIONS_PART, LINES_PART
from bundler.package_loggers import logger

_NOWHERE = 0
# Stands in a function's attributes: what was found, and the hash that it had then.
_KNOWN = "_bundler_source_lines"
_LOG = logger("bundler.toolchain")


class SourceLines(NamedTuple):
    """Where a function and those that it calls begin, and what they are.

    Attributes:
        functions: a digest of their texts, and of all else that Triton's hash of the function has
            but the lines.
        lines: the first line of each, the function's own first, then in the order in which Triton
            finds them.
    """

    functions: str
    lines: tuple[int, ...]


def source_lines(function: Any) -> SourceLines | None:
    """Return the lines of a JIT function; None where this Triton's hash is not made as we know it.

    Safe while other threads launch.
    """
    hashed, known = function.hash, vars(function).get(_KNOWN)
    if hashed is not None and known is not None and known[0] == hashed:
        return known[1]  # type: ignore[no-any-return]
    try:
        found = _found(function)
    except Exception as error:  # noqa: BLE001  # Triton's own code on a user's function: not to know is an answer
        _LOG.debug("the lines of %s are not known: %s", function, error)
        found = None
    # What is not hashed yet may be of a module that is being imported, and lack a helper.
    if hashed is not None:
        vars(function)[_KNOWN] = (hashed, found)
    return found


def hashes_at(function: Any, lines: tuple[int, ...]) -> frozenset[str]:
    """Return the hashes that Triton would make of a function at other lines: before Triton 3.9 one
    source has two, by what was hashed before.

    Args:
        function: a JIT function.
        lines: as of `SourceLines`.

    Raises:
        Exception: whatever Triton raises for a function that it cannot hash.
    """
    found = {_RelinedFunctions(lines).hash_of(function, first) for first in (False, True)}
    return frozenset(filter(None, found))


def lines_parts(function: Any) -> Iterator[tuple[str, str]]:
    """Yield the parts of a key that tell of the lines of its source."""
    found = source_lines(function)
    if found is not None:
        yield FUNCTIONS_PART, found.functions
        yield LINES_PART, " ".join(map(str, found.lines))


def _found(function: Any) -> SourceLines | None:
    seen = _RelinedFunctions(None)
    digest = seen.hash_of(function, helpers_first=True)
    lines = tuple(one.starting_line_number for one in seen.originals)
    # Held to Triton's own hash of it as it stands: what is computed in another way helps nobody.
    hashed = function.hash
    if digest is None or (hashed is not None and hashed not in hashes_at(function, lines)):
        return None
    text = f"lines of functions, 1: {digest}"
    return SourceLines(hashlib.sha256(text.encode()).hexdigest(), lines)


class _RelinedFunctions:
    """Copies of functions that stand at other lines, each made when Triton's code first finds it.

    Args:
        lines: where they stand, in the order in which they are found; None for one line for all.

    Attributes:
        originals: the functions, in that order.
    """

    def __init__(self, lines: tuple[int, ...] | None) -> None:
        self._lines = lines
        self._copies: dict[int, Any] = {}
        self.originals: list[Any] = []

    def hash_of(self, function: Any, helpers_first: bool) -> str | None:
        """Return Triton's hash of a function, as in a process that hashed all that it calls before,
        or nothing; None where there are not as many functions as lines.
        """
        root = self.copy_of(function)
        if helpers_first:
            _ = root.cache_key
            vars(root).update(hash=None, used_global_vals={})
        digest: str = root.cache_key
        fits = self._lines is None or len(self._lines) == len(self.originals)
        return digest if fits else None

    def copy_of(self, function: Any) -> Any:
        """Return the copy of a function."""
        if id(function) not in self._copies:
            line = self._next_line()
            self.originals.append(function)
            made = copy.copy(function)
            vars(made).update(
                hash=None,
                used_global_vals={},
                starting_line_number=line,
                _hash_lock=threading.RLock(),
            )
            made.__class__ = self._class_of(type(function))
            self._copies[id(function)] = made
        return self._copies[id(function)]

    def _next_line(self) -> int:
        if self._lines is None or len(self.originals) >= len(self._lines):
            return _NOWHERE
        return self._lines[len(self.originals)]

    def _class_of(self, kind: type) -> type:
        """Return a class whose `cache_key` is Triton's, but finds copies in place of functions."""
        getter = kind.cache_key.fget  # type: ignore[attr-defined]
        finder = getter.__globals__["DependenciesFinder"]
        copies = self

        class Finder(finder):  # type: ignore[misc, valid-type]
            def _update_hash(self, func: Any) -> None:
                super()._update_hash(copies.copy_of(func))

        known = {**getter.__globals__, "DependenciesFinder": Finder}
        hashed = types.FunctionType(
            getter.__code__, known, getter.__name__, getter.__defaults__, getter.__closure__
        )
        return type(kind.__name__, (kind,), {"cache_key": property(hashed)})
