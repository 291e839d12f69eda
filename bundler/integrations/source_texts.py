# SPDX-License-Identifier: Apache-2.0
"""Sources of kernels that ran on this host, by their digests, which key parts have: for who asks
later what changed in one.

::

    <our directory>/kernel-sources/<sha256 of the text>

`MissNotes` (`miss_notes.py`) writes them through `SourceTexts`; `explanations.py` calls
`read_source` and `source_diff` for the two texts that a kernel was recorded and compiled from.
"""

from __future__ import annotations

import contextlib
import hashlib
import os

from bundler.integrations.user_directories import LocalDirectory, write_whole

KEPT = 2000
# A generated kernel of a thousand lines; what is larger is no text to read changes in.
MOST_BYTES = 1 << 17
_DIRECTORY = "kernel-sources"
_DIGITS = 64


class SourceTexts:
    """The sources that one process used, until they are written; safe from any thread.

    Args:
        local: our directory.
    """

    def __init__(self, local: LocalDirectory) -> None:
        self._local = local
        self._pending: dict[str, bytes] = {}
        self._written: set[str] = set()

    def add(self, text: str) -> None:
        """Remember a source; what is too long, or one too many for a process, is left out."""
        data = text.encode("utf-8", "replace")
        if len(data) > MOST_BYTES or len(self._written) + len(self._pending) >= KEPT:
            return
        digest = hashlib.sha256(data).hexdigest()
        if digest not in self._written:
            self._pending[digest] = data

    def write(self) -> None:
        """Write what was remembered and is not there yet; does nothing where there is no place for
        it.

        Raises:
            OSError: one cannot be written.
        """
        directory = self._local.notes(_DIRECTORY, make=True) if self._pending else None
        if directory is None:
            return
        if not self._written:
            _sweep(directory)
        for digest in list(self._pending):
            data = self._pending.pop(digest, None)
            if data is not None:
                self._written.add(digest)
                _write(os.path.join(directory, digest), data)


def _write(path: str, data: bytes) -> None:
    try:
        os.utime(path)  # sweeping goes by the time of the last use
    except FileNotFoundError:
        write_whole(path, data)


def _sweep(directory: str) -> None:
    found = []
    with os.scandir(directory) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # another process sweeps too
                found.append((entry.stat(follow_symlinks=False).st_mtime_ns, entry.path))
    for _, path in sorted(found)[:-KEPT]:
        with contextlib.suppress(OSError):
            os.unlink(path)


def read_source(local: LocalDirectory, digest: str) -> str | None:
    """Return a source by its digest (hex); None when it was never used on this host, or is
    damaged.
    """
    directory = local.notes(_DIRECTORY, make=False)
    if directory is None or len(digest) != _DIGITS or not digest.isalnum():
        return None
    try:
        with open(os.path.join(directory, digest), "rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError:
        return None
    return data.decode("utf-8", "replace") if hashlib.sha256(data).hexdigest() == digest else None


def source_diff(name: str, recorded: str, asked: str) -> str:
    """Return a unified diff from the source that was recorded to the one that is here; lines count
    from the kernel's first.
    """
    import difflib  # who asks for it waits for a person

    lines = difflib.unified_diff(
        recorded.splitlines(), asked.splitlines(), f"{name}, recorded", f"{name}, here", lineterm=""
    )
    return "\n".join(lines)
