# SPDX-License-Identifier: Apache-2.0
"""What happens to what nobody vouches for: it is refused, taken with a word in the report, or
nobody asks.

`SignaturePolicy.of_bundle` and `of_tag` judge an envelope against what is really there and return a
`Judgement`; who restores, pulls or follows a tag calls `require`.  Under `require` anything but a
good signature by a key that may vouch for all of it is an error, and nothing becomes visible.
`subject_of` is a bundle as a signature has to describe it: who signs (`signing.py`) and who judges
(`admission.py`) ask the same function.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
from msgspec import Struct

from bundler.config import DEMANDS, Demand, signature_settings
from bundler.errors import ConfigError, FormatError, NotFound, Untrusted
from bundler.format import names
from bundler.format.bundle import Bundle
from bundler.format.bundle_file import os_errors, read_regular, replace_file
from bundler.format.opaque_files import is_code_path, is_program_path, is_tree_path
from bundler.trust.envelope import Envelope, signers
from bundler.trust.statements import BundleStatement, TagStatement, TrustLevel
from bundler.trust.trusted_keys import TrustedKeys

# Clocks of signers and readers may differ by so much before a statement counts as made in the
# future.
CLOCK_SKEW_S = 300.0
_OR_TRUST = ", or trust its key (`triton-bundler key trust`)"
# How to mend what is not signed, by the kind of statement that it lacks.
_FIXES: dict[type[BundleStatement | TagStatement], str] = {
    BundleStatement: f"sign it with a key that you trust (`triton-bundler sign`){_OR_TRUST}",
    TagStatement: f"push it with a key that you trust (`triton-bundler push --key`){_OR_TRUST}",
}
_S = TypeVar("_S", BundleStatement, TagStatement)
_MAX_BYTES = 16 << 10
# Any other file that calls itself a result of tuning could be a program.
_TUNED = (names.AUTOTUNE_SUFFIX, names.BEST_CONFIG_SUFFIX)
# What is mostly meant where a signature is there.
_NO_KEYS = "no key is trusted here: TRITON_BUNDLER_KEYS names the folder of keys"


class _Seen(msgspec.Struct, frozen=True):
    store: str
    tag: str
    epoch: int
    content: str


class SeenEpochs:
    """Which epoch of each tag this user has seen last, so that an old signed statement that is
    played again is found out.

    ::

        <folder>/<sha256 of store and tag>.json
            {"content": "…", "epoch": 7, "store": "…", "tag": "…"}

    `accept` is asked before a tag is followed.  Not guaranteed: who can write to the folder can make it forget, and a machine that has seen nothing
    believes the first statement that is in force.

    Safe under threads and processes: files are replaced whole.  Two that note at once may leave the
    lower epoch of both, which is one that was in force a moment ago.

    Args:
        folder: made at the first note, of mode 0700.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = os.fspath(folder)

    def accept(self, statement: TagStatement) -> None:
        """Refuse a statement that is older than one that was seen, and remember a newer one.

        Raises:
            Untrusted: its epoch is lower, or it is the same and names another bundle.
            FormatError: what was noted cannot be read.
            StoreFull, AccessDenied: it cannot be noted.
        """
        seen = self._seen(statement)
        now = _Seen(statement.store, statement.tag, statement.epoch, statement.content)
        if seen == now:
            return
        if seen is not None and statement.epoch <= seen.epoch:
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
        with os_errors(self._folder, "make"):
            os.makedirs(self._folder, mode=0o700, exist_ok=True)
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


class Subject(Struct, frozen=True):
    """A bundle as it is, to compare with what was signed of it.

    Attributes:
        content: its digest, 64 hexadecimal digits.
        stored: digest of its sections as they are stored; empty where there are none, as in a
            store.
        targets: of its kernels.
        families: of server caches in it.
        trust: `code` when anything in it runs on the CPU.
    """

    content: str
    stored: str
    targets: tuple[str, ...]
    families: tuple[str, ...]
    trust: TrustLevel


def subject_of(bundle: Bundle) -> Subject:
    """Return what a signature of this bundle has to be of."""
    opaque = [entry.path for entry in bundle.opaque]
    return Subject(
        content=bundle.digest.removeprefix("sha256:"),
        stored=bundle.stored_digest,
        targets=tuple(sorted({str(kernel.target) for kernel in bundle.kernels})),
        # The family stands in the path, and a restore refuses an index whose own family is another
        # one.
        families=tuple(sorted({path.split("/")[1] for path in opaque if is_tree_path(path)})),
        trust="code" if _has_code(bundle) else "kernels",
    )


def _has_code(bundle: Bundle) -> bool:
    """Whether anything in it may run on the CPU: what `trust="kernels"` leaves out."""
    return bool(
        bundle.helpers
        # The plan of a program is data, unless it is marked: others call listed operators alone.
        or any(
            not is_program_path(entry.path) or is_code_path(entry.path) for entry in bundle.opaque
        )
        or any(not entry.path.endswith(_TUNED) for entry in bundle.tuning_files)
        or any(kernel.layout.has_library for kernel in bundle.kernels)
    )


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
        return SignaturePolicy(
            TrustedKeys.load(chosen.keys if keys is None else keys),
            kernels=kernels,
            code=code,
            epochs=SeenEpochs(chosen.epochs),
        )

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
                self._epochs.accept(statement)
            except Untrusted as error:
                return Judgement("", error.message, "have who signs it push the tag again")
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
                    none = "" if self.keys.by_name else f" ({_NO_KEYS})"
                    reasons.append(f"signed by {others}, whom no trusted key stands for{none}")
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
            # The newest counts: of a tag's statements that with the highest epoch.
            statement, name = max(
                good, key=lambda pair: (getattr(pair[0], "epoch", 0), pair[0].signed_at)
            )
            return Judgement(name), statement
        reason = "; ".join(dict.fromkeys(reasons)) or "it is not signed"
        return Judgement("", reason, _FIXES[kind]), None

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
