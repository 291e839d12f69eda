# SPDX-License-Identifier: Apache-2.0
"""Public keys that a user trusts, one file each, with what each may vouch for.

::

    <folder>/<name>.json     {"key": "<base64>", "tags": ["prod/*"], "targets": ["cuda:*"], "families": [], "trust": ["kernels"], …}

`TrustedKeys.load` reads the folder, `write_key` and `revoke_key` change it (`triton-bundler key`);
`signature_policy.py` asks `TrustedKey.why_not`.  Patterns are those of shells (`fnmatch`), in which
`*` matches any text.
"""

# Annotations are real ones in this module, as in `statements.py`.
import base64
import fnmatch
import os
import re
import stat
from collections.abc import Iterable
from functools import partial
from typing import Annotated, Self

import msgspec

from bundler.errors import AccessDenied, ConfigError, FormatError, NotFound
from bundler.format.bundle_file import os_errors, read_regular, replace_file
from bundler.trust import ed25519
from bundler.trust.ed25519 import key_id
from bundler.trust.statements import HEX_DIGITS, BundleStatement, TagStatement, TrustLevel

MAX_KEYS = 1000
MAX_FILE_BYTES = 64 << 10
_SUFFIX = ".json"
_MINISIGN_DIGITS = 16
_NAME = r"[A-Za-z0-9][A-Za-z0-9._@-]{0,99}"
_Patterns = Annotated[
    tuple[Annotated[str, msgspec.Meta(min_length=1, max_length=512)], ...],
    msgspec.Meta(max_length=256),
]
_Seconds = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]


class KeyScope(msgspec.Struct, frozen=True, kw_only=True):
    """What a key may vouch for; an empty tuple allows nothing.

    Attributes:
        tags: patterns of tags.
        targets: patterns of targets, such as `cuda:*`.
        families: patterns of families of server caches.
        trust: `kernels`, `code` or both.
    """

    tags: _Patterns = ("*",)
    targets: _Patterns = ("*",)
    families: _Patterns = ()
    trust: tuple[TrustLevel, ...] = ("kernels",)


class TrustedKey(KeyScope, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One public key and its scope.

    Attributes:
        key: the raw public key as base64.
        expires: when it stops counting, in seconds since 1970; 0 for never.
        revoked: since when nothing counts that it signed, at whatever time, in seconds since 1970;
            0 when it is in force.
        minisign: the number that minisign gave the key, its 8 bytes in hexadecimal digits; empty
            for a key of ours.
        comment: for people.
    """

    key: str
    minisign: Annotated[str, msgspec.Meta(max_length=_MINISIGN_DIGITS)] = ""
    expires: _Seconds = 0
    revoked: _Seconds = 0
    comment: Annotated[str, msgspec.Meta(max_length=1000)] = ""

    @property
    def public(self) -> bytes:
        """The raw public key.

        Raises:
            FormatError: it is none.
        """
        shown = f"public key {self.key[:80]!r}"
        try:
            data = base64.b64decode(self.key, validate=True)
        except ValueError as error:
            raise FormatError(f"{shown}: {error}, expected base64 of 32 bytes") from error
        if len(data) != ed25519.KEY_BYTES:
            raise FormatError(f"{shown}: {len(data)} bytes, expected {ed25519.KEY_BYTES}")
        if ed25519.is_weak(data):
            raise FormatError(f"{shown}: anybody can sign for it; somebody tampered with it")
        return data

    @property
    def key_id(self) -> str:
        """The key's name in envelopes."""
        return key_id(self.public)

    def why_not(self, statement: BundleStatement | TagStatement, now: float) -> str | None:
        """Return why this key's word does not count for a statement, as the end of a sentence; None
        when it does.

        Args:
            statement: one that the key signed.
            now: seconds since 1970.
        """
        if self.revoked:
            return "is revoked"
        if self.expires and now >= self.expires:
            return "has expired"
        if isinstance(statement, TagStatement):
            return _outside("tag", (statement.tag,), self.tags)
        if statement.trust not in self.trust:
            return (
                f"may not vouch for trust level {statement.trust!r}, only for"
                f" {', '.join(self.trust) or 'none'}"
            )
        outside = _outside("target", statement.targets, self.targets)
        return outside or _outside("family", statement.families, self.families)


class TrustedKeys:
    """The keys of a folder, by name.

    Args:
        keys: name -> key.

    Raises:
        FormatError: two of them are the same key.
    """

    def __init__(self, keys: dict[str, TrustedKey]) -> None:
        self.by_name = dict(sorted(keys.items()))
        self.by_id: dict[str, TrustedKey] = {}
        self.names: dict[str, str] = {}
        for name, key in self.by_name.items():
            if key.key_id in self.names:
                # One may be revoked, or have a narrower scope: which of them holds must not depend
                # on their names.
                raise FormatError(
                    f"trusted keys {self.names[key.key_id]!r} and {name!r} are the same key; remove"
                    " one of the files",
                    name=name,
                )
            self.by_id[key.key_id], self.names[key.key_id] = key, name
        self.public = {name: key.public for name, key in self.by_id.items()}

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Self:
        """Read a folder; one that is not there has no keys.

        Raises:
            FormatError: a file in it is no key, since it may be one that was revoked; or two hold
                the same key.
            LimitExceeded: a file is too large.
            ConfigError: there are more than 1,000.
            AccessDenied: it cannot be read, or others than its owner could write to it or to a file
                in it, wherever a link leads.
        """
        try:
            with os_errors(folder, "list"):
                opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except NotFound:
            return cls({})
        try:
            return cls(_keys_in(folder, opened))
        finally:
            os.close(opened)


def _keys_in(folder: str | os.PathLike[str], opened: int) -> dict[str, TrustedKey]:
    """Return the keys of an open folder, by name; each file is the one that was looked at, whatever
    happens to its name meanwhile.
    """
    with os_errors(folder, "list"):
        names = sorted(name for name in os.listdir(opened) if name.endswith(_SUFFIX))
        _check_writers(os.fspath(folder), opened)
        closed = not os.fstat(opened).st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    if len(names) > MAX_KEYS:
        raise ConfigError(
            f"trusted keys {os.fspath(folder)}: {len(names)} files, expected at most {MAX_KEYS}",
            got=len(names),
        )
    keys = {}
    for name in names:
        path = os.path.join(folder, name)
        with os_errors(path, "read"):
            # What is reached by a link lies elsewhere, and another name of it may.
            own = os.stat(name, dir_fd=opened, follow_symlinks=False)
            hidden = closed and stat.S_ISREG(own.st_mode) and own.st_nlink == 1
            check = partial(_check_writers, path, out_of_reach=hidden)
            data = read_regular(name, MAX_FILE_BYTES, folder=opened, check=check)
        keys[name.removesuffix(_SUFFIX)] = _decoded(path, data)
    return keys


def _decoded(path: str | os.PathLike[str], data: bytes) -> TrustedKey:
    try:
        key = msgspec.json.decode(data, type=TrustedKey)
        key.public  # noqa: B018  # a key that is none is found now
        number = key.minisign
        if number and (len(number) != _MINISIGN_DIGITS or number.strip(HEX_DIGITS)):
            raise FormatError(
                f"minisign {number!r}, expected {_MINISIGN_DIGITS} hexadecimal digits"
            )
    except (msgspec.DecodeError, FormatError) as error:
        raise FormatError(
            f"trusted key {os.fspath(path)}: {error}; `triton-bundler key trust` writes such files",
            path=os.fspath(path),
        ) from error
    return key


def write_key(folder: str | os.PathLike[str], name: str, key: TrustedKey) -> str:
    """Write a key into a folder, in place of one of that name; returns the file.

    Raises:
        ConfigError: the name cannot be a file's.
        StoreFull, AccessDenied: it cannot be written.
    """
    _check_name(name)
    with os_errors(folder, "make"):
        os.makedirs(folder, mode=0o700, exist_ok=True)
    path = os.path.join(folder, name + _SUFFIX)
    data = msgspec.json.format(msgspec.json.encode(key), indent=2) + b"\n"
    replace_file(path, lambda file: file.write(data))
    return path


def _check_writers(path: str, opened: int, *, out_of_reach: bool = False) -> None:
    """Refuse what somebody else could have put there; on a read-only mount, as of a secret, nobody
    can.

    Args:
        path: of a folder or a file, for the message.
        opened: its descriptor.
        out_of_reach: whether nobody else gets as far as it, so that its mode says nothing.
    """
    if os.fstatvfs(opened).f_flag & os.ST_RDONLY:
        return
    found = os.fstat(opened)
    shared = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not out_of_reach
    if shared or found.st_uid not in (0, os.geteuid()):
        raise AccessDenied(
            f"trusted keys {path}: owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):04o};"
            f" expected that nobody but you and root can write to it: chmod go-w {path}, and chown"
            " it to you or root",
            path=path,
        )


def _check_name(name: str) -> None:
    if not re.fullmatch(_NAME, name):
        raise ConfigError(
            f"name of a key {name[:120]!r}: expected letters, digits and . _ @ -, at most 100",
            got=name,
        )


def revoke_key(folder: str | os.PathLike[str], name: str, now: float) -> str:
    """Say in a key's file that nothing counts any more that it signed; returns the file.

    Raises:
        NotFound, FormatError: there is no such key, or its file holds something else.
        ConfigError: the name cannot be a file's.
        StoreFull, AccessDenied: it cannot be written.
    """
    _check_name(name)
    path = os.path.join(folder, name + _SUFFIX)
    with os_errors(path, "read"):
        key = _decoded(path, read_regular(path, MAX_FILE_BYTES))
    revoked = msgspec.structs.replace(key, revoked=key.revoked or max(1, int(now)))
    return write_key(folder, name, revoked)


def _outside(kind: str, names: Iterable[str], patterns: tuple[str, ...]) -> str | None:
    for name in names:
        # Most keys have `*`, which needs no regular expression.
        if not any(pattern == "*" or fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            return f"may not vouch for {kind} {name!r}, only for {', '.join(patterns) or 'none'}"
    return None
