# SPDX-License-Identifier: Apache-2.0
"""What a function says of the descriptors that the host makes for it: what is read, and what is
left alone because it says something else.
"""

import pytest

from bundler.format.constant_values import encode
from bundler.format.host_descriptors import HostDescriptor, by_place, declared
from bundler.format.launch_spec import Argument

ONE = ("a", (64, 32), (32, 1), ("YBLOCK", 16))


def argument(name, default=None, *, constexpr=False):
    kept = None if default is None else encode(default)
    return Argument(name, "", kept, constexpr, False, False)


def test_what_a_function_says():
    found = declared(("TURNS", ONE, ("b", (8,), (1,), (1,))))
    assert found.condition == "TURNS"
    assert found.descriptors == (HostDescriptor(*ONE), HostDescriptor("b", (8,), (1,), (1,)))


@pytest.mark.parametrize(
    "default",
    [
        None,
        7,
        "TURNS",
        (),
        ("TURNS",),
        (7, ONE),
        ("TURNS", 7),
        ("TURNS", ("a", (64, 32), (32, 1))),
        ("TURNS", ("a", (64, 32), (1,), ("YBLOCK", 16))),
        ("TURNS", ("a", (), (), ())),
        ("TURNS", ("a", (64.0,), (1,), (1,))),
        ("TURNS", ("a", (True,), (1,), (1,))),
        ("TURNS", ("a", (64,), (-1,), (1,))),
        ("TURNS", ("a", (64,), (1,), (None,))),
        ("TURNS", (7, (64,), (1,), (1,))),
        ("TURNS", ONE, ("a", 64, (1,), (1,))),
    ],
)
def test_what_says_something_else_is_nothing(default):
    assert declared(default) is None


def test_arguments_are_found_by_their_place():
    default = ("TURNS", ONE, ("nobody", (8,), (1,), (1,)))
    names = [argument("b"), argument("a"), argument("DESCRIPTORS", default, constexpr=True)]
    assert by_place(names) == {1: HostDescriptor(*ONE)}


@pytest.mark.parametrize(
    "last",
    [
        argument("OTHER", ("TURNS", ONE), constexpr=True),
        argument("DESCRIPTORS", ("TURNS", ONE)),
        argument("DESCRIPTORS", constexpr=True),
        argument("DESCRIPTORS", 4, constexpr=True),
    ],
)
def test_functions_without_any(last):
    assert by_place([argument("a"), last]) == {}
