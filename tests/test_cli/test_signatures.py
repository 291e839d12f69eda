# SPDX-License-Identifier: Apache-2.0
"""The commands key and sign, and verify --signed."""

import json
import shutil
import stat
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parents[1] / "data" / "v2.0" / "triton-3.7.1.tbundle"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working directory with a bundle, where no key is trusted yet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRITON_BUNDLER_KEYS", str(tmp_path / "keys"))
    monkeypatch.setenv("TRITON_BUNDLER_LOCAL", str(tmp_path / "local"))
    shutil.copy(GOLDEN, tmp_path / "b.tbundle")
    return tmp_path


def test_a_key_is_made_trusted_used_and_revoked(cli, cli_json, place, monkeypatch):
    """The whole way that a user goes, from a new key to a refused restore."""
    made = cli("key", "new", "release.pem")
    assert made.exit_code == 0, made.output
    assert stat.S_IMODE((place / "release.pem").stat().st_mode) == 0o600
    assert cli("verify", "--signed", "b.tbundle").exit_code == 1
    assert (
        "signed b.tbundle"
        in cli("sign", "b.tbundle", "--key", "release.pem", "--expires", "30d").stdout
    )
    stranger = cli("verify", "--signed", "b.tbundle")
    assert "is undamaged, but no signature of it counts: sha256:" in stranger.stdout
    assert "is sound" not in stranger.stdout
    assert (stranger.exit_code, "whom no trusted key stands for" in stranger.stderr) == (1, True)
    assert cli("key", "trust", "release.pub", "--name", "release").exit_code == 0
    assert "release" in cli("key", "list").stdout
    assert "is signed by release" in cli("verify", "--signed", "b.tbundle").stdout
    monkeypatch.setenv("TRITON_BUNDLER_SIGNATURES", "require")
    restored = cli("restore", "b.tbundle", "--only", "all")
    assert (restored.exit_code, "kernels signed by key 'release'" in restored.stdout) == (0, True)
    assert cli("key", "revoke", "release").exit_code == 0
    refused = cli("restore", "b.tbundle", "--only", "all")
    assert (refused.exit_code, "key 'release' is revoked" in refused.stderr) == (1, True)
    status, told = cli_json("verify", "--signed", "b.tbundle")
    assert (status, told["ok"], told["signed"]["ok"]) == (1, False, False)
    assert [one["name"] for one in json.loads(cli("key", "list", "--json").stdout)["trusted"]] == [
        "release"
    ]


def test_a_signature_of_minisign_is_written_and_read(cli, place):
    """It lies beside the bundle, and counts for a trusted key where the bundle has none of its own,
    for these bytes alone.
    """
    cli("key", "new", "release.pem")
    cli("key", "trust", "release.pub", "--name", "release")
    assert (
        cli(
            "sign", "b.tbundle", "--key", "release.pem", "-o", "signed.tbundle", "--minisign"
        ).exit_code
        == 0
    )
    text = (place / "signed.tbundle.minisig").read_text()
    assert "digest:sha256:" in text
    assert cli("verify", "--signed", "b.tbundle").exit_code == 1
    from bundler.trust import minisign
    from bundler.trust.signing_keys import SigningKey

    key = SigningKey.load(place / "release.pem")
    (place / "b.tbundle.minisig").write_text(
        minisign.write_signature(key, [(place / "b.tbundle").read_bytes()], "by hand")
    )
    assert "is signed by release" in cli("verify", "--signed", "b.tbundle").stdout
    (place / "b.tbundle.minisig").write_text(text)
    refused = cli("verify", "--signed", "b.tbundle")
    assert (refused.exit_code, "not of these bytes" in refused.stderr) == (1, True)
    cli("key", "trust", "release.pub", "--name", "release", "--target", "hip:*")
    (place / "b.tbundle.minisig").write_text(
        minisign.write_signature(key, [(place / "b.tbundle").read_bytes()], "by hand")
    )
    assert "may not vouch for target" in cli("verify", "--signed", "b.tbundle").stderr


@pytest.mark.slow
def test_minisign_and_we_take_each_others_files(cli, place, debian_program):
    """A key and signature of its program count here; its program checks what we sign."""
    import subprocess

    program = debian_program("minisign", "minisign")
    subprocess.run(
        [program, "-G", "-W", "-p", "m.pub", "-s", "m.key"], check=True, capture_output=True
    )
    subprocess.run(
        [program, "-S", "-s", "m.key", "-m", "b.tbundle"], check=True, capture_output=True
    )
    cli("key", "trust", "m.pub", "--name", "by-minisign")
    assert "is signed by by-minisign" in cli("verify", "--signed", "b.tbundle").stdout
    cli("key", "new", "ours.pem")
    cli("sign", "b.tbundle", "--key", "ours.pem", "-o", "s.tbundle", "--minisign")
    checked = subprocess.run(
        [program, "-V", "-m", "s.tbundle", "-p", "ours.pub"], capture_output=True, text=True
    )
    assert (checked.returncode, "digest:sha256:" in checked.stdout) == (0, True)


def test_wrong_uses_are_told(cli, place):
    """A key that is there, a store with --signed, a key under two names, no such key."""
    cli("key", "new", "release.pem")
    assert cli("key", "new", "release.pem").exit_code == 2
    assert cli("key", "new", "other.pub").exit_code == 2
    assert not (place / "other.pub").exists()
    assert cli("verify", "--signed", "--store", "s").exit_code == 2
    cli("key", "trust", "release.pub", "--name", "one")
    twice = cli("key", "trust", "release.pub", "--name", "two")
    assert (twice.exit_code, "trusted as 'one' already" in twice.stderr) == (1, True)
    assert cli("key", "revoke", "nobody").exit_code == 1
    assert cli("sign", "b.tbundle", "--key", "nothing.pem").exit_code == 1
