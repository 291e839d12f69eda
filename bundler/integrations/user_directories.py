# SPDX-License-Identifier: Apache-2.0
"""Directories of this user on this host: in place of a Triton cache that cannot be written, and for
notes on misses.

`LocalDirectory` finds our own directory: the notes and `explanations.py` ask it.  `UserDirectories`
says where kernels of an unwritable cache go: the lookup engine asks it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from bundler.toolchain.private_directory import OTHERS_WRITE, TemporaryPlace, why_not_ours

_SUBDIRECTORY = "triton-bundler"
_KERNELS = "kernels"


class LocalDirectory:
    """Our directory on this host: the one that the user chose, else in the user's cache, else in
    the temporary directory.

    The last two are looked at before each use: who could write there could give us kernels.

    Args:
        chosen: what the user chose, who answers for it; None for the usual places.
        tell: is told in a sentence of each place that others could have put something into, once.
    """

    def __init__(self, chosen: str | None, tell: Callable[[str], None]) -> None:
        self._chosen, self._tell = chosen, tell
        self._told: set[str] = set()
        self._temporary = TemporaryPlace(f"{_SUBDIRECTORY}-cache", tell)

    def base(self, *, make: bool) -> str | None:
        """Return the directory, None when there is none.

        Args:
            make: create it, to write to it; else it has to be there.
        """
        if self._chosen is not None:
            path = os.path.abspath(self._chosen)
            return path if _is_there(path, make=make) else None
        try:
            return self._in_cache(make=make) or (
                self._temporary.made() if make else self._temporary.found()
            )
        except OSError:
            return None

    def notes(self, kind: str, *, make: bool) -> str | None:
        """Return where notes of a kind (`misses`, `processes`, `kernel-sources`) are, None when
        there is no such place.
        """
        base = self.base(make=make)
        path = os.path.join(base or "", kind)
        return path if base is not None and _is_there(path, make=make) else None

    def kernels(self) -> str | None:
        """Return where kernels are written that cannot be written where they belong, None when
        there is no such place.
        """
        base = self.base(make=True)
        return os.path.join(base, _KERNELS) if base is not None else None

    def _in_cache(self, *, make: bool) -> str | None:
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        path = os.path.join(cache, _SUBDIRECTORY)
        if not os.path.isabs(cache) or not _is_there(path, make=make):
            return None
        # The user's own cache directory: a link there is the user's.
        reason = why_not_ours(path, OTHERS_WRITE, links=True)
        if reason is not None and reason not in self._told:
            self._told.add(reason)
            self._tell(
                f"{path} {reason}, so it is not used; make it yours alone, or set"
                " TRITON_BUNDLER_LOCAL"
            )
        return path if reason is None else None


def _is_there(path: str, *, make: bool) -> bool:
    return _can_write(path, 0o700) if make else os.path.isdir(path)


def _can_write(path: str, mode: int = 0o777) -> bool:
    try:
        os.makedirs(path, mode=mode, exist_ok=True)
    except OSError:
        return False
    return os.access(path, os.W_OK | os.X_OK)


def write_whole(path: str, data: bytes, *, durable: bool = False) -> None:
    """Write a small file that readers see whole or not at all, in place of an older one.

    Args:
        path: the file.
        data: what is in it.
        durable: flush it to disk first.

    Raises:
        OSError: it cannot be written.
    """
    temporary = f"{path}.{os.getpid()}.{os.urandom(4).hex()}.tmp"
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


class UserDirectories:
    """Where kernels are written that belong into a directory: there, or in our own directory.

    Args:
        local: our own directory.
        tell: is told of each directory that cannot be written, with the one that takes its place.

    Attributes:
        writable_roots: directories that were asked for and can be written.
    """

    def __init__(self, local: LocalDirectory, tell: Callable[[str, str], None]) -> None:
        self._local, self._tell = local, tell
        self.writable_roots: set[str] = set()
        self._others: set[str] = set()
        self._told: set[tuple[str, str]] = set()

    def writable(self, root: str) -> str:
        """Return the directory to write to for `root`, which it is itself where that can be."""
        if root not in self.writable_roots and root not in self._others:
            fine = _can_write(os.path.abspath(root))
            (self.writable_roots if fine else self._others).add(root)
        place = None if root in self.writable_roots else self._local.kernels()
        if place is None:
            # where that cannot be written, the error is the one that Triton gives without us
            return root
        if (root, place) not in self._told:
            self._told.add((root, place))
            self._tell(os.path.abspath(root), place)
        return place
