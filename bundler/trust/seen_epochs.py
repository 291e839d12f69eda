# SPDX-License-Identifier: Apache-2.0
"""Which epoch of each tag this user has seen last, so that an old signed statement that is played
again is found out.

::

    <folder>/<sha256 of store and tag>.json     {"content": "…", "epoch": 7, "store": "…", "tag": "…"}

`SeenEpochs.check` is asked before a tag is followed and `note` when what it names was accepted
(`signature_policy.py`).  Not guaranteed: who can write to the folder can make it forget, and a
machine that has seen nothing believes the first statement that is in force.
"""

from __future__ import annotations

import hashlib
import os

import msgspec

from bundler.errors import FormatError, NotFound, Untrusted
from bundler.format.bundle_file import os_errors, read_regular, replace_file
from bundler.trust.statements import TagStatement

_MAX_BYTES = 16 << 10


class _Seen(msgspec.Struct, frozen=True):
    store: str
    tag: str
    epoch: int
    content: str


class SeenEpochs:
    """The memory in a folder.

    Safe under threads and processes: files are replaced whole.  Two that note at once may leave the
    lower epoch of both, which is one that was in force a moment ago.

    Args:
        folder: made at the first note, of mode 0700.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = os.fspath(folder)

    def check(self, statement: TagStatement) -> None:
        """Refuse a statement that is older than one that was seen.

        Raises:
            Untrusted: its epoch is lower, or it is the same and names another bundle.
            FormatError: what was noted cannot be read.
        """
        seen = self._seen(statement)
        if (
            seen is None
            or statement.epoch > seen.epoch
            or (statement.epoch == seen.epoch and statement.content == seen.content)
        ):
            return
        raise Untrusted(
            f"tag {statement.tag!r} of store {statement.store!r}: the signed statement has epoch"
            f" {statement.epoch} and names {statement.content[:12]}…, but epoch {seen.epoch} with"
            f" {seen.content[:12]}… was seen before: an old statement was played again; sign the"
            f" tag again, or remove {self._path(statement)} if the store was made anew",
            tag=statement.tag,
            store=statement.store,
            expected=seen.epoch,
            got=statement.epoch,
        )

    def note(self, statement: TagStatement) -> None:
        """Remember a statement that was accepted, unless a newer one was.

        Raises:
            StoreFull, AccessDenied: it cannot be written.
        """
        seen = self._seen(statement)
        if seen is not None and seen.epoch >= statement.epoch:
            return
        with os_errors(self._folder, "make"):
            os.makedirs(self._folder, mode=0o700, exist_ok=True)
        now = _Seen(statement.store, statement.tag, statement.epoch, statement.content)
        data = msgspec.json.encode(now, order="sorted")
        replace_file(self._path(statement), lambda file: file.write(data))

    def _seen(self, statement: TagStatement) -> _Seen | None:
        path = self._path(statement)
        try:
            with os_errors(path, "read"):
                data = read_regular(path, _MAX_BYTES)
        except NotFound:
            return None
        try:
            seen = msgspec.json.decode(data, type=_Seen)
        except msgspec.DecodeError as error:
            raise FormatError(
                f"epoch that was seen, {path}: {error}; remove the file if nobody tampered with it",
                path=path,
            ) from error
        if (seen.store, seen.tag) != (statement.store, statement.tag):
            raise FormatError(
                f"epoch that was seen, {path}: of tag {seen.tag!r} of {seen.store!r}, expected"
                f" {statement.tag!r} of {statement.store!r}",
                path=path,
            )
        return seen

    def _path(self, statement: TagStatement) -> str:
        named = f"{len(statement.store)} {statement.store} {statement.tag}"
        return os.path.join(self._folder, f"{hashlib.sha256(named.encode()).hexdigest()}.json")
