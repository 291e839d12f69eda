# SPDX-License-Identifier: Apache-2.0
"""The policy takes what a trusted key vouches for, and nothing that resembles it."""

import base64

import msgspec
import pytest
from msgspec.structs import replace

from bundler.errors import ConfigError, FormatError, Untrusted
from bundler.trust.envelope import Envelope
from bundler.trust.signature_policy import SeenEpochs, SignaturePolicy, Subject
from bundler.trust.signing_keys import SigningKey
from bundler.trust.statements import BundleStatement, TagStatement
from bundler.trust.trusted_keys import TrustedKey, TrustedKeys, write_key

NOW = 1_800_000_000
ALICE, MALLORY = SigningKey(b"a" * 32), SigningKey(b"m" * 32)
CONTENT, OTHER, STORED = "11" * 32, "22" * 32, "33" * 32
SUBJECT = Subject(
    content=CONTENT, stored=STORED, targets=("cuda:90",), families=(), trust="kernels"
)


def trusted(**scope):
    return TrustedKey(key=base64.b64encode(ALICE.public).decode(), **scope)


def policy(key=None, epochs=None, **demands):
    return SignaturePolicy(
        TrustedKeys({"release": key or trusted()}),
        epochs=epochs,
        now=lambda: NOW,
        **{"kernels": "require", **demands},
    )


def of_bundle(signer=ALICE, **fields):
    statement = BundleStatement(
        **{
            "content": CONTENT,
            "stored": STORED,
            "targets": ("cuda:90",),
            "signed_at": NOW - 10,
            **fields,
        }
    )
    return Envelope(statement.payload_type, statement.encode()).sign(signer).encode()


def of_tag(signer=ALICE, **fields):
    statement = TagStatement(
        **{
            "store": "prod",
            "tag": "prod/llama",
            "content": CONTENT,
            "epoch": 5,
            "signed_at": NOW - 10,
            **fields,
        }
    )
    return Envelope(statement.payload_type, statement.encode()).sign(signer).encode()


def test_a_good_signature_names_the_key():
    """The judgement is good, and requiring it raises nothing."""
    judgement = policy().of_bundle([of_bundle()], SUBJECT)
    assert (judgement.key, judgement.reason) == ("release", "")
    policy().require(judgement, "kernels", "bundle")


@pytest.mark.parametrize(
    ("envelopes", "reason"),
    [
        ([], "it is not signed"),
        ([of_bundle(MALLORY)], "whom no trusted key stands for"),
        ([of_bundle(content=OTHER)], "is for the bundle 222222222222"),
        ([of_bundle(stored=OTHER)], "the same content stored as other bytes"),
        ([of_bundle(targets=())], "does not speak of cuda:90"),
        ([of_bundle(expires=NOW)], "expired 0 s ago"),
        ([of_bundle(signed_at=NOW + 4000)], "in the future"),
        ([of_tag()], "payload type"),
        ([b"{"], "signature envelope"),
        (
            [of_bundle(content=OTHER), of_bundle(MALLORY)],
            "is for the bundle 222222222222…, not for 111111111111…; signed by",
        ),
    ],
)
def test_what_does_not_count_is_refused_with_the_reason(envelopes, reason):
    """Each way in which a signature can be missing, foreign, old or of something else."""
    judgement = policy().of_bundle(envelopes, SUBJECT)
    assert not judgement.good
    assert reason in judgement.reason
    with pytest.raises(Untrusted, match="triton-bundler sign"):
        policy().require(judgement, "kernels", "bundle x.tbundle")


def test_where_no_key_is_trusted_the_reason_says_so():
    """A folder that is not named is told from a key that is not in it."""
    found = SignaturePolicy(TrustedKeys({}), epochs=None, now=lambda: NOW, kernels="require")
    judgement = found.of_bundle([of_bundle()], SUBJECT)
    assert "(no key is trusted here: TRITON_BUNDLER_KEYS names the folder" in judgement.reason


@pytest.mark.parametrize(
    ("scope", "reason"),
    [
        (
            {"targets": ("hip:*",)},
            "key 'release' may not vouch for target 'cuda:90', only for hip:\\*",
        ),
        ({"trust": ()}, "may not vouch for trust level 'kernels', only for none"),
        ({"revoked": NOW - 1}, "key 'release' is revoked"),
        ({"expires": NOW - 1}, "key 'release' has expired"),
    ],
)
def test_a_key_counts_only_within_its_scope(scope, reason):
    """The message names the key and what is outside."""
    with pytest.raises(Untrusted, match=reason):
        policy().require(
            policy(trusted(**scope)).of_bundle([of_bundle()], SUBJECT), "kernels", "bundle"
        )


def test_code_needs_a_signature_for_code_by_a_key_for_code():
    """A signature for kernels does not let libraries in, nor does a key for kernels that signed
    code.
    """
    subject = replace(SUBJECT, trust="code")
    for key, envelope, good in (
        (trusted(trust=("kernels", "code")), of_bundle(trust="code"), True),
        (trusted(trust=("kernels", "code")), of_bundle(), False),
        (trusted(), of_bundle(trust="code"), False),
    ):
        assert policy(key).of_bundle([envelope], subject).good is good


def test_the_demand_is_that_of_the_trust_level():
    """`prefer` and `off` raise nothing; each level has its own demand."""
    nothing = policy().of_bundle([], SUBJECT)
    policy(kernels="prefer").require(nothing, "kernels", "bundle")
    policy(kernels="off").require(nothing, "kernels", "bundle")
    with pytest.raises(Untrusted):
        policy(kernels="off", code="require").require(nothing, "code", "bundle")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"store": "staging"}, "is for store 'staging'"),
        ({"tag": "prod/other"}, "is for tag 'prod/other'"),
        ({"content": OTHER}, "is for bundle '2222"),
    ],
)
def test_a_statement_is_for_one_tag_of_one_store(fields, reason):
    """Carried to another store, or for another tag or bundle, it does not count."""
    judgement = policy().of_tag([of_tag(**fields)], "prod", "prod/llama", CONTENT)
    assert reason in judgement.reason
    with pytest.raises(Untrusted, match=r"triton-bundler push --key"):
        policy().require(judgement, "kernels", "tag 'prod/llama'")


def test_a_key_signs_only_the_tags_of_its_scope():
    """A key for staging does not sign what production follows."""
    judgement = policy(trusted(tags=("staging/*",))).of_tag(
        [of_tag()], "prod", "prod/llama", CONTENT
    )
    assert "may not vouch for tag 'prod/llama', only for staging/*" in judgement.reason


def test_an_old_statement_played_again_is_refused(tmp_path):
    """After epoch 5 was seen, 4 is refused with both numbers, and so is another bundle under 5; 6
    goes on.
    """
    judge = policy(epochs=SeenEpochs(tmp_path / "seen"))
    assert judge.of_tag([of_tag()], "prod", "prod/llama", CONTENT).good
    for old in (of_tag(epoch=4), of_tag(content=OTHER)):
        content = OTHER if old == of_tag(content=OTHER) else CONTENT
        refused = judge.of_tag([old], "prod", "prod/llama", content)
        assert "played again" in refused.reason
        with pytest.raises(Untrusted, match="push the tag again"):
            judge.require(refused, "kernels", "tag")
    assert judge.of_tag([of_tag(epoch=4), of_tag(epoch=6)], "prod", "prod/llama", CONTENT).good
    assert "epoch 5 and names" in judge.of_tag([of_tag()], "prod", "prod/llama", CONTENT).reason


def test_what_was_seen_must_be_readable(tmp_path):
    """A damaged memory is an error, since it may have been damaged to make us forget."""
    judge = policy(epochs=SeenEpochs(tmp_path))
    judge.of_tag([of_tag()], "prod", "prod/llama", CONTENT)
    (file,) = tmp_path.iterdir()
    file.write_bytes(b"{}")
    with pytest.raises(FormatError, match="epoch that was seen"):
        judge.of_tag([of_tag()], "prod", "prod/llama", CONTENT)


def test_keys_are_kept_in_a_folder(tmp_path):
    """What is written is read; a file that is no key, or a name that is no file's, is refused."""
    write_key(tmp_path / "keys", "release", trusted(tags=("prod/*",), comment="build farm"))
    found = TrustedKeys.load(tmp_path / "keys")
    assert found.by_name == {"release": trusted(tags=("prod/*",), comment="build farm")}
    assert TrustedKeys.load(tmp_path / "none").by_name == {}
    with pytest.raises(ConfigError, match="name of a key"):
        write_key(tmp_path / "keys", "../release", trusted())
    for text in ("{}", '{"key": "AAAA"}', '{"key": "AAAA", "scope": 1}', "[]"):
        (tmp_path / "keys" / "release.json").write_text(text)
        with pytest.raises(FormatError, match=r"trusted key .*release\.json"):
            TrustedKeys.load(tmp_path / "keys")


def test_statements_are_canonical_and_closed():
    """Equal statements have equal bytes; a field that is not known is refused, since it may forbid
    something.
    """
    statement = BundleStatement(content=CONTENT, signed_at=NOW)
    assert BundleStatement.decode(statement.encode()) == statement
    assert list(msgspec.json.decode(statement.encode())) == sorted(
        msgspec.json.decode(statement.encode())
    )
    # no digit of ours
    digests = (
        "zz",
        "",
        "1" * 63,
        "1" * 65,
        "11" * 32 + "\n",
        "A1" * 32,
        "1g" * 32,
        "１" * 64,  # noqa: RUF001
    )
    changes = [
        {"not_before": 7},
        {"statement": 2},
        {"signed_at": -1},
        *({"content": text} for text in digests),
    ]
    for change in (*changes, *({"stored": text} for text in digests if text)):
        payload = msgspec.json.encode(msgspec.json.decode(statement.encode()) | change)
        with pytest.raises(FormatError, match="sign again"):
            BundleStatement.decode(payload)
    tag = TagStatement(store="s", tag="t", content=CONTENT, epoch=1, signed_at=NOW)
    assert TagStatement.decode(tag.encode()) == tag
    for text in digests:
        with pytest.raises(FormatError, match="sign again"):
            TagStatement.decode(replace(tag, content=text).encode())
