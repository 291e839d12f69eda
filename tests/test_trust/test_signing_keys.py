# SPDX-License-Identifier: Apache-2.0
"""Private keys are made, kept safe and read again, also by other tools."""

import os
import pickle
import stat

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from hypothesis import given
from hypothesis import strategies as st

from bundler.errors import AccessDenied, ConfigError, FormatError, NotFound
from bundler.trust import ed25519
from bundler.trust.signing_keys import SigningKey

# Of the group of Ed25519's points: adding it to the second half of a signature gives the same
# equation.
ORDER = 2**252 + 27742317777372353535851937790883648493
# RFC 8032, section 7.1, test 2.
SEED = bytes.fromhex("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb")
PUBLIC = bytes.fromhex("3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c")
SIGNED_72 = bytes.fromhex(
    "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
)


def test_signatures_are_those_of_the_standard():
    """The vector of RFC 8032 comes out."""
    key = SigningKey(SEED)
    assert (key.public, key.sign(b"\x72")) == (PUBLIC, SIGNED_72)
    assert ed25519.verifies(PUBLIC, SIGNED_72, b"\x72")


@pytest.mark.parametrize(
    ("public", "signature", "message"),
    [
        (PUBLIC, SIGNED_72, b"\x73"),
        (PUBLIC, bytes(64), b"\x72"),
        (b"\xff" * 32, SIGNED_72, b"\x72"),
        (
            PUBLIC,
            SIGNED_72[:32]
            + (int.from_bytes(SIGNED_72[32:], "little") + ORDER).to_bytes(32, "little"),
            b"\x72",
        ),
        (PUBLIC, SIGNED_72[:-1], b"\x72"),
        (PUBLIC[:-1], SIGNED_72, b"\x72"),
        (PUBLIC, b"", b"\x72"),
    ],
)
def test_what_is_no_signature_does_not_verify(public, signature, message):
    """Another message, bytes of another length, what is no point, or a second form of a signature,
    are answered with no.
    """
    assert not ed25519.verifies(public, signature, message)


@given(
    st.binary(max_size=300),
    st.binary(min_size=32, max_size=32),
    st.integers(0, 63),
    st.integers(0, 255),
)
def test_a_signature_verifies_unless_a_bit_of_it_changed(message, seed, where, change):
    """Of good signatures, and of changed ones."""
    key = SigningKey(seed)
    signature = bytearray(key.sign(message))
    signature[where] ^= change
    assert ed25519.verifies(key.public, bytes(signature), message) is (change == 0)


def test_a_key_file_is_the_owners_alone_and_comes_back(tmp_path):
    """The file has mode 0600 whatever the umask says, and loads to the same key."""
    before = os.umask(0)
    try:
        SigningKey(SEED).save(tmp_path / "release.pem")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "release.pem").stat().st_mode) == 0o600
    assert SigningKey.load(tmp_path / "release.pem").public == PUBLIC
    assert os.listdir(tmp_path) == ["release.pem"]


def test_other_tools_read_and_make_the_file(tmp_path):
    """PEM is written and read as the package cryptography does it."""
    SigningKey(SEED).save(tmp_path / "ours.pem")
    theirs = load_pem_private_key((tmp_path / "ours.pem").read_bytes(), None)
    assert theirs.public_key().public_bytes_raw() == PUBLIC
    made = Ed25519PrivateKey.generate()
    path = tmp_path / "theirs.pem"
    path.write_bytes(made.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    path.chmod(0o600)
    assert SigningKey.load(path).public == made.public_key().public_bytes_raw()


def test_a_key_is_never_overwritten(tmp_path):
    """A second key under the same name is refused, and the first stays."""
    SigningKey(SEED).save(tmp_path / "release.pem")
    with pytest.raises(AccessDenied, match="never overwritten"):
        SigningKey.generate().save(tmp_path / "release.pem")
    assert SigningKey.load(tmp_path / "release.pem").public == PUBLIC
    assert os.listdir(tmp_path) == ["release.pem"]


def test_a_key_that_others_can_read_is_refused(tmp_path):
    """The message says how to mend it."""
    SigningKey(SEED).save(tmp_path / "release.pem")
    (tmp_path / "release.pem").chmod(0o640)
    with pytest.raises(AccessDenied, match=r"mode 0640, expected 0600; chmod 600"):
        SigningKey.load(tmp_path / "release.pem")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"-----BEGIN PRIVATE KEY-----\nMC4=\n-----END PRIVATE KEY-----\n",
        b"-----BEGIN PRIVATE KEY-----\n!!\n-----END PRIVATE KEY-----\n",
        b"\0" * 200,
    ],
)
def test_what_is_no_key_is_a_typed_error(tmp_path, data):
    """Each kind of foreign bytes is named with its file."""
    path = tmp_path / "release.pem"
    path.write_bytes(data)
    path.chmod(0o600)
    with pytest.raises(FormatError, match=r"release\.pem"):
        SigningKey.load(path)


def test_a_key_that_is_not_there(tmp_path):
    """The message says what makes one."""
    with pytest.raises(NotFound, match="key new"):
        SigningKey.load(tmp_path / "release.pem")


def test_a_named_pipe_in_place_of_a_key_does_not_make_us_wait(tmp_path):
    """It is refused at once."""
    os.mkfifo(tmp_path / "release.pem", 0o600)
    with pytest.raises(AccessDenied, match="named pipe"):
        SigningKey.load(tmp_path / "release.pem")


def test_a_private_key_is_neither_shown_nor_pickled():
    """Its repr names it by its public half."""
    key = SigningKey(SEED)
    assert repr(key) == f"<SigningKey {key.key_id}>"
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(key)
    with pytest.raises(ConfigError, match="31 bytes, expected 32"):
        SigningKey(SEED[:-1])
