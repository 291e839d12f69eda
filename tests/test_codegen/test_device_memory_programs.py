# SPDX-License-Identifier: Apache-2.0
"""Programs on a `DeviceMemory`: their numbers, and that 10,000 calls of one leave nothing
behind.
"""

import gc
import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from bundler.codegen.program import GenerateOptions, generate  # noqa: E402
from bundler.errors import (  # noqa: E402
    CannotLaunchStatically,
    ConfigError,
    NotFound,
    OutOfDeviceMemory,
)
from bundler.runtime import DeviceMemory, DryDriver  # noqa: E402
from bundler.runtime.program.bundle_programs import load_program  # noqa: E402
from bundler.runtime.program.program_weights import bound_weights  # noqa: E402
from bundler.toolchain.torch_memory import TorchMemory  # noqa: E402


@pytest.mark.slow
def test_programs_have_eager_numbers_without_torch_for_memory(interpreted, tmp_path):
    """Results, views of inputs, what is changed in place, weights of files; memory is free again
    after each call.
    """
    pytest.importorskip("safetensors")
    found = json.loads(interpreted("device_memory_worker.py", str(tmp_path)))
    shared = ("norm.weight", "same.0")
    names = set(map(tuple, found["weights"].values()))
    assert names == {("norm.bias",), shared, ("scale",), ("table",)}
    assert max(found["off"]) < 1e-4
    assert found["views"]
    assert found["shapes"] == [[32, 48], [48, 33]]
    assert (found["held"], found["left"], found["order"]) == (6, 0, [])


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
    values, stream = np.ones((64, 48), "float32"), memory.new_stream()
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
    for given in (np.ones((64, 48), "float32"), torch.ones(64, 48, requires_grad=True)):
        driver.launches.clear()
        (result,) = program(given)
        assert np.from_dlpack(result).shape == (48,)
        address = given.ctypes.data if isinstance(given, np.ndarray) else given.data_ptr()
        parameters = b"".join(launch.parameters for launch in driver.launches)
        assert address.to_bytes(8, "little") in parameters


def test_a_launch_does_not_ask_where_tensors_lie(bundle, monkeypatch):
    """Those of the memory know; of another library's the driver is asked once a call."""
    driver, asked = DryDriver("cuda"), []
    monkeypatch.setattr(driver, "pointer_device", lambda address: asked.append(address) or 0)
    memory = DeviceMemory(driver=driver)
    program = load_program(bundle, memory=memory)
    given = memory.put(np.ones((64, 48), "float32"))
    there = np.ones((64, 48), "float32")
    for one in (given, there):
        program(one)
    asked.clear()
    program(given)
    assert asked == []
    program(there)
    assert asked == [there.ctypes.data]


def test_a_device_that_is_full_raises_and_frees(bundle):
    """The error says what was asked; what the call had is free again."""
    driver = DryDriver("cuda", memory_bytes=64 * 48 * 4 + 100)
    memory = DeviceMemory(driver=driver)
    given = memory.put(np.ones((64, 48), "float32"))
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


class Net(torch.nn.Module):
    """Has a shared parameter, numbers, a buffer that is not saved, and a parameter without use."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(48)
        self.again = self.norm
        self.scale = torch.nn.Parameter(torch.tensor(2.0))
        self.register_buffer("table", torch.ones(48, dtype=torch.bfloat16), persistent=False)
        self.register_buffer("count", torch.tensor(3.0))
        self.unused = torch.nn.Linear(2, 2)

    def forward(self, a):
        return self.again(a) * self.scale + self.table / self.count + EXTRA


EXTRA = torch.full((48,), 3.0)
NAMES = {
    ("norm.weight", "again.weight"): ("float32", (48,)),
    ("norm.bias", "again.bias"): ("float32", (48,)),
    ("scale",): ("float32", ()),
    ("table",): ("bfloat16", (48,)),
    ("count",): ("float32", ()),
}


@pytest.mark.parametrize(
    ("device", "called"), [(None, "whole"), ("cuda", "whole"), (None, "bound")]
)
def test_a_program_knows_its_weights_by_the_names_of_the_module(tmp_path, device, called):
    """Whether it is traced for a device that is not here, or the function is the module's
    method.
    """
    net = Net().requires_grad_(False)
    function = net if called == "whole" else net.forward
    given = torch.ones(4, 48)
    if device is None:
        made = generate(function, [given])
    else:
        # What is no part of a module would stay on the CPU.
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(globals(), "EXTRA", 3.0)
            made = generate(function, [given], device=device)
    weights = made.plan.weights.values()
    found = {one.names: (one.spec.dtype, one.spec.sizes) for one in weights if one.names}
    assert found == NAMES
    unnamed = [name for name, one in made.plan.weights.items() if not one.names]
    assert len(unnamed) == (device is None)
    assert {one.spec.device for one in weights} == {""}


def test_weights_of_a_file_are_what_kernels_are_launched_with(tmp_path):
    """Two files, one of which has what the module does not save; an extra tensor is left alone."""
    safetensors = pytest.importorskip("safetensors.torch")
    net = Net().requires_grad_(False)
    made = generate(net, [torch.ones(4, 48)])
    bundle = made.build(["cuda:90"])
    state = {name: one for name, one in net.state_dict().items() if "again" not in name}
    safetensors.save_file(state, tmp_path / "model.safetensors")
    (extra,) = [name for name, one in made.plan.weights.items() if not one.names]
    rest = {"table": net.table, extra: made.constants[extra]}
    safetensors.save_file(rest, tmp_path / "rest.safetensors")
    driver = DryDriver("cuda")
    memory = DeviceMemory(driver=driver)
    with pytest.raises(NotFound, match=f"needs 2 more weights.*{extra}") as caught:
        load_program(bundle, memory=memory, weights=tmp_path / "model.safetensors")
    assert set(caught.value.missing) == {"table", extra}
    assert memory.pool.allocations == 0
    files = [tmp_path / "model.safetensors", tmp_path / "rest.safetensors"]
    program = load_program(bundle, memory=memory, weights=files)
    held = set(memory.pool.live.values())
    assert (memory.pool.allocations, held) == (6, {4, 96, 192})
    program(memory.put(np.ones((4, 48), "float32")))
    parameters = b"".join(launch.parameters for launch in driver.launches)
    assert all(one.to_bytes(8, "little") in parameters for one in [*memory.pool.live][:6])


def test_constants_of_every_library_are_taken(tmp_path):
    """As inputs are, by their address; what is none is refused when the program is loaded."""
    net = torch.nn.LayerNorm(48).requires_grad_(False)
    bundle = generate(net, [torch.ones(4, 48)]).build(["cuda:90"])
    driver = DryDriver("cuda")
    given = {"constant0": net.weight, "constant1": np.zeros(48, "float32")}
    program = load_program(bundle, driver=driver, constants=given)
    program(np.ones((4, 48), "float32"))
    parameters = b"".join(launch.parameters for launch in driver.launches)
    for address in (net.weight.data_ptr(), given["constant1"].ctypes.data):
        assert address.to_bytes(8, "little") in parameters
    with pytest.raises(CannotLaunchStatically, match="got list"):
        load_program(bundle, driver=driver, constants={**given, "constant0": [1.0] * 48})


def test_torch_holds_the_weights_of_a_program_that_calls_it(tmp_path):
    """Products of matrices need torch's memory, and have their weights there."""
    safetensors = pytest.importorskip("safetensors.torch")
    net = torch.nn.Linear(8, 8).requires_grad_(False)
    bundle = generate(net, [torch.ones(2, 8)]).build(["cuda:90"])
    other = torch.nn.Linear(8, 8).requires_grad_(False)
    safetensors.save_file(other.state_dict(), tmp_path / "w.safetensors")
    program = load_program(
        bundle, memory=TorchMemory(), driver=DryDriver(), weights=tmp_path / "w.safetensors"
    )
    given = torch.randn(2, 8)
    torch.testing.assert_close(program(given)[0], other(given))


class Reader(torch.nn.Module):
    """Reads a number of its own in Python."""

    def __init__(self, number):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor([number]))
        self.bias = torch.nn.Parameter(torch.ones(8))

    def forward(self, a):
        return a * READ(self.scale) + self.bias


READ = float


@pytest.mark.parametrize("read", [float, torch.Tensor.item, lambda t: t.tolist()[0]])
def test_a_number_that_python_read_is_that_of_the_file(tmp_path, monkeypatch, read):
    """The program has it from the module that it was generated of; other weights are refused."""
    safetensors = pytest.importorskip("safetensors.torch")
    monkeypatch.setitem(globals(), "READ", read)
    made = generate(Reader(2.0).requires_grad_(False), [torch.ones(4, 8)])
    assert list(made.plan.numbers) == ["scale"]
    memory = DeviceMemory(driver=DryDriver())
    for number, words in ((2.0, None), (3.0, "weight scale: the module reads its numbers")):
        path = tmp_path / "w.safetensors"
        safetensors.save_file(Reader(number).state_dict(), path)
        if words is None:
            found = bound_weights(made.plan, path, memory, {})
            assert [one.shape for one in found.values()] == [(8,)]
        else:
            with pytest.raises(ConfigError, match=words):
                bound_weights(made.plan, path, memory, {})
