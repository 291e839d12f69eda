# SPDX-License-Identifier: Apache-2.0
"""`sign` puts a signature into a bundle file; `bundle_envelope` and `tag_envelope` make those that
a store keeps.

Users and `triton-bundler sign` call `sign`; a push with a key calls the other two
(`bundler/store/store_signatures.py`).
"""

from __future__ import annotations

import os
import time

from msgspec import Struct
from msgspec.structs import replace

from bundler.errors import ConfigError, DigestMismatch, FormatError
from bundler.format.bundle import Bundle
from bundler.format.bundle_file import replace_content
from bundler.format.summary import Reported
from bundler.trust import minisign as minisign_files
from bundler.trust.envelope import Envelope
from bundler.trust.signature_policy import subject_of
from bundler.trust.signing_keys import SigningKey
from bundler.trust.statements import BundleStatement, TagStatement, TrustLevel

MINISIGN_SUFFIX = ".minisig"


class SignReport(Reported, Struct, frozen=True):
    """What was signed.

    Attributes:
        path: the signed file.
        digest: of the bundle, `sha256:` and 64 hexadecimal digits.
        key_id: of the key.
        trust: `code` when the signature is also for what runs on the CPU.
        targets: of the kernels that it is for.
        families: of server caches that it is for.
        expires: when it stops counting, in seconds since 1970; 0 for never.
        minisign: the file of minisign's signature; empty where none was asked for.
    """

    path: str
    digest: str
    key_id: str
    trust: TrustLevel
    targets: tuple[str, ...]
    families: tuple[str, ...] = ()
    expires: int = 0
    minisign: str = ""


def sign(
    bundle_path: str | os.PathLike[str],
    key: SigningKey | str | os.PathLike[str],
    *,
    output: str | os.PathLike[str] | None = None,
    expires_s: float | None = None,
    trust: TrustLevel | None = None,
    minisign: bool = False,
) -> SignReport:
    """Sign a bundle file: a statement about its content and its stored bytes goes into it, beside
    those of other keys.

    Everything else stays as it is stored, the digest too.  An earlier signature of the same key is
    replaced.

    Args:
        bundle_path: the file; it is verified whole before it is signed.
        key: the private key, or the file of one.
        output: where the signed copy goes; None replaces the file.
        expires_s: for how long the signature counts, in seconds; None for always.
        trust: what is vouched for; None for `code` where anything in the bundle runs on the CPU,
            else `kernels`.
        minisign: also write a signature as minisign makes it, of the signed file, beside it.

    Raises:
        NotFound, AccessDenied: the bundle or the key cannot be read.
        FormatError, DigestMismatch: one of them is damaged.
        ConfigError: `cryptography` is not installed, or the time is not more than 0.
        UnsupportedVersion: a newer version wrote the bundle.
        StoreFull: no space is left.
    """
    if not isinstance(key, SigningKey):
        key = SigningKey.load(key)
    target = os.fspath(bundle_path if output is None else output)
    with Bundle.load(bundle_path) as bundle:
        bundle.verify()
        statement = bundle_statement(
            bundle, stored=bundle.stored_digest, expires_s=expires_s, trust=trust
        )
        mine = _signed(statement, key)
        kept = [data for data in bundle.signatures if not _is_of(data, key)]
        bundle.signed.write_copy(target, [*kept, mine.encode()])
        said = (statement.trust, statement.targets, statement.families, statement.expires)
        report = SignReport(target, bundle.digest, key.key_id, *said)
    if not minisign:
        return report
    comment = (
        f"timestamp:{statement.signed_at}\tfile:{os.path.basename(target)}\tdigest:{report.digest}"
    )
    with Bundle.load(target) as written:
        # Who may write to the folder could have put another file there by now.
        if (written.digest, written.stored_digest) != (report.digest, statement.stored):
            raise DigestMismatch(
                f"{target}: it was replaced while it was signed; sign it again, in a folder that"
                " nobody else writes to",
                path=target,
            )
        text = minisign_files.write_signature(key, written.signed.file_chunks(), comment)
    replace_content(target + MINISIGN_SUFFIX, text.encode())
    return replace(report, minisign=target + MINISIGN_SUFFIX)


def bundle_statement(
    bundle: Bundle,
    *,
    stored: str = "",
    expires_s: float | None = None,
    trust: TrustLevel | None = None,
) -> BundleStatement:
    """Return a statement about a bundle, made now; raises `ConfigError` for a time that is not more
    than 0.
    """
    if expires_s is not None and not expires_s > 0:
        raise ConfigError(f"expires_s={expires_s!r}: expected seconds, more than 0", got=expires_s)
    subject, now = subject_of(bundle), int(time.time())
    return BundleStatement(
        content=subject.content,
        stored=stored,
        targets=subject.targets,
        families=subject.families,
        trust=trust or subject.trust,
        signed_at=now,
        expires=0 if expires_s is None else now + max(1, round(expires_s)),
    )


def bundle_envelope(bundle: Bundle, key: SigningKey) -> bytes:
    """Return a signature of a bundle's content, wherever its bytes are."""
    return _signed(bundle_statement(bundle), key).encode()


def _signed(statement: BundleStatement | TagStatement, key: SigningKey) -> Envelope:
    return Envelope(statement.payload_type, statement.encode()).sign(key)


def tag_envelope(key: SigningKey, store: str, tag: str, content: str, epoch: int) -> bytes:
    """Return a signature of what a tag names.

    Args:
        key: who signs.
        store: the name of the store for signers.
        tag: the tag.
        content: digest of the bundle, 64 hexadecimal digits.
        epoch: greater than that of each earlier statement about the tag.
    """
    statement = TagStatement(
        store=store, tag=tag, content=content, epoch=epoch, signed_at=int(time.time())
    )
    return _signed(statement, key).encode()


def _is_of(data: bytes, key: SigningKey) -> bool:
    """Whether an envelope names this key and no other; what cannot be read is left where it is."""
    try:
        envelope = Envelope.decode(data, BundleStatement.payload_type)
    except FormatError:
        return False
    return {name for name, _ in envelope.signatures} == {key.key_id}
