# SPDX-License-Identifier: Apache-2.0
"""`verify_sigstore`: a signature of Sigstore, checked offline against a trust root that the user
gives.

`triton-bundler verify --sigstore` and users call it.  The package `sigstore` (the extra of that
name) does the checking: certificate chain, transparency log, identity, signature; nothing is
fetched.  A restore goes by what is in the bundle file alone.
"""

from __future__ import annotations

import hashlib
import json
import os

from msgspec import Struct

from bundler.errors import ConfigError, FormatError, Untrusted
from bundler.format.bundle_file import os_errors, read_regular
from bundler.format.summary import Reported
from bundler.trust.signing import file_chunks

MAX_JSON_BYTES = 1 << 20
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
