# SPDX-License-Identifier: Apache-2.0
"""What happens to what nobody vouches for: it is refused, taken with a word in the report, or
nobody asks.

`SignaturePolicy.of_bundle` and `of_tag` judge an envelope against what is really there and return a
`Judgement`; who restores, pulls or follows a tag calls `require`.  Under `require` anything but a
good signature by a key that may vouch for all of it is an error, and nothing becomes visible.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from msgspec import Struct

from bundler.config import DEMANDS, Demand, signature_settings
from bundler.errors import ConfigError, FormatError, Untrusted
from bundler.trust.envelope import Envelope, signers
from bundler.trust.seen_epochs import SeenEpochs
from bundler.trust.statements import BundleStatement, TagStatement, TrustLevel
from bundler.trust.subjects import Subject
from bundler.trust.trusted_keys import TrustedKeys

if TYPE_CHECKING:
    from bundler.user_settings import SignatureSettings

# Clocks of signers and readers may differ by so much before a statement counts as made in the
# future.
CLOCK_SKEW_S = 300.0
_FIX = (
    "sign it with a key that you trust (`triton-bundler sign`), or trust its key (`triton-bundler"
    " key trust`)"
)
_S = TypeVar("_S", BundleStatement, TagStatement)


class Judgement(Struct, frozen=True):
    """What came of looking at signatures.

    Attributes:
        key: name of the trusted key whose word counts; empty when none does.
        reason: why none does; empty when one does.
        fix: what to do then.
    """

    key: str
    reason: str = ""
    fix: str = ""

    @property
    def good(self) -> bool:
        """Whether a trusted key vouches for it."""
        return bool(self.key)


class SignaturePolicy:
    """Which signatures are asked for, and whose word counts.

    Safe under threads; it keeps no state but the memory of epochs, which is in files.

    Args:
        keys: whom to believe.
        kernels: `require`, `prefer` or `off`, for bundles that hold kernels alone.
        code: the same for bundles with anything that runs on the CPU.
        epochs: memory of tags; None remembers nothing, so that an old statement counts again.
        now: the clock, in seconds since 1970.

    Raises:
        ConfigError: no such demand.
    """

    def __init__(
        self,
        keys: TrustedKeys,
        *,
        kernels: Demand = "off",
        code: Demand = "off",
        epochs: SeenEpochs | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        for name, value in (("kernels", kernels), ("code", code)):
            if value not in DEMANDS:
                raise ConfigError(
                    f"{name}={value!r}: expected {', '.join(map(repr, DEMANDS))}", got=value
                )
        self.keys, self.kernels, self.code = keys, kernels, code
        self._epochs, self._now = epochs, now

    @staticmethod
    def load(
        keys: str | os.PathLike[str] | None = None,
        *,
        kernels: Demand = "require",
        code: Demand = "require",
    ) -> SignaturePolicy:
        """Return the policy over the trusted keys of a folder, with this user's memory of epochs.

        Args:
            keys: the folder; None for the one of the settings, `TRITON_BUNDLER_KEYS`.
            kernels, code: what is asked for.

        Raises:
            ConfigError: no such demand.
            FormatError, LimitExceeded, AccessDenied: the folder cannot be read, or holds what is no
                key.
        """
        chosen = signature_settings()
        return policy_of(chosen, chosen.keys if keys is None else keys, kernels=kernels, code=code)

    def demand(self, trust: TrustLevel) -> Demand:
        """Return what is asked of a bundle of this trust level."""
        return self.code if trust == "code" else self.kernels

    def of_bundle(self, envelopes: Sequence[bytes], subject: Subject) -> Judgement:
        """Judge the signatures of a bundle.

        Args:
            envelopes: as they were found beside it or in it; anybody may have put them there.
            subject: the bundle as it is.
        """

        def differs(statement: BundleStatement) -> str | None:
            if statement.content != subject.content:
                return (
                    f"is for the bundle {statement.content[:12]}…, not for {subject.content[:12]}…"
                )
            if statement.stored and subject.stored and statement.stored != subject.stored:
                return "is for the same content stored as other bytes"
            missing = [name for name in subject.targets if name not in statement.targets]
            missing += [name for name in subject.families if name not in statement.families]
            if missing:
                return f"does not speak of {', '.join(missing[:5])}"
            if subject.trust == "code" and statement.trust != "code":
                return "is for kernels alone, and the bundle holds what runs on the CPU"
            return None

        return self._judge(envelopes, BundleStatement, differs)[0]

    def of_tag(self, envelopes: Sequence[bytes], store: str, tag: str, content: str) -> Judgement:
        """Judge the signatures of a tag; the epoch of a good one is remembered.

        Args:
            envelopes: as they were found; anybody may have put them there.
            store: the name of the store for signers.
            tag: the tag.
            content: digest of the bundle that the tag names now, 64 hexadecimal digits.

        Raises:
            FormatError, AccessDenied, StoreFull: what was seen cannot be read, or not be noted.
        """

        def differs(statement: TagStatement) -> str | None:
            for what, signed, here in (
                ("store", statement.store, store),
                ("tag", statement.tag, tag),
                ("bundle", statement.content, content),
            ):
                if signed != here:
                    return f"is for {what} {signed!r}, not for {here!r}"
            return None

        judgement, statement = self._judge(envelopes, TagStatement, differs)
        if statement is not None and self._epochs is not None:
            try:
                self._epochs.check(statement)
            except Untrusted as error:
                return Judgement("", error.message, "have who signs it push the tag again")
            self._epochs.note(statement)
        return judgement

    def require(self, judgement: Judgement, trust: TrustLevel, what: str) -> None:
        """Refuse what a judgement does not cover, where the policy says so.

        Args:
            judgement: of its signatures.
            trust: its trust level.
            what: it, for the message.

        Raises:
            Untrusted: no good signature, and this level requires one.
        """
        if not judgement.good and self.demand(trust) == "require":
            raise Untrusted(
                f"{what}: signatures are required for {trust}, and {judgement.reason};"
                f" {judgement.fix}",
                reason=judgement.reason,
                trust=trust,
            )

    def _judge(
        self, envelopes: Sequence[bytes], kind: type[_S], differs: Callable[[_S], str | None]
    ) -> tuple[Judgement, _S | None]:
        """Return the judgement, and the statement that it rests on; the newest one where several
        are good.
        """
        reasons: list[str] = []
        good: list[tuple[_S, str]] = []
        for data in envelopes:
            try:
                envelope = Envelope.decode(data, kind.payload_type)
                found = signers(envelope, self.keys.public)
                if not found:
                    others = ", ".join(name[:20] for name, _ in envelope.signatures[:5]) or "nobody"
                    reasons.append(f"signed by {others}, whom no trusted key stands for")
                    continue
                statement = kind.decode(envelope.payload)
            except FormatError as error:
                reasons.append(str(error))
                continue
            why = differs(statement) or self._out_of_time(statement)
            if why is not None:
                reasons.append(f"the signature {why}")
                continue
            for key in found:
                name = self.keys.names[key]
                refused = self.keys.by_id[key].why_not(statement, self._now())
                if refused is None:
                    good.append((statement, name))
                else:
                    reasons.append(f"key {name!r} {refused}")
        if good:
            statement, name = max(good, key=_newest)
            return Judgement(name), statement
        reason = "; ".join(dict.fromkeys(reasons)) or "it is not signed"
        return Judgement("", reason, _FIX), None

    def _out_of_time(self, statement: BundleStatement | TagStatement) -> str | None:
        now = self._now()
        if statement.expires and now >= statement.expires:
            return f"expired {now - statement.expires:,.0f} s ago"
        if statement.signed_at > now + CLOCK_SKEW_S:
            return (
                f"was made {statement.signed_at - now:,.0f} s in the future: one of the clocks is"
                " wrong"
            )
        return None


def policy_of(
    chosen: SignatureSettings, keys: str | os.PathLike[str], *, kernels: Demand, code: Demand
) -> SignaturePolicy:
    """Return what `SignaturePolicy.load` does, for who has read the settings; raises as that."""
    return SignaturePolicy(
        TrustedKeys.load(keys), kernels=kernels, code=code, epochs=SeenEpochs(chosen.epochs)
    )


def _newest(pair: tuple[BundleStatement | TagStatement, str]) -> tuple[int, int]:
    statement = pair[0]
    return (statement.epoch if isinstance(statement, TagStatement) else 0, statement.signed_at)
