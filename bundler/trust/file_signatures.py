# SPDX-License-Identifier: Apache-2.0
"""`judge_file`: who vouches for a bundle file, by the signatures in it or by one of minisign's
beside it; `verify_sigstore`: by a signature of Sigstore; `trust_public_file` takes a key in.

`triton-bundler verify` and `triton-bundler key trust` call them.  A restore goes by what is in the
file alone.  Keys as OpenSSH keeps them: `read_public` reads the line in a `.pub` file, `is_public`
tells whether a text is one; private ones are read in `signing_keys.py`.

Sigstore is checked offline against a trust root that the user gives, by the package `sigstore` (the
extra of that name): certificate chain, transparency log, identity, signature; nothing is fetched.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
import struct
import time
from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import asdict, replace

from bundler.errors import ConfigError, FormatError, NotFound, Untrusted
from bundler.format.bundle import Bundle
from bundler.format.bundle_file import FileSource, os_errors, read_regular
from bundler.format.summary import Reported
from bundler.trust import ed25519, minisign
from bundler.trust.ed25519 import key_id
from bundler.trust.signature_policy import Judgement, SignaturePolicy, subject_of
from bundler.trust.signing import MINISIGN_SUFFIX
from bundler.trust.statements import BundleStatement, TrustLevel
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


MAX_JSON_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 20
_LONGEST_SHOWN = 300


class SigstoreReport(Reported, Struct, frozen=True):
    """Who signed a file.

    Attributes:
        path: the file.
        digest: of its bytes, 64 hexadecimal digits of SHA-256.
        identity: who, as in the certificate: a mail address, or the URL of a workflow.
        issuer: who vouched for the identity at that time.
        log_index: of the entry in the transparency log.
    """

    path: str
    digest: str
    identity: str
    issuer: str
    log_index: int


def verify_sigstore(
    path: str | os.PathLike[str],
    signature: str | os.PathLike[str],
    *,
    trust_root: str | os.PathLike[str],
    identity: str,
    issuer: str,
) -> SigstoreReport:
    """Check a signature that `cosign sign-blob --bundle` or `sigstore sign` made of a file.

    Args:
        path: the signed file, of which every byte counts.
        signature: the bundle of Sigstore, a JSON file.
        trust_root: certificates of authorities and keys of logs, a JSON file; nobody else's are
            asked for.
        identity: who has to have signed, exactly as in the certificate.
        issuer: who has to have vouched for the identity, such as
            `https://token.actions.githubusercontent.com`.

    Raises:
        Untrusted: the signature is of other bytes, by another identity, or not in a log that the
            trust root knows.
        FormatError, LimitExceeded: one of the JSON files is damaged, or larger than 1 MiB.
        NotFound, AccessDenied: a file cannot be read.
        ConfigError: `sigstore` is not installed, or identity or issuer is empty.
    """
    if not identity or not issuer:
        raise ConfigError(
            "a signature of Sigstore counts for somebody: give the identity and the issuer that are"
            " expected"
        )
    _read_json(trust_root, "trust root")
    signed = _read_json(signature, "signature of Sigstore")
    digest = hashlib.sha256()
    for chunk in file_chunks(path):
        digest.update(chunk)
    _check(digest.digest(), signed, os.fspath(signature), os.fspath(trust_root), identity, issuer)
    index = int(json.loads(signed)["verificationMaterial"]["tlogEntries"][0]["logIndex"])
    return SigstoreReport(os.fspath(path), digest.hexdigest(), identity, issuer, index)


def file_chunks(path: str | os.PathLike[str]) -> Iterator[bytes]:
    """Yield the bytes of a file in pieces; raises as `FileSource`."""
    source = FileSource(path)
    try:
        for offset in range(0, source.size, _CHUNK_BYTES):
            yield source.read(offset, _CHUNK_BYTES)
    finally:
        source.close()


def _read_json(path: str | os.PathLike[str], what: str) -> bytes:
    with os_errors(path, "read"):
        data = read_regular(path, MAX_JSON_BYTES)
    try:
        json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(
            f"{what} {os.fspath(path)}: {error}, expected JSON", path=os.fspath(path)
        ) from error
    return data


def _check(
    digest: bytes, signed: bytes, signature: str, trust_root: str, identity: str, issuer: str
) -> None:
    """Let the package look at a signature; raises as `verify_sigstore`."""
    try:
        from sigstore.errors import Error
        from sigstore.hashes import HashAlgorithm, Hashed
        from sigstore.models import Bundle, TrustedRoot
        from sigstore.verify import Verifier
        from sigstore.verify.policy import Identity
    except ImportError as error:
        from bundler.project import install  # only this error needs it

        raise ConfigError(
            "signatures of Sigstore need the package sigstore, which is not installed;"
            f" {install('sigstore')}",
            extra="sigstore",
        ) from error
    # Beside its own errors the package lets those of pydantic and of certificates through, which
    # are ValueErrors.
    wrong = (Error, ValueError, TypeError)
    try:
        verifier = Verifier(trusted_root=TrustedRoot.from_file(trust_root))
    except wrong as error:
        raise FormatError(
            f"trust root {trust_root}: {_first_line(error)}; expected the trusted_root.json of an"
            " instance of Sigstore",
            path=trust_root,
        ) from error
    try:
        bundle = Bundle.from_json(signed)
    except wrong as error:
        raise FormatError(
            f"signature of Sigstore {signature}: {_first_line(error)}; sign again with cosign"
            " sign-blob --bundle",
            path=signature,
        ) from error
    try:
        hashed = Hashed(algorithm=HashAlgorithm.SHA2_256, digest=digest)
        verifier.verify_artifact(hashed, bundle, Identity(identity=identity, issuer=issuer))
    except wrong as error:
        raise Untrusted(
            f"signature of Sigstore {signature}: {_first_line(error)}; expected one of exactly"
            f" these bytes by {identity} of {issuer}, in a log of {trust_root}",
            reason=_first_line(error),
            path=signature,
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:_LONGEST_SHOWN]
