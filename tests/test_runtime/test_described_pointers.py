# SPDX-License-Identifier: Apache-2.0
"""Kernels that take a descriptor in the place of a pointer: calls pass the tensor, whichever form a
config has, and what reaches the driver is what a descriptor of Triton's would be.
"""

from dataclasses import dataclass

import launch_calls as calls
import pytest

from bundler.errors import CannotLaunchStatically, ConfigError, NotFound
from bundler.format.bundle_union import merge
from bundler.format.entries import Target
from bundler.runtime import DryDriver, load
from bundler.runtime.tuning.candidate_compiler import expand, make
from bundler.toolchain import jit_specialization

pytestmark = [pytest.mark.toolchain, pytest.mark.release]
HALF, OUT = calls.HALF, calls.Tensor("float16", calls.ADDRESS + 8192)
TARGET = Target.parse("cuda:90")
SPECS = {"source": "*fp16:16", "out": "*fp16:16"}
POINTERS, DESCRIPTORS = {"TURNS": 0, "SIZE": 32}, {"TURNS": 1, "SIZE": 32}
LARGER = {"TURNS": 1, "SIZE": 64}


@dataclass(frozen=True)
class OfTriton:
    """A descriptor as Triton's launcher reads it."""

    base: calls.Tensor
    shape: tuple
    strides: tuple
    block_shape: tuple


@pytest.fixture
def corner(described_kernels):
    return described_kernels.corner


@pytest.fixture
def compiled(corner, monkeypatch, tmp_path):
    """The kernel in three forms, in one bundle."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    call = {"source": HALF, "out": OUT}
    made = [
        make(corner, expand(corner, {**call, **blocks}), TARGET)
        for blocks in (POINTERS, DESCRIPTORS, LARGER)
    ]
    return merge([one.bundle for one in made])


@pytest.fixture
def driver():
    return DryDriver("cuda", devices=2)


@pytest.fixture
def kernel(compiled, driver):
    with load(compiled, driver=driver) as found:
        yield found["corner"]


def kinds(launch):
    return [one.kind for one in launch.plan.parameters if one.argument is not None]


@pytest.mark.parametrize("blocks", [DESCRIPTORS, LARGER])
def test_a_tensor_is_passed_as_a_descriptor_of_it_would_be(kernel, driver, blocks):
    kernel[(1,)](HALF, OUT, **blocks)
    whole = OfTriton(HALF, (64, 48), (48, 1), (blocks["SIZE"], 16))
    kernel[(1,)](whole, OUT, **blocks)
    first, second = driver.launches
    assert first.parameters == second.parameters
    assert kinds(first) == ["tensormap", "i32", "i32", "i64", "i64", "pointer"]
    (found,) = first.plan.tensor_maps
    assert found.block_size == (blocks["SIZE"], 16)


def test_constants_choose_between_the_forms(kernel, driver):
    for blocks in (POINTERS, DESCRIPTORS):
        kernel[(1,)](HALF, OUT, **blocks)
    assert [kinds(one)[0] for one in driver.launches] == ["pointer", "tensormap"]


def test_each_address_has_its_map(kernel, driver):
    """The driver is asked once for each, however often they are launched."""
    asked, ask = [], driver.tensor_map
    driver.tensor_map = lambda *args: asked.append(args) or ask(*args)
    other = calls.Tensor("float16", calls.ADDRESS + 4096)
    for tensor in (HALF, other, HALF, other):
        kernel[(1,)](tensor, OUT, **DESCRIPTORS)
    a, b, c, d = (one.parameters for one in driver.launches)
    assert (a == c, b == d, a == b) == (True, True, False)
    assert len(asked) == 2


def test_a_handle_takes_the_tensor_too(kernel, driver):
    handle = kernel.handle(HALF, OUT, **DESCRIPTORS)
    handle.launch(1, 1, 1, 0, *handle.values(HALF, OUT, **DESCRIPTORS))
    kernel[(1,)](HALF, OUT, **DESCRIPTORS)
    assert driver.launches[0] == driver.launches[1]


def test_what_no_descriptor_can_be_made_of_is_refused(kernel, driver):
    """An address between 16 bytes, other elements, memory of the host or of another device."""
    odd = calls.Tensor("float16", calls.ADDRESS + 8)
    with pytest.raises(NotFound, match="source is divisible by 16, here it is not"):
        kernel[(1,)](odd, OUT, **DESCRIPTORS)
    with pytest.raises(NotFound, match=r"source is tensordesc<fp16.*here \*fp32"):
        kernel[(1,)](calls.X, OUT, **DESCRIPTORS)
    elsewhere = calls.Tensor("float16", calls.ADDRESS + 4096, index=1)
    values = kernel.handle(HALF, OUT, **DESCRIPTORS).values
    for tensor, words in ((elsewhere, "in device 1"), (calls.Tensor("float16", 4096, -1), "host")):
        with pytest.raises(CannotLaunchStatically, match=words):
            kernel[(1,)](tensor, OUT, **DESCRIPTORS)
        with pytest.raises(CannotLaunchStatically, match=words):
            values(tensor, OUT, **DESCRIPTORS)
    driver.host_addresses.add(4096)
    with pytest.raises(CannotLaunchStatically, match="host memory"):
        values(4096, OUT, **DESCRIPTORS)
    assert driver.launches == []


def test_builds_and_calls_ask_for_one_kernel(corner, compiled):
    """What is compiled ahead is found by its key."""
    ahead = {
        key
        for blocks in (POINTERS, DESCRIPTORS, LARGER)
        for found in jit_specialization.specialize(corner, SPECS, blocks, TARGET)
        for key, _ in found.keys
    }
    assert {one.key for one in compiled.kernels} == ahead
    with pytest.raises(ConfigError, match="takes it for"):
        list(jit_specialization.specialize(corner, SPECS | {"out": "i8"}, POINTERS, TARGET))
