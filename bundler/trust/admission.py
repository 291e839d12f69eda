# SPDX-License-Identifier: Apache-2.0
"""`admit`: may this bundle be used, before the first of its kernels is.

Restores, checks, launches and sessions call it with the policy they were given, or with
`policy_in_force`, which the environment sets. Where nobody asks for signatures it costs two looks
at the environment and imports nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from msgspec import Struct
from msgspec.structs import replace

from bundler.config import signature_demands
from bundler.errors import DigestMismatch, FormatError

if TYPE_CHECKING:
    from bundler.format.bundle import Bundle
    from bundler.trust.signature_policy import Judgement, SignaturePolicy
    from bundler.trust.statements import TrustLevel

TrustAsked = Literal["kernels", "code", "signed"]


class Admission(Struct, frozen=True):
    """What may be used of a bundle.

    Attributes:
        trust: `code` when what runs on the CPU may be used too.
        line: what a report says of signatures; empty where nobody asked.
    """

    trust: TrustLevel
    line: str = ""


def policy_in_force() -> SignaturePolicy | None:
    """Return the policy that the environment sets; None where it asks for nothing.

    Raises:
        ConfigError: a setting has a value that it cannot have.
        FormatError, LimitExceeded, AccessDenied: the folder of trusted keys cannot be read, or
            holds what is no key.
    """
    kernels, code = signature_demands()
    if kernels == code == "off":
        return None
    from bundler.trust.signature_policy import SignaturePolicy

    return SignaturePolicy.load(kernels=kernels, code=code)


def admit(
    bundle: Bundle, trust: TrustAsked = "kernels", policy: SignaturePolicy | None = None
) -> Admission:
    """Judge the signatures of a bundle.

    Args:
        bundle: as it was loaded or pulled; what is judged are the digests in memory that its bytes
            are compared with later.
        trust: what is to be used of it; `signed` is `code` where a trusted key vouches for the code
            in it, else `kernels`.
        policy: which signatures are asked for; None for what the environment says.

    Raises:
        Untrusted: the policy requires a signature, and no good one is there; the message names key,
            scope and fix.
        As `policy_in_force`.
    """
    policy = policy_in_force() if policy is None else policy
    if policy is None and trust != "signed":
        return Admission(trust)
    from bundler.trust.signature_policy import SignaturePolicy, subject_of

    policy = SignaturePolicy.load(kernels="off", code="off") if policy is None else policy
    subject, doubt = subject_of(bundle), bundle.signed.doubt
    envelopes, unread = _envelopes(bundle)

    def judged(level: TrustLevel) -> Judgement:
        judgement = policy.of_bundle(envelopes, replace(subject, trust=level))
        if unread:
            return replace(judgement, reason=f"its signatures cannot be read: {unread}")
        # Where a signature is required of code, the tag that led to the bundle needs one too.
        if level == "code" and judgement.good and doubt and policy.code == "require":
            return replace(judgement, key="", reason=doubt, fix="push it again with a trusted key")
        return judgement

    asked: dict[TrustLevel, Judgement] = {}
    # A good signature for code vouches for the kernels too, so one level is judged after the other.
    if policy.kernels != "off":
        asked["kernels"] = judged("kernels")
    if subject.trust == "code" and (
        trust == "signed" or (trust == "code" and policy.code != "off")
    ):
        asked["code"] = judged("code")
    for level, judgement in asked.items():
        if not (level == "code" and trust == "signed"):
            policy.require(judgement, level, f"bundle {subject.content[:12]}…")
    lines = [*(_line(level, judgement) for level, judgement in asked.items()), doubt]
    if trust == "signed":
        trust = "code" if "code" in asked and asked["code"].good else "kernels"
    return Admission(trust, "; ".join(dict.fromkeys(filter(None, lines))))


def _envelopes(bundle: Bundle) -> tuple[tuple[bytes, ...], str]:
    """Return the envelopes, and why they cannot be read."""
    try:
        return bundle.signatures, ""
    except (FormatError, DigestMismatch) as error:
        return (), error.message


def _line(level: str, judgement: Judgement) -> str:
    if judgement.good:
        return f"{level} signed by key {judgement.key!r}"
    return f"{level} not signed: {judgement.reason}"
