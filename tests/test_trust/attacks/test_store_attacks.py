# SPDX-License-Identifier: Apache-2.0
"""What somebody who can write to a store tries; nothing of it becomes visible under require."""

import pytest

import bundler
from bundler import Bundle, Untrusted
from bundler.backends.port import Unread
from bundler.format.bundle import FirstBlobs, MemoryBlobs
from bundler.format.digest import digest_text, sha256
from bundler.format.entries import Artifact
from bundler.format.manifest import Content, Observation, Observed
from bundler.integrations.kernel_lookup import FoundKernel
from bundler.lifecycle.kernel_placement import why_not_trusted
from bundler.store import store_layout
from bundler.store.store_signatures import envelopes_in

TAG = "prod/llama"


def value(store, tag=TAG):
    return store._backend.read_ref(store_layout.tag_key(tag))


def set_tag(store, data, tag=TAG):
    """Set a tag's value, as who can write to the store can."""
    key = store_layout.tag_key(tag)
    assert store._backend.swap_ref(key, store._backend.read_ref(key), data)


def half(path, which):
    bundle = Bundle.load(path)
    return bundle.select(names=sorted({kernel.name for kernel in bundle.kernels})[which])


def copy_objects(source, to):
    for prefix in ("v1/u", "v1/m", "v1/e", "v1/d"):
        keys = [stat.key for stat in source._backend.list(prefix)]
        found = source._backend.get_within(dict.fromkeys(keys, 1 << 30))
        assert not any(isinstance(data, Unread) for data in found.values())
        to._backend.put(found)


@pytest.fixture
def refused(signers, store):
    """Assert that a pull and a restore are refused for a reason."""

    def check(reason, tag=TAG, where=store):
        where.signatures = signers.policy()
        for use in (where.pull, where.restore):
            with pytest.raises(Untrusted, match=reason):
                use(tag)
        where.signatures = None

    return check


def test_a_tag_of_another_store(signers, store, kernels, refused, tmp_path):
    """What staging's key signed for staging is not production's, though every object is there."""
    with bundler.open_store(str(tmp_path / "staging")) as staging:
        staging.push(Bundle.load(kernels), TAG, key=signers.alice)
        copy_objects(staging, store)
        set_tag(store, value(staging))
    refused("is for store '.*staging")


def test_stores_are_known_by_the_name_that_is_set(
    signers, store, kernels, refused, tmp_path, monkeypatch
):
    """A mirror under the same name is the same store, wherever it is mounted."""
    monkeypatch.setenv("TRITON_BUNDLER_STORE_NAME", "prod")
    store.push(Bundle.load(kernels), TAG, key=signers.alice)
    with bundler.open_store(str(tmp_path / "mirror"), signatures=signers.policy()) as mirror:
        copy_objects(store, mirror)
        set_tag(mirror, value(store))
        assert mirror.pull(TAG).kernels
        monkeypatch.setenv("TRITON_BUNDLER_STORE_NAME", "other")
        refused("is for store 'prod', not for 'other'", where=mirror)


def test_a_tag_of_another_name(signers, store, kernels, refused):
    """One signed tag is not another."""
    store.push(Bundle.load(kernels), "prod/small", key=signers.alice)
    set_tag(store, value(store, "prod/small"))
    refused("is for tag 'prod/small'")


def test_an_old_tag_that_is_played_again(signers, store, kernels, refused):
    """After the second bundle was seen, the first one's tag is refused, though it was signed; also
    after it was removed and set anew.
    """
    store.push(half(kernels, 0), TAG, key=signers.alice)
    old = value(store)
    store.push(half(kernels, 1), TAG, "replace", key=signers.alice)
    store.signatures = signers.policy()
    assert store.pull(TAG).kernels
    store.signatures = None
    set_tag(store, old)
    refused("played again")
    store.delete_tag(TAG)
    store.push(half(kernels, 0), TAG, key=signers.alice)
    store.signatures = signers.policy()
    assert store.pull(TAG).kernels


def test_a_machine_that_has_seen_nothing_believes_an_old_tag(
    signers, store, kernels, monkeypatch, tmp_path
):
    """That is not promised otherwise; an expiry of the key bounds it."""
    store.push(half(kernels, 0), TAG, key=signers.alice)
    old = value(store)
    store.push(half(kernels, 1), TAG, "replace", key=signers.alice)
    set_tag(store, old)
    monkeypatch.setenv("TRITON_BUNDLER_LOCAL", str(tmp_path / "new machine"))
    store.signatures = signers.policy()
    assert store.pull(TAG).kernels == half(kernels, 0).kernels


def test_a_tag_without_its_signatures(signers, store, kernels, refused):
    """All of them, the tag's own, and the bundle's, which still lies beside the manifest."""
    store.push(Bundle.load(kernels), TAG, key=signers.alice)
    signed = value(store)
    manifest, (of_tag, of_bundle) = store_layout.decode_tag(signed, TAG), envelopes_in(signed)
    set_tag(store, store_layout.encode_tag(manifest))
    refused("it is not signed")
    set_tag(store, store_layout.encode_tag(manifest, (), [of_bundle]))
    refused("it is not signed")
    set_tag(store, store_layout.encode_tag(manifest, (), [of_tag]))
    store.signatures = signers.policy()
    assert store.pull(TAG).signatures == (of_bundle,)


def test_a_tag_that_names_another_bundle(signers, store, kernels, refused):
    """The signatures stay, the manifest is another's."""
    other = store.push(half(kernels, 0), "mallory", key=signers.mallory)
    store.push(half(kernels, 1), TAG, key=signers.alice)
    theirs = store_layout.decode_tag(value(store, "mallory"), "mallory")
    assert other.digest[7:] in theirs
    set_tag(store, store_layout.encode_tag(theirs, (), envelopes_in(value(store))))
    refused("is for bundle")


def test_swapped_units(signers, store, kernels, tmp_path):
    """The bytes of one unit under the key of another are compared with what was signed for, and
    left out.
    """
    store.push(Bundle.load(kernels), TAG, key=signers.alice)
    keys = [stat.key for stat in store._backend.list(store_layout.UNITS)]
    values = store._backend.get_within(dict.fromkeys(keys, 1 << 30))
    store._backend.delete(keys)
    store._backend.put(dict(zip(keys, [values[key] for key in (*keys[1:], keys[0])], strict=True)))
    store.signatures = signers.policy()
    with pytest.warns(bundler.BundlerWarning, match="nothing in this bundle"):
        report = store.restore(TAG, cache_dir=tmp_path / "out", only="all")
    assert (report.usable, len(report.damaged)) == (0, 4)


def test_two_manifests_of_one_digest(signers, store, kernels):
    """Observations are not signed in a store: the kernels of both are the same, byte for byte."""
    bundle = Bundle.load(kernels)
    first = store.push(bundle, TAG, key=signers.alice)
    seen = Observed({kernel.key: Observation(devices=(7,)) for kernel in bundle.kernels})
    other = Bundle(bundle.content, seen, bundle.blobs)
    content = [bundle.content.encode(), other.observed.encode()]
    key = store_layout.manifest_key(first.digest, content[1])
    store._backend.put({key: store_layout.encode_manifest(*content)})
    set_tag(store, store_layout.encode_tag(key, (), envelopes_in(value(store))))
    store.signatures = signers.policy()
    for name in (TAG, first.digest):
        with store.pull(name) as pulled:
            assert pulled.digest == first.digest
            assert pulled.kernels == bundle.kernels
            pulled.verify()


def test_signatures_of_a_store_are_bounded(signers, store, kernels, refused):
    """A tag full of envelopes, or of things that are none, is read up to a bound, and believed for
    what is good in it.
    """
    store.push(Bundle.load(kernels), TAG, key=signers.alice)
    signed = value(store)
    manifest, good = store_layout.decode_tag(signed, TAG), envelopes_in(signed)
    set_tag(store, store_layout.encode_tag(manifest, (), [*good, *[b"x" * 100] * 500]))
    assert len(envelopes_in(value(store))) == 16
    store.signatures = signers.policy()
    assert store.pull(TAG).kernels
    store.signatures = None
    set_tag(store, store_layout.encode_tag(manifest, (), [b"x"] * 20))
    refused("signature envelope")


@pytest.mark.parametrize("signed", [False, True])
def test_a_session_compiles_as_if_the_store_were_empty(
    signed, signers, store, kernels, monkeypatch, tmp_path, recwarn
):
    """With one warning that names the tag; what is signed is there at the start."""
    store.push(Bundle.load(kernels), TAG, key=signers.alice if signed else signers.mallory)
    store.kernel_records().publish(half(kernels, 0))
    monkeypatch.setenv("TRITON_BUNDLER_SIGNATURES", "require")
    key = half(kernels, 0).kernels[0].key
    with bundler.session(store.urls[0], TAG, push=None) as session:
        sources = session._engine._sources
        found = sources.find_in_tag(key) or sources.find(key, turn=False)
    warned = [
        str(one.message) for one in recwarn if issubclass(one.category, bundler.BundlerWarning)
    ]
    assert found is None or signed
    assert (found is not None) is signed
    ours = [text for text in warned if "nothing in this bundle can be used here" not in text]
    assert len(ours) == (0 if signed else 1)
    assert all("signatures are required" in text and TAG in text for text in ours)
    if not signed:
        assert not (tmp_path / "cache").exists() or not [*(tmp_path / "cache").iterdir()]


@pytest.mark.parametrize(
    "demands", [{"kernels": "off", "code": "require"}, {"kernels": "require", "code": "off"}]
)
def test_code_beside_the_signed_tags(demands, signers, store, kernels):
    """A library that was published alone, and one in a kernel that was, have no signature: neither
    is taken where code, or all, needs one.
    """
    store.file_records().publish("helper", "launcher.so", b"code")
    with bundler.open_store(
        *store.urls, signatures=signers.policy(**demands), trust="code"
    ) as strict:
        assert strict.file_records("code").look_up("helper") is None
        assert (strict.file_records().look_up("helper") is None) == (
            demands["kernels"] == "require"
        )
        with bundler.session(strict, push=None) as session:
            assert session._engine.fetch_file("A" * 52, "launcher.so", "source") is None
            kernel = half(kernels, 0).kernels[0]
            for place, trust in (("store", "kernels"), ("tag", "code")):
                assert (
                    session._engine._sources.trust_in(
                        FoundKernel(kernel, store, place, None), "code"
                    )
                    == trust
                )
    with bundler.open_store(*store.urls) as anybodys:
        assert anybodys.file_records("code").look_up("helper") == b"code"


def test_a_library_in_a_kernel_of_the_store_is_not_placed(signers, store, kernels):
    """With code signatures required, a kernel that was published alone is not placed with its
    library, and its record stays for others.
    """
    whole = half(kernels, 0)
    kernel = whole.kernels[0]
    library = Artifact("evil.so", digest_text(sha256(b"code")), 4)
    kernel = kernel.with_artifacts([*kernel.artifacts, library])
    blobs = FirstBlobs([MemoryBlobs({sha256(b"code"): b"code"}), whole.blobs])
    store.kernel_records().publish(Bundle(Content.of([kernel]), Observed(), blobs))
    policy = signers.policy(kernels="off", code="require")
    with (
        bundler.open_store(*store.urls, signatures=policy, trust="code") as strict,
        bundler.session(strict, push=None) as session,
    ):
        sources = session._engine._sources
        found = sources.find(kernel.key, turn=False)
        assert why_not_trusted(found.kernel, "all", sources.trust_in(found, "code")) is not None
        assert why_not_trusted(found.kernel, "all", "code") is None
        sources.reject(found)
    assert store.kernel_records().look_up([kernel.key]).bundle.kernels


def test_code_alone_is_required_to_be_signed(signers, store, kernels, code, tmp_path):
    """Then kernels need no signature, however they come: of a tag, of a record, of a file; code
    needs one of its bundle and of its tag.
    """
    policy = signers.policy(kernels="off", code="require")
    with bundler.Bundle.load(kernels) as whole:
        store.push(whole, "kernels")
        store.kernel_records().publish(whole)
    with bundler.Bundle.load(code) as both:
        store.push(both, "code")
    with bundler.open_store(*store.urls, signatures=policy) as strict:
        restored = strict.restore("kernels", tmp_path / "a", only="all")
        assert restored.restored
        assert "not signed" in restored.signatures
        assert strict.kernel_records().look_up(restored.restored).bundle.kernels
        # What is unsigned is refused where its code is wanted, and left out where it is not.
        strict.restore("code", tmp_path / "b", only="all")
        with pytest.raises(Untrusted, match="required for code"):
            strict.restore("code", tmp_path / "c", only="all", trust="code")
    assert not (tmp_path / "c").exists()


def test_signed_code_behind_a_tag_that_nobody_vouches_for(signers, store, code, tmp_path):
    """Whoever may write to the store could let a tag name an older bundle that was signed once."""
    signers.trust(trust=("kernels", "code"))
    policy = signers.policy(kernels="off", code="require")
    with bundler.Bundle.load(code) as both:
        store.push(both, "t", key=signers.alice)
        with bundler.open_store(*store.urls, signatures=policy) as strict:
            strict.restore("t", tmp_path / "a", only="all", trust="code")
        tag = store._backend.read_ref("v1/t/t")
        store._backend.swap_ref("v1/t/forged", None, tag)
    with bundler.open_store(*store.urls, signatures=policy) as strict:
        with pytest.raises(Untrusted, match="required for code, and tag 'forged'"):
            strict.restore("forged", tmp_path / "b", only="all", trust="code")
        report = strict.restore("forged", tmp_path / "c", only="all", trust="signed")
        assert "tag 'forged'" in report.signatures
        assert not list((tmp_path / "c").rglob("*.so"))
