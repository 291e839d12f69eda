# SPDX-License-Identifier: Apache-2.0
"""A push with a key signs the bundle and the tag, the store keeps both, and who follows the tag
judges them.
"""

import os

import pytest

import bundler
from bundler import Bundle, Untrusted
from bundler.store import store_layout
from bundler.store.store_signatures import envelopes_in


def pull(store, policy, name="prod/llama"):
    store.signatures = policy
    return store.pull(name)


def value(store, tag="prod/llama"):
    return store._backend.read_ref(store_layout.tag_key(tag))


def half(path, which):
    """A part of a bundle, so that pushes differ."""
    bundle = Bundle.load(path)
    return bundle.select(names=sorted({kernel.name for kernel in bundle.kernels})[which])


def test_a_push_with_a_key_is_pulled_and_restored_under_require(signers, store, kernels, tmp_path):
    """By tag and by digest; the report names the key; what an old reader asks of the tag it
    gets.
    """
    report = store.push(Bundle.load(kernels), "prod/llama", key=signers.alice)
    assert store_layout.decode_tag(value(store), "prod/llama").split("/")[2] == report.digest[7:]
    for name in ("prod/llama", report.digest):
        store.signatures = signers.policy()
        restored = store.restore(name, cache_dir=tmp_path / name, only="all")
        assert restored.signatures == "kernels signed by key 'alice'"
        assert len(restored.restored) == 4
    assert store.verify().sound


@pytest.mark.parametrize("key", [None, "mallory"])
def test_what_no_trusted_key_signed_is_not_pulled(key, signers, store, kernels, tmp_path):
    """Nor restored, under require; under prefer it is, and the report has one line."""
    store.push(Bundle.load(kernels), "prod/llama", key=getattr(signers, key) if key else None)
    with pytest.raises(Untrusted, match=r"tag 'prod/llama' of .*signatures are required"):
        pull(store, signers.policy())
    store.signatures = signers.policy(kernels="prefer", code="prefer")
    report = store.restore("prod/llama", cache_dir=tmp_path / "cache", only="all")
    assert report.restored
    assert "kernels not signed" in report.signatures
    assert "tag 'prod/llama' of" in report.signatures


def test_a_tag_outside_the_keys_scope_is_refused(signers, store, kernels):
    """The message names key, tag and scope."""
    signers.trust(tags=("staging/*",))
    store.push(Bundle.load(kernels), "prod/llama", key=signers.alice)
    with pytest.raises(
        Untrusted, match="key 'alice' may not vouch for tag 'prod/llama', only for staging"
    ):
        pull(store, signers.policy())


def test_pushing_the_same_again_changes_nothing(signers, store, kernels):
    """Neither with the key, nor without it: the tag keeps its signatures and its epoch."""
    store.push(Bundle.load(kernels), "prod/llama", key=signers.alice)
    first = value(store)
    for key in (signers.alice, None):
        store.push(Bundle.load(kernels), "prod/llama", key=key)
        assert value(store) == first
    assert len(envelopes_in(first)) == 2


def test_a_merge_is_signed_as_a_whole(signers, store, kernels):
    """Each push with the key signs the union under a greater epoch."""
    for which in (0, 1):
        store.push(half(kernels, which), "prod/llama", key=signers.alice)
        assert len(pull(store, signers.policy()).kernels) > which


def test_what_nobody_vouches_for_is_not_signed_with_the_rest(signers, store, kernels):
    """A merge into a stranger's tag is refused; replacing it is not."""
    store.push(half(kernels, 0), "prod/llama", key=signers.mallory)
    with pytest.raises(Untrusted, match=r"would be signed.*mode='replace'"):
        store.push(half(kernels, 1), "prod/llama", key=signers.alice)
    store.push(half(kernels, 1), "prod/llama", "replace", key=signers.alice)
    assert pull(store, signers.policy()).kernels == half(kernels, 1).kernels


def test_a_signed_tag_does_not_lose_its_signature_by_accident(signers, store, kernels):
    """A merge without a key is refused, and the tag stays."""
    store.push(half(kernels, 0), "prod/llama", key=signers.alice)
    before = value(store)
    with pytest.raises(Untrusted, match="is signed, and this push would change it without a key"):
        store.push(half(kernels, 1), "prod/llama")
    assert value(store) == before


def test_signatures_of_the_file_go_with_it(signers, store, kernels):
    """A bundle that was signed on another machine is pushed without a key; by digest it counts, the
    tag has no statement.
    """
    bundler.sign(kernels, signers.alice)
    digest = store.push(Bundle.load(kernels), "prod/llama").digest
    store.signatures = signers.policy()
    assert store.restore(digest, cache_dir=os.environ["TRITON_CACHE_DIR"], only="all").restored
    with pytest.raises(Untrusted, match="tag 'prod/llama'"):
        store.pull("prod/llama")


def test_the_key_of_the_settings_signs(signers, store, kernels, tmp_path, monkeypatch):
    """TRITON_BUNDLER_SIGNING_KEY, by the command too."""
    signers.alice.save(tmp_path / "alice.pem")
    monkeypatch.setenv("TRITON_BUNDLER_SIGNING_KEY", str(tmp_path / "alice.pem"))
    store.push(Bundle.load(kernels), "prod/llama")
    monkeypatch.setenv("TRITON_BUNDLER_SIGNATURES", "require")
    assert store.pull("prod/llama").kernels


def test_prune_keeps_signatures_as_long_as_their_bundle(signers, store, kernels):
    """What a tag reaches stays signed; with the manifest its signatures go."""
    digest = store.push(Bundle.load(kernels), "prod/llama", key=signers.alice).digest
    held = lambda: [stat.key for stat in store._backend.list(store_layout.ENVELOPES)]  # noqa: E731
    store.prune(grace_s=0)
    assert len(held()) == 1
    store.signatures = signers.policy()
    assert store.pull(digest).signatures
    store.delete_tag("prod/llama")
    store.prune(grace_s=0)
    assert held() == []
    assert store.stats().units == 0


def test_damaged_signatures_are_found_and_mended(signers, store, kernels):
    """verify names them, --repair removes them, and the next push writes them."""
    store.push(Bundle.load(kernels), "prod/llama", key=signers.alice)
    (stat,) = store._backend.list(store_layout.ENVELOPES)
    store._backend.delete([stat.key])
    store._backend.put({stat.key: store_layout.encode_object(b"another")})
    assert [key for key, _ in store.verify(repair=True).damaged] == [stat.key]
    store.push(Bundle.load(kernels), "prod/llama", key=signers.alice)
    assert store.verify().sound
    assert len([*store._backend.list(store_layout.ENVELOPES)]) == 1


def test_single_kernels_and_files_are_not_used_under_require(signers, store, kernels, monkeypatch):
    """Nobody signs them: they are misses, one warning says so, and who compiles publishes for
    others.
    """
    from bundler.lifecycle.compiled_once import compile_once

    bundle = half(kernels, 0)
    kernel = bundle.kernels[0]
    store.kernel_records().publish(bundle)
    store.file_records().publish("name", "file.json", b"{}")
    monkeypatch.setenv("TRITON_BUNDLER_SIGNATURES", "require")
    with bundler.open_store(*store.urls) as strict:
        with pytest.warns(bundler.BundlerWarning, match="published one by one") as told:
            made = [compile_once(strict, kernel.key, lambda: bundle) for _ in range(2)]
        assert [one.how for one in made] == ["compiled", "compiled"]
        assert len(told) == 1
        assert strict.file_records().look_up("name") is None
        assert [*strict.file_records().listed("", 9)] == []
    assert store.kernel_records().look_up([kernel.key]).bundle.kernels


def test_a_policy_of_the_program_stays_with_its_store(signers, store, kernels, tmp_path):
    """A store that was opened with one is not handed to child processes, which would not
    know it.
    """
    store.push(Bundle.load(kernels), "prod/llama", key=signers.mallory)
    with bundler.open_store(*store.urls, signatures=signers.policy()) as strict:
        assert strict.urls == ()
        with pytest.raises(Untrusted):
            strict.restore("prod/llama", cache_dir=tmp_path / "out", only="all")
        with pytest.warns(bundler.BundlerWarning, match="signatures are required"):
            session = bundler.session(strict, "prod/llama", push=None)
        session.close()
    assert not (tmp_path / "out").exists()


def test_a_kernel_by_its_key_is_judged_by_its_bundle(signers, store, kernels, monkeypatch):
    """Under require what a trusted key signed is found without a tag; what nobody, or another,
    signed is not, and one warning says so.
    """
    signed, unsigned = half(kernels, 0), half(kernels, 1)
    keys = [kernel.key for bundle in (signed, unsigned) for kernel in bundle.kernels]
    store.push(signed, "prod/llama", key=signers.alice)
    store.push(unsigned, "prod/other", key=signers.mallory)
    store.kernel_records().publish(unsigned)
    assert not store.kernel_records().look_up(keys).missing
    monkeypatch.setenv("TRITON_BUNDLER_SIGNATURES", "require")
    with bundler.open_store(*store.urls) as strict:
        with pytest.warns(bundler.BundlerWarning, match="published one by one") as told:
            found = [strict.kernel_records().look_up(keys) for _ in range(2)]
        assert len(told) == 1
        for one in found:
            assert {kernel.key for kernel in one.bundle.kernels} == {k.key for k in signed.kernels}
            assert one.code == {k.key for k in signed.kernels}
        recorded = {kernel.key for kernel in strict.kernel_records().recorded(99)}
        assert recorded == {kernel.key for kernel in signed.kernels}
    # A signed push counts more than an unsigned one of the same kernels.
    store.push(unsigned, "prod/third", key=signers.alice)
    with bundler.open_store(*store.urls) as strict:
        assert not strict.kernel_records().look_up(keys).missing


def test_who_waits_for_nobody_finds_what_is_signed(signers, store, kernels, monkeypatch):
    """A session and `compile_once` under require take a kernel of a signed bundle by its key."""
    from bundler.lifecycle.compiled_once import compile_once

    bundle = half(kernels, 0)
    store.push(bundle, "prod/llama", key=signers.alice)
    monkeypatch.setenv("TRITON_BUNDLER_SIGNATURES", "require")
    with bundler.open_store(*store.urls) as strict:
        made = compile_once(strict, bundle.kernels[0].key, lambda: pytest.fail("compiled"))
        assert made.how == "found"
        with bundler.session(strict, push=None) as session:
            found = session._engine._sources.find(bundle.kernels[0].key, turn=True)
            assert (found.place, found.code) == ("store", True)


@pytest.mark.parametrize("key", ["alice", "mallory"])
def test_code_of_a_bundle_by_its_key(key, signers, store, code):
    """Where code needs a signature, that of a kernel's bundle is used if a trusted key signed the
    bundle, and only its other files if none did.
    """
    signers.trust(trust=("kernels", "code"))
    with Bundle.load(code) as bundle:
        store.push(bundle, "prod/llama", key=getattr(signers, key))
        keys = [kernel.key for kernel in bundle.kernels]
    policy = signers.policy(kernels="off", code="require")
    with bundler.open_store(*store.urls, signatures=policy) as strict:
        found = strict.kernel_records().look_up(keys)
        assert (found.missing, found.code) == ((), {*keys} if key == "alice" else frozenset())
