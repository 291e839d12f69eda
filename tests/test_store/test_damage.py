# SPDX-License-Identifier: Apache-2.0
"""Damage and malice in the store: it is found, never used, reported, and repaired by the
next push.
"""

import hashlib
import json
import os
import random
import struct
import tracemalloc

import msgpack
import oracle
import pytest
import store_builders as build
import zstandard

import bundler
from bundler.backends.port import Unread
from bundler.errors import (
    AccessDenied,
    BundlerError,
    DigestMismatch,
    FormatError,
    LimitExceeded,
    NotFound,
)
from bundler.store import store_layout
from bundler.store.maintenance import KINDS


@pytest.fixture
def filled(store):
    """A store with kernels A and B under the tag t."""
    store.push(oracle.bundle("A", "B"), "t")
    return store


def unit(store, kind="cubin"):
    """Return the key of a unit of kernel A."""
    return oracle.unit_of(store, oracle.bundle("A", "B"), 0, kind)


# ------------------------------------------------------------------------------------------- Damage


@pytest.mark.parametrize("kind", ["cubin", "ttir"])
def test_a_flipped_bit_in_a_unit(filled, kind):
    """It is found by verify, never read, and sent again by the next push; then the store is
    sound.
    """
    key = unit(filled, kind)
    oracle.flip(filled, key)
    report = filled.verify()
    assert not report.sound
    assert [name for name, _ in report.damaged] == [key]
    assert "expected sha256:" in report.damaged[0][1]
    assert report.dangling == ((oracle.bundle("A", "B").digest, report.dangling[0][1]),)
    assert report.dangling[0][1].startswith("1 of 4 units missing or damaged")
    assert report.removed == ()
    with filled.pull("t", read_only=True) as pulled, pytest.raises(DigestMismatch):
        oracle.contents(pulled)
    pushed = filled.push(oracle.bundle("A", "B"), "t")
    assert (pushed.blobs_sent, pushed.blobs_present, pushed.repaired) == (1, 3, 1)
    assert filled.verify().sound
    assert oracle.contents(filled.pull("t")) == oracle.contents(oracle.bundle("A", "B"))


@pytest.mark.parametrize("read", ["read", "prefetch"])
def test_reading_a_damaged_unit_says_so_and_removes_it(filled, read):
    """Who finds a unit damaged raises, and removes it, so that also a store that cannot look by
    itself is repaired.
    """
    key = unit(filled)
    oracle.flip(filled, key)
    with filled.pull("t") as pulled:
        kernel = pulled.kernels[0]
        if read == "prefetch":
            pulled.blobs.prefetch([bytes.fromhex(a.digest[7:]) for a in kernel.artifacts])
            assert pulled.read(kernel.artifact("k.ttir"))
        with pytest.raises(DigestMismatch, match=key):
            pulled.read(kernel.binary)
        assert key not in oracle.raw(filled)
        with pytest.raises(NotFound, match=f"{key} is missing; push the bundle again"):
            pulled.read(kernel.binary)
        assert pulled.read(pulled.kernels[1].binary)
    far = oracle.wrapped(filled, oracle.Noting, cheap=False)
    assert far.push(oracle.bundle("A", "B"), "t").blobs_sent == 1
    assert filled.verify().sound


def test_damage_in_a_store_that_we_may_only_read_stays(filled, caplog):
    """Without the right to remove it a damaged object is damaged for everybody, and a warning says
    that.
    """
    oracle.flip(filled, unit(filled))
    reader = oracle.wrapped(filled, oracle.Denying)
    before = oracle.raw(filled)
    for _ in range(2):
        with reader.pull("t") as pulled, pytest.raises(DigestMismatch):
            pulled.read(pulled.kernels[0].binary)
    assert reader.verify(repair=True).removed == ()
    assert oracle.raw(filled) == before
    assert "cannot be removed" in caplog.text


def test_a_read_only_pull_leaves_damage_where_it_is(filled):
    """Looking on changes nothing, not even what is broken."""
    oracle.flip(filled, unit(filled))
    before = oracle.raw(filled)
    with filled.pull("t", read_only=True) as pulled, pytest.raises(DigestMismatch):
        pulled.read(pulled.kernels[0].binary)
    oracle.flip(filled, manifest := oracle.manifest_of(filled, "t"))
    with pytest.raises(DigestMismatch):
        filled.pull("t", read_only=True)
    assert oracle.raw(filled).keys() == before.keys()
    assert manifest in before


def test_every_flipped_byte_is_found(memory):
    """No bit of a unit or a manifest can change unnoticed, wherever it lies."""
    memory.push(oracle.bundle("A"), "t")
    for key, data in oracle.raw(memory).items():
        for position in range(len(data)):
            oracle.flip(memory, key, position)
            assert [name for name, _ in memory.verify().damaged] == [key], (key, position)
            oracle.overwrite(memory, key, data)
    assert memory.verify().sound


def test_the_quick_look_at_a_value_says_what_the_check_says():
    """Of values of both kinds, whole, cut at each length, and with each byte changed."""
    for whole in (
        store_layout.encode_object(b"payload"),
        store_layout.encode_object_with(bytes(32), b"frame"),
        b"",
        Unread(b"", "a pipe"),
    ):
        cuts = [whole[:end] for end in range(len(whole) + 1)]
        changed = [
            whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(len(whole))
        ]
        short = (
            store_layout.encode_object_with(bytes(32), b"frame")[:4]
            + hashlib.sha256(b"x").digest()
            + b"x"
        )
        for value in (whole, short, *cuts, *changed):
            try:
                store_layout.checked_frame(value, "key")
            except DigestMismatch:
                assert not store_layout.is_sound_object(value)
            else:
                assert store_layout.is_sound_object(value)
                assert value == whole


@pytest.mark.parametrize("cut", [0, 1, 4, 35, 36, 40, -1])
def test_a_truncated_object_is_found(filled, cut):
    """A value that ends early is damaged, however little is left."""
    for key in (unit(filled), oracle.manifest_of(filled, "t")):
        data = oracle.raw(filled)[key]
        oracle.overwrite(filled, key, data[:cut])
        assert [name for name, _ in filled.verify().damaged] == [key]
        oracle.overwrite(filled, key, data)


def test_a_flipped_bit_in_a_manifest(filled):
    """The tag dangles, pulling raises and removes the manifest, and the next push sets things
    right.
    """
    key = oracle.manifest_of(filled, "t")
    oracle.flip(filled, key)
    report = filled.verify()
    assert [name for name, _ in report.damaged] == [key]
    assert report.dangling == (("t", f"its manifest {key} is missing or damaged"),)
    (info,) = filled.tags()
    assert (info.name, info.kernels) == ("t", 0)
    assert info.problem
    with pytest.raises(DigestMismatch):
        filled.pull("t")
    assert key not in oracle.raw(filled)
    with pytest.raises(
        NotFound, match=r"the manifest of sha256:.* is missing; push the bundle again"
    ):
        filled.pull("t")
    report = filled.push(oracle.bundle("A", "B"), "t")
    assert (report.blobs_sent, report.blobs_present) == (0, 4)
    assert filled.verify().sound
    assert oracle.contents(filled.pull("t")) == oracle.contents(oracle.bundle("A", "B"))


@pytest.mark.parametrize("mode", ["merge", "replace", "create"])
def test_a_dangling_tag_is_repaired_by_any_push(filled, mode):
    """A tag whose manifest is gone is reported, counts as a miss, and is whole after a push."""
    oracle.drop(filled, oracle.manifest_of(filled, "t"))
    assert [name for name, _ in filled.verify().dangling] == ["t"]
    assert (
        filled.tags()[0].problem
        == f"the manifest of {oracle.bundle('A', 'B').digest} is missing; push the bundle again"
    )
    filled.push(oracle.bundle("A", "B"), "t", mode)
    assert filled.verify().sound
    assert oracle.kernels(filled.pull("t")) == oracle.keys("A", "B")


def test_a_missing_unit_is_reported_and_sent_by_the_next_push(filled):
    """A manifest that names what is not there is dangling; a push of a bundle that has it repairs
    it.
    """
    gone = unit(filled)
    oracle.drop(filled, gone)
    report = filled.verify()
    assert (report.damaged, report.sound) == ((), False)
    assert report.dangling == (
        (oracle.bundle("A", "B").digest, f"1 of 4 units missing or damaged, such as {gone}"),
    )
    assert filled.push(oracle.bundle("C"), "t").blobs_sent == 2
    assert not filled.verify().sound
    assert filled.push(oracle.bundle("A"), "t").blobs_sent == 1
    assert oracle.contents(filled.pull("t")) == oracle.contents(oracle.bundle("A", "B", "C"))
    assert filled.verify().sound


def test_repairing_removes_what_is_damaged(filled):
    """After verify(repair=True) nothing is damaged, only missing; the next push, wherever from,
    brings it.
    """
    keys = sorted([unit(filled), unit(filled, "ttir")])
    for key in keys:
        oracle.flip(filled, key)
    report = filled.verify(repair=True)
    assert report.removed == tuple(keys) == tuple(name for name, _ in report.damaged)
    again = filled.verify()
    assert (again.damaged, again.removed) == ((), ())
    assert [name for name, _ in again.dangling] == [oracle.bundle("A", "B").digest]
    far = oracle.wrapped(filled, oracle.Noting, cheap=False)
    assert far.push(oracle.bundle("A", "B"), "t").blobs_sent == 2
    assert filled.verify().sound


def test_repairing_keeps_what_is_only_over_a_limit(filled):
    """Who reads with small limits does not remove what others can read."""
    small = bundler.lifecycle.machine_store.Store(
        oracle.innermost(filled), "small", bundler.Limits(manifest_bytes=100)
    )
    assert len(small.verify(repair=True).damaged) == 1
    assert small.verify(repair=True).removed == ()
    with pytest.raises(LimitExceeded):
        small.pull("t")
    assert filled.verify().sound


METADATA = {"name": "n", "num_warps": 4, "shared": 0}


def test_a_damaged_unit_that_a_merge_must_compare_gives_way(filled):
    """A push of another build of a kernel whose metadata in the store is damaged keeps everything
    else that the tag holds.
    """

    def spelled(source, **spelling):
        return oracle.bundle(
            "A",
            name="n",
            source=source,
            extra={"n.json": json.dumps(METADATA, **spelling).encode()},
        )

    here, there = spelled("here"), spelled("there", indent=1)
    filled.push(oracle.bundle("C", "D"), "t", "replace")
    filled.push(here, "t")
    oracle.flip(filled, oracle.unit_of(filled, here))
    filled.push(there, "t")
    with filled.pull("t") as pulled:
        assert oracle.kernels(pulled) == oracle.keys("A", "C", "D")
        assert oracle.contents(pulled) == oracle.contents(there) | oracle.contents(
            oracle.bundle("C", "D")
        )


def test_a_verify_beside_pushes_and_prunes_sees_no_damage(memory):
    """What others push or prune while a verify runs is not taken for a loss."""
    memory.push(oracle.bundle("A"), "t")
    memory.push(oracle.bundle("X"))
    oracle.age(memory, 2 * oracle.DAY_S)

    class Busy(oracle.Wrapped):
        def around(self, name, call, argument):
            answer = call(argument)
            if name == "list":
                memory.push(oracle.bundle("B"), "t")
                memory.prune()
            return answer

    report = oracle.wrapped(memory, Busy).verify()
    assert report.sound, report


# ------------------------------------------------------------------------------------------- Malice


def payload(store):
    """Return the payload of kernel A's launch unit."""
    return zstandard.decompress(oracle.raw(store)[unit(store)][36:])


HOSTILE_UNITS = {
    "nothing": lambda data: b"",
    "wrong magic": lambda data: b"XXXX" + oracle.sealed(data)[4:],
    "another payload": lambda data: oracle.sealed(data[:-1] + b"X"),
    "a payload too short": lambda data: oracle.sealed(data[:-1]),
    "a payload too long": lambda data: oracle.sealed(data + b"X"),
    "no frame": lambda data: oracle.sealed_as_it_is(b"not zstd at all"),
    "an empty frame": lambda data: oracle.sealed_as_it_is(b""),
    "a frame of no size": lambda data: oracle.sealed(data, write_content_size=False),
    "a frame and more": lambda data: oracle.sealed_as_it_is(zstandard.compress(data) + b"more"),
    "two frames": lambda data: oracle.sealed_as_it_is(zstandard.compress(data) * 2),
    "half a frame": lambda data: oracle.sealed_as_it_is(zstandard.compress(data)[:-5]),
    "a bomb": lambda data: oracle.sealed(bytes(256 << 20)),
    "a bomb that lies about its size": lambda data: oracle.sealed_as_it_is(
        lying(bytes(256 << 20), len(data))
    ),
}


def lying(data, size):
    """Return a zstd frame of data whose header declares another size."""
    frame = zstandard.compress(data)
    # A frame of 256 MiB has a size field of 4 bytes behind magic, descriptor and, unless it is a
    # single segment, the window.
    descriptor = frame[4]
    assert descriptor >> 6 == 2
    start = 5 if descriptor & 32 else 6
    return frame[:start] + struct.pack("<I", size) + frame[start + 4 :]


@pytest.mark.parametrize("ahead", [False, True], ids=["alone", "fetched ahead"])
@pytest.mark.parametrize("name", HOSTILE_UNITS)
def test_a_hostile_unit_is_a_typed_error(memory, name, ahead):
    """Whatever lies in a unit's place, reading it raises, takes little memory, and the other
    kernels read.
    """
    memory.push(oracle.bundle("A", "B"), "t")
    hostile = HOSTILE_UNITS[name](payload(memory))
    oracle.overwrite(memory, unit(memory), hostile)
    tracemalloc.start()
    try:
        with memory.pull("t", read_only=True) as pulled:
            if ahead:
                pulled.blobs.prefetch([digest for digest, _ in pulled.content.blobs])
            for _ in range(2):
                with pytest.raises((DigestMismatch, FormatError)):
                    pulled.read(pulled.kernels[0].binary)
            assert pulled.read(pulled.kernels[1].binary)
        report = memory.verify()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20
    assert [key for key, _ in report.damaged] == [unit(memory)]
    memory.verify(repair=True)
    memory.push(oracle.bundle("A", "B"), "t")
    assert memory.verify().sound


def content_and_observed(store):
    """Return the two parts of the manifest of the tag t."""
    _, content, observed = msgpack.unpackb(
        zstandard.decompress(oracle.raw(store)[oracle.manifest_of(store, "t")][36:])
    )
    return content, observed


def changed(content):
    """Return other content bytes."""
    document = msgpack.unpackb(content)
    document[3][0] = "other"
    return msgpack.packb(document)


HOSTILE_MANIFESTS = {
    "nothing": lambda content, observed: b"",
    "wrong magic": lambda content, observed: (
        b"XXXX" + oracle.sealed(msgpack.packb([1, content, observed]))[4:]
    ),
    "another content": lambda content, observed: oracle.sealed(
        msgpack.packb([1, changed(content), observed])
    ),
    "another observation": lambda content, observed: oracle.sealed(
        msgpack.packb([1, content, observed + b"\0"])
    ),
    "no content": lambda content, observed: oracle.sealed(msgpack.packb([1])),
    "a map": lambda content, observed: oracle.sealed(msgpack.packb({1: content})),
    "not msgpack": lambda content, observed: oracle.sealed(b"\xc1" * 99),
    "text for bytes": lambda content, observed: oracle.sealed(msgpack.packb([1, "x", "y"])),
    "deep nesting": lambda content, observed: oracle.sealed(b"\x91" * 5000 + b"\x90"),
    "a huge array": lambda content, observed: oracle.sealed(b"\xdd\xff\xff\xff\xff"),
    "no frame": lambda content, observed: oracle.sealed_as_it_is(b"not zstd"),
    "a frame of no size": lambda content, observed: oracle.sealed(
        msgpack.packb([1, content, observed]), write_content_size=False
    ),
    "a bomb": lambda content, observed: oracle.sealed(bytes(256 << 20)),
    "a bomb that lies about its size": lambda content, observed: oracle.sealed_as_it_is(
        lying(bytes(256 << 20), 1000)
    ),
}


# For others, with larger limits, these could be sound.
OVER_A_LIMIT = {"deep nesting", "a bomb"}


@pytest.mark.parametrize("name", HOSTILE_MANIFESTS)
def test_a_hostile_manifest_is_a_typed_error(memory, name):
    """Whatever lies in a manifest's place, pull, push and verify raise or report, within little
    memory.
    """
    memory.push(oracle.bundle("A", "B"), "t")
    key = oracle.manifest_of(memory, "t")
    oracle.overwrite(memory, key, HOSTILE_MANIFESTS[name](*content_and_observed(memory)))
    tracemalloc.start()
    try:
        with pytest.raises((DigestMismatch, FormatError)):
            memory.pull("t", read_only=True)
        assert [name for name, _ in memory.verify().damaged] == [key]
        assert memory.tags()[0].problem
        assert memory.stats().units == 4
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 24 << 20
    assert memory.prune().unfollowed
    if name in OVER_A_LIMIT:
        assert memory.verify(repair=True).removed == ()
        memory.delete_tag("t")
        oracle.age(memory, 2 * oracle.DAY_S)
        assert key in memory.prune().removed
    else:
        assert memory.verify(repair=True).removed == (key,)
    memory.push(oracle.bundle("A", "B"), "t")
    assert memory.verify().sound


def test_the_manifest_of_another_bundle_is_not_taken(filled):
    """A manifest that lies under another's key is found by its digest."""
    filled.push(oracle.bundle("C"), "u")
    here, there = oracle.manifest_of(filled, "t"), oracle.manifest_of(filled, "u")
    oracle.overwrite(filled, here, oracle.raw(filled)[there])
    with pytest.raises(DigestMismatch):
        filled.pull("t")
    assert oracle.kernels(filled.pull("u")) == oracle.keys("C")


def test_a_unit_in_the_place_of_another_is_not_taken(filled):
    """A sound unit under another's key is found by what the manifest says is in it."""
    one, other = unit(filled), oracle.unit_of(filled, oracle.bundle("A", "B"), 1)
    oracle.overwrite(filled, one, oracle.raw(filled)[other])
    assert [name for name, _ in filled.verify().damaged] == [one]
    with filled.pull("t") as pulled, pytest.raises((DigestMismatch, FormatError)):
        pulled.read(pulled.kernels[0].binary)


def test_a_manifest_with_unsafe_names_is_refused(memory):
    """Content whose names leave their directory is refused although every digest is right."""
    memory.push(oracle.bundle("A"), "t")
    content, observed = content_and_observed(memory)
    document = msgpack.unpackb(content)
    document[7][0][0] = "../../escape.cubin"
    content = msgpack.packb(document)
    digest = hashlib.sha256(content).hexdigest()
    key = f"v1/m/{digest}/{hashlib.sha256(observed).hexdigest()[:16]}"
    oracle.overwrite(memory, key, oracle.sealed(msgpack.packb([1, content, observed])))
    oracle.set_tag(memory, "evil", msgpack.packb([1, key]))
    for name in ("evil", f"sha256:{digest}"):
        with pytest.raises(FormatError, match="escape"):
            memory.pull(name)


HOSTILE_TAGS = {
    "nothing": b"",
    "noise": bytes(range(256)),
    "text": b"sha256:" + b"0" * 64,
    "a map": msgpack.packb({}),
    "no manifest": msgpack.packb([1]),
    "a path": msgpack.packb([1, "v1/m/../../etc/passwd"]),
    "a unit": msgpack.packb([1, "v1/u/" + "0" * 64]),
    "another layout": msgpack.packb([1, "v2/m/" + "0" * 64 + "/" + "0" * 16]),
    "a line more": msgpack.packb([1, "v1/m/" + "0" * 64 + "/" + "0" * 16 + "\n"]),
    "a newer version": msgpack.packb([2, "v1/m/" + "0" * 64 + "/" + "0" * 16]),
}


@pytest.mark.parametrize("name", HOSTILE_TAGS)
def test_a_hostile_tag_is_a_typed_error(store, name):
    """Whatever a tag says, calls raise or report and go on with the other tags, nothing is pruned,
    and it can be deleted.
    """
    store.push(oracle.bundle("A"), "good")
    store.push(oracle.bundle("B"))
    oracle.age(store, 2 * oracle.DAY_S)
    oracle.set_tag(store, "bad", HOSTILE_TAGS[name])
    with pytest.raises(FormatError, match="tag bad cannot be read"):
        store.pull("bad")
    with pytest.raises(FormatError):
        store.push(oracle.bundle("A"), "bad")
    bad, good = store.tags()
    assert (bad.name, bad.digest, bool(bad.problem)) == ("bad", None, True)
    assert (good.name, good.problem) == ("good", None)
    report = store.verify()
    assert (report.damaged, [name for name, _ in report.dangling]) == ((), ["bad"])
    assert store.stats().tags == 2
    pruned = store.prune()
    assert (pruned.removed, [name for name, _ in pruned.unfollowed]) == ((), ["bad"])
    assert store.delete_tag("bad")
    assert store.verify().sound
    assert len(store.prune().removed) == 4


def test_names_that_are_none_of_ours_are_reported(store):
    """Objects under our prefixes with names that we would not give are damaged, and disturb
    nobody.
    """
    store.push(oracle.bundle("A"), "t")
    for key in ("v1/m/x", "v1/m/" + "0" * 64, "v1/m", "v1/u/x", "v1/u"):
        oracle.overwrite(store, key, b"noise")
    report = store.verify()
    assert [key for key, _ in report.damaged] == [
        "v1/m",
        "v1/m/" + "0" * 64,
        "v1/m/x",
        "v1/u",
        "v1/u/x",
    ]
    assert len(store.verify(repair=True).removed) == 5
    assert store.verify().sound


def test_random_damage_never_gives_wrong_bytes(memory):
    """Three hundred random changes of objects and tags: right bytes, or typed errors; at the end a
    push repairs all.
    """
    chance = random.Random(20)
    bundle = build.several()
    right = oracle.contents(bundle)
    memory.push(bundle, "t")
    sound, tag = oracle.raw(memory), oracle.innermost(memory).read_ref("v1/t/t")
    for _ in range(300):
        store = oracle.copied(memory)
        for _ in range(chance.randrange(1, 4)):
            key = chance.choice([*sound, "tag"])
            if key == "tag":
                data = bytearray(tag)
                data[chance.randrange(len(data))] = chance.randrange(256)
                oracle.set_tag(store, "t", bytes(data))
                continue
            data = bytearray(sound[key])
            for _ in range(chance.randrange(1, 4)):
                data[chance.randrange(len(data))] = chance.randrange(256)
            oracle.overwrite(
                store, key, bytes(data)[: chance.choice([None, None, chance.randrange(len(data))])]
            )
        try:
            with store.pull("t") as pulled:
                for kernel in pulled.kernels:
                    for artifact in kernel.artifacts:
                        assert pulled.read(artifact) == right[f"{kernel.key}/{artifact.filename}"]
        except BundlerError:
            pass
        store.verify(repair=True)
        store.push(bundle, "t", "replace")
        assert oracle.contents(store.pull("t")) == right
        assert store.verify().sound


def test_a_symbolic_link_in_the_store_is_not_followed(local, root, tmp_path):
    """A link in an object's place is an error, not a way to other files."""
    local.push(oracle.bundle("A"), "t")
    path = oracle.files(root)[oracle.unit_of(local, oracle.bundle("A"))]
    secret = tmp_path / "secret"
    os.replace(path, secret)
    path.symlink_to(secret)
    with local.pull("t") as pulled, pytest.raises(BundlerError, match="symbolic link"):
        pulled.read(pulled.kernels[0].binary)


def test_a_push_that_may_not_write_says_so(memory):
    """A store that we may only read refuses a push with a typed error, unless everything is
    there.
    """
    memory.push(oracle.bundle("A"), "t")
    reader = oracle.wrapped(memory, oracle.Denying)
    with pytest.raises(AccessDenied):
        reader.push(oracle.bundle("B"), "t")
    with pytest.raises(AccessDenied):
        reader.delete_tag("t")
    assert reader.push(oracle.bundle("A"), "t").blobs_sent == 0
    assert oracle.contents(reader.pull("t")) == oracle.contents(oracle.bundle("A"))


@pytest.mark.parametrize("again", [False, True], ids=["moves on", "comes back"])
def test_a_verify_beside_a_tag_that_moves_sees_no_damage(memory, again):
    """A tag that is set to something else, pruned behind and perhaps set back while a verify runs,
    is not dangling.
    """
    memory.push(oracle.bundle("A"), "t")
    oracle.age(memory, 2 * oracle.DAY_S)

    class Moving(oracle.Wrapped):
        lists = 0

        def around(self, name, call, argument):
            # Between reading the tags and listing the objects, and again when all is listed.
            self.lists += name == "list"
            if name == "list" and self.lists == 1:
                memory.push(oracle.bundle("B"), "t", "replace")
                memory.prune()
            answer = call(argument)
            if again and name == "get" and self.lists == len(KINDS):
                memory.push(oracle.bundle("A"), "t", "replace")
            return answer

    report = oracle.wrapped(memory, Moving).verify()
    assert report.sound, report
    assert oracle.kernels(memory.pull("t")) == oracle.keys("A" if again else "B")


def test_a_verify_beside_a_push_that_brings_back_units_sees_no_damage(memory):
    """Units that were missing when they were listed and are there now are not missing."""
    memory.push(oracle.bundle("A"), "t")
    oracle.drop(memory, oracle.unit_of(memory, oracle.bundle("A")))

    class Repaired(oracle.Wrapped):
        def around(self, name, call, argument):
            answer = call(argument)
            if name == "get":
                memory.push(oracle.bundle("A"), "t")
            return answer

    assert oracle.wrapped(memory, Repaired).verify().sound
