# SPDX-License-Identifier: Apache-2.0
"""A `record` is a frozen dataclass: each property is compared with one that the standard library makes of the same class."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
from dataclasses import dataclass, field

import pytest

from bundler.format.records import record


def shape(make):
    """Return a class with every kind of field, made by a decorator."""

    @make(frozen=True)
    class Shape:
        """One of each."""

        name: str
        size: int = 3
        parts: list[int] = field(default_factory=list, compare=False)
        hidden: str = field(default="secret", repr=False)

        def __post_init__(self) -> None:
            if self.size < 0:
                raise ValueError(self.size)

    return Shape


Ours, Theirs = shape(record), shape(dataclass)
Ours.__qualname__ = "Ours"
BOTH = pytest.mark.parametrize("made", [Ours, Theirs], ids=["record", "dataclass"])


@record(frozen=True, repr=False)
class Single:
    """One field, and a repr of its own."""

    value: int

    def __repr__(self) -> str:
        return "<Single>"


@record(frozen=True)
class Named:
    """Equal by its own rule."""

    name: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Named) and self.name.lower() == other.name.lower()

    def __hash__(self) -> int:
        return hash(self.name.lower())


class Derived(Single):
    """Not a record, so it may have fields of its own."""


@BOTH
def test_arguments_and_defaults(made):
    """By position and by name; a factory makes a new value each time; what is missing or unknown is an error."""
    one, two = made("a", 4), made(name="a", size=4)
    assert (one.name, one.size, one.parts, one.hidden) == ("a", 4, [], "secret")
    assert one.parts is not two.parts
    assert list(inspect.signature(made).parameters) == ["name", "size", "parts", "hidden"]
    for wrong in ({}, {"name": "a", "colour": 1}):
        with pytest.raises(TypeError):
            made(**wrong)
    with pytest.raises(ValueError, match="-1"):
        made("a", -1)


@BOTH
def test_equality_and_hash_are_by_the_compared_fields(made):
    """And only within one class."""
    assert made("a", parts=[1]) == made("a", parts=[2])
    assert hash(made("a", parts=[1])) == hash(made("a", parts=[2]))
    assert made("a") != made("b")
    assert made("a") != ("a", 3, "secret")
    assert Ours("a") != Theirs("a")


@BOTH
def test_it_refuses_changes(made):
    """With the error of the standard library."""
    one = made("a")
    for change in (lambda: setattr(one, "name", "b"), lambda: setattr(one, "new", 1), lambda: delattr(one, "name")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            change()
    assert one == made("a")


@BOTH
def test_the_standard_library_takes_it_for_a_dataclass(made):
    """Its fields, copies with changes, patterns."""
    assert dataclasses.is_dataclass(made)
    assert [each.name for each in dataclasses.fields(made)] == ["name", "size", "parts", "hidden"]
    assert dataclasses.replace(made("a", 5), name="b") == made("b", 5)
    assert dataclasses.asdict(made("a", 5, [1])) == {"name": "a", "size": 5, "parts": [1], "hidden": "secret"}
    assert made.__match_args__ == ("name", "size", "parts", "hidden")


def test_the_repr_is_the_same():
    """Field by field, without those that say not to."""
    assert (
        repr(Ours("a", 5)).partition("(")[2] == repr(Theirs("a", 5)).partition("(")[2] == "name='a', size=5, parts=[])"
    )


def test_methods_of_the_class_stay():
    """Its own equality, hash and repr."""
    assert Named("A") == Named("a")
    assert len({Named("A"), Named("a")}) == 1
    assert repr(Single(1)) == "<Single>"
    assert Single(1) == Single(1)
    assert Single(1) != Single(2)
    assert len({Single(1), Single(1)}) == 1


def test_copies_and_pickles_are_equal():
    """Of either kind."""
    one = Single(7)
    assert copy.copy(one) == copy.deepcopy(one) == pickle.loads(pickle.dumps(one)) == one


def test_a_class_that_derives_from_it_has_attributes_of_its_own():
    """But cannot change the fields."""
    one = Derived(1)
    one.more = 2
    assert one.more == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.value = 2


@pytest.mark.parametrize("make", [record, dataclass], ids=["record", "dataclass"])
def test_order_is_by_the_compared_fields(make):
    """Field by field, and only within one class."""

    @make(frozen=True, order=True)
    class Version:
        """Its note counts for nothing."""

        major: int
        minor: int
        note: str = field(default="", compare=False)

    first, second = Version(1, 9, "b"), Version(2, 0, "a")
    assert first < second
    assert second > first
    assert first <= Version(1, 9) <= second
    assert second >= Version(2, 0) >= first
    assert sorted([second, first]) == [first, second]
    with pytest.raises(TypeError):
        _ = first < (2, 0)


def test_what_is_not_frozen_is_refused():
    """It would be a dataclass like any other."""
    with pytest.raises(TypeError, match="a record is frozen"):

        @record(frozen=False)
        class Loose:
            value: int
