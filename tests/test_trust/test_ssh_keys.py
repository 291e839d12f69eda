# SPDX-License-Identifier: Apache-2.0
"""Keys that ssh-keygen and OpenSSL made sign and are trusted; those with a passphrase ask for it,
other types are refused.
"""

import shutil
import subprocess

import pytest
from cryptography.hazmat.primitives import serialization as forms
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import bundler
from bundler import SigningKey
from bundler.errors import AccessDenied, ConfigError, FormatError, NotFound
from bundler.trust import file_signatures
from bundler.trust.file_signatures import judge_file, trust_public_file
from bundler.trust.trusted_keys import KeyScope

SEED = b"o" * 32
VARIABLE = "TRITON_BUNDLER_SIGNING_PASSPHRASE_FILE"


def write(path, data):
    """Write a private file."""
    path.write_bytes(data)
    path.chmod(0o600)
    return path


def private(encoding, form, protection=None):
    """Return a private key in one of the forms of `cryptography`."""
    key = Ed25519PrivateKey.from_private_bytes(SEED)
    return key.private_bytes(encoding, form, protection or forms.NoEncryption())


def public_line():
    """Return the line of a `.pub` file."""
    key = Ed25519PrivateKey.from_private_bytes(SEED).public_key()
    return (
        key.public_bytes(forms.Encoding.OpenSSH, forms.PublicFormat.OpenSSH).decode()
        + " alice@host\n"
    )


@pytest.fixture
def ssh_key(tmp_path):
    """A file of OpenSSH without a passphrase."""
    return write(tmp_path / "id_ed25519", private(forms.Encoding.PEM, forms.PrivateFormat.OpenSSH))


@pytest.fixture
def protected(tmp_path):
    """A file of OpenSSL with the passphrase `secret`."""
    protection = forms.BestAvailableEncryption(b"secret")
    return write(
        tmp_path / "p.pem", private(forms.Encoding.PEM, forms.PrivateFormat.PKCS8, protection)
    )


def test_a_key_of_openssh_signs_and_is_trusted(ssh_key, signers, kernels, tmp_path):
    """The private file signs, the public line is trusted, and both have the id of the key."""
    (tmp_path / "id.pub").write_text(public_line())
    trusted = trust_public_file(signers.folder, "ssh", tmp_path / "id.pub", KeyScope())
    report = bundler.sign(kernels, ssh_key)
    assert report.key_id == trusted.key_id == SigningKey(SEED).key_id
    with bundler.Bundle.load(kernels) as bundle:
        assert judge_file(bundle, kernels).key == "ssh"


@pytest.mark.skipif(
    shutil.which("ssh-keygen") is None, reason="the program ssh-keygen is not installed"
)
def test_what_ssh_keygen_makes_is_read(tmp_path):
    """Its private file and its public line are of one key."""
    done = subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "a comment", "-f", "id"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert SigningKey.load(tmp_path / "id").public == file_signatures.read_public(
        (tmp_path / "id.pub").read_text()
    )


def test_a_passphrase_is_asked_for(protected, tmp_path, monkeypatch):
    """It is in the call, or in a file of mode 0600 that the environment names; without one the
    message says what to do, and does not name it.
    """
    with pytest.raises(ConfigError, match=rf"p\.pem: a passphrase protects it.*{VARIABLE}"):
        SigningKey.load(protected)
    assert SigningKey.load(protected, b"secret").public == SigningKey(SEED).public
    monkeypatch.setenv(VARIABLE, str(write(tmp_path / "word", b"secret\n")))
    assert SigningKey.load(protected).public == SigningKey(SEED).public
    (tmp_path / "word").chmod(0o644)
    with pytest.raises(AccessDenied, match=r"passphrase .*word: mode 0644"):
        SigningKey.load(protected)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "none"))
    with pytest.raises(NotFound, match=VARIABLE):
        SigningKey.load(protected)
    with pytest.raises(FormatError, match="passphrase is another") as wrong:
        SigningKey.load(protected, b"guessed")
    assert "guessed" not in str(wrong.value)


def test_a_passphrase_that_is_not_needed_does_no_harm(ssh_key):
    """A job may set one for all its keys."""
    assert SigningKey.load(ssh_key, b"unused").public == SigningKey(SEED).public


def test_an_encrypted_key_of_openssh(tmp_path):
    """With the package bcrypt it is read; without it the message names the package, and the way
    round.
    """
    done = (
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", "id"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        if shutil.which("ssh-keygen")
        else None
    )
    if done is None or done.returncode:
        pytest.skip("ssh-keygen, which makes the key, is not installed")
    public = file_signatures.read_public((tmp_path / "id.pub").read_text())
    try:
        import bcrypt  # noqa: F401
    except ImportError:
        with pytest.raises(ConfigError, match=r"bcrypt.*ssh-keygen -p"):
            SigningKey.load(tmp_path / "id", b"secret")
    else:
        assert SigningKey.load(tmp_path / "id", b"secret").public == public
        with pytest.raises(FormatError, match="passphrase is another"):
            SigningKey.load(tmp_path / "id", b"guessed")


def test_keys_of_other_types_are_refused(tmp_path):
    """The message names the type that was found and what makes the right one."""
    other = generate_private_key(SECP256R1())
    data = other.private_bytes(
        forms.Encoding.PEM, forms.PrivateFormat.OpenSSH, forms.NoEncryption()
    )
    with pytest.raises(FormatError, match=r"ECPrivateKey.*expected an Ed25519 key"):
        SigningKey.load(write(tmp_path / "id_ecdsa", data))
    line = (
        other.public_key().public_bytes(forms.Encoding.OpenSSH, forms.PublicFormat.OpenSSH).decode()
    )
    assert file_signatures.is_public(line)
    with pytest.raises(FormatError, match=r"ecdsa-sha2-nistp256.*ssh-keygen -t ed25519"):
        file_signatures.read_public(line)


@pytest.mark.parametrize(
    "text",
    [
        "ssh-ed25519",
        "ssh-ed25519 !!",
        "ssh-ed25519 AAAA",
        "ssh-rsa AAAAC3NzaC1lZDI1NTE5AAAAI",
        "sk-ssh-ed25519@openssh.com AAAA",
        public_line() * 2,
        public_line().replace("AAAAC3NzaC1lZDI1NTE5", "AAAAC3NzaC1lZDI1NTE6"),
        public_line().replace("ssh-ed25519 ", "ssh-ed25519 AAAA"),
    ],
)
def test_damaged_public_lines_are_typed_errors(text):
    """Also a line whose base64 is of another type than its first word."""
    with pytest.raises(FormatError, match="OpenSSH public key"):
        file_signatures.read_public(text)


@pytest.mark.parametrize("cut", [40, 100, 200, 300])
def test_damaged_private_files_are_typed_errors(ssh_key, cut):
    """Cut anywhere, the error names the file."""
    write(ssh_key, ssh_key.read_bytes()[:cut])
    with pytest.raises(FormatError, match="id_ed25519"):
        SigningKey.load(ssh_key)
