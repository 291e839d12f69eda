# SPDX-License-Identifier: Apache-2.0
"""What somebody who can put a file among the keys, or give one to a user, tries."""

import base64
import json
import os
import time

import pytest

import bundler
from bundler import SignaturePolicy, Untrusted
from bundler.errors import AccessDenied, BundlerError, FormatError, LimitExceeded
from bundler.trust import ed25519
from bundler.trust.file_signatures import trust_public_file
from bundler.trust.signing_keys import SigningKey
from bundler.trust.trusted_keys import MAX_FILE_BYTES, KeyScope, TrustedKey, TrustedKeys

GOOD = base64.b64encode(SigningKey(b"k" * 32).public).decode()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[" * 100_000,
        '{"key": "' + GOOD + '", "trust": ["root"]}',
        '{"key": "' + GOOD + '", "tags": "*"}',
        '{"key": "' + GOOD + '", "tags": [""]}',
        '{"key": "' + GOOD + '", "revoked": -1}',
        '{"key": "' + GOOD + '", "revoked": null}',
        '{"key": "' + GOOD + '", "minisign": "zz"}',
        '{"key": "' + GOOD + '", "minisign": "' + "A" * 16 + '"}',
        '{"key": "' + GOOD + '", "minisign": "' + "a" * 17 + '"}',
        '{"key": "' + GOOD[:-4] + '"}',
        '{"Key": "' + GOOD + '"}',
        '{"key": "' + GOOD + '", "expires": 1e400}',
        json.dumps({"key": GOOD, "tags": ["*"] * 300}),
        "\ud800".encode("utf-8", "surrogatepass").decode("latin1"),
    ],
)
def test_hostile_files_among_the_keys(text, signers):
    """None of them is left out silently, since it could be one that was revoked; each is a typed
    error that names the file.
    """
    (signers.folder / "evil.json").write_text(text)
    with pytest.raises((FormatError, LimitExceeded), match=r"evil\.json"):
        TrustedKeys.load(signers.folder)


@pytest.mark.parametrize("kind", ["pipe", "folder", "large", "dangling"])
def test_what_is_no_file_among_the_keys(kind, signers):
    """Nobody waits for it, and it is not passed over."""
    path = signers.folder / "evil.json"
    {
        "pipe": lambda: os.mkfifo(path),
        "folder": path.mkdir,
        "large": lambda: path.write_bytes(b" " * (MAX_FILE_BYTES + 1)),
        "dangling": lambda: path.symlink_to("nothing"),
    }[kind]()
    with pytest.raises(BundlerError, match=r"evil\.json"):
        TrustedKeys.load(signers.folder)


def test_a_revoked_key_under_a_second_name(signers):
    """A copy of its file does not bring it back: two names for one key are refused, whichever is
    read first.
    """
    signers.trust(name="again", revoked=1)
    with pytest.raises(FormatError, match=r"'again' and 'alice'|'alice' and 'again'"):
        signers.policy()
    with pytest.raises(FormatError, match="are the same key"):
        TrustedKeys({name: TrustedKey(key=GOOD) for name in ("a", "b")})


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
def test_a_folder_that_others_could_write_to(mode, signers):
    """Whoever can add a file there is trusted by it."""
    signers.folder.chmod(mode)
    with pytest.raises(AccessDenied, match="chmod go-w"):
        signers.policy()


def test_a_key_file_that_others_could_write_to(signers):
    """Where they get as far as the file; in a folder that is closed to them they do not."""
    (signers.folder / "alice.json").chmod(0o666)
    assert signers.policy().keys.by_name
    signers.folder.chmod(0o755)
    with pytest.raises(AccessDenied, match=r"alice\.json"):
        signers.policy()


@pytest.mark.parametrize("mode", [0o666, 0o620])
@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_key_file_that_is_a_link_in_a_private_folder(mode, link, signers, tmp_path):
    """What it leads to lies where others may get, so its own mode counts, however private the
    folder is.
    """
    elsewhere = tmp_path / "elsewhere.json"
    os.rename(signers.folder / "alice.json", elsewhere)
    link(elsewhere, signers.folder / "alice.json")
    assert signers.policy().keys.by_name
    elsewhere.chmod(mode)
    with pytest.raises(AccessDenied, match=r"alice\.json: owner \d+, mode"):
        signers.policy()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize("linked", [False, True])
def test_a_key_file_of_another_user(linked, signers, tmp_path):
    """Whoever owns a file can change it and its mode, wherever a link to it lies."""
    place = tmp_path / "elsewhere.json" if linked else signers.folder / "alice.json"
    if linked:
        os.rename(signers.folder / "alice.json", place)
        os.symlink(place, signers.folder / "alice.json")
    place.chmod(0o600)
    os.chown(place, 12345, 12345)
    with pytest.raises(AccessDenied, match=r"alice\.json: owner 12345"):
        signers.policy()


def test_a_key_file_that_is_exchanged_is_the_one_that_was_looked_at(signers, tmp_path, monkeypatch):
    """Between the look at a file and its reading nothing can be put in its place."""
    evil = tmp_path / "evil.json"
    evil.write_text((signers.folder / "alice.json").read_text().replace("alice", "mallory"))
    evil.chmod(0o666)
    looked = os.fstatvfs

    def exchanged(fd):
        monkeypatch.setattr(os, "fstatvfs", looked)
        (signers.folder / "alice.json").unlink()
        (signers.folder / "alice.json").symlink_to(evil)
        return looked(fd)

    monkeypatch.setattr(os, "fstatvfs", exchanged)
    with pytest.raises(AccessDenied, match=r"alice\.json"):
        signers.policy()


@pytest.mark.parametrize("name", ["../evil", "a/b", "", ".hidden", "x" * 101, "a\0b"])
def test_names_that_lead_out_of_the_folder(name, signers, tmp_path):
    """Nothing is written."""
    from bundler.trust import minisign

    (tmp_path / "k.pub").write_text(minisign.write_public(signers.mallory))
    before = sorted(path for path in tmp_path.rglob("*"))
    with pytest.raises(BundlerError, match="name of a key"):
        trust_public_file(signers.folder, name, tmp_path / "k.pub", KeyScope())
    assert sorted(path for path in tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff" * 100, b"untrusted comment: x\nRWQ\n", b"x" * 100_000, b"ssh-ed25519 AAAA me\n"],
)
def test_hostile_public_keys(data, signers, tmp_path):
    """Whatever somebody sends as a public key, it is a typed error or nothing."""
    (tmp_path / "k.pub").write_bytes(data)
    with pytest.raises(FormatError):
        trust_public_file(signers.folder, "evil", tmp_path / "k.pub", KeyScope())
    assert [*signers.policy().keys.by_name] == ["alice"]


def test_keys_of_which_anything_would_be_a_signature(signers):
    """Points of small order, for which libraries accept a signature of everything, verify nothing,
    and are no keys.
    """
    for point in (
        bytes(32),
        b"\x01" + bytes(31),
        b"\xec" + b"\xff" * 30 + b"\x7f",
        b"\xed" + b"\xff" * 31,
    ):
        zero = b"\x01" + bytes(63)
        assert not any(
            ed25519.verifies(point, zero, message)
            for message in (b"one", b"two", b"three", b"four")
        )
        (signers.folder / "evil.json").write_text(
            json.dumps({"key": base64.b64encode(point).decode()})
        )
        with pytest.raises(FormatError, match="anybody can sign"):
            signers.policy()


@pytest.mark.parametrize(
    ("scope", "reason"),
    [
        ({"revoked": 1}, "'alice' is revoked"),
        ({"expires": 1}, "'alice' has expired"),
        ({"targets": ("hip:*",)}, "may not vouch for target 'cuda:90'"),
        ({"targets": ("cuda:*",)}, "may not vouch for target 'hip:gfx942'"),
        ({"trust": ("code",)}, "may not vouch for trust level 'kernels'"),
        ({"trust": ()}, "only for none"),
    ],
)
def test_a_key_beyond_its_time_or_scope(scope, reason, signers, kernels, tmp_path):
    """A good signature by a key that is revoked, has expired, or may not vouch for all that is in
    the bundle.
    """
    bundler.sign(kernels, signers.alice)
    signers.trust(**scope)
    with pytest.raises(Untrusted, match=reason):
        bundler.restore(kernels, tmp_path / "out", only="all", signatures=signers.policy())
    assert not (tmp_path / "out").exists()


def test_a_signature_beyond_its_time(signers, kernels, tmp_path, monkeypatch):
    """One that has expired, and one from a future that no clock explains."""
    bundler.sign(kernels, signers.alice, expires_s=3600)
    for later, reason in ((3601, "expired"), (-3600, "in the future")):
        policy = SignaturePolicy(
            signers.policy().keys, kernels="require", now=lambda by=later: time.time() + by
        )
        with pytest.raises(Untrusted, match=reason):
            bundler.restore(kernels, tmp_path / "out", only="all", signatures=policy)
    assert not (tmp_path / "out").exists()
