# SPDX-License-Identifier: Apache-2.0
"""Directories of this user on this host: in place of a Triton cache that cannot be written, and for notes on misses."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable, Iterator

_SUBDIRECTORY = "triton-bundler"
_MISSES, _KERNELS = "misses", "kernels"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def candidates(chosen: str | None) -> Iterator[str]:
    """Yield where our directory may be, the best first: what the user chose, or the user's cache, or the temporary directory."""
    if chosen is not None:
        yield os.path.abspath(chosen)
        return
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    if os.path.isabs(cache):
        yield os.path.join(cache, _SUBDIRECTORY)
    if hasattr(os, "getuid"):
        yield os.path.join(tempfile.gettempdir(), f"{_SUBDIRECTORY}-cache-{os.getuid()}")


def own_directory(chosen: str | None, *, make: bool) -> str | None:
    """Return our directory, None when there is none that only this user can write.

    Args:
        chosen: what the user chose; None for the usual places.
        make: create it; else it has to be there.
    """
    for path in candidates(chosen):
        try:
            if make:
                os.makedirs(path, mode=0o700, exist_ok=True)
            status = os.stat(path)
        except OSError:
            continue
        # Who could write there could give us kernels.
        ours = not hasattr(os, "getuid") or (status.st_uid == os.getuid() and not status.st_mode & _OTHERS_WRITE)
        if stat.S_ISDIR(status.st_mode) and (chosen is not None or ours) and (not make or os.access(path, os.W_OK)):
            return path
    return None


def misses_directory(chosen: str | None, *, make: bool) -> str | None:
    """Return where misses are noted, None when there is no such place."""
    base = own_directory(chosen, make=make)
    if base is None:
        return None
    path = os.path.join(base, _MISSES)
    if make:
        try:
            os.makedirs(path, mode=0o700, exist_ok=True)
        except OSError:
            return None
    return path if os.path.isdir(path) else None


class Homes:
    """Where kernels are written that belong into a directory: there, or in a directory of ours.

    Args:
        chosen: our directory, as the user chose it.
        tell: is told of each directory that cannot be written, once, with the one that takes its place.
    """

    def __init__(self, chosen: str | None, tell: Callable[[str, str], None]) -> None:
        self._chosen, self._tell = chosen, tell
        self._known: dict[str, str] = {}

    def home(self, root: str) -> str:
        """Return the directory to write to for `root`, which it is itself where that can be."""
        home = self._known.get(root)
        if home is None:
            home = self._known[root] = self._find(root)
        return home

    def _find(self, root: str) -> str:
        path = os.path.abspath(root)
        if _can_write(path):
            return root
        base = own_directory(self._chosen, make=True)
        if base is None:
            return root  # the error is then the one that Triton gives without us
        home = os.path.join(base, _KERNELS)
        self._tell(path, home)
        return home


def _can_write(path: str) -> bool:
    try:
        os.makedirs(path, exist_ok=True)
    except OSError:
        return False
    return os.access(path, os.W_OK | os.X_OK)
