# SPDX-License-Identifier: Apache-2.0
"""What somebody who can write to a bundle file tries; nothing of it becomes visible under
require.
"""

import json
import os
import shutil
from pathlib import Path

import pytest

import bundler
from bundler import Bundle, Untrusted
from bundler.format.bundle import MemoryBlobs
from bundler.format.manifest import Observation, Observed
from bundler.lifecycle import restoration
from bundler.trust.envelope import Envelope
from bundler.trust.signing import bundle_statement, tag_envelope
from bundler.trust.statements import BundleStatement, TagStatement


@pytest.fixture
def refused(signers, tmp_path):
    """Assert that a restore is refused for a reason, and leaves nothing behind."""

    def check(path, reason):
        with pytest.raises(Untrusted, match=reason):
            bundler.restore(path, tmp_path / "out", only="all", signatures=signers.policy())
        assert not (tmp_path / "out").exists()

    return check


def with_envelopes(path, envelopes):
    """Put envelopes into a file as anybody can."""
    with Bundle.load(path) as bundle:
        bundle.signed.write_copy(path, envelopes)
    return path


def envelopes_of(path):
    """Return the envelopes in a file."""
    with Bundle.load(path) as bundle:
        return bundle.signatures


def other_bundle(path, to):
    """Write a bundle with other content."""
    with Bundle.load(path) as bundle:
        bundle.select(names=bundle.kernels[0].name).save(to)
    return to


def files(folder):
    """Return every file below a folder with its bytes."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in Path(folder).rglob("*")
        if path.is_file()
    }


def test_a_stripped_signature(signers, kernels, refused):
    """The file without its signature sections is unsigned."""
    bundler.sign(kernels, signers.alice)
    refused(with_envelopes(kernels, ()), "it is not signed")


def test_the_signature_of_another_bundle(signers, kernels, refused, tmp_path):
    """Taken from a bundle that Alice did sign."""
    other = other_bundle(kernels, tmp_path / "other.tbundle")
    bundler.sign(other, signers.alice)
    refused(with_envelopes(kernels, envelopes_of(other)), "is for the bundle")


def test_kernels_that_were_swapped_after_signing(signers, kernels, refused, tmp_path):
    """The bytes of one kernel under the name of another: the content, and with it the digest, is
    another.
    """
    bundler.sign(kernels, signers.alice)
    with Bundle.load(kernels) as bundle:
        first, second = bundle.kernels[:2]
        swapped = [
            second.with_artifacts(first.artifacts) if k == second else k for k in bundle.kernels
        ]
        blobs = {
            digest: bytes(bundle.view_blob(digest, "blob")) for digest, _ in bundle.content.blobs
        }
        envelopes = bundle.signatures
        content = bundler.Content.of(swapped)
        Bundle(content, bundler.Observed(), MemoryBlobs(blobs)).save(tmp_path / "evil.tbundle")
    refused(with_envelopes(tmp_path / "evil.tbundle", envelopes), "is for the bundle")


def test_the_same_content_with_other_observations(signers, kernels, refused):
    """Two files of one digest: the signature of a file is also of what it holds beside its
    content.
    """
    bundler.sign(kernels, signers.alice)
    with Bundle.load(kernels) as bundle:
        envelopes, digest = bundle.signatures, bundle.digest
        blobs = {one: bytes(bundle.view_blob(one, "blob")) for one, _ in bundle.content.blobs}
        seen = Observed({kernel.key: Observation(devices=(7,)) for kernel in bundle.kernels})
        other = Bundle(bundle.content, seen, MemoryBlobs(blobs))
        other.save(kernels)
        assert other.digest == digest
    refused(with_envelopes(kernels, envelopes), "the same content stored as other bytes")


def test_keys_that_are_confused(signers, kernels, refused):
    """Mallory's signature under Alice's id, Alice's under Mallory's, and Mallory's beside a bad one
    of Alice's.
    """
    with Bundle.load(kernels) as bundle:
        payload = bundle_statement(bundle).encode()
    whole = Envelope(BundleStatement.payload_type, payload)
    by_mallory, by_alice = (
        whole.sign(signers.mallory).signatures[0],
        whole.sign(signers.alice).signatures[0],
    )
    for signatures in (
        [(signers.alice.key_id, by_mallory[1])],
        [(signers.mallory.key_id, by_alice[1])],
        [by_mallory, (signers.alice.key_id, bytes(64))],
        [(signers.alice.key_id, by_alice[1][:32] + by_mallory[1][32:])],
    ):
        refused(
            with_envelopes(
                kernels, [Envelope(whole.payload_type, payload, tuple(signatures)).encode()]
            ),
            "no trusted key",
        )


def test_payload_types_that_are_confused(signers, kernels, refused):
    """A statement about a tag as one about a bundle, as it is and relabelled; a payload that is
    both; another version.
    """
    with Bundle.load(kernels) as bundle:
        content = bundle.digest.removeprefix("sha256:")
    of_tag = tag_envelope(signers.alice, "store", "tag", content, 1)
    refused(with_envelopes(kernels, [of_tag]), "payload type")
    relabelled = json.loads(of_tag) | {"payloadType": BundleStatement.payload_type}
    refused(with_envelopes(kernels, [json.dumps(relabelled).encode()]), "no trusted key")
    mixed = json.dumps(
        {"statement": 1, "content": content, "signed_at": 1, "store": "s", "tag": "t", "epoch": 1}
    ).encode()
    sealed = Envelope(BundleStatement.payload_type, mixed).sign(signers.alice)
    refused(with_envelopes(kernels, [sealed.encode()]), "unknown field")
    sealed = Envelope(TagStatement.payload_type, mixed).sign(signers.alice)
    refused(with_envelopes(kernels, [sealed.encode()]), "payload type")


def test_code_under_a_signature_for_kernels(signers, code, tmp_path):
    """The CPU's part stays out, whichever way it is asked for."""
    signers.trust(trust=("kernels", "code"))
    bundler.sign(code, signers.alice, trust="kernels")
    with pytest.raises(Untrusted, match="for kernels alone"):
        bundler.restore(
            code, tmp_path / "out", only="all", trust="code", signatures=signers.policy()
        )
    assert not (tmp_path / "out").exists()
    report = bundler.restore(
        code, tmp_path / "out", only="all", trust="signed", signatures=signers.policy()
    )
    assert not [path for path in report.companions if path.endswith(".so")]


def test_many_signatures_do_not_hide_the_good_one_nor_stand_for_it(
    signers, kernels, refused, tmp_path
):
    """Sixty of strangers are looked at; more than a reader takes is not signed."""
    bundler.sign(kernels, signers.alice)
    (good,) = envelopes_of(kernels)
    with Bundle.load(kernels) as bundle:
        payload = bundle_statement(bundle).encode()
    noise = [
        Envelope(BundleStatement.payload_type, payload).sign(signers.mallory).encode(),
        b"{",
        b"\xff" * 99,
    ] * 20
    path = with_envelopes(kernels, [*noise, good])
    assert bundler.restore(
        path, tmp_path / "good", only="all", signatures=signers.policy()
    ).restored
    with Bundle.load(kernels) as bundle:
        data = bundle.to_bytes()
    kernels.write_bytes(data)
    refused(with_envelopes(kernels, noise), "no trusted key")


def test_a_file_that_is_replaced_between_the_look_and_the_use(
    signers, kernels, tmp_path, monkeypatch
):
    """What was judged is what is placed: the open file, not the name."""
    bundler.sign(kernels, signers.alice)
    bundler.restore(kernels, tmp_path / "expected", only="all", signatures=signers.policy())
    evil = other_bundle(kernels, tmp_path / "evil.tbundle")
    real = restoration.admit

    def admit_then_replace(*arguments):
        try:
            return real(*arguments)
        finally:
            os.replace(shutil.copy(evil, tmp_path / "copy"), kernels)

    monkeypatch.setattr(restoration, "admit", admit_then_replace)
    bundler.restore(kernels, tmp_path / "out", only="all", signatures=signers.policy())
    assert kernels.read_bytes() == evil.read_bytes()
    assert files(tmp_path / "out").keys() == files(tmp_path / "expected").keys()


@pytest.mark.parametrize("changed", ["one byte", "everything"])
def test_a_file_that_is_written_over_between_the_look_and_the_use(
    changed, signers, kernels, tmp_path, monkeypatch
):
    """Bytes that are not those that were signed for are left out as damaged."""
    bundler.sign(kernels, signers.alice)
    real = restoration.admit

    def admit_then_write(*arguments):
        admission = real(*arguments)
        data = bytearray(kernels.read_bytes())
        data[100:110] = bytes(10)
        kernels.write_bytes(data if changed == "one byte" else bytes(len(data)))
        return admission

    monkeypatch.setattr(restoration, "admit", admit_then_write)
    with pytest.warns(bundler.BundlerWarning, match="nothing in this bundle"):
        report = bundler.restore(kernels, tmp_path / "out", only="all", signatures=signers.policy())
    assert report.damaged
    assert (report.restored, files(tmp_path / "out")) == ((), {})


def test_a_file_that_is_replaced_while_minisign_signs_it(signers, kernels, tmp_path, monkeypatch):
    """Between the signature in the file and the one beside it somebody puts another file there: it
    is not signed.
    """
    from bundler.errors import DigestMismatch
    from bundler.trust import signing

    evil = other_bundle(kernels, tmp_path / "evil.tbundle")
    real = signing.SignReport

    def report_then_replace(*arguments):
        os.replace(shutil.copy(evil, tmp_path / "copy"), kernels)
        return real(*arguments)

    monkeypatch.setattr(signing, "SignReport", report_then_replace)
    with pytest.raises(DigestMismatch, match="replaced while it was signed"):
        bundler.sign(kernels, signers.alice, minisign=True)
    assert not Path(f"{kernels}.minisig").exists()


def test_a_file_that_is_replaced_while_its_signature_beside_it_is_judged(
    signers, kernels, tmp_path
):
    """`verify --signed` judges the file that it opened: the good one of the same name, put there
    meanwhile, does not speak for it.
    """
    from bundler.trust import minisign
    from bundler.trust.file_signatures import judge_file

    evil = other_bundle(kernels, tmp_path / "evil.tbundle")
    Path(f"{evil}.minisig").write_text(
        minisign.write_signature(signers.alice, [kernels.read_bytes()], "by hand")
    )
    with Bundle.load(evil) as opened:
        os.replace(shutil.copy(kernels, tmp_path / "copy"), evil)
        assert not judge_file(opened, evil).good
    with Bundle.load(evil) as opened:
        assert judge_file(opened, evil).good
