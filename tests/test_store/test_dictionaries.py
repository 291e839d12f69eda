# SPDX-License-Identifier: Apache-2.0
"""Dictionaries in a store far away: worth their place, the same from every pusher, and mended when
they go.
"""

import contextlib
import hashlib
import random

import oracle
import pytest
import store_builders as build
import zstandard

from bundler.backends.memory import MemoryBackend
from bundler.errors import BundlerError, DigestMismatch, FormatError, NotFound
from bundler.lifecycle.machine_store import Store
from bundler.store import dictionaries, store_layout
from bundler.store.kernel_records import KernelRecords

DAY_S = oracle.DAY_S


@pytest.fixture
def far():
    """A store in memory whose reads are dear, as a server's are."""
    with Store(oracle.Wrapped(MemoryBackend(), cheap=False), "far") as store:
        yield store


def alike(*seeds, **kernel):
    """Return a bundle of kernels whose IR differs in a few bytes."""
    ir = build.noise("same", 60_000)
    return build_bundle(seeds, lambda seed: {"k.llir": ir + seed.encode()}, **kernel)


def build_bundle(seeds, extra, **kernel):
    files = build.Files()
    return files.bundle(
        *(
            files.kernel(seed, "k", source=f"a.py {seed}", extra=extra(seed), **kernel)
            for seed in seeds
        )
    )


def dictionary(store):
    """Return the key of the only dictionary, and the units that need it, told a second time."""
    (key,) = oracle.of_kind(store, "d")
    digest = bytes.fromhex(key[5:])
    return key, {
        k for k, v in oracle.raw(store).items() if v.startswith(b"TBD1") and v[36:68] == digest
    }


ALIKE = "ABCDEFGH"


def test_units_that_resemble_each_other_share_a_dictionary(far):
    """They take a fraction of what they take alone, the layout is as documented, and they read the
    same.
    """
    bundle = alike(*ALIKE)
    report = far.push(bundle, "t")
    key, users = dictionary(far)
    assert len(users) == len(ALIKE)
    raw = oracle.raw(far)
    content = zstandard.ZstdDecompressor().decompress(raw[key][36:])
    assert hashlib.sha256(content).hexdigest() == key[5:]
    assert raw[key][4:36] == hashlib.sha256(raw[key][36:]).digest()
    reader = zstandard.ZstdDecompressor(
        dict_data=zstandard.ZstdCompressionDict(content, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
    )
    for unit in users:
        assert raw[unit][4:36] == hashlib.sha256(raw[unit][36:]).digest()
        assert reader.decompress(raw[unit][68:])[:4]
    # Reads there are cheap, and files that small would take a block of the disk each.
    with Store(MemoryBackend(), "alone") as alone:
        assert report.bytes_sent < alone.push(bundle, "t").bytes_sent / 5
        assert oracle.of_kind(alone, "d") == []
    with far.pull("t") as pulled:
        assert oracle.contents(pulled) == oracle.contents(bundle)
    assert far.verify().sound
    assert far.stats().dictionaries == 1
    assert far.stats().tagged_bytes == sum(map(len, raw.values()))


def test_every_pusher_stores_the_same_bytes(far):
    """What is stored is a function of what is sent, whoever sends it."""
    far.push(alike(*ALIKE), "t")
    with Store(oracle.Wrapped(MemoryBackend(), cheap=False), "other") as other:
        other.push(alike(*reversed(ALIKE)), "t")
        assert oracle.raw(other) == oracle.raw(far)


def test_units_that_have_nothing_in_common_are_compressed_alone(far):
    """Noise gets no dictionary, nor do a few, nor small ones, where a dictionary would cost more
    than it saves.
    """
    far.push(
        build_bundle(ALIKE, lambda seed: {"k.llir": random.Random(seed).randbytes(50_000)}), "noise"
    )
    far.push(alike("I", "J", "K"), "few")
    far.push(build_bundle(ALIKE, lambda seed: {"k.ptx": f"ptx of {seed}".encode()}), "small")
    assert oracle.of_kind(far, "d") == []
    assert far.verify().sound


def test_a_large_unit_is_compressed_alone(far):
    """What is larger than a dictionary may be gains nothing from one, and is in none."""
    large = bytes(dictionaries.DICTIONARY_BYTES) + b"!"
    far.push(build_bundle(ALIKE, lambda seed: {"k.llir": large + seed.encode()}), "t")
    assert oracle.of_kind(far, "d") == []


def test_bundles_share_units_whatever_they_were_compressed_with(far):
    """A second bundle finds units present, and reads them with the dictionary of the first, which
    it never heard of.
    """
    far.push(alike(*ALIKE), "t")
    report = far.push(alike("A", "B"), "u")
    assert (report.blobs_sent, report.blobs_present) == (0, 4)
    noting = oracle.wrapped(far, oracle.Noting, cheap=False)
    with noting.pull("u") as pulled:
        assert oracle.contents(pulled) == oracle.contents(alike("A", "B"))
    key, _ = dictionary(far)
    assert [key] in noting._backend.inner.named("touch")


def test_records_read_what_bundles_brought(far):
    """A kernel that is looked up by its key has its units from a push; the dictionary is fetched
    once for all look-ups; without it, it is published anew.
    """
    bundle = alike(*ALIKE)
    far.push(bundle, "t")
    key, _ = dictionary(far)
    records = KernelRecords(oracle.Noting(far._backend, cheap=False), far.name)
    assert len(records.publish(bundle).created) == len(ALIKE)
    whole = oracle.contents(bundle)
    for kernel in bundle.kernels:
        found = records.look_up([kernel.key])
        assert (found.missing, found.damaged) == ((), {})
        assert oracle.contents(found.bundle).items() <= whole.items()
    assert [key] in records._backend.inner.named("get")
    assert sum(key in keys for keys in records._backend.inner.named("get")) == 1
    oracle.drop(far, key)
    lost = KernelRecords(far._backend, far.name).look_up([bundle.kernels[0].key])
    assert "needs the dictionary" in lost.damaged[bundle.kernels[0].key]
    assert KernelRecords(far._backend, far.name).publish(bundle).created == oracle.keys(*ALIKE)
    assert KernelRecords(far._backend, far.name).look_up(oracle.keys(*ALIKE)).missing == ()


def test_a_later_push_uses_the_dictionary_that_the_tag_names(far):
    """A few new kernels are too few for a dictionary of their own, and get that of the others."""
    far.push(alike(*ALIKE), "t")
    key, before = dictionary(far)
    report = far.push(alike("I"), "t")
    assert report.blobs_sent == 2
    assert report.bytes_sent < 5_000
    assert dictionary(far)[0] == key
    assert len(dictionary(far)[1] - before) == 1
    with far.pull("t") as pulled:
        assert oracle.kernels(pulled) == oracle.keys(*ALIKE, "I")
        assert oracle.contents(pulled) == oracle.contents(alike(*ALIKE, "I"))


def test_a_push_mends_a_dictionary_that_is_gone(far):
    """Evicted, it leaves units that nobody can read: the next push removes and sends them again."""
    far.push(alike(*ALIKE), "t")
    key, users = dictionary(far)
    oracle.drop(far, key)
    report = far.push(alike(*ALIKE), "t")
    assert (report.blobs_sent, report.blobs_present) == (len(users), len(ALIKE))
    with far.pull("t") as pulled:
        assert oracle.contents(pulled) == oracle.contents(alike(*ALIKE))
    assert far.verify().sound


def test_a_reader_without_a_dictionary_says_which_kernels_it_lacks(far):
    """The others are read; what is useless is removed, so that any push sends it again, also one
    that knows no dictionary.
    """
    far.push(alike(*ALIKE), "t")
    key, users = dictionary(far)
    oracle.drop(far, key)
    with far.pull("t", read_only=True) as pulled:
        assert pulled.read(pulled.kernels[0].binary)
        with pytest.raises(NotFound, match="needs the dictionary"):
            pulled.read(pulled.kernels[0].artifact("k.llir"))
    assert users < oracle.raw(far).keys()
    with far.pull("t") as pulled:
        pulled.blobs.prefetch([digest for digest, _ in pulled.content.blobs])
        with pytest.raises(NotFound, match="needs the dictionary"):
            pulled.read(pulled.kernels[0].artifact("k.llir"))
    assert not users & oracle.raw(far).keys()
    assert far.push(alike(*ALIKE), "u").blobs_sent == len(users)
    with far.pull("t") as pulled:
        assert oracle.contents(pulled) == oracle.contents(alike(*ALIKE))


def test_verify_finds_units_without_their_dictionary(far):
    """They count as damaged, and with repair they go; then the bundle is incomplete until it is
    pushed.
    """
    far.push(alike(*ALIKE), "t")
    key, users = dictionary(far)
    oracle.drop(far, key)
    report = far.verify()
    assert {name for name, _ in report.damaged} == users
    assert all(key in reason for _, reason in report.damaged)
    assert set(far.verify(repair=True).removed) == users
    assert [of for of, _ in far.verify().dangling] == [alike(*ALIKE).digest]
    far.push(alike(*ALIKE), "t")
    assert far.verify().sound


def test_a_dictionary_that_was_changed_is_not_used(far):
    """A flipped bit, another's bytes under its key and one that is too large are found, and never
    decode anything.
    """
    far.push(alike(*ALIKE), "t")
    key, users = dictionary(far)
    whole = oracle.raw(far)[key]
    for value in (
        whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:],
        store_layout.encode_object(b"another"),
        b"",
        b"TBD1" + whole[4:],
    ):
        oracle.overwrite(far, key, value)
        assert key in {name for name, _ in far.verify().damaged}
        with far.pull("t", read_only=True) as pulled, pytest.raises(NotFound):
            pulled.read(pulled.kernels[0].artifact("k.llir"))
    assert {key} | users == set(far.verify(repair=True).removed)
    huge = store_layout.encode_object(bytes(dictionaries.DICTIONARY_BYTES + 1))
    with pytest.raises(FormatError, match="declares 1048577 bytes"):
        dictionaries.opened(key, huge)
    far.push(alike(*ALIKE), "t")
    assert far.verify().sound


def test_a_unit_that_names_another_dictionary_is_damaged(far):
    """The seal covers the name of the dictionary: pointing a unit elsewhere breaks it."""
    far.push(alike(*ALIKE), "t")
    _, users = dictionary(far)
    unit = min(users)
    value = oracle.raw(far)[unit]
    oracle.overwrite(far, unit, value[:36] + bytes(32) + value[68:])
    assert [name for name, _ in far.verify().damaged] == [unit]
    with pytest.raises(DigestMismatch):
        store_layout.checked_frame(oracle.raw(far)[unit], unit)
    other = hashlib.sha256(b"x").digest()
    oracle.overwrite(far, unit, store_layout.encode_object_with(other, value[68:]))
    assert [name for name, _ in far.verify().damaged] == [unit]


def test_a_tag_may_hint_at_anything(far):
    """Hints that are wrong, or not hints at all, cost nothing but the hint."""
    far.push(alike(*ALIKE), "t")
    manifest = oracle.manifest_of_hinting(far, "t")
    for hints in (
        [["cuda:90/rest", bytes(32)]],
        [["cuda:90/rest", b"short"]],
        ["x"],
        [[1, 2, 3]],
        "text",
        None,
    ):
        oracle.set_tag(far, "t", oracle.packed([1, manifest, hints]))
        with far.pull("t") as pulled:
            assert oracle.contents(pulled) == oracle.contents(alike(*ALIKE))
    assert far.push(alike(*ALIKE), "t").blobs_sent == 0


def test_prune_keeps_dictionaries_as_long_as_units_need_them(far):
    """A dictionary goes with the last unit that was compressed with it, and not before, whether a
    tag hints at it or not.
    """
    far.push(alike(*ALIKE), "t")
    key, users = dictionary(far)
    oracle.age(far, 2 * DAY_S)
    assert far.prune().removed == ()
    far.push(alike("A", "B"), "t", "replace")
    oracle.set_tag(far, "t", oracle.packed([1, oracle.manifest_of_hinting(far, "t")]))
    oracle.age(far, 2 * DAY_S)
    removed = far.prune().removed
    assert key not in removed
    assert len(users & set(removed)) == len(ALIKE) - 2
    assert far.verify().sound
    with far.pull("t", read_only=True) as pulled:
        assert oracle.contents(pulled) == oracle.contents(alike("A", "B"))
    far.delete_tag("t")
    oracle.age(far, 2 * DAY_S)
    report = far.prune()
    assert report.removed[-1] == key
    assert oracle.raw(far) == {}


def test_a_dictionary_stays_when_one_of_its_units_was_used_meanwhile(far):
    """A unit that somebody claims while a prune runs is spared, and so is what it needs."""
    far.push(alike(*ALIKE), "t")
    key, users = dictionary(far)
    far.delete_tag("t")
    oracle.age(far, 2 * DAY_S)
    claimed = min(users)

    class Claiming(oracle.Wrapped):
        def around(self, name, call, argument):
            if name == "delete" and claimed in argument:
                self.inner.touch([claimed])
            return call(argument)

    before = oracle.raw(far).keys()
    removed = oracle.wrapped(far, Claiming).prune().removed
    assert oracle.raw(far).keys() == {claimed, key}
    assert set(removed) == before - {claimed, key}


def test_a_push_that_stops_anywhere_leaves_no_unit_without_its_dictionary(far):
    """A dictionary is acknowledged before units that need it are sent, whichever call fails."""
    for at in range(40):
        with Store(oracle.Faulty(MemoryBackend(), "fails", at, cheap=False), "f") as store:
            with contextlib.suppress(BundlerError):
                store.push(alike(*ALIKE), "t")
            if store._backend.inner.struck is None:
                assert at > 5
                break
            for digest in {v[36:68] for v in oracle.raw(store).values() if v.startswith(b"TBD1")}:
                assert f"v1/d/{digest.hex()}" in oracle.raw(store)
    else:
        pytest.fail("a push never ended")
