# SPDX-License-Identifier: Apache-2.0
"""Private keys: made, kept in a file that only its owner can read, and used to sign.

`SigningKey` is what `sign` commands hold; a file is PEM (PKCS 8, as OpenSSL writes it), so that
other tools can make and read it, or one that `ssh-keygen -t ed25519` made.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import stat

from bundler.config import PREFIX, signature_settings
from bundler.errors import AccessDenied, BundlerError, ConfigError, FormatError, NotFound
from bundler.format.bundle_file import os_errors, read_regular
from bundler.trust import ed25519

MAX_KEY_FILE_BYTES = 16 << 10
_PEM = re.compile(
    rb"-----BEGIN PRIVATE KEY-----\s+([A-Za-z0-9+/=\s]+?)\s*-----END PRIVATE KEY-----\s*"
)
_OTHER_FORMS = (b"-----BEGIN OPENSSH PRIVATE KEY-----", b"-----BEGIN ENCRYPTED PRIVATE KEY-----")
_PASSPHRASE_VARIABLE = f"{PREFIX}SIGNING_PASSPHRASE_FILE"
# PKCS 8 around an Ed25519 seed is always these bytes, then the 32 of the seed (RFC 8410, section
# 7).
_PKCS8 = bytes.fromhex("302e020100300506032b657004220420")


class SigningKey:
    """An Ed25519 private key.

    Safe under threads and forks: it holds bytes and nothing else.  It does not keep them from other
    code of this process.

    Args:
        private: 32 raw bytes; `generate` makes them.

    Raises:
        ConfigError: another number of bytes, or `cryptography` is not installed.
    """

    __slots__ = ("_private", "key_id", "public")

    def __init__(self, private: bytes) -> None:
        if len(private) != ed25519.KEY_BYTES:
            raise ConfigError(
                f"private key: {len(private)} bytes, expected {ed25519.KEY_BYTES}", got=len(private)
            )
        self._private = private
        self.public = ed25519.public_of(private)
        self.key_id = ed25519.key_id(self.public)

    def __repr__(self) -> str:
        return f"<SigningKey {self.key_id}>"

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("a private key is not pickled; load it from its file")

    @classmethod
    def generate(cls) -> SigningKey:
        """Return a new key."""
        return cls(os.urandom(ed25519.KEY_BYTES))

    def sign(self, message: bytes) -> bytes:
        """Return the 64 bytes of a signature (RFC 8032)."""
        return ed25519.sign(self._private, message)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the key to a new file of mode 0600.

        Raises:
            AccessDenied: the file is there already, or cannot be made; a key is never overwritten.
            StoreFull: no space is left.
        """
        body = base64.b64encode(_PKCS8 + self._private)
        data = b"-----BEGIN PRIVATE KEY-----\n" + body + b"\n-----END PRIVATE KEY-----\n"
        name = os.fspath(path)
        temporary = f"{name}.{os.urandom(8).hex()}.tmp"
        with os_errors(path, "write"):
            file = os.open(
                temporary,
                os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC,
                0o600,
            )
            try:
                with open(file, "wb") as opened:
                    opened.write(data)
                    opened.flush()
                    os.fsync(opened.fileno())
                os.link(temporary, name)  # unlike a rename, it replaces nothing
            except FileExistsError as error:
                raise AccessDenied(
                    f"private key {name}: the file exists; choose another, a key is never"
                    " overwritten",
                    path=name,
                ) from error
            finally:
                os.unlink(temporary)

    @classmethod
    def load(cls, path: str | os.PathLike[str], passphrase: bytes | None = None) -> SigningKey:
        """Read a key from its file: PEM as `save` writes it, PEM with a passphrase, or a file of
        OpenSSH.

        Args:
            path: the file.
            passphrase: of the key; None for what is in the file that
                `TRITON_BUNDLER_SIGNING_PASSPHRASE_FILE` names, if it has one.

        Raises:
            NotFound: there is no such file.
            AccessDenied: it cannot be read, or others can read it; the same goes for the file with
                the passphrase.
            FormatError: it holds something else, or the passphrase is another.
            ConfigError: it has a passphrase and none was given, or the package that reads it is not
                installed.
        """
        name = os.fspath(path)
        data = _read_secret(path, "private key", "`triton-bundler key new` makes one")
        if data.startswith(_OTHER_FORMS):
            try:
                secret = _passphrase() if passphrase is None else passphrase
                return cls(ed25519.private_of_file(data, secret))
            except FormatError as error:
                raise FormatError(f"private key {name}: {error.message}", path=name) from error
            except ConfigError as error:
                if "extra" in error.facts:
                    raise
                raise ConfigError(
                    f"private key {name}: {error.message}; put it into a file of mode 0600 that"
                    f" {_PASSPHRASE_VARIABLE} names, or take it off a copy: ssh-keygen -p -f COPY,"
                    f" openssl pkey -in {name} -out COPY",
                    path=name,
                ) from error
        matched = _PEM.fullmatch(data)
        try:
            body = base64.b64decode(b"".join(matched[1].split()), validate=True) if matched else b""
        except binascii.Error:
            body = b""
        if len(body) != len(_PKCS8) + ed25519.KEY_BYTES or not body.startswith(_PKCS8):
            raise FormatError(
                f"private key {name}: not an unencrypted Ed25519 key in PEM (PKCS 8)", path=name
            )
        return cls(body[len(_PKCS8) :])


def _passphrase() -> bytes | None:
    """Return what is in the file that the settings name, without the end of its line."""
    path = signature_settings().passphrase_file
    if path is None:
        return None
    return _read_secret(path, "passphrase", f"{_PASSPHRASE_VARIABLE} names it").rstrip(b"\r\n")


def _read_secret(path: str | os.PathLike[str], what: str, advice: str) -> bytes:
    """Return the bytes of a file that its owner alone can read; raises `NotFound` and
    `AccessDenied`.
    """
    name = os.fspath(path)

    def check(opened: int) -> None:
        mode = stat.S_IMODE(os.fstat(opened).st_mode)
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise AccessDenied(
                f"{what} {name}: mode {mode:04o}, expected 0600; chmod 600 {name}",
                path=name,
                got=mode,
            )

    try:
        return read_regular(path, MAX_KEY_FILE_BYTES, check=check)
    except BundlerError:
        raise
    except FileNotFoundError as error:
        raise NotFound(f"{what} {name}: no such file; {advice}", path=name) from error
    except OSError as error:
        raise AccessDenied(f"{what} {name}: {error.strerror}", path=name) from error
