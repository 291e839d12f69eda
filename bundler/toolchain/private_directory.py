# SPDX-License-Identifier: Apache-2.0
"""Directories that only this user can change, also below a temporary directory where anybody may
have taken a name before.

`why_not_ours` and `is_ours` judge a directory, `TemporaryPlace` makes one.  The spools of
recordings, a session's notes (`bundler/integrations/user_directories.py`) and the leases of compile
tasks use them.
"""

from __future__ import annotations

import atexit
import os
import shutil
import stat
import tempfile
from collections.abc import Callable

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
OTHERS_USE = stat.S_IRWXG | stat.S_IRWXO


def why_not_ours(path: str, forbidden: int = OTHERS_USE, *, links: bool = False) -> str | None:
    """Return why others may have put something into a directory, as the end of a sentence; None
    when only we can.

    Args:
        path: the directory.
        forbidden: bits of the mode that must not be set.
        links: whether `path` may be a symbolic link; only where others cannot make one.

    Raises:
        OSError: there is nothing, or it cannot be looked at.
    """
    found = os.stat(path) if links else os.lstat(path)
    if stat.S_ISLNK(found.st_mode):
        return "is a symbolic link"
    if not stat.S_ISDIR(found.st_mode):
        return "is not a directory"
    if hasattr(os, "geteuid") and found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid}, not to user {os.geteuid()}"
    if hasattr(os, "geteuid") and found.st_mode & forbidden:
        mode, expected = stat.S_IMODE(found.st_mode), stat.S_IMODE(found.st_mode) & ~forbidden
        return f"is open to others: mode {mode:04o}, expected {expected:04o}"
    return None


def is_ours(path: str) -> bool:
    """Whether there is a directory that nobody else can use."""
    try:
        return why_not_ours(path) is None
    except OSError:
        return False


class TemporaryPlace:
    """A directory below the temporary one, under a name that all processes of this user know.

    Looked at before each use, since anybody may make something of that name first.  What somebody
    else could have put there is not touched: a directory of this process alone is used instead,
    which goes at its end.

    Args:
        name: what the name begins with; the user's number follows.
        tell: is told in a sentence of each reason not to use it, once.
    """

    def __init__(self, name: str, tell: Callable[[str], None]) -> None:
        self._name, self._tell = name, tell
        self._told: set[str] = set()

    @property
    def path(self) -> str | None:
        """Where it is; None on a system whose users have no numbers."""
        if not hasattr(os, "getuid"):
            return None
        return os.path.join(tempfile.gettempdir(), f"{self._name}-{os.getuid()}")

    def found(self) -> str | None:
        """Return the directory if it is there and ours, to read from it."""
        path = self.path
        if path is None or not os.path.lexists(path):
            return None
        reason = why_not_ours(path)
        if reason is not None:
            self._say(f"{path} {reason}, so nothing is read from it; remove it")
        return None if reason is not None else path

    def made(self) -> str:
        """Return the directory, made where it is missing, or the one of this process alone.

        Raises:
            OSError: neither can be made.
        """
        path = self.path
        if path is None:
            return _of_this_process(self._name)
        try:
            os.mkdir(path, stat.S_IRWXU)
        except FileExistsError:
            reason = why_not_ours(path)
            if reason is not None:
                instead = _of_this_process(self._name)
                self._say(
                    f"{path} {reason}, so this process uses {instead}; remove it to share with"
                    " other processes"
                )
                return instead
        return path

    def _say(self, sentence: str) -> None:
        if sentence not in self._told:
            self._told.add(sentence)
            self._tell(sentence)


# By name; a forked child goes on with its parent's, as long as that is there.
_own: dict[str, str] = {}
_made: list[tuple[str, int]] = []


def _of_this_process(name: str) -> str:
    known = _own.get(name)
    # Else it was swept, or the parent of this forked child ended.
    if known is not None and is_ours(known):
        return known
    made = tempfile.mkdtemp(prefix=f"{name}-{os.getpid()}-")
    _made.append((made, os.getpid()))
    if known is None:
        return _own.setdefault(name, made)  # of two threads, both use what the first one made
    _own[name] = made
    return made


def _remove_made() -> None:
    for path, maker in _made:
        if maker == os.getpid():
            shutil.rmtree(path, ignore_errors=True)


# Registered before any session is, so that it runs after the last one was closed, which still reads
# what lies there.
atexit.register(_remove_made)
