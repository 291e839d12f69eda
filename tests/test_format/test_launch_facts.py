# SPDX-License-Identifier: Apache-2.0
"""Launch facts come out the same whether their sections are decoded one by one, and shared, or all
at once.
"""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bundler.errors import FormatError
from bundler.format import launch_spec, wire
from bundler.format.constant_values import encode
from bundler.format.launch_spec import Argument, LaunchFacts


def facts(number):
    """Return facts that differ from others in one constant."""
    return LaunchFacts(
        "ast",
        (
            Argument("x", "", None, False, False, False),
            Argument("N", "", encode(1), True, False, False),
        ),
        (("x", encode("*fp32")), ("N", encode("constexpr"))),
        (((1,), encode(number)),),
        (((0,), encode([["tt.divisibility", 16]])),),
        (
            ("num_warps", encode(4)),
            ("extern_libs", encode((("libdevice", "a.bc"),))),
            ("limit", encode(-1.5)),
        ),
    )


def outcome(data):
    """Return what the bytes decode to, or the words of the refusal."""
    try:
        return LaunchFacts.from_bytes(data)
    except FormatError as error:
        return str(error)


WHOLE = facts(7).to_bytes()


@given(st.integers(0, len(WHOLE) - 1), st.binary(max_size=4), st.integers(0, 3))
def test_damaged_facts_come_to_the_same_either_way(at, inserted, dropped):
    """Whatever is changed, both ways give equal facts, or both refuse."""
    data = WHOLE[:at] + inserted + WHOLE[at + dropped :]
    quick = outcome(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch_spec.wire, "split", lambda data, members: None)
        slow = outcome(data)
    assert quick == slow if not isinstance(slow, str) else isinstance(quick, str)


@pytest.mark.parametrize("section", ["constants", "attributes"])
@pytest.mark.parametrize("value", [encode(1), encode([["tt.divisibility", 16]])])
def test_a_place_before_the_first_argument_is_refused(section, value):
    """A path counts from 0; one that counts from the end would name another argument, or none at
    all.
    """
    for path in [(-1,), (-3,), (0, -1)]:
        damaged = replace(facts(1), **{section: ((path, value),)})
        with pytest.raises(FormatError, match="expected places of arguments"):
            LaunchFacts.from_bytes(damaged.to_bytes())


def test_a_place_behind_the_last_argument_is_named_by_its_path():
    assert replace(facts(1), constants=(((7,), encode(object())),)).unportable == ("(7,)",)


def test_kernels_share_the_sections_that_are_equal():
    """A thousand kernels that differ in a constant hold one tuple of arguments and one of options
    between them.
    """
    found = [LaunchFacts.from_bytes(facts(number).to_bytes()) for number in range(3)]
    assert [decoded.constants[0][1].payload for decoded in found] == [0, 1, 2]
    assert (
        len({id(decoded.arguments) for decoded in found})
        == len({id(decoded.options) for decoded in found})
        == 1
    )


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x90",
        WHOLE + b"\0",
        b"\x91" + WHOLE,
        wire.pack([1, [], [], [], [], []]),
        wire.pack(["ast", [], [], [], []]),
    ],
)
def test_what_is_no_facts_is_refused(data):
    """Nothing, too much, too few sections, or one of another type is a FormatError."""
    with pytest.raises(FormatError):
        LaunchFacts.from_bytes(data)


def test_large_facts_are_decoded_whole():
    """Beyond the size that is split they are read all the same."""
    large = facts(("y" * 4000,) * 40)
    assert wire.split(large.to_bytes(), 6) is None
    assert LaunchFacts.from_bytes(large.to_bytes()) == large


@pytest.mark.parametrize(
    "value",
    [7, -7, 1 << 70, True, None, "text", 1.5, (1, (2, "x")), [None], {"a": 1}, ("y" * 4000,) * 2],
)
def test_constants_of_each_kind_come_back(value, monkeypatch):
    """Simple ones are decoded at once, others one by one, with the same result."""
    made = facts(value)
    assert LaunchFacts.from_bytes(made.to_bytes()) == made
    monkeypatch.setattr(launch_spec.wire, "split", lambda data, members: None)
    assert LaunchFacts.from_bytes(made.to_bytes()) == made


def test_an_array_that_declares_more_than_there_is_is_refused_before_room_is_made_for_it():
    """Four thousand million sections, or constants, in a few bytes."""
    for data in (
        b"\xdd\xff\xff\xff\xff" + b"\xc0" * 8,
        WHOLE.replace(b"\x91\x92\x91\x01", b"\xdd\xff\xff\xff\xff\x92\x91\x01", 1),
    ):
        assert data != WHOLE
        with pytest.raises(FormatError):
            LaunchFacts.from_bytes(data)


def test_facts_like_the_last_ones_are_decoded_by_their_constants_alone(monkeypatch):
    """What stands around the constants is taken from the last facts where it is the same, byte for
    byte, and nowhere else.
    """
    others = [
        facts(7),
        facts("text"),
        facts((1, 2)),
        replace(facts(7), source_kind="ir"),
        replace(facts(7), options=()),
    ]
    for first in (facts(1), facts("x"), *others):
        for second in others:
            assert LaunchFacts.from_bytes(first.to_bytes()) == first
            assert LaunchFacts.from_bytes(second.to_bytes()) == second
    split = []
    LaunchFacts.from_bytes(facts(1).to_bytes())
    monkeypatch.setattr(launch_spec.wire, "split", lambda *args: split.append(args))
    assert LaunchFacts.from_bytes(facts(2).to_bytes()) == facts(2)
    assert split == []
    launch_spec._last_facts.clear()
    assert LaunchFacts.from_bytes(facts(3).to_bytes()) == facts(3)
    assert len(split) == 1


def test_what_stands_between_known_parts_is_checked():
    """Two members, half a member or an odd one where the constants should be: each a FormatError,
    also after facts that were right.
    """
    assert LaunchFacts.from_bytes(WHOLE) is not None
    ((before, after, _),) = launch_spec._last_facts
    constants = WHOLE[len(before) : len(WHOLE) - len(after)]
    for between in (
        b"",
        constants * 2,
        constants[:-1],
        b"\xc0",
        b"\x91\x92\x91\x01\x92\xa3int\xa1x",
        b"\xa1x",
    ):
        assert LaunchFacts.from_bytes(WHOLE) is not None
        with pytest.raises(FormatError):
            LaunchFacts.from_bytes(before + between + after)


@pytest.mark.parametrize("value", [7, True, None, "text", 2**70, -1.5, (1, 2)])
def test_facts_read_alike_are_those_of_another_kernel_with_other_constants(value):
    """Who reads many gets the last facts and plain constants as they stand; constants of other
    kinds come with facts of their own.
    """
    last = LaunchFacts.from_bytes(facts(1).to_bytes())
    found, constants = launch_spec.read_alike(facts(value).to_bytes())
    if constants is None:
        assert found == facts(value)
    else:
        assert found.options is last.options
        assert launch_spec.with_constants(found, constants) == facts(value)
    assert (constants is None) == isinstance(value, (float, tuple)) or value == 2**70


@given(st.integers(0, len(WHOLE) - 1), st.binary(max_size=4), st.integers(0, 3))
def test_damaged_facts_are_refused_when_they_are_read_alike(at, inserted, dropped):
    """Whatever `from_bytes` refuses is refused, and what it lets through is the same."""
    data = WHOLE[:at] + inserted + WHOLE[at + dropped :]
    expected = outcome(data)
    LaunchFacts.from_bytes(facts(1).to_bytes())
    try:
        found, constants = launch_spec.read_alike(data)
    except FormatError:
        assert isinstance(expected, str)
    else:
        assert expected == (
            found if constants is None else launch_spec.with_constants(found, constants)
        )
