# SPDX-License-Identifier: Apache-2.0
"""A config is what reaches the compiler: equal whatever the order, different in any count or
option, and able to travel.
"""

import pickle
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bundler.errors import ConfigError, FormatError
from bundler.format import wire
from bundler.runtime.configs import Config, unique

BASE = {
    "kwargs": {"BLOCK": 128, "EVEN": True},
    "num_warps": 4,
    "num_stages": 2,
    "options": {"enable_fp_fusion": False},
}


def config(**changes):
    return Config(**{**BASE, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"kwargs": {"BLOCK": 64, "EVEN": True}},
        {"kwargs": {"BLOCK": 128, "EVEN": 1}},
        {"kwargs": {"BLOCK": 128}},
        {"num_warps": 8},
        {"num_stages": 3},
        {"num_ctas": 2},
        {"maxnreg": 128},
        {"options": {}},
        {"options": {"enable_fp_fusion": True}},
    ],
)
def test_whatever_reaches_the_compiler_makes_another_config(changes):
    """A value, a count or an option: each makes another key, hash and digest, and both configs
    survive a removal of duplicates.
    """
    base, other = config(), config(**changes)
    assert base != other
    assert base.key != other.key
    assert base.digest != other.digest
    assert unique([base, other, base]) == [base, other]


@pytest.mark.parametrize(
    "changes",
    [
        {"kwargs": {"EVEN": True, "BLOCK": 128}},
        {"pre_hook": print},
        {"origin": "somewhere"},
        {"dynamic_scale": False},
    ],
)
def test_what_the_compiler_does_not_see_makes_none(changes):
    """Order, a hook, an origin and the wish to scale make no other config."""
    base, other = config(), config(**changes)
    assert base == other
    assert hash(base) == hash(other)
    assert base.digest == other.digest
    assert unique([base, other]) == [base]


values = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
)
names = st.text("abcXYZ_", min_size=1, max_size=4)


@given(
    st.dictionaries(names, values, max_size=4), st.integers(1, 32), st.integers(0, 5), st.booleans()
)
def test_a_config_survives_every_form(kwargs, warps, stages, scale):
    """Through msgpack, a dictionary, a pickle and Triton's own class it stays itself, and so does
    its digest.
    """
    base = Config(
        kwargs, num_warps=warps, num_stages=stages, options={"an_option": 1}, dynamic_scale=scale
    )
    travelled = Config.from_wire(wire.unpack(wire.pack(base.to_wire()), "config"))
    assert travelled == base
    assert travelled.dynamic_scale == scale
    assert list(travelled.kwargs) == list(base.kwargs)
    assert Config.from_dict(base.to_dict()) == base
    copied = pickle.loads(pickle.dumps(base))
    assert (copied, copied.key, copied.digest) == (base, base.key, base.digest)
    assert Config.from_triton(base.to_triton(SimilarToTritons)) == base


class SimilarToTritons:
    """Shaped like Triton's class."""

    def __init__(
        self,
        kwargs,
        num_warps=4,
        num_stages=3,
        num_ctas=1,
        maxnreg=None,
        pre_hook=None,
        an_option=None,
    ):
        self.kwargs, self.num_warps, self.num_stages, self.num_ctas = (
            kwargs,
            num_warps,
            num_stages,
            num_ctas,
        )
        self.maxnreg, self.pre_hook, self.an_option = maxnreg, pre_hook, an_option

    def all_kwargs(self):
        return {**self.kwargs, "num_warps": self.num_warps, "an_option": self.an_option}


@pytest.mark.release
@pytest.mark.toolchain
def test_tritons_own_configs_are_taken_over():
    """Triton's Config comes over with every count, its hook, and what else it hands to the
    compiler; and back.
    """
    triton = pytest.importorskip("triton")
    theirs = triton.Config(
        {"BLOCK": 64}, num_warps=8, num_stages=1, num_ctas=2, maxnreg=96, pre_hook=print
    )
    ours = Config.from_triton(theirs)
    assert ours == Config({"BLOCK": 64}, 8, 1, 2, 96)
    assert ours.pre_hook is print
    assert ours.to_triton(triton.Config) == theirs
    assert ours.all_kwargs() == theirs.all_kwargs()
    with_ir = Config.from_triton(triton.Config({"BLOCK": 64}, ir_override="kernel.ttir"))
    assert with_ir.options == {"ir_override": "kernel.ttir"}
    assert with_ir != Config({"BLOCK": 64})
    with pytest.raises(ConfigError, match="this Triton cannot hold"):
        Config({}, options={"no_such_option": 1}).to_triton(triton.Config)


@pytest.mark.release
@pytest.mark.toolchain
def test_types_of_the_compiler_travel():
    """A Triton type among the values has an encoding, so the config is portable and equal after the
    journey.
    """
    tl = pytest.importorskip("triton.language")
    base = Config({"ACC": tl.float32})
    assert base.portable
    assert Config.from_wire(base.to_wire()) == base
    assert base != Config({"ACC": tl.float16})


def test_a_value_that_cannot_travel_says_so():
    """An object has no encoding: the config works and compares within the process, and is refused
    when it should travel.
    """
    thing, other = object(), object()
    base = Config({"THING": thing})
    assert not base.portable
    assert base == Config({"THING": thing})
    assert base != Config({"THING": other})
    assert Config({"THING": {1, 2}}) != Config({"THING": {1, 2}})
    with pytest.raises(ConfigError, match="'THING' cannot travel"):
        base.to_wire()
    with pytest.raises(ConfigError, match="'THING' cannot travel"):
        _ = base.digest


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_warps": 0}, "num_warps is a number of at least 1, got 0"),
        ({"num_warps": True}, "num_warps"),
        ({"num_warps": "4"}, "num_warps"),
        ({"num_warps": None}, "num_warps"),
        ({"num_stages": -1}, "num_stages"),
        ({"num_ctas": 1.0}, "num_ctas"),
        ({"maxnreg": 0}, "maxnreg"),
        ({"kwargs": [("BLOCK", 1)]}, "kwargs map names to values"),
        ({"kwargs": {1: 2}}, "kwargs map names to values"),
        ({"kwargs": {"num_warps": 4}}, "'num_warps' is|num_warps is a field of its own"),
        ({"options": {"maxnreg": 4}}, "maxnreg is a field of its own"),
        ({"kwargs": {"debug": 1}, "options": {"debug": 1}}, "'debug' is both"),
    ],
)
def test_bad_fields_are_refused(changes, words):
    """Each wrong field is named, with what was expected."""
    with pytest.raises(ConfigError, match=words):
        config(**changes)


@pytest.mark.parametrize("thing", [None, {"BLOCK": 1}, SimpleNamespace(kwargs=None), "BLOCK=1"])
def test_what_is_no_config_is_refused(thing):
    """Something that is not shaped like a config is named."""
    with pytest.raises(ConfigError, match="expected a Config"):
        Config.from_triton(thing)
    with pytest.raises(ConfigError, match="expected a mapping"):
        Config.from_dict(thing)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:-1],
        lambda data: [*data, 1],
        lambda data: [[["A", ["int", 1]], ["A", ["int", 2]]], *data[1:]],
        lambda data: [[["num_warps", ["int", 1]]], *data[1:]],
        lambda data: [[["A", ["no such tag", 1]]], *data[1:]],
        lambda data: [[["A"]], *data[1:]],
        lambda data: [data[0], 0, *data[2:]],
        lambda data: [data[0], "4", *data[2:]],
        lambda data: [data[0], -4, *data[2:]],
        lambda data: {},
    ],
)
def test_malformed_bytes_are_refused(change):
    """A stored config that is not one is a format error, never a config."""
    with pytest.raises(FormatError):
        Config.from_wire(change(config().to_wire()))


def test_a_config_cannot_be_changed_and_copies_can():
    """Mappings are read-only; changed copies leave the original alone."""
    given = {"BLOCK": 128}
    base = Config(given)
    given["BLOCK"] = 1
    assert base.kwargs["BLOCK"] == 128
    with pytest.raises(TypeError):
        base.kwargs["BLOCK"] = 64
    assert base.with_kwargs(BLOCK=64, R=2).kwargs == {"BLOCK": 64, "R": 2}
    assert base.without_kwargs("BLOCK", "R").kwargs == {}
    assert base.kwargs == {"BLOCK": 128}


def test_a_config_reads_well():
    """People see parameters, counts and options; defaults that hardly anybody sets stay away."""
    assert str(Config({"BLOCK": 128})) == "BLOCK=128, num_warps=4, num_stages=3"
    shown = str(Config({}, 8, 1, 2, 96, {"debug": True}))
    assert shown == "num_warps=8, num_stages=1, num_ctas=2, maxnreg=96, debug=True"
