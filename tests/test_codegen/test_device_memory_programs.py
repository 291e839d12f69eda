# SPDX-License-Identifier: Apache-2.0
"""Programs on a `DeviceMemory`: their numbers, and that 10,000 calls of one leave nothing behind."""

import gc
import json

import numpy
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from bundler.codegen.program import GenerateOptions, generate  # noqa: E402
from bundler.errors import NotFound, OutOfDeviceMemory  # noqa: E402
from bundler.runtime import DeviceMemory, DryDriver  # noqa: E402
from bundler.runtime.program.bundle_programs import load_program  # noqa: E402


@pytest.mark.slow
def test_programs_have_eager_numbers_without_torch_for_memory(interpreted):
    """Results, views of inputs, what is changed in place; memory is free again after each call."""
    found = json.loads(interpreted("device_memory_worker.py"))
    assert max(found["off"]) < 1e-5
    assert found["views"]
    assert found["shapes"] == [[32, 48], [48, 33]]
    assert (found["held"], found["left"], found["order"]) == (4, 0, [])


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """A program of two kernels with a buffer between them, and random numbers."""
    options = GenerateOptions(sources=str(tmp_path_factory.mktemp("sources")), name="drawn")

    def function(a):
        return (torch.rand_like(a) * a).sum(0) + a.amax()

    return generate(function, [torch.ones(64, 48)], options=options).build(["cuda:90"])


def test_ten_thousand_calls_leave_nothing_behind(bundle):
    """On a stream of its own, where kernels are launched, too; without the collector."""
    driver = DryDriver(memory_bytes=1 << 20)
    memory = DeviceMemory(driver=driver)
    program = load_program(bundle, memory=memory, seed=1)
    (pool,) = driver.pools
    values, stream = numpy.ones((64, 48), "float32"), memory.new_stream()
    given = memory.put(values)
    program(given)
    gc.disable()
    try:
        with memory.use(stream):
            for _ in range(10_000):
                (result,) = program(given)
            assert {launch.stream for launch in driver.launches[-3:]} == {stream.handle}
        del result, given
        assert pool.live == {}
        assert pool.allocations > 30_000
    finally:
        gc.enable()


def test_a_program_takes_tensors_of_every_library(bundle):
    """numpy's and torch's of the host, since the driver has no other; by the same address."""
    driver = DryDriver("cuda")
    program = load_program(bundle, driver=driver)  # memory of its own
    for given in (numpy.ones((64, 48), "float32"), torch.ones(64, 48, requires_grad=True)):
        driver.launches.clear()
        (result,) = program(given)
        assert numpy.from_dlpack(result).shape == (48,)
        address = given.ctypes.data if isinstance(given, numpy.ndarray) else given.data_ptr()
        parameters = b"".join(launch.parameters for launch in driver.launches)
        assert address.to_bytes(8, "little") in parameters


def test_a_device_that_is_full_raises_and_frees(bundle):
    """The error says what was asked; what the call had is free again."""
    driver = DryDriver("cuda", memory_bytes=64 * 48 * 4 + 100)
    memory = DeviceMemory(driver=driver)
    given = memory.put(numpy.ones((64, 48), "float32"))
    program = load_program(bundle, memory=memory)
    with pytest.raises(OutOfDeviceMemory) as caught:
        program(given)
    assert caught.value.total == 64 * 48 * 4 + 100
    del caught
    gc.collect()
    assert len(driver.pools[0].live) == 1


def test_a_program_that_calls_torch_is_refused_when_it_is_loaded(tmp_path):
    """By the operator's name, and with what to pass."""
    options = GenerateOptions(sources=str(tmp_path))
    made = generate(lambda a: (a @ a).relu(), [torch.ones(8, 8)], options=options)
    with pytest.raises(NotFound, match=r"operator aten\.mm\.default.*TorchMemory"):
        load_program(made.build(["cuda:90"]), driver=DryDriver("cuda"))
