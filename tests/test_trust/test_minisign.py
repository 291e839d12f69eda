# SPDX-License-Identifier: Apache-2.0
"""Signatures in minisign's form: ours are good for its program, its are good for us."""

import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bundler.errors import FormatError, LimitExceeded
from bundler.trust import minisign
from bundler.trust.signing_keys import SigningKey

KEY = SigningKey(b"k" * 32)
DATA = b"a bundle"
PUBLIC = minisign.read_public(minisign.write_public(KEY))
# Made with minisign 0.11 (`-G -W`; `-S -t`; and `-S -l`, the form of old releases) for the bytes
# b"kernels\n".
GOLDEN_PUBLIC = (
    "untrusted comment: minisign public key"
    " 31BB3D134F37C304\nRWQEwzdPEz27McQlCHQm3KY9bzT5dtsfcV3r6zslLUiotXhA3dXCvQ/I\n"
)
GOLDEN = """untrusted comment: signature from minisign secret key
RUQEwzdPEz27MUsddHewjPh3EHEDMaO6UaVYe5lwNy6FC+hQMG/8hCh0ebRcXNuoo+bsdmEEPF7FOUgSJsLY2bFNtVGKJuqtfQo=
trusted comment: timestamp:1 file:kernels
/dB9L7/ZgdHAJ0IZRr3rXh2p9O/VIhOTZJz0Vkz4SeFhHk0Vj0n2yrC2ueFPx6w/OnNE64cps0sRN/nJ+jPeCQ==
"""
GOLDEN_OLD = """untrusted comment: signature from minisign secret key
RWQEwzdPEz27MfuUiNV8E/M3xsSkvQW5oMDAeP/UMnOxmkXQe9W2lYFMbhIE9+qCVwKbhgt7LqxyOlLQ6xPS8PLDL17cuK9Kwwc=
trusted comment: old
IABoqCLtTALmj3/swNvTRb4FfEiCWaeuPoGg+bFtMF0UQ8zCPOLkmS8qJRRIAnpLwgMgU2lWA4DHByX4AKRWDA==
"""


def signature(data=DATA, comment="bundle of november"):
    return minisign.write_signature(KEY, [data[:3], data[3:]], comment)


def test_a_signature_comes_back_with_its_comment():
    """The pieces of the file may be cut anywhere."""
    assert minisign.check(signature(), [DATA], [PUBLIC]) == "bundle of november"


def test_what_minisign_made_is_read():
    """A key and a signature of its program; its old form is refused with what to do."""
    public = minisign.read_public(GOLDEN_PUBLIC)
    assert minisign.check(GOLDEN, [b"ker", b"nels\n"], [public]) == "timestamp:1 file:kernels"
    assert minisign.check(GOLDEN, [b"kernels"], [public]) is None
    with pytest.raises(FormatError, match="sign with minisign"):
        minisign.check(GOLDEN_OLD, [b"kernels\n"], [public])


def test_other_bytes_keys_and_comments_do_not_pass():
    """The comment is signed too."""
    assert minisign.check(signature(), [DATA + b"!"], [PUBLIC]) is None
    assert minisign.check(signature(), [DATA], []) is None
    stranger = minisign.PublicKey(PUBLIC.number, SigningKey(b"m" * 32).public)
    assert minisign.check(signature(), [DATA], [stranger]) is None
    assert minisign.check(signature().replace("november", "december"), [DATA], [PUBLIC]) is None


@given(st.text(max_size=300))
def test_foreign_text_is_a_typed_error(text):
    """Whatever stands there, it is no crash."""
    with pytest.raises(FormatError):
        minisign.check(text, [DATA], [PUBLIC])


@pytest.mark.parametrize(
    "text", ["", "untrusted comment: x\n", "RWQ=", "untrusted comment: x\n!!\n", "a\nb\n"]
)
def test_what_is_no_public_key_is_a_typed_error(text):
    """The message says what was expected."""
    with pytest.raises(FormatError, match="minisign public key"):
        minisign.read_public(text)


def test_long_texts_and_comments_of_two_lines_are_refused():
    """Before anything is decoded, or signed."""
    with pytest.raises(LimitExceeded):
        minisign.check("x" * 70_000, [DATA], [PUBLIC])
    with pytest.raises(FormatError, match="expected one line"):
        signature(comment="a\nb")


@pytest.mark.slow
def test_minisign_checks_what_we_sign(minisign_program, tmp_path):
    """Its program accepts our key and signature, and shows the comment."""
    (tmp_path / "b").write_bytes(DATA)
    (tmp_path / "b.minisig").write_text(signature())
    (tmp_path / "k.pub").write_text(minisign.write_public(KEY))
    done = subprocess.run(
        [minisign_program, "-V", "-m", "b", "-p", "k.pub"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, "bundle of november" in done.stdout) == (0, True), done.stderr


@pytest.mark.slow
def test_we_check_what_minisign_signs(minisign_program, tmp_path):
    """A key and a signature that its program made are good here, for these bytes alone."""
    (tmp_path / "b").write_bytes(DATA)
    subprocess.run(
        [minisign_program, "-G", "-W", "-p", "k.pub", "-s", "k.key"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    subprocess.run(
        [minisign_program, "-S", "-s", "k.key", "-m", "b", "-t", "by minisign"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    public, text = (
        minisign.read_public((tmp_path / "k.pub").read_text()),
        (tmp_path / "b.minisig").read_text(),
    )
    assert minisign.check(text, [DATA], [public]) == "by minisign"
    assert minisign.check(text, [DATA + b"!"], [public]) is None


@pytest.mark.slow
def test_minisign_refuses_what_is_not_ours(minisign_program, tmp_path):
    """Its program tells another file, another comment and another key from what we signed."""
    (tmp_path / "k.pub").write_text(minisign.write_public(KEY))
    (tmp_path / "m.pub").write_text(minisign.write_public(SigningKey(b"m" * 32)))
    for data, text, public in (
        (DATA + b"!", signature(), "k.pub"),
        (DATA, signature().replace("november", "december"), "k.pub"),
        (DATA, signature(), "m.pub"),
    ):
        (tmp_path / "b").write_bytes(data)
        (tmp_path / "b.minisig").write_text(text)
        done = subprocess.run(
            [minisign_program, "-V", "-m", "b", "-p", public], cwd=tmp_path, capture_output=True
        )
        assert done.returncode != 0
