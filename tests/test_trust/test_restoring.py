# SPDX-License-Identifier: Apache-2.0
"""Signatures decide what is restored, checked and launched: by the policy that is given, or by the
environment's.
"""

import base64
import shutil
from pathlib import Path

import pytest

import bundler
from bundler import Bundle, SignaturePolicy, SigningKey, Untrusted
from bundler.errors import ConfigError, FormatError
from bundler.trust.trusted_keys import TrustedKey, revoke_key, write_key

GOLDEN = Path(__file__).parents[1] / "data" / "v2.0"
KERNELS, CODE = GOLDEN / "triton-3.7.1.tbundle", GOLDEN / "synthetic.tbundle"
KEY = SigningKey(b"k" * 32)


@pytest.fixture
def keys(tmp_path, monkeypatch):
    """A folder that trusts one key, for kernels; the environment names it."""
    monkeypatch.setenv("TRITON_BUNDLER_KEYS", str(tmp_path / "keys"))
    monkeypatch.setenv("TRITON_BUNDLER_LOCAL", str(tmp_path / "local"))
    trust(tmp_path / "keys")
    return tmp_path / "keys"


def trust(folder, key=KEY, name="release", **scope):
    write_key(folder, name, TrustedKey(key=base64.b64encode(key.public).decode(), **scope))


@pytest.fixture
def kernels(tmp_path):
    """A bundle of kernels alone, to sign."""
    return Path(shutil.copy(KERNELS, tmp_path / "kernels.tbundle"))


@pytest.fixture
def code(tmp_path):
    """A bundle that also has what runs on the CPU."""
    return Path(shutil.copy(CODE, tmp_path / "code.tbundle"))


def restore(path, to, **choices):
    return bundler.restore(path, to / "cache", only="all", **choices)


def placed(folder):
    return (
        sorted(path.name for path in (folder / "cache").iterdir())
        if (folder / "cache").exists()
        else []
    )


def test_nothing_is_asked_unless_somebody_wants_it(kernels, tmp_path):
    """An unsigned bundle is restored as ever, and the report says nothing of signatures."""
    assert restore(kernels, tmp_path).signatures == ""


def test_a_signed_bundle_is_restored_under_require(kernels, keys, tmp_path, monkeypatch):
    """The report names the key, by policy and by environment; the digest is that of before."""
    digest = Bundle.load(kernels).digest
    signed = bundler.sign(kernels, KEY)
    assert (signed.digest, signed.key_id, signed.trust) == (digest, KEY.key_id, "kernels")
    report = restore(kernels, tmp_path, signatures=SignaturePolicy.load(keys))
    assert report.signatures == "kernels signed by key 'release'"
    assert report.restored
    monkeypatch.setenv("TRITON_BUNDLER_SIGNATURES", "require")
    assert restore(kernels, tmp_path).present == report.restored
    assert bundler.check(kernels, tmp_path / "cache", only="all").signatures == report.signatures


@pytest.mark.parametrize(
    "way", ["restore", "check", "rekey", "launch", "replay", "autotune", "in memory", "selected"]
)
def test_without_a_signature_nothing_becomes_visible_under_require(
    way, kernels, keys, tmp_path, monkeypatch
):
    """Whatever the bundle is used for; the message says what to do, and the cache stays empty."""
    monkeypatch.setenv("TRITON_BUNDLER_SIGNATURES", "require")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    if way == "selected":
        bundler.sign(kernels, KEY)
    ways = {
        "restore": lambda: restore(kernels, tmp_path),
        "check": lambda: bundler.check(kernels, tmp_path / "cache", only="all"),
        "rekey": lambda: restore(kernels, tmp_path, rekey=True),
        "launch": lambda: bundler.load(kernels, driver=bundler.DryDriver()),
        "replay": lambda: bundler.replay(str(kernels)),
        "autotune": lambda: _tuned(kernels),
        "in memory": lambda: restore(Bundle.from_bytes(kernels.read_bytes()), tmp_path),
        "selected": lambda: restore(Bundle.load(kernels).select(names="*"), tmp_path),
    }
    with pytest.raises(Untrusted, match=r"required for kernels.*not signed.*triton-bundler sign"):
        ways[way]()
    assert placed(tmp_path) == []


def _tuned(path):
    from bundler.runtime.tuning.autotuned_kernel import LaunchState
    from bundler.runtime.tuning.tuner_options import TunerOptions

    LaunchState(
        "kernel", None, TunerOptions(bundle=path, driver=bundler.DryDriver()), results=False
    )


def test_prefer_says_it_in_one_line(kernels, keys, tmp_path):
    """What is not signed is restored all the same."""
    report = restore(
        kernels, tmp_path, signatures=SignaturePolicy.load(keys, kernels="prefer", code="prefer")
    )
    assert report.restored
    assert report.signatures == "kernels not signed: it is not signed"


@pytest.mark.parametrize(
    ("scope", "reason"),
    [
        (
            {"targets": ("hip:*",)},
            "key 'release' may not vouch for target 'cuda:90', only for hip:\\*",
        ),
        ({"expires": 1}, "key 'release' has expired"),
        ({"trust": ("code",)}, "may not vouch for trust level 'kernels'"),
    ],
)
def test_a_key_out_of_scope_does_not_count(scope, reason, kernels, keys, tmp_path):
    """The message names key and scope."""
    bundler.sign(kernels, KEY)
    trust(keys, **scope)
    with pytest.raises(Untrusted, match=reason):
        restore(kernels, tmp_path, signatures=SignaturePolicy.load(keys))
    assert placed(tmp_path) == []


def test_a_revoked_key_does_not_count(kernels, keys, tmp_path):
    """Whenever it signed."""
    bundler.sign(kernels, KEY)
    revoke_key(keys, "release", 1_800_000_000)
    with pytest.raises(Untrusted, match="key 'release' is revoked"):
        restore(kernels, tmp_path, signatures=SignaturePolicy.load(keys))


def test_a_signature_expires(kernels, keys, tmp_path, monkeypatch):
    """It counts until then."""
    assert bundler.sign(kernels, KEY, expires_s=3600).expires > 0
    policy = SignaturePolicy.load(keys)
    assert restore(kernels, tmp_path, signatures=policy).restored
    monkeypatch.setattr(policy, "_now", lambda: 1e11)
    with pytest.raises(Untrusted, match="expired"):
        restore(kernels, tmp_path, signatures=policy)
    for wrong in (0, -1, float("nan")):
        with pytest.raises(ConfigError, match="more than 0"):
            bundler.sign(kernels, KEY, expires_s=wrong)


def test_code_is_restored_by_the_scope_of_a_signature(code, keys, tmp_path):
    """With `signed`, a key for code lets it in, another one leaves it out as `kernels` does; what
    is required is an error.
    """
    bundler.sign(code, KEY)
    trust(keys, trust=("kernels", "code"))
    off = {"kernels": "off", "code": "off"}
    allowed = restore(
        code, tmp_path / "a", trust="signed", signatures=SignaturePolicy.load(keys, **off)
    )
    everything = restore(code, tmp_path / "b", trust="code")
    assert allowed.companions == everything.companions
    assert allowed.signatures == "code signed by key 'release'"
    bundler.sign(code, KEY, trust="kernels")
    left = restore(
        code, tmp_path / "c", trust="signed", signatures=SignaturePolicy.load(keys, **off)
    )
    bare = restore(code, tmp_path / "d")
    assert (left.companions, left.skipped) == (bare.companions, bare.skipped)
    assert left.companions != allowed.companions
    with pytest.raises(Untrusted, match=r"required for code.*for kernels alone"):
        restore(
            code, tmp_path / "e", trust="code", signatures=SignaturePolicy.load(keys, kernels="off")
        )
    assert restore(code, tmp_path / "f", signatures=SignaturePolicy.load(keys)).restored


def test_registered_bundles_are_judged(kernels, keys, monkeypatch):
    """One that is not signed is left out, and whoever looks is told; one that is signed is
    found.
    """
    from bundler.integrations.kernel_lookup import RegisteredBundles

    monkeypatch.setenv("TRITON_BUNDLER_SIGNATURES", "require")
    key = Bundle.load(kernels).kernels[0].key
    for signed in (False, True):
        if signed:
            bundler.sign(kernels, KEY)
        registered, told = RegisteredBundles(), []
        registered.add(str(kernels))
        found = registered.find(key, lambda error, what, told=told: told.append(error))
        assert (found is not None, [type(error) for error in told]) == (
            signed,
            [] if signed else [Untrusted],
        )


def test_a_wrong_setting_is_an_error_and_not_a_way_around(kernels, keys, tmp_path, monkeypatch):
    """A misspelled demand, and a folder with a file that is no key, refuse."""
    monkeypatch.setenv("TRITON_BUNDLER_SIGNATURES", "requried")
    with pytest.raises(ConfigError, match="TRITON_BUNDLER_SIGNATURES"):
        restore(kernels, tmp_path)
    monkeypatch.setenv("TRITON_BUNDLER_SIGNATURES", "require")
    (keys / "broken.json").write_text("{")
    with pytest.raises(FormatError, match=r"broken\.json"):
        restore(kernels, tmp_path)
    (keys / "broken.json").unlink()
    with pytest.raises(ConfigError, match="kernels='always'"):
        SignaturePolicy.load(keys, kernels="always")
    assert placed(tmp_path) == []


def test_signatures_of_several_keys_stand_side_by_side(kernels, keys):
    """One by the same key is replaced; each of the others stays."""
    other = SigningKey(b"o" * 32)
    for key in (KEY, other, KEY):
        bundler.sign(kernels, key)
    with Bundle.load(kernels) as bundle:
        assert len(bundle.signatures) == 2
        assert (
            SignaturePolicy.load(keys).of_bundle(bundle.signatures, _subject(bundle)).key
            == "release"
        )


def _subject(bundle):
    from bundler.trust.signature_policy import subject_of

    return subject_of(bundle)


def test_a_damaged_bundle_is_not_signed(kernels, tmp_path):
    """It is read whole first, and the file stays."""
    data = bytearray(kernels.read_bytes())
    data[200] ^= 1
    kernels.write_bytes(data)
    with pytest.raises(bundler.DigestMismatch):
        bundler.sign(kernels, KEY, output=tmp_path / "out")
    assert not (tmp_path / "out").exists()
