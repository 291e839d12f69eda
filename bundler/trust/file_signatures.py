# SPDX-License-Identifier: Apache-2.0
"""`judge_file`: who vouches for a bundle file, by the signatures in it or by one of minisign's
beside it; `trust_public_file` takes a key in.

`triton-bundler verify --signed` and `triton-bundler key trust` call them.  A restore goes by what
is in the file alone.  Keys as OpenSSH keeps them: `read_public` reads the line in a `.pub` file,
`is_public` tells whether a text is one; private ones are read in `signing_keys.py`.
"""

from __future__ import annotations

import base64
import binascii
import os
import struct
import time

from msgspec.structs import asdict, replace

from bundler.errors import FormatError, NotFound
from bundler.format.bundle import Bundle
from bundler.format.bundle_file import os_errors, read_regular
from bundler.trust import ed25519, minisign
from bundler.trust.ed25519 import key_id
from bundler.trust.signature_policy import Judgement, SignaturePolicy
from bundler.trust.signing import MINISIGN_SUFFIX
from bundler.trust.statements import BundleStatement, TrustLevel
from bundler.trust.subjects import subject_of
from bundler.trust.trusted_keys import KeyScope, TrustedKey, TrustedKeys, write_key

# Keys of OpenSSH.
_TYPE = b"ssh-ed25519"
_PREFIXES = ("ssh-", "ecdsa-sha2-", "sk-ssh-", "sk-ecdsa-")
_LENGTH = struct.Struct(">I")


def judge_file(
    bundle: Bundle, path: str | os.PathLike[str], trust: TrustLevel | None = None
) -> Judgement:
    """Judge an open bundle and the file that it was loaded from, by the trusted keys of the
    settings.

    Args:
        bundle: the open bundle.
        path: its file; beside it, with `.minisig` after its name, a signature of minisign may lie.
        trust: what has to be vouched for; None for `code` where anything in it runs on the CPU.

    Raises:
        FormatError, DigestMismatch, LimitExceeded: signatures, or files of keys, cannot be read.
    """
    policy = SignaturePolicy.load()
    subject = subject_of(bundle)
    subject = replace(subject, trust=trust or subject.trust)
    judgement = policy.of_bundle(bundle.signatures, subject)
    if judgement.good:
        return judgement
    beside = os.fspath(path) + MINISIGN_SUFFIX
    try:
        with os_errors(beside, "read"):
            text = read_regular(beside, minisign.MAX_TEXT_BYTES).decode("utf-8", "replace")
    except NotFound:
        return judgement
    for name, key in policy.keys.by_name.items():
        named = minisign.PublicKey(bytes.fromhex(key.minisign or key.key_id), key.public)
        if minisign.check(text, bundle.signed.file_chunks(), [named]) is None:
            continue
        said = BundleStatement(
            content=subject.content,
            targets=subject.targets,
            families=subject.families,
            trust=subject.trust,
            signed_at=0,
        )
        refused = key.why_not(said, time.time())
        if refused is None:
            return Judgement(name)
        return replace(
            judgement, reason=f"{judgement.reason}; key {name!r}, which signed {beside}, {refused}"
        )
    return replace(
        judgement,
        reason=f"{judgement.reason}; {beside} is of no trusted key, or not of these bytes",
    )


def trust_public_file(
    folder: str | os.PathLike[str],
    name: str,
    public: str | os.PathLike[str],
    scope: KeyScope,
    *,
    expires: int = 0,
    comment: str = "",
) -> TrustedKey:
    """Read a public key, as `key new`, minisign and ssh-keygen write them, and put it among the
    trusted ones.

    Args:
        folder: of the trusted keys.
        name: what messages call the key.
        public: its file.
        scope: what it may vouch for.
        expires: when it stops counting, in seconds since 1970; 0 for never.
        comment: for people.

    Raises:
        NotFound, AccessDenied, FormatError: the file cannot be read, or is no public key; or
            another name has that key.
        ConfigError: the name cannot be a file's.
    """
    with os_errors(public, "read"):
        text = read_regular(public, minisign.MAX_TEXT_BYTES).decode("utf-8", "replace")
    number, raw = _public_of(text)
    identity = key_id(raw)
    known = TrustedKeys.load(folder).names.get(identity)
    if known not in (None, name):
        raise FormatError(
            f"{os.fspath(public)} is the key that is trusted as {known!r} already; revoke or change"
            " that one"
        )
    key = TrustedKey(
        key=base64.b64encode(raw).decode(),
        minisign="" if number.hex() == identity else number.hex(),
        **asdict(scope),
        expires=expires,
        comment=comment,
    )
    write_key(folder, name, key)
    return key


def _public_of(text: str) -> minisign.PublicKey:
    """Read a public key of OpenSSH, or one in minisign's form, as ours are."""
    if not is_public(text):
        return minisign.read_public(text)
    raw = read_public(text)
    return minisign.PublicKey(bytes.fromhex(key_id(raw)), raw)


def is_public(text: str) -> bool:
    """Whether a text is a public key of OpenSSH, of whatever type."""
    return text.lstrip().startswith(_PREFIXES)


def read_public(text: str) -> bytes:
    """Return the 32 bytes of a key in the form `ssh-ed25519 AAAA… comment`.

    Raises:
        FormatError: it is of another type, or damaged, or there are several lines.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    words = lines[0].split() if lines else [""]
    if len(lines) != 1 or words[0] != _TYPE.decode() or len(words) == 1:
        raise FormatError(
            f"OpenSSH public key: {len(lines)} lines, the first of type {words[0][:40]!r}; expected"
            " one line of type ssh-ed25519: ssh-keygen -t ed25519 makes such a key"
        )
    try:
        data = base64.b64decode(words[1], validate=True)
    except (binascii.Error, ValueError) as error:
        raise FormatError(f"OpenSSH public key: {error}, expected base64") from error
    head = _LENGTH.pack(len(_TYPE)) + _TYPE + _LENGTH.pack(ed25519.KEY_BYTES)
    if len(data) != len(head) + ed25519.KEY_BYTES or not data.startswith(head):
        raise FormatError(
            "OpenSSH public key: its base64 holds no key of type ssh-ed25519; copy the line again"
        )
    return data[len(head) :]
