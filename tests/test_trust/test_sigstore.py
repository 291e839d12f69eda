# SPDX-License-Identifier: Apache-2.0
"""Signatures of Sigstore are checked offline, against a trust root, an identity and an issuer that
the user gives.
"""

import copy
import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import bundler
from bundler.errors import (
    BundlerError,
    ConfigError,
    FormatError,
    LimitExceeded,
    NotFound,
    Untrusted,
)

sys.path.append(str(Path(__file__).parent))
from sigstore_instance import IDENTITY, ISSUER, Instance

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("sigstore") is None,
    reason="the package sigstore is not installed (pip install 'triton-bundler[sigstore]')",
)


@pytest.fixture(scope="module")
def instance():
    """Authority and logs that the trust root names."""
    return Instance()


@pytest.fixture
def offline(monkeypatch):
    """Whoever asks the network fails the test."""

    def refuse(*_, **__):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def signed(instance, kernels, tmp_path, offline):
    """A bundle file with a signature beside it; returns a function that checks it with some things
    changed.
    """
    (tmp_path / "root.json").write_text(instance.trust_root())
    made = instance.sign(kernels.read_bytes())

    def check(change=lambda signature: None, **other):
        signature = copy.deepcopy(made)
        change(signature)
        (tmp_path / "s.json").write_text(json.dumps(signature))
        chosen = {
            "trust_root": tmp_path / "root.json",
            "identity": IDENTITY,
            "issuer": ISSUER,
            **other,
        }
        return bundler.verify_sigstore(chosen.pop("path", kernels), tmp_path / "s.json", **chosen)

    return check


@needs_package
def test_a_good_signature_counts(signed, kernels):
    """The report says who signed what; nothing was fetched."""
    report = signed()
    assert (report.identity, report.issuer, report.log_index, report.path) == (
        IDENTITY,
        ISSUER,
        0,
        str(kernels),
    )


@needs_package
def test_of_other_bytes_or_by_somebody_else_it_does_not(signed, kernels, instance, tmp_path):
    """One bit more, another identity, another issuer, an authority that the trust root does not
    know.
    """
    for other in ({"identity": "mallory@example.com"}, {"issuer": "https://other.example"}):
        with pytest.raises(Untrusted, match="expected one of exactly these bytes"):
            signed(**other)
    (tmp_path / "other.json").write_text(Instance().trust_root())
    with pytest.raises(Untrusted, match=r"other\.json"):
        signed(trust_root=tmp_path / "other.json")
    kernels.write_bytes(kernels.read_bytes() + b"\0")
    with pytest.raises(Untrusted, match="digest"):
        signed()


def _entry(signature):
    return signature["verificationMaterial"]["tlogEntries"][0]


def _set(*path):
    *place, last, value = path

    def change(signature):
        for name in place:
            signature = signature[name]
        signature[last] = value

    return change


ENTRY = ("verificationMaterial", "tlogEntries", 0)


@needs_package
@pytest.mark.parametrize(
    "change",
    [
        _set("messageSignature", "signature", "AAAA"),
        _set(*ENTRY, "inclusionProof", "rootHash", "AAAA"),
        _set(
            *ENTRY,
            "inclusionProof",
            "checkpoint",
            "envelope",
            "log.invalid - 1\n1\nAAAA\n\n\u2014 log.invalid AAAAAAAA\n",
        ),
        _set(*ENTRY, "inclusionPromise", "signedEntryTimestamp", "AAAA"),
        _set(*ENTRY, "integratedTime", "4102444800"),
        _set(*ENTRY, "canonicalizedBody", "e30="),
        _set(*ENTRY, "logId", "keyId", "AAAA"),
    ],
)
def test_each_part_is_checked(signed, change):
    """Signature, place in the log, checkpoint, promise, time, body and log: what was changed counts
    no more.
    """
    with pytest.raises(Untrusted):
        signed(change)


@needs_package
def test_the_signature_of_another_file_in_the_log_entry_of_this_one(signed, instance, kernels):
    """Parts of two good signatures do not make a third."""
    other = instance.sign(b"another file")
    for part in ("verificationMaterial", "messageSignature"):
        with pytest.raises(Untrusted):
            signed(_set(part, other[part]))


@needs_package
@pytest.mark.parametrize(
    "change",
    [
        _set("mediaType", "x"),
        _set("verificationMaterial", {}),
        _set(*ENTRY, "inclusionProof", None),
    ],
)
def test_what_is_no_bundle_is_a_typed_error(signed, change):
    """The message names the file."""
    with pytest.raises(FormatError, match=r"s\.json"):
        signed(change)


@needs_package
def test_what_is_no_trust_root_is_a_typed_error(signed, tmp_path):
    """The message names the file."""
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(FormatError, match=r"bad\.json"):
        signed(trust_root=tmp_path / "bad.json")


def test_files_are_looked_at_before_the_package_sees_them(signed, tmp_path):
    """What is no JSON, too large, a named pipe or not there; and nobody may be anybody."""
    (tmp_path / "text").write_text("no json")
    (tmp_path / "deep").write_text("[" * 100_000)
    (tmp_path / "large").write_text(" " * (1 << 20) + "{}")
    os.mkfifo(tmp_path / "pipe")
    for name, error in (
        ("text", FormatError),
        ("deep", FormatError),
        ("large", LimitExceeded),
        ("pipe", BundlerError),
        ("none", NotFound),
    ):
        with pytest.raises(error, match=name):
            signed(trust_root=tmp_path / name)
    for nobody in ({"identity": ""}, {"issuer": ""}):
        with pytest.raises(ConfigError, match="identity and the issuer"):
            signed(**nobody)


def test_without_the_package_the_message_says_what_to_install(signed, monkeypatch):
    """The extra is named."""
    monkeypatch.setitem(sys.modules, "sigstore", None)
    monkeypatch.setitem(sys.modules, "sigstore.errors", None)
    with pytest.raises(ConfigError, match=r"triton-bundler\[sigstore\]"):
        signed()


@needs_package
@pytest.mark.slow
def test_the_command(signed, kernels, tmp_path):
    """`verify --sigstore` has exit status 0 for a good signature and 1 for another's; a part of the
    options is a mistake.
    """
    signed()

    def verify(*words):
        command = [
            sys.executable,
            "-m",
            "bundler",
            "verify",
            kernels,
            "--sigstore",
            tmp_path / "s.json",
            *words,
        ]
        return subprocess.run(command, capture_output=True, text=True)

    root = ["--trust-root", tmp_path / "root.json", "--issuer", ISSUER]
    good = verify(*root, "--identity", IDENTITY)
    assert (good.returncode, f"is signed by {IDENTITY} of {ISSUER}" in good.stdout) == (0, True), (
        good.stderr
    )
    bad = verify(*root, "--identity", "mallory@example.com")
    assert (bad.returncode, "mallory@example.com" in bad.stderr) == (1, True)
    assert "--identity" in verify(*root).stderr
