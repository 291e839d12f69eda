# SPDX-License-Identifier: Apache-2.0
"""Tuning records: winners are content, timings are observations, and a bundle without timings is
what it always was.
"""

from pathlib import Path

import pytest

import bundler
from bundler.errors import FormatError, LimitExceeded
from bundler.format.bundle import Bundle, MemoryBlobs
from bundler.format.candidate_timings import (
    MAX_FILE_BYTES,
    Timing,
    Tuning,
    from_file,
    id_of,
    losers,
    merge_tunings,
    record_id,
    time_of,
    to_file,
)
from bundler.format.constant_values import encode
from bundler.format.launch_spec import TuningRecord
from bundler.format.manifest import Content, Observed, merge_observed

GOLDEN = Path(__file__).parents[1] / "data" / "v2.0" / "tuned.tbundle"
PARTS = (("source", "ab"), ("arguments", "1024"), ("device", "H200"))


def named(block):
    return (("BLOCK", encode(block)), ("num_warps", encode(4)))


def record(block=128, kernel="add", parts=PARTS):
    return TuningRecord(kernel, parts, named(block), "autotune")


def tuning(of, *timings, when_s=5):
    return Tuning(id_of(of), timings, 10, 20, when_s)


TIMED = Timing(named(128), "A" * 52, 1500, 1400, 1600)
FAILED = Timing(named(256), reason="OutOfResources: shared memory")


def bundle(records=(), tunings=()):
    return Bundle(Content.of([], records), Observed(tunings=tuple(tunings)), MemoryBlobs({}))


def test_timings_travel_beside_the_content_and_do_not_count_in_the_digest(independent):
    """Winners decide what a bundle is; what was measured does not, and comes back whole."""
    bare = bundle([record()])
    timed = bundle([record()], [tuning(record(), TIMED, FAILED)])
    assert timed.digest == bare.digest != bundle([record(256)]).digest
    with Bundle.from_bytes(timed.to_bytes()) as loaded:
        assert loaded.tuning_records == (record(),)
        assert loaded.observed.tunings == (tuning(record(), TIMED, FAILED),)
        assert loaded.writable
        assert loaded.to_bytes() == timed.to_bytes()
    assert independent.read(timed.to_bytes())[0] == timed.digest


def test_timings_are_written_only_where_there_are_some():
    """The field is left out where it would be empty; one of a newer minor behind it is ignored."""
    assert bundle([record()]).observed.encode() == b"\x93\x01\x90\x90"
    newer = Observed(tunings=(tuning(record(), TIMED),)).encode()
    assert Observed.decode(
        newer.replace(b"\x94\x01", b"\x95\x01", 1) + b"\xc0", newer_minor=True
    ).tunings


def test_a_field_that_became_something_else_is_ignored_in_a_newer_minor():
    """What cannot be read of a newer version is passed over; at our own version it is an error."""
    odd = b"\x94\x01\x90\x90\xc0"
    assert Observed.decode(odd, newer_minor=True).tunings == ()
    with pytest.raises(FormatError):
        Observed.decode(odd)


@pytest.mark.parametrize(
    "wrong",
    [
        ["id"],
        ["id", [], 1, 2, "now"],
        ["id", [[[], "key", 1.5, None, None, ""]], 1, 2, 3],
        ["id", [[[["BLOCK", ["code", "x"]]], "", None, None, None, ""]], 1, 2, 3],
        ["id", [[[], "", -1, None, None, ""]], 1, 2, 3],
    ],
)
def test_a_malformed_tuning_is_a_typed_error(wrong):
    """Missing fields, wrong types, unknown tags, negative times."""
    with pytest.raises(FormatError):
        Tuning.from_wire(wrong)


def test_two_tunings_of_one_record_are_refused():
    """A reader would not know which to believe."""
    twice = Observed(tunings=(tuning(record(), TIMED), tuning(record(), FAILED))).encode()
    with pytest.raises(FormatError, match="two tunings"):
        Observed.decode(twice)


def test_merging_keeps_the_tuning_with_more_candidates_then_the_later_one():
    """In whatever order; tunings of other records stay."""
    few, many = tuning(record(), TIMED, when_s=9), tuning(record(), TIMED, FAILED, when_s=1)
    later, other = tuning(record(), FAILED, TIMED, when_s=2), tuning(record(kernel="mul"), TIMED)
    assert merge_tunings([few], [many]) == merge_tunings([many], [few]) == (many,)
    assert merge_tunings([many], [later]) == (later,)
    assert set(merge_tunings([many], [other])) == {many, other}
    assert merge_observed(Observed(tunings=(few,)), Observed(tunings=(many,))).tunings == (many,)
    merged = bundler.merge([bundle([record()], [few]), bundle([record()], [many])])
    assert (merged.tuning_records, merged.observed.tunings) == ((record(),), (many,))


def test_selecting_kernels_by_name_selects_their_tunings():
    """A record that is left out takes its timings with it."""
    other = record(kernel="mul")
    both = bundle([record(), other], [tuning(record(), TIMED), tuning(other, TIMED)])
    slim = both.select(names="m*")
    assert (slim.tuning_records, slim.observed.tunings) == ((other,), (tuning(other, TIMED),))


def test_timings_of_a_golden_file_are_read_as_they_were_meant():
    """Digest, records and timings."""
    with Bundle.load(GOLDEN) as golden:
        assert (
            golden.digest
            == "sha256:785d4e4a0812aafd2e451007645410bb2894f4609bafe824c4cc8ff537193959"
        )
        assert golden.tuning_records == (record(),)
        assert golden.observed.tunings == (tuning(record(), TIMED, FAILED),)
        assert (
            golden.observed.encode()
            == bundle([record()], [tuning(record(), TIMED, FAILED)]).observed.encode()
        )


def test_losers_are_the_kernels_that_won_nothing():
    """A kernel that won one tuning stays, whatever else it lost; one that nobody tried is
    no loser.
    """
    first, second = record(128), record(256, parts=(("arguments", "2048"),))
    small, large = Timing(named(128), "S", 1), Timing(named(256), "L", 2)
    lost, gone = Timing(named(512), "X", 3), Timing(named(1024), "", reason="did not compile")
    tried = (small, large, lost, gone)
    assert losers([first, second], [tuning(first, *tried), tuning(second, *tried)]) == {"X"}
    assert losers([first], [tuning(first, *tried)]) == {"L", "X"}
    assert losers([first], []) == frozenset()


def test_the_time_of_a_record_is_that_of_its_winner():
    """None where nobody measured it."""
    assert time_of(record(), tuning(record(), FAILED, TIMED)) == 1500
    assert time_of(record(256), tuning(record(256), FAILED, TIMED)) is None
    assert time_of(record(), None) is None


def test_a_record_is_named_by_its_kernel_and_parts():
    """Its winner does not count; names and texts cannot run into each other."""
    assert id_of(record(128)) == id_of(record(256)) == record_id("add", PARTS)
    assert record_id("add", (("a", "bc"),)) != record_id("add", (("ab", "c"),))
    assert record_id("add", PARTS) != record_id("mul", PARTS)


def test_a_record_file_comes_back_and_its_damage_is_seen():
    """Every flipped bit, every cut and every other schema is an error."""
    for measured in (None, tuning(record(), TIMED, FAILED)):
        assert from_file(to_file(record(), measured)) == (record(), measured)
    data = to_file(record(), tuning(record(), TIMED))
    for at in range(0, len(data), 7):
        with pytest.raises(FormatError):
            from_file(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
    for wrong in (b"", data[:-1], data + b"x", data[:32], b"x" * (MAX_FILE_BYTES + 1)):
        with pytest.raises(FormatError):
            from_file(wrong)
    with pytest.raises(FormatError, match="another record"):
        from_file(to_file(record(), tuning(record(kernel="mul"), TIMED)))


def test_a_record_that_is_nested_too_deep_is_over_a_limit():
    """Values are bounded like everything in a manifest."""
    value = encode(1)
    for _ in range(20):
        value = encode((1,)).__class__("tuple", (value,))
    with pytest.raises(LimitExceeded):
        from_file(to_file(TuningRecord("add", PARTS, (("BLOCK", value),), "autotune"), None))
