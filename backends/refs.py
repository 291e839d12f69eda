# SPDX-License-Identifier: Apache-2.0
"""Small values that change by compare-and-set, in plain files and without locks.

::

    <folder>/0000000007      the highest number is the value

A new value takes the next number by a hard link, which only one writer can get, on NFS too.  Old
numbers are cleaned away, so a writer that slept could take a number that was used before.  To find
that out, each value carries a random token of its own and those of its last predecessors: a writer
that took a number and finds higher ones looks for its token in the next one.

`LocalBackend` calls it for its refs: `latest` reads, `following` and `took_effect` make a change,
`clean` removes old numbers.
"""

from __future__ import annotations

import os
import re
import secrets
import struct
from dataclasses import dataclass

from bundler.backends import file_steps
from bundler.backends.backend_errors import BackendUnavailable
from bundler.backends.port import Unread

KEPT_NUMBERS = 8
KEPT_S = 3600.0
# A writer would have to sleep for an hour, and more swaps than that to pass, between two of its
# system calls for it to mistake success for failure.  It never mistakes failure for success.
HISTORY = 64
# A listing is out of date when others swapped the ref meanwhile; so many in a row mean a broken
# file system, not a race.
ATTEMPTS = 64
REF_BYTES = 1 << 20
# Numbers are written as `path_of` writes them: a name of another form is not a value, since no
# reader would find it.
MAX_NUMBER = 10**15 - 1
_NUMBER = re.compile(r"[0-9]{10}|[1-9][0-9]{10,14}")
_TOKEN_BYTES = 8
_HEAD = struct.Struct("<H?")


@dataclass(frozen=True)
class Version:
    """One value of a ref: its number, the tokens of itself and its predecessors (oldest first), the
    value or None.
    """

    number: int
    tokens: tuple[bytes, ...]
    value: bytes | None

    def encode(self) -> bytes:
        """Return the bytes of the file."""
        return (
            _HEAD.pack(len(self.tokens), self.value is not None)
            + b"".join(self.tokens)
            + (self.value or b"")
        )

    @staticmethod
    def decode(number: int, data: bytes) -> Version | None:
        """Read a file; None when it is damaged, which only a failing disk does, since it appears by
        a link.
        """
        if len(data) < _HEAD.size:
            return None
        count, is_set = _HEAD.unpack_from(data)
        end = _HEAD.size + count * _TOKEN_BYTES
        if len(data) < end:
            return None
        tokens = tuple(data[i : i + _TOKEN_BYTES] for i in range(_HEAD.size, end, _TOKEN_BYTES))
        return Version(number, tokens, data[end:] if is_set else None)


NEVER_SET = Version(0, (), None)


def latest(folder: str) -> Version:
    """Return the current version; a damaged one counts as not set, and what is no file has an
    `Unread` value.
    """
    for _ in range(ATTEMPTS):
        numbers = numbers_in(folder)
        if not numbers:
            return NEVER_SET
        data = file_steps.read(path_of(folder, numbers[-1]), REF_BYTES)
        if isinstance(data, Unread):
            return Version(numbers[-1], (), Unread(b"", data.why, data.size_bytes))
        if data is not None:
            return Version.decode(numbers[-1], data) or Version(numbers[-1], (), None)
        # The file was cleaned away between listing and reading, so there are newer ones.
    raise _unsteady(folder)


def _unsteady(folder: str) -> BackendUnavailable:
    return BackendUnavailable(
        f"{folder}: what is listed there was gone {ATTEMPTS} times in a row; check the file system"
    )


def following(version: Version, value: bytes | None) -> Version:
    """Return what comes after `version`; raises `BackendUnavailable` when there is no higher
    number.
    """
    if version.number >= MAX_NUMBER:
        raise BackendUnavailable(
            f"a ref has no number after {version.number}, which is none of ours; remove that file"
        )
    tokens = (*version.tokens, secrets.token_bytes(_TOKEN_BYTES))
    return Version(version.number + 1, tokens[-HISTORY:], value)


def took_effect(folder: str, mine: Version) -> bool:
    """Tell whether a version whose number we took is the current one, or one that the current one
    was built on.
    """
    for _ in range(ATTEMPTS):
        later = [number for number in numbers_in(folder) if number > mine.number]
        if not later:
            return True
        for number in later:
            data = file_steps.read(path_of(folder, number), REF_BYTES)
            if data is not None:  # else it was cleaned away since we listed it
                return mine.tokens[-1] in (Version.decode(number, data) or NEVER_SET).tokens
    raise _unsteady(folder)


def clean(folder: str) -> None:
    """Remove old numbers, but for the last ones."""
    numbers = numbers_in(folder)
    now_s = os.lstat(path_of(folder, numbers[-1])).st_mtime if numbers else 0.0
    for number in numbers[:-KEPT_NUMBERS]:
        path = path_of(folder, number)
        if now_s - os.lstat(path).st_mtime <= KEPT_S:
            return  # later numbers are younger still
        file_steps.remove(path)


def numbers_in(folder: str) -> list[int]:
    """Return the numbers in a folder, ascending; none when it is not there."""
    try:
        return sorted(int(name) for name in os.listdir(folder) if _NUMBER.fullmatch(name))
    except FileNotFoundError:
        return []


def path_of(folder: str, number: int) -> str:
    """Return the path of a number."""
    return os.path.join(folder, f"{number:010d}")
