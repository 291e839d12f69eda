# SPDX-License-Identifier: Apache-2.0
"""What a signature says: this bundle is mine, or this tag names that bundle.

`BundleStatement` and `TagStatement` are the payloads of envelopes (`envelope.py`), as canonical
JSON: members in the order of their names, no blanks.  `signing.py` fills them in,
`signature_policy.py` compares them with what is there.
"""

# Annotations are real ones in this module: msgspec reads those of a struct when the first one is
# decoded, and texts take it ten times as long.
from typing import Annotated, ClassVar, Literal, Self

import msgspec

from bundler.errors import FormatError

TrustLevel = Literal["kernels", "code"]
DIGEST_DIGITS = 64
HEX_DIGITS = "0123456789abcdef"
# Without a pattern, which takes longer to compile than a statement to read: `check_digests` looks
# at the digits.
_Digest = Annotated[str, msgspec.Meta(min_length=DIGEST_DIGITS, max_length=DIGEST_DIGITS)]
_DigestOrNone = Annotated[str, msgspec.Meta(max_length=DIGEST_DIGITS)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
_Names = Annotated[tuple[_Name, ...], msgspec.Meta(max_length=1024)]
_Seconds = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
_LONGEST_SHOWN = 200


class _Statement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What both kinds have.

    Attributes:
        statement: version of the form; another one is refused, since a field that is not understood
            may forbid something.
        signed_at: when it was signed, in seconds since 1970 on the signer's clock.
        expires: when it stops counting, in the same seconds; 0 for never.
    """

    payload_type: ClassVar[str]
    digests: ClassVar[tuple[str, ...]] = ("content",)
    statement: Literal[1] = 1
    signed_at: _Seconds
    expires: _Seconds = 0

    def encode(self) -> bytes:
        """Return the payload, equal for equal statements."""
        return msgspec.json.encode(self, order="sorted")

    @classmethod
    def decode(cls, payload: bytes) -> Self:
        """Read a payload whose signature was found good.

        Raises:
            FormatError: it is no statement of this kind.
        """
        try:
            found = msgspec.json.decode(payload, type=cls)
            found.check_digests()
        except ValueError as error:  # msgspec's are some too
            raise FormatError(
                f"signed statement {payload[:_LONGEST_SHOWN]!r}: {error}; sign again with this"
                " release"
            ) from error
        return found

    def check_digests(self) -> None:
        """Raise `ValueError` when a digest is none; only one of what was stored may be empty."""
        for name in self.digests:
            text = getattr(self, name)
            if text and (len(text) != DIGEST_DIGITS or text.strip(HEX_DIGITS)):
                raise ValueError(f"{name} {text!r}, expected {DIGEST_DIGITS} hexadecimal digits")


class BundleStatement(_Statement, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Somebody vouches for a bundle.

    Attributes:
        content: the bundle's digest, which covers all that its kernels are.
        stored: digest of what was observed of it and of its sections as they are stored; empty when
            only the content counts, as in a store, where units have digests of their own.
        targets: of the kernels in it, sorted.
        families: names of server caches in it, sorted.
        trust: whether it holds kernels alone, or also what runs on the CPU.
    """

    payload_type = "application/vnd.triton-bundler.bundle.v1+json"
    digests = ("content", "stored")
    content: _Digest
    stored: _DigestOrNone = ""
    targets: _Names = ()
    families: _Names = ()
    trust: TrustLevel = "kernels"


class TagStatement(_Statement, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Somebody says which bundle a tag names.

    Attributes:
        store: the name that the store has for signers, which keeps a statement from being carried
            to another one.
        tag: the tag.
        content: digest of the bundle.
        epoch: counts up with each statement about a tag: a lower one than was seen is an old
            statement played again.
    """

    payload_type = "application/vnd.triton-bundler.tag.v1+json"
    store: _Name
    tag: _Name
    content: _Digest
    epoch: Annotated[int, msgspec.Meta(ge=1, le=1 << 53)]
